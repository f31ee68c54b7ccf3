"""The paper's searcher: PPO with attention over the elites, on RLlib's parts.

`PPOSearcher` asks an `Agent` (when to learn, when to restart), which drives an `EliteEnvRunner` (acts, remembers) and
an `EliteLearner` (PPO's update) around one `EliteAttention` network. No Ray cluster is involved.
"""

from __future__ import annotations

from typing import Any, ClassVar, final

import numpy as np
from gymnasium.spaces import Box
from numpy.typing import NDArray

from envs.space import Action, StrategySpace
from raysearch.ppo.options import Options
from raysearch.searcher import Outcome, Searcher


@final
class PPOSearcher(Searcher):
    """Learning to Shard's PPO preset; see `raysearch.ppo.options` for its parameters and `Agent` for its restarts.

    It shares the environment's elites and best through the observation and the reward; it holds neither.
    """

    name = "ppo_paper"
    Options: ClassVar = Options

    def __init__(self, space: StrategySpace, *, seed: int, budget: int, options: Options) -> None:
        super().__init__(space, seed=seed, budget=budget, options=options)
        # Here, not above: torch and RLlib take seconds, and whoever only validates options needs neither.
        from raysearch.ppo.algorithm import LearnToShardConfig

        # One row stands for any number T of elites: the network does not depend on it.
        observation_space = Box(-1.0, 1.0, (1, len(space.sizes)), np.float32)
        config = LearnToShardConfig().environment(observation_space=observation_space, action_space=space.action_space)
        self._agent = config.search(budget=budget, seed=seed, options=options).build_agent()

    def ask(self, observation: NDArray[np.float32]) -> Action:
        """Samples an action from the policy."""
        return self._agent.runner.act(observation)

    def tell(self, action: Action, outcome: Outcome) -> None:
        """Adds the call to the rollout, and learns from it once it is full."""
        self._agent.runner.record(outcome.reward, outcome.observation)
        self._agent.learn_when_due()

    def get_state(self) -> dict[str, Any]:
        """Weights, optimiser, unfinished rollout and counters."""
        return self._agent.get_state()

    def set_state(self, state: dict[str, Any]) -> None:
        """Goes on from `get_state`."""
        self._agent.set_state(state)

    def metrics(self) -> dict[str, float]:
        """Confidence, entropy, restarts, learning rate, policy loss."""
        return self._agent.metrics()
