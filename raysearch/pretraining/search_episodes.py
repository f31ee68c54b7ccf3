"""Whole searches of tables as episodes: what a policy sees, what it may choose, what it is paid.

The reward of a call is by how much it raises f/f*, f* being the best of the table.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple, final

import gymnasium
import numpy as np
from gymnasium.spaces import Box, Discrete
from numpy.typing import NDArray

from envs.space import StrategySpace
from raysearch.pretraining.pretraining_file import PretrainingFile
from raysearch.pretraining.search_tables import BLIND, SearchTable, kept_tables, read_tables, table_workload
from raysearch.searchers.prior.black_box_belief import Answer, BlackBoxBelief
from raysearch.searchers.prior.candidate_pool import CandidatePool
from raysearch.searchers.prior.network import read_prior
from raysearch.searchers.prior.policy import OF_CALL, OF_CANDIDATE, OF_WORKLOAD, SHOWN, PolicyTokens, shown, tokens_of
from raysearch.searchers.prior.strategy_features import Reals
from sim.arrays import Flags, Ints

_NOISES, _NOISE_ODDS = (0.0, 0.02, 0.05), (0.7, 0.15, 0.15)
"""Standard deviations of the log of an episode's answers about the truth, and how often. [assumed]"""


class TokenLayout(NamedTuple):
    """How tokens lie in one array of numbers, as RLlib wants them.

    Attributes:
        constants, own: Inputs that the workload's strategies share, and those of each.
        calls: Most calls of an episode.
    """

    constants: int
    own: int
    calls: int

    @property
    def shapes(self) -> list[tuple[int, ...]]:
        """Of the workload's token, the calls', the candidates', and which of both are there."""
        return [
            (self.constants + OF_WORKLOAD,),
            (self.calls, self.own + OF_CALL),
            (SHOWN, self.own + OF_CANDIDATE),
            (self.calls,),
            (SHOWN,),
        ]

    @property
    def size(self) -> int:
        """Numbers in all."""
        return sum(int(np.prod(shape)) for shape in self.shapes)

    def packed(self, tokens: PolicyTokens) -> NDArray[np.float32]:
        """Tokens as `[size]`."""
        parts = [np.zeros(shape, np.float32) for shape in self.shapes]
        calls, candidates = len(tokens.calls), len(tokens.candidates)
        parts[0][:] = tokens.workload
        parts[1][:calls], parts[2][:candidates] = tokens.calls, tokens.candidates
        parts[3][:calls] = parts[4][:candidates] = 1
        return np.concatenate([part.reshape(-1) for part in parts])

    def unpacked(self, rows: Any) -> list[Any]:
        """Arrays or tensors `[n, size]` as those of `shapes`, `[n, ...]` each."""
        found, start = [], 0
        for shape in self.shapes:
            end = start + int(np.prod(shape))
            found.append(rows[:, start:end].reshape(len(rows), *shape))
            start = end
        return found


@final
class TableSearch:
    """A search of one table.

    Args:
        belief: Of its workload, before any answer.
        pool: Its strategies.
        table: Their answers.
        noise: Standard deviation of the log of an answer.
        rng: For the noise.

    Attributes:
        best: f/f* so far.
        rows: Strategies that may be chosen next, `[at most SHOWN]`.
    """

    def __init__(
        self, belief: BlackBoxBelief, pool: CandidatePool, table: SearchTable, noise: float, rng: np.random.Generator
    ) -> None:
        self._belief, self._pool, self._table = belief, pool, table
        self._noise, self._rng = noise, rng
        self._worth = table.raw / table.raw.max()
        self._open: Flags = np.ones(len(pool.actions), np.bool_)
        self.best = 0.0
        self._look()

    def _look(self) -> None:
        self._belief.learn()
        posterior = self._pool.posterior()
        left = np.flatnonzero(self._open)
        self.rows: Ints = left[shown(posterior.at(left))]
        self._posterior = posterior.at(self.rows)

    @property
    def tokens(self) -> PolicyTokens:
        """What a policy sees."""
        return tokens_of(self._belief, self._pool.features.inputs[self.rows], self._posterior)

    @property
    def improvement(self) -> Reals:
        """Expected improvement of those that may be chosen."""
        return self._posterior.improvement

    @property
    def gains(self) -> Reals:
        """By how much each of those that may be chosen would truly raise f/f*."""
        return np.maximum(self._worth[self.rows] - self.best, 0)

    def call(self, place: int) -> float:
        """Calls one of `rows`; returns by how much f/f* rose."""
        row, gain = int(self.rows[place]), float(self.gains[place])
        factor = float(np.exp(self._rng.normal(0, self._noise)))
        feasible = float(self._table.excess[row] <= 0)
        simulated = float(self._table.simulated[row]) * factor
        answer = Answer(simulated * feasible, float(self._table.excess[row]), simulated)
        self._belief.note(self._pool.actions[row], answer)
        self._open[row] = False
        self.best += gain
        self._look()
        return gain


