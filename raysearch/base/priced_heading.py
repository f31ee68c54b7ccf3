"""What every answer begins with: what was priced, on which machine, under which engine, in which formats."""

from __future__ import annotations

from dataclasses import asdict

from sim.engines.engine_registry import charged_rules
from sim.json_object import JsonObject
from sim.serving.confidence import slower
from sim.serving.phases import phase_of
from sim.workload import Workload


def priced_text(workload: Workload) -> str:
    """Machine, engine and version, phase, lengths, formats and confidence in one line, the first of every answer.

    >>> from sim.config.question import Question
    >>> print(priced_text(Question(model="qwen3_32b", isl=4000, osl=500).load()))  # doctest: +NORMALIZE_WHITESPACE
    qwen3_32b_serve on h100_sxm under vLLM 0.33.0: phase serve, 4,000 tokens in, 500 out;
    weights fp8_block, KV cache bf16
    >>> print(priced_text(Question(workload="gpt_moe_1_2t_16k").load()))
    gpt_moe_1_2t_16k on h100_sxm, no engine: phase decode, 16,384 tokens of context; weights fp8, KV cache fp8
    """
    lengths = f"{workload.context_tokens:,} tokens of context"
    if phase_of(workload).prefills:
        lengths = f"{workload.prompt_tokens:,} tokens in, {workload.output_tokens:,} out"
    drafted = f"; {workload.speculation}" if workload.speculation else ""
    where = f"{workload.name} on {workload.hardware.name}{engine_text(workload)}"
    sure = f"; limits at confidence {workload.confidence:g}" if slower(workload).guarded else ""
    return f"{where}: phase {workload.phase}, {lengths}; {formats_text(workload)}{drafted}{sure}"


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
    }
