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

from raysearch.deploy.place.fleet_traffic import FleetRequests
from raysearch.deploy.place.model_placement import Cluster, ModelPlacement
from sim.arrays import Flags, Floats
from sim.replay.drive import Watch, nobody, on_groups
from sim.replay.goodput import WARM_UP
from sim.replay.replica import Log
from sim.replay.requests import Integers, Requests


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
        over: Latencies over their limits, (first token, per token), huge of refused ones, [requests, 2].
        models: Whose each of these requests is, [requests].
    """

    attained: float
    of_models: NDArray[np.float64]
    counts: NDArray[np.int64]
    ttft_s: tuple[float, float]
    busy: NDArray[np.float64]
    late: NDArray[np.int64]
    over: Floats
    models: Integers

    def holds(self, percentile: float) -> bool:
        """Whether that percentile of both latencies of every model is within the limits."""
        return all(
            (np.percentile(self.over[self.models == model], percentile, axis=0) <= 1).all()
            for model in np.unique(self.models).tolist()
        )


class _TooManyLate(Exception):
    """More requests are late for sure than were allowed."""


@dataclass(frozen=True, slots=True, eq=False)
class _Part:
    """What became of the requests of models that share groups with each other alone.

    Attributes:
        rows: Which of all requests, [n].
        in_time: Of each, [n].
        ttft_s: NaN of refused ones, [n].
        tpot_s: NaN of refused ones and of single tokens, [n].
        busy_s: Of each of its groups.
        end_s: When the last one was done.
        late: How many of those after the warm-up were not in time.
    """

    rows: NDArray[np.int64]
    in_time: Flags
    ttft_s: Floats
    tpot_s: Floats
    busy_s: Floats
    end_s: float
    late: int


class Trials:
    """Placements under the arrivals of one seed.

    Groups that share no model with others have queues of their own: what became of their requests is kept, and counts
    for every placement that has them.
    """

    def __init__(self, cluster: Cluster, arrivals: FleetRequests) -> None:
        objectives = [tenant.objective for tenant in cluster.tenants]
        limit = 1 + 1e-9  # seconds are added up in another order than when the request was let in
        limits_s = limit * np.array([(each.ttft_s, each.tpot_s) for each in objectives])
        self._cluster, self._arrivals = cluster, arrivals
        self._limits_s = limits_s[arrivals.models]
        self._longest_s = [each.longest_s for each in objectives]
        self._work_s = [cluster.work_s(model) for model in range(len(objectives))]
        self._counted = arrivals.times_s >= WARM_UP * arrivals.horizon_s
        self._kept: dict[ModelPlacement, _Part] = {}
        self.requests = int(self._counted.sum())  # that count

    def bound(self, placement: ModelPlacement) -> tuple[float, float]:
        """(a share in time, minus a mean time to the first token) that a placement does not exceed, without a replay.

        Groups serve no more than their steady states in the time in which requests can be in time, and no first token
        comes before a lone prompt is done.
        """
        counts = np.bincount(self._arrivals.models[self._counted], minlength=len(self._work_s))
        in_time, first_s = 0.0, math.inf
        for at in _apart(placement):
            services = [
                {model: self._cluster.services[model, placement[each].shape] for model in placement[each].models}
                for each in at
            ]
            models = sorted({model for each in services for model in each})
            window_s = (1 - WARM_UP) * self._arrivals.horizon_s + max(self._longest_s[model] for model in models)
            most = _FLOOD * window_s * sum(max(of.most_per_s for of in each.values()) for each in services)
            in_time += min(float(counts[models].sum()), most)
            first_s = min(first_s, *[of.prompt_s for each in services for of in each.values()])
        return in_time / self.requests if self.requests else 1.0, -_PRICED * first_s

    def of(self, placement: ModelPlacement, most_late: float = math.inf) -> Trial | None:
        """What a placement attains; None where more requests than these are late."""
        apart = [(at, tuple(placement[each] for each in at)) for at in _apart(placement)]
        placed = [model for each in placement for model in each.models]
        late = int((self._counted & ~np.isin(self._arrivals.models, placed)).sum())
        late += sum(self._kept[groups].late for _, groups in apart if groups in self._kept)
        parts: list[tuple[list[int], _Part]] = []
        for at, groups in apart:
            part = self._kept.get(groups)
            if part is None:
                try:
                    part = self._replayed(groups, most_late - late)
                except _TooManyLate:
                    return None
                late += part.late
            parts.append((at, part))
        return self._together(len(placement), parts) if late <= most_late else None

    def _together(self, groups: int, parts: Sequence[tuple[list[int], _Part]]) -> Trial:
        arrivals, counted, models = self._arrivals, self._counted, len(self._work_s)
        in_time, busy_s = np.zeros(len(arrivals), dtype=bool), np.zeros(groups)
        ttft_s, tpot_s = np.full((2, len(arrivals)), math.nan)
        for at, part in parts:
            in_time[part.rows], busy_s[at] = part.in_time, part.busy_s
            ttft_s[part.rows], tpot_s[part.rows] = part.ttft_s, part.tpot_s
        over = np.column_stack([ttft_s, tpot_s])[counted] / self._limits_s[counted]
        over[np.isnan(over[:, 0]), 0] = _REFUSED
        counts = np.bincount(arrivals.models[counted], minlength=models)
        good = np.bincount(arrivals.models[counted & in_time], minlength=models)
        waited_s = ttft_s[counted]
        waited_s = waited_s[~np.isnan(waited_s)]
        latencies = (
            (float(waited_s.mean()), float(np.quantile(waited_s, 0.99))) if waited_s.size else (math.nan, math.nan)
        )
        with np.errstate(invalid="ignore"):
            shares = good / counts
        # Without a request nothing was late.
        attained = good.sum() / counts.sum() if counts.sum() else 1.0
        end_s = max([arrivals.horizon_s, *[part.end_s for _, part in parts]])
        return Trial(
            attained=float(attained),
            of_models=shares,
            counts=counts,
            ttft_s=latencies,
            busy=busy_s / end_s,
            late=counts - good,
            over=np.nan_to_num(over),
            models=arrivals.models[counted],
        )

    def _replayed(self, placement: ModelPlacement, most_late: float) -> _Part:
        """Replays the requests of groups that share no model with others.

        Raises:
            _TooManyLate: More than so many are late.
        """
        rows = np.flatnonzero(np.isin(self._arrivals.models, [model for each in placement for model in each.models]))
        requests = self._arrivals.requests.of_rows(rows)
        ttft_limit_s, tpot_limit_s = self._limits_s[rows].T
        counted = self._counted[rows]
        watch = _watching(requests, ttft_limit_s, tpot_limit_s, counted, most_late) if most_late < len(rows) else nobody
        models = self._arrivals.models[rows].tolist()
        outcome = on_groups(self._cluster.groups(placement), requests, models, self._work_s, watch)
        replayed = outcome.replayed
        # NaN is never in time.
        in_time = (replayed.ttft_s <= ttft_limit_s) & ~(replayed.tpot_s > tpot_limit_s)
        late = int((counted & ~in_time).sum())
        part = _Part(rows, in_time, replayed.ttft_s, replayed.tpot_s, outcome.busy_s, replayed.end_s, late)
        if sum(len(each.rows) for each in self._kept.values()) < _MOST_KEPT:
            self._kept[placement] = part
        return part


_REFUSED = 1e9
"""Times its limit that a refused request takes to its first token; percentiles interpolate, and infinity does not."""
_FLOOD = 1.05
"""Of a steady state at its best, what a flood of requests gets at most. [assumed] 1.01 as measured"""
_PRICED = 0.98
"""Of a lone prompt's time, what a replay takes at least: its tables are within 1 % of the step model."""
_MOST_KEPT = 2_000_000
"""Requests of parts that are kept. [assumed] 50 MB"""