@final
class Searches:
    """Begins searches of tables; what all searches of a table share is worked out once.

    Args:
        pretraining: The configuration.
        prior: File of the network.
        tables: To search.
    """

    def __init__(self, pretraining: PretrainingFile, prior: Path, tables: Sequence[SearchTable]) -> None:
        self._pretraining, self._prior, self.tables = pretraining, read_prior(prior), tables
        self._known: dict[int, tuple[StrategySpace, CandidatePool]] = {}

    @cached_property
    def layout(self) -> TokenLayout:
        """Of what a policy sees."""
        space, inputs = StrategySpace(table_workload(self._pretraining, self.tables[0].index)), len(self._prior.mean)
        belief = BlackBoxBelief(self._prior, space)
        return TokenLayout(belief.constants, inputs - belief.constants, self._pretraining.policy.calls)

    def begin(self, number: int, rng: np.random.Generator, noise: float | None = None) -> TableSearch:
        """A search of a table; of a noise drawn at random unless it is given."""
        table = self.tables[number]
        if number not in self._known:
            space = StrategySpace(table_workload(self._pretraining, table.index, table.tpot_slo_s))
            self._known[number] = space, CandidatePool(BlackBoxBelief(self._prior, space, BLIND), table.actions)
        space, known = self._known[number]
        belief = BlackBoxBelief(self._prior, space, BLIND)
        pool = known.of(belief)
        drawn = float(rng.choice(_NOISES, p=_NOISE_ODDS)) if noise is None else noise
        return TableSearch(belief, pool, table, drawn, rng)


class SearchEpisodes(gymnasium.Env[NDArray[np.float32], np.int64]):
    """Searches of the tables that a policy is trained on, one after the other, for RLlib's env runners.

    Args:
        given: RLlib's `env_config`: `pretraining`, the configuration as JSON, `prior`, the file of the network, and
            `tables`, those of the tables.
    """

    def __init__(self, given: Mapping[str, Any]) -> None:
        pretraining = PretrainingFile.model_validate(given["pretraining"])
        tables = read_tables([Path(path) for path in given["tables"]], pretraining)
        learned = [table for table, kept in zip(tables, kept_tables(tables), strict=True) if not kept]
        self._searches, self._calls = Searches(pretraining, Path(given["prior"]), learned), pretraining.policy.calls
        layout = self._searches.layout
        self.observation_space = Box(-np.inf, np.inf, (layout.size,), np.float32)
        self.action_space = Discrete(SHOWN)
        self._left = 0

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[NDArray[np.float32], dict[str, Any]]:
        """Begins a search of any table."""
        super().reset(seed=seed)
        self._search = self._searches.begin(int(self.np_random.integers(len(self._searches.tables))), self.np_random)
        self._left = self._calls
        return self._searches.layout.packed(self._search.tokens), {}

    def step(self, action: np.int64) -> tuple[NDArray[np.float32], float, bool, bool, dict[str, Any]]:
        """Makes a call."""
        gain = self._search.call(min(int(action), len(self._search.rows) - 1))
        self._left -= 1
        return self._searches.layout.packed(self._search.tokens), gain, self._left == 0, False, {}
