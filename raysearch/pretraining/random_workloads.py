"""Workloads at random: models, machines, phases and spaces that nobody has asked for yet.

Every workload is drawn from a seed of its own, so the i-th is the same whoever draws it and in whatever order.
"""

from __future__ import annotations

import math
from dataclasses import replace
from functools import lru_cache
from typing import Any

import numpy as np

from raysearch.pretraining.pretraining_file import Distribution
from sim.config.catalog import load_calibrated, load_calibration, load_engine, load_hardware, load_workload
from sim.config.files import config_path, read_config
from sim.config.hardware_file import HardwareFile
from sim.layers.mixers import Attention, GroupedAttention, Indexer, LatentAttention, LinearMixer
from sim.layers.model import FeedForward, LayerGroup, Model
from sim.prices.calibration import Calibration
from sim.prices.dtypes import Dtype
from sim.prices.hardware import EngineName, Hardware
from sim.workload import DegreeTables, Precisions, Workload

_HIDDEN = (2048, 2880, 3072, 4096, 5120, 6144, 7168, 8192, 10240, 12288, 14336, 16384, 18432, 20480)
_VOCABULARIES = (32000, 51200, 100352, 128256, 151936, 201088)
_LEAST_WEIGHTS, _MOST_WEIGHTS = 5e9, 4e12
"""[assumed] Models that need sharding, up to twice the largest published."""
_PCIE_GB_PER_S, _PCIE_SHARE = 50.0, 0.2
"""Between PCIe 4.0 and 5.0 of 16 lanes [spec]; share of the machines without links of their own [assumed]."""
_KERNELS: tuple[EngineName, ...] = ("trtllm", "vllm", "sglang")


def random_workload(distribution: Distribution, seed: int, index: int) -> tuple[Workload, bool]:
    """The i-th workload of a seed, of the names in it `prior-SEED-INDEX`, and whether its machine is a measured one."""
    rng = np.random.default_rng([seed, index])
    model = random_model(rng, distribution)
    weights: Dtype = _pick(rng, {"fp8": 6, "bf16": 2.5, "fp8_block": 1, "int4": 0.5})
    kernels: EngineName = _pick(rng, dict.fromkeys(_KERNELS, 1.0))
    name = str(rng.choice(distribution.hardware))
    known = bool(rng.random() < distribution.measured_share)
    hardware, calibration = (out_by_little if known else random_machine)(name, rng, distribution)
    curves = hardware.curves
    if curves is not None:
        reduces = kernels if rng.random() < 0.8 and hardware.collectives.custom_all_reduce else "nccl"
        hardware = replace(hardware, curves=curves.under(engine=kernels, all_reduce=reduces))
    big = model.parameters > 1e12
    gpus = int(24576 if big and rng.random() < 0.7 else 2 ** rng.integers(6, 13))
    widest = 128 if big or not model.is_moe else 64
    serves = rng.random() < distribution.serve_share
    prompt, answer = int(2 ** rng.uniform(7, 15)), int(2 ** rng.uniform(6, 12))
    context = int(2 ** rng.uniform(11, 20)) if rng.random() < 0.9 else 2 ** int(rng.integers(11, 21))
    base = load_workload("gpt_moe_1_2t_16k")
    workload = replace(
        base,
        name=f"prior-{seed}-{index}",
        config_hash=f"prior-{seed}-{index}",
        model=model,
        hardware=hardware,
        phase="serve" if serves else "decode",
        space="extended" if rng.random() < distribution.extended_share else "joint",
        groups="own" if len(model.groups) > 1 and rng.random() < 0.1 else "shared",
        prompt_tokens=prompt if serves else 0,
        output_tokens=answer if serves else 0,
        context_tokens=prompt + answer // 2 if serves else context // 64 * 64,
        tpot_slo_s=float(np.exp(rng.uniform(math.log(0.008), math.log(0.25)))),
        ttft_slo_s=float(np.exp(rng.uniform(math.log(0.2), math.log(20)))) if serves else math.inf,
        max_gpus=gpus,
        precisions=Precisions(
            weights,
            "fp8" if rng.random() < 0.7 else "bf16",
            "bf16",
            "fp8" if rng.random() < 0.8 else "bf16",
        ),
        load_imbalance=1.0 if rng.random() < 0.8 else float(rng.uniform(1, 1.5)),
        routing="skewed" if model.is_moe and rng.random() < 0.2 else "balanced",
        expert_exchange="all_to_all" if rng.random() < 0.8 else "all_gather",
        degrees=DegreeTables(
            _doubled(widest),
            _doubled(min(model.experts, 128)) if model.is_moe else _doubled(8),
            _stages(rng, model.layers),
            _doubled(4096) if rng.random() < 0.7 else tuple(range(1, 4097)),
        ),
    )
    if serves and rng.random() < 0.8:
        engine = load_engine(_pick(rng, dict.fromkeys(distribution.engines, 1.0)), calibration, model, weights)
        workload = replace(workload, engine=engine, expert_exchange=_pick(rng, {"all_to_all": 1, "all_gather": 1}))
    return workload, known


