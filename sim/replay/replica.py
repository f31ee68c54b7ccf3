"""One replica of a deployment under traffic: its pipeline's microbatches and attention ranks, step by step.

All attention ranks go through a step together, which takes as long as the busiest one. Of a pipeline each microbatch
has its ranks and requests of its own, and a stage works on one microbatch at a time. Several models may share the GPUs:
each has its own engine there, and stages work on a step of one after that of another, whichever could begin first.
Steps that only decode are not simulated one by one: until someone ends, comes or has to go they are added up.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from sim.replay.rank_queue import RankPlan, RankQueue
from sim.replay.requests import Requests
from sim.replay.scheduler import Scheduler, scheduler_of
from sim.replay.step_prices import IDLE, StepPrices
from sim.strategy import Strategy
from sim.workload import Workload

OnDone = Callable[[int, float], None]
"""Called with a request and the second at which it was answered."""


@dataclass(frozen=True, slots=True)
class Deployed:
    """A replica as it is run, whatever it is sent.

    Attributes:
        prices: Of its steps.
        scheduler: Of each rank.
        room_tokens: Of a rank's KV cache, for one microbatch.
        beside_tokens: That a sequence takes beside its own.
        slower: Times the step model's seconds that steps take.
        patience_s: A request that has waited for so long when its prompt could begin is refused.
    """

    prices: StepPrices
    scheduler: Scheduler
    room_tokens: float
    beside_tokens: float
    slower: float = 1.0
    patience_s: float = math.inf

    @classmethod
    def of(cls, workload: Workload, strategy: Strategy, *, as_shipped: bool = False) -> Deployed:
        """A strategy as its engine runs it; its batch is the most that it lets run at once.

        Args:
            workload: Model, machine, engine and usual lengths.
            strategy: Of the replica.
            as_shipped: As of `sim.replay.scheduler.scheduler_of`.
        """
        prices = StepPrices(workload, strategy)
        scheduler = scheduler_of(workload, strategy.batch, strategy.attention_dp, as_shipped=as_shipped)
        usual = max(2, workload.prompt_tokens + workload.output_tokens // 2 or workload.context_tokens)
        longest = max(usual, workload.prompt_tokens)
        most = min(scheduler.policy.step_tokens, max(longest, 1))
        return cls(prices, scheduler, *prices.cache_room(most, usual))

    @property
    def strategy(self) -> Strategy:
        """Of the replica."""
        return self.prices.strategy


class Log:
    """What happens to requests and steps, as it happens.

    Attributes:
        first_s, done_s: Of each request, NaN before, [n].
        steps: Of each stretch of steps of a microbatch: (begins, ends, requests that run, that wait, used tokens of
            the KV cache).
        gaps: Between tokens of those that decode: (seconds, how many).
        refused: Requests that never fit.
    """

    def __init__(self, count: int) -> None:
        self.first_s: list[float] = [math.nan] * count
        self.done_s: list[float] = [math.nan] * count
        self.steps: list[tuple[float, float, int, int, float]] = []
        self.gaps: list[tuple[float, float]] = []
        self.refused: list[int] = []


class _Lane:
    """A microbatch of a model.

    Attributes:
        now: When its next step may begin.
        model: Whose.
        deployed: How it runs.
        ranks: Of attention.
    """

    def __init__(self, model: int, deployed: Deployed, requests: Requests) -> None:
        self.now, self.model, self.deployed = 0.0, model, deployed
        gained, room = deployed.prices.workload.tokens_per_step, (deployed.room_tokens, deployed.beside_tokens)
        ranks = deployed.strategy.attention_dp
        self.ranks = [RankQueue(requests, deployed.scheduler, *room, gained) for _ in range(ranks)]

    @property
    def idle(self) -> bool:
        return all(rank.idle for rank in self.ranks)


class LiveReplica:
    """Deployed models at work on the same GPUs, one or several, all in as many pipeline stages.

    Attributes:
        log: Of what happened.
        busy_s: Seconds in which its first stage worked.
    """

    def __init__(
        self, models: Mapping[int, Deployed], requests: Requests, log: Log, on_done: OnDone | None = None
    ) -> None:
        self.log, self.busy_s = log, 0.0
        (self._stages,) = {deployed.strategy.pp for deployed in models.values()}
        self._lanes = [
            _Lane(model, deployed, requests) for model, deployed in models.items() for _ in range(self._stages)
        ]
        self._free_s = [0.0] * self._stages
        self._on_done = on_done

    @property
    def ranks(self) -> list[RankQueue]:
        """Of all microbatches."""
        return [rank for lane in self._lanes for rank in lane.ranks]

    @property
    def unfinished(self) -> int:
        """Requests that wait or run."""
        return sum(rank.waiting + rank.running for rank in self.ranks)

    def unfinished_of(self, model: int) -> int:
        """Those of one model."""
        return sum(rank.waiting + rank.running for lane in self._lanes if lane.model == model for rank in lane.ranks)

    @property
    def free_s(self) -> float:
        """When its first stage is through with the step that it has begun."""
        return self._free_s[0]

    @property
    def next_s(self) -> float:
        """When its next step may begin; infinite where there is nothing to do."""
        return max(min((lane.now for lane in self._lanes if not lane.idle), default=math.inf), self._free_s[0])

    def submit(self, request: int, time_s: float, *, model: int = 0, computed: bool = False) -> bool:
        """A request comes, to the rank with fewest; the replica must have been advanced to that time.

        Args:
            request: Its number.
            time_s: When.
            model: Whose.
            computed: Whether its prompt comes computed from another pool.

        Returns:
            Whether it has room; else it is refused.
        """
        lanes = [lane for lane in self._lanes if lane.model == model]
        lane = min(lanes, key=lambda lane: (sum(rank.waiting + rank.running for rank in lane.ranks), lane.now))
        rank = min(lane.ranks, key=lambda rank: rank.waiting + rank.running)
        if lane.idle:
            lane.now = max(lane.now, time_s)
        fits = rank.submit(request, computed=computed)
        if not fits:
            self.log.refused.append(request)
        return fits

    def cached_blocks(self, request: int) -> int:
        """How many of a request's first blocks are in the prefix cache of the rank that has most of them."""
        return max(rank.cached_blocks(request) for rank in self.ranks)

    def advance(self, until_s: float) -> None:
        """Runs all steps that begin before a time, which may be infinite."""
        while True:
            busy = [lane for lane in self._lanes if not lane.idle]
            if not busy:
                return
            lane = min(busy, key=lambda lane: lane.now)
            begin_s = max(lane.now, self._free_s[0])
            if begin_s >= until_s:
                return
            if (patience_s := lane.deployed.patience_s) < math.inf:
                for rank in lane.ranks:
                    self.log.refused += rank.give_up(begin_s - patience_s)
                if lane.idle:
                    continue
            alone = min(rank.steps_alone() for rank in lane.ranks) if self._stages == len(busy) == 1 else 0
            if alone >= 1:
                lane.now = begin_s
                self._decode(lane, int(alone), until_s)
                self._free_s[0] = lane.now
            else:
                self._step(lane)

    def _step(self, lane: _Lane) -> None:
        """One step of whatever is due."""
        plans = [rank.plan() for rank in lane.ranks]
        seconds, engine_s = _seconds(lane.deployed, plans)
        begin_s, end_s = self._through_stages(lane.now, seconds, engine_s)
        self._note(lane, begin_s, end_s)
        lane.now = end_s
        took_s = end_s - begin_s
        log = self.log
        for rank, plan in zip(lane.ranks, plans, strict=True):
            decoding = rank.sequences
            if plan.decodes:
                log.gaps.append((rank.stalled_s + took_s, decoding))
                rank.stalled_s = 0.0
            elif decoding:
                rank.stalled_s += took_s
            first, ended = rank.finish(plan)
            for request in first:
                if math.isnan(log.first_s[request]):
                    log.first_s[request] = end_s
            self._answered(ended, end_s)

    def _through_stages(self, begin_s: float, seconds: float, engine_s: float) -> tuple[float, float]:
        """(begins, ends): each stage is free for the next microbatch after its own share."""
        stage_s = seconds / self._stages + engine_s  # no stage spends it on another microbatch
        begin_s = at_s = max(begin_s, self._free_s[0])
        for stage, free_s in enumerate(self._free_s):
            at_s = max(at_s, free_s) + stage_s
            self._free_s[stage] = at_s
        self.busy_s += stage_s
        return begin_s, at_s

    def _decode(self, lane: _Lane, most: int, until_s: float) -> None:
        """Up to so many steps in which all ranks only decode, as far as they begin before a time."""
        ranks, prices, slower = lane.ranks, lane.deployed.prices, lane.deployed.slower
        busiest = max(ranks, key=lambda rank: rank.context_tokens)
        sequences = max(rank.sequences for rank in ranks)
        context = busiest.context_tokens / sequences
        growth = busiest.sequences / sequences * prices.workload.tokens_per_step  # of `context` in a step
        at_zero, slope, last = prices.decode_line(sequences, context)
        steps = min(most, max(1, math.floor((last - context) / growth)))
        first_s = slower * (at_zero + slope * context + prices.engine_s(sequences))
        more_s = slower * slope * growth  # that each step takes longer than the one before
        steps = min(steps, _steps_until(until_s - lane.now, first_s, more_s))
        took_s = steps * first_s + more_s * steps * (steps - 1) / 2
        self._note(lane, lane.now, lane.now + took_s)
        lane.now += took_s
        self.busy_s += took_s
        each_s = took_s / steps
        for rank in ranks:
            if rank.sequences:
                if rank.stalled_s:
                    self.log.gaps.append((rank.stalled_s + each_s, rank.sequences))
                    rank.stalled_s = 0.0
                    self.log.gaps.append((each_s, rank.sequences * (steps - 1)))
                else:
                    self.log.gaps.append((each_s, rank.sequences * steps))
            rank.decode(steps)
            self._answered(rank.ended(), lane.now)

    def _answered(self, ended: list[int], time_s: float) -> None:
        for request in ended:
            self.log.done_s[request] = time_s
            if self._on_done:
                self._on_done(request, time_s)

    def _note(self, lane: _Lane, begin_s: float, end_s: float) -> None:
        running = waiting = 0
        used = 0.0
        for rank in lane.ranks:
            running += rank.running
            waiting += rank.waiting
            used += rank.used_tokens
        self.log.steps.append((begin_s, end_s, running, waiting, used))


