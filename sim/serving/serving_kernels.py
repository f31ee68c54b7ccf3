"""The kernels of an inference engine from a calibration: which fitted series prices what in a serving step."""

from __future__ import annotations

import math
from collections.abc import Mapping

from sim.layers.model import Model
from sim.prices.calibration import COMBINE_EACH, DISPATCH_EACH, NODE_GPUS, Calibration
from sim.prices.dtypes import Dtype
from sim.serving.deployment import WeightFormat

ENGINES = ("trtllm", "vllm", "sglang")
"""Engines with kernels of their own in the calibration."""
_CUSTOM_ALL_REDUCE = {"trtllm": "trtllm_custom", "vllm": "vllm_custom_graph", "sglang": "sglang_custom_graph"}
_EXPERTS: Mapping[tuple[str, str], str] = {
    ("trtllm", "bf16"): "moe/trtllm/moe_torch_flow_cutlass/bf16",
    ("trtllm", "fp8"): "moe/trtllm/moe_torch_flow_cutlass/fp8",
    ("trtllm", "fp8_block"): "moe/trtllm/moe_torch_flow_cutlass/fp8_block",
    ("vllm", "bf16"): "moe/vllm/vllm_unquantizedfusedmoe_triton_tritonexperts/bf16",
    ("vllm", "fp8"): "moe/vllm/vllm_modeloptfp8moe_flashinfer_cutlass_flashinferexperts/fp8",
    ("vllm", "fp8_block"): "moe/vllm/vllm_fp8moe_triton_tritonexperts/fp8_block",
    ("sglang", "bf16"): "moe/sglang/sglang_fused_moe_triton/bf16",
    ("sglang", "fp8"): "moe/sglang/sglang_fused_moe_triton/fp8_block",
    ("sglang", "fp8_block"): "moe/sglang/sglang_fused_moe_triton/fp8_block",
}
_EXPERTS_MXFP4 = "moe/trtllm/moe_torch_flow_cutlass/fp8"
"""[assumed] No kernel with MXFP4 weights was measured: this one's efficiency at the bytes of MXFP4."""
_ELEMENTWISE_SHARE, _ELEMENTWISE_FLOOR_S = 0.8, 2e-6
"""[assumed] Share of the HBM bandwidth and least time of a kernel that streams activations."""
NETWORK_LATENCY_S, NETWORK_SHARE = 20e-6, 0.96
"""[assumed, published] Latency of a collective's passage between nodes; 48 of NDR InfiniBand's 50 GB/s are achieved."""
LOW_LATENCY_TOKENS = 1024
"""Most tokens per rank that low-latency kernels take. [assumed] above what SGLang reserves buffers for."""


