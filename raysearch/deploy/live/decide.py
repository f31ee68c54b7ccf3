"""From what was measured: the strategy to recommend, how sure that is, and what to measure next."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from raysearch.deploy.live.belief import ERROR_CORRELATION, Belief, ErrorCorrelation, belief_of
from raysearch.deploy.live.deployment_candidates import Candidates
from raysearch.simulators.measurement import Measurement
from sim.arrays import Floats

Mask = NDArray[np.bool_]

SAMPLES = 4000
"""Draws of all errors together; a probability is known to within 0.005."""
_RATE_SD = 0.05
"""[assumed] Standard deviation of log throughput about what the time per token says: a benchmark's ramps and gaps."""
_TTFT_SD = 0.8
"""[assumed] The same of the time to the first token, most of which is queueing that the simulator does not model: it
was 79 % too short on the measured serving runs (docs/evidence/fidelity.md)."""
_PRECISE = 4
"""[assumed] A measurement whose noise is so many times smaller than the loss that does not matter is not repeated."""


@dataclass(frozen=True, slots=True)
class Measured:
    """What was measured of one candidate.

    Attributes:
        candidate: Its index.
        measurement: As the benchmark gave it.
    """

    candidate: int
    measurement: Measurement


@dataclass(frozen=True, slots=True)
class Decision:
    """Where things stand.

    Attributes:
        incumbent: The candidate to recommend, of those that were measured; None if none can be.
        confidence: Probability that no other candidate is better by more than what was asked for.
        following: The candidate to measure next; None if none is left.
        gain: Tokens/s/GPU, over the incumbent's, that the next one is expected to bring (0 where it is worse).
        tokens_per_s_per_gpu: (low, middle, high) of the incumbent, between low and high with probability 0.9.
        scale: How far the simulator is off here, over what it says itself.
    """

    incumbent: int | None
    confidence: float
    following: int | None
    gain: float
    tokens_per_s_per_gpu: tuple[float, float, float]
    scale: float


