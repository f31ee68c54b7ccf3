"""The paper's agent on Stable-Baselines3, the library that the paper used."""

from __future__ import annotations

from typing import Annotated, ClassVar, final

import numpy as np
from numpy.typing import NDArray
from pydantic import BaseModel, Field

from envs.saved_state import SavedState
from envs.space import Action, StrategySpace
from raysearch.searchers.interface import Outcome, RewardOptions, Searcher


class SB3Options(RewardOptions):
    """Settings of `sb3_ppo`; what is not here has Stable-Baselines3's default.

    See `raysearch.searchers.ppo.ppo_options`.

    Attributes:
        rollout_calls: Calls between two updates.
        gradient_steps: Passes of each update over the whole rollout, one gradient step each.
        learning_rate: Of the first call; it falls to 0 on a cosine over the budget.
        confidence_threshold: tau: the agent restarts once every head's largest probability reaches it.
        chunks: An agent lives for budget / chunks calls at most.
        embedding: Width of the strategy embedding, of the encoder block (4 heads) and of the MLPs.
    """

    rollout_calls: Annotated[int, Field(ge=2)]
    gradient_steps: Annotated[int, Field(ge=1)]
    learning_rate: Annotated[float, Field(gt=0)]
    confidence_threshold: Annotated[float, Field(ge=0, le=1)]
    chunks: Annotated[int, Field(ge=1)]
    embedding: Annotated[int, Field(ge=1, multiple_of=4)]


@final
class SB3PPOSearcher(Searcher):
    """Learning to Shard's PPO with Stable-Baselines3's policy, rollout buffer and update.

    The library's own loop wants to drive the environment; here it is asked and told, call by call, as every searcher.
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
        """Goes on from `get_state`."""
        self._agent.set_state(state)
