"""A toy machine with round figures, so that every expected value can be worked out by hand.

Rates, after efficiency (achieved share of the peak):
    GEMM         bf16 4e12 * 0.8 = 3.2e12 FLOP/s   fp8 4e12 * 0.6 = 2.4e12   memory bf16 0.8e12 B/s, fp8 0.5e12
    attention    bf16 4e12 * 0.5 = 2.0e12 FLOP/s                             memory fp8 (the KV cache) 0.4e12 B/s
    elementwise  bf16 4e12 * 0.1 = 0.4e12 FLOP/s                             memory bf16 0.8e12 B/s
Launch floors are a ten-thousandth of a nanosecond, far below any kernel of the toy model.
"""

from __future__ import annotations

import pytest

from sim.config.catalog import load_workload
from sim.layers.model import uniform_model
from sim.prices.hardware import CollectiveModel, Efficiency, ExpertAllToAll, Hardware, PointToPoint, Protocol
from sim.workload import DegreeTables, Precisions, Workload


@pytest.fixture(scope="session")
def toy_hardware() -> Hardware:
    """Two rings' worth of constants, all of them round, and no custom all-reduce."""
    return Hardware(
        name="toy",
        peak_flop_per_s={"bf16": 4e12, "fp8": 4e12},
        hbm_bytes=1e9,
        hbm_bandwidth_bytes_per_s=1e12,
        overhead_bytes=1e6,
        node_gpus=8,
        host_gpus=8,
        efficiency={
            "gemm": Efficiency({"bf16": 0.8, "fp8": 0.6}, {"bf16": 0.8, "fp8": 0.5}, 1e-13),
            "attention": Efficiency({"bf16": 0.5, "fp8": 0.5}, {"bf16": 0.8, "fp8": 0.4}, 1e-13),
            "elementwise": Efficiency({"bf16": 0.1, "fp8": 0.1}, {"bf16": 0.8, "fp8": 0.8}, 1e-13),
        },
        collectives=CollectiveModel(
            protocols=(Protocol(1e-6, 50e-6, 0.1e-6, 2e-6, 0.1e-6, 2e-6, 1.0),),
            net_overhead_s=0.2e-6,
            all_reduce_bandwidth_bytes_per_s=100e9,
            gather_bandwidth_bytes_per_s=50e9,
            nic_bandwidth_bytes_per_s=5e9,
            custom_all_reduce=None,
            all_to_all=PointToPoint(2e-6, 40e9, 5e-6, 4e9),
            dispatch=ExpertAllToAll((3e-6, 6e-6), 20e9, 2e9),
            combine=ExpertAllToAll((4e-6, 8e-6), 16e9, 1e9),
            send_recv=PointToPoint(0.5e-6, 10e9, 7e-6, 1e9),
        ),
    )


@pytest.fixture(scope="session")
def toy_moe(toy_hardware: Hardware) -> Workload:
    """Eight experts of 96, hidden 64, 8 query and 2 KV heads of 16 (so a = 128 and q = 192)."""
    return Workload(
        name="toy_moe",
        model=uniform_model("toy_moe", 4, 64, 96, 8, 2, 16, 1000, 8, 2, True),
        hardware=toy_hardware,
        phase="decode",
        context_tokens=1000,
        tpot_slo_s=1.0,
        max_gpus=64,
        precisions=Precisions(weights="fp8", kv_cache="fp8", activations="bf16", dispatch="fp8"),
        load_imbalance=1.0,
        degrees=DegreeTables((1, 2, 4, 8), (1, 2, 4), (1, 2, 4), (1, 4, 16)),
        config_hash="toy",
    )


@pytest.fixture(scope="session")
def toy_dense(toy_moe: Workload) -> Workload:
    """The same with one feed-forward network instead of the experts."""
    return Workload(
        name="toy_dense",
        model=uniform_model("toy_dense", 4, 64, 96, 8, 2, 16, 1000, 1, 1, True),
        hardware=toy_moe.hardware,
        phase="decode",
        context_tokens=1000,
        tpot_slo_s=1.0,
        max_gpus=64,
        precisions=toy_moe.precisions,
        load_imbalance=1.0,
        degrees=DegreeTables((1, 2, 4, 8), (1,), (1, 2, 4), (1, 4, 16)),
        config_hash="toy",
    )


@pytest.fixture(scope="session")
def moe() -> Workload:
    """GPT-MoE 1.2T at 16k context on H100."""
    return load_workload("gpt_moe_1_2t_16k")


@pytest.fixture(scope="session")
def dense() -> Workload:
    """Llama 3.1 405B at 8k context on H100."""
    return load_workload("llama_3_1_405b_8k")
