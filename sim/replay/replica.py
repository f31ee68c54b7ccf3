"""One replica of a deployment under traffic: its pipeline's microbatches and attention ranks, step by step.

All attention ranks go through a step together, which takes as long as the busiest one. Of a pipeline each microbatch
has its ranks and requests of its own, and a stage works on one microbatch at a time. Several models may share the GPUs:
each has its own engine there, and stages work on a step of one after that of another, whichever could begin first.
Steps that only decode are not planned one by one: until someone ends, comes or has to go their times follow from each
other, and on a single stage they are added up.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from operator import attrgetter, itemgetter

from sim.replay.in_turn import in_turn
from sim.replay.rank_queue import RankPlan, RankQueue
from sim.replay.requests import Requests
from sim.replay.scheduler import Scheduler, scheduler_of
from sim.replay.step_prices import IDLE, StepPrices
from sim.strategy import Strategy
from sim.workload import Workload

_NOW, _CONTEXT = attrgetter("now"), attrgetter("context_tokens")
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
        sizes = strategy.batch, strategy.attention_dp, strategy.pp
        scheduler = scheduler_of(workload, *sizes, as_shipped=as_shipped)
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
        gaps: Between tokens of those that decode: (seconds, how many, when the first of them began).
        refused: Requests that never fit.
    """

    def __init__(self, count: int) -> None:
        self.first_s: list[float] = [math.nan] * count
        self.done_s: list[float] = [math.nan] * count
        self.steps: list[tuple[float, float, int, int, float]] = []
        self.gaps: list[tuple[float, float, float]] = []
        self.refused: list[int] = []


@dataclass(slots=True)
class _Spell:
    """Steps of a microbatch in which all ranks only decode: nobody ends, is let in or has to go before the last one.

    Attributes:
        left: Steps to come.
        sequences: Of the busiest rank.
        next_s: Kernels and collectives of the next step.
        more_s: By which each takes longer than the one before.
        engine_s: The engine's own of each.
        taken: Steps that ranks do not know of yet.
        began_s: When the first of them began.
    """

    left: int
    sequences: int
    next_s: float
    more_s: float
    engine_s: float
    taken: int = 0
    began_s: float = 0.0


