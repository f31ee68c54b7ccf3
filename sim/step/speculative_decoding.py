"""What speculative decoding adds to the step that verifies: seconds, weights and cache of the draft, on the last stage.

A draft makes one token of each sequence after the other. Multi-token prediction (DeepSeek-V3, arXiv 2412.19437, section
2.2) runs one more layer like the model's last, and the LM head, for each: the first time over all tokens that the step
verifies or computes, then over one per sequence. A draft model decodes: its layers, its own embedding and its own head
for each token, and it computes prompts when the model does. Either is sharded as Megatron-LM does, whatever the choices
of the model's own ops: MTP's layer on the meshes of the model's, a draft model on attention's tp and dp. [assumed] as
vLLM does by default.
"""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache
from typing import NamedTuple

from sim.layers.heuristics import megatron_dims
from sim.layers.model import Model
from sim.layers.sizes import Load
from sim.ops.rank import gemm
from sim.prices.curves import Gemm
from sim.prices.dtypes import DTYPE_BYTES
from sim.step.attention_expert_meshes import Sides, sides_of
from sim.step.costs import price
from sim.step.layer import group_sums
from sim.step.vocabulary_layers import embedding_s, head_s, vocabulary_bytes
from sim.strategy import NONE
from sim.workload import Workload


class Draft(NamedTuple):
    """What it costs on the busiest GPU of the last stage.

    Attributes:
        time_s: Of all drafted tokens of a step of one microbatch.
        weight_bytes: Held.
        kv_bytes: Cache of one microbatch.
    """

    time_s: float
    weight_bytes: float
    kv_bytes: float


class Pass(NamedTuple):
    """One run through the draft's layers.

    Attributes:
        stack: Both sides of a GPU and what is in the run, per group of the draft's layers.
        dims: Choices, as a strategy has them.
        ahead: The same GPU with the tokens that get a drafted next one.
    """

    stack: tuple[Sides, ...]
    dims: tuple[int, ...]
    ahead: Sides


FREE = Draft(0.0, 0.0, 0.0)
"""Of a step that drafts nothing, or looks the draft up in the text so far (n-grams)."""


def draft_of(sides: Sides) -> Draft:
    """What the draft adds to the last stage of a GPU, given both its sides in the model's last layer."""
    return FREE if _drafts_for_nothing(sides) else _draft(sides.experts.workload, *_mesh(sides))


def passes_of(sides: Sides) -> tuple[Pass, ...]:
    """The runs through the draft's layers in a step, for those who ask what is behind the seconds."""
    return () if _drafts_for_nothing(sides) else _passes(sides.experts.workload, *_mesh(sides))


def _drafts_for_nothing(sides: Sides) -> bool:
    speculation = sides.experts.workload.speculation
    return speculation is None or speculation.draft is None


def _mesh(sides: Sides) -> tuple[Load, int, int, int, int]:
    """What is in the step; tp, cp, dp and ep."""
    attention, experts = sides.attention, sides.experts
    return experts.load, attention.head_tp, attention.cp, experts.load.attention_groups, experts.ep


@lru_cache(maxsize=4096)
def _draft(workload: Workload, load: Load, tp: int, cp: int, dp: int, ep: int) -> Draft:
    time_s = weight_bytes = kv_bytes = 0.0
    model = _with_draft(workload).model
    copies = _layer_copies(workload)
    for index, (stack, dims, ahead) in enumerate(_passes(workload, load, tp, cp, dp, ep)):
        sums = group_sums(stack[0].experts.workload)
        priced = [each.priced(sides, dims) for each, sides in zip(sums, stack, strict=True)]
        parts = list(zip(model.groups, sums, priced, strict=True))
        time_s += sum([group.count * each.layer.time_s(*figures) for group, each, figures in parts])
        time_s += embedding_s(stack[-1], NONE) + head_s(ahead, NONE)
        if not index:
            held = [(group.count * copies, figures.costs) for group, _, figures in parts]
            weight_bytes = sum([count * sum([cost.weight_bytes for cost in each]) for count, each in held])
            kv_bytes = sum([count * sum([cost.kv_bytes for cost in each]) for count, each in held])
            if not _is_mtp(workload):
                embedding, head, tied = vocabulary_bytes(stack[-1].attention)
                weight_bytes += embedding + head - tied
        if _is_mtp(workload):
            rank, hidden = stack[-1].attention, model.hidden
            joined = gemm(rank, workload.precisions.weights, Gemm(rank.sizes.tokens, 2 * hidden, hidden), 2.0)
            time_s += price(rank, joined).total_s
    if _is_mtp(workload):  # the projection that joins a hidden state and a token, whole on every GPU
        weight_bytes += copies * 2.0 * model.hidden**2 * DTYPE_BYTES[workload.precisions.weights]
    return Draft(time_s, weight_bytes, kv_bytes)


@lru_cache(maxsize=64)
def _passes(workload: Workload, load: Load, tp: int, cp: int, dp: int, ep: int) -> tuple[Pass, ...]:
    """The first over what the step computes, the others over one token of each sequence."""
    speculation, own = workload.speculation, _with_draft(workload)
    assert speculation is not None
    dims = megatron_dims(own.model)
    mesh = (tp, cp, dp, ep) if _is_mtp(workload) else (tp, 1, dp, dp)
    ahead = load._replace(queries=1)
    first = load if _is_mtp(workload) else ahead
    loads = [first] + [load._replace(queries=1, prompts=0.0)] * (
        (speculation.draft_tokens - 1) if load.sequences else 0
    )
    return tuple(
        Pass(sides_of(own, each, *mesh), dims, sides_of(own, each._replace(queries=1), *mesh)[-1]) for each in loads
    )


def _is_mtp(workload: Workload) -> bool:
    return workload.speculation is not None and workload.speculation.draft == "mtp"


def _layer_copies(workload: Workload) -> int:
    """MTP layers that are held: as many as the model was published with, one per drafted token at most."""
    assert workload.speculation is not None
    return min(workload.model.mtp_layers, workload.speculation.draft_tokens) if _is_mtp(workload) else 1


@lru_cache(maxsize=64)
def _with_draft(workload: Workload) -> Workload:
    """The workload of the draft alone; MTP's is a model of one layer, like the last that mixes and that computes."""
    speculation, model = workload.speculation, workload.model
    assert speculation is not None
    if isinstance(speculation.draft, Model):
        draft = speculation.draft
    else:
        backwards = [model.groups[group] for group in reversed(model.order)]
        mixer = next(group for group in backwards if group.attention)
        last = replace(next(group for group in backwards if group.feed_forward), count=1, attention=mixer.attention)
        draft = replace(model, name=f"{model.name}_mtp", groups=(last,), order=())
    return replace(workload, model=draft, groups="shared", speculation=None)