class Decider:
    """Draws what the truth may be, given measurements, and reads decisions off the draws.

    Args:
        candidates: What may be run.
        within: Relative loss that does not matter.
        noise: Standard deviation of a measurement, relative.
        error_correlation: How alike errors are.
    """

    def __init__(
        self,
        candidates: Candidates,
        *,
        within: float,
        noise: float,
        error_correlation: ErrorCorrelation = ERROR_CORRELATION,
    ) -> None:
        self.candidates = candidates
        self.within = within
        self._noise = noise
        count = len(candidates)
        correlation = error_correlation.correlation(candidates.shares, candidates.places)
        self._time = belief_of(candidates, error_correlation, noise=noise)
        self._rate = Belief(np.full(count, _RATE_SD), correlation, error_correlation, noise)
        self._ttft = Belief(np.full(count, _TTFT_SD), correlation, error_correlation, noise)

    def decide(self, seen: Sequence[Measured], rng: np.random.Generator) -> Decision:
        """What to recommend and what to measure next.

        Args:
            seen: All measurements so far.
            rng: For the draws.
        """
        values, scale = self._values(seen, rng)
        open_ = ~self._ruled_out(seen)
        values = np.where(open_, values, 0.0)
        best = values.max(axis=1)
        measured = sorted({each.candidate for each in seen if open_[each.candidate]})
        good = (values[:, measured] >= (1 - self.within) * best[:, None]) & (values[:, measured] > 0)
        incumbent = (
            measured[int(np.lexsort((values[:, measured].mean(axis=0), good.mean(axis=0)))[-1])] if measured else None
        )
        if incumbent is not None and not (values[:, incumbent] > 0).any():
            incumbent = None
        confidence = float(good[:, measured.index(incumbent)].mean()) if incumbent is not None else 0.0
        own = values[:, incumbent] if incumbent is not None else np.zeros(len(values))
        gains = np.maximum(values - own[:, None], 0).mean(axis=0)
        following = self._following(gains, values, incumbent, seen, open_)
        low, middle, high = np.quantile(own, (0.05, 0.5, 0.95)).tolist()
        gain = float(gains[following]) if following is not None else 0.0
        return Decision(incumbent, confidence, following, gain, (low, middle, high), scale)

    def _following(
        self, gains: Floats, values: Floats, incumbent: int | None, seen: Sequence[Measured], open_: Mask
    ) -> int | None:
        """The challenger that is expected to gain most; or the incumbent once more, where it is what is unsure."""
        fresh = open_.copy()
        fresh[[each.candidate for each in seen]] = False
        again = self._noise > self.within / _PRECISE
        challengers = np.where(open_ if again else fresh, gains, 0.0)
        if incumbent is None or not challengers.max() > 0:
            return int(np.argmax(np.where(fresh, values.mean(axis=0), -1.0))) if fresh.any() else None
        challenger = int(np.argmax(challengers))
        return incumbent if again and values[:, incumbent].std() > values[:, challenger].std() else challenger

    def _values(self, seen: Sequence[Measured], rng: np.random.Generator) -> tuple[Floats, float]:
        """([samples, n] tokens/s/GPU, 0 where an SLO is missed; the mean scale)."""
        each, workload = self.candidates, self.candidates.workload
        run = [o for o in seen if not o.measurement.unsupported]
        rows = np.array([o.candidate for o in run], dtype=np.int64)
        rate = np.log([o.measurement.tokens_per_s_per_gpu for o in run]) - each.log_rate[rows]
        timed = np.array([o.measurement.tpot_s > 0 for o in run], dtype=bool)
        with np.errstate(divide="ignore"):
            tpot = np.log([o.measurement.tpot_s for o in run]) - each.log_tpot[rows]
        slower = np.where(timed, tpot, -rate)
        time = self._time.samples(rows, slower, SAMPLES, rng)
        log_value = each.log_rate - time
        if timed.any():
            beside = self._rate.samples(rows[timed], (rate + slower)[timed], SAMPLES, rng)
            count = min(len(time), len(beside))
            time, log_value = time[:count], log_value[:count] + rng.permutation(beside)[:count]
        values = np.exp(log_value)
        if math.isfinite(workload.tpot_limit_s):
            drawn = each.log_tpot + time
            stated = [(o.candidate, o.measurement.tpot_s) for o in run if o.measurement.tpot_s > 0]
            values = np.where(_in_time(drawn, stated, workload.tpot_limit_s), values, 0.0)
        if math.isfinite(workload.ttft_limit_s) and np.isfinite(each.log_ttft).all():
            stated = [(o.candidate, o.measurement.ttft_s) for o in run if o.measurement.ttft_s > 0]
            late_rows = np.array([row for row, _ in stated], dtype=np.int64)
            errors = np.log([ttft_s for _, ttft_s in stated]) - each.log_ttft[late_rows]
            drawn = each.log_ttft + rng.permutation(self._ttft.samples(late_rows, errors, SAMPLES, rng))
            count = min(len(values), len(drawn))
            values = np.where(_in_time(drawn[:count], stated, workload.ttft_limit_s), values[:count], 0.0)
        return values, self._time.mean_scale(rows, slower)

    def _ruled_out(self, seen: Sequence[Measured]) -> Mask:
        """[n] what cannot run: what did not, and the same degrees with more requests, which need more of everything."""
        out = np.zeros(len(self.candidates), dtype=bool)
        strategies = self.candidates.strategies
        for each in seen:
            if each.measurement.unsupported:
                failed = strategies[each.candidate]
                for index, strategy in enumerate(strategies):
                    out[index] |= _degrees(strategy) == _degrees(failed) and strategy.batch >= failed.batch
        return out


def _in_time(drawn: Floats, stated: Sequence[tuple[int, float]], limit_s: float) -> Mask:
    """[samples, n] whether a latency meets its SLO: as measured where it was, as drawn elsewhere."""
    met = drawn <= math.log(limit_s)
    for row in {row for row, _ in stated}:
        met[:, row] = np.mean([math.log(seconds) for other, seconds in stated if other == row]) <= math.log(limit_s)
    return met


def _degrees(strategy: object) -> tuple[int, ...]:
    return tuple(getattr(strategy, name) for name in ("tp", "cp", "attention_dp", "ep", "pp"))
