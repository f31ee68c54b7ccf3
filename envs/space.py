"""The search space of a workload: strategies as vectors of table indices."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, final

import numpy as np
from gymnasium.spaces import MultiDiscrete
from numpy.typing import NDArray

from sim.optimum.spaces import space_of
from sim.strategy import Strategy
from sim.workload import Workload

Action = NDArray[np.int64]
"""Indices into the tables of a `StrategySpace`, [A]: tp, ep, pp, batch, one choice per fused op; extended: cp, dp."""
ActionLike = NDArray[np.integer[Any]]
"""What is taken for an action: any integer type."""

_DEGREES = ("tp", "ep", "pp", "batch")
_OWN_DEGREES = ("cp", "dp")


@final
class StrategySpace:
    """All strategies that a workload's degree tables and choices span, feasible or not.

    Example:
        >>> from sim.config.catalog import load_workload
        >>> space = StrategySpace(load_workload("gpt_moe_1_2t_16k"))
        >>> space.size
        2763493200
        >>> space.decode(space.nvec - 1).batch
        4096

    Args:
        workload: What the space belongs to.
        fixed_dims: Dims of every strategy, where only degrees and batch are searched.

    Attributes:
        workload: What the space belongs to.
        names: Name of each coordinate, [A]: the degrees, the fused ops; in the extended space attention's cp and dp.
        sizes: Number of values of each coordinate, [A].
    """

    def __init__(self, workload: Workload, *, fixed_dims: tuple[int, ...] | None = None) -> None:
        space = space_of(workload)
        choices: Mapping[str, tuple[int, ...]] = space.choices if fixed_dims is None else {}
        self._own = _OWN_DEGREES if workload.space == "extended" and fixed_dims is None else ()
        self._ops = len(choices)
        self._fixed_dims = fixed_dims
        self.workload = workload
        self.names: tuple[str, ...] = (*_DEGREES, *choices, *self._own)
        self._tables: tuple[tuple[int, ...], ...] = (
            *(space.tp, space.ep, space.pp, space.batch),
            *choices.values(),
            *((space.cp, space.dp) if self._own else ()),
        )
        self.sizes: tuple[int, ...] = tuple(len(table) for table in self._tables)
        self._nvec = np.array(self.sizes, dtype=np.int64)
        self._movable = np.flatnonzero(self._nvec > 1)

    @property
    def nvec(self) -> NDArray[np.int64]:
        """Number of values of each coordinate, [A], a new array."""
        return self._nvec.copy()

    @property
    def degrees_only(self) -> bool:
        """Whether the dims are fixed, so that degrees and batch alone are searched."""
        return self._fixed_dims is not None

    @property
    def size(self) -> int:
        """Number of strategies, exact."""
        return math.prod(self.sizes)

    @property
    def action_space(self) -> MultiDiscrete:
        """The space in gymnasium's words."""
        return MultiDiscrete(self._nvec)

    def decode(self, action: ActionLike) -> Strategy:
        """Strategy that an action [A] stands for.

        Raises:
            ValueError: The action has another shape, is not integer or leaves a table.
        """
        return self._strategy(self.indices(action))

    def encode(self, strategy: Strategy) -> Action:
        """Action [A] that stands for a strategy.

        Raises:
            ValueError: A degree is not in its table, or the dims do not fit the workload's ops.
        """
        if strategy.extended and not self._own:
            raise ValueError(f"{self.workload.name} searches the space {self.workload.space!r}: cp is 1 and dp is ep")
        own = (strategy.cp, strategy.attention_dp) if self._own else ()
        values = (strategy.tp, strategy.ep, strategy.pp, strategy.batch, *self._searched_dims(strategy.dims), *own)
        for name, value, table in zip(self.names, values, self._tables, strict=True):
            if value not in table:
                raise ValueError(f"{name} is {value}, but {self.workload.name} searches only {table}")
        return np.array([table.index(value) for value, table in zip(values, self._tables, strict=True)], np.int64)

    def indices(self, action: ActionLike) -> tuple[int, ...]:
        """An action [A] as plain ints: hashable and checked.

        Raises:
            ValueError: See `decode`.
        """
        array = np.asarray(action)
        if array.shape != self._nvec.shape or array.dtype.kind not in "iu":
            raise ValueError(
                f"expected an integer action of shape {self._nvec.shape}, got shape {array.shape} of {array.dtype}"
            )
        indices: tuple[int, ...] = tuple(array.tolist())
        for position, (index, size) in enumerate(zip(indices, self.sizes, strict=True)):
            if not 0 <= index < size:
                raise ValueError(
                    f"action[{position}] ({self.names[position]}) is {index}, expected one of 0 to {size - 1}"
                )
        return indices

    def rank(self, action: ActionLike) -> int:
        """Position of an action [A] among all, 0 to size - 1; no two share one."""
        rank = 0
        for index, size in zip(self.indices(action), self.sizes, strict=True):
            rank = rank * size + index
        return rank

    def sample(self, rng: np.random.Generator) -> Action:
        """Action [A], every one equally likely."""
        return rng.integers(self._nvec)

    def neighbour(self, action: ActionLike, rng: np.random.Generator) -> Action:
        """Copy of an action [A] with one coordinate changed: coordinate and new value uniformly.

        A space of a single strategy has no neighbours; there it is the action itself.
        """
        moved = np.array(action, dtype=np.int64)
        if self._movable.size:
            coordinate = self._movable[rng.integers(self._movable.size)]
            step = rng.integers(1, self._nvec[coordinate])
            moved[coordinate] = (moved[coordinate] + step) % self._nvec[coordinate]
        return moved

    def _searched_dims(self, dims: tuple[int, ...]) -> tuple[int, ...]:
        if self._fixed_dims is not None:
            if dims != self._fixed_dims:
                raise ValueError(f"expected dims {self._fixed_dims}, which are not searched here, got {dims}")
            return ()
        if len(dims) != self._ops:
            raise ValueError(
                f"expected {self._ops} dims, got {len(dims)}: one per fused op of {self.workload.model.name}"
            )
        return dims

    def _strategy(self, indices: tuple[int, ...]) -> Strategy:
        tp, ep, pp, batch, *rest = (table[index] for index, table in zip(indices, self._tables, strict=True))
        dims, (cp, dp) = self._fixed_dims or tuple(rest[: self._ops]), rest[self._ops :] or (1, ep)
        # The paper's strategies are themselves here too.
        return Strategy(tp, ep, pp, batch, dims, cp, None if (cp, dp) == (1, ep) else dp)
