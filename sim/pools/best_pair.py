"""The exact best prefill and decode pool, found by the bounds of the exact search: few replicas are ever priced.

A pair on so many GPUs goes at most at the rate at which its pools, each as good as its best replica, would fill them.
So once some pair is known, only replicas are looked for with which the other pool's best could beat it, of each degrees
the fastest within a latency. What a faster step is worth beside the rate, the time to the first token alone says. So
pairs are bounded by intervals of both latencies: the rates of the longest with the first token of the shortest. The
interval of the best bound is halved, until its bound is reached.
"""

from __future__ import annotations

import heapq
import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from sim.engines.engine_registry import engine_rules_of
from sim.optimum.exact_search import Known, find_bests
from sim.optimum.spaces import space_of
from sim.pools.candidates import Replica, replica_of
from sim.pools.handover import Link, request_cache_bytes
from sim.pools.matching import RATE_ROUNDING, Limits, Matched, as_predicted, best_match
from sim.pools.traffic import Traffic, requests_per_s, workload_of
from sim.serving.phases import DECODE, PREFILL, phase_of
from sim.simulate import evaluate
from sim.strategy import Strategy
from sim.workload import EVEN_ODDS, Workload

PHASES = (PREFILL.name, DECODE.name)
PairKnown = tuple[Known, Known]
"""What searches of prefill and decode pools have computed."""
_EVERY = 10**6
"""More than there are degrees."""
_FIRST = 0.8
"""Share of its best replica's worth from which a pool's replicas are in the first pairs. [assumed]"""
_CLOSE = 0.98
"""Share of a latency from which an interval is cut at the replica that its bound rests on, not halved. [assumed]"""
_SHARES = (1.0, 2 / 3, 1 / 3)
"""Of the longest time to the first token. [assumed] In two thirds a prompt waits for a whole one."""
_REACHED = 1 - 1e-9
_APART = 1e-7
"""Share by which latencies differ that are not alike; searches round limits by less."""


class PoolOptions:
    """The replicas of one pool, the fastest of each degrees within a latency; computed as they are asked for.

    Attributes:
        workload: Of phase prefill or decode, without limits on latencies.
        traffic: What is sent.
        limits: GPUs, and the load if there is one.
    """

    def __init__(self, workload: Workload, traffic: Traffic, limits: Limits, known: Known | None = None) -> None:
        self.workload = replace(workload, max_gpus=max(1, limits.gpus - 1))
        self.traffic, self.limits = traffic, limits
        self._known: Known = {} if known is None else known
        self._found: dict[float, tuple[float, tuple[Replica, ...]]] = {}

    def worth(self, tokens_per_s_per_gpu: float, gpus: int) -> float:
        """Requests a second of a GPU of the pool; under a load, of each that the pool takes for it."""
        if tokens_per_s_per_gpu <= 0 or gpus >= self.limits.gpus:
            return 0.0
        load = self.limits.requests_per_s
        rate = requests_per_s(self.traffic, self.workload, tokens_per_s_per_gpu * gpus)
        if load is None:
            return rate / gpus
        taken = gpus * max(1, math.ceil(load / rate * (1 - 1e-12)))
        return load / taken if taken < self.limits.gpus else 0.0

    def best(self, latest_s: float) -> float:
        """The highest worth of a replica within a latency; 0 if there is none."""
        found = find_bests(space_of(self._within(latest_s)), 1, self.worth, known=self._known)
        return self.worth(found[0].tokens_per_s_per_gpu, found[0].gpus) if found else 0.0

    def only(self, strategy: Strategy) -> tuple[Replica, ...]:
        """The replica of one strategy; none where it has no room or is not among those that are searched."""
        found = evaluate(self.workload, strategy)
        inside = found.feasible and not space_of(self.workload).outside(strategy)
        return (replica_of(self.workload, self.traffic, found),) if inside else ()

    def within(self, latest_s: float, least: float) -> tuple[Replica, ...]:
        """Of each degrees the fastest replica within a latency, those worth so much at least."""
        asked, found = self._found.get(latest_s, (math.inf, ()))
        if least < asked:
            space = space_of(self._within(latest_s))
            bests = find_bests(space, _EVERY, self.worth, known=self._known, reached=least * _REACHED)
            found = tuple(replica_of(space.workload, self.traffic, each) for each in bests)
            self._found[latest_s] = least, found
        return found

    def _within(self, latest_s: float) -> Workload:
        kept = 1 - self.workload.margin
        if phase_of(self.workload).decodes:
            return replace(self.workload, tpot_slo_s=latest_s / kept)
        return replace(self.workload, ttft_slo_s=1.5 * latest_s / kept)  # half a step until it begins, and the step


