"""What is believed of a black box: what is expected of a strategy (`TermSource`), corrected by every answer so far."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Sequence
from typing import NamedTuple, final

import numpy as np
from scipy.special import expit, ndtr

from envs.saved_state import SavedState
from envs.space import Action, StrategySpace
from raysearch.searchers.prior.gaussian_process import NOISES, ResidualProcess, Scales
from raysearch.searchers.prior.network import Prior, StepPrediction
from raysearch.searchers.prior.simulated_terms import TermSourceName, term_source
from raysearch.searchers.prior.strategy_features import Features, Reals, WorkloadFeatures
from sim.arrays import Ints
from sim.serving.phases import phase_of

_SEEN_AT_ONCE = 200
"""[assumed] Answers that decide together; more would take longer than they tell."""
_NOTHING = 1e-100
"""[assumed] Far below any gain that is worth a call."""
_POWER = 0.5
"""Of tokens/s/GPU, whose gain is expected: of tokens themselves a hundredfold that is in time once in a hundred would
count like the best that is known. [fitted] f/f* on 50 random black boxes kept from training is .995 after ten calls and
.997 after fifteen (by the first power .988, .989); the logarithm finds as much there, and less under other engines."""
_NEAR_LIMIT = 0.15
"""[assumed] Nats below a limit from which on keeping it tells something."""
_MOST_EXCESS, _MISSED, _KEPT_BY = 3.0, 1e-3, 0.02
"""[assumed] Nats beyond which an excess is as bad as any, from which on a limit counts as missed, and by which it is
kept at least."""
_SLOWER = (0.0, 0.7, 1.4, 2.1)
"""[assumed] Nats by which a step may take longer than the roofline has it."""
_NOISY = 0.01
"""[assumed] Standard deviation of the log of an answer from which on the best answer is luck, too."""


class Answer(NamedTuple):
    """Of a call: `Outcome.raw`, `Outcome.excess` and `Outcome.simulated`."""

    raw: float
    excess: float
    simulated: float


class Posterior(NamedTuple):
    """What is believed of [n] strategies, answers and all.

    Attributes:
        log_tokens: Of tokens/s/GPU, its mean.
        time_sd: Standard deviation of the log of a step's time.
        late: Log of the nearer latency over its limit, its mean.
        memory, memory_sd: Of the log of needed over allowed bytes.
        in_time, kept: Probabilities that latencies and that the other limits are kept.
        improvement: Expected, within limits: before any answer is, tokens/s/GPU; then by how much their root is above
            the best's, over that. Where nothing can be gained, far less, by how near.
    """

    log_tokens: Reals
    time_sd: Reals
    late: Reals
    memory: Reals
    memory_sd: Reals
    in_time: Reals
    kept: Reals
    improvement: Reals

    def at(self, rows: Ints) -> Posterior:
        """That of some of them."""
        return Posterior(*(each[rows] for each in self))


class _Expected(NamedTuple):
    """Of strategies that were called: `Features.log_tokens`, and a `StepPrediction`."""

    log_tokens: Reals
    log_step_s: Reals
    log_tpot_s: Reals
    log_ttft_s: Reals
    log_memory: Reals
    kept: Reals


@final
class BlackBoxBelief:
    """What is expected on a workload, and two Gaussian processes of what that misses, of time and of memory.

    Args:
        prior: The network, and how errors go together.
        space: Whose strategies are called.
        terms: Where expectations come from.
        adapt: Whether answers correct it.
        noise: Standard deviation of the log of an answer, where it is known.

    Attributes:
        actions: That were called.
        answers: What came of them.
        inputs: Of the network, of those.

    Raises:
        InputError: See `term_source`.
    """

    def __init__(
        self,
        prior: Prior,
        space: StrategySpace,
        terms: TermSourceName = "simulator",
        *,
        adapt: bool = True,
        noise: float | None = None,
    ) -> None:
        self.prior, self._space, self._adapt = prior, space, adapt
        self._features = WorkloadFeatures(space.workload)
        self._source = term_source(terms, prior, self._features)
        self._phase = phase_of(space.workload)
        self._log_tpot_limit = math.log(min(space.workload.tpot_limit_s, 1e6))
        self._log_ttft_limit = math.log(min(space.workload.ttft_limit_s, 1e6))
        self._time = ResidualProcess(self._source.time, (noise,) if noise else NOISES)
        self._limits = ResidualProcess(self._source.limits)
        self.actions: list[Action] = []
        self.answers: list[Answer] = []
        self.inputs: list[Reals] = []
        self._foreseen: list[tuple[float, ...]] = []  # see `_Expected`

    @property
    def input_size(self) -> int:
        """Numbers that say what a strategy is."""
        return self._features.of(self._space.strategies(np.zeros((1, len(self._space.sizes)), np.int64))).inputs.shape[
            1
        ]

    @property
    def constants(self) -> int:
        """How many of them, the last ones, all strategies of the workload share."""
        return self._features.constants

    # --- what is expected ----------------------------------------------------------------------

    def predict(self, actions: Action) -> tuple[Features, StepPrediction]:
        """Features of actions `[n, A]`, the shares of a step's time as they are expected, and all that is expected."""
        strategies = self._space.strategies(actions)
        features, predicted = self._source.predict(strategies, self._features.of(strategies))
        if not self._phase.prefills:  # a step is what a token takes
            predicted = predicted._replace(
                log_tpot_s=predicted.log_step_s - math.log(self._space.workload.tokens_per_step)
            )
        nothing = np.full(len(actions), -50.0)
        if not self._phase.decodes:
            predicted = predicted._replace(log_tpot_s=nothing)
        if not self._phase.prefills:
            predicted = predicted._replace(log_ttft_s=nothing)
        return features, predicted

    def best_of_meshes(self) -> list[Action]:
        """The best strategies of different degrees that are known before the first answer."""
        if self._space.degrees_only:
            return []
        found: list[Action] = []
        for strategy in self._source.bests():
            with contextlib.suppress(ValueError):  # tables of replicas need not have a single one
                found.append(self._space.encode(strategy))
        return found

    def screened(self, actions: Action, count: int) -> Action:
        """Of actions `[n, A]` those that are worth asking about, where asking is dear: the best by a bare roofline.

        A roofline is too fast by a factor that it does not know, so some are the best under each of several.
        """
        if not self._source.dear or len(actions) <= count:
            return actions
        workload, bare = self._space.workload, self._features.of(self._space.strategies(actions))
        found: dict[int, None] = {}
        for place, slower in enumerate(_SLOWER, start=1):
            step, late = bare.log_step_s + slower, np.zeros(len(actions))
            if self._phase.decodes:
                late += np.maximum(step - math.log(workload.tokens_per_step) - self._log_tpot_limit, 0)
            if self._phase.prefills:
                late += np.maximum(bare.log_ttft_s + slower - self._log_ttft_limit, 0)
            merit = bare.log_tokens - step - 5 * (late + np.maximum(bare.log_memory, 0))
            for row in np.argsort(-merit, kind="stable").tolist():
                if len(found) >= count * place // len(_SLOWER):
                    break
                found.setdefault(row)
        return actions[list(found)]

    def posterior(self, features: Features, predicted: StepPrediction, doubt: float = 1.0) -> Posterior:
        """What is believed of strategies `[n]` as of the last `learn`; errors are taken for `doubt` times as wide."""
        best = self.best
        nearer = np.maximum(predicted.log_tpot_s - self._log_tpot_limit, predicted.log_ttft_s - self._log_ttft_limit)
        expected = features.log_tokens - predicted.log_step_s
        gain, tokens_mean, kept, mean, square, timely, above, above_square = np.zeros((8, len(predicted.kept)))
        for weight, error, error_sd in self._time.under_each(features.inputs):
            sd = doubt * error_sd
            late, tokens = (-nearer - error) / sd, np.exp(expected - error + sd**2 / 2)
            if best:  # an error up to here is in time and better than the best, as a standard normal
                over = expected - error - math.log(best)
                most = np.minimum(late, over / sd)
                roots = np.exp(_POWER * over + (_POWER * sd) ** 2 / 2)
                gain += weight * np.maximum(roots * ndtr(most + _POWER * sd) - ndtr(most), 0)
            else:
                gain += weight * tokens * ndtr(late + sd)
            tokens_mean += weight * tokens
            timely += weight * ndtr(late)
            mean += weight * error
            square += weight * (error**2 + error_sd**2)
        for weight, excess, excess_sd in self._limits.under_each(features.inputs):
            kept += weight * ndtr(-(predicted.log_memory + excess) / excess_sd) * expit(predicted.kept)
            above += weight * excess
            above_square += weight * (excess**2 + excess_sd**2)
        gain *= kept
        # Where nothing can be gained, what comes nearest to it.
        late = np.maximum(predicted.log_tpot_s + mean - self._log_tpot_limit, 0) + np.maximum(
            predicted.log_ttft_s + mean - self._log_ttft_limit, 0
        )
        return Posterior(
            expected - mean,
            np.sqrt(np.maximum(square - mean**2, 0)),
            nearer + mean,
            predicted.log_memory + above,
            np.sqrt(np.maximum(above_square - above**2, 0)),
            timely,
            kept,
            gain + _NOTHING * tokens_mean * kept * np.exp(-5 * late),
        )

    @property
    def all_missed(self) -> bool:
        """Whether answers were timed, and none of them kept all limits."""
        return len(self._time.values) > 0 and not any(answer.raw > 0 for answer in self.answers)

    @property
    def best(self) -> float:
        """Tokens/s/GPU of the best so far; where answers are noisy, of what they are about."""
        if self._adapt and self._time.scales.noise >= _NOISY and (found := self.believed_best()):
            return found[1]
        return max((answer.raw for answer in self.answers), default=0.0)

    def believed_best(self) -> tuple[int, float] | None:
        """Of the calls within all limits, the one of which most is believed: its place and its tokens/s/GPU."""
        rows = np.flatnonzero([answer.raw > 0 for answer in self.answers])
        if not len(rows):
            return None
        predicted = self._expected()
        error, _ = self._time.expected(np.array(self.inputs)[rows])
        log_tokens = predicted.log_tokens[rows] - predicted.log_step_s[rows] - error
        return int(rows[np.argmax(log_tokens)]), float(np.exp(log_tokens.max()))

    # --- what answers tell ---------------------------------------------------------------------

    def _expected(self) -> _Expected:
        """What was expected of the strategies that were called, `[n]` each."""
        return _Expected(*np.array(self._foreseen).reshape(-1, len(_Expected._fields)).T)

    def learn(self, pending: Sequence[Action] = ()) -> None:
        """Takes all answers so far into the residuals, and of calls in flight what is expected of them."""
        if not self._adapt or not self.actions:
            return
        rows = self._deciding()
        inputs = np.array(self.inputs)[rows]
        predicted = _Expected(*(each[rows] for each in self._expected()))
        raw, excess, simulated = np.array(self.answers)[rows].T
        answered = simulated > 0
        error = np.where(
            answered, predicted.log_tokens - np.log(np.where(answered, simulated, 1.0)) - predicted.log_step_s, 0.0
        )
        late = np.maximum(predicted.log_tpot_s + error - self._log_tpot_limit, 0)
        late += np.maximum(predicted.log_ttft_s + error - self._log_ttft_limit, 0)
        rest = excess - late
        missed = (raw <= 0) & (rest > _MISSED) & ((predicted.kept > 0) | ~answered)
        near = (raw > 0) & (predicted.log_memory > -_NEAR_LIMIT)
        above = (
            np.where(missed, np.minimum(rest, _MOST_EXCESS), np.minimum(-_KEPT_BY, predicted.log_memory))
            - predicted.log_memory
        )
        if answered.any():
            self._time.learn(inputs[answered], error[answered])
        if (missed | near).any():
            self._limits.learn(inputs[missed | near], above[missed | near])
        if pending and answered.any():
            self._time.believe(self.predict(np.array(pending))[0].inputs)

    def _deciding(self) -> Ints:
        """Answers that decide: all, or the best of them and the latest."""
        count = len(self.actions)
        if count <= _SEEN_AT_ONCE:
            return np.arange(count)
        merit = [raw if raw > 0 else -excess for raw, excess, _ in self.answers]
        best = np.argsort(merit, kind="stable")[-_SEEN_AT_ONCE * 3 // 4 :]
        return np.union1d(best, np.arange(count - _SEEN_AT_ONCE // 4, count))

    def note(self, action: Action, answer: Answer) -> None:
        """Keeps what came of a call; `learn` takes it in."""
        self.note_all(action[None], [answer])

    def note_all(self, actions: Action, answers: Sequence[Answer]) -> None:
        """Keeps what came of calls of actions `[n, A]`."""
        features, predicted = self.predict(actions)
        self.actions += list(actions)
        self.answers += answers
        self.inputs += list(features.inputs)
        self._foreseen += [*zip(features.log_tokens.tolist(), *(each.tolist() for each in predicted), strict=True)]

    def residuals(self) -> Reals:
        """Log of answered over expected time of a step `[calls]`, uncorrected; 0 where nothing was answered."""
        predicted, simulated = self._expected(), np.array([answer.simulated for answer in self.answers])
        answered = np.log(np.where(simulated > 0, simulated, 1.0))
        return np.where(simulated > 0, predicted.log_tokens - predicted.log_step_s - answered, 0.0)

    @property
    def scales(self) -> Scales:
        """How far the black box is from what was expected, by the likeliest hypothesis."""
        return self._time.scales

    def get_state(self) -> SavedState:
        """All answers, and the hypotheses."""
        return {
            "told": np.array(self.actions, np.int64).reshape(-1, len(self._space.sizes)),
            "outcomes": np.array(self.answers, np.float64).reshape(-1, 3),
            "scales": [
                [[[weight, *scales] for weight, scales in each.weighed], each.fitted]
                for each in (self._time, self._limits)
            ],
        }

    def set_state(self, state: SavedState) -> None:
        """Continues with those answers."""
        self.actions, self.answers, self.inputs, self._foreseen = [], [], [], []
        for action, answer in zip(state["told"], state["outcomes"].tolist(), strict=True):
            raw, excess, simulated = answer
            self.note(action.copy(), Answer(raw, excess, simulated))
        for residuals, (weighed, fitted) in zip((self._time, self._limits), state["scales"], strict=True):
            residuals.weighed = [(weight, Scales(*scales)) for weight, *scales in weighed]
            residuals.fitted = fitted
