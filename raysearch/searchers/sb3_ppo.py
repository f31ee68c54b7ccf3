"""The paper's agent on Stable-Baselines3, the library that the paper used."""

from __future__ import annotations

from typing import ClassVar, final

import numpy as np
from numpy.typing import NDArray
from pydantic import BaseModel

from envs.saved_state import SavedState
from envs.space import Action, StrategySpace
from raysearch.searchers.interface import Outcome, Searcher
from raysearch.searchers.ppo.ppo_options import SB3Options


@final
class SB3PPOSearcher(Searcher):
    """Learning to Shard's PPO with Stable-Baselines3's policy, rollout buffer and update.

    The library's own loop drives the environment; here it has ask and tell, call by call, like every searcher.
    Network, schedule, early exit and restarts are those of `ppo_paper`, so that the two compare the libraries.
    """

    name: ClassVar[str] = "sb3_ppo"
    Options: ClassVar[type[BaseModel]] = SB3Options

    def __init__(self, space: StrategySpace, *, seed: int, budget: int, options: SB3Options) -> None:
        super().__init__(space, seed=seed, budget=budget, options=options)
        from raysearch.searchers.sb3_agent import SB3Agent

        self._agent = SB3Agent(space, seed=int(self.rng.integers(2**63)), budget=budget, options=options)

    def ask(self, observation: NDArray[np.float32]) -> Action:
        """Samples an action from the policy."""
        return self.space.factored.decode(self._agent.act(observation))

    def tell(self, action: Action, outcome: Outcome) -> None:
        """Adds the call to the rollout, and learns from it once it is full."""
        decode = self.space.factored.decode
        asked = (decode(each) for each in self._agent.under_way)
        place = next((place for place, each in enumerate(asked) if np.array_equal(each, action)), 0)
        self._agent.record(place, outcome.reward, outcome.observation)

    def metrics(self) -> dict[str, float]:
        """Restarts and the confidence of the last rollout."""
        return {"restarts": float(self._agent.restarts), "confidence": self._agent.confidence}

    def get_state(self) -> SavedState:
        """Weights, optimiser, generators, unfinished rollout and counters."""
        return self._agent.get_state()

    def set_state(self, state: SavedState) -> None:
        """Continues from `get_state`."""
        self._agent.set_state(state)
