"""How large a layer's tensors are: what one step holds, and what of it one group of GPUs has."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import NamedTuple

from sim.arrays import Lanes, by_distinct, smaller
from sim.layers.model import LayerGroup, Model
from sim.layers.ops import Tensor
from sim.prices.dtypes import DTYPE_BYTES, Dtype
from sim.prices.routing import busiest_load
from sim.workload import Workload


class GroupLoad(NamedTuple):
    """What one group of GPUs that share their tokens computes in a step.

    Attributes:
        sequences: Sequences that decode.
        context_tokens: Tokens that each of them has cached.
        prompts: Prompts computed in the same step; a fraction where a prompt is cut into chunks.
        prompt_tokens: Tokens of one whole prompt.
        queries: Tokens of each sequence: one, and those that are drafted and verified.
    """

    sequences: int
    context_tokens: float
    prompts: float = 0.0
    prompt_tokens: int = 1
    queries: int = 1

    @property
    def decoded_tokens(self) -> int:
        """Tokens of the sequences that decode."""
        return self.sequences * self.queries

    @property
    def tokens(self) -> float:
        """All tokens of the group in the step."""
        return self.decoded_tokens + self.prompts * self.prompt_tokens if self.prompts else self.decoded_tokens


class Load(NamedTuple):
    """What one step of one microbatch holds, over all attention ranks.

    Attributes:
        sequences: Sequences that decode.
        context_tokens: Tokens that each of them has cached, on average.
        cached_tokens: Tokens of KV cache that each of them holds at most.
        prompts: Prompts computed in the same step; a fraction where a prompt is cut into chunks.
        prompt_tokens: Tokens of one whole prompt.
        busiest_prompts: Of these on the attention group that has most; None: shared out as evenly as whole ones can be.
        attention_groups: Attention groups.
        queries: Tokens of each sequence: one, and those that are drafted and verified.
        or_more: Whether it stands for itself and every larger load: what a step costs is then a bound from below.
    """

    sequences: int
    context_tokens: float
    cached_tokens: float
    prompts: float = 0.0
    prompt_tokens: int = 1
    busiest_prompts: float | None = None
    attention_groups: int = 1
    queries: int = 1
    or_more: bool = False

    def of_group(self, groups: int) -> GroupLoad:
        """What the busiest of `groups` equal groups of GPUs has."""
        sequences, prompts = math.ceil(self.sequences / groups), self._prompts_of_group(groups) if self.prompts else 0.0
        return GroupLoad(sequences, self.context_tokens, prompts, self.prompt_tokens, self.queries)

    def _prompts_of_group(self, groups: int) -> float:
        """Prompts of one of them: a share of an attention group's, or those of several, of which one is the busiest."""
        most, attention = self.busiest_prompts, self.attention_groups
        if most is None:
            return math.ceil(self.prompts / groups)
        if groups >= attention:
            return most / (groups / attention)
        others = (self.prompts - most) / (attention - 1)
        return most + (attention / groups - 1) * others

    def part(self, parts: int) -> Load:
        """One of so many parts of it, the largest; prompts are cut, too."""
        return self._replace(
            sequences=-(-self.sequences // parts),
            prompts=self.prompts / parts,
            busiest_prompts=self.of_group(self.attention_groups).prompts / parts if self.prompts else None,
        )

    def all_tokens(self, groups: int) -> float:
        """Tokens of all `groups`, each as many sequences as the busiest."""
        own = self.of_group(groups)
        if not self.prompts:
            return own.decoded_tokens * groups
        prompts = own.prompts * groups if self.busiest_prompts is None else self.prompts
        return own.decoded_tokens * groups + prompts * self.prompt_tokens


@dataclass(frozen=True, slots=True)
class LayerSizes:
    """Sizes of one layer on one group of GPUs, before an axis shards anything.

    Attributes:
        load: What the group computes.
        tokens: All tokens of the group, those of the busiest one.
        all_tokens: Tokens of all groups together.
        expert_tokens: Copies of tokens that its experts process: tokens * top-k, times the load imbalance and, where
            routing is skewed, what the busiest group gets of it.
        local_experts: Experts and copies it holds, ceil((experts + redundant) / ep).
        active_experts: Expected number of them that at least one token visits.
        columns: Width of every feature label: d, q, a, e, k, f.
    """

    load: GroupLoad
    tokens: float
    all_tokens: float
    expert_tokens: float
    local_experts: int
    active_experts: float
    columns: Mapping[str, int]

    @property
    def output_tokens(self) -> float:
        """Tokens of the group that get a next token: those of each sequence, and of each prompt its last."""
        return self.load.decoded_tokens + self.load.prompts


def layer_sizes(workload: Workload, load: Load, ep: int, copies: int = 1, layer_group: int = 0) -> LayerSizes:
    """Sizes of a step over `ep` groups of experts, of which every `copies` neighbours have the same tokens.

    A token picks `experts_per_token` distinct experts, so under uniform routing an expert stays
    idle with probability (1 - top-k / experts) ** tokens; a copy of an expert counts as one more. Where `ep` does not
    divide them, the busiest rank holds one more than others, and gets as many more tokens.

    Args:
        workload: As given.
        load: What is in the step.
        ep: Groups of experts.
        copies: Neighbours that have the same tokens.
        layer_group: Index of the layers' group in the model.
    """
    layers, groups = workload.model.groups[layer_group], ep // copies
    own, everyone = load.of_group(groups), load.all_tokens(groups)
    experts, topk = layers.experts, layers.feed_forward.experts_per_token if layers.feed_forward else 1
    redundant = workload.redundant_experts if layers.is_moe else 0
    all_copies = experts + redundant
    local_experts = math.ceil(all_copies / ep)
    idle = (1 - topk / all_copies) ** everyone
    imbalance = workload.load_imbalance
    if workload.routing == "skewed" and layers.is_moe:
        imbalance *= _busiest(everyone, ep, topk, experts, redundant)
    if layers.is_moe:
        imbalance *= local_experts * ep / all_copies
    imbalance = smaller(imbalance, ep)  # a rank cannot get more than all tokens
    return LayerSizes(
        load=own,
        tokens=own.tokens,
        all_tokens=everyone,
        expert_tokens=everyone / ep * topk * imbalance,
        local_experts=local_experts,
        active_experts=local_experts * (1 - idle),
        columns=feature_widths(workload.model.hidden, layers),
    )


def _busiest(tokens: float, ep: int, topk: float, experts: float, redundant: int) -> float:
    if isinstance(tokens, Lanes) or isinstance(ep, Lanes):
        return by_distinct(partial(_busiest, topk=topk, experts=experts, redundant=redundant), tokens, ep)
    return busiest_load(tokens, topk, experts, ep, redundant=redundant)


FEATURES = ("d", "q", "a", "e", "k", "f")
"""Letters of columns: hidden, queries with keys and values, heads' results, experts, a token's experts, ffn hidden."""


@lru_cache(maxsize=64)
def feature_widths(hidden: int, layers: LayerGroup) -> Mapping[str, int]:
    """Width of each of `FEATURES` that layers of a hidden width have."""
    widths = {"d": hidden}
    if attention := layers.attention:
        widths |= {"q": attention.qkv_width, "a": attention.output_width}
    if network := layers.feed_forward:
        widths |= {"e": network.experts, "k": network.experts_per_token, "f": network.ffn_hidden}
    return widths


ROUTING_ENTRY_BYTES = 8
"""One routed expert of one token: a 4-byte index and a 4-byte weight."""


def tensor_columns(model: Model, layers: LayerGroup, tensor: Tensor) -> int:
    """Columns of a tensor before the tp axis shards it: experts have those of their latent."""
    columns = tensor.storage.columns
    if columns:
        return columns(layers)
    width, letter = feature_widths(model.hidden, layers)[tensor.letters[-1]], tensor.letters[-1]
    if letter != "d":
        return width
    if tensor.by_expert and layers.feed_forward:
        return layers.feed_forward.latent or width
    return width * model.residual_streams if tensor.name in ("residual_in", "residual_mid") else width


def element_bytes(workload: Workload, tensor: Tensor) -> float:
    """Bytes per element of a tensor as it is moved."""
    each_bytes = tensor.storage.each_bytes
    return DTYPE_BYTES[tensor_dtype(workload, tensor)] if each_bytes is None else each_bytes


def tensor_dtype(workload: Workload, tensor: Tensor) -> Dtype:
    """Storage format of a tensor: dispatched tokens have their own, the rest are activations."""
    precisions = workload.precisions
    return precisions.dispatch if tensor.storage.dispatched else precisions.activations
