"""One PPO agent after another within one budget: acting, learning, and starting anew when there is no more to learn."""

from __future__ import annotations

import copy
import math
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from ray.rllib.core import COMPONENT_OPTIMIZER, COMPONENT_RL_MODULE, DEFAULT_MODULE_ID

from raysearch.ppo.env_runner import EliteEnvRunner
from raysearch.ppo.learner import EliteLearner

if TYPE_CHECKING:
    from raysearch.ppo.algorithm import LearnToShardConfig


class Agent:
    """Acts through an env runner, learns through a learner, and restarts.

    Every rollout updates the learner. Then the agent restarts (fresh weights and optimiser, in place) if

    - every head's largest probability had reached the confidence threshold when it last acted (early exit),
    - it has lived for a chunk: budget / chunks calls, rounded up, or
    - its runner has found nothing better for as many calls as the configured patience.

    The next agent gets a whole chunk, or what is left of the budget, so what an early exit saves goes to further
    agents. The environment's elites and best live outside the agent and stay. A rollout cut short by the end of the
    budget is learned from as it is.

    Source: Learning to Shard, section 3 (Optimization and early exit).

    Attributes:
        restarts: Agents that came before this one.
        policy_loss: Of the last gradient step; None before the first.
    """

    def __init__(self, config: LearnToShardConfig, runner: EliteEnvRunner, learner: EliteLearner) -> None:
        self.config = config
        self.runner = runner
        self.learner = learner
        self.runner.module = learner.module[DEFAULT_MODULE_ID].unwrapped()
        self.restarts = 0
        self.policy_loss: float | None = None
        self._born = 0
        self._initialise()

    @property
    def calls(self) -> int:
        """Calls made since the search began, by all agents."""
        return self.runner.calls

    @property
    def calls_left(self) -> int:
        """Calls until the budget is spent."""
        return self.config.budget - self.calls

    @property
    def calls_to_update(self) -> int:
        """Calls until the rollout is full or the budget is spent."""
        return min(self.config.train_batch_size_per_learner - self.runner.recorded, self.calls_left)

    @property
    def confidence(self) -> float:
        """Least certain head's largest probability when the agent last acted; 0 before the first call."""
        return self.runner.opinion.confidence if self.runner.opinion else 0.0

    @property
    def learning_rate(self) -> float:
        """Rate of an update made now: a half cosine from the configured rate at call 0 to 0 at the budget's end."""
        return self.config.lr * 0.5 * (1 + math.cos(math.pi * self.calls / self.config.budget))

    def learn_when_due(self) -> None:
        """Updates the policy and perhaps restarts the agent, if the rollout is full or the budget is spent."""
        if self.calls_to_update > 0:
            return
        self.policy_loss = self.learner.update_round(self.runner.take(), self.learning_rate)
        if self.calls_left > 0 and self._is_done():
            self._restart()
        self.runner.forget()

    def _restart(self) -> None:
        self.restarts += 1
        self._born = self.calls
        self.runner.start_over()
        self._initialise()

    def _is_done(self) -> bool:
        return (
            self.confidence >= self.config.confidence_threshold
            or self.calls - self._born >= self._chunk_calls
            or self.runner.stagnant_calls >= self.config.patience
        )

    @property
    def _chunk_calls(self) -> int:
        return math.ceil(self.config.budget / self.config.chunks)

    def _initialise(self) -> None:
        entropy = np.random.SeedSequence([self.config.search_seed, self.restarts])
        generator = torch.Generator().manual_seed(int(entropy.generate_state(1, np.uint64)[0]))
        self.learner.reset_agent(generator)

    def metrics(self) -> dict[str, float]:
        """Scalars to log; the policy's confidence, entropy (nats) and loss as of the last call, once there was one."""
        metrics = {"restarts": float(self.restarts), "learning_rate": self.learning_rate}
        if self.runner.opinion is not None:
            metrics |= {"confidence": self.confidence, "entropy": self.runner.opinion.entropy}
        if self.policy_loss is not None:
            metrics["policy_loss"] = self.policy_loss
        return metrics

    def get_state(self) -> dict[str, Any]:
        """All that `set_state` needs to go on bit-identically, also mid-rollout; arrays are copies."""
        return {
            "learner": self.learner.get_state(components=[COMPONENT_RL_MODULE, COMPONENT_OPTIMIZER]),
            "runner": self.runner.get_memory(),
            "restarts": self.restarts,
            "policy_loss": self.policy_loss,
            "born": self._born,
        }

    def set_state(self, state: dict[str, Any]) -> None:
        """Goes back to where `get_state` was called, whatever happened since."""
        # Without a sequence number RLlib takes the weights even if its own are newer; it goes on to write into the
        # optimiser's arrays, hence the copy.
        learner_state = {name: state["learner"][name] for name in (COMPONENT_RL_MODULE, COMPONENT_OPTIMIZER)}
        self.learner.set_state(copy.deepcopy(learner_state))
        self.runner.set_memory(state["runner"])
        self.restarts = state["restarts"]
        self.policy_loss = state["policy_loss"]
        self._born = state["born"]
