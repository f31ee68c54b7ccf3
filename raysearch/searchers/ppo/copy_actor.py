"""Acts with the copying policy: new strategies only, the most promising of a few, from all that was called so far."""

from __future__ import annotations

from collections.abc import Set
from dataclasses import dataclass
from typing import Any

import numpy as np
from gymnasium.spaces import MultiDiscrete
from ray.rllib.core.columns import Columns

from envs.saved_state import SavedState
from raysearch.searchers.interface import Outcome
from raysearch.searchers.ppo.actor import EliteActor
from raysearch.searchers.ppo.critic import Critic
from raysearch.searchers.ppo.memory import CallMemory, penalised_merit
from raysearch.searchers.ppo.noise import call_rng, gumbel_noise

_DRAWS = 8
"""Strategies drawn at once, so that repeats seldom cost another round. [assumed]"""
_ROUNDS = 4
"""Rounds without a new strategy after which a uniform one is taken: the policy has nothing new to say. [assumed]"""


@dataclass(frozen=True, eq=False)
class MixturePolicyOutput:
    """What the policy makes of the elites: a `PolicyOutput` of C components.

    Attributes:
        log_weights: `[C]`.
        log_probs: `[C, H, K]`, as in `MultiCategorical`.
        value: Always 0: there is no value network.
    """

    log_weights: np.ndarray
    log_probs: np.ndarray
    value: float = 0.0

    @property
    def confidence(self) -> float:
        """Smallest over the heads of their largest probability, over all components."""
        marginals = np.tensordot(np.exp(self.log_weights), np.exp(self.log_probs), 1)
        return float(marginals.max(-1).min())

    @property
    def entropy(self) -> float:
        """Mean over the components of the sum of their heads' entropies, nats."""
        each = -(np.exp(self.log_probs) * self.log_probs).sum((-2, -1))
        return float((np.exp(self.log_weights) * each).sum())

    def log_prob(self, action: np.ndarray) -> float:
        """Log-probability of an action `[H]`, whichever component made it."""
        each = self.log_probs[:, np.arange(len(action)), action].sum(-1)
        return float(np.logaddexp.reduce(self.log_weights + each))

    def sample(self, draws: int, rng: np.random.Generator) -> np.ndarray:
        """Actions `[draws, H]`."""
        component = (self.log_weights + gumbel_noise(rng, (draws, len(self.log_weights)))).argmax(-1)
        noise = gumbel_noise(rng, (draws, *self.log_probs.shape[1:]))
        return (self.log_probs[component] + noise).argmax(-1)


class CopyActor(EliteActor):
    """Proposes strategies that were not called before, and remembers every call.

    It shows the policy the elites of its own memory, which holds infeasible ones too, instead of the environment's.
    What the policy sees and chooses is in `Coordinates`; everybody else speaks of actions.

    Attributes:
        memory: All calls so far.
        critic: What picks between proposals.
    """

    module: Any  # a CopyAttention
    output_class = MixturePolicyOutput
    listens = True

    def __init__(self, config: Any, action_space: MultiDiscrete) -> None:
        super().__init__(config, action_space)
        self.coordinates = config.module_class.coordinates_class(action_space)
        self.memory = CallMemory(config.budget, self.sizes, config.preset.elites)
        self.critic = Critic(action_space, config.search_seed, config.preset)

    @property
    def stagnant_calls(self) -> int:
        """Calls since the best elite was found."""
        return self.memory.stagnant_calls

    def start_over(self) -> None:
        """Forgets the elites, so that the next policy looks elsewhere; no strategy is called twice for it."""
        self.memory.forget_elites(before=self.next_call)

    def look(self, observation: np.ndarray) -> np.ndarray:
        """The memory's elites, float32 `[T, A]`: index over the largest of its coordinate, rows not filled -1."""
        rows = np.full((self.config.preset.elites, len(self.coordinates.sizes)), -1.0, np.float32)
        elites = self.coordinates.encode(self.memory.elites)
        rows[: len(elites)] = elites / np.maximum(np.array(self.coordinates.sizes) - 1, 1)
        return rows

    def as_action(self, chosen: np.ndarray) -> np.ndarray:
        """The action `[A]` whose coordinates are `chosen`."""
        return self.coordinates.decode(chosen)

    def policy_output(self, out: dict[str, Any]) -> MixturePolicyOutput:
        """The output behind what the module made of one observation."""
        policy = self.module.action_dist_cls.from_logits(out[Columns.ACTION_DIST_INPUTS])
        return MixturePolicyOutput(policy.log_weights[0].numpy(), policy.components.log_probs[0].numpy())

    def choose(self, rng: np.random.Generator) -> np.ndarray:
        """Draws new strategies from the policy and takes the most promising; a uniform new one if it has none.

        Returns:
            `[A]`, in coordinates.
        """
        taken = {self.memory.rank(action) for action in self.claimed}
        if self._in_flight:
            decided = self.coordinates.decode(np.stack([proposal.action for proposal in self._in_flight]))
            taken |= {self.memory.rank(action) for action in decided}
        for _ in range(_ROUNDS):
            drawn = self.output.sample(_DRAWS, rng)
            inside = self.coordinates.decode(drawn[self.coordinates.inside(drawn)])
            actions = [action for action in inside if self._is_new(action, taken)]
            if actions:
                return self.coordinates.encode(self.critic.pick(np.stack(actions[: self.config.preset.candidates])))
        return self.coordinates.encode(self.memory.draw_new(rng))

    def _is_new(self, action: np.ndarray, taken: Set[int]) -> bool:
        return self.memory.is_new(action) and self.memory.rank(action) not in taken

    def foresee(self, output: Any, numbers: range) -> list[np.ndarray]:
        """What others take in the calls of these numbers: their noise is known, so it can be worked out."""
        self.output, self.claimed = output, []
        for number in numbers:
            chosen = self.choose(call_rng(self.config.search_seed, number, self.stream))
            self.claimed.append(self.as_action(chosen))
        return self.claimed

    def note(self, number: int, action: np.ndarray, outcome: Outcome) -> float:
        """Takes in a call; the policy is rewarded with its merit."""
        super().note(number, action, outcome)
        value = penalised_merit(outcome, self.config.preset.excess_penalty)
        self.memory.add(number, action, value)
        return value

    def learn(self) -> None:
        """Lets the critic learn from all calls."""
        if self.config.preset.candidates > 1:
            self.critic.learn(self.memory)

    @property
    def settled(self) -> int:
        """The first call that is not known."""
        return self.memory.settled

    def news(self, since: int, *, learned: bool = True) -> SavedState:
        """The calls from number `since` on, the environment's elites, and what the critic has learned."""
        output = {"critic": self.critic.get_learned()} if learned else {}
        return {**super().news(since), "calls": self.memory.get_state(since), **output}

    def hear(self, news: SavedState) -> None:
        """Takes in the calls of all actors, its own among them."""
        self.memory.hear(news["calls"])
        if "critic" in news:
            self.critic.set_learned(news["critic"])
        super().hear(news)

    def get_memory(self) -> SavedState:
        """Everything but the policy's weights that `set_memory` needs to go on as if nothing had happened."""
        return {**super().get_memory(), "memory": self.memory.get_state(), "critic": self.critic.get_state()}

    def set_memory(self, memory: SavedState) -> None:
        """Goes back to where `get_memory` was called."""
        super().set_memory(memory)
        self.memory.set_state(memory["memory"])
        self.critic.set_state(memory["critic"])
