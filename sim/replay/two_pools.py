"""Requests through two pools: prompts computed in one, their KV caches sent over, answers decoded in the other.

A request goes to the prefill replica with fewest unfinished ones. When its prompt is done, it goes to the decode
replica with fewest; its cache is sent as soon as the ports of both are free, and when it is there the request waits to
be let in. Its first token is that of its first decode step. A prefill replica gives its room back when the prompt is
done.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import lru_cache, partial

import numpy as np

from sim.pools.handover import Link, request_cache_bytes, sharers
from sim.replay.agenda import Agenda
from sim.replay.drive import Replayed, Watch, nobody, outcome_of
from sim.replay.replica import Deployed, LiveReplica, Log
from sim.replay.requests import Requests
from sim.strategy import Strategy
from sim.workload import Workload


@dataclass(frozen=True, slots=True)
class Handover:
    """The way of a KV cache between pools; seconds by the tokens of the prompt.

    Attributes:
        waits_s: That its request waits for it.
        sends_s: That the ports of its prefill replica are busy with it.
        receives_s: The same of its decode replica.
    """

    waits_s: Callable[[int], float]
    sends_s: Callable[[int], float]
    receives_s: Callable[[int], float]


def handover_of(
    prefill: Workload, strategies: tuple[Strategy, Strategy], *, same_node: bool, hidden: float = 0.0
) -> Handover:
    """The way of a KV cache between a prefill and a decode replica."""
    usual = prefill.prompt_tokens
    link = Link(prefill, same_node, request_cache_bytes(prefill, usual), hidden)
    both = min(sharers(prefill, each) for each in strategies)
    senders, receivers = (each.gpus for each in strategies)

    @lru_cache(maxsize=4096)
    def of(tokens: int) -> Link:
        return replace(link, cache_bytes=link.cache_bytes * tokens / usual)

    return Handover(
        lambda tokens: of(tokens).request_s(both, both),
        lambda tokens: of(tokens).sending_s(senders),
        lambda tokens: of(tokens).sending_s(receivers),
    )


@dataclass(frozen=True, slots=True)
class TwoPools:
    """A prefill pool and a decode pool.

    Attributes:
        prefill, decode: A replica of each.
        prefills, decodes: How many.
        handover: Between them.
    """

    prefill: Deployed
    decode: Deployed
    prefills: int
    decodes: int
    handover: Handover


def through_pools(
    pools: TwoPools, requests: Requests, clients: int | None = None, *, watch: Watch = nobody
) -> Replayed:
    """Sends requests at their times, or by clients who have one open each and all begin at once.

    Args:
        pools: Through which they go.
        requests: In the order in which they come.
        clients: How many, in place of the requests' times.
        watch: See `Watch`; not called where clients send. It is called first of prompts alone, computed at their first
            token's time at the earliest, and then of answers, before each of their events, as of all requests.
    """
    journey = _Journey(pools, requests, clients)
    return journey.as_they_come(watch) if clients is None else journey.by_clients()


class _Journey:
    """Requests on their way."""

    def __init__(self, pools: TwoPools, requests: Requests, clients: int | None) -> None:
        count = len(requests)
        self._pools, self._requests = pools, requests
        self._log, self._prompts_log = Log(count), Log(count)
        prompts_alone = replace(requests, output_tokens=np.ones(count, dtype=np.int64))
        self._prefills = [
            LiveReplica({0: pools.prefill}, prompts_alone, self._prompts_log, partial(self._computed, at))
            for at in range(pools.prefills)
        ]
        self._decodes = [
            LiveReplica({0: pools.decode}, requests, self._log, self._answered) for _ in range(pools.decodes)
        ]
        self._ports_s = [0.0] * pools.prefills, [0.0] * pools.decodes  # from when on they are free
        self._on_the_way = [0] * pools.decodes
        self._agenda = Agenda()
        self._sent = requests.arrival_s.copy() if clients is None else np.zeros(count)
        self._clients = count if clients is None else min(clients, count)
        self._left = deque(range(self._clients, count))

    def as_they_come(self, watch: Watch) -> Replayed:
        """All prompts first, which no answer holds up, then all answers."""
        for request, time_s in enumerate(self._sent.tolist()):
            for replica in self._prefills:
                replica.advance(time_s)
            watch(self._prompts_log, request, time_s)
            self._send(request, time_s)
        for replica in self._prefills:
            replica.advance(math.inf)
        while self._agenda:
            time_s, happening = self._agenda.pop()
            for replica in self._decodes:
                replica.advance(time_s)
            watch(self._log, len(self._sent), time_s)
            happening(time_s)
        for replica in self._decodes:
            replica.advance(math.inf)
        return self._outcome()

    def by_clients(self) -> Replayed:
        """All replicas together."""
        for request in range(self._clients):
            self._send(request, 0.0)
        self._agenda.run([*self._prefills, *self._decodes])
        return self._outcome()

    def _outcome(self) -> Replayed:
        self._log.steps += self._prompts_log.steps
        return outcome_of([*self._prefills, *self._decodes], self._requests, self._sent, self._log)

    def _send(self, request: int, time_s: float) -> None:
        if not min(self._prefills, key=lambda replica: replica.unfinished(time_s)).submit(request, time_s):
            self._answered(request, time_s)  # a client who is refused sends the next one

    def _computed(self, sender: int, request: int, time_s: float) -> None:
        self._agenda.enter(time_s, partial(self._hand_over, sender, request))

    def _hand_over(self, sender: int, request: int, time_s: float) -> None:
        def load(at: int) -> int:
            return self._decodes[at].unfinished(time_s) + self._on_the_way[at]

        receiver, tokens = min(range(len(self._decodes)), key=load), int(self._requests.prompt_tokens[request])
        (sends, receives), handover = self._ports_s, self._pools.handover
        begin_s = max(time_s, sends[sender], receives[receiver])
        sends[sender] = begin_s + handover.sends_s(tokens)
        receives[receiver] = begin_s + handover.receives_s(tokens)
        self._on_the_way[receiver] += 1
        self._agenda.enter(begin_s + handover.waits_s(tokens), partial(self._arrive, receiver, request))

    def _arrive(self, receiver: int, request: int, time_s: float) -> None:
        self._on_the_way[receiver] -= 1
        if not self._decodes[receiver].submit(request, time_s, computed=True):
            self._answered(request, time_s)

    def _answered(self, _request: int, time_s: float) -> None:
        if self._left:
            request = self._left.popleft()
            self._sent[request] = time_s
            self._agenda.enter(time_s, partial(self._send, request))