def tried(cluster: Cluster, placement: ModelPlacement, arrivals: FleetRequests) -> Trial:
    """Replays the arrivals on a placement."""
    trial = Trials(cluster, arrivals).of(placement)
    assert trial is not None
    return trial


def _apart(placement: ModelPlacement) -> list[list[int]]:
    """Places of its groups, those together that share models, directly or by others; empty ones are left out."""
    parts: list[tuple[set[int], list[int]]] = []
    for at, each in enumerate(placement):
        if each.models:
            models, places = set(each.models), [at]
            near = [part for part in parts if part[0] & models]
            parts = [part for part in parts if not part[0] & models]
            parts.append((models.union(*[part[0] for part in near]), sorted(sum([part[1] for part in near], places))))
    return [places for _, places in parts]


def _watching(
    requests: Requests, ttft_limit_s: Floats, tpot_limit_s: Floats, counted: Flags, most_late: float
) -> Watch:
    """Raises `_TooManyLate` once more than so many are late; looks at every 32nd request."""
    sent_s, after, counts = requests.arrival_s.tolist(), (requests.output_tokens - 1).tolist(), counted.tolist()
    firsts_s, each_s = ttft_limit_s.tolist(), tpot_limit_s.tolist()
    undecided: list[int] = []
    late = seen = 0

    def watch(log: Log, request: int, _time_s: float) -> None:
        nonlocal late, seen, undecided
        if request % 32:
            return
        undecided += [each for each in range(seen, request) if counts[each]]
        seen, refused, open_ = request, set(log.refused), list[int]()
        for each in undecided:
            first_s, done_s = log.first_s[each], log.done_s[each]
            if each in refused or first_s - sent_s[each] > firsts_s[each]:  # not of NaN
                late += 1
            elif math.isnan(done_s):
                open_.append(each)
            elif after[each] and (done_s - first_s) / after[each] > each_s[each]:
                late += 1
        undecided = open_
        if late > most_late:
            raise _TooManyLate

    return watch
