"""Acts with the policy and remembers what came of it, one call at a time."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import Any, ClassVar

import gymnasium
import numpy as np
import torch
from gymnasium.vector import SyncVectorEnv
from ray.rllib.algorithms.algorithm import Algorithm
from ray.rllib.core.columns import Columns
from ray.rllib.env.env_context import EnvContext
from ray.rllib.env.single_agent_env_runner import SingleAgentEnvRunner

from raysearch.ppo.noise import call_rng, gumbel_noise
from raysearch.ppo.rollout import Rollout
from raysearch.searcher import Outcome


@dataclass(frozen=True, eq=False)
class Opinion:
    """What the policy makes of one observation.

    Attributes:
        log_probs: `[H, K]`, as in `MultiCategorical`.
        value: Expected return.
    """

    log_probs: np.ndarray
    value: float

    @property
    def confidence(self) -> float:
        """Smallest over the heads of their largest probability: min over m of the paper's CS_m."""
        return float(np.exp(self.log_probs.max(-1).min()))

    @property
    def entropy(self) -> float:
        """Sum of the heads' entropies, nats."""
        return float(-(np.exp(self.log_probs) * self.log_probs).sum())

    def log_prob(self, action: np.ndarray) -> float:
        """Log-probability of an action `[H]`."""
        return float(self.log_probs[np.arange(len(action)), action].sum())


@dataclass(frozen=True, eq=False)
class Proposal:
    """An action `[A]`, what was seen `[T, A]`, and what the policy held of both."""

    observation: np.ndarray
    action: np.ndarray
    log_prob: float
    value: float


