"""A search whose env runners do not wait for each other: calls are handed out in portions and taken in as they come."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple, final

import ray
from ray.rllib.env.single_agent_episode import SingleAgentEpisode

from envs.saved_state import SavedState
from raysearch.searchers.ppo.env_runner import Round
from raysearch.searchers.ppo.remote import Asked, Runners, answer
from raysearch.searchers.ppo.search_results import Search, SearchFigures, Weights


class Portion(NamedTuple):
    """Calls that one env runner makes.

    Attributes:
        first_call: Number of the first of them.
        calls: How many, one after the other.
        chunk: Number of the agent whose policy makes them.
    """

    first_call: int
    calls: int
    chunk: int


@final
class Portions:
    """Numbers the calls of a search, hands them out, and gives each back once.

    A portion that is lost with its runner, or was under way when the search was saved, is handed out again under the
    same numbers, to whoever is free first.

    Args:
        numbers: Of the remote env runners.
        runners: They.
        size: Calls of a portion.
        budget: Calls of the search.

    Attributes:
        issued: Calls that have a number.
    """

    def __init__(self, numbers: Iterable[int], runners: Runners, *, size: int, budget: int) -> None:
        self._runners, self._size, self._budget = runners, size, budget
        self._idle = sorted(numbers)
        self._informed: dict[int, tuple[int, int]] = {}  # per runner: its last portion, and the calls it knew all of
        self._out: dict[Any, tuple[Asked, Portion]] = {}
        self._again: list[Portion] = []
        self.issued = 0

    def hand_out(self, chunk: int, settled: int, news: Callable[[int], Any], weights: Callable[[], Any]) -> None:
        """Gives every idle runner a portion, as long as there are calls left.

        Args:
            chunk: Number of the present agent.
            settled: Calls all of which are known.
            news: What somebody must hear who knows all calls before a number.
            weights: Of the policy.
        """
        while self._idle and (portion := self._next(chunk)):
            worker = self._idle.pop(0)
            version, known = self._informed.get(worker, (-1, 0))
            request = ray.put(Round(portion.first_call, portion.calls, version, news(known), weights()))
            self._informed[worker] = portion.first_call, settled
            asked = self._runners.ask(worker, partial(answer, request=request), portion.calls)
            self._out[asked.answer] = asked, portion

    def _next(self, chunk: int) -> Portion | None:
        if self._again:
            return self._again.pop(0)._replace(chunk=chunk)
        calls = min(self._size, self._budget - self.issued)
        if not calls:
            return None
        self.issued += calls
        return Portion(self.issued - calls, calls, chunk)

    def take(self) -> tuple[int, Portion, Any] | None:
        """The next portion that is done, who made it and what was sampled; None if one was lost on the way.

        Raises:
            RuntimeError: A lost runner did not come back, or a portion raises whoever makes it.
        """
        due = min((asked for asked, _ in self._out.values()), key=lambda asked: asked.deadline.left_s)
        done, _ = ray.wait(list(self._out), num_returns=1, timeout=due.deadline.left_s)
        asked, portion = self._out.pop(done[0] if done else due.answer)
        self._idle.append(asked.runner)
        sampled = self._runners.take(asked, portion.first_call)
        if sampled is None:
            self._informed.pop(asked.runner, None)
            self._again.append(portion)
            return None
        return asked.runner, portion, sampled

    def get_state(self) -> SavedState:
        """What was handed out and is not back counts as to be made."""
        due = [*self._again, *(portion for _, portion in self._out.values())]
        return {"issued": self.issued, "due": [list(portion) for portion in due]}

    def set_state(self, state: SavedState) -> None:
        """Goes back to a snapshot; what is still under way is forgotten when it comes."""
        for asked, _ in self._out.values():
            ray.cancel(asked.answer, force=False)
            self._idle.append(asked.runner)
        self._out, self._informed = {}, {}
        self.issued = state["issued"]
        self._again = [Portion(*each) for each in _portions(state["due"])]


def _portions(due: Sequence[Any]) -> list[tuple[int, int, int]]:
    return sorted((int(first), int(calls), int(chunk)) for first, calls, chunk in due)


@final
class Unwaiting:
    """Takes portions in as they come, and has the policy learn once they make a round.

    An agent learns from its own calls; those of one that has ended are known and counted when they come.

    Args:
        search: Whose calls they are.
        runners: The remote env runners by their number.
        weights: Of the policy.
        report: Takes RLlib's metrics.
    """

    def __init__(self, search: Search, runners: Mapping[int, Any], weights: Weights, report: SearchFigures) -> None:
        self._search, self._weights, self._report = search, weights, report
        config = search.config
        self._portions = Portions(
            runners,
            Runners(runners, **config.runner_patience),
            size=config.round_calls // config.num_env_runners,
            budget=config.budget,
        )
        self._unlearned: list[SingleAgentEpisode] = []

    def sample(self) -> list[SingleAgentEpisode]:
        """Takes in the next portion; a round's worth of them, or nothing as yet."""
        search, portions = self._search, self._portions
        portions.hand_out(search.chunk, search.actor.settled, search.actor.news, self._weights)
        search.actor.next_call = portions.issued
        taken = portions.take()
        if taken is None:
            return []
        _, portion, (episodes, metrics) = taken
        self._report([metrics])
        search.note(episodes, portion.first_call)
        if portion.chunk == search.chunk:
            self._unlearned += [episode for _, episode in episodes]
        calls = sum(len(episode) for episode in self._unlearned)
        if not calls or (calls < search.config.round_calls and search.calls_left):
            return []
        search.actor.learn()
        return self._unlearned

    def policy_changed(self) -> None:
        """The runners get it with their next portions; what came is learned, or was an earlier agent's."""
        self._unlearned = []

    def get_state(self) -> SavedState:
        """Calls that have a number and are not back."""
        return {"portions": self._portions.get_state()}

    def set_state(self, state: SavedState) -> None:
        """Those are made again."""
        self._unlearned = []
        self._portions.set_state(state["portions"])
