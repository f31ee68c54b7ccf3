"""The paper's policy network: attention over the elite history."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, Self

import gymnasium
import torch
import torch.nn.functional as nnf
from ray.rllib.core.columns import Columns
from ray.rllib.core.rl_module.apis.value_function_api import ValueFunctionAPI
from ray.rllib.core.rl_module.torch import TorchRLModule
from torch import Tensor, nn

from raysearch.searchers.ppo.distribution import MultiCategorical, padding_index


def encode(layer: nn.TransformerEncoderLayer, x: Tensor, mask: Tensor | None = None) -> Tensor:
    """Returns `layer(x)` for `x` `[N, T, d]` without the overhead of its general case (a fifth of the time).

    Assumes what `EliteAttention` builds: batch first, norm last, ReLU, no dropout. `mask`, broadcast to
    `[N, heads, T, T]`, is added to the attention's scores.
    """
    attention, (rows, elites, d) = layer.self_attn, x.shape
    projected = nnf.linear(x, attention.in_proj_weight, attention.in_proj_bias)
    heads = projected.view(rows, elites, 3, attention.num_heads, -1).permute(2, 0, 3, 1, 4)
    mixed = nnf.scaled_dot_product_attention(heads[0], heads[1], heads[2], mask)
    x = layer.norm1(x + attention.out_proj(mixed.transpose(1, 2).reshape(rows, elites, d)))
    return layer.norm2(x + layer.linear2(nnf.relu(layer.linear1(x))))


def initialise(module: nn.Module, gains: Mapping[nn.Module, float], generator: torch.Generator) -> None:
    """Draws fresh weights for every layer in place: linear ones orthogonal with `gains`, sqrt(2) if not named."""
    for layer in module.modules():
        if isinstance(layer, nn.Linear):
            nn.init.orthogonal_(layer.weight, gains.get(layer, math.sqrt(2)), generator)
            nn.init.zeros_(layer.bias)
        elif isinstance(layer, nn.LayerNorm):
            layer.reset_parameters()
    for layer in module.modules():
        if isinstance(layer, nn.MultiheadAttention):
            nn.init.xavier_uniform_(layer.in_proj_weight, generator=generator)
            nn.init.zeros_(layer.in_proj_bias)


def distinct_rows(observations: Tensor) -> tuple[Tensor, Tensor]:
    """The observations `[n, T, A]` without repetitions `[d, T, A]`, and which of them each one is, int64 `[n]`.

    Elites change seldom, so that a policy mostly sees the same again.
    """
    places: dict[bytes, int] = {}
    seen = [places.setdefault(row.tobytes(), len(places)) for row in observations.detach().cpu().numpy()]
    first = [seen.index(place) for place in range(len(places))]
    return observations[first], torch.tensor(seen, device=observations.device)


class EliteModule(TorchRLModule):
    """A policy that reads every observation of a batch once, and while it acts one by one.

    Reading them one by one makes what it does in one environment independent, bit by bit, of how many others are
    stepped in the same process. Learning reads them together.

    What it made of an observation while exploring is kept until the next `set_state`, by which alone the weights of an
    env runner's module change: elites change seldom, so most steps see what an earlier one saw.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._explored: dict[bytes, Tensor] = {}

    def set_state(self, state: Any) -> None:
        """Takes other weights."""
        super().set_state(state)
        self._explored.clear()

    def train(self, mode: bool = True) -> Self:
        """Does nothing: no layer behaves differently in training, and RLlib walks the whole tree on every step."""
        return self

    def _forward_train(self, batch: dict[str, Any], **_: Any) -> dict[str, Any]:
        rows, seen = distinct_rows(batch[Columns.OBS])
        return {name: column.index_select(0, seen) for name, column in self._forward({Columns.OBS: rows}).items()}

    def _forward_inference(self, batch: dict[str, Any], **_: Any) -> dict[str, Any]:
        with torch.inference_mode():
            return self.one_by_one(batch[Columns.OBS])

    def _forward_exploration(self, batch: dict[str, Any], **_: Any) -> dict[str, Any]:
        if Columns.ACTIONS in batch:  # decided elsewhere
            return {name: column for name, column in batch.items() if name != Columns.OBS}
        observations = batch[Columns.OBS]
        keys = [row.tobytes() for row in observations.cpu().numpy()]
        for key, row in zip(keys, observations, strict=True):
            if key not in self._explored:
                self._explored[key] = self._forward_inference({Columns.OBS: row[None]})[Columns.ACTION_DIST_INPUTS]
        # The rest would travel in the episodes.
        return {Columns.ACTION_DIST_INPUTS: torch.cat([self._explored[key] for key in keys])}

    def one_by_one(self, observations: Tensor) -> dict[str, Tensor]:
        """What the network makes of `[n, T, A]`, each distinct observation in a batch of its own."""
        if len(observations) == 1:
            return self._forward({Columns.OBS: observations})
        rows, seen = distinct_rows(observations)
        each = [self._forward({Columns.OBS: row[None].clone()}) for row in rows]
        return {name: torch.cat([out[name] for out in each]).index_select(0, seen) for name in each[0]}


