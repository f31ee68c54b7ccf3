"""What a strategy means on a workload, as numbers: the same ones for every model, machine and space.

An action is never described by its index. A degree is its logarithm, an op's choice is given by the op's name and by
what the choice shards, and beside them stand the strategy's bytes, FLOPs and messages, each over the machine's
published rate. Their sum is a step's time as a bare roofline has it; a network has to learn only what that leaves out.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple, final

import numpy as np
from numpy.typing import NDArray

from raysearch.base.errors import InputError
from sim.arrays import Ints
from sim.batched import Strategies
from sim.layers.mixers import Attention, CompressedAttention, GroupedAttention, LatentAttention, LinearMixer
from sim.ops.dims import dims_of
from sim.ops.layers import MOE_LAYER, layer_of
from sim.prices.dtypes import DTYPE_BYTES
from sim.prices.hardware import NCCL_ALGORITHMS, Hardware
from sim.serving.phases import phase_of
from sim.step.stage import room
from sim.strategy import FIRST_DECLARED, GATHERED, GATHERED_TOKENS
from sim.workload import TWO_DIMENSIONAL, Workload

Reals = NDArray[np.floating[Any]]
"""Of either precision: the network's numbers are short, logarithms are not."""
OPS: tuple[str, ...] = tuple(MOE_LAYER.op_by_name)
"""Fused ops that are known by name; a dense layer's are among them."""
FEATURE_TERMS = (
    "attention_weights",
    "expert_weights",
    "dense_weights",
    "cache",
    "attention_flops",
    "mixer_flops",
    "expert_flops",
    "tensor_messages",
    "expert_messages",
    "launches",
)
"""What a step's time is made of."""
DEGREE_NAMES = ("tp", "ep", "pp", "batch", "cp", "dp")
CHOICE_PLACES = slice(0, len(DEGREE_NAMES))
"""Logarithms to base 2 of `DEGREE_NAMES`."""
SHARES = slice(CHOICE_PLACES.stop, CHOICE_PLACES.stop + len(FEATURE_TERMS))
"""Log of the share of each of `FEATURE_TERMS` in a step's time."""
OP_CHOICES = slice(SHARES.stop, SHARES.stop + len(OPS) * FIRST_DECLARED)
"""Share of the layers in which an op is sharded so, op by op."""
LEAST_LOG_SHARE = -8.0
"""[assumed] Below, a term makes no difference."""
_SHARDED = (0, 1)
_AT_REST = (0, 1, GATHERED_TOKENS, GATHERED)
"""Choices whose weights rest in shards."""
_LAUNCH_S, _HOP_S = 5e-6, 1e-5
"""[assumed] A launch, and a collective's latency: the network learns the machine's own."""


class Features(NamedTuple):
    """Of [n] strategies.

    Attributes:
        inputs: Of the network, float32 `[n, F]`; `CHOICE_PLACES`, `SHARES` and `OP_CHOICES` say where some stand.
        log_step_s: Log seconds of a step by the roofline, `[n]`.
        log_ttft_s: The same of the first token.
        log_memory: Log of needed over allowed bytes, `[n]`.
        log_tokens: Log of tokens/s/GPU times seconds of a step, `[n]`.
    """

    inputs: Reals
    log_step_s: Reals
    log_ttft_s: Reals
    log_memory: Reals
    log_tokens: Reals

    def at(self, rows: Ints) -> Features:
        """Those of some of the strategies."""
        return Features(*(each[rows] for each in self))

    @classmethod
    def joined(cls, parts: list[Features]) -> Features:
        """Those of all parts, one after the other."""
        return cls(*(np.concatenate(columns) for columns in zip(*parts, strict=True)))


class _Mixer(NamedTuple):
    """What a layer's token mixer keeps and reads of a sequence, bytes, and computes for one more token, FLOPs."""

    stored_bytes: float
    read_bytes: float
    flops: float


