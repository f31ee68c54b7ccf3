"""The network of `raysearch.searchers.prior.policy` in PyTorch, as it is trained, and RLlib's module of it."""

from __future__ import annotations

from typing import Any

import torch
from ray.rllib.core.columns import Columns
from ray.rllib.core.rl_module.apis.value_function_api import ValueFunctionAPI
from ray.rllib.core.rl_module.torch import TorchRLModule
from torch import Tensor, nn

from raysearch.pretraining.search_episodes import TokenLayout
from raysearch.searchers.prior.policy import ATTENTION_HEADS, READ
from raysearch.searchers.prior.strategy_features import Reals

_TRUST = 6.0
"""[assumed] Weight of expected improvement, over the largest among the candidates, to begin with."""
_NEVER = -1e4
"""Logit of a candidate that is not there."""


class PolicyNetwork(nn.Module):
    """Logits of candidates, and what a search is still worth.

    Args:
        layout: Of what it reads.
        width: Of a token.
        depth: Layers of attention.
    """

    def __init__(self, layout: TokenLayout, width: int, depth: int) -> None:
        super().__init__()
        self.layout = layout
        self.of_workload, self.of_calls, self.of_candidates = (
            nn.Linear(shape[-1], width) for shape, _ in zip(layout.shapes, READ, strict=False)
        )
        self.layers = nn.ModuleList(
            nn.TransformerEncoderLayer(width, ATTENTION_HEADS, 2 * width, 0.0, batch_first=True, norm_first=True)
            for _ in range(depth)
        )
        self.norm = nn.LayerNorm(width)
        self.preference, self.value = nn.Linear(width, 1), nn.Linear(width, 1)
        self.trust = nn.Parameter(torch.tensor([_TRUST]))
        for layer in (self.preference, self.value):
            nn.init.zeros_(layer.weight)
            nn.init.zeros_(layer.bias)

    def forward(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        """Logits `[n, SHOWN]` and values `[n]` of observations `[n, size]`."""
        workload, calls, candidates, made, there = self.layout.unpacked(rows)
        found = torch.cat(
            [self.of_workload(workload)[:, None], self.of_calls(calls), self.of_candidates(candidates)], 1
        )
        absent = torch.cat([torch.zeros_like(made[:, :1]), 1 - made, 1 - there], 1) > 0
        for layer in self.layers:
            found = layer(found, src_key_padding_mask=absent)
        found = self.norm(found)
        logits = self.preference(found[:, -candidates.shape[1] :])[..., 0] + self.trust * candidates[..., -1]
        return logits.masked_fill(there == 0, _NEVER), self.value(found[:, 0])[:, 0]

    def arrays(self) -> dict[str, Reals]:
        """What a search needs of it, as it is now: training changes tensors in place."""
        return {
            name: tensor.detach().cpu().numpy().copy()
            for name, tensor in self.state_dict().items()
            if not name.startswith("value.")
        }


class PolicyModule(TorchRLModule, ValueFunctionAPI):
    """RLlib's module: `model_config` has `layout`, `width`, `depth` and `weights`, a file to begin with."""

    def setup(self) -> None:
        """Builds the network as it was imitated."""
        from safetensors.torch import load_file

        torch.set_num_threads(1)
        given: Any = self.model_config
        self.network = PolicyNetwork(TokenLayout(*given["layout"]), given["width"], given["depth"])
        self.network.load_state_dict(load_file(given["weights"]))

    def _forward(self, batch: dict[str, Any], **kwargs: Any) -> dict[str, Any]:
        logits, values = self.network(batch[Columns.OBS])
        return {Columns.ACTION_DIST_INPUTS: logits, Columns.VF_PREDS: values}

    def compute_values(self, batch: dict[str, Any], embeddings: Any = None) -> Tensor:
        """What searches are still worth, `[n]`."""
        return self.network(batch[Columns.OBS])[1]
