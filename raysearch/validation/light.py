"""The bare roofline of a serving step: weights and cache at the HBM's peak, arithmetic at the tensor cores' peak."""

from __future__ import annotations

from collections.abc import Mapping

from sim.serving.deployment import WEIGHT_BYTES, Deployment, cache_bytes, weight_bytes


def light_step_s(deployment: Deployment, running: float, light: Mapping[str, float]) -> float:
    """Seconds of one decode step of `running` sequences per attention rank, nothing but bytes and FLOPs.

    `light` are the machine's peak rates, as `sim.config.catalog.load_speed_of_light` gives them.
    """
    model, everyone = deployment.model, running * deployment.attention_dp
    weights = weight_bytes(deployment) - model.vocab * model.hidden * 2 / deployment.attention_tp  # no embedding
    if model.is_moe:
        idle = (1 - model.experts_per_token / model.experts) ** everyone
        each = model.expert_bits / 8 or WEIGHT_BYTES[deployment.weights]
        weights -= idle * model.moe_layers * model.experts * model.expert_parameters * each / deployment.gpus
    flops = 2 * everyone * model.active_parameters / deployment.gpus
    cache = running * cache_bytes(deployment, deployment.isl + deployment.osl / 2)
    bytes_per_s = light["hbm_gb_per_s"] * 1e9
    return max(weights / bytes_per_s, flops / _flop_per_s(deployment, light)) + cache / bytes_per_s


def light_prompt_s(deployment: Deployment, tokens: float, light: Mapping[str, float]) -> float:
    """Seconds of `tokens` of prompts at the tensor cores' peak, spread over the replica."""
    return 2 * tokens * deployment.model.active_parameters / deployment.gpus / _flop_per_s(deployment, light)


def _flop_per_s(deployment: Deployment, light: Mapping[str, float]) -> float:
    return light["bf16_tflops" if deployment.weights == "bf16" else "fp8_tflops"] * 1e12
