"""The coordinates that the copying policy chooses in: those of a strategy, but the batch relative to tp and ep."""

from __future__ import annotations

import numpy as np
from gymnasium.spaces import MultiDiscrete

from envs.actions import Actions, is_long, ordered_places


class Coordinates:
    """Writes the batch as its table steps above tp and ep, counted from the smallest such difference.

    Tables of degrees mostly double from step to step, and what decides whether a batch is too large for memory and
    latency is the batch per GPU. A policy that keeps this coordinate and doubles a degree so doubles the batch: it
    moves along the limits instead of into them. Every action can be written so, but not everything so written is an
    action: its batch may lie off the table (see `inside`). An action comes back as the one that stands for all that
    do the same (see `sim.canonical`).

    Args:
        space: Of the actions; of one that does not name its coordinates none is shifted.

    Attributes:
        sizes: Values of each coordinate here, [A].
        ordered: Places of those whose values have an order.

    Example:
        >>> from sim.optimum.spaces import Coordinate
        >>> tables = {"tp": (1, 2, 4, 8), "ep": (1, 2, 4), "pp": (1, 2), "batch": (1, 2, 4, 8, 16, 32, 64, 128)}
        >>> degrees = [Coordinate(name, table, ordered=True) for name, table in tables.items()]
        >>> coordinates = Coordinates(Actions([*degrees, Coordinate("ffn1", (0, 1, 2), ordered=False)]))
        >>> coordinates.sizes
        (4, 3, 2, 13, 3)
        >>> coordinates.encode(np.array([[1, 2, 0, 5, 2], [2, 2, 0, 6, 2]]))
        array([[1, 2, 0, 7, 2],
               [2, 2, 0, 7, 2]])
    """

    def __init__(self, space: MultiDiscrete) -> None:
        self._space = space
        self.ordered = ordered_places(space)
        sizes = [int(n) for n in space.nvec]
        self._batch, self._degrees = _places(space)
        self._largest_shift = sum(sizes[place] - 1 for place in self._degrees)
        if self._batch is not None:
            self._batches = sizes[self._batch]
            sizes[self._batch] += self._largest_shift
        self.sizes = tuple(sizes)

    def encode(self, actions: np.ndarray) -> np.ndarray:
        """Actions `[..., A]` in these coordinates, a new array."""
        return self._shifted(actions, self._largest_shift, -1)

    def decode(self, chosen: np.ndarray) -> np.ndarray:
        """The actions `[..., A]` that were encoded, folded, a new array."""
        actions = self._shifted(chosen, -self._largest_shift, 1)
        if isinstance(self._space, Actions):
            inside = self.inside(chosen)
            actions[inside] = self._space.folded(actions[inside])
        return actions

    def inside(self, chosen: np.ndarray) -> np.ndarray:
        """Which of `[..., A]` are actions, `[...]`."""
        if self._batch is None:
            return np.ones(chosen.shape[:-1], np.bool_)
        batch = self._shifted(chosen, -self._largest_shift, 1)[..., self._batch]
        return (batch >= 0) & (batch < self._batches)

    def _shifted(self, actions: np.ndarray, constant: int, sign: int) -> np.ndarray:
        moved = np.array(actions, np.int64)
        if self._batch is not None:
            moved[..., self._batch] += constant + sign * moved[..., self._degrees].sum(-1)
        return moved


def _places(space: MultiDiscrete) -> tuple[int | None, list[int]]:
    """Of the batch, and of tp and ep; none where a space has none, or the batch's table is long and does not double."""
    if not isinstance(space, Actions):
        return None, []
    places = [place for name in ("batch", "tp", "ep") if (place := space.place(name)) is not None]
    if len(places) < 3 or is_long(space.coordinates[places[0]]):
        return None, []
    return places[0], places[1:]
