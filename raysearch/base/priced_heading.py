"""What every answer begins with: what was priced, on which machine, under which engine, in which formats."""

from __future__ import annotations

import math
from dataclasses import asdict

from sim.engines.engine_registry import charged_rules
from sim.json_object import JsonObject
from sim.serving.confidence import slower
from sim.serving.phases import phase_of
from sim.workload import Workload


def priced_text(workload: Workload) -> str:
    """Machine, engine and version, phase, lengths, formats, how experts are reached, drafts and limits in one line.

    >>> from sim.config.question import Question
    >>> print(priced_text(Question(model="qwen3_32b", isl=4000, osl=500).load()))  # doctest: +NORMALIZE_WHITESPACE
    qwen3_32b_serve on h100_sxm under vLLM 0.33.0: phase serve, 4,000 tokens in, 500 out;
    weights fp8_block, KV cache bf16; limits 100 ms per token and 14,000 ms to the first at confidence 0.9
    >>> print(_experts_text(Question(model="gpt_oss_120b", isl=9, osl=9, expert_exchange="all_to_all").load()))
    ; experts reached by DeepEP
    >>> print(priced_text(Question(workload="gpt_moe_1_2t_16k").load()))  # doctest: +NORMALIZE_WHITESPACE
    gpt_moe_1_2t_16k on h100_sxm, no engine: phase decode, 16,384 tokens of context; weights fp8, KV cache fp8;
    limits 50 ms per token
    """
    lengths = f"{workload.context_tokens:,} tokens of context"
    if phase_of(workload).prefills:
        lengths = f"{workload.prompt_tokens:,} tokens in, {workload.output_tokens:,} out"
    beside = f"{_experts_text(workload)}; {workload.speculation}" if workload.speculation else _experts_text(workload)
    where = f"{workload.name} on {workload.hardware.name}{engine_text(workload)}"
    return f"{where}: phase {workload.phase}, {lengths}; {formats_text(workload)}{beside}{_limits_text(workload)}"


def engine_text(workload: Workload) -> str:
    """The engine whose time is charged, with its version, behind the name of the machine."""
    rules = charged_rules(workload)
    return f" under {rules.title} {rules.version}" if rules else ", no engine"


def formats_text(workload: Workload) -> str:
    """Formats of weights, of experts' weights where they are published in one of their own, and of the KV cache.

    >>> from sim.config.question import Question
    >>> formats_text(Question(model="gpt_oss_120b", isl=1000, osl=100).load())
    'weights bf16 (experts mxfp4), KV cache bf16'
    """
    published = workload.model.expert_dtype
    experts = f" (experts {published})" if published else ""
    return f"weights {workload.precisions.weights}{experts}, KV cache {workload.precisions.kv_cache}"


def _limits_text(workload: Workload) -> str:
    """The limits on latencies, and with which probability they are to be met; "" without any."""
    limits = ((workload.tpot_slo_s, "per token"), (workload.ttft_slo_s, "to the first"))
    stated = [f"{limit_s * 1e3:,g} ms {of}" for limit_s, of in limits if math.isfinite(limit_s)]
    sure = f" at confidence {workload.confidence:g}" if slower(workload).guarded else ""
    return f"; limits {' and '.join(stated)}{sure}" if stated else ""


def _experts_text(workload: Workload) -> str:
    """How tokens reach an engine's experts, and what else is done for their sake; "" for dense models."""
    rules = charged_rules(workload)
    if not workload.model.is_moe or rules is None:
        return ""
    sent = "DeepEP" if rules.overlaps_batches else "all-to-all"
    copies, halves = workload.redundant_experts, workload.two_batch_overlap
    beside = f" and {copies} spare cop{'ies' if copies > 1 else 'y'} (EPLB)" if copies else ""
    exchange = "all-gather" if workload.expert_exchange == "all_gather" else sent
    return f"; experts reached by {exchange}{beside}{', two batches overlapped' if halves else ''}"


def priced_dict(workload: Workload) -> JsonObject:
    """The same in JSON; `engine` and its version are null on the bare machine."""
    rules = charged_rules(workload)
    return {
        "hardware": workload.hardware.name,
        "phase": workload.phase,
        "engine": workload.engine.name if workload.engine else None,
        "engine_version": rules.version if rules else None,
        "precisions": asdict(workload.precisions),
        "expert_weights": workload.model.expert_dtype or workload.precisions.weights,
        "space": workload.space,
        "confidence": workload.confidence,
        "redundant_experts": workload.redundant_experts,
        "expert_exchange": workload.expert_exchange,
        "two_batch_overlap": workload.two_batch_overlap,
        "speculation": _speculation_dict(workload),
    }


def _speculation_dict(workload: Workload) -> JsonObject | None:
    drafted = workload.speculation
    if drafted is None:
        return None
    fields = {"draft_tokens": drafted.draft_tokens, "accepted": list(drafted.accepted), "draft": drafted.drafter}
    return fields | {"tokens_per_step": drafted.tokens_per_step}
