"""Candidates of a search with what a belief expects of them, so that each goes through the network once."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Self, final

import numpy as np

from envs.space import Action, StrategySpace
from raysearch.searchers.prior.black_box_belief import BlackBoxBelief, Posterior
from raysearch.searchers.prior.candidate_strategies import CandidateStrategies
from raysearch.searchers.prior.network import FACTOR_COUNT, StepPrediction
from raysearch.searchers.prior.strategy_features import SHARES, Features, Reals
from sim.arrays import Ints

_SPREAD, _WIDENED, _KEPT, _ROUNDS = 6000, 150, 800, 5
"""Of the strategies looked at before the first call: over degrees, then with other dims, those kept, and rounds of
mutation. [assumed] together half a second."""
_SCREENED = 800
"""[assumed] Of the first, those that a simulator is asked about."""
_FIELDS = len(StepPrediction._fields)


@final
class CandidatePool:
    """Actions `[C, A]`, and what is expected of them.

    Args:
        belief: Who expects.
        actions: `[C, A]`.
    """

    def __init__(self, belief: BlackBoxBelief, actions: Action) -> None:
        self._belief, self.actions = belief, actions
        if len(actions):
            self.features, self.predicted = belief.predict(actions)

    @property
    def expected(self) -> Reals:
        """What the network says: `StepPrediction` and the shares of a step's time, `[fields and shares, C]`."""
        if not len(self.actions):
            return np.zeros((_FIELDS + FACTOR_COUNT, 0))
        return np.concatenate([np.stack(self.predicted), self.features.inputs[:, SHARES].T])

    def as_it_was(self, expected: Reals) -> Self:
        """With what was predicted then: of other batches the last bits may differ."""
        if len(self.actions):
            self.predicted = StepPrediction(*np.array(expected[:_FIELDS], np.float64))
            self.features.inputs[:, SHARES] = expected[_FIELDS:].T
        return self

    def of(self, belief: BlackBoxBelief) -> CandidatePool:
        """The same in another belief that begins with the same network."""
        found = CandidatePool(belief, self.actions[:0])
        found.actions, found.features, found.predicted = self.actions, self.features, self.predicted
        return found

    def posterior(self, doubt: float = 1.0) -> Posterior:
        """What is believed of them as of the last `BlackBoxBelief.learn`."""
        return self._belief.posterior(self.features, self.predicted, doubt)

    def at(self, rows: Ints) -> CandidatePool:
        """Some of them."""
        found = CandidatePool(self._belief, self.actions[:0])
        found.actions, found.features = self.actions[rows], self.features.at(rows)
        found.predicted = StepPrediction(*(each[rows] for each in self.predicted))
        return found

    def best(self, count: int) -> CandidatePool:
        """Those with the largest expected improvement, the best first."""
        return self.at(np.argsort(-self.posterior().improvement, kind="stable")[:count])

    def grown(self, more: Action, space: StrategySpace) -> CandidatePool:
        """With further actions, each that stands for the same once."""
        if not len(more):
            return self
        more = space.folded(more)
        known = {row.tobytes() for row in self.actions}
        rows = [row for row, action in enumerate(more) if (key := action.tobytes()) not in known and not known.add(key)]
        if not rows:
            return self
        new = CandidatePool(self._belief, more[rows])
        if not len(self.actions):
            return new
        new.features = Features.joined([self.features, new.features])
        new.predicted = StepPrediction(
            *(np.concatenate(pair) for pair in zip(self.predicted, new.predicted, strict=True))
        )
        new.actions = np.concatenate([self.actions, new.actions])
        return new


def first_pool(
    belief: BlackBoxBelief,
    space: StrategySpace,
    candidates: CandidateStrategies,
    rng: np.random.Generator,
    known: Sequence[Action] = (),
) -> CandidatePool:
    """What a search looks at before its first call: all degrees, dims that were good elsewhere, and mutations.

    Args:
        belief: Who expects.
        space: To choose from.
        candidates: Of it.
        rng: Draws.
        known: Actions `[n, A]` to look at, too.
    """
    drawn = candidates.spread(_SPREAD, rng)
    pool = CandidatePool(belief, drawn[:0]).grown(belief.screened(space.folded(drawn), _SCREENED), space).best(_WIDENED)
    pool = pool.grown(candidates.with_dims(pool.actions), space).best(_KEPT)
    pool = pool.grown(np.array(known, np.int64), space)
    for _ in range(_ROUNDS):
        pool = pool.grown(candidates.mutated(pool.actions[:60], 400, rng), space).best(_KEPT)
    return pool