class _Lane:
    """A microbatch of a model.

    Attributes:
        now: When its next step may begin.
        model: Whose.
        deployed: How it runs.
        ranks: Of attention.
        spell: In a pipeline, decode steps that it is in.
    """

    def __init__(self, model: int, deployed: Deployed, requests: Requests) -> None:
        self.now, self.model, self.deployed = 0.0, model, deployed
        gained, room = deployed.prices.workload.tokens_per_step, (deployed.room_tokens, deployed.beside_tokens)
        ranks = deployed.strategy.attention_dp
        self.ranks = [RankQueue(requests, deployed.scheduler, *room, gained) for _ in range(ranks)]
        self.spell: _Spell | None = None
        # No other rank to wait for, and a scheduler that sees who comes at once.
        self._alone = ranks == deployed.scheduler.receive_steps == 1
        self._since_look = 0  # decode steps since the scheduler looked for new requests
        self._waited = 0  # steps that prompts have waited for those of other ranks

    @property
    def idle(self) -> bool:
        return all(rank.idle for rank in self.ranks)

    def decode_spell(self) -> _Spell | None:
        """The steps before anything but decoding is due; None where that is now."""
        ranks, prices, slower = self.ranks, self.deployed.prices, self.deployed.slower
        most, busiest = ranks[0].steps_alone(), ranks[0]
        sequences = busiest.sequences
        if not self._alone:
            most = min(self._steps_unseen(), self._steps_delayed(), *[rank.steps_alone() for rank in ranks])
            busiest = max(ranks, key=_CONTEXT)
            sequences = max(rank.sequences for rank in ranks)
        if most < 1:
            return None
        context = busiest.context_tokens / sequences
        growth = busiest.sequences / sequences * prices.workload.tokens_per_step  # of `context` in a step
        at_zero, slope, last = prices.decode_line(sequences, context)
        steps = int(min(most, max(1, math.floor((last - context) / growth))))
        first_s, more_s = slower * (at_zero + slope * context), slower * slope * growth
        return _Spell(steps, sequences, first_s, more_s, slower * prices.engine_s(sequences))

    def passed(self, steps: int, *, prompts: bool = False) -> None:
        """So many steps are over, in which prompts were computed or not; who is answered by the last is known later."""
        if self._alone:
            return
        if self.ranks[0].delayed:
            self._waited += steps
        looks, self._since_look = divmod(self._since_look + steps, self.deployed.scheduler.receive_steps)
        if prompts:
            self._since_look = 0
        if looks or prompts:
            for rank in self.ranks:
                rank.look()

    def _steps_unseen(self) -> float:
        """Steps before the scheduler looks for those whom it has not seen; infinite where there are none."""
        if not any(rank.unseen for rank in self.ranks):
            return math.inf
        if not any(rank.running for rank in self.ranks):  # it has nothing else to do
            self.passed(0, prompts=True)
            return math.inf
        return self.deployed.scheduler.receive_steps - self._since_look

    def _steps_delayed(self) -> float:
        """Steps for which prompts still wait for those of other ranks; infinite where none does."""
        most = self.deployed.scheduler.balance_steps
        if not most:
            return math.inf
        wanting = [rank.wants_in for rank in self.ranks]
        holds = any(wanting) and not all(wanting) and all(rank.sequences for rank in self.ranks)
        if not holds or self._waited >= most:
            self._waited, holds = 0, False
        for rank in self.ranks:
            rank.delayed = holds
        return most - self._waited if holds else math.inf


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
        self._ends_s: list[float] = []  # of requests that are answered at the end of a step that has begun
        self._busy: list[_Lane] | None = None  # that are not idle; None: to be looked up
        self._open = 0  # requests that wait or run
        # On a single stage decode steps are left until somebody asks or comes: up to when it has been advanced, what it
        # decodes, and when the last step of that begins.
        self._until_s = self._quiet_s = -math.inf
        self._ahead: tuple[_Lane, _Spell] | None = None
        self._on_done = on_done

    @property
    def ranks(self) -> list[RankQueue]:
        """Of all microbatches."""
        self._catch_up()
        return [rank for lane in self._lanes for rank in lane.ranks]

    def unfinished(self, time_s: float) -> int:
        """Requests that are not answered at a time up to which it has been advanced.

        Steps that have begun by then are reckoned whole: who has the last token at their end is not answered yet.
        """
        if self._ends_s:
            self._ends_s = [end_s for end_s in self._ends_s if end_s > time_s]
        return len(self._ends_s) + self._open

    def unfinished_of(self, model: int) -> int:
        """Those of one model."""
        return sum(rank.waiting + rank.running for lane in self._lanes if lane.model == model for rank in lane.ranks)

    @property
    def free_s(self) -> float:
        """When its first stage is through with the step that it has begun."""
        self._catch_up()
        return self._free_s[0]

    @property
    def next_s(self) -> float:
        """When its next step may begin; infinite where there is nothing to do."""
        self._catch_up()
        return max(min((lane.now for lane in self._lanes if not lane.idle), default=math.inf), self._free_s[0])

    @property
    def answers_from_s(self) -> float:
        """When the step may begin after which somebody may be answered next; infinite where there is nothing to do."""
        return self.next_s if self._ahead is None else self._quiet_s

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
        self._catch_up()
        lanes = [lane for lane in self._lanes if lane.model == model]
        lane = min(lanes, key=lambda lane: (sum(rank.waiting + rank.running for rank in lane.ranks), lane.now))
        rank = min(lane.ranks, key=lambda rank: rank.waiting + rank.running)
        self._end_spell(lane)
        if lane.idle:
            lane.now = max(lane.now, time_s)
            self._busy = None
        fits = rank.submit(request, computed=computed)
        self._open += fits
        if not fits:
            self.log.refused.append(request)
        return fits

    def cached_blocks(self, request: int) -> int:
        """How many of a request's first blocks are in the prefix cache of the rank that has most of them."""
        return max(rank.cached_blocks(request) for rank in self.ranks)

    def advance(self, until_s: float, *, pause: bool = False) -> None:
        """Runs all steps that begin before a time, which may be infinite.

        Args:
            until_s: The time.
            pause: Whether it stops after a step that answers a request, upon which others may come.
        """
        if until_s <= self._quiet_s:
            self._until_s = until_s
            return
        ended, self._until_s = len(self._ends_s), until_s
        self._catch_up()
        while not pause or len(self._ends_s) == ended:
            if self._busy is None:
                self._busy = [lane for lane in self._lanes if not lane.idle]
            if not self._busy:
                return
            lane = min(self._busy, key=_NOW)
            begin_s = max(lane.now, self._free_s[0])
            if begin_s >= until_s:
                return
            if (patience_s := lane.deployed.patience_s) < math.inf:
                late_s = begin_s - patience_s
                given_up = [each for rank in lane.ranks if rank.waiting for each in rank.give_up(late_s)]
                if given_up:
                    self.log.refused += given_up
                    self._open -= len(given_up)
                    self._end_spell(lane)
                    if lane.idle:
                        self._busy = None
                        continue
            spell = lane.spell or lane.decode_spell()
            if spell is None:
                self._step(lane)
            elif self._stages == len(self._busy) == 1 and lane.spell is None:
                lane.now = begin_s
                last_s = begin_s + _took_s(spell, spell.left - 1)
                if until_s <= last_s and patience_s == math.inf:
                    self._ahead, self._until_s, self._quiet_s = (lane, spell), until_s, last_s
                    return
                self._decode(lane, spell, until_s)
            else:
                lane.spell = spell
                given_up_s = max(math.nextafter(begin_s, math.inf), self._given_up_s())
                self._in_turn(sorted(self._busy, key=_NOW), min(until_s, given_up_s))

    def _catch_up(self) -> None:
        """Goes the decode steps that were left, as far as it has been advanced."""
        if self._ahead is None:
            return
        (lane, spell), self._ahead, self._quiet_s = self._ahead, None, -math.inf
        if self._until_s > lane.now:
            self._decode(lane, spell, self._until_s)

    def _given_up_s(self) -> float:
        """When the first of those that wait is refused, as long as none of them is let in."""
        patient = [lane for lane in self._lanes if lane.deployed.patience_s < math.inf]
        since_s = [lane.deployed.patience_s + rank.waits_since_s for lane in patient for rank in lane.ranks]
        return min(since_s, default=math.inf)

    def _step(self, lane: _Lane) -> None:
        """One step of whatever is due."""
        plans = [rank.plan() for rank in lane.ranks]
        seconds, engine_s = _seconds(lane.deployed, plans)
        begin_s, end_s = self._through_stages(lane.now, seconds, engine_s)
        self._note(lane, begin_s, end_s)
        took_s = end_s - lane.now  # since the last token: until the first stage was free, and the step
        lane.now = end_s
        log = self.log
        lane.passed(1, prompts=any(plan.chunks for plan in plans))
        for rank, plan in zip(lane.ranks, plans, strict=True):
            decoding = rank.sequences
            if plan.decodes:
                log.gaps.append((rank.stalled_s + took_s, decoding, end_s - took_s))
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
            self._free_s[stage] = at_s = (at_s if at_s > free_s else free_s) + stage_s
        self.busy_s += stage_s
        return begin_s, at_s

    def _in_turn(self, lanes: list[_Lane], until_s: float) -> None:
        """Steps of microbatches that only decode, in turn; ranks learn of them at the end of a spell.

        Args:
            lanes: All that are not idle, in their order.
            until_s: When the next step would begin too late.
        """
        spells = list[_Spell]()
        for lane in lanes:
            if (spell := lane.spell or lane.decode_spell()) is None:
                break
            lane.spell = spell
            spells.append(spell)
        stage_s = [spell.next_s / self._stages + spell.engine_s for spell in spells]
        more_s = [spell.more_s / self._stages for spell in spells]
        at, most = min(enumerate(spell.left for spell in spells), key=itemgetter(1))
        last = at + 1  # whose spell ends
        if len(spells) < len(lanes):  # others' turn comes after one round
            most, last = 1, last if most == 1 else len(spells)
        lanes = lanes[: len(spells)]
        begun_s = [lane.now for lane in lanes]
        gone, firsts_s, ends_s, self._free_s = in_turn(begun_s, self._free_s, stage_s, more_s, most, last, until_s)
        for at, (lane, spell, steps) in enumerate(zip(lanes, spells, gone, strict=True)):
            if not steps:
                continue
            if not spell.taken:
                spell.began_s = lane.now
            self._gaps(lane, lane.now, firsts_s[at] - lane.now, 1)  # it may have waited for others' prompts
            if steps > 1:
                self._gaps(lane, firsts_s[at], (ends_s[at] - firsts_s[at]) / (steps - 1), steps - 1)
            self.busy_s += steps * stage_s[at] + more_s[at] * steps * (steps - 1) / 2
            lane.now = ends_s[at]
            spell.taken += steps
            spell.left -= steps
            spell.next_s += steps * spell.more_s
        for lane, spell in zip(lanes, spells, strict=True):
            if not spell.left:
                self._end_spell(lane)

    def _end_spell(self, lane: _Lane) -> None:
        """Tells the ranks of a microbatch of the steps that they have gone."""
        if (spell := lane.spell) is None:
            return
        lane.spell = None
        if spell.taken:
            self._note(lane, spell.began_s, lane.now)
            self._decoded(lane, spell.taken)

    def _decode(self, lane: _Lane, spell: _Spell, until_s: float) -> None:
        """The steps of a spell that begin before a time, one after the other."""
        steps = min(spell.left, _steps_until(until_s - lane.now, spell.next_s + spell.engine_s, spell.more_s))
        took_s = _took_s(spell, steps)
        self._note(lane, lane.now, lane.now + took_s)
        self._free_s[0] = lane.now = lane.now + took_s
        self.busy_s += took_s
        self._gaps(lane, lane.now - took_s, took_s / steps, steps)
        self._decoded(lane, steps)

    def _gaps(self, lane: _Lane, begin_s: float, each_s: float, steps: int) -> None:
        """Notes the times between tokens of some decode steps."""
        for rank in lane.ranks:
            if not rank.sequences:
                continue
            stalled = rank.stalled_s > 0
            if stalled:
                self.log.gaps.append((rank.stalled_s + each_s, rank.sequences, begin_s))
                rank.stalled_s = 0.0
            if steps > stalled:
                self.log.gaps.append((each_s, rank.sequences * (steps - stalled), begin_s))

    def _decoded(self, lane: _Lane, steps: int) -> None:
        lane.passed(steps)
        for rank in lane.ranks:
            rank.decode(steps)
            self._answered(rank.ended(), lane.now)

    def _answered(self, ended: list[int], time_s: float) -> None:
        if ended:
            self._busy = None
            self._open -= len(ended)
            self._ends_s += [time_s] * len(ended)
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


def _took_s(spell: _Spell, steps: int) -> float:
    """Seconds of so many of its steps."""
    return steps * (spell.next_s + spell.engine_s) + spell.more_s * steps * (steps - 1) / 2


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