def _seconds(deployed: Deployed, plans: list[RankPlan]) -> tuple[float, float]:
    """(kernels and collectives, the engine's own) of a step."""
    prices, slower = deployed.prices, deployed.slower
    steps = [plan.step for plan in plans]
    if len(steps) == 1:
        busiest, all_prompts = steps[0], steps[0].prompt_tokens
    else:
        most = max(steps, key=lambda step: step.prompt_tokens)
        decoding = max(steps, key=lambda step: step.context_tokens, default=IDLE)
        sequences = max(step.sequences for step in steps)
        busiest = most._replace(sequences=sequences, context_tokens=decoding.context_tokens)
        all_prompts = sum(step.prompt_tokens for step in steps)
    return slower * prices.step_s(busiest, all_prompts), slower * prices.engine_s(busiest.sequences)


def _steps_until(seconds: float, first_s: float, more_s: float) -> int:
    """Fewest steps, at least one, after which so many seconds have gone by; each takes `more_s` longer than the last.

    >>> _steps_until(10.0, 1.0, 0.0), _steps_until(10.5, 1.0, 0.0), _steps_until(10.0, 1.0, 1.0)
    (10, 11, 4)
    """
    if seconds == math.inf:
        return 2**62
    if abs(more_s) * seconds < 1e-9 * first_s**2:
        return max(1, math.ceil(seconds / first_s - 1e-9))
    half = first_s - more_s / 2
    root = half * half + 2 * more_s * seconds
    return max(1, math.ceil((math.sqrt(root) - half) / more_s - 1e-9)) if root > 0 else 2**62
