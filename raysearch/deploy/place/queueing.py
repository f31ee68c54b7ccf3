"""Simulated queueing: requests of several models on groups of GPUs, event by event.

A request goes, when it arrives, to the group with its model that has the least work. A group takes prompts one by one
in the order of their arrival: each of its pipeline stages works on one prompt at a time, so the next one enters after a
stage's time. When its turn comes, a request that could not have its first token in time is refused, at no cost; one for
which the KV cache has no room waits, and holds up those behind it. After its prompt a request decodes. All that decode
on a group, of whichever models, take turns: a round gives a token to each, and takes the sum of their steps' times in a
stage, or the longest way through the pipeline. Prompts go before decoding: while one is in the first stage, rounds
stand still.

Between two events everything runs at a constant rate, so that a round is never simulated by itself: the state is exact
at each event, and a request ends when the rounds since its first token have made its answer.

Source: AlpaServe, sections 3 and 5 (first come first served, refusal of what would be late, the least loaded group);
its requests are one pass through the model, as here those with an answer of one token are.
"""

from __future__ import annotations

import heapq
import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from raysearch.deploy.place.service import Objective, Service
from sim.arrays import Floats
from sim.replay.arrivals import Arrivals

_LEFT = 1e-6
"""Tokens that rounding may leave of an answer."""


@dataclass(frozen=True, slots=True)
class GpuGroup:
    """GPUs that serve some models together.

    Attributes:
        stages: Of the pipeline.
        services: By the model's number.
    """

    stages: int
    services: dict[int, Service]


@dataclass(frozen=True, slots=True, eq=False)
class QueueOutcome:
    """What became of each request, [n].

    Attributes:
        group: Where it went; -1 where no group has its model.
        start_s: When its prompt began; NaN of refused ones.
        first_s: When it had its first token; NaN of refused ones.
        done_s: When it had its last; NaN of refused ones.
        busy_s: Of each group, seconds of work of its first stage.
        end_s: When the last request was done.
    """

    group: NDArray[np.int64]
    start_s: Floats
    first_s: Floats
    done_s: Floats
    busy_s: Floats
    end_s: float

    def in_time(self, arrivals: Arrivals, objectives: Sequence[Objective]) -> NDArray[np.bool_]:
        """Which requests met their objectives, [n]."""
        limit = 1 + 1e-9  # seconds are added up in another order than when the request was let in
        ttft_s, answer_s = (
            limit * np.array(each)[arrivals.models] for each in zip(*map(_limits_s, objectives), strict=True)
        )
        soon, fast = self.first_s - arrivals.times_s <= ttft_s, self.done_s - self.first_s <= answer_s
        return soon & fast  # NaN is never in time


def _limits_s(objective: Objective) -> tuple[float, float]:
    """Longest times to the first token, and from there to the last."""
    after = objective.output_tokens - 1
    return objective.ttft_s, objective.tpot_s * after if after else math.inf


def simulate(groups: Sequence[GpuGroup], objectives: Sequence[Objective], arrivals: Arrivals) -> QueueOutcome:
    """Runs all requests through the groups, until the last one is done.

    Args:
        groups: With the models that each serves.
        objectives: One per model.
        arrivals: Requests of all models.
    """
    count = len(arrivals)
    start, first, done = ([math.nan] * count for _ in range(3))
    times, models = arrivals.times_s.tolist(), arrivals.models.tolist()
    queues = [_Queue(group, objectives, times, models, (start, first, done)) for group in groups]
    serving = [[at for at, group in enumerate(groups) if model in group.services] for model in range(len(objectives))]
    went = [-1] * count
    for request, (time_s, model) in enumerate(zip(times, models, strict=True)):
        least_s, where = math.inf, -1
        for at in serving[model]:
            queue = queues[at]
            if queue.next_s <= time_s:
                queue.advance(time_s)
            if queue.work_s < least_s:
                least_s, where = queue.work_s, at
        if where >= 0:
            went[request] = where
            queues[where].advance(time_s)
            queues[where].take(request)
    for queue in queues:
        queue.advance(math.inf)
    ends = [queue.now for queue in queues]
    return QueueOutcome(
        np.array(went, dtype=np.int64),
        np.array(start),
        np.array(first),
        np.array(done),
        np.array([queue.busy_s for queue in queues]),
        max(ends, default=0.0),
    )