class FittedKernels:
    """`sim.serving.serving_step.Kernels` of one engine.

    Attributes:
        calibration: Fitted coefficients of the accelerator.
        engine: One of `ENGINES`; another name is priced as "vllm".
        hbm_bytes_per_s: Peak of the calibration's machine, for kernels that stream activations.
        network_bytes_per_s: Achieved between its nodes, per GPU.
    """

    def __init__(self, calibration: Calibration, engine: str) -> None:
        light: Mapping[str, float] = calibration.data["speed_of_light"]
        self.calibration = calibration
        self.engine = engine if engine in ENGINES else "vllm"
        self.hbm_bytes_per_s = light["hbm_gb_per_s"] * 1e9
        self.network_bytes_per_s = light["network_gb_per_s"] * 1e9 * NETWORK_SHARE

    def gemm(self, rows: float, columns: float, inner: float, weights: WeightFormat) -> float:
        """Seconds of [rows, inner] x [inner, columns]."""
        # vLLM's fp8_block rows hold 55 us of host time at every size, which a CUDA graph does not pay.
        host_bound = self.engine == "vllm" and weights == "fp8_block"
        engine = "sglang" if host_bound and f"gemm/sglang/{weights}" in self.calibration.series else self.engine
        return self.calibration.gemm_us(engine, weights, max(rows, 1.0), columns, inner) * 1e-6

    def decode_attention(
        self, sequences: float, context: float, heads: int, kv_heads: int, head_dim: int, kv_cache: Dtype
    ) -> float:
        """Seconds of one new token per sequence."""
        shape = (sequences, context, heads, kv_heads, head_dim)
        return self.calibration.attention_decode_us(self.engine, kv_cache, *shape) * 1e-6

    def prefill_attention(
        self, sequences: float, tokens: float, heads: int, kv_heads: int, head_dim: int, kv_cache: Dtype
    ) -> float:
        """Seconds of causal attention over new tokens, in bf16."""
        engine = self.engine
        if f"attention_prefill/{engine}/bf16/{kv_cache}" not in self.calibration.series:
            engine = "vllm"  # SGLang's prefill was not measured; both call FlashAttention
        shape = (sequences, tokens, heads, kv_heads, head_dim)
        return self.calibration.attention_prefill_us(engine, "bf16", kv_cache, *shape) * 1e-6

    def latent_attention(self, sequences: float, context: float, heads: int, kv_cache: Dtype) -> float:
        """Seconds of one new token per sequence over DeepSeek's latents; every engine's kernel is priced alike."""
        return self.calibration.mla_decode_us(kv_cache, sequences, context, heads) * 1e-6

    def experts(self, tokens: float, model: Model, moe_tp: int, moe_ep: int, weights: WeightFormat) -> float:
        """Seconds of one rank's routed experts, with skewed routing as real prompts show."""
        series, dtype = _EXPERTS[self.engine, weights], None
        if model.expert_bits and model.expert_bits < 8:
            series, dtype = _EXPERTS_MXFP4, "mxfp4"
        width = model.ffn_hidden / moe_tp
        shape = (tokens, model.hidden, width, model.experts_per_token, model.experts, moe_ep)
        return self.calibration.moe_layer_us(series, *shape, skewed=True, dtype=dtype) * 1e-6

    def dispatched_experts(self, tokens: float, model: Model, moe_ep: int, weights: WeightFormat) -> float:
        """Seconds of a rank's experts on the tokens sent to it: a GEMM pair per expert, as no such kernel was measured.

        Extrapolated: DeepEP's masked and contiguous grouped GEMMs are in no table. An expert that few tokens reach is
        read with the probability that it is reached at all.
        """
        local = model.experts / moe_ep
        rows = tokens * model.experts_per_token / model.experts
        reached = 1 - math.exp(-rows)
        each = max(rows / reached, 1.0)
        gemms = self.gemm(each, model.ffn_in_width, model.hidden, weights)
        gemms += self.gemm(each, model.hidden, model.ffn_hidden, weights)
        return local * reached * gemms + self.elementwise(3 * local * rows * (model.ffn_hidden + model.hidden))

    def elementwise(self, traffic_bytes: float) -> float:
        """Seconds to stream activations."""
        return max(_ELEMENTWISE_FLOOR_S, traffic_bytes / (_ELEMENTWISE_SHARE * self.hbm_bytes_per_s))

    def all_reduce(self, size_bytes: float, degree: int) -> float:
        """Seconds of the engine's own all-reduce inside a node; across nodes of a sum per node and one between."""
        if degree == 1:
            return 0.0
        inside = min(degree, NODE_GPUS)
        series = f"collectives/all_reduce/{_CUSTOM_ALL_REDUCE[self.engine]}"
        inside_s = self.calibration.collective_us(series, "all_reduce", inside, size_bytes) * 1e-6
        return inside_s + 2 * self._between_nodes_s(size_bytes / inside, degree)

    def exchange(self, size_bytes: float, degree: int) -> float:
        """Seconds of an all-gather to `size_bytes` and a reduce-scatter of as much, by NCCL."""
        if degree == 1:
            return 0.0
        inside = min(degree, NODE_GPUS)
        inside_us = sum(
            self.calibration.collective_us(f"collectives/{kind}/nccl", kind, inside, size_bytes)
            for kind in ("all_gather", "reduce_scatter")
        )
        return inside_us * 1e-6 + 2 * self._between_nodes_s(size_bytes / inside, degree)

    def expert_all_to_all(self, tokens: float, model: Model, degree: int) -> float:
        """Seconds of DeepEP's dispatch and combine of each rank's tokens: low-latency kernels for few, else normal."""
        nodes = max(1.0, degree / NODE_GPUS)
        shape = (model.experts, model.experts_per_token, nodes)
        mode, sms = ("low_latency", 0) if tokens <= LOW_LATENCY_TOKENS else ("normal", 24)
        return 1e-6 * sum(
            self.calibration.expert_all_to_all_us(side, tokens, model.hidden * each, *shape, mode=mode, sms=sms)
            for side, each in (("dispatch", DISPATCH_EACH), ("combine", COMBINE_EACH))
        )

    def _between_nodes_s(self, share_bytes: float, degree: int) -> float:
        """One passage between nodes of each GPU's share; nothing inside one. Extrapolated: no such row is published."""
        nodes = math.ceil(degree / NODE_GPUS)
        if nodes == 1:
            return 0.0
        return NETWORK_LATENCY_S * math.log2(nodes) + share_bytes * (nodes - 1) / nodes / self.network_bytes_per_s
