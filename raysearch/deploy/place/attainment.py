"""How many requests a placement answers in time, over independent seeds, with intervals.

All placements see the same arrivals of each seed (common random numbers), so that the difference between two is known
far better than either's attainment.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from raysearch.deploy.place.model_placement import Cluster, ModelPlacement
from sim.replay.arrivals import Arrivals, draw_arrivals
from sim.replay.drive import on_groups
from sim.replay.goodput import WARM_UP
from sim.replay.requests import Requests

ATTAINMENT_CONFIDENCE = 0.9


@dataclass(frozen=True, slots=True)
class AttainmentEstimate:
    """A mean over seeds.

    Attributes:
        value: The mean.
        low, high: Its 90 % interval; None of a single seed.
    """

    value: float
    low: float | None
    high: float | None


def over_seeds(values: Sequence[float], least: float = -math.inf, most: float = math.inf) -> AttainmentEstimate:
    """The mean of independent values and Student's interval, cut to what is possible.

    >>> estimate = over_seeds([0.5, 0.7, 0.6], 0.0, 1.0)
    >>> round(estimate.value, 3), round(estimate.low, 3), round(estimate.high, 3)
    (0.6, 0.431, 0.769)
    """
    from scipy.stats import t

    mean = math.fsum(values) / len(values)
    if len(values) == 1:
        return AttainmentEstimate(mean, None, None)
    spread = float(np.std(values, ddof=1)) / math.sqrt(len(values))
    half = float(t.ppf((1 + ATTAINMENT_CONFIDENCE) / 2, len(values) - 1)) * spread
    return AttainmentEstimate(mean, max(least, mean - half), min(most, mean + half))


@dataclass(frozen=True, slots=True, eq=False)
class Trial:
    """One placement under the arrivals of one seed; requests after the warm-up alone.

    Attributes:
        attained: Share in time, of all requests.
        of_models: The same of each model, [models]; NaN where it had no request.
        counts: Requests of each model, [models].
        ttft_s: Of those with a first token: mean, and the 99th percentile; NaN if there was none.
        busy: Share of the time in which each group's first stage works, [groups].
        late: Requests that were not in time, of each model, [models].
    """

    attained: float
    of_models: NDArray[np.float64]
    counts: NDArray[np.int64]
    ttft_s: tuple[float, float]
    busy: NDArray[np.float64]
    late: NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class SampledTraffic:
    """What requests are drawn.

    Attributes:
        requests: Mean number of a seed, of all models.
        seeds: Each an independent run.
    """

    requests: int
    seeds: tuple[int, ...]

    def draw(self, cluster: Cluster) -> list[Arrivals]:
        """The arrivals of each seed."""
        streams = [tenant.stream for tenant in cluster.tenants]
        horizon_s = self.requests / sum(stream.requests_per_s for stream in streams)
        return [draw_arrivals(streams, horizon_s, seed) for seed in self.seeds]


def tried(cluster: Cluster, placement: ModelPlacement, arrivals: Arrivals) -> Trial:
    """Replays the arrivals on a placement."""
    objectives = [tenant.objective for tenant in cluster.tenants]
    lengths = np.array([(each.prompt_tokens, each.output_tokens) for each in objectives], dtype=np.int64)
    prompts, answers = lengths[arrivals.models].T
    requests = Requests(arrivals.times_s, prompts, answers)
    work_s = [cluster.work_s(model) for model in range(len(objectives))]
    outcome = on_groups(cluster.groups(placement), requests, arrivals.models.tolist(), work_s)
    replayed, limits_s = outcome.replayed, np.array([(each.ttft_s, each.tpot_s) for each in objectives])
    limit = 1 + 1e-9  # seconds are added up in another order than when the request was let in
    ttft_limit_s, tpot_limit_s = limit * limits_s[arrivals.models].T
    in_time = (replayed.ttft_s <= ttft_limit_s) & ~(replayed.tpot_s > tpot_limit_s)  # NaN is never in time
    counted = arrivals.times_s >= WARM_UP * arrivals.horizon_s
    models = len(objectives)
    counts = np.bincount(arrivals.models[counted], minlength=models)
    good = np.bincount(arrivals.models[counted & in_time], minlength=models)
    waited_s = replayed.ttft_s[counted]
    waited_s = waited_s[~np.isnan(waited_s)]
    ttft_s = (float(waited_s.mean()), float(np.quantile(waited_s, 0.99))) if waited_s.size else (math.nan, math.nan)
    with np.errstate(invalid="ignore"):
        shares = good / counts
    # Without a request nothing was late.
    attained = good.sum() / counts.sum() if counts.sum() else 1.0
    end_s = max(replayed.end_s, arrivals.horizon_s)
    return Trial(float(attained), shares, counts, ttft_s, outcome.busy_s / end_s, counts - good)
