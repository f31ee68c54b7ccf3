"""The cross-entropy method, as a searcher of one's own.

`raysearch search -w gpt_moe_1_2t_16k -s examples.cross_entropy:CrossEntropy` runs it; `tests/examples` hold it to what
every searcher must do.

Every coordinate has a distribution of its own. Batches of strategies are drawn from them, and each distribution moves
towards the values that the best of its batch took.

Source: Rubinstein, "The Cross-Entropy Method for Combinatorial and Continuous Optimization", 1999.
"""

from __future__ import annotations

from typing import Any, ClassVar, final

import numpy as np

import raysearch as rs


class CrossEntropyOptions(rs.NoOptions):
    """Its settings, which a study file may give: `[options."examples.cross_entropy:CrossEntropy"]`."""

    drawn: int = 50
    kept: int = 10
    step: float = 0.5


@final
class CrossEntropy(rs.Searcher):
    """Draws `drawn` strategies, and moves every distribution by `step` towards the values of the best `kept`."""

    name: ClassVar[str] = "cross_entropy"
    Options = CrossEntropyOptions

    def __init__(self, space: Any, **arguments: Any) -> None:
        super().__init__(space, **arguments)
        self._shares = [np.full(size, 1.0 / size) for size in space.factored.actions.sizes]
        self._drawn: list[tuple[float, tuple[int, ...]]] = []

    def ask(self, observation: Any) -> Any:
        """One value per coordinate, by its distribution."""
        values = [self.rng.choice(len(shares), p=shares) for shares in self._shares]
        return self.space.factored.decode(np.array(values, np.int64))

    def tell(self, action: Any, outcome: rs.Outcome) -> None:
        """Notes the strategy; the last of a batch moves the distributions."""
        self._drawn.append((rs.merit(outcome), tuple(self.space.factored.encode(action).tolist())))
        if len(self._drawn) == self.options.drawn:
            best = np.array([values for _, values in sorted(self._drawn)[-self.options.kept :]])
            self._drawn = []
            for shares, values in zip(self._shares, best.T, strict=True):
                shares += self.options.step * (np.bincount(values, minlength=len(shares)) / len(values) - shares)
                shares /= shares.sum()

    def get_state(self) -> dict[str, Any]:
        """All that decides what comes next: plain data and arrays."""
        shares = [each.copy() for each in self._shares]
        return {"rng": self.rng.bit_generator.state, "shares": shares, "drawn": list(self._drawn)}

    def set_state(self, state: dict[str, Any]) -> None:
        """Continues from there."""
        self.rng.bit_generator.state = state["rng"]
        self._shares, self._drawn = [each.copy() for each in state["shares"]], list(state["drawn"])