def _pick(rng: np.random.Generator, weights: Any) -> Any:
    names = list(weights)
    shares = np.array([weights[name] for name in names], float)
    return names[int(rng.choice(len(names), p=shares / shares.sum()))]


def _doubled(most: int) -> tuple[int, ...]:
    return tuple(1 << power for power in range(max(1, most).bit_length()))


def _stages(rng: np.random.Generator, layers: int) -> tuple[int, ...]:
    if rng.random() < 0.3:
        return tuple(range(1, min(layers, 64) + 1))
    return tuple(stages for stages in range(1, layers + 1) if layers % stages == 0)


# --- models -------------------------------------------------------------------------------------------


def random_model(rng: np.random.Generator, distribution: Distribution) -> Model:
    """A transformer of some kind, its sizes as published ones have them, in any combination."""
    while True:
        kind = _pick(rng, distribution.mixers)
        hidden = int(rng.choice(_HIDDEN))
        experts = int(rng.choice([1, 8, 16, 32, 64, 128, 256, 384])) if rng.random() < 0.7 else 1
        layers = int(rng.integers(16, 150))
        attention = _attention(rng, kind, hidden)
        network = _network(rng, hidden, experts)
        groups = _groups(rng, kind, layers, attention, network, hidden)
        vocabulary = int(rng.choice(_VOCABULARIES))
        expert_dtype: Dtype | None = "mxfp4" if experts > 16 and rng.random() < 0.1 else None
        model = Model("random", hidden, vocabulary, groups, expert_dtype=expert_dtype)
        if _LEAST_WEIGHTS < model.parameters < _MOST_WEIGHTS:
            return model


def _attention(rng: np.random.Generator, kind: str, hidden: int) -> Attention:
    indexer = Indexer(32, 128, 2048) if kind == "sparse" else None
    if kind in ("latent", "sparse"):
        heads = int(rng.choice([16, 32, 64, 128]))
        return LatentAttention(heads, 128, int(rng.choice([0, 1536, 2048])), 512, 64, 128, indexer=indexer)
    head_dim = int(rng.choice([64, 96, 128, 128, 128, 192, 256]))
    kv_heads = int(rng.choice([1, 2, 4, 8, 8, 8, 16, 32, 64]))
    heads = max(kv_heads, round(hidden * rng.choice([0.75, 1, 1, 1, 1.5, 2]) / head_dim / kv_heads) * kv_heads)
    return GroupedAttention(heads, kv_heads, head_dim)


def _network(rng: np.random.Generator, hidden: int, experts: int) -> FeedForward:
    gated = rng.random() < 0.85
    if experts == 1:
        return FeedForward(_multiple(hidden * rng.uniform(2, 4.2), 256), gated=gated)
    few = experts <= 16
    width = _multiple(hidden * (rng.uniform(1.5, 4) if few else rng.uniform(0.2, 1)), 128)
    per_token = int(rng.choice([1, 2, 2, 4] if few else [2, 4, 6, 8, 8]))
    shared = width if not few and rng.random() < 0.4 else 0
    return FeedForward(width, experts, per_token, gated, shared)


