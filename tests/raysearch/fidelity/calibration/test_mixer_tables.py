"""Modules of sparse attention and kernels of linear mixers: rows that were made up from known times are found again."""

from __future__ import annotations

import itertools
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from raysearch.fidelity.calibration.coefficients import with_projections
from raysearch.fidelity.calibration.fit import cross_validated, fit_family
from raysearch.fidelity.calibration.measured_tables import measured_us, read_table
from raysearch.fidelity.calibration.mixer_tables import module_shape, projections
from raysearch.fidelity.calibration.predict import predict
from sim.config.catalog import load_calibrated
from sim.prices.mixer_terms import sparse_attention

CALIBRATION = load_calibrated("b200_sxm")
HEADER = CALIBRATION.data


def modules(folder: Path) -> pd.DataFrame:
    """Rows of DeepSeek-V3.2's attention that take their projections, 20 us, and twice the products of attention."""
    shapes = itertools.product([8, 16, 32, 64], [1, 4, 16, 64, 256], [512, 4096, 32768])
    rows = [
        {
            "framework": "vllm",
            "op": op,
            "variant": f"{op}_module",
            "kernel_source": kernel,
            "model": "deepseek-ai/DeepSeek-V3.2",
            "kv_cache_dtype": "fp8",
            "gemm_type": "fp8_block",
            "num_heads": heads,
            "batch_size": batch,
            "isl": 1,
            "step": step,
            "latency_us": 1.0,
        }
        for heads, batch, step in shapes
        for op, kernel in (("dsa_generation", "sparse"), ("mla_generation", "sparse"), ("dsa_generation", "dense_mha"))
    ]
    pd.DataFrame(rows).to_csv(folder / "modules.csv", index=False)
    frame = read_table(folder, "sparse_attention")
    assert frame is not None
    frame = with_projections(frame, CALIBRATION)
    own = [
        20 + 2 * sparse_attention(CALIBRATION.machine, *module_shape(row)[2:])[1]
        for row in frame.itertuples(index=False)
    ]
    return frame.assign(latency_us=frame["projections_us"] + np.array(own))


def test_what_modules_take_beside_their_projections_is_found_again(tmp_path: Path) -> None:
    frame = modules(tmp_path)
    assert len(frame) == 60  # whole modules of sparse attention alone
    fitted = fit_family("sparse_attention", frame, HEADER)
    assert list(fitted.series) == ["sparse_attention/vllm/dsa_generation/fp8"]
    assert predict("sparse_attention", frame, fitted) == pytest.approx(measured_us(frame), rel=0.01)
    assert cross_validated("sparse_attention", frame, HEADER) == pytest.approx(measured_us(frame), rel=0.05)


def test_projections_are_those_of_the_heads_on_a_rank(tmp_path: Path) -> None:
    row = next(modules(tmp_path).itertuples(index=False))
    areas = [shape.inner * shape.columns for _, shape in projections(row)]
    latents, index = 7168 * (1536 + 576), 1536 * 64 * 128 + 7168 * (128 + 64)
    heads = row.num_heads * (1536 * 192 + 128 * 7168 + 128 * 512 + 512 * 128)
    assert sum(areas) == latents + index + heads


def test_a_step_of_a_linear_mixer_is_its_convolution_and_its_state(tmp_path: Path) -> None:
    rows = [
        {
            "framework": "vllm",
            "op": "gdn",
            "kernel_source": kernel,
            "phase": "generation",
            "batch_size": batch,
            "seq_len": 1,
            "num_k_heads": 16 // tp,
            "head_k_dim": 128,
            "num_v_heads": 64 // tp,
            "head_v_dim": 128,
            "d_state": "",
            "model": "Qwen/Qwen3.5-397B-A17B",
            "latency_us": 3 + 0.01 * batch * each / tp,
        }
        for kernel, each in (("causal_conv1d_update", 1), ("fused_recurrent", 8), ("fused_kda_decode", 1))
        for batch, tp in itertools.product([1, 2, 4, 8, 16, 32, 64, 128, 256], [1, 2, 4, 8])
    ]
    pd.DataFrame(rows).to_csv(tmp_path / "linear_attention.csv", index=False)
    frame = read_table(tmp_path, "state")
    assert frame is not None
    fitted = fit_family("state", frame, HEADER)
    assert sorted(fitted.series) == ["state/vllm/gdn_generation/conv", "state/vllm/gdn_generation/scan"]
    assert predict("state", frame, fitted) == pytest.approx(measured_us(frame), rel=0.05)
