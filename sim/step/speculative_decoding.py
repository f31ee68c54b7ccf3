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

from sim.layers.model import Model
from sim.ops.heuristics import megatron_dims
from sim.ops.rank import gemm
from sim.ops.sizes import Load
from sim.prices.curves import Gemm
from sim.prices.dtypes import DTYPE_BYTES
from sim.step.attention_expert_meshes import Sides, sides_of
from sim.step.costs import price
from sim.workload import Workload


class Draft(NamedTuple):
    """What it costs on the busiest GPU of the last stage.

    Attributes:
        time_s: Of all drafted tokens of a step of one microbatch.
        weight_bytes: Of its weights.
        kv_bytes: Cache of one microbatch.
    """

    time_s: float
    weight_bytes: float
    kv_bytes: float


class Pass(NamedTuple):
    """One pass through the draft's layers.

    Attributes:
        stack: Both sides of a GPU and what is in the pass, per group of the draft's layers.
        dims: Choices, as a strategy has them.
        ahead: The same GPU with the tokens that get a drafted next one.
        joining_s: Of MTP's projection that joins a hidden state and a token.
    """

    stack: tuple[Sides, ...]
    dims: tuple[int, ...]
    ahead: Sides
    joining_s: float


class DraftRun(NamedTuple):
    """What a draft computes and holds.

    Attributes:
        workload: That of the draft alone.
        passes: The first over what the step computes, the others over one token of each sequence.
        copies: Layers that a GPU keeps: MTP's as many as the model was published with, one per drafted token at most.
        joining_bytes: Of MTP's projection, whole on every GPU.
        own_vocabulary: Whether embedding and LM head are its own.
    """

    workload: Workload
    passes: tuple[Pass, ...]
    copies: int
    joining_bytes: float
    own_vocabulary: bool


FREE = Draft(0.0, 0.0, 0.0)
"""Of a step that drafts nothing, or looks the draft up in the text so far (n-grams)."""


def drafts(workload: Workload) -> bool:
    """Whether drafted tokens cost anything: n-grams are looked up."""
    return workload.speculation is not None and workload.speculation.draft is not None


def mesh_of_draft(sides: Sides) -> tuple[Load, int, int, int, int]:
    """What is in the step, and tp, cp, dp and ep, given both sides of a GPU in the model's last layer."""
    attention, experts = sides.attention, sides.experts
    return experts.load, attention.head_tp, attention.cp, experts.load.attention_groups, experts.ep


@lru_cache(maxsize=64)
def draft_run(workload: Workload, load: Load, tp: int, cp: int, dp: int, ep: int) -> DraftRun:
    """What a draft computes and holds on a mesh, beside what is in the step."""
    speculation, own = workload.speculation, _with_draft(workload)
    assert speculation is not None
    mtp, hidden, dims = speculation.draft == "mtp", own.model.hidden, megatron_dims(own.model)
    mesh = (tp, cp, dp, ep) if mtp else (tp, 1, dp, dp)
    ahead, weights = load._replace(queries=1), workload.precisions.weights
    loads = [load if mtp else ahead] + [load._replace(queries=1, prompts=0.0)] * (
        (speculation.draft_tokens - 1) if load.sequences else 0
    )

    def passing(each: Load) -> Pass:
        stack, joining_s = sides_of(own, each, *mesh), 0.0
        if mtp:
            rank = stack[-1].attention
            joining_s = price(rank, gemm(rank, weights, Gemm(rank.sizes.tokens, 2 * hidden, hidden), 2.0)).total_s
        return Pass(stack, dims, sides_of(own, each._replace(queries=1), *mesh)[-1], joining_s)

    copies = min(workload.model.mtp_layers, speculation.draft_tokens) if mtp else 1
    joining_bytes = copies * 2.0 * hidden**2 * DTYPE_BYTES[weights] if mtp else 0.0
    return DraftRun(own, tuple(map(passing, loads)), copies, joining_bytes, own_vocabulary=not mtp)


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
