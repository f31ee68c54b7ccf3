"""Requests sent to replicas: as they come, or by clients of whom each sends when it is answered."""

from __future__ import annotations

import itertools
import math
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Literal, get_args

import numpy as np

from sim.arrays import Flags, Floats
from sim.replay.agenda import Agenda
from sim.replay.replica import Deployed, LiveReplica, Log
from sim.replay.requests import Integers, Requests

RouterName = Literal["least_loaded", "round_robin", "prefix"]
"""Whom a request goes to: the replica with fewest unfinished ones, each in turn, or the one with most of its prompt
cached less what its load costs."""
ROUTERS: tuple[RouterName, ...] = get_args(RouterName)
_WORTH = 4
"""Blocks of a prompt in the cache that outweigh one more unfinished request. [assumed]"""


@dataclass(frozen=True, slots=True, eq=False)
class Replayed:
    """What became of requests, [n], on some replicas.

    Attributes:
        requests: As they were sent.
        sent_s: When; of a closed loop when their client was answered.
        first_s: When each had its first token; NaN of refused ones.
        done_s: When each had its last; NaN of refused ones.
        gap_s, gap_counts, gap_at_s: Times between tokens of an answer, how many there were of each, and when the first
            of these began.
        steps: [m, 5] of each stretch of steps: begins, ends, requests that run, that wait, tokens in the KV cache.
        busy_s: Seconds in which the first stages of all replicas worked.
        end_s: When the last one was done.
        replicas: How many.
        preempted: How often a request gave up its room and was computed anew.
        hit_share: Of the prompts' tokens, those found in a prefix cache.
    """

    requests: Requests
    sent_s: Floats
    first_s: Floats
    done_s: Floats
    gap_s: Floats
    gap_counts: Floats
    gap_at_s: Floats
    steps: Floats
    busy_s: float
    end_s: float
    replicas: int
    preempted: int
    hit_share: float

    @property
    def ttft_s(self) -> Floats:
        """From sending to the first token, [n]."""
        return self.first_s - self.sent_s

    @property
    def latency_s(self) -> Floats:
        """From sending to the last token, [n]."""
        return self.done_s - self.sent_s

    @property
    def tpot_s(self) -> Floats:
        """Mean time of an answer's tokens after its first one, [n]; NaN where there is none."""
        after = self.requests.output_tokens - 1
        return np.where(after > 0, (self.done_s - self.first_s) / np.maximum(after, 1), np.nan)


Watch = Callable[[Log, int, float], None]
"""Called before each request is sent, with what happened so far, its number and its time; it may raise to stop."""


def nobody(_log: Log, _request: int, _time_s: float) -> None:
    """Watches nothing."""


class LateForSure(Exception):
    """So many requests are late that the percentile misses its limit whatever comes."""


def until_late(requests: Requests, counted: Flags, limits_s: tuple[float, float], percentile: float) -> Watch:
    """Raises `LateForSure` once that is so; looks at every 32nd call.

    Args:
        requests: Sent at their times.
        counted: Those that the percentile is of, [n].
        limits_s: To the first token, and per token.
        percentile: Of both latencies.
    """
    sent_s, after, (ttft_limit_s, tpot_limit_s) = requests.arrival_s, requests.output_tokens - 1, limits_s
    total, calls = int(counted.sum()), itertools.count()
    enough = total - math.floor((total - 1) * percentile / 100)

    def watch(log: Log, request: int, time_s: float) -> None:
        if next(calls) % 32:
            return
        own, chosen = sent_s[:request], counted[:request]
        first_s, done_s = np.array(log.first_s[:request]), np.array(log.done_s[:request])
        late = np.where(np.isnan(first_s), time_s, first_s) - own > ttft_limit_s
        slow = done_s - first_s > tpot_limit_s * after[:request]  # not of NaN
        if max((late & chosen).sum(), (slow & chosen).sum()) >= enough:
            raise LateForSure

    return watch


def as_they_come(
    deployed: Deployed,
    requests: Requests,
    replicas: int = 1,
    router: RouterName = "least_loaded",
    watch: Watch = nobody,
) -> Replayed:
    """Sends requests at their times, whether or not earlier ones are answered.

    Args:
        deployed: Each replica.
        requests: In the order in which they come.
        replicas: How many.
        router: Whom a request goes to.
        watch: See `Watch`.
    """
    log = Log(len(requests))
    fleet = [LiveReplica({0: deployed}, requests, log) for _ in range(replicas)]
    choose = _router(router, fleet)
    for request, time_s in enumerate(requests.arrival_s.tolist()):
        for replica in fleet:
            replica.advance(time_s)
        watch(log, request, time_s)
        choose(request, time_s).submit(request, time_s)
    for replica in fleet:
        replica.advance(math.inf)
    return outcome_of(fleet, requests, requests.arrival_s.copy(), log)


@dataclass(frozen=True, slots=True, eq=False)
class GroupOutcome:
    """What became of requests of several models on groups of GPUs.

    Attributes:
        replayed: All of them; NaN of those that were refused or that no group serves.
        group: Where each went; -1 where no group has its model, [n].
        busy_s: Seconds in which each group's first stage worked, [groups].
    """

    replayed: Replayed
    group: Integers
    busy_s: Floats


