"""A search whose env runners wait for each other: all are asked for a round's calls, and all have answered."""

from __future__ import annotations

from functools import partial
from typing import Any, final

import ray
from ray.rllib.env.single_agent_episode import SingleAgentEpisode

from envs.saved_state import SavedState
from raysearch.searchers.ppo.env_runner import Round
from raysearch.searchers.ppo.remote import Runners, answer, handles
from raysearch.searchers.ppo.search_results import Search, SearchFigures, Weights


@final
class Rounds:
    """Has rounds made, fragment by fragment; see docs/guides/rllib.md.

    Args:
        search: Whose calls they are.
        group: RLlib's env runners.
        weights: Of the policy.
        report: Takes RLlib's metrics.
    """

    def __init__(self, search: Search, group: Any, weights: Weights, report: SearchFigures) -> None:
        self._search, self._group, self._weights, self._report = search, group, weights, report
        remote = handles(group) if search.config.num_env_runners else {}
        self._runners = Runners(remote, **search.config.runner_patience)
        self._informed = -1  # calls that the env runners know of; -1 before they were told anything
        self._informed_weights = False  # whether they have the present ones

    def sample(self) -> list[SingleAgentEpisode]:
        """A round, in which all environments have made as many calls; fewer where the budget ends."""
        search, episodes = self._search, []
        end = search.calls + min(search.config.round_calls, search.calls_left)
        while search.calls < end:
            episodes += self._fragment(min(search.config.fragment_calls, end - search.calls), end)
        search.actor.learn()
        return [episode for _, episode in episodes]

    def policy_changed(self) -> None:
        """The runners get it with the next round."""
        self._informed_weights = False

    def get_state(self) -> SavedState:
        """Nothing: between two rounds no call is under way."""
        return {}

    def set_state(self, state: SavedState) -> None:
        """The runners get all with the next round."""
        self._informed, self._informed_weights = -1, False

    def _fragment(self, calls: int, end: int) -> list[tuple[int, SingleAgentEpisode]]:
        """The next calls of a round that goes to call `end`: sends the env runners what is new, and takes them in."""
        search, first, changed = self._search, self._search.calls, not self._informed_weights
        news = search.actor.news(max(self._informed, 0), learned=changed)
        weights = self._weights() if changed else None
        episodes = self._ask(Round(first, calls, self._informed, news, weights, metrics=first + calls == end))
        self._informed, self._informed_weights = first, True
        search.note(episodes, first)
        search.actor.next_call = search.calls
        return episodes

    def _ask(self, round_: Round) -> list[tuple[int, SingleAgentEpisode]]:
        """The episodes of a fragment, each with its environment's number, in that order."""
        config = self._search.config
        if config.num_env_runners:
            answers = self._ask_remotely(round_)
        else:
            answers = {1: self._group.local_env_runner.sample_round(round_)}
        reports = [metrics for _, metrics in answers.values() if metrics is not None]
        if reports:
            self._report(reports)
        episodes = []
        for worker, (sampled, _) in sorted(answers.items()):
            first_lane = (worker - 1) * config.num_envs_per_env_runner
            episodes += [(first_lane + lane, episode) for lane, episode in sampled]
        return sorted(episodes, key=lambda each: each[0])

    def _ask_remotely(self, round_: Round) -> dict[int, Any]:
        """Asks the runners until each has answered; lost ones get all and are asked anew, once they are back."""
        config = self._search.config
        steps = -(-round_.calls // config.lanes)
        # Weights are put where all find them; the few calls of a fragment travel with each request sooner.
        request: Any = round_ if round_.weights is None else ray.put(round_)
        missing = list(range(1, config.num_env_runners + 1))
        answers: dict[int, Any] = {}
        while missing:
            work = partial(answer, request=request)
            asked = [self._runners.ask(worker, work, steps * config.num_envs_per_env_runner) for worker in missing]
            answers |= {each.runner: self._runners.take(each, round_.first_call) for each in asked}
            missing = [worker for worker in missing if answers[worker] is None]
            if missing:
                news = self._search.actor.news(0)
                request = ray.put(round_._replace(version=-1, news=news, weights=self._weights()))
        return answers