@dataclass(frozen=True, slots=True)
class _Cell:
    """Pairs whose latencies lie in two intervals.

    Attributes:
        least_s, longest_s: Ends of the intervals, of prefill and decode.
        bound: Of what any of them is worth.
        at: Latencies of the pair that the bound rests on.
    """

    least_s: tuple[float, float]
    longest_s: tuple[float, float]
    bound: float
    at: tuple[float, float]


class PairSearch:
    """Looks for the best pair within limits, beginning with one whose strategies are given.

    Attributes:
        best: The best pair so far.
    """

    def __init__(
        self,
        workload: Workload,
        traffic: Traffic,
        limits: Limits,
        *,
        hidden: float = 0.0,
        free_transfer: bool = False,
        begin: Sequence[Strategy] = (),
        known: PairKnown | None = None,
    ) -> None:
        anyhow = replace(workload, tpot_slo_s=math.inf, ttft_slo_s=math.inf, confidence=EVEN_ODDS)
        self.limits = as_predicted(workload, limits)
        self.best: Matched | None = None
        self._pools = [
            PoolOptions(workload_of(traffic, anyhow, phase), traffic, limits, worked)
            for phase, worked in zip(PHASES, known or ({}, {}), strict=True)
        ]
        self._node_gpus, self._rules = workload.hardware.node_gpus, engine_rules_of(workload)
        cache_bytes = request_cache_bytes(workload, traffic.typical_prompt_tokens)
        self._near, self._far = (
            Link(workload, same_node=same_node, cache_bytes=cache_bytes, hidden=hidden, free=free_transfer)
            for same_node in (True, False)
        )
        self._tops = (0.0, 0.0)
        if begin:
            self._offer(self._match(*(pool.only(each) for pool, each in zip(self._pools, begin, strict=True))))

    def run(self) -> Matched | None:
        """The exact best pair; None where none keeps the limits."""
        longest_s = self.limits.ttft_s, self.limits.tpot_s
        self._tops = self._pools[0].best(longest_s[0]), self._pools[1].best(longest_s[1])
        if not all(self._tops):
            return None
        unhurried_s = min(longest_s[0], 2 / 3 * longest_s[0]), longest_s[1]  # in which a prompt waits for a whole one
        for ends_s in (unhurried_s, longest_s):
            if self.best is None or (ends_s == unhurried_s and self._leaves_many):
                sets = [pool.within(end_s, _FIRST * top) for pool, end_s, top in self._paired(ends_s)]
                self._offer(self._match(*sets))
        order = itertools.count()
        heap: list[tuple[float, int, _Cell]] = []

        def add(least_s: tuple[float, float], ends_s: tuple[float, float]) -> None:
            if cell := self._cell(least_s, ends_s):
                heapq.heappush(heap, (-cell.bound, next(order), cell))

        add((0.0, 0.0), longest_s)
        while heap and not self._closed(heap[0][2].bound):
            cell = heapq.heappop(heap)[2]
            for least_s, ends_s in _parts(cell):
                add(least_s, ends_s)
        return self.best

    def at_once(self, requests: int, output_tokens: float) -> Matched | None:
        """The pair on the fewest GPUs that has so many requests in flight, of each degrees' fastest replicas.

        Those are looked into that are the fastest within the limits, and within some shares of the first token's.
        """
        prefills = {
            each.evaluation.strategy: each
            for share in _SHARES
            for each in self._pools[0].within(share * self.limits.ttft_s, 0.0)
        }
        decodes = self._pools[1].within(self.limits.tpot_s, 0.0)
        limits = replace(self.limits, at_once=requests, output_tokens=output_tokens)
        return best_match(
            tuple(prefills.values()), decodes, limits, self._near, self._far, self._node_gpus, self._rules
        )

    def _paired(self, latest_s: tuple[float, float]) -> list[tuple[PoolOptions, float, float]]:
        return list(zip(self._pools, latest_s, self._tops, strict=True))

    def _cell(self, least_s: tuple[float, float], longest_s: tuple[float, float]) -> _Cell | None:
        """The pairs of an interval with their bound, having taken the best of those that are there."""
        needed = self._all_needed
        if any(least > top for least, top in zip(needed, self._tops, strict=True)):
            return None
        sets = [
            pool.within(end_s, least) for (pool, end_s, _), least in zip(self._paired(longest_s), needed, strict=True)
        ]
        self._offer(self._match(*sets))
        hurried = [
            tuple(replace(each, latency_s=min(each.latency_s, least)) for each in side)
            for side, least in zip(sets, least_s, strict=True)
        ]
        found = self._match(*hurried)
        if found is None:
            return None
        actual = {id(each.evaluation): each.latency_s for side in sets for each in side}
        at = actual[id(found.prefill.evaluation)], actual[id(found.decode.evaluation)]
        return _Cell(least_s, longest_s, self._worth(found), at)

    @property
    def _leaves_many(self) -> bool:
        """Whether more replicas could beat the best pair than those that the first pairs are made of."""
        return any(least < _FIRST * top for least, top in zip(self._all_needed, self._tops, strict=True))

    @property
    def _all_needed(self) -> tuple[float, float]:
        """What a replica of each pool must be worth; see `_needed`."""
        prefill, decode = self._tops
        return self._needed(decode), self._needed(prefill)

    def _needed(self, others_top: float) -> float:
        """What a replica must be worth for a pair with the other pool's best to be better than the best."""
        if self.best is None:
            return 0.0
        load = self.limits.requests_per_s
        gpus = self.limits.gpus if load is None else self.best.gpus - 1
        gpu_s = gpus / (self.best.requests_per_s if load is None else load)  # per request a second
        return 1 / (gpu_s - 1 / others_top) if gpu_s > 1 / others_top else math.inf

    def _match(self, prefills: tuple[Replica, ...], decodes: tuple[Replica, ...]) -> Matched | None:
        return best_match(prefills, decodes, self.limits, self._near, self._far, self._node_gpus, self._rules)

    def _offer(self, found: Matched | None) -> None:
        if found and (self.best is None or self._worth(found) > self._worth(self.best)):
            self.best = found

    def _worth(self, found: Matched) -> float:
        return found.requests_per_s if self.limits.requests_per_s is None else 1 / found.gpus

    def _closed(self, bound: float) -> bool:
        return self.best is not None and bound <= self._worth(self.best) * (1 + RATE_ROUNDING)