def on_groups(
    groups: Sequence[Mapping[int, Deployed]],
    requests: Requests,
    models: Sequence[int],
    work_s: Sequence[float],
    watch: Watch = nobody,
) -> GroupOutcome:
    """Sends requests of several models to groups of GPUs, each to that with its model that has the least work.

    Args:
        groups: By the model's number, how it runs there.
        requests: Of all models, in the order in which they come.
        models: Whose each is, [n].
        work_s: Seconds of a group that a request of each model takes, by which the router goes.
        watch: See `Watch`; groups without a request's model have not come to its time.
    """
    log = Log(len(requests))
    fleet = [LiveReplica(group, requests, log) if group else None for group in groups]
    serving = [[at for at, group in enumerate(groups) if model in group] for model in range(len(work_s))]
    went = [-1] * len(requests)

    def work(at: int, time_s: float) -> float:
        replica = fleet[at]
        if replica is None:
            return math.inf
        waiting_s = sum(replica.unfinished_of(model) * work_s[model] for model in groups[at])
        return waiting_s + max(0.0, replica.free_s - time_s)

    for request, (time_s, model) in enumerate(zip(requests.arrival_s.tolist(), models, strict=True)):
        for at in serving[model]:
            if replica := fleet[at]:
                replica.advance(time_s)
        watch(log, request, time_s)
        if not serving[model]:
            continue
        at = went[request] = min(serving[model], key=lambda each: work(each, time_s))
        if replica := fleet[at]:
            replica.submit(request, time_s, model=model)
    for replica in fleet:
        if replica:
            replica.advance(math.inf)
    busy_s = np.array([replica.busy_s if replica else 0.0 for replica in fleet])
    working = [replica for replica in fleet if replica]
    return GroupOutcome(outcome_of(working, requests, requests.arrival_s.copy(), log), np.array(went), busy_s)


def _router(name: RouterName, fleet: Sequence[LiveReplica]) -> Callable[[int, float], LiveReplica]:
    turn = 0

    def in_turn(_request: int, _time_s: float) -> LiveReplica:
        nonlocal turn
        turn += 1
        return fleet[(turn - 1) % len(fleet)]

    def least_loaded(_request: int, time_s: float) -> LiveReplica:
        return min(fleet, key=lambda replica: replica.unfinished(time_s))

    def prefix(request: int, time_s: float) -> LiveReplica:
        return min(fleet, key=lambda each: each.unfinished(time_s) - each.cached_blocks(request) / _WORTH)

    if len(fleet) == 1:
        return lambda _request, _time_s: fleet[0]
    return {"round_robin": in_turn, "least_loaded": least_loaded, "prefix": prefix}[name]


def by_clients(
    deployed: Deployed,
    requests: Requests,
    clients: int,
    replicas: int = 1,
    router: RouterName = "least_loaded",
    *,
    staggered: bool = False,
) -> Replayed:
    """Sends requests as clients do who have one open each, and the next one when it is answered.

    Args:
        deployed: Each replica.
        requests: Taken in order; their times do not matter.
        clients: How many, of all replicas together.
        replicas: How many.
        router: Whom a request goes to.
        staggered: Whether clients begin at even distances over the time of an answer, as if they had run for ever; else
            all at once, as benchmarks do.
    """
    count = len(requests)
    log, sent, agenda = Log(count), np.zeros(count), Agenda()
    left = deque(range(min(clients, count), count))

    def submitted(request: int, time_s: float) -> bool:
        sent[request] = time_s
        return choose(request, time_s).submit(request, time_s)

    def send(request: int, time_s: float) -> None:
        if not submitted(request, time_s):
            answered(request, time_s)  # who is refused sends the next one at once

    def answered(_request: int, time_s: float) -> None:
        while left:
            request = left.popleft()
            if replicas > 1:  # others have not come to that time
                agenda.enter(time_s, partial(send, request))
                return
            if submitted(request, time_s):
                return

    fleet = [LiveReplica({0: deployed}, requests, log, answered) for _ in range(replicas)]
    choose = _router(router, fleet)
    first = range(min(clients, count))
    if staggered:
        requests.output_tokens[: len(first)] = [
            max(1, round(requests.output_tokens[each] * (each + 1) / len(first))) for each in first
        ]
    for request in first:
        send(request, 0.0)
    agenda.run(fleet)
    return outcome_of(fleet, requests, sent, log)


def outcome_of(fleet: Sequence[LiveReplica], requests: Requests, sent_s: Floats, log: Log) -> Replayed:
    """What became of requests that were sent at these times and whose answers a log has.

    Args:
        fleet: All replicas through which they went.
        requests: All.
        sent_s: When, [n].
        log: Of what users see, and of the steps behind it.
    """
    ranks = [rank for replica in fleet for rank in replica.ranks]
    gaps = np.array(log.gaps).reshape(-1, 3)
    done = np.array(log.done_s)
    looked_up = sum(rank.looked_up_tokens for rank in ranks)
    return Replayed(
        requests,
        sent_s,
        np.array(log.first_s),
        done,
        gaps[:, 0],
        gaps[:, 1],
        gaps[:, 2],
        np.array(log.steps).reshape(-1, 5),
        sum(replica.busy_s for replica in fleet),
        float(np.nanmax(done, initial=0.0)),
        len(fleet),
        sum(rank.preempted for rank in ranks),
        sum(rank.hit_tokens for rank in ranks) / looked_up if looked_up else 0.0,
    )