def _groups(
    rng: np.random.Generator, kind: str, layers: int, attention: Attention, network: FeedForward, hidden: int
) -> tuple[LayerGroup, ...]:
    if kind == "window" and isinstance(attention, GroupedAttention):
        full = max(1, layers // int(rng.choice([2, 3, 4, 6])))
        sliding = replace(attention, window=int(rng.choice([128, 512, 1024, 4096])))
        groups = [LayerGroup("sliding", layers - full, sliding, network), LayerGroup("full", full, attention, network)]
    elif kind == "linear":
        heads = attention.heads
        mixer = LinearMixer("gated_delta", heads, max(1, heads // 2), 128, 128)
        full = max(1, layers // 4)
        groups = [LayerGroup("linear", layers - full, mixer, network), LayerGroup("full", full, attention, network)]
    else:
        groups = [LayerGroup("layers", layers, attention, network)]
    if network.is_moe and rng.random() < 0.3 and groups[-1].count > 4:
        wide = FeedForward(_multiple(hidden * 2.6, 256), gated=network.gated)
        dense, last = int(rng.integers(1, 4)), groups[-1]
        groups[-1] = replace(last, count=last.count - dense)
        groups.insert(0, LayerGroup("dense", dense, last.attention, wide))
    return tuple(groups)


def _multiple(width: float, of: int) -> int:
    return max(of, int(width) // of * of)


# --- machines -----------------------------------------------------------------------------------------


@lru_cache(maxsize=8)
def known_machine(name: str) -> tuple[Hardware, Calibration]:
    """A shipped machine as it was measured."""
    return load_hardware(name), load_calibrated(name)


def out_by_little(name: str, rng: np.random.Generator, distribution: Distribution) -> tuple[Hardware, Calibration]:
    """A measured machine whose times are out by as little as measurements of it are."""
    if not distribution.measured_spread:
        return known_machine(name)
    measured = read_config(config_path("hardware", name), HardwareFile)
    calibration = perturbed(load_calibrated(name), rng, distribution.measured_spread)
    return measured.to_si(calibration), calibration


def random_machine(name: str, rng: np.random.Generator, distribution: Distribution) -> tuple[Hardware, Calibration]:
    """A machine that might be: published rates, efficiencies and latencies of a measured one, each out by a factor.

    One in five has no links of its own inside a node, only its host's PCIe, and so no all-reduce but NCCL's.
    """
    path = config_path("hardware", name)
    measured = read_config(path, HardwareFile)
    assert measured.calibration is not None
    loaded = load_calibration(measured.calibration)
    wide = distribution.rate_spread

    def out_by(value: float, spread: float = wide) -> float:
        return float(value * np.exp(rng.uniform(-spread, spread)))

    compute, hbm, links = measured.compute, measured.hbm, measured.links
    by_pcie = rng.random() < _PCIE_SHARE
    node_rate = out_by(_PCIE_GB_PER_S, wide / 2) if by_pcie else out_by(links.node_gb_per_s, wide * 1.3)
    tflops = out_by(compute.bf16_tflops)
    file = measured.model_copy(
        update={
            "name": f"{name}-{rng.integers(1 << 60):x}",
            "node_gpus": int(rng.choice([4, 8, 8, 8, 16, 32, 72])),
            "all_reduce": "nccl" if by_pcie else measured.all_reduce,
            "compute": compute.model_copy(
                update={
                    "bf16_tflops": tflops,
                    "fp8_tflops": tflops * (2 if rng.random() < 0.85 else 1),
                    "fp4_tflops": tflops * 4 if rng.random() < 0.3 else None,
                }
            ),
            "hbm": hbm.model_copy(
                update={
                    "bandwidth_gb_per_s": out_by(hbm.bandwidth_gb_per_s * 1.3),
                    "capacity_gb": out_by(hbm.capacity_gb * 1.5, 1.0),
                }
            ),
            "links": links.model_copy(
                update={
                    "node_gb_per_s": node_rate,
                    "network_gb_per_s": out_by(links.network_gb_per_s, wide),
                    "topology": "mesh" if rng.random() < 0.08 else "switched",
                }
            ),
        }
    )
    file = file.model_copy(update={"host_gpus": None}).completed_by(measured)
    its, mine = measured.machine_header()["speed_of_light"], file.machine_header()["speed_of_light"]
    node, net = (mine[rate] / its[rate] for rate in ("nvlink_gb_per_s", "network_gb_per_s"))
    assert file.collectives is not None
    file = file.model_copy(update={"collectives": file.collectives.scaled(node, net)})
    calibration = perturbed(loaded.scaled_to(file.machine_header()), rng, distribution.efficiency_spread)
    hardware = file.to_si(calibration)
    return hardware, calibration


def perturbed(calibration: Calibration, rng: np.random.Generator, spread: float) -> Calibration:
    """The same with the time of every family of kernels and messages out by a factor, and every term by another."""
    factors: dict[str, float] = {}
    series: dict[str, Any] = {}
    for name, record in calibration.data["series"].items():
        family = name.split("/")[0] if not name.startswith("collectives") else "/".join(name.split("/")[:2])
        factor = factors.setdefault(family, float(np.exp(rng.normal(0, spread))))
        own = np.exp(rng.normal(0, spread / 2, size=len(record["terms"]))) if "terms" in record else []
        terms = [factor * float(out) * term for out, term in zip(own, record.get("terms", []), strict=True)]
        series[name] = {**record, **({"terms": terms} if "terms" in record else {})}
    digest = f"{calibration.digest}-{rng.integers(1 << 60):x}"
    return Calibration(calibration.name, {**calibration.data, "series": series}, digest, calibration.rest)
