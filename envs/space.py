"""The search space of a workload: strategies as vectors of table indices."""

from __future__ import annotations

import math
from functools import cached_property
from typing import final

import numpy as np
from numpy.typing import NDArray

from envs.actions import Action, ActionLike, Actions, Factored, doublings, is_long
from sim.batched import Strategies
from sim.config.files import CatalogError
from sim.ops.dims import spread_choices
from sim.optimum.spaces import Coordinate, space_of
from sim.replay.replica_sets import ServingSpace
from sim.strategy import Strategy
from sim.workload import Workload

_DEGREES = ("tp", "ep", "pp", "batch")


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
        fixed_dims: One choice per fused op of every strategy, where only degrees and batch are searched.

    Attributes:
        workload: What the space belongs to.
        coordinates: What an action chooses, [A]: degrees, fused ops; in the extended space attention's cp and dp; in
            phase traffic how replicas serve together.
        names: Name of each coordinate, [A].
        sizes: Number of values of each coordinate, [A].
    """

    def __init__(self, workload: Workload, *, fixed_dims: tuple[int, ...] | None = None) -> None:
        space = space_of(workload)
        if space.vocabulary:
            raise CatalogError(
                f"{workload.name}: the generated space is solved exactly (raysearch optimum), not searched; search "
                "'extended', which has all of it but the choices of embedding and LM head"
            )
        everything = space.coordinates
        if fixed_dims is not None:
            everything = tuple(each for each in everything if each.name in _DEGREES)
        self._serving = ServingSpace(workload)
        self.coordinates: tuple[Coordinate, ...] = (*everything, *self._serving.coordinates)
        self._ops = len(space.choices) if fixed_dims is None else 0
        self._own = len(everything) > len(_DEGREES) + self._ops
        self._fixed_dims = None if fixed_dims is None else spread_choices(workload, fixed_dims)
        self.workload = workload
        self.names: tuple[str, ...] = tuple(each.name for each in self.coordinates)
        self._tables: tuple[tuple[int, ...], ...] = tuple(each.values for each in self.coordinates)
        self._places = [{value: place for place, value in enumerate(table)} for table in self._tables]
        self.sizes: tuple[int, ...] = tuple(len(table) for table in self._tables)
        self._arrays = [np.array(table, np.int64) for table in self._tables]
        self._nvec = np.array(self.sizes, dtype=np.int64)
        self._doublings = {
            place: doublings(each.values) for place, each in enumerate(self.coordinates) if is_long(each)
        }
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
    def action_space(self) -> Actions:
        """The space in gymnasium's words."""
        return Actions(self.coordinates)

    @cached_property
    def factored(self) -> Factored:
        """Actions without long coordinates, for searchers that keep a figure per value."""
        return Factored(self.coordinates)

    @cached_property
    def _actions(self) -> Actions:
        return self.action_space

    def decode(self, action: ActionLike) -> Strategy:
        """Strategy that an action [A] stands for.

        Raises:
            ValueError: The action has another shape, is not integer or leaves a table.
        """
        return self._strategy(self.indices(action))

    def strategies(self, actions: ActionLike) -> Strategies:
        """The strategies that actions `[n, A]` stand for, as columns, each of one replica.

        Raises:
            ValueError: See `decode`.
        """
        if actions.ndim != 2 or actions.shape[1:] != self._nvec.shape or actions.dtype.kind not in "iu":
            shape = f"[n, {len(self.sizes)}]"
            raise ValueError(f"expected integer actions {shape}, got shape {actions.shape} of {actions.dtype}")
        for row in np.flatnonzero(((actions < 0) | (actions >= self._nvec)).any(axis=1)):
            self.indices(actions[row])  # raises
        values = [table[column] for table, column in zip(self._arrays, actions.T, strict=True)]
        tp, ep, pp, batch, *rest = values
        dims, own = rest[: self._ops], rest[self._ops : self._ops + 2 * self._own]
        choices = np.stack(dims, axis=1) if dims else np.tile(np.array(self._fixed_dims, np.int64), (len(actions), 1))
        cp, dp = own or (np.ones_like(ep), ep)
        return Strategies(tp, ep, pp, batch, cp, np.where(dp == 0, ep, dp), choices)

    def encode(self, strategy: Strategy) -> Action:
        """Action [A] that stands for a strategy.

        Raises:
            ValueError: A degree is not in its table, or the dims do not fit the workload's ops.
        """
        if strategy.extended and not self._own:
            raise ValueError(f"{self.workload.name} searches the space {self.workload.space!r}: cp is 1 and dp is ep")
        own = (strategy.cp, strategy.attention_dp) if self._own else ()
        values = (strategy.tp, strategy.ep, strategy.pp, strategy.batch, *self._searched_dims(strategy.dims), *own)
        served = self._serving.values(strategy.served)
        values += tuple(served[each.name] for each in self._serving.coordinates)
        for name, value, places in zip(self.names, values, self._places, strict=True):
            if value not in places:
                raise ValueError(f"{name} is {value}, but {self.workload.name} searches only {tuple(places)}")
        return np.array([places[value] for value, places in zip(values, self._places, strict=True)], np.int64)

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

    def key(self, action: ActionLike) -> int:
        """The `rank` of the one action that stands for all that do the same as an action [A]."""
        return self.rank(self.folded(action))

    def folded(self, action: ActionLike) -> Action:
        """The one action [A] that stands for all that do the same: see `sim.canonical`."""
        return self._actions.folded(action)

    def sample(self, rng: np.random.Generator) -> Action:
        """Action [A], every one equally likely; but of a long coordinate, such as any batch, every doubling is."""
        action = rng.integers(self._nvec)
        for place, tables in self._doublings.items():
            table = tables[rng.integers(len(tables))]
            action[place] = rng.integers(table.start, table.stop)
        return action

    def neighbour(self, action: ActionLike, rng: np.random.Generator) -> Action:
        """Copy of an action [A] with one coordinate changed: coordinate and new value, of its `moves`, uniformly.

        A space of a single strategy has no neighbours; there it is the action itself.
        """
        moved = np.array(action, dtype=np.int64)
        if self._movable.size:
            coordinate = int(self._movable[rng.integers(self._movable.size)])
            if coordinate in self._doublings:
                moves = self.moves(coordinate, int(moved[coordinate]))
                moved[coordinate] = moves[rng.integers(len(moves))]
            else:
                step = int(rng.integers(1, self.sizes[coordinate]))
                moved[coordinate] = (moved[coordinate] + step) % self.sizes[coordinate]
        return moved

    def moves(self, coordinate: int, index: int) -> list[int]:
        """Indices that one move may give a coordinate: all others; of a long one those 1, 2, 4, ... steps away.

        At the ends of a long coordinate there are fewer moves than in between, so that moves there and back are not
        equally likely.
        """
        size = self.sizes[coordinate]
        if coordinate not in self._doublings:
            return [other for other in range(size) if other != index]
        steps = [sign * (1 << k) for k in range((size - 1).bit_length()) for sign in (-1, 1)]
        return [index + step for step in steps if 0 <= index + step < size]

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
        dims, own = self._fixed_dims or tuple(rest[: self._ops]), rest[self._ops :]
        cp, dp = own[:2] if self._own else (1, ep)
        chosen = own[2 * self._own :]
        names = (each.name for each in self._serving.coordinates)
        served = self._serving.replica_set(dict(zip(names, chosen, strict=True)))
        # The paper's strategies are themselves here too.
        return Strategy(tp, ep, pp, batch, dims, cp, None if (cp, dp) == (1, ep) else dp, served=served)
