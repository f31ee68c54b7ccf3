"""The policy of `ppo`: attention that copies from its elites, and of what it draws the most promising new strategy."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import gymnasium
import numpy as np
import torch
from ray.rllib.core.columns import Columns
from torch import Tensor, nn

from envs.saved_state import SavedState
from raysearch.searchers.interface import Outcome
from raysearch.searchers.ppo.coordinates import Coordinates
from raysearch.searchers.ppo.copy_options import CopyOptions
from raysearch.searchers.ppo.critic import Critic
from raysearch.searchers.ppo.distribution import IMPOSSIBLE, padding_index
from raysearch.searchers.ppo.features import ordered_values, step_distances, value_starts
from raysearch.searchers.ppo.memory import CallMemory, penalised_merit
from raysearch.searchers.ppo.mixture import CopyMixture
from raysearch.searchers.ppo.module import EliteModule, encode, initialise
from raysearch.searchers.ppo.noise import gumbel_noise

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
    """

    log_weights: np.ndarray
    log_probs: np.ndarray

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


class CopyAttention(EliteModule):
    """A mixture policy over the elite history X: point at an elite and vary it, or explore.

    Elites and choices are in `Coordinates`, where the batch moves with the degrees. The elites X `[N, T, A]` become
    one-hot tokens of one encoder block without positions, h_t `[N, T, d]`. Component t of the policy has, for value j
    of a coordinate where elite t has x, the logit

        MLP(h_t + mean h)_j + copy * [j = x] - step * |j - x|,

    with a learned copy weight per coordinate and a learned step weight per ordered one (choices have no order). The
    last component explores with MLP(mean h) alone. Which one acts is a softmax over learned scores of the h_t (hard
    attention). The MLP's last layer and the scores start at zero, so the first policy varies any of the elites a
    little, or draws uniformly; before the first elite it is uniform.

    It has no value network: advantages are ranks within a rollout. It remembers every call and proposes none twice;
    of a few new strategies that the policy draws it takes the one that its critic finds the most promising. What it
    sees are the elites of its own memory, infeasible ones too. `model_config` holds `search_seed`, `budget` and
    `preset`, a `CopyOptions` as a dictionary.

    Attributes:
        memory: All calls so far.
        critic: What picks between proposals; its weights are the module's, its optimiser is its own.

    Source: pointer networks (Vinyals et al. 2015) for the hard attention; the ordered degrees are this project's own.
    """

    coordinates_class: ClassVar[type[Coordinates]] = Coordinates
    output_class = MixturePolicyOutput

    def setup(self) -> None:
        """Builds the layers; called by RLlib's constructor."""
        assert isinstance(self.action_space, gymnasium.spaces.MultiDiscrete)
        self.coordinates = coordinates = self.coordinates_class(self.action_space)
        sizes, ordered = coordinates.sizes, coordinates.ordered
        distribution: Any = CopyMixture
        self.action_dist_cls = distribution.get_partial_dist_cls(index=padding_index(sizes), heads=len(sizes))
        self.options = options = CopyOptions(**self.model_config["preset"])
        total, d, hidden, heads = sum(sizes), options.embedding, options.hidden, options.attention_heads
        self.embedding = nn.Linear(total, d)
        self.encoder = nn.TransformerEncoderLayer(d, heads, options.feed_forward, dropout=0.0, batch_first=True)
        self.policy = nn.Sequential(nn.Linear(d, hidden), nn.Tanh(), nn.Linear(hidden, total))
        self.score = nn.Linear(d, 1)
        self.explore = nn.Parameter(torch.zeros(1))
        self.copy = nn.Parameter(torch.zeros(len(sizes)))
        self.step = nn.Parameter(torch.zeros(len(ordered)))
        self.memory = CallMemory(self.model_config["budget"], [int(n) for n in self.action_space.nvec], options.elites)
        self.critic = Critic(self.action_space, self.model_config["search_seed"], options)
        self.critic_ensemble = self.critic.ensemble
        self._constant("largest", torch.tensor(sizes) - 1)
        self._constant("starts", torch.from_numpy(value_starts(sizes)))
        self._constant("coordinate", torch.arange(len(sizes)).repeat_interleave(torch.tensor(sizes)))
        self._constant("ordered", torch.tensor(ordered, dtype=torch.int64))
        self._constant("ordered_values", torch.from_numpy(ordered_values(sizes, ordered)))
        self._constant("distances", torch.from_numpy(step_distances(sizes, ordered)))

    def _constant(self, name: str, value: Tensor) -> None:
        self.register_buffer(name, value, persistent=False)

    def reset_parameters(self, generator: torch.Generator) -> None:
        """Draws fresh weights in place, so that optimisers and shared references stay valid."""
        initialise(self, {self.policy[-1]: 0.0, self.score: 0.0}, generator)
        with torch.no_grad():
            self.explore.zero_()
            self.copy.fill_(self.options.copy_choice)
            self.copy[self.ordered] = self.options.copy_degree
            self.step.fill_(self.options.degree_step)

    def _forward(self, batch: dict[str, Any], **_: Any) -> dict[str, Any]:
        """From X `[N, T, A]`, padded with -1, to the inputs of a `CopyMixture`, `[N, T + 1, 1 + sum(sizes)]`."""
        x, present = self.one_hot(batch[Columns.OBS])
        h, pooled = self.attend(x, present)
        logits = torch.cat([self.policy(h + pooled) + self.copied(x), self.policy(pooled)], 1)
        scores = self.score(h).masked_fill(~present, IMPOSSIBLE)
        scores = torch.cat([scores, self.explore.expand(len(x), 1, 1)], 1)
        return {Columns.ACTION_DIST_INPUTS: torch.cat([scores, logits], -1)}

    def one_hot(self, observations: Tensor) -> tuple[Tensor, Tensor]:
        """Values of each elite as ones `[N, T, sum(sizes)]`, zeros in padded rows, and which are not `[N, T, 1]`."""
        present = observations[..., :1] >= 0
        values = (observations * self.largest).round().long().clamp(min=0) + self.starts
        ones = torch.zeros(*values.shape[:-1], len(self.coordinate))
        return ones.scatter_(-1, values, 1.0) * present, present

    def attend(self, x: Tensor, present: Tensor) -> tuple[Tensor, Tensor]:
        """Elites in the light of each other, h `[N, T, d]`, and their mean `[N, 1, d]`."""
        blind = torch.zeros_like(present, dtype=x.dtype).masked_fill(~present, IMPOSSIBLE)
        h = encode(self.encoder, self.embedding(x), blind.transpose(-1, -2)[:, None])
        return h, (h * present).sum(-2, keepdim=True) / present.sum(-2, keepdim=True).clamp(min=1)

    def copied(self, x: Tensor) -> Tensor:
        """Logits `[N, T, sum(sizes)]` that speak for the elites' own values `x`, one-hot, and for those near them."""
        decay = x[..., self.ordered_values] @ torch.einsum("k,kij->ij", self.step, self.distances)
        return (self.copy[self.coordinate] * x).index_add(-1, self.ordered_values, decay, alpha=-1)

    def policy_output(self, out: dict[str, Any]) -> MixturePolicyOutput:
        """The output behind what the network made of one observation."""
        distribution: Any = self.action_dist_cls
        policy = distribution.from_logits(out[Columns.ACTION_DIST_INPUTS])
        return MixturePolicyOutput(policy.log_weights[0].numpy(), policy.components.log_probs[0].numpy())

    def look(self, observation: np.ndarray) -> np.ndarray:
        """The memory's elites, float32 `[T, A]`: index over the largest of its coordinate, rows not filled -1."""
        rows = np.full((self.options.elites, len(self.coordinates.sizes)), -1.0, np.float32)
        elites = self.coordinates.encode(self.memory.elites)
        rows[: len(elites)] = elites / np.maximum(np.array(self.coordinates.sizes) - 1, 1)
        return rows

    def as_action(self, chosen: np.ndarray) -> np.ndarray:
        """The action `[A]` whose coordinates are `chosen`."""
        return self.coordinates.decode(chosen)

    def choose(self, rng: np.random.Generator, under_way: Sequence[np.ndarray]) -> tuple[np.ndarray, float]:
        """Draws new strategies from the policy and takes the most promising; a uniform new one if it has none.

        Returns:
            `[A]`, in coordinates, and log(how likely it was / how likely the policy alone was to), as estimated from
            all that was drawn.
        """
        decided = self.coordinates.decode(np.stack(under_way)) if len(under_way) else ()
        taken = {self.memory.rank(action) for action in decided}
        for tried in range(1, _ROUNDS + 1):
            drawn = self.output.sample(_DRAWS, rng)
            inside = self.coordinates.decode(drawn[self.coordinates.inside(drawn)])
            actions = [action for action in inside if self.is_new(action, taken)]
            if actions:
                place, preference = self.pick(np.stack(actions))
                return self.coordinates.encode(actions[place]), preference - math.log(len(actions) / (tried * _DRAWS))
        chosen = self.coordinates.encode(self.memory.draw_new(rng))
        return chosen, -math.log(max(1, self.memory.unknown)) - self.output.log_prob(chosen)

    def is_new(self, action: np.ndarray, taken: set[int]) -> bool:
        """Whether `action` `[A]` was neither called nor decided: of what was, `taken` has the ranks."""
        return self.memory.is_new(action) and self.memory.rank(action) not in taken

    def pick(self, drawn: np.ndarray) -> tuple[int, float]:
        """Which of the first m of `[k, A]` is taken, and log(how much likelier the critic made that).

        Of all sets of m among k draws, C(below + equal, m) - C(below, m) have the one that is taken as their best.
        """
        m = min(self.options.candidates, len(drawn))
        if m == 1 or not self.critic.trained:
            return 0, 0.0
        hopes = self.critic.hopes(drawn)
        place = int(hopes[:m].argmax())
        below, equal = int((hopes < hopes[place]).sum()), int((hopes == hopes[place]).sum())
        best_of = math.comb(below + equal, m) - math.comb(below, m)
        return place, math.log(best_of / math.comb(len(drawn), m) * len(drawn) / equal)

    def note(self, number: int, action: np.ndarray, outcome: Outcome) -> float:
        """Takes in a call; the policy is rewarded with its merit."""
        value = penalised_merit(outcome, self.options.excess_penalty)
        self.memory.add(number, action, value)
        return value

    @property
    def stagnant_calls(self) -> int:
        """Calls since the best elite was found."""
        return self.memory.stagnant_calls

    def learn_from_calls(self) -> None:
        """Lets the critic learn from all calls."""
        if self.options.candidates > 1:
            self.critic.learn(self.memory)

    def start_over(self, next_call: int) -> None:
        """Forgets the elites, so that the next policy looks elsewhere; no strategy is called twice for it."""
        self.memory.forget_elites(before=next_call)

    def get_memory(self) -> SavedState:
        """All but the policy's weights that `set_memory` needs to go on as if nothing had happened."""
        return {**super().get_memory(), "memory": self.memory.get_state(), "critic": self.critic.get_state()}

    def set_memory(self, memory: SavedState) -> None:
        """Goes back to where `get_memory` was called."""
        super().set_memory(memory)
        self.memory.set_state(memory["memory"])
        self.critic.set_state(memory["critic"])