def _mixer(attention: Attention, context: float, kv_each: float) -> _Mixer:
    if isinstance(attention, LinearMixer):
        state = attention.heads * attention.key_dim * attention.value_dim
        return _Mixer(4.0 * state, 8.0 * state, 6.0 * state)
    indexer = attention.indexer
    if isinstance(attention, CompressedAttention):
        far = context / attention.ratio if attention.ratio else 0.0
        near = min(context, attention.window)
        stored, read = near + far, near + (min(far, indexer.topk) if indexer else far)
        width, each = attention.head_dim, 2 * attention.head_dim
    elif isinstance(attention, LatentAttention):
        stored, read = context, min(context, indexer.topk) if indexer else context
        width, each = attention.cached_width, attention.cached_width + attention.kv_rank
    else:
        stored = min(context, attention.window + attention.sinks) if attention.window else context
        read = min(stored, indexer.topk) if indexer else stored
        width, each = attention.kv_heads * attention.token_width, attention.token_width
    keys = indexer.head_dim * stored if indexer else 0.0
    flops = 2.0 * attention.heads * each * read + 2.0 * keys * (indexer.heads if indexer else 0)
    return _Mixer(width * kv_each * stored + keys, width * kv_each * read + keys, flops)


@final
class WorkloadFeatures:
    """A workload's part of the features, and the way from strategies to theirs.

    Args:
        workload: What is searched; ops and choices that it alone has are left out.
    """

    def __init__(self, workload: Workload) -> None:
        self.workload = workload
        self._slots = [(place, OPS.index(name), weight) for place, name, weight in _slots(workload)]
        model, precisions = workload.model, workload.precisions
        weight_each, kv_each = DTYPE_BYTES[precisions.weights], DTYPE_BYTES[precisions.kv_cache]
        expert_each = DTYPE_BYTES[model.expert_dtype or precisions.weights]
        phase, context = phase_of(workload), float(workload.context_tokens or workload.prompt_tokens)
        self._queries = workload.queries if phase.decodes else 0
        self._prompt_rate = (
            (workload.prompt_tokens / workload.output_tokens if phase.mixes else workload.prompt_tokens)
            if phase.prefills
            else 0.0
        )
        self._counted = workload.tokens_per_step if phase.decodes else float(workload.prompt_tokens)
        self._attention = self._experts = self._dense = self._each_expert = self._stored = self._read = 0.0
        self._mixer_flops = self._prompt_flops = 0.0  # for one token more, and for a prompt's tokens on average
        self._expert_layers, windowed, linear, sparse = 0, 0, 0, 0
        for group in model.groups:
            if attention := group.attention:
                self._attention += group.count * attention.parameters(model.hidden)
                mixer = _mixer(attention, context, kv_each)
                self._stored += group.count * mixer.stored_bytes
                self._read += group.count * mixer.read_bytes
                self._mixer_flops += group.count * mixer.flops
                self._prompt_flops += group.count * _mixer(attention, workload.prompt_tokens / 2, kv_each).flops
                linear += group.count * isinstance(attention, LinearMixer)
                windowed += group.count * bool(getattr(attention, "window", 0))
                sparse += group.count * bool(getattr(attention, "indexer", None))
            if network := group.feed_forward:
                each = network.expert_parameters(model.hidden)
                if network.is_moe:
                    self._expert_layers += group.count
                    self._each_expert += group.count * each
                    self._experts += group.count * each * network.experts
                    self._dense += group.count * (network.parameters(model.hidden) - each * network.experts)
                else:
                    self._dense += group.count * each
        self._bytes = (self._attention * weight_each, self._experts * expert_each, self._dense * weight_each)
        first = next(group.attention for group in model.groups if group.attention)
        self._heads, self._kv_heads = model.heads, first.kv_heads if isinstance(first, GroupedAttention) else 1
        self._topk = max(
            (g.feed_forward.experts_per_token for g in model.groups if g.is_moe and g.feed_forward), default=1
        )
        hardware, collectives = workload.hardware, workload.hardware.collectives
        self._peak = hardware.peak_flop_per_s[precisions.weights]
        self._mixer_peak = hardware.peak_flop_per_s[precisions.activations]
        self._bandwidth = hardware.hbm_bandwidth_bytes_per_s
        self._links = (collectives.all_reduce_bandwidth_bytes_per_s, collectives.nic_bandwidth_bytes_per_s)
        network_width = max((g.feed_forward.ffn_hidden for g in model.groups if g.feed_forward), default=1)
        curves = hardware.curves
        self._constants = np.array(
            [
                *_logs(model.layers, model.hidden, network_width, model.heads, self._kv_heads, first.output_width),
                *_logs(model.vocab, model.experts, self._topk, self._expert_layers + 1, context),
                *_logs(workload.prompt_tokens + 1, workload.output_tokens + 1, workload.max_gpus),
                *_logs(1 + self._attention, 1 + self._experts, 1 + self._dense, 1 + self._stored, 1 + self._read),
                *_logs(hardware.hbm_bytes, self._bandwidth, self._peak, *self._links, hardware.node_gpus),
                *_logs(self._mixer_peak, 1 + self._mixer_flops, 1 + self._prompt_flops),
                float(precisions.weights == "fp8_block"), float(precisions.weights == "int4"),
                float(isinstance(first, LatentAttention)), windowed / model.layers, linear / model.layers,
                sparse / model.layers, float(phase.decodes), float(phase.prefills), float(workload.engine is not None),
                weight_each, expert_each, kv_each, DTYPE_BYTES[precisions.dispatch], float(workload.queries),
                workload.load_imbalance - 1, float(workload.routing == "skewed"),
                float(workload.expert_exchange == "all_to_all"), float(_reduces_by_nccl(hardware)),
                *(float(curves is not None and curves.engine == name) for name in ("trtllm", "vllm", "sglang")),
                float(curves is not None), float(collectives.mesh_peers > 0),
            ],
            np.float32,
        )  # fmt: skip

    @property
    def constants(self) -> int:
        """How many of the inputs, the last ones, all strategies share."""
        return len(self._constants)

    def check_known(self) -> None:
        """Refuses what no network was trained on. Raises: InputError."""
        instead = "let the simulator say (--set terms=simulator), or search with another searcher, such as genetic"
        for dim in dims_of(self.workload):
            if dim.op.name not in OPS:
                raise InputError(f"the network knows no op {dim.op.name!r}, only {', '.join(OPS)}: {instead}")
            if max(dim.choices) >= FIRST_DECLARED and self.workload.space in ("extended", TWO_DIMENSIONAL):
                raise InputError(
                    f"the network knows no choices that somebody declared, and none of two dims, as {dim.name} has: "
                    f"{instead}"
                )

    def of(self, strategies: Strategies) -> Features:
        """The features of [n] strategies."""
        workload, model = self.workload, self.workload.model
        columns = [np.asarray(getattr(strategies, name), np.float64) for name in DEGREE_NAMES]
        tp, ep, pp, batch, cp, dp = columns
        group, stage = tp * cp, tp * cp * dp
        moe_tp, gpus = np.ceil(stage / ep), stage * pp
        choices = self._choices(strategies)
        sequences = np.ceil(batch / dp)
        tokens = sequences * (self._queries + self._prompt_rate)
        all_tokens = tokens * dp
        rows = all_tokens * self._topk / ep
        idle = np.exp(all_tokens * math.log1p(-min(self._topk / max(model.experts, 1), 1 - 1e-9)))
        local = np.ceil(model.experts / ep) / model.experts
        attention_w, expert_w, dense_w = self._bytes

        def of_ops(names: tuple[str, ...], kinds: tuple[int, ...]) -> Reals:
            return np.mean([choices[:, OPS.index(name), list(kinds)].sum(1) for name in names], axis=0)

        projections, networks = ("qkv_proj", "o_proj"), ("ffn1", "ffn1", "ffn2")
        split = {
            (names, kinds): (lambda share, over: share / over + 1 - share)(
                of_ops(names, kinds), group if names is projections else moe_tp
            )
            for names in (projections, networks)
            for kinds in (_SHARDED, _AT_REST, (0, 1, 3, 4))
        }
        by_heads, by_tokens = choices[:, OPS.index("attention"), 1], choices[:, OPS.index("attention"), 0]
        cache = (by_heads / np.minimum(tp, self._kv_heads) + by_tokens / tp + 1 - by_heads - by_tokens) / cp
        mixed = ((by_heads + by_tokens) / tp + 1 - by_heads - by_tokens) / cp
        inside = [np.where(over <= workload.hardware.node_gpus, *self._links) for over in (group, stage)]
        act_each = DTYPE_BYTES[workload.precisions.activations]
        message = model.layers * tokens * model.hidden
        terms = np.stack(
            [
                attention_w / self._bandwidth * split[projections, _SHARDED],
                expert_w * local * (1 - idle) / self._bandwidth * split[networks, _SHARDED],
                dense_w / self._bandwidth * split[networks, _SHARDED],
                self._read * sequences / self._bandwidth * cache,
                2 * self._attention * tokens / self._peak * split[projections, (0, 1, 3, 4)],
                (self._queries * self._mixer_flops + self._prompt_rate * self._prompt_flops)
                * sequences
                / self._mixer_peak
                * mixed,
                2 * (self._each_expert * rows + self._dense * tokens) / self._peak * split[networks, (0, 1, 3, 4)],
                2 * message * act_each / inside[0] * (group > 1),
                message * self._topk * (act_each + DTYPE_BYTES[workload.precisions.dispatch]) / inside[1] * (ep > 1),
                model.layers * (12 * _LAUNCH_S + 2 * _HOP_S * (group > 1) + 4 * _HOP_S * (ep > 1)),
            ],
            axis=1,
        )
        step_s = terms.sum(1)
        active = self._attention + self._dense + self._each_expert * self._topk
        of_prompt_s = 2 * active / self._peak + self._prompt_flops / self._mixer_peak
        prompt_s = of_prompt_s * workload.prompt_tokens / group if self._prompt_rate else 0.0
        weights = attention_w * split[projections, _AT_REST] + dense_w * split[networks, _AT_REST]
        weights = (weights + expert_w * local * split[networks, _AT_REST]) / pp
        stored = self._stored * sequences * cache
        vocabulary = 2 * act_each * model.vocab * model.hidden / tp
        buffers = 12 * tokens * model.hidden * act_each
        total = weights + stored + vocabulary + buffers + workload.hardware.overhead_bytes
        needed, allowed = room(workload, total, stored)
        places = np.log2(np.stack(columns, axis=1))
        per_rank = np.log2(np.maximum(tokens, 1e-3))
        stages = np.ceil(model.layers / pp) * pp / model.layers
        heads_do_not_divide = (self._heads % np.maximum(group, 1)) != 0
        of_strategy = [
            np.log2(moe_tp), np.log2(gpus), per_rank, np.log2(np.maximum(rows, 1e-3)),
            per_rank - np.log2(group), np.log2(np.maximum(rows, 1e-3)) - np.log2(moe_tp), np.log2(stages),
            *(np.clip(np.log2(over / workload.hardware.node_gpus), -3, 6) for over in (group, stage, gpus)),
            heads_do_not_divide, (self._heads % tp) != 0, tp > self._kv_heads, dp < ep, group > moe_tp, group < moe_tp,
            (group * dp) % ep != 0, ep > model.experts, tokens < group, rows < moe_tp,
            np.log(step_s), np.log(needed / allowed),
            *np.log(np.stack([weights, stored, vocabulary + buffers]) / allowed + 1e-4),
            np.broadcast_to(idle, step_s.shape),
        ]  # fmt: skip
        shares = np.log(np.maximum(terms / step_s[:, None], math.exp(LEAST_LOG_SHARE)))
        rest = np.stack([np.asarray(each, np.float32) for each in of_strategy], axis=1)
        constants = np.broadcast_to(self._constants, (len(rest), len(self._constants)))
        parts = [places, shares, choices.reshape(len(choices), -1), rest, constants]
        return Features(
            np.concatenate(parts, axis=1, dtype=np.float32),
            np.log(step_s),
            np.log(step_s + prompt_s),
            np.log(needed / allowed),
            np.log(self._counted * batch * pp / gpus),
        )

    def _choices(self, strategies: Strategies) -> Reals:
        """Share of the layers, float32 `[n, ops, choices]`."""
        found = np.zeros((len(strategies), len(OPS), FIRST_DECLARED), np.float32)
        rows = np.arange(len(strategies))
        for place, slot, weight in self._slots:
            chosen = strategies.dims[:, place]
            known = chosen < FIRST_DECLARED
            found[rows[known], slot, chosen[known]] += weight
        return found


def _slots(workload: Workload) -> list[tuple[int, str, float]]:
    """Place in `Strategy.dims`, op, and the share of the layers with that op that the place decides for; of `OPS`."""
    layers = [layer_of(group) for group in workload.model.groups]
    counts = [group.count for group in workload.model.groups]
    entries: list[tuple[int, str, float]] = []
    for place, dim in enumerate(dims_of(workload)):
        if dim.op.name not in OPS:
            continue
        having = sum(count for count, layer in zip(counts, layers, strict=True) if dim.op.name in layer.op_by_name)
        entries.append((place, dim.op.name, sum(counts[index] for index in dim.groups) / having))
    return entries


def _reduces_by_nccl(hardware: Hardware) -> bool:
    """Whether all-reduces inside a node run by NCCL, and no kernel of an engine."""
    if hardware.curves is not None:
        return hardware.curves.all_reduce in ("nccl", *NCCL_ALGORITHMS)
    return hardware.collectives.custom_all_reduce is None


def _logs(*values: Any) -> list[float]:
    return [math.log(value) for value in values]
