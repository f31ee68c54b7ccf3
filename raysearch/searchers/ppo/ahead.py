"""A search whose calls the algorithm decides, a few ahead of what it knows, while env runners only step."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple, final

import numpy as np
import ray
from ray.rllib.core.columns import Columns
from ray.rllib.env.single_agent_episode import SingleAgentEpisode

from envs.saved_state import SavedState
from raysearch.searchers.interface import Outcome
from raysearch.searchers.ppo.actor import Proposal
from raysearch.searchers.ppo.env_runner import EliteEnvRunner
from raysearch.searchers.ppo.remote import Asked, Runners, attempt
from raysearch.searchers.ppo.rollout import Rollout
from raysearch.searchers.ppo.search_results import Search, SearchFigures, Weights


def make_call(runner: EliteEnvRunner, *, proposal: Proposal, metrics: bool) -> Any:
    """Runs on an env runner: see `EliteEnvRunner.make_call`, and `attempt`."""
    return attempt(lambda: runner.make_call(proposal, metrics=metrics))


class SentCall(NamedTuple):
    """A call under way.

    Attributes:
        proposal: What was decided.
        asked: Of an env runner; None where this process makes it.
    """

    proposal: Proposal
    asked: Asked | None


@final
class CallsAhead:
    """Brings each decided call to the env runner whose turn it is, and what came of them back in their order.

    Runner i of N makes the calls i, i + N, i + 2N, ... one after the other. What each needs travels with it, so that a
    runner that was lost and restarted simply makes its calls again.

    Args:
        local: The env runner of this process, which makes the calls where there are no others.
        numbers: Of the others, in the order of their turns.
        runners: They.
        round_calls: Calls between two updates; with the last ones of each come RLlib's metrics.
        budget: Calls of the search.
    """

    def __init__(
        self, local: EliteEnvRunner, numbers: Sequence[int], runners: Runners, *, round_calls: int, budget: int
    ) -> None:
        self._local, self._numbers, self._runners = local, list(numbers), runners
        self._round_calls, self._budget = round_calls, budget
        self._sent: deque[SentCall] = deque()

    def __len__(self) -> int:
        """Calls under way."""
        return len(self._sent)

    def send(self, proposal: Proposal) -> None:
        """Has a call made. They come in the order of their numbers."""
        self._sent.append(SentCall(proposal, self._start(proposal) if self._numbers else None))

    def take(self) -> tuple[Outcome, Any]:
        """What came of the oldest call under way, and RLlib's metrics or None.

        Raises:
            RuntimeError: A lost runner did not come back, or a call raises each time.
        """
        proposal, asked = self._sent.popleft()
        if asked is None:
            return self._local.make_call(proposal, metrics=self._tells(proposal.number))
        while (made := self._runners.take(asked, proposal.number)) is None:
            asked = self._start(proposal)
        return made

    def begin_with(self, proposals: Iterable[Proposal]) -> None:
        """Forgets what is under way, and has these calls made, such as those of a saved search."""
        for sent in self._sent:
            if sent.asked is not None:
                ray.cancel(sent.asked.answer, force=False)
        self._sent.clear()
        for proposal in proposals:
            self.send(proposal)

    def _start(self, proposal: Proposal) -> Asked:
        runner = self._numbers[proposal.number % len(self._numbers)]
        before = sum(1 for sent in self._sent if sent.asked and sent.asked.runner == runner)
        work = partial(make_call, proposal=proposal, metrics=self._tells(proposal.number))
        return self._runners.ask(runner, work, before + 1)

    def _tells(self, number: int) -> bool:
        """Whether it is some runner's last call of a round, or of the search."""
        runners, rounds = max(len(self._numbers), 1), self._round_calls
        return number % rounds >= rounds - runners or number >= self._budget - runners


def episode_of(rollout: Rollout) -> SingleAgentEpisode:
    """RLlib's episode of the calls of a rollout, as one environment would have made it."""
    extra = {Columns.ACTION_LOGP: list(rollout.log_probs)}
    calls = len(rollout.rewards)
    return SingleAgentEpisode(
        observations=list(rollout.observations),
        actions=list(rollout.actions),
        rewards=[float(reward) for reward in rollout.rewards],
        infos=[{} for _ in range(calls + 1)],
        extra_model_outputs=extra,
        len_lookback_buffer=0,
    ).to_numpy()


NOTHING_SEEN = np.empty(0, np.float32)
"""What environments show to actors that look at their own memory alone."""


@final
class Ahead:
    """Decides calls until enough are under way, takes the oldest in, and has the policy learn where a round is full.

    Args:
        search: Whose calls they are; its actor decides them.
        local: The env runner of this process.
        remote: The others by their number.
        weights: Of the policy.
        report: Takes RLlib's metrics.
    """

    def __init__(
        self, search: Search, local: EliteEnvRunner, remote: Mapping[int, Any], weights: Weights, report: SearchFigures
    ) -> None:
        self._search, self._weights, self._report = search, weights, report
        self._has_weights = False
        self._calls = CallsAhead(
            local,
            sorted(remote),
            Runners(remote, **search.config.runner_patience),
            round_calls=search.config.round_calls,
            budget=search.config.budget,
        )

    def sample(self) -> list[SingleAgentEpisode]:
        """Takes in the oldest call under way; the round's episode where it is the last, or nothing as yet."""
        search, actor = self._search, self._search.actor
        if not self._has_weights:
            actor.module.set_state(self._weights())
            actor.forget()
            self._has_weights = True
        while len(self._calls) < search.config.ahead and actor.next_call < search.config.budget:
            seen = actor.look(NOTHING_SEEN)
            self._calls.send(actor.propose(seen, actor.judge(seen)))
        outcome, metrics = self._calls.take()
        if metrics is not None:
            self._report([metrics])
        actor.tell(outcome)
        search.count(outcome)
        is_full = actor.recorded >= search.config.round_calls or not search.calls_left
        return [episode_of(actor.take())] if is_full else []

    def policy_changed(self) -> None:
        """The next call is decided by the new weights."""
        self._has_weights = False

    def get_state(self) -> SavedState:
        """Nothing: the search's actor knows what is under way."""
        return {}

    def set_state(self, state: SavedState) -> None:
        """What was under way is made again."""
        self._has_weights = False
        self._calls.begin_with(self._search.actor.in_flight)
