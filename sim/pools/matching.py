"""Replicas of a prefill pool and of a decode pool that fit the GPUs at hand and go at one rate: exactly the best.

For each pair of strategies and each number of prefill replicas the GPUs left hold so many decode replicas, and the
slower pool sets the rate. All pairs are tried, as arrays.

A request comes upon a busy prefill replica as often as that is busy, and then waits for half a step, as the whole
simulator has it. So a replica may be kept from being busy all the time, where the first token must come sooner: the
time to it is (1 + busy / 2) prefill steps, the transfer, and one decode step.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from sim.arrays import Floats
from sim.engines.engine_rules import EngineRules, any_stages
from sim.pools.candidates import Replica, unbeaten
from sim.pools.handover import Link
from sim.serving.confidence import slower
from sim.workload import Workload

RATE_ROUNDING = 1e-9
_TIE = 1e-11
"""Rates that may be the same in the digits that are compared: see `_order`."""


@dataclass(frozen=True, slots=True)
class Limits:
    """What a deployment must keep.

    Attributes:
        gpus: At hand.
        tpot_s: Longest mean time per output token.
        ttft_s: Longest mean time to the first token.
        requests_per_s: Load to carry with the fewest GPUs; None fills all of them.
        at_once: Requests in flight to have on the fewest GPUs, in place of a load; None for none.
        output_tokens: Of those.
    """

    gpus: int
    tpot_s: float = math.inf
    ttft_s: float = math.inf
    requests_per_s: float | None = None
    at_once: int | None = None
    output_tokens: float = 0.0


def as_predicted(workload: Workload, limits: Limits) -> Limits:
    """The limits that predictions must keep for measured runs to keep these with the workload's confidence.

    No pool has steps of both kinds; its kernels are taken to be as sure as usual.
    """
    limited = replace(workload, tpot_slo_s=limits.tpot_s, ttft_slo_s=limits.ttft_s, margin=0.0)
    factors = slower(limited)
    return replace(limits, tpot_s=factors.tpot_limit_s, ttft_s=factors.ttft_limit_s)


@dataclass(frozen=True, slots=True)
class Matched:
    """Two pools at one rate.

    Attributes:
        prefill, decode: A replica of each.
        prefills, decodes: How many.
        requests_per_s: Of the whole.
        transfer_s: That a request waits for its cache.
        ttft_s: Prefill, transfer and the first decode step.
        same_node: Whether the cache travels inside a node.
    """

    prefill: Replica
    decode: Replica
    prefills: int
    decodes: int
    requests_per_s: float
    transfer_s: float
    ttft_s: float
    same_node: bool

    @property
    def gpus(self) -> int:
        """Of both pools."""
        return self.prefills * self.prefill.gpus + self.decodes * self.decode.gpus

    @property
    def tpot_s(self) -> float:
        """Mean time per output token."""
        return self.decode.latency_s


def best_match(
    prefills: Sequence[Replica],
    decodes: Sequence[Replica],
    limits: Limits,
    near: Link,
    far: Link,
    node_gpus: int,
    rules: EngineRules | None = None,
) -> Matched | None:
    """The pair of pools with the highest rate, or the fewest GPUs for a load; None where none keeps the limits.

    Of equal ones that with the fewest GPUs, then the sooner first token, then the fewest prefill replicas.

    Args:
        prefills: What a replica of the prefill pool may be.
        decodes: The same of the decode pool.
        limits: To be kept.
        near: Between pools that fill no more than a node.
        far: Between others.
        node_gpus: GPUs of a node.
        rules: Of the engine, which may not connect pools of any two pipelines; None connects all.
    """
    found = [
        each
        for left, right in _connected(prefills, decodes, rules)
        for gpus, link in ((min(node_gpus, limits.gpus), near), (limits.gpus, far))
        for each in _bests(left, right, limits, gpus, link)
    ]
    return min(found, key=lambda each: _order(each, limits), default=None)


def _connected(
    prefills: Sequence[Replica], decodes: Sequence[Replica], rules: EngineRules | None
) -> Iterator[tuple[Sequence[Replica], Sequence[Replica]]]:
    """Sets of which any two replicas may serve together, all such pairs among them."""
    if rules is None or rules.refuses_stages is any_stages:
        yield prefills, decodes
        return
    sides = prefills, decodes
    sent, taken = ({each.evaluation.strategy.pp for each in side} for side in sides)
    for stages in sorted(sent):
        joined = {stages}, {pp for pp in taken if not list(rules.refuses_stages(stages, pp))}
        left, right = (
            [each for each in side if each.evaluation.strategy.pp in some]
            for side, some in zip(sides, joined, strict=True)
        )
        yield left, right


def _order(each: Matched, limits: Limits) -> tuple[float, ...]:
    if limits.requests_per_s is not None:
        return (each.gpus, each.ttft_s)
    if limits.at_once is not None:
        return (each.gpus, -float(f"{each.requests_per_s:.12g}"), each.ttft_s)
    return (-float(f"{each.requests_per_s:.12g}"), each.gpus, each.ttft_s, each.prefills)


def _bests(
    prefills: Sequence[Replica], decodes: Sequence[Replica], limits: Limits, gpus: int, link: Link
) -> Iterator[Matched]:
    sides = (prefills, limits.ttft_s * (1 + RATE_ROUNDING)), (decodes, limits.tpot_s * (1 + RATE_ROUNDING))
    if limits.at_once is None:
        sides = tuple((unbeaten(*each), each[1]) for each in sides)  # else a slower one may hold more requests
    left, right = ([one for one in side if one.gpus < gpus and one.latency_s <= most_s] for side, most_s in sides)
    if not (left and right):
        return
    pairs = _Pairs(left, right, limits, link)
    sizes, others = (np.array([each.gpus for each in side]) for side in (left, right))
    load = limits.requests_per_s if limits.at_once is None else limits.at_once / pairs.stay_s(limits.output_tokens)
    if load is not None:
        with np.errstate(divide="ignore"):
            counts = np.ceil(load / pairs.into * (1 - 1e-12)), np.ceil(load / pairs.out_of * (1 - 1e-12))
        taken = counts[0] * sizes[:, None] + counts[1] * others
        if taken.min() <= gpus:
            yield from pairs.at(taken <= taken.min(), np.broadcast_to(load, taken.shape))
        return
    counts = _balanced(pairs, sizes[:, None], others, gpus)
    rates = [pairs.rate(count, _left_over(gpus, count, sizes[:, None], others)) for count in (counts, counts - 1)]
    rate = np.maximum(*rates)
    if rate.max() > 0:
        yield from pairs.at(rate >= rate.max() * (1 - _TIE), rate)


def _balanced(pairs: _Pairs, sizes: Floats, others: Floats, gpus: int) -> Floats:
    """The fewest prefill replicas of each pair that keep the decode replicas busy that fit beside them, at least one.

    More of them take in more, and leave room for fewer that put out: where the two cross is the best, or one before.
    """
    most = np.broadcast_to(np.maximum((gpus - 1) // sizes, 1), pairs.into.shape)
    low, high = np.ones_like(most), most
    while (low < high).any():
        middle = (low + high) // 2
        enough = middle * pairs.into >= _left_over(gpus, middle, sizes, others) * pairs.out_of
        low, high = np.where(enough, low, np.minimum(middle + 1, high)), np.where(enough, middle, high)
    return low


def _left_over(gpus: int, count: Floats, sizes: Floats, others: Floats) -> Floats:
    """Decode replicas that fit beside so many prefill replicas."""
    return np.maximum((gpus - count * sizes) // others, 0)


class _Pairs:
    """All pairs of a prefill and a decode replica, [prefills, decodes].

    Attributes:
        into: Requests a second that a prefill replica may be given, so that the first token is in time.
        out_of: That a decode replica makes, [decodes].
    """

    def __init__(self, left: Sequence[Replica], right: Sequence[Replica], limits: Limits, link: Link) -> None:
        self._left, self._right, self._link = left, right, link
        waits = {n: link.request_s(n, n) for n in {each.sharers for each in (*left, *right)}}
        self._transfer_s = np.array([[waits[min(one.sharers, other.sharers)] for other in right] for one in left])
        self._prompt_s = np.array([each.latency_s for each in left])
        self._tpot_s = np.array([each.latency_s for each in right])
        rest_s = self._transfer_s + self._tpot_s
        spare_s = limits.ttft_s * (1 + RATE_ROUNDING) - rest_s - self._prompt_s[:, None]
        with np.errstate(divide="ignore", invalid="ignore"):  # a bound may have prompts that take no time
            self._busiest = np.nan_to_num(np.clip(spare_s / (self._prompt_s[:, None] / 2), 0.0, 1.0))
        self._rest_s = rest_s
        self._rates = np.array([_carried(each, link) for each in left])
        self.into = self._busiest * self._rates[:, None]
        self.out_of = np.array([_carried(each, link) for each in right])

    def stay_s(self, output_tokens: float) -> Floats:
        """[prefills, decodes] seconds of a request from its start, which is at once, to its last token."""
        return self._prompt_s[:, None] + self._rest_s + (output_tokens - 1) * self._tpot_s

    def rate(self, prefills: Floats, decodes: Floats) -> Floats:
        """Requests a second of so many replicas."""
        return np.minimum(prefills * self.into, decodes * self.out_of)

    def at(self, where: NDArray[np.bool_], rate: Floats) -> Iterator[Matched]:
        """The pairs there, each with no more replicas than its rate takes."""
        for row, column in np.argwhere(where).tolist():
            load = float(rate[row, column])
            prefills = math.ceil(load / float(self.into[row, column]) * (1 - 1e-12))
            decodes = math.ceil(load / float(self.out_of[column]) * (1 - 1e-12))
            busy = min(1.0, load / (prefills * float(self._rates[row])))
            yield Matched(
                self._left[row],
                self._right[column],
                prefills,
                decodes,
                load,
                float(self._transfer_s[row, column]),
                float(self._prompt_s[row] * (1 + busy / 2) + self._rest_s[row, column]),
                self._link.same_node,
            )


def _carried(each: Replica, link: Link) -> float:
    """Requests a second of a replica: as it computes, or as its ports carry caches if that is less."""
    busy_s = link.sending_s(each.gpus)
    return min(each.requests_per_s, 1 / busy_s) if busy_s else each.requests_per_s
