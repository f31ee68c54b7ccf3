"""The searchers that learn: RLlib's algorithm decides and learns, its env runner steps the run's environment.

No Ray cluster is involved: env runner and learner are in the process of the run, whose workers make the calls.
"""

from __future__ import annotations

import abc
from typing import TYPE_CHECKING, Any, ClassVar, final

import numpy as np
from gymnasium.spaces import Box
from numpy.typing import NDArray

from envs.saved_state import SavedState
from envs.space import Action, StrategySpace
from raysearch.searchers.interface import Environment, Outcome, Searcher
from raysearch.searchers.ppo.copy_options import CopyOptions
from raysearch.searchers.ppo.ppo_options import Options

if TYPE_CHECKING:
    from raysearch.searchers.ppo.algorithm import LearnToShard, LearnToShardConfig


class AgentSearcher(Searcher):
    """A searcher that leaves everything to the algorithm."""

    def __init__(self, space: StrategySpace, *, seed: int, budget: int, options: Any) -> None:
        super().__init__(space, seed=seed, budget=budget, options=options)
        # One row stands for any number T of elites: no network depends on it.
        observation_space = Box(-1.0, 1.0, (1, len(space.sizes)), np.float32)
        config = self.new_config().environment(observation_space=observation_space, action_space=space.factored.actions)
        built: Any = config.search(budget=budget, seed=seed, options=options).build_algo()
        self.algorithm: LearnToShard = built

    @abc.abstractmethod
    def new_config(self) -> LearnToShardConfig:
        """An RLlib configuration that takes this searcher's options.

        It is imported here: torch and RLlib take seconds, and whoever only validates options needs neither.
        """

    def step(self, environment: Environment, calls: int) -> None:
        """A training step of the algorithm, of at most so many calls."""
        self.algorithm.make_calls(environment, self.space.factored.decode, calls)

    def ask(self, observation: NDArray[np.float32]) -> Action:
        """Raises TypeError: the algorithm itself steps the environment."""
        raise TypeError(f"expected {self.name}.step(environment, calls): it has no ask, it steps the environment")

    def tell(self, action: Action, outcome: Outcome) -> None:
        """Raises TypeError: see `ask`."""
        raise TypeError(f"expected {self.name}.step(environment, calls): it has no tell, it steps the environment")

    def begin_with(self, action: Action, outcome: Outcome) -> None:
        """Has the algorithm remember a call that it did not decide."""
        self.algorithm.remember(self.space.factored.encode(action), outcome)

    def get_state(self) -> SavedState:
        """Weights, optimiser, unfinished rollout and counters."""
        return self.algorithm.get_state()

    def set_state(self, state: SavedState) -> None:
        """Continues from `get_state`."""
        self.algorithm.set_state(state)

    @property
    def chunk(self) -> int:
        """Number of the present agent."""
        return self.algorithm.progress.chunk

    def chunk_figures(self) -> dict[str, float]:
        """Of the agent that made the last call."""
        return self.algorithm.progress.chunk_figures()

    def metrics(self) -> dict[str, float]:
        """Confidence, entropy, restarts, learning rate, policy loss."""
        return self.algorithm.figures()


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
        from raysearch.searchers.ppo.algorithm import LearnToShardConfig

        return LearnToShardConfig()


@final
class CopyPPOSearcher(AgentSearcher):
    """Our preset: PPO over attention that copies from the elites, with a critic that learns from every call.

    See `raysearch.searchers.ppo.copy_options` for its parameters, `CopyAttention` for the policy and
    how it proposes. It keeps its own elites, ranked by merit, infeasible strategies too, and starts with new ones
    where it stands still.
    """

    name = "ppo"
    Options: ClassVar = CopyOptions

    def new_config(self) -> LearnToShardConfig:
        """Ours."""
        from raysearch.searchers.ppo.algorithm import CopyConfig

        return CopyConfig()