class EliteEnvRunner(SingleAgentEnvRunner):
    """Turns calls into rollouts: `act`, then `tell`, whoever steps the environment; `sample` steps its own.

    Several actions may be in flight; they are recorded in the order in which they were proposed. It acts with the
    learner's own module (`module` is set to it), so no weights are copied; whoever changes them calls `forget`. The
    base class's episodes and connectors are not used: a search has one environment and no end.

    Attributes:
        calls: Calls recorded since the search began; also the counter of the noise.
        opinion: What the policy made of the observation it last acted on, or None.
    """

    opinion_class: ClassVar[type[Any]] = Opinion
    config: Any  # a LearnToShardConfig
    module: Any  # an EliteAttention
    env: Any

    def __init__(self, *, config: Any, **kwargs: Any) -> None:
        # More threads are slower on matrices this small, and could change the order of sums.
        torch.set_num_threads(1)
        super().__init__(config=config, **kwargs)
        self.calls = 0
        self.opinion: Any = None
        self._in_flight: deque[Proposal] = deque()
        self._recorded: list[tuple[Proposal, float]] = []
        self._observation: np.ndarray | None = None
        self._opinions: dict[bytes, Opinion] = {}

    def make_env(self) -> None:
        """Builds the environment of the config; none is needed where a caller steps one."""
        if self.config.env is None:
            return
        create: Any
        _, create = Algorithm._get_env_id_and_creator(self.config.env, self.config)
        context = EnvContext(self.config.env_config, worker_index=self.worker_index)
        # RLlib's own would register a global name, of which gymnasium warns the second time.
        self.env, self.num_envs = SyncVectorEnv([lambda: create(context)]), 1

    def judge(self, observation: np.ndarray) -> Opinion:
        """The policy's opinion of `observation` `[T, A]`.

        Elites change seldom and the policy only with an update, so most calls ask for an opinion that is known already.
        """
        key = observation.tobytes()
        if key not in self._opinions:
            self._opinions[key] = self._forward(observation)
        return self._opinions[key]

    def _forward(self, observation: np.ndarray) -> Opinion:
        # A copy, here and in the learner: torch aligns its memory, and on numpy's BLAS may add up in another order.
        batch = {Columns.OBS: torch.tensor(observation[None])}
        with torch.inference_mode():
            out = self.module.forward_inference(batch)
            policy = self.module.action_dist_cls.from_logits(out[Columns.ACTION_DIST_INPUTS])
            value = self.module.compute_values({}, embeddings=out[Columns.EMBEDDINGS])
        return Opinion(policy.log_probs[0].numpy(), float(value))

    @property
    def stagnant_calls(self) -> int:
        """Calls since the search last found anything better to learn from; 0 where nobody counts them."""
        return 0

    def start_over(self) -> None:
        """Lets go of what only the agent that has ended was to learn from; nothing here."""

    def forget(self) -> None:
        """Drops all opinions: the weights have changed."""
        self._opinions.clear()

    def act(self, observation: np.ndarray) -> np.ndarray:
        """Samples an action `[A]` for `observation` `[T, A]`."""
        seen = self.look(observation)
        self.opinion = self.judge(seen)
        action = self.choose(call_rng(self.config.search_seed, self.calls + len(self._in_flight)))
        self._in_flight.append(Proposal(seen, action, self.opinion.log_prob(action), self.opinion.value))
        return action.copy()

    def look(self, observation: np.ndarray) -> np.ndarray:
        """What the policy gets to see of an observation, a new array."""
        return np.array(observation, dtype=np.float32)

    def choose(self, rng: np.random.Generator) -> np.ndarray:
        """Draws an action `[A]` from the present opinion."""
        log_probs = self.opinion.log_probs
        return (log_probs + gumbel_noise(rng, log_probs.shape)).argmax(-1)

    def tell(self, outcome: Outcome) -> None:
        """Notes what came of the oldest action in flight."""
        self.record(outcome.reward, outcome.observation)

    def record(self, reward: float, observation: np.ndarray) -> None:
        """Notes the reward of the oldest action in flight and the observation `[T, A]` it led to.

        Raises:
            RuntimeError: No action is in flight.
        """
        if not self._in_flight:
            raise RuntimeError("expected an action in flight, got the outcome of one that was never proposed")
        self._recorded.append((self._in_flight.popleft(), float(reward)))
        self._observation = self.look(observation)
        self.calls += 1

    @property
    def recorded(self) -> int:
        """Calls recorded since the last `take`."""
        return len(self._recorded)

    def take(self) -> Rollout:
        """Hands over the recorded calls, at least one, and starts a new rollout."""
        assert self._observation is not None
        proposals, rewards = zip(*self._recorded, strict=True)
        self._recorded = []
        return Rollout(
            observations=np.stack([p.observation for p in proposals]),
            actions=np.stack([p.action for p in proposals]),
            log_probs=np.array([p.log_prob for p in proposals], dtype=np.float32),
            rewards=np.array(rewards),
            values=np.array([p.value for p in proposals] + [self.judge(self._observation).value]),
        )

    def sample(self, *, num_timesteps: int, **__: Any) -> None:
        """Makes and records `num_timesteps` calls in the config's own environment.

        Raises:
            ValueError: The environment ended an episode, which a search never does.
        """
        if self._observation is None:
            self._observation = np.array(self.env.reset()[0][0])
        for _ in range(num_timesteps):
            action = self.act(self._observation)
            observations, rewards, terminated, truncated, infos = self.env.step(action[None])
            if terminated[0] or truncated[0]:
                raise ValueError(f"expected an environment without episodes, got an end at call {self.calls + 1}")
            info = {name: infos[name][0] for name in ("raw", "feasible", "best", "excess", "simulated")}
            self.tell(Outcome.of(observations[0], rewards[0], info))

    def get_memory(self) -> dict[str, Any]:
        """Everything but the weights that `set_memory` needs to go on as if nothing had happened; plain data."""
        return {
            "calls": self.calls,
            "opinion": None if self.opinion is None else vars(self.opinion),
            "in_flight": [vars(proposal) for proposal in self._in_flight],
            "recorded": [(vars(proposal), reward) for proposal, reward in self._recorded],
            "observation": self._observation,
            "env": self._own_env.get_wrapper_attr("get_state")() if self.env else None,
        }

    def set_memory(self, memory: dict[str, Any]) -> None:
        """Goes back to where `get_memory` was called."""
        self.calls = memory["calls"]
        self.opinion = None if memory["opinion"] is None else self.opinion_class(**memory["opinion"])
        self._in_flight = deque(Proposal(**proposal) for proposal in memory["in_flight"])
        self._recorded = [(Proposal(**proposal), reward) for proposal, reward in memory["recorded"]]
        self._observation = memory["observation"]
        if self.env:
            self._own_env.get_wrapper_attr("set_state")(memory["env"])
        self.forget()

    @property
    def _own_env(self) -> gymnasium.Env:
        return self.env.envs[0]
