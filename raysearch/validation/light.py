"""The bare roofline of a serving step: weights and cache at the HBM's peak, arithmetic at the tensor cores' peak."""

from __future__ import annotations

from sim.deployment import WEIGHT_BYTES, Deployment, cache_bytes, weight_bytes

HBM_BYTES_PER_S = 3.35e12
FLOP_PER_S = {"bf16": 989e12, "fp8": 1979e12, "fp8_block": 1979e12}
"""[published] H100 SXM datasheet, dense."""


def light_step_s(deployment: Deployment, running: float) -> float:
    """Seconds of one decode step of `running` sequences per attention rank, nothing but bytes and FLOPs."""
    model, everyone = deployment.model, running * deployment.attention_dp
    weights = weight_bytes(deployment) - model.vocab * model.hidden * 2 / deployment.attention_tp  # no embedding
    if model.is_moe:
        idle = (1 - model.experts_per_token / model.experts) ** everyone
        each = model.expert_bits / 8 or WEIGHT_BYTES[deployment.weights]
        weights -= idle * model.moe_layers * model.experts * model.expert_parameters * each / deployment.gpus
    flops = 2 * everyone * model.active_parameters / deployment.gpus
    cache = running * cache_bytes(deployment, deployment.isl + deployment.osl / 2)
    return max(weights / HBM_BYTES_PER_S, flops / FLOP_PER_S[deployment.weights]) + cache / HBM_BYTES_PER_S


def light_prompt_s(deployment: Deployment, tokens: float) -> float:
    """Seconds of `tokens` of prompts at the tensor cores' peak, spread over the replica."""
    return 2 * tokens * deployment.model.active_parameters / deployment.gpus / FLOP_PER_S[deployment.weights]