def _parts(cell: _Cell) -> list[tuple[tuple[float, float], tuple[float, float]]]:
    """The ends of the two halves of an interval, cut where its bound may be furthest off."""
    slack_s = [1.5 * (cell.at[0] - cell.least_s[0]), cell.at[1] - cell.least_s[1]]
    which = slack_s.index(max(slack_s))
    low, at = cell.least_s[which], cell.at[which]
    if at <= low:
        return []
    cut, below = (at, at * (1 - _APART)) if low >= _CLOSE * at else ((low + at) / 2,) * 2

    def with_end(ends_s: tuple[float, float], end_s: float) -> tuple[float, float]:
        return (end_s, ends_s[1]) if which == 0 else (ends_s[0], end_s)

    left = cell.least_s, with_end(cell.longest_s, below)
    right = with_end(cell.least_s, cut), cell.longest_s
    return [left, right]


def best_pair(
    workload: Workload,
    traffic: Traffic,
    limits: Limits,
    *,
    hidden: float = 0.0,
    free_transfer: bool = False,
    begin: Sequence[Strategy] = (),
    known: PairKnown | None = None,
) -> Matched | None:
    """The exact best prefill and decode pool over all strategies, batches and numbers of replicas.

    Args:
        workload: Model, hardware, engine, degrees, space and confidence.
        traffic: What is sent.
        limits: To be kept.
        hidden: Share of the cache's transfer that hides behind the prompt's computing.
        free_transfer: Whether the transfer costs nothing at all.
        begin: Strategies of a prefill and a decode pool that may be good, such as those of a similar question: what is
            worse than they is passed by.
        known: Of searches of the same workload, or of one with other limits or batches; what this one works out is
            added.

    Returns:
        None where none keeps the limits.
    """
    return PairSearch(
        workload, traffic, limits, hidden=hidden, free_transfer=free_transfer, begin=begin, known=known
    ).run()


def pair_at_once(
    workload: Workload, traffic: Traffic, limits: Limits, requests: int, known: PairKnown | None = None
) -> Matched | None:
    """The pair of pools on the fewest GPUs found that has so many requests in flight together; see `best_pair`.

    As many come each second as end then, so that by Little's law a pair has its rate times a request's stay in flight.
    """
    return PairSearch(workload, traffic, limits, known=known).at_once(requests, traffic.output_tokens)
