"""One attention rank: who waits, whose prompt is being computed, who decodes, and the room of its KV cache.

A request takes the room of its prompt when it is let in, and a token's more with each that it gains. Where that would
not fit any more, those let in last give up their room and wait again, to be computed anew with what they had answered
(recompute). A request decodes a known number of the rank's steps from its first token on. One whose prompt another pool
has computed takes its room as it is let in and decodes at once: its first token comes with the rank's next decode step.
"""

from __future__ import annotations

import heapq
import math
from collections import deque
from dataclasses import dataclass

from sim.replay.prefix_cache import PrefixCache
from sim.replay.requests import Blocks, Requests
from sim.replay.scheduler import Scheduler
from sim.replay.step_prices import RankStep


@dataclass(slots=True, eq=False)
class Turn:
    """A request on its way, from when it waits until it is answered or gives up its room.

    Attributes:
        request: Its number.
        prompt: Tokens to be in the cache before the next one comes: the prompt, and what was answered before.
        left: Tokens of the answer from here on.
        done: Tokens of `prompt` that are computed or were found.
        cached_blocks: First blocks of the prompt that it holds in the prefix cache.
        began: The rank's decode steps when it began to decode; -1 before.
        alive: Whether it has not given up its room.
        computed: Whether another pool has computed its prompt.
    """

    request: int
    prompt: int
    left: int
    done: int = 0
    cached_blocks: int = 0
    began: int = -1
    alive: bool = True
    computed: bool = False


@dataclass(slots=True)
class RankPlan:
    """What a step does on one rank.

    Attributes:
        step: To be priced.
        chunks: Of which prompts, how many tokens.
        decodes: Whether those that decode gain tokens.
    """

    step: RankStep
    chunks: list[tuple[Turn, int]]
    decodes: bool