class _Queue:
    """One group's state, exact at `now`.

    Attributes:
        now: Until when the group has been simulated.
        next_s: When something happens next in the group, unless a request is taken before.
        work_s: Seconds of stages that the requests in the group took or will take.
        busy_s: Seconds of work that its first stage has done.
    """

    def __init__(
        self,
        group: GpuGroup,
        objectives: Sequence[Objective],
        times: list[float],
        models: list[int],
        state: tuple[list[float], list[float], list[float]],
    ) -> None:
        self.now = self.work_s = self.busy_s = 0.0
        self.next_s = math.inf
        self._services, self._objectives = group.services, objectives
        self._times, self._models = times, models
        self._start, self._first, self._done = state
        self._waiting: deque[int] = deque()
        self._free_s = [0.0] * group.stages  # when each stage can take the next prompt
        self._prompts: deque[tuple[float, int]] = deque()  # first token's time, request: those in the pipeline
        self._decoding: list[tuple[float, int]] = []  # heap: rounds at the answer's end, request
        self._running = dict.fromkeys(group.services, 0)
        self._in_flight = dict.fromkeys(group.services, 0)  # running, or their prompts are in the pipeline
        self._rounds = 0.0
        self._round_s = self._used_s = 0.0  # of a round: how long it takes, and how much of it is a stage's work
        allowed = min((each.allowed_bytes for each in group.services.values()), default=0.0)
        self._room_bytes = allowed - sum(each.fixed_bytes for each in group.services.values())
        self._request_s = {model: self._alone_s(model) for model in group.services}

    def _alone_s(self, model: int) -> float:
        """Seconds of a stage that a request takes at least: its share of full rounds."""
        service, after = self._services[model], self._objectives[model].output_tokens - 1
        most = service.most_requests
        return service.slot_s + (after * service.use_s[most] / most if after else 0.0)

    def take(self, request: int) -> None:
        """Lets a request in that arrives at `now`, to which the group must have been advanced."""
        self._waiting.append(request)
        self.next_s = self.now
        self.work_s += self._request_s[self._models[request]]

    def advance(self, until_s: float) -> None:
        """Goes on to a time, which may be infinite."""
        while True:
            self._begin_prompts()
            next_s = math.inf
            stage_free_s = self._free_s[0]
            decodes = False
            if stage_free_s > self.now:
                next_s = stage_free_s
            elif self._decoding:
                decodes = True
                next_s = self.now + max(0.0, self._decoding[0][0] - self._rounds) * self._round_s
            if self._prompts and self._prompts[0][0] < next_s:
                next_s = self._prompts[0][0]
            if next_s > until_s or next_s == math.inf:
                self.next_s = next_s
                if until_s != math.inf:
                    self._run(until_s - self.now, decodes)
                    self.now = until_s
                return
            self._run(next_s - self.now, decodes)
            self.now = next_s
            while self._prompts and self._prompts[0][0] <= self.now:
                self._answer(self._prompts.popleft()[1])
            while self._decoding and self._decoding[0][0] - self._rounds <= _LEFT:
                self._end(heapq.heappop(self._decoding)[1])

    def _run(self, seconds: float, decodes: bool) -> None:
        if decodes:
            self._rounds += seconds / self._round_s
            self.busy_s += seconds * self._used_s / self._round_s

    def _begin_prompts(self) -> None:
        """Takes prompts from the head of the queue while the first stage is free and there is room."""
        while self._waiting and self._free_s[0] <= self.now:
            request = self._waiting[0]
            model = self._models[request]
            service = self._services[model]
            time_s, slot_s, clocks = self.now, service.slot_s, []
            for free_s in self._free_s:
                time_s = (free_s if free_s > time_s else time_s) + slot_s
                clocks.append(time_s)
            if time_s - self._times[request] > self._objectives[model].ttft_s * (1 + 1e-12):
                self._waiting.popleft()
                self.work_s -= self._request_s[model]
                continue
            if self._in_flight[model] >= service.most_requests or service.request_bytes > self._room_bytes:
                return
            self._waiting.popleft()
            self._free_s = clocks
            self.busy_s += slot_s
            self._in_flight[model] += 1
            self._room_bytes -= service.request_bytes
            self._start[request] = self.now
            self._first[request] = time_s
            self._prompts.append((time_s, request))

    def _answer(self, request: int) -> None:
        """A request has its first token: it decodes the rest, if there is any."""
        model = self._models[request]
        after = self._objectives[model].output_tokens - 1
        if after == 0:
            self._leave(request, model)
            return
        self._running[model] += 1
        heapq.heappush(self._decoding, (self._rounds + after, request))
        self._pace()

    def _end(self, request: int) -> None:
        model = self._models[request]
        self._running[model] -= 1
        self._pace()
        self._leave(request, model)

    def _leave(self, request: int, model: int) -> None:
        self._done[request] = self.now
        self._in_flight[model] -= 1
        self._room_bytes += self._services[model].request_bytes
        self.work_s -= self._request_s[model]

    def _pace(self) -> None:
        """How long a round takes with those that decode now."""
        used_s = longest_s = 0.0
        for model, count in self._running.items():
            if count:
                service = self._services[model]
                used_s += service.use_s[count]
                longest_s = max(longest_s, service.latency_s[count])
        self._used_s, self._round_s = used_s, max(used_s, longest_s)
