"""How near an evaluation sits to its limits, against the error of what it says."""

from __future__ import annotations

import math
from dataclasses import dataclass

from sim.evaluation import Evaluation
from sim.serving.phases import phase_of
from sim.strategy import Strategy
from sim.workload import Workload

_MEMORY_ERROR = 0.05
"""Relative error of the bytes on a GPU. [assumed] allocators round and fragment; weights and cache are exact."""


@dataclass(frozen=True, slots=True)
class NearLimit:
    """A limit that is kept, by less than the error of the figure.

    Attributes:
        kind: "tpot" or "hbm", as of a `Violation`.
        slack: Share of the limit that is left, margin and all.
        error: Relative error to expect of the figure.
        message: In words.
    """

    kind: str
    slack: float
    error: float
    message: str


def idle_slos(workload: Workload) -> list[str]:
    """SLOs that a phase cannot break, in words: a pool that only decodes computes no prompt.

    >>> from dataclasses import replace
    >>> from sim.config.catalog import load_workload
    >>> idle_slos(replace(load_workload("gpt_moe_1_2t_16k"), ttft_slo_s=1.0))
    ['the SLO of the time to the first token limits nothing: phase decode computes no prompt']
    """
    notes: list[str] = []
    phase = phase_of(workload)
    if not phase.prefills and math.isfinite(workload.ttft_slo_s):
        notes.append(f"the SLO of the time to the first token limits nothing: phase {phase.name} computes no prompt")
    if not phase.decodes and math.isfinite(workload.tpot_slo_s):
        notes.append(f"the SLO of the time per output token limits nothing: phase {phase.name} makes no such token")
    return notes


def idle_stages(workload: Workload, strategy: Strategy) -> list[str]:
    """That layers given stage by stage change nothing for a strategy with another number of stages, in words.

    >>> from dataclasses import replace
    >>> from sim.config.catalog import load_workload
    >>> idle_stages(replace(load_workload("gpt_moe_1_2t_16k"), stage_layers=(60, 40)), Strategy(8, 8, 4, 64, ()))
    ['stage_layers=60,40 is for 2 pipeline stages and changes nothing here: with 4, layers are shared out evenly']
    """
    layers = workload.stage_layers
    if not layers or len(layers) == strategy.pp:
        return []
    evenly = f"with {strategy.pp}, layers are shared out evenly" if strategy.pp > 1 else "there is one"
    return [
        f"stage_layers={','.join(map(str, layers))} is for {len(layers)} pipeline stages and changes nothing here: "
        f"{evenly}"
    ]


def near_limits(workload: Workload, evaluation: Evaluation) -> tuple[NearLimit, ...]:
    """The limits that a strategy keeps by less than the error of its figures: it may break them in truth.

    >>> from sim.config.catalog import load_workload
    >>> from sim.ops.heuristics import megatron_sp_dims
    >>> from sim.simulate import evaluate
    >>> from sim.strategy import Strategy
    >>> workload = load_workload("gpt_moe_1_2t_16k")
    >>> dims = megatron_sp_dims(workload.model)
    >>> [near_limits(workload, evaluate(workload, Strategy(8, 16, 1, batch, dims))) for batch in (64,)]
    [()]
    """
    slo_s, hbm_bytes = workload.tpot_slo_s, workload.hardware.hbm_bytes
    figures = (
        ("tpot", evaluation.tpot_s, slo_s, evaluation.expected_error, "TPOT", f"{slo_s * 1e3:.1f} ms"),
        ("hbm", evaluation.memory_bytes.total, hbm_bytes, _MEMORY_ERROR, "memory", f"{hbm_bytes / 1e9:.1f} GB"),
    )
    return tuple(
        NearLimit(kind, slack, error, f"{name} leaves {slack:.1%} of {limit}, its error is ±{error:.0%}")
        for kind, used, allowed, error, name, limit in figures
        if 0 <= (slack := 1 - used / allowed) < error
    )