class EliteAttention(EliteModule, ValueFunctionAPI):
    """Policy and value over the elite history X: linear embedding, one encoder block, mean over T, two MLPs.

    Observations are `[N, T, A]`, actions `[N, A]`; the logits of all heads lie flat, `[N, sum(nvec)]`.
    The rows of X carry no position: they differ by content alone [assumed; the paper names none].
    `model_config` holds `embedding`, `hidden`, `feed_forward` and `attention_heads`.

    Source: Learning to Shard, section 3 (Policy Network) and appendix A; the value MLP is Stable-Baselines3's way
    of sharing a feature extractor between policy and value.
    """

    def setup(self) -> None:
        """Builds the layers; called by RLlib's constructor."""
        assert isinstance(self.action_space, gymnasium.spaces.MultiDiscrete)
        assert self.observation_space.shape is not None
        sizes = [int(n) for n in self.action_space.nvec]
        # RLlib knows no default distribution for MultiDiscrete without a catalog.
        distribution: Any = MultiCategorical
        self.action_dist_cls = distribution.get_partial_dist_cls(index=padding_index(sizes), heads=len(sizes))
        config = self.model_config
        d, hidden, heads = config["embedding"], config["hidden"], config["attention_heads"]
        self.embedding = nn.Linear(self.observation_space.shape[-1], d)
        self.encoder = nn.TransformerEncoderLayer(d, heads, config["feed_forward"], dropout=0.0, batch_first=True)
        self.policy = nn.Sequential(nn.Linear(d, hidden), nn.Tanh(), nn.Linear(hidden, sum(sizes)))
        self.value = nn.Sequential(nn.Linear(d, hidden), nn.Tanh(), nn.Linear(hidden, 1))

    def reset_parameters(self, generator: torch.Generator) -> None:
        """Draws fresh weights in place, so that optimisers and shared references stay valid.

        Source: Stable-Baselines3's `ActorCriticPolicy`: orthogonal with gain sqrt(2), 0.01 for the logits (a nearly
        uniform start) and 1 for the value; biases 0. Attention's input projection keeps torch's Xavier.
        """
        initialise(self, {self.policy[-1]: 0.01, self.value[-1]: 1.0}, generator)

    def features(self, observations: Tensor) -> Tensor:
        """Summary of the elite history: `[N, T, A]` to h, `[N, d]`."""
        return encode(self.encoder, self.embedding(observations)).mean(-2)

    def _forward(self, batch: dict[str, Any], **_: Any) -> dict[str, Any]:
        features = self.features(batch[Columns.OBS])
        return {Columns.ACTION_DIST_INPUTS: self.policy(features), Columns.EMBEDDINGS: features}

    def compute_values(self, batch: dict[str, Any], embeddings: Tensor | None = None) -> Tensor:
        """Expected return `[N]` of each observation: by `embeddings` `[N, d]`, or as seen while acting, one by one."""
        if embeddings is not None:
            return self.value(embeddings).squeeze(-1)
        with torch.inference_mode():
            rows, seen = distinct_rows(batch[Columns.OBS])
            each = [self.value(self.features(row[None].clone())).squeeze(-1) for row in rows]
            return torch.cat(each).index_select(0, seen)
