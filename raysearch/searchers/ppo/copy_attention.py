"""The policy network of `ppo`: attention that copies from its elites, one at a time."""

from __future__ import annotations

from typing import Any, ClassVar

import gymnasium
import torch
from ray.rllib.core.columns import Columns
from torch import Tensor, nn

from raysearch.searchers.ppo.coordinates import Coordinates
from raysearch.searchers.ppo.distribution import IMPOSSIBLE, padding_index
from raysearch.searchers.ppo.features import ordered_values, step_distances, value_starts
from raysearch.searchers.ppo.mixture import CopyMixture
from raysearch.searchers.ppo.module import EliteModule, encode, initialise


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

    It has no value network: advantages are ranks within a rollout. `model_config` holds `embedding`, `hidden`,
    `feed_forward`, `attention_heads`, `copy_choice`, `copy_degree` and `degree_step`.

    Source: pointer networks (Vinyals et al. 2015) for the hard attention; the ordered degrees are this project's own.
    """

    coordinates_class: ClassVar[type[Coordinates]] = Coordinates

    def setup(self) -> None:
        """Builds the layers; called by RLlib's constructor."""
        assert isinstance(self.action_space, gymnasium.spaces.MultiDiscrete)
        coordinates = self.coordinates_class(self.action_space)
        sizes, ordered = coordinates.sizes, coordinates.ordered
        distribution: Any = CopyMixture
        self.action_dist_cls = distribution.get_partial_dist_cls(index=padding_index(sizes), heads=len(sizes))
        config, total = self.model_config, sum(sizes)
        d, hidden, heads = config["embedding"], config["hidden"], config["attention_heads"]
        self.embedding = nn.Linear(total, d)
        self.encoder = nn.TransformerEncoderLayer(d, heads, config["feed_forward"], dropout=0.0, batch_first=True)
        self.policy = nn.Sequential(nn.Linear(d, hidden), nn.Tanh(), nn.Linear(hidden, total))
        self.score = nn.Linear(d, 1)
        self.explore = nn.Parameter(torch.zeros(1))
        self.copy = nn.Parameter(torch.zeros(len(sizes)))
        self.step = nn.Parameter(torch.zeros(len(ordered)))
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
        config = self.model_config
        initialise(self, {self.policy[-1]: 0.0, self.score: 0.0}, generator)
        with torch.no_grad():
            self.explore.zero_()
            self.copy.fill_(config["copy_choice"])
            self.copy[self.ordered] = config["copy_degree"]
            self.step.fill_(config["degree_step"])

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
