"""GenZ's analytical roofline as a black box: degrees only, some 50 to 80 ms per call.

Install it with `pip install -e '.[genz]'` in the checkout and search it with `--simulator genz`. It has no measured
efficiencies, so it is an upper bound on speed rather than a forecast; one precision holds for weights, cache and
arithmetic. Its expert ranks share the requests of one replica and all of them run the attention, where ours split the
requests.

Source: Bambhaniya et al., "Demystifying Platform Requirements for Diverse LLM Inference Use Cases", 2024;
github.com/abhibambhaniya/GenZ-LLM-Analyzer (MIT), version 0.0.16.
"""
# pyright: reportMissingImports=false
# (an optional extra)

from __future__ import annotations

import contextlib
import io
import warnings
from typing import Any

from raysearch.base.extras import check_installed
from raysearch.simulators.measurement import Measurement, name_in, refuse_beyond_plain_decoding
from sim.strategy import Strategy
from sim.workload import Workload

_NVLINK_GB_PER_S = 450.0  # [spec] NVLink 4, per direction; GenZ knows one link for all collectives
_MB = 2**20


def measure(workload: Workload, strategy: Strategy) -> Measurement:
    """One decode step on a pipeline that is always full.

    Raises:
        InputError: The package is missing, or it does not know the model, drafted tokens or copies of experts.
    """
    refuse_beyond_plain_decoding(workload, "GenZ")
    model = workload.model
    if model.layers % strategy.pp or model.experts % strategy.ep or model.heads % strategy.tp:
        return Measurement(unsupported="a degree does not divide the layers, experts or heads")
    table = _modelled(workload, strategy)
    step_s = float(table["Latency (msec)"].iloc[0]) * 1e-3
    weights_bytes, cache_bytes = (float(table[name].iloc[0]) * _MB for name in ("Total Weights (MB)", "KV Cache (MB)"))
    return Measurement(
        tokens_per_s_per_gpu=strategy.batch * strategy.pp / (step_s * strategy.gpus),
        tpot_s=step_s,
        # A stage has its share of both, the cache once per microbatch in flight.
        memory_bytes=weights_bytes / strategy.pp + cache_bytes,
    )


measure.degrees_only = True  # pyright: ignore[reportFunctionMemberAccess]
measure.packages = ("genz-llm",)  # pyright: ignore[reportFunctionMemberAccess]


def _modelled(workload: Workload, strategy: Strategy) -> Any:
    name = name_in("genz", workload)
    check_installed("genz", "the black box 'genz'")
    from GenZ import decode_moddeling

    hardware = workload.hardware
    system = {
        "Flops": hardware.peak_flop_per_s["bf16"] / 1e12,  # it doubles them for one byte per weight
        "Memory_size": hardware.hbm_bytes / 1e9,
        "Memory_BW": hardware.hbm_bandwidth_bytes_per_s / 1e9,
        "ICN": _NVLINK_GB_PER_S,
        "real_values": True,
    }
    with warnings.catch_warnings(), contextlib.redirect_stdout(io.StringIO()):
        warnings.simplefilter("ignore")  # it warns of what does not fit; `memory_bytes` says so
        return decode_moddeling(
            model=name,
            batch_size=strategy.batch,
            input_tokens=workload.context_tokens,
            output_tokens=1,
            Bb=1,
            system_name=system,
            bits="fp8" if workload.precisions.weights == "fp8" else "bf16",
            tensor_parallel=strategy.tp,
            expert_parallel=strategy.ep,
            model_profilling=False,
            model_offload=True,  # else it raises where a model does not fit
        )["summary_table"]
