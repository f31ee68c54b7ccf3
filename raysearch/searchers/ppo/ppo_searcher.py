"""The searchers that learn: PPO with attention over the elites, on RLlib's parts.

Each asks and tells a lean `LearnToShard`: the RLlib algorithm without the way through env runners and episodes, which
makes the same calls bit by bit (docs/guides/rllib.md). No Ray cluster is involved. `ppo_paper` is made of `EliteActor`,
`EliteLearner` and `EliteAttention`; `ppo` of `CopyActor`, `CopyLearner` and `CopyAttention`, which are built on them.
"""

from __future__ import annotations

import abc
from typing import TYPE_CHECKING, Any, ClassVar, final

import numpy as np
from gymnasium.spaces import Box
from numpy.typing import NDArray

from envs.saved_state import SavedState
from envs.space import Action, StrategySpace
from raysearch.searchers.interface import Outcome, Searcher
from raysearch.searchers.ppo.copy_options import CopyOptions
from raysearch.searchers.ppo.ppo_options import Options

if TYPE_CHECKING:
    from raysearch.searchers.ppo.config import LearnToShardConfig


class AgentSearcher(Searcher):
    """A searcher that leaves everything to the algorithm."""

    def __init__(self, space: StrategySpace, *, seed: int, budget: int, options: Any) -> None:
        super().__init__(space, seed=seed, budget=budget, options=options)
        # One row stands for any number T of elites: no network depends on it.
        observation_space = Box(-1.0, 1.0, (1, len(space.sizes)), np.float32)
        config = self.new_config().environment(observation_space=observation_space, action_space=space.factored.actions)
        config.lean = True
        self._search: Any = config.search(budget=budget, seed=seed, options=options).build_algo()

    @abc.abstractmethod
    def new_config(self) -> LearnToShardConfig:
        """An RLlib configuration that takes this searcher's options.

        It is imported here: torch and RLlib take seconds, and whoever only validates options needs neither.
        """

    def ask(self, observation: NDArray[np.float32]) -> Action:
        """Samples an action from the policy."""
        return self.space.factored.decode(self._search.ask(observation))

    def tell(self, action: Action, outcome: Outcome) -> None:
        """Adds the call to the rollout, and learns from it once it is full."""
        actor, decode = self._search.actor, self.space.factored.decode
        asked = (decode(actor.as_action(proposal.action)) for proposal in actor.in_flight)
        place = next((place for place, each in enumerate(asked) if np.array_equal(each, action)), 0)
        self._search.tell(outcome, place)

    def get_state(self) -> SavedState:
        """Weights, optimiser, unfinished rollout and counters."""
        return self._search.get_state()

    def set_state(self, state: SavedState) -> None:
        """Goes on from `get_state`."""
        self._search.set_state(state)

    @property
    def chunk(self) -> int:
        """Number of the present agent."""
        return self._search.chunk

    def chunk_figures(self) -> dict[str, float]:
        """Of the agent that made the last call."""
        return self._search.chunk_figures()

    def metrics(self) -> dict[str, float]:
        """Confidence, entropy, restarts, learning rate, policy loss."""
        return self._search.figures()


@final
class PPOSearcher(AgentSearcher):
    """Learning to Shard's PPO preset; `raysearch.searchers.ppo.ppo_options` has its parameters.

    Its restarts are `LearnToShard`'s.

    It shares the environment's elites and best through the observation and the reward; it holds neither.
    """

    name = "ppo_paper"
    Options: ClassVar = Options

    def new_config(self) -> LearnToShardConfig:
        """The paper's."""
        from raysearch.searchers.ppo.config import LearnToShardConfig

        return LearnToShardConfig()


@final
class CopyPPOSearcher(AgentSearcher):
    """Our preset: PPO over attention that copies from the elites, with a critic that learns from every call.

    See `raysearch.searchers.ppo.copy_options` for its parameters, `CopyAttention` for the policy and `CopyActor` for
    how it proposes. It keeps its own elites, ranked by merit, infeasible strategies too, and starts with new ones
    where it stands still.
    """

    name = "ppo"
    Options: ClassVar = CopyOptions

    def new_config(self) -> LearnToShardConfig:
        """Ours."""
        from raysearch.searchers.ppo.copy_algorithm import CopyConfig

        return CopyConfig()
