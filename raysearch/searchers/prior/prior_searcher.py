"""The searcher `prior`: what a trained network expects, a Gaussian process on what it misses, expected improvement."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Annotated, ClassVar, NamedTuple, final

import numpy as np
from numpy.typing import NDArray
from pydantic import Field
from scipy.special import expit, ndtr, ndtri
from threadpoolctl import ThreadpoolController

from envs.saved_state import SavedState
from envs.space import Action, StrategySpace
from raysearch.base.errors import InputError
from raysearch.searchers.interface import NoOptions, Outcome, Searcher
from raysearch.searchers.prior.candidate_strategies import CandidateStrategies
from raysearch.searchers.prior.gaussian_process import ResidualProcess, Scales
from raysearch.searchers.prior.network import SHIPPED_PRIOR, NetworkPrediction, read_prior
from raysearch.searchers.prior.strategy_features import Features, Reals, WorkloadFeatures
from sim.arrays import Ints
from sim.serving.phases import phase_of

_SPREAD, _WIDENED, _KEPT, _ROUNDS = 6000, 150, 800, 5
"""Of the strategies looked at before the first call: over degrees, then with other dims, those kept, and rounds of
mutation. [assumed] together half a second."""
_MUTATED, _PARENTS = 96, 12
"""New candidates of a call, and what they are mutated from. [assumed]"""
_SEEN_AT_ONCE = 200
"""[assumed] Answers that decide together; more would take longer than they tell."""
_QUANTILES: Reals = ndtri((np.arange(16) + 0.5) / 16)
"""Of the standard normal distribution, equally likely: expectations are means over them."""
_NEAR_LIMIT = 0.15
"""[assumed] Nats below a limit from which on keeping it tells something."""
_MOST_EXCESS, _MISSED, _KEPT_BY = 3.0, 1e-3, 0.02
"""[assumed] Nats beyond which an excess is as bad as any, from which on a limit counts as missed, and by which it is
kept at least."""
_DOUBTS = (1.0, 0.25, 1.0, 2.5)
"""[assumed] Multiples of the error that are allowed for, in turn: a call that only takes what is expected finds what
neighbours have told about, one that doubts it finds what they have not."""
_NOISY = 0.01
"""[assumed] Standard deviation of the log of an answer from which on the best answer is luck, too."""


class _Expected(NamedTuple):
    """Of strategies that were called: `Features.log_tokens`, and a `NetworkPrediction`."""

    log_tokens: Reals
    log_step_s: Reals
    log_tpot_s: Reals
    log_ttft_s: Reals
    log_memory: Reals
    kept: Reals


class PriorOptions(NoOptions):
    """Settings of `prior`.

    Attributes:
        weights: File of a prior that `raysearch pretrain` wrote; empty for the one that ships.
        adapt: Whether answers correct the prior; without, its own ranking is tried in order.
    """

    weights: Annotated[str, Field(max_length=4096)] = ""
    adapt: bool = True


@final
class PriorSearcher(Searcher):
    """Knows other workloads before its first call, and corrects what it knows by every answer.

    A network expects of a strategy the time of a step, latencies, memory, and whether a choice breaks a limit. What it
    misses on this black box is learned as two Gaussian processes: one of the time, one of the memory. The next call is
    the candidate with the largest expected improvement that keeps every limit; candidates are drawn over all degrees
    with choices that were good elsewhere, and mutated from the best.

    Source: expected improvement: Jones, Schonlau and Welch, "Efficient Global Optimization", 1998; constraints: Gardner
    et al., "Bayesian Optimization with Inequality Constraints", 2014.

    Raises:
        InputError: The prior cannot be read, or knows nothing of an op or a choice of the workload.
    """

    name: ClassVar[str] = "prior"
    Options: ClassVar[type[PriorOptions]] = PriorOptions

    def __init__(self, space: StrategySpace, *, seed: int, budget: int, options: PriorOptions) -> None:
        super().__init__(space, seed=seed, budget=budget, options=options)
        self._prior = read_prior(Path(options.weights) if options.weights else SHIPPED_PRIOR)
        self._features = WorkloadFeatures(space.workload)
        inputs = self._features.of(space.strategies(np.zeros((1, len(space.sizes)), np.int64))).inputs.shape[1]
        if inputs != (got := len(self._prior.mean)):
            raise InputError(
                f"{options.weights or SHIPPED_PRIOR}: expected a prior of {inputs} inputs, got one of {got}; "
                "make a new one with `raysearch pretrain`"
            )
        self._candidates = CandidateStrategies(space, self._prior.header.pool)
        self._phase = phase_of(space.workload)
        self._threads = ThreadpoolController()
        self._log_tpot_limit = math.log(min(space.workload.tpot_limit_s, 1e6))
        self._log_ttft_limit = math.log(min(space.workload.ttft_limit_s, 1e6))
        self._time = ResidualProcess(self._prior.header.time)
        self._limits = ResidualProcess(self._prior.header.limits)
        self._told: list[Action] = []
        self._outcomes: list[tuple[float, float, float]] = []  # raw, excess, simulated
        self._pending: list[Action] = []
        self._inputs: list[Reals] = []
        self._foreseen: list[tuple[float, ...]] = []  # see `_Expected`
        self._seen: set[int] = set()  # keys of what was called or is in flight
        self._pool = _Pool(self, np.zeros((0, len(space.sizes)), np.int64))

    # --- what is expected ----------------------------------------------------------------------

    def described(self, actions: Action) -> tuple[Features, NetworkPrediction]:
        """Features of actions `[n, A]`, and what the network expects of them."""
        features = self._features.of(self.space.strategies(actions))
        said = self._prior.predict(features)
        if not self._phase.prefills:  # a step is what a token takes
            said = said._replace(log_tpot_s=said.log_step_s - math.log(self.space.workload.tokens_per_step))
        nothing = np.full(len(actions), -50.0)
        if not self._phase.decodes:
            said = said._replace(log_tpot_s=nothing)
        if not self._phase.prefills:
            said = said._replace(log_ttft_s=nothing)
        return features, said

    def improvement(self, features: Features, said: NetworkPrediction) -> Reals:
        """Expected improvement of strategies `[n]` on the best so far, limits and all."""
        doubt, best = self._doubt(), self._best()
        gain, tokens_mean, kept = np.zeros((3, len(said.kept)))
        for weight, error, error_sd in self._time.under_each(features.inputs):
            errors = error[:, None] + doubt * error_sd[:, None] * _QUANTILES
            tokens = np.exp(features.log_tokens[:, None] - said.log_step_s[:, None] - errors)
            in_time = said.log_tpot_s[:, None] + errors <= self._log_tpot_limit
            in_time &= said.log_ttft_s[:, None] + errors <= self._log_ttft_limit
            gain += weight * (np.maximum(tokens - best, 0) * in_time).mean(1)
            tokens_mean += weight * tokens.mean(1)
        for weight, excess, excess_sd in self._limits.under_each(features.inputs):
            kept += weight * ndtr(-(said.log_memory + excess) / excess_sd) * expit(said.kept)
        gain *= kept
        # Where nothing can be gained, what comes nearest to it.
        late = np.maximum(said.log_tpot_s - self._log_tpot_limit, 0) + np.maximum(
            said.log_ttft_s - self._log_ttft_limit, 0
        )
        return gain + 1e-9 * tokens_mean * kept * np.exp(-5 * late)

    def _doubt(self) -> float:
        """What standard deviations are multiplied by: while nothing better is found, sure and unsure calls in turn."""
        raw = [outcome[0] for outcome in self._outcomes]
        stalled = len(raw) - 1 - int(np.argmax(raw)) if any(raw) else 0
        return _DOUBTS[stalled % len(_DOUBTS)]

    def _best(self) -> float:
        """Tokens/s/GPU of the best so far; where answers are noisy, of what they are about."""
        raw, _, _ = np.array(self._outcomes).reshape(-1, 3).T
        if not raw.any() or self._time.scales.noise < _NOISY or not self.options.adapt:
            return float(raw.max(initial=0.0))
        said, feasible = self._expected(), raw > 0
        error, _ = self._time.expected(np.array(self._inputs)[feasible])
        return float(np.exp(said.log_tokens[feasible] - said.log_step_s[feasible] - error).max())

    # --- what answers tell ---------------------------------------------------------------------

    def _expected(self) -> _Expected:
        """What was expected of the strategies that were called, `[n]` each."""
        return _Expected(*np.array(self._foreseen).reshape(-1, len(_Expected._fields)).T)

    def _learn(self) -> None:
        """Takes all answers so far into the residuals, and of calls in flight what is expected of them."""
        if not self.options.adapt or not self._told:
            return
        rows = self._deciding()
        inputs = np.array(self._inputs)[rows]
        said = _Expected(*(each[rows] for each in self._expected()))
        raw, excess, simulated = np.array(self._outcomes)[rows].T
        answered = simulated > 0
        error = np.where(answered, said.log_tokens - np.log(np.where(answered, simulated, 1.0)) - said.log_step_s, 0.0)
        late = np.maximum(said.log_tpot_s + error - self._log_tpot_limit, 0)
        late += np.maximum(said.log_ttft_s + error - self._log_ttft_limit, 0)
        rest = excess - late
        missed = (raw <= 0) & (rest > _MISSED) & ((said.kept > 0) | ~answered)
        near = (raw > 0) & (said.log_memory > -_NEAR_LIMIT)
        above = (
            np.where(missed, np.minimum(rest, _MOST_EXCESS), np.minimum(-_KEPT_BY, said.log_memory)) - said.log_memory
        )
        if answered.any():
            self._time.learn(inputs[answered], error[answered])
        if (missed | near).any():
            self._limits.learn(inputs[missed | near], above[missed | near])
        if self._pending and answered.any():
            self._time.believe(self.described(np.array(self._pending))[0].inputs)

    def _deciding(self) -> Ints:
        """Answers that decide: all, or the best of them and the latest."""
        count = len(self._told)
        if count <= _SEEN_AT_ONCE:
            return np.arange(count)
        merit = [raw if raw > 0 else -excess for raw, excess, _ in self._outcomes]
        best = np.argsort(merit, kind="stable")[-_SEEN_AT_ONCE * 3 // 4 :]
        return np.union1d(best, np.arange(count - _SEEN_AT_ONCE // 4, count))

    # --- ask and tell --------------------------------------------------------------------------

    def ask(self, observation: NDArray[np.float32]) -> Action:
        """The candidate with the largest expected improvement that was not called yet."""
        with self._threads.limit(limits=1):  # so small, a product of two threads takes ten times the processor's time
            return self._proposed()

    def _proposed(self) -> Action:
        self._learn()
        if not len(self._pool.actions):
            self._pool = self._first_pool()
        self._pool = self._pool.grown(self._around(), self.rng)
        worth = self.improvement(self._pool.features, self._pool.said)
        order = np.argsort(-worth, kind="stable")
        self._pool = self._pool.at(order[:_KEPT])
        for action in self._pool.actions:
            if self.space.key(action) not in self._seen:
                break
        else:
            action = self.space.sample(self.rng)
        self._pending.append(action.copy())
        self._seen.add(self.space.key(action))
        return action.copy()

    def _first_pool(self) -> _Pool:
        drawn = self._candidates.spread(_SPREAD, self.rng)
        pool = _Pool(self, np.zeros((0, len(self.space.sizes)), np.int64)).grown(drawn, self.rng)
        pool = pool.best(_WIDENED)
        pool = pool.grown(self._candidates.with_dims(pool.actions), self.rng).best(_KEPT)
        for _ in range(_ROUNDS):
            pool = pool.grown(self._candidates.mutated(pool.actions[:60], 400, self.rng), self.rng).best(_KEPT)
        return pool

    def _around(self) -> Action:
        """New candidates: mutations of the best answers and candidates, some elsewhere, and neighbours of the best."""
        merit = np.array([raw for raw, _, _ in self._outcomes])
        good = [self._told[row] for row in np.argsort(-merit, kind="stable")[:_PARENTS] if merit[row] > 0]
        parents = np.concatenate(
            [np.array(good, np.int64).reshape(-1, len(self.space.sizes)), self._pool.actions[:_PARENTS]]
        )
        found = [self._candidates.mutated(parents, _MUTATED, self.rng)]
        found.append(self._candidates.elsewhere(parents, _MUTATED // 2, self.rng))
        if good and len(self._told) and merit[-1] == merit.max():
            found.append(self._candidates.neighbours(good[0]))
        return np.concatenate(found)

    def tell(self, action: Action, outcome: Outcome) -> None:
        """Notes the answer."""
        for place, flying in enumerate(self._pending):
            if np.array_equal(flying, action):
                del self._pending[place]
                break
        self._note(action.copy(), (outcome.raw, outcome.excess, outcome.simulated))

    def _note(self, action: Action, outcome: tuple[float, float, float]) -> None:
        features, said = self.described(action[None])
        self._told.append(action)
        self._outcomes.append(outcome)
        self._inputs.append(features.inputs[0])
        self._foreseen.append((float(features.log_tokens[0]), *(float(each[0]) for each in said)))
        self._seen.add(self.space.key(action))

    def get_state(self) -> SavedState:
        """All answers, calls in flight, the candidates and the generator."""
        width = len(self.space.sizes)
        return {
            "rng": self.rng.bit_generator.state,
            "told": np.array(self._told, np.int64).reshape(-1, width),
            "outcomes": np.array(self._outcomes, np.float64).reshape(-1, 3),
            "pending": np.array(self._pending, np.int64).reshape(-1, width),
            "candidates": self._pool.actions.copy(),
            "expected": np.stack(self._pool.said)
            if len(self._pool.actions)
            else np.zeros((len(NetworkPrediction._fields), 0)),
            "scales": [
                [[[weight, *scales] for weight, scales in each.weighed], each.fitted]
                for each in (self._time, self._limits)
            ],
        }

    def set_state(self, state: SavedState) -> None:
        """Goes on with those answers and candidates."""
        self.rng.bit_generator.state = state["rng"]
        self._told, self._outcomes, self._inputs, self._foreseen = [], [], [], []
        for action, outcome in zip(state["told"], state["outcomes"].tolist(), strict=True):
            raw, excess, simulated = outcome
            self._note(action.copy(), (raw, excess, simulated))
        self._pending = [action.copy() for action in state["pending"]]
        self._seen = {self.space.key(action) for action in (*self._told, *self._pending)}
        self._pool = _Pool(self, np.array(state["candidates"], np.int64))
        if len(self._pool.actions):  # as they were: of other batches the last bits may differ
            self._pool.said = NetworkPrediction(*np.array(state["expected"], np.float64))
        for residuals, (weighed, fitted) in zip((self._time, self._limits), state["scales"], strict=True):
            residuals.weighed = [(weight, Scales(*scales)) for weight, *scales in weighed]
            residuals.fitted = fitted

    def metrics(self) -> dict[str, float]:
        """How far the black box is from what was expected: the chosen scales, and the noise of its answers."""
        machine, own, noise = self._time.scales
        return {"machine_scale": machine, "own_scale": own, "noise": noise}


class _Pool:
    """CandidateStrategies, with what is expected of them.

    Args:
        searcher: Who expects.
        actions: `[C, A]`.
    """

    def __init__(self, searcher: PriorSearcher, actions: Action) -> None:
        self._searcher, self.actions = searcher, actions
        if len(actions):
            self.features, self.said = searcher.described(actions)

    def at(self, rows: Ints) -> _Pool:
        """Some of them."""
        found = _Pool(self._searcher, self.actions[:0])
        found.actions, found.features = self.actions[rows], self.features.at(rows)
        found.said = NetworkPrediction(*(each[rows] for each in self.said))
        return found

    def best(self, count: int) -> _Pool:
        """Those with the largest expected improvement, the best first."""
        worth = self._searcher.improvement(self.features, self.said)
        return self.at(np.argsort(-worth, kind="stable")[:count])

    def grown(self, more: Action, rng: np.random.Generator) -> _Pool:
        """With further actions, each that stands for the same once."""
        if not len(more):
            return self
        more = self._searcher.space.folded(more)
        known = {row.tobytes() for row in self.actions}
        rows = [row for row, action in enumerate(more) if (key := action.tobytes()) not in known and not known.add(key)]
        if not rows:
            return self
        new = _Pool(self._searcher, more[rows])
        if not len(self.actions):
            return new
        new.features = Features.joined([self.features, new.features])
        new.said = NetworkPrediction(*(np.concatenate(pair) for pair in zip(self.said, new.said, strict=True)))
        new.actions = np.concatenate([self.actions, new.actions])
        return new