class RankQueue:
    """The state of an attention rank between two steps.

    Attributes:
        sequences: That decode.
        context_tokens: Of all of them together.
        stalled_s: How long those that decode have stood still since their last token.
        delayed: Whether those that wait are not let in, though there is room.
        preempted: How often a request gave up its room.
        looked_up_tokens, hit_tokens: Of prompts let in, all and those found in the cache.
    """

    def __init__(
        self, requests: Requests, scheduler: Scheduler, room_tokens: float, beside_tokens: float, gained: float
    ) -> None:
        self.sequences = self.preempted = self.hit_tokens = self.looked_up_tokens = 0
        self.context_tokens = self.stalled_s = 0.0
        self._waiting: deque[Turn] = deque()
        self._looks_always, self._seen, self.delayed = scheduler.receive_steps == 1, 0, False
        self._prompts: list[Turn] = []
        self._arrived: list[Turn] = []  # with computed prompts, whose first token is to come
        self._decoding: dict[int, Turn] = {}  # by request, in the order of their first tokens
        self._ends: list[tuple[int, int, Turn]] = []  # heap: the rank's decode steps at the end, request
        self._steps = 0
        self._requests, self._policy, self._most = requests, scheduler.policy, scheduler.max_sequences
        self._rows = scheduler.rows
        self._reserve = 1.0 if scheduler.reserves_output else scheduler.policy.reserved_output
        self._keeps_promises = scheduler.reserves_output
        self._room, self._gained = room_tokens, gained
        # Half a block of each request is empty, on average.
        self._beside = beside_tokens + (scheduler.policy.block_tokens - 1) / 2
        self._cache = PrefixCache(requests.block_tokens) if requests.blocks is not None else None
        self._own_tokens = 0.0  # of the KV cache, by requests alone
        self._left_tokens = 0.0  # of answers yet to come

    @property
    def waiting(self) -> int:
        """Requests that were not let in yet."""
        return len(self._waiting)

    @property
    def running(self) -> int:
        """Requests that were let in."""
        return self.sequences + len(self._prompts)

    @property
    def used_tokens(self) -> float:
        """Of the KV cache, by requests."""
        return self._own_tokens + (self._cache.referenced_tokens if self._cache else 0)

    def submit(self, request: int, *, computed: bool = False) -> bool:
        """Lets a request wait, its prompt computed already or not; refuses one that would not fit if it were alone."""
        prompt, answer = (int(each[request]) for each in (self._requests.prompt_tokens, self._requests.output_tokens))
        if prompt + answer + self._beside > self._room:
            return False
        self._waiting.append(Turn(request, prompt, answer, computed=computed))
        self._seen += self._looks_always
        return True

    def look(self) -> None:
        """The scheduler sees all that wait."""
        self._seen = len(self._waiting)

    @property
    def unseen(self) -> bool:
        """Whether someone waits whom the scheduler has not seen."""
        return self._seen < len(self._waiting)

    @property
    def wants_in(self) -> bool:
        """Whether a prompt is being computed or could begin."""
        return bool(self._prompts) or self._has_room()

    def give_up(self, before_s: float) -> list[int]:
        """Refuses those first in the queue that came before a time and have had no token."""
        found: list[int] = []
        arrived, answers = self._requests.arrival_s, self._requests.output_tokens
        while self._waiting:
            turn = self._waiting[0]
            if arrived[turn.request] >= before_s or turn.left < answers[turn.request]:
                break
            found.append(self._waiting.popleft().request)
            self._seen = max(0, self._seen - 1)
        return found

    @property
    def waits_since_s(self) -> float:
        """When the first in the queue came, if it has had no token; infinite where there is none."""
        turn = self._waiting[0] if self._waiting else None
        if turn is None or turn.left < self._requests.output_tokens[turn.request]:
            return math.inf
        return float(self._requests.arrival_s[turn.request])

    def cached_blocks(self, request: int) -> int:
        """How many of a request's first blocks are in the prefix cache."""
        return self._cache.known(self._blocks(request)) if self._cache else 0

    # --- who is let in, and who has to go -------------------------------------------------------------

    def preempt(self) -> bool:
        """Makes room for a token of each that decodes; whether someone had to give up theirs."""
        before = self.preempted
        while (
            not self._keeps_promises
            and self.running > 1
            and self.used_tokens + self.sequences * self._gained > self._room
        ):
            turn = self._prompts.pop() if self._prompts else self._decoding.popitem()[1]
            gained = min(int(self._gained_by(turn)), turn.left - 1)
            self._leave(turn)
            turn.alive = False
            self._waiting.appendleft(Turn(turn.request, turn.prompt + gained, turn.left - gained))
            self._seen += 1
            self.preempted += 1
        return self.preempted > before

    def _let_in(self) -> Turn | None:
        """The first that waits, if there is room for it."""
        if not self._can_let_in():
            return None
        turn = self._waiting.popleft()
        self._seen -= 1
        hit, blocks = self._found(turn)
        if self._cache:
            self._cache.hold(blocks)
            turn.cached_blocks = len(blocks)
        turn.done = turn.prompt if turn.computed else hit
        self._own_tokens += turn.prompt - turn.cached_blocks * self._requests.block_tokens + self._beside
        self._left_tokens += turn.left
        if not turn.computed:
            self.hit_tokens += hit
            self.looked_up_tokens += turn.prompt
        self._shrink()
        return turn

    def _can_let_in(self) -> bool:
        return not self.delayed and self._has_room()

    def _has_room(self) -> bool:
        """Whether there is room for the first that was seen to wait; one alone has it in any case."""
        if not self._seen or self.running >= self._most:
            return False
        turn = self._waiting[0]
        hit, blocks = self._found(turn)
        needed = turn.prompt - hit + self._beside + self._reserve * (turn.left + self._left_tokens)
        if self._cache:
            needed += self._cache.would_hold(blocks)
        return self.used_tokens + needed <= self._room or not self.running

    def _found(self, turn: Turn) -> tuple[int, Blocks]:
        """(tokens, blocks) of a prompt that are cached; its last token is computed in any case."""
        if turn.computed:
            return 0, ()
        if not self._cache:
            return min(turn.prompt - 1, int(turn.prompt * self._requests.cached_share)), ()
        blocks, size = self._blocks(turn.request), self._requests.block_tokens
        found = min(self._cache.known(blocks), (turn.prompt - 1) // size)
        return found * size, blocks[:found]

    def _blocks(self, request: int) -> Blocks:
        assert self._requests.blocks is not None
        return self._requests.blocks[request]

    def _leave(self, turn: Turn) -> None:
        """Gives its room back."""
        gained = self._gained_by(turn)
        if turn.began >= 0:
            self.sequences -= 1
            self.context_tokens -= turn.prompt + gained
        self._own_tokens -= turn.prompt + gained - turn.cached_blocks * self._requests.block_tokens + self._beside
        self._left_tokens -= turn.left - gained
        if self._cache:
            self._cache.release(self._blocks(turn.request)[: turn.cached_blocks])

    def _gained_by(self, turn: Turn) -> float:
        """Tokens since its first one."""
        return (self._steps - turn.began) * self._gained if turn.began >= 0 else 0.0

    def _shrink(self) -> None:
        if self._cache:
            self._cache.shrink(max(0.0, self._room - self.used_tokens))

    # --- steps ----------------------------------------------------------------------------------------

    def plan(self) -> RankPlan:
        """What the next step holds; requests that preempted others let nobody in."""
        policy, crowded = self._policy, self.preempt()
        budget = policy.step_tokens - (self._rows * self.sequences if policy.mixes else 0)
        chunks: list[tuple[Turn, int]] = []
        tokens, seen, at = 0, 0.0, 0
        while budget > 0:
            if at == len(self._prompts):
                turn = None if crowded else self._let_in()
                if turn is None:
                    break
                if turn.computed:
                    self._begin(turn)
                    self._arrived.append(turn)
                    budget -= self._rows * policy.mixes
                    continue
                self._prompts.append(turn)
            turn = self._prompts[at]
            chunk = turn.prompt - turn.done
            if chunk > budget:
                if tokens and not policy.chunks:
                    break
                chunk = budget if policy.chunks else chunk
            chunks.append((turn, chunk))
            tokens += chunk
            seen += chunk * (turn.done + chunk / 2)
            budget -= chunk
            at += 1
        decodes = self.sequences > 0 and (policy.mixes or not tokens)
        own = (self.sequences, self.context_tokens) if decodes else (0, 0.0)
        return RankPlan(RankStep(*own, tokens, seen), chunks, decodes)

    def finish(self, plan: RankPlan) -> tuple[list[int], list[int]]:
        """A planned step is done: (requests that have their first token, requests that have their last)."""
        first: list[int] = []
        if plan.decodes:
            self.decode(1)
            first += [turn.request for turn in self._arrived if turn.alive]
            self._arrived.clear()
        for turn, chunk in plan.chunks:
            turn.done += chunk
            if turn.done >= turn.prompt:
                first.append(turn.request)
                turn.left -= 1
                self._left_tokens -= 1
                self._begin(turn)
        if first:
            self._prompts = [turn for turn in self._prompts if turn.began < 0]
        return first, self.ended()

    def _begin(self, turn: Turn) -> None:
        """A request decodes from here on."""
        turn.began = self._steps
        self.sequences += 1
        self.context_tokens += turn.prompt
        self._decoding[turn.request] = turn
        heapq.heappush(self._ends, (self._steps + math.ceil(turn.left / self._gained), turn.request, turn))
        if self._cache:
            blocks = self._blocks(turn.request)
            before, turn.cached_blocks = (
                turn.cached_blocks,
                min(len(blocks), turn.prompt // self._requests.block_tokens),
            )
            self._cache.hold(blocks[before : turn.cached_blocks])
            self._own_tokens -= (turn.cached_blocks - before) * self._requests.block_tokens
            self._shrink()

    def decode(self, steps: int) -> None:
        """All that decode gain tokens in so many steps."""
        tokens = steps * self.sequences * self._gained
        self._steps += steps
        self.context_tokens += tokens
        self._own_tokens += tokens
        self._left_tokens -= tokens
        if self._cache:
            self._shrink()

    def ended(self) -> list[int]:
        """Requests whose answers are complete, which leave."""
        found: list[int] = []
        while self._ends and (self._ends[0][0] <= self._steps or not self._ends[0][2].alive):
            _, request, turn = heapq.heappop(self._ends)
            if turn.alive:
                del self._decoding[request]
                self._leave(turn)
                found.append(request)
        return found

    @property
    def idle(self) -> bool:
        """Whether nobody waits or runs."""
        return not (self._waiting or self._prompts or self.sequences)

    def steps_alone(self) -> float:
        """Decode steps in which nothing else happens: nobody ends, is let in or has to go; 0 if a prompt is due."""
        if self._prompts or self._arrived or self._can_let_in():
            return 0
        if not self.sequences:
            return math.inf
        while not self._ends[0][2].alive:
            heapq.heappop(self._ends)
        until_end = self._ends[0][0] - self._steps
        if self._keeps_promises:
            return until_end
        return min(until_end, math.floor((self._room - self.used_tokens) / (self.sequences * self._gained)))
