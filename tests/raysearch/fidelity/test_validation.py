from __future__ import annotations

import json
import math
import re
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from raysearch.base.errors import InputError
from raysearch.cli.commands.validate import KERNEL_FAMILIES, _in_sample, _print
from raysearch.fidelity.calibration.deployments import (
    SWEPT,
    ServingRun,
    Skipped,
    agg_run,
    as_stated,
    disagg_worker,
    engine_of,
    known_model,
    strategy_of_run,
)
from raysearch.fidelity.calibration.disaggregated_recipes import completed, recipes, recipes_by_time
from raysearch.fidelity.calibration.engines import Steps, engine_times, fit_engine, held_out_times, shapes_of, steps_of
from raysearch.fidelity.calibration.measured_tables import read_table
from raysearch.fidelity.calibration.serving_fit import agg_runs, fit_serving, read_serving_runs
from raysearch.fidelity.calibration.serving_pool import measured_runs
from raysearch.fidelity.validation.error_figures import figures, rank_correlation, within_groups
from raysearch.fidelity.validation.kernel_errors import compare_family, nearest_series
from raysearch.fidelity.validation.light import light_s
from raysearch.fidelity.validation.published_deployments import compare_published, read_published_runs
from raysearch.fidelity.validation.serving_errors import compare_serving
from sim.config.catalog import load_calibrated, load_calibration, load_machine, load_model, measured_machine
from sim.config.files import CatalogError, config_path
from sim.prices.calibration import Calibration
from sim.prices.engine import EngineTimes
from sim.serving.phases import Pace, PacedSteps
from sim.simulate import evaluate, steady_state

CALIBRATION = load_calibration("h100_sxm")
H100 = load_machine("h100_sxm", CALIBRATION)
KEYS = [
    "gemm",
    "attention_decode",
    "attention_prefill",
    "attention_window_decode",
    "attention_window_prefill",
    "mla_decode",
    "modules",
    "linear_attention",
    "moe",
    "collectives",
    "moe_alltoall_deepep",
    "p2p_send_recv_vidur",
    "endtoend_ttft_tpot",
    "endtoend",
]
RUN = {
    "id": "run",
    "source": "made up",
    "measured": "",
    "backend": "trtllm",
    "backend_version": "1.0.0",
    "model_path": "meta-llama/Llama-3.1-8B-Instruct",
    "precision": "",
    "mode": "agg",
    "isl": 1024,
    "osl": 256,
    "gemm_quant_mode": "",
    "moe_quant_mode": "",
    "concurrency": 16,
    "batch_size": 16,
    "tp_size": 2,
    "pp_size": 1,
    "attention_dp_size": "",
    "moe_tp_size": 1,
    "moe_ep_size": 1,
    "silicon_ttft_ms": 100.0,
    "silicon_tpot_ms": 9.0,
}
PUBLISHED = {
    "model": "Llama-3.1-70B",
    "precision": "fp8 (fp8 KV)",
    "hardware": "H100 SXM 80GB",
    "framework": "TensorRT-LLM 0.17",
    "parallelism": "TP1",
    "num_gpus": 1,
    "batch_or_concurrency": "max (inf request rate)",
    "isl": 500.0,
    "osl": 2000,
    "phase": "aggregated",
    "tok_s_total": 800.0,
    "tok_s_per_gpu": 800.0,
    "source": "made up",
    "note": "",
}
UNSEEN: dict[str, list[dict[str, Any]]] = {
    "gemm.csv": [
        {"framework": "tensorrt", "dtype": "int8_other", "m": 3, "n": 999, "k": 17, "latency_us": 5.0},
        {"framework": "vllm", "dtype": "fp8_block", "m": 16384, "n": 70000, "k": 128, "latency_us": 5.0},
    ],
    "attention_decode.csv": [
        {
            "framework": "new",
            "kv_cache_dtype": "fp4",
            "batch_size": 1,
            "kv_len": 1,
            "num_heads": heads,
            "num_kv_heads": 1,
            "head_dim": 80,
            "latency_us": 5.0,
        }
        for heads in (1, 8, 128)
    ],
    "modules.csv": [
        {
            "framework": "sglang",
            "op": op,
            "variant": "",
            "kernel_source": "some",
            "model": model,
            "kv_cache_dtype": "fp8",
            "gemm_type": "fp8_block",
            "num_heads": 1,
            "batch_size": 3,
            "isl": 7,
            "step": 0,
            "latency_us": 50.0,
        }
        for op, model in (("dsa_context", "zai-org/GLM-5"), ("dsv4_hca_generation", "deepseek-ai/DeepSeek-V4-Pro"))
    ],
    "linear_attention.csv": [
        {
            "framework": "vllm",
            "op": "gdn",
            "kernel_source": kernel,
            "phase": "context",
            "batch_size": 3,
            "seq_len": 7,
            "num_k_heads": 1,
            "head_k_dim": 64,
            "num_v_heads": 1,
            "head_v_dim": 64,
            "model": "some",
            "latency_us": 5.0,
        }
        for kernel in ("causal_conv1d", "some")
    ],
    "attention_prefill.csv": [
        {
            "framework": "sglang",
            "attn_dtype": "fp8",
            "kv_cache_dtype": kv,
            "batch_size": 1,
            "isl": 1,
            "num_heads": 1,
            "num_kv_heads": 1,
            "head_dim": 256,
            "latency_us": 5.0,
        }
        for kv in ("bfloat16", "fp8")
    ],
    "attention_window_decode.csv": [
        {
            "framework": "sglang",
            "kv_cache_dtype": "fp8",
            "batch_size": 3,
            "kv_len": 500,
            "num_heads": 2,
            "num_kv_heads": 1,
            "head_dim": 64,
            "window_size": 128,
            "latency_us": 9.0,
        }
    ],
    "attention_window_prefill.csv": [
        {
            "framework": "sglang",
            "attn_dtype": "fp8",
            "kv_cache_dtype": "fp8",
            "batch_size": 1,
            "isl": 500,
            "num_heads": 2,
            "num_kv_heads": 1,
            "head_dim": 64,
            "window_size": 128,
            "latency_us": 20.0,
        }
    ],
    "mla_decode.csv": [
        {
            "mla_dtype": "fp8",
            "kv_cache_dtype": "int8",
            "batch_size": 1,
            "kv_len": 1,
            "num_heads": 3,
            "tp_size": 1,
            "latency_us": 5.0,
        }
    ],
    "moe.csv": [
        {
            "framework": "vllm",
            "kernel_source": kernel,
            "dtype": dtype,
            "num_tokens": 1,
            "hidden_size": 100,
            "inter_size": 100,
            "topk": 1,
            "num_experts": 7,
            "moe_tp_size": 1,
            "moe_ep_size": 7,
            "distribution": "power_law_9",
            "latency_us": 5.0,
        }
        for kernel, dtype in (("unheard_of", "nvfp4"), ("sglang_fused_moe_triton", "fp8"), ("deepgemm", "bfloat16"))
    ],
    "collectives.csv": [
        {
            "source": source,
            "op": op,
            "dtype": "float",
            "num_gpus": gpus,
            "num_nodes": nodes,
            "message_elems": 64,
            "message_bytes": 128,
            "latency_us": 5.0,
        }
        for source, op, gpus, nodes in (
            ("nccl_9.9", "all_reduce", 2, 1),
            ("mystery", "broadcast", 3, 1),
            ("nccl_2.23", "all_gather", 16, 2),
        )
    ],
    "moe_alltoall_deepep.csv": [
        {
            "source": "other",
            "mode": mode,
            "num_nodes": nodes,
            "ep": 8 * nodes,
            "hidden": 1000,
            "topk": 3,
            "num_experts": 33,
            "tokens_per_rank": 5,
            "comm_sms": sms,
            "dispatch_us": 9.0,
            "combine_us": 9.0,
        }
        for mode, nodes, sms in (("low_latency", 16, 8), ("normal", 3, 16), ("normal", 1, 0), ("hybrid", 1, 20))
    ],
    "p2p_send_recv_vidur.csv": [
        {"scope": scope, "message_bytes": 1, "min_us": 1, "median_us": 5, "mean_us": 5, "std_us": 0}
        for scope in ("intra_node", "inter_node (4 nodes)")
    ],
    "endtoend_ttft_tpot.csv": [
        RUN | {"id": "framework", "backend": "other"},
        RUN | {"id": "model", "model_path": "nobody/knows-this"},
        RUN | {"id": "batch", "concurrency": "", "batch_size": ""},
        RUN | {"id": "dtype", "gemm_quant_mode": "int3_wo"},
        RUN | {"id": "stages", "pp_size": 2},
        RUN | {"model_path": "deepseek-ai/DeepSeek-R1", "tp_size": 8, "moe_ep_size": 8, "backend": "sglang"},
        RUN
        | {
            "id": "oss",
            "model_path": "openai/gpt-oss-120b",
            "tp_size": 4,
            "moe_tp_size": 3,
            "gemm_quant_mode": "nvfp4",
        },
        RUN
        | {
            "id": "flag",
            "model_path": "MiniMaxAI/MiniMax-M2.5",
            "tp_size": 4,
            "attention_dp_size": 4,
            "moe_ep_size": 16,
        },
        RUN | {"id": "decode alone", "mode": "disagg", "decode_batch_size": 8, "decode_tp_size": 2},
        RUN | {"id": "prefill alone", "mode": "disagg", "prefill_batch_size": 1, "decode_batch_size": ""},
        RUN | {"id": "nothing", "mode": "disagg", "decode_batch_size": "", "concurrency": ""},
    ],
    "endtoend.csv": [
        PUBLISHED,
        PUBLISHED | {"parallelism": "TP2", "tok_s_per_gpu": 2500.0},
        PUBLISHED | {"parallelism": "unknown"},
        PUBLISHED | {"batch_or_concurrency": "QPS=4", "phase": "aggregated-online", "source": "500 requests"},
        PUBLISHED
        | {
            "model": "DeepSeek-V3",
            "framework": "SGLang",
            "parallelism": "decode: attn DP72, EP72",
            "batch_or_concurrency": "128 req/GPU",
            "phase": "decode",
        },
        PUBLISHED
        | {
            "model": "DeepSeek-V3",
            "framework": "SGLang",
            "parallelism": "prefill: attn DP32, EP32",
            "batch_or_concurrency": "16384 tokens/GPU",
            "osl": 0,
            "phase": "prefill",
        },
    ],
}


def write(folder: Path, file: str, rows: list[dict[str, Any]]) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    pd.DataFrame(rows).to_csv(folder / file, index=False)
    return folder


@pytest.fixture
def unseen(tmp_path: Path) -> Path:
    for file, rows in UNSEEN.items():
        write(tmp_path / "data", file, rows)
    return tmp_path / "data"


def all_numbers(value: Any) -> list[float]:
    if isinstance(value, dict):
        return [number for item in value.values() for number in all_numbers(item)]
    if isinstance(value, list):
        return [number for item in value for number in all_numbers(item)]
    return [value] if isinstance(value, int | float) else []


def test_every_family_reports_its_figures_groups_and_nothing_but_numbers(
    raysearch, unseen: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    done = raysearch("validate", unseen, "--json", "--out", unseen / "plots")
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout)
    assert list(result) == KEYS
    for name, family in result.items():
        assert {"rows", "mape", "median_ape", "p90_ape", "bias", "roofline_mape", "groups"} <= set(family), name
        assert family["rows"] == sum(group["rows"] for group in family["groups"]) > 0
        assert all(math.isfinite(number) for number in all_numbers(family))
        assert family["picture"] == str(unseen / "plots" / f"{name}.png")
        assert Path(family["picture"]).read_bytes().startswith(b"\x89PNG")
    for name in KEYS[:-2]:
        assert result[name]["unpredicted"] == 0, name
    serving = result["endtoend_ttft_tpot"]
    assert serving["rows"] == serving["ttft"]["rows"] == 3
    assert serving["skipped"] == {
        "unknown framework 'other'": ["framework"],
        "unknown model 'nobody/knows-this'": ["model"],
        "it states neither a concurrency nor a batch": ["batch"],
        "no kernels for 'int3_wo' weights": ["dtype"],
        "it runs 2 pipeline stages, whose microbatches it does not state": ["stages"],
    }
    assert serving["reread"] == {
        "nvfp4 weights of gpt_oss_120b read as published": ["oss"],
        "attention_dp_size = tp_size = 4 read as the engine's flag: 4 GPUs, not 16": ["flag"],
    }
    disagg = serving["disagg"]
    assert (disagg["rows"], disagg["unpredicted"], disagg["ttft"]["rows"]) == (2, 1, 2)
    assert [each["id"] for each in disagg["each"]] == ["decode alone", "prefill alone"]
    assert disagg["skipped"] == {"it states neither a decode_batch_size nor a concurrency": ["nothing"]}
    assert result["endtoend"]["rows"] == 5
    assert result["endtoend"]["skipped"] == {"its parallelism is 'unknown'": ["line 4"]}
    capsys.readouterr()
    stored = {"source": "runs.csv", "rows": 411, "mape": 0.079, "median_ape": 0.05}
    _print(result, _in_sample(stored))
    assert _in_sample({}) == ""
    table = capsys.readouterr().out
    for line in (
        "serving: engines' times were fitted to such runs (411 of this machine)",
        "endtoend_ttft_tpot, 1 rows not predicted: unknown framework 'other' (framework)",
        "endtoend_ttft_tpot, 1 rows reinterpreted: nvfp4 weights of gpt_oss_120b read as published (oss)",
        "disaggregated runs, 1 rows not predicted: it states neither a decode_batch_size nor a concurrency (nothing)",
        "disaggregated runs, 2 of 3 predicted",
        "endtoend, 1 rows not predicted: its parallelism is 'unknown' (line 4)",
        "time to the first token",
    ):
        assert line in table


@pytest.fixture
def gemms_alone(tmp_path: Path) -> Path:
    """A calibration that prices bf16 GEMMs and nothing else."""
    data = dict(CALIBRATION.data) | {"serving": {}}
    data["series"] = {name: record for name, record in data["series"].items() if name.startswith("gemm/")}
    path = tmp_path / "gemms.json"
    path.write_text(json.dumps(data))
    return path


def test_rows_that_need_a_series_the_calibration_lacks_are_unpredicted(raysearch, unseen: Path, gemms_alone) -> None:
    coefficients = ("--set", f"calibration={gemms_alone}")
    done = raysearch("validate", unseen, *coefficients, "--json", "--set", "held_out")
    assert done.returncode == 0, done.stderr
    serving = json.loads(done.stdout)["endtoend_ttft_tpot"]
    assert (serving["rows"], serving["unpredicted"], serving["disagg"]["unpredicted"]) == (0, 3, 3)
    assert len(serving["skipped"]["it needs kernels that the calibration lacks"]) == 3
    assert json.loads(done.stdout)["endtoend"]["unpredicted"] > 1
    table = raysearch("validate", unseen, *coefficients)
    assert table.returncode == 0
    assert "endtoend_ttft_tpot, 3 rows not predicted" in table.stdout


@pytest.mark.parametrize(
    "change", [{"osl": ""}, {"isl": ""}, {"osl": -5}, {"isl": -5}, {"isl": "", "osl": ""}], ids=str
)
def test_a_published_row_without_lengths_is_unpredicted(tmp_path: Path, change: dict[str, Any]) -> None:
    rows = [PUBLISHED, PUBLISHED | {"parallelism": "TP2"}, PUBLISHED | change]
    found = compare_published(write(tmp_path, "endtoend.csv", rows), CALIBRATION, H100)
    assert found is not None
    assert np.isfinite(found.predicted).tolist() == [True, True, False]


def test_pools_with_balanced_experts_are_near_what_is_published_of_them(tmp_path: Path) -> None:
    """Tokens/s/GPU of DeepSeek-V3 under SGLang; source: lm-sys, blog/2025-05-05-large-scale-ep.md."""
    pool = PUBLISHED | {"model": "DeepSeek-V3", "precision": "fp8", "num_gpus": 8}
    prefill = {"framework": "SGLang (perfect EPLB simulated)", "parallelism": "prefill: attn DP32, EP32"}
    prefill |= {"batch_or_concurrency": "16384 tokens/GPU", "isl": 4096, "osl": 0, "phase": "prefill"}
    decode = {"framework": "SGLang no-TBO (simulated MTP)", "parallelism": "decode: attn DP72, EP72"}
    decode |= {"batch_or_concurrency": "128 req/GPU", "isl": 4000, "osl": 100, "phase": "decode"}
    rows = [pool | prefill | {"tok_s_per_gpu": 7417.12}, pool | decode | {"tok_s_per_gpu": 1616.12}]
    found = compare_published(write(tmp_path, "endtoend.csv", rows), CALIBRATION, H100)
    assert found is not None
    assert found.predicted == pytest.approx(found.measured, rel=0.15)


def test_missing_files_are_reported_as_not_checked(raysearch, tmp_path: Path) -> None:
    write(tmp_path, "gemm.csv", UNSEEN["gemm.csv"])
    done = raysearch("validate", tmp_path, "--json")
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout)
    assert list(result) == KEYS
    assert result["gemm"]["rows"] == 2
    for name in KEYS[1:]:
        assert result[name]["rows"] == 0
        assert result[name]["mape"] is None
        assert result[name]["groups"] == []
        assert "not checked" in result[name]["note"]
    table = raysearch("validate", tmp_path)
    assert table.returncode == 0, table.stderr
    assert "not checked" in table.stdout


@pytest.mark.parametrize(
    ("file", "change", "message"),
    [
        ("gemm.csv", {"latency_us": "fast"}, "latency_us"),
        ("gemm.csv", {"m": 0}, "column m"),
        ("endtoend_ttft_tpot.csv", {"silicon_tpot_ms": ""}, "silicon_tpot_ms"),
        ("endtoend_ttft_tpot.csv", {"concurrency": "many"}, "line 2, column concurrency"),
        ("endtoend_ttft_tpot.csv", {"backend": "a/b"}, "line 2, column backend: expected a name"),
        ("moe.csv", {"kernel_source": "my/kernel"}, "line 2, column kernel_source: expected a name"),
        ("collectives.csv", {"source": "nccl 2"}, "line 2, column source: expected a name"),
        ("endtoend.csv", {"tok_s_per_gpu": -1}, "tok_s_per_gpu"),
    ],
)
def test_a_bad_cell_is_one_clear_error(
    raysearch, tmp_path: Path, file: str, change: dict[str, Any], message: str
) -> None:
    write(tmp_path, file, [UNSEEN[file][0] | change])
    done = raysearch("validate", tmp_path)
    assert done.returncode == 2
    assert message in done.stderr
    assert file in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize(
    ("file", "change", "message"),
    [
        ("endtoend.csv", {"isl": 0.5}, "line 2, column isl: expected a whole number or nothing"),
        ("endtoend.csv", {"num_gpus": 10**32}, "line 2, column num_gpus: expected a whole number or nothing"),
        ("endtoend_ttft_tpot.csv", {"isl": 0.5}, "line 2, column isl: expected a whole number above 0"),
        ("endtoend_ttft_tpot.csv", {"osl": 1e32}, "line 2, column osl: expected a whole number above 0, at most"),
        ("endtoend_ttft_tpot.csv", {"tp_size": 10**32}, "line 2, column tp_size: expected a whole number or nothing"),
        (
            "gemm.csv",
            {"dtype": "fp8", "m": 10**32},
            "line 2, column m: expected at most 1000000000",
        ),
        ("collectives.csv", {"message_bytes": 10**32}, "line 2, column message_bytes: expected at most"),
    ],
)
def test_impossible_counts_are_named_with_line_and_column(
    tmp_path: Path, file: str, change: dict[str, Any], message: str
) -> None:
    write(tmp_path, file, [UNSEEN[file][0] | change])
    reader = {"endtoend.csv": read_published_runs, "endtoend_ttft_tpot.csv": read_serving_runs}.get(file)
    with pytest.raises(InputError, match=re.escape(file) + ", " + re.escape(message)):
        reader(tmp_path) if reader else read_table(tmp_path, file.removesuffix(".csv"))


def test_a_missing_column_or_folder_is_one_clear_error(raysearch, tmp_path: Path) -> None:
    write(tmp_path, "endtoend_ttft_tpot.csv", [{"id": "x"}])
    done = raysearch("validate", tmp_path)
    assert done.returncode == 2
    assert "no column 'backend'" in done.stderr
    done = raysearch("validate", tmp_path / "nowhere")
    assert done.returncode == 2
    assert "no such file or folder" in done.stderr


def test_the_machine_of_a_hardware_file_sets_memory_peaks_and_coefficients(raysearch, tmp_path: Path) -> None:
    rows = [PUBLISHED, PUBLISHED | {"parallelism": "TP2", "tok_s_per_gpu": 2500.0}]
    write(tmp_path, "endtoend.csv", rows)
    text = config_path("hardware", "h100_sxm").read_text(encoding="utf-8")
    files = {"same": text, "roomy": text.replace("85.52", "160.0"), "other": text.replace("3350.0", "4800.0")}
    files["medians"] = text.replace('calibration = "h100_sxm"', "")
    for name, content in files.items():
        (tmp_path / f"{name}.toml").write_text(content, encoding="utf-8")

    def gain(hardware: str | Path, calibration: str | None = None) -> float:
        loaded = load_calibrated(hardware, calibration)
        found = compare_published(tmp_path, loaded, load_machine(hardware, loaded))
        assert found is not None
        return found.extra["capacity_cliff"][0]["predicted_gain"]

    assert gain("h100_sxm") == gain(tmp_path / "same.toml") > 2
    assert gain(tmp_path / "roomy.toml") < 1.5  # with room on one GPU there is no cliff
    assert gain(tmp_path / "medians.toml", "h100_sxm") == gain("h100_sxm")
    with pytest.raises(CatalogError, match="names no calibration"):
        gain(tmp_path / "medians.toml")
    done = raysearch("validate", tmp_path, "--hardware", tmp_path / "other.toml")
    assert done.returncode == 2
    assert "was fitted where hbm_gb_per_s = 3350.0" in done.stderr


def test_figures_of_hand_made_errors() -> None:
    measured, predicted = np.array([1.0, 2.0, 4.0, 8.0]), np.array([1.1, 1.8, 4.0, np.nan])
    found = figures(measured, predicted, measured / 2)
    assert (found["rows"], found["unpredicted"]) == (3, 1)
    assert found["mape"] == pytest.approx(0.2 / 3)
    assert found["median_ape"] == pytest.approx(0.1)
    assert found["bias"] == pytest.approx(0.0, abs=1e-12)
    assert found["roofline_mape"] == pytest.approx(0.5)
    assert found["rank_correlation"] is None  # three rows rank nothing
    assert figures(np.zeros(0), np.zeros(0), np.zeros(0))["mape"] is None


def test_rank_correlations_inside_groups() -> None:
    rising = np.arange(1.0, 6.0)
    assert rank_correlation(rising, rising**3) == pytest.approx(1.0)
    assert rank_correlation(rising, -rising) == pytest.approx(-1.0)
    assert rank_correlation(rising, np.ones(5)) is None
    both = within_groups(np.tile(rising, 2), np.concatenate([rising, -rising]), ["a"] * 5 + ["b"] * 5)
    assert (both["groups"], both["mean"], both["min"]) == (2, pytest.approx(0.0), pytest.approx(-1.0))


def test_an_unknown_series_is_read_as_the_one_that_shares_most_with_it() -> None:
    fitted = ["a2a/normal/dispatch/12/intra", "a2a/normal/dispatch/24/intra", "a2a/low_latency/dispatch/0/intra"]
    assert nearest_series("a2a/normal/dispatch/20/intra", fitted) == fitted[1]
    assert nearest_series("a2a/low_latency/dispatch/8/intra", fitted) == fitted[2]
    assert nearest_series("a2a/x", []) is None


@settings(derandomize=True, deadline=None)
@given(
    st.sampled_from(["llama_3_1_8b", "qwen3_32b", "gpt_oss_120b", "deepseek_v3", "mixtral_8x7b"]),
    st.sampled_from(["trtllm", "vllm", "sglang"]),
    st.sampled_from(["bf16", "fp8", "fp8_block"]),
    st.sampled_from(["bf16", "fp8"]),
    st.integers(0, 3),
    st.integers(0, 3),
    st.sampled_from(["all_to_all", "all_gather"]),
    st.integers(1, 10_000),
    st.integers(1, 200_000),
    st.sampled_from(["decode", "serve", "prefill"]),
)
def test_no_step_beats_the_speed_of_light(
    name: str, engine: str, weights: Any, kv: Any, tp: int, dp: int, exchange: Any, batch: int, isl: int, phase: Any
) -> None:
    model, osl = load_model(name), 64
    strategy, _ = strategy_of_run(
        model, batch, 2**tp, 2**dp if model.is_moe else 1, 2 ** (tp + dp) if model.is_moe else 1
    )
    run = ServingRun(
        model, isl, osl, weights, kv, strategy, engine, engine, batch, phase=phase, expert_exchange=exchange
    )
    workload = run.workload(H100)
    state = steady_state(workload, strategy)
    priced = (state.decode_s, state.mixed_s)[-len(state.batching.loads) :]
    for load, seconds in zip(state.batching.loads, priced, strict=True):
        assert light_s(workload, strategy, load) * (1 - 1e-9) <= seconds < math.inf


def test_the_roofline_is_that_of_the_calibrations_machine(unseen: Path) -> None:
    half = {name: rate / 2 for name, rate in CALIBRATION.data["speed_of_light"].items()}
    slower = Calibration("slower", {**CALIBRATION.data, "speed_of_light": half})
    for name, family in KERNEL_FAMILIES.items():
        here, there = (compare_family(name, family, unseen, machine) for machine in (CALIBRATION, slower))
        assert here is not None
        assert there is not None
        assert np.allclose(there.roofline, 2 * here.roofline)


def test_held_out_rows_are_never_faster_than_the_calibrations_machine(tmp_path: Path) -> None:
    shapes = [(m, n) for m in (64, 4096) for n in (512, 1024, 2048, 4096, 8192, 16384)]
    row = {"framework": "vllm", "dtype": "fp8", "k": 4096}
    rows = [row | {"m": m, "n": n, "latency_us": CALIBRATION.gemm_us("vllm", "fp8", m, n, 4096)} for m, n in shapes]
    light = {name: rate / 100 for name, rate in CALIBRATION.data["speed_of_light"].items()}
    slow = Calibration("slow", {**CALIBRATION.data, "speed_of_light": light})
    found = compare_family("gemm", "gemm", write(tmp_path, "gemm.csv", rows), slow, held_out=True)
    assert found is not None
    flop_us = np.array([2 * m * n * 4096 / (light["fp8_tflops"] * 1e6) for m, n in shapes])
    assert (found.predicted >= flop_us * (1 - 1e-9)).all()


def test_rows_that_the_coefficients_predict_exactly_have_no_error(tmp_path: Path) -> None:
    rows = [
        {"framework": "vllm", "dtype": "bfloat16", "m": m, "n": 4096, "k": 4096, "latency_us": 1.0}
        for m in (1, 64, 4096)
    ]
    for row in rows:
        row["latency_us"] = CALIBRATION.gemm_us("vllm", "bf16", row["m"], row["n"], row["k"])
    found = compare_family("gemm", "gemm", write(tmp_path, "gemm.csv", rows), CALIBRATION)
    assert found is not None
    assert np.allclose(found.predicted, found.measured, rtol=1e-6)
    assert (found.roofline <= found.predicted * (1 + 1e-12)).all()


def run_of(**changes: Any) -> ServingRun:
    found = agg_run(RUN | changes)
    assert isinstance(found, ServingRun)
    return found


def test_a_run_states_the_degree_that_its_row_leaves_out() -> None:
    plain = run_of()
    assert (plain.strategy.tp, plain.strategy.attention_dp, plain.gpus) == (2, 1, 2)
    oss = {"model_path": "openai/gpt-oss-120b", "tp_size": 4, "moe_tp_size": 4, "concurrency": 64, "batch_size": 16}
    found = run_of(**oss)
    assert (found.strategy.tp, found.strategy.attention_dp, found.gpus) == (1, 4, 4)
    found = run_of(model_path="MiniMaxAI/MiniMax-M2.5", tp_size=4, moe_tp_size=0, moe_ep_size=0)
    assert found.strategy.moe_tp * found.strategy.ep == 4
    flag = oss | {"attention_dp_size": 4, "moe_tp_size": 1, "moe_ep_size": 16}
    found = run_of(**flag)  # the engine's flag: four GPUs, each with its own requests
    assert (found.strategy.tp, found.strategy.attention_dp, found.strategy.ep) == (1, 4, 4)
    assert found.reread[-1].startswith("attention_dp_size = tp_size = 4")
    found = run_of(**(flag | {"attention_dp_size": 2, "moe_ep_size": 8}))
    assert (found.strategy.tp, found.strategy.attention_dp, found.gpus) == (4, 2, 8)
    found = run_of(**(oss | {"concurrency": 8, "batch_size": 16}))  # a replica that is never full
    assert found.gpus == 4
    dense = run_of(attention_dp_size=4, concurrency=10)  # replicas that share nothing
    assert (dense.replicas, dense.strategy.batch, dense.gpus, dense.states_its_batch) == (4, 2, 8, True)


PUBLISHED_RUN = RUN | {
    "source": "db-dump/2026-04-27",
    "measured": "2026-02-05",
    "system": "b200_sxm",
    "model_path": "deepseek-ai/DeepSeek-R1",
    "backend_version": "1.2.0rc6.post2",
    "gemm_quant_mode": "fp8",
    "concurrency": 256,
    "batch_size": 4,
    "tp_size": 1,
    "attention_dp_size": 64,
    "moe_tp_size": 8,
    "moe_ep_size": 8,
}


def test_a_product_that_counts_expert_parallelism_twice_is_read_as_the_gpus_that_ran() -> None:
    found = run_of(**PUBLISHED_RUN)
    assert (found.gpus, found.strategy.attention_dp, found.strategy.ep, found.strategy.batch) == (8, 8, 8, 256)
    assert (found.kv_cache, found.prompt_wait_steps, found.speculation) == ("fp8", 60, None)
    tensor = run_of(**PUBLISHED_RUN | {"tp_size": 64, "attention_dp_size": 1})
    assert (tensor.gpus, tensor.strategy.tp, tensor.strategy.ep, tensor.prompt_wait_steps) == (8, 8, 8, 0)


def test_images_that_ran_multi_token_prediction_are_read_so() -> None:
    alone = run_of(**PUBLISHED_RUN | {"backend_version": "1.2.0rc6.post3"})
    assert alone.speculation is not None
    assert alone.speculation.draft_tokens == 1  # with attention data-parallelism; 3 without
    whole = {"tp_size": 8, "attention_dp_size": 1, "moe_tp_size": 8, "moe_ep_size": 1, "concurrency": 8}
    several = run_of(**PUBLISHED_RUN | whole | {"backend_version": "1.2.0rc6.post3"})
    assert several.speculation is not None
    assert several.speculation.draft_tokens == 3
    sglang = PUBLISHED_RUN | whole | {"backend": "sglang", "backend_version": "0.5.9"}
    assert [run_of(**sglang | {"concurrency": n}).speculation is not None for n in (64, 128)] == [False, True]


def test_narrow_weights_of_mixtures_are_their_experts() -> None:
    found = run_of(**PUBLISHED_RUN | {"gemm_quant_mode": "nvfp4"})
    assert (found.weights, found.model.expert_dtype, found.kv_cache) == ("bf16", "nvfp4", "fp8")
    assert run_of(gemm_quant_mode="nvfp4").weights == "nvfp4"


def test_requests_of_several_workers_are_shared_out() -> None:
    found = run_of(concurrency=448, batch_size=14)
    assert (found.replicas, found.strategy.batch, found.gpus) == (32, 14, 64)
    experts = {
        "model_path": "deepseek-ai/DeepSeek-V3.1",
        "tp_size": 8,
        "moe_ep_size": 8,
        "concurrency": 448,
        "batch_size": 56,
    }
    export = {"source": "InferenceX export tensorrtllm-runtime:0.8.1"}  # whose deployments fill 64 GPUs
    ranks, workers = run_of(**experts), run_of(**experts | export)
    assert (ranks.strategy.tp, ranks.strategy.dp, ranks.strategy.batch, ranks.gpus) == (1, 8, 448, 8)
    assert (workers.strategy.tp, workers.strategy.dp, workers.strategy.batch, workers.gpus) == (8, 1, 56, 64)


def test_attention_ranks_that_a_row_does_not_state_are_no_flag_of_the_engine() -> None:
    row = {
        "source": "InferenceX export x.csv",
        "model_path": "Qwen/Qwen3-235B-A22B-FP8",
        "tp_size": 2,
        "moe_tp_size": 4,
    }
    found = run_of(**row)
    assert (found.strategy.tp, found.strategy.attention_dp, found.gpus) == (2, 2, 4)
    assert (run_of(**row, attention_dp_size=2).gpus, run_of(**row, attention_dp_size=1).gpus) == (2, 2)


def test_a_build_of_some_day_is_of_the_release_of_that_day() -> None:
    built = {"measured": "2026-03-20", "backend": "sglang"}
    for version in ("nightly-dev-20260316-a1", "glm5-hopper", "0.5.9", ""):
        assert run_of(**built, backend_version=version).generation == "sglang<0.5.11"
    assert run_of(**built | {"measured": "2026-05-20"}, backend_version="nan").generation == "sglang"


def test_a_row_that_cannot_be_priced_says_why() -> None:
    changes = {
        "unknown model": {"model_path": "nobody/knows-this"},
        "unknown framework 'mlc'": {"backend": "mlc"},
        "no kernels for 'int3_wo' weights": {"gemm_quant_mode": "int3_wo"},
        "no engine cuts 32 heads over 36 GPUs": {"tp_size": 36},
        "neither a concurrency nor a batch": {"concurrency": "", "batch_size": ""},
    }
    for reason, change in changes.items():
        found = agg_run(RUN | change)
        assert isinstance(found, Skipped)
        assert reason in found.reason


def test_workers_of_disaggregated_rows_are_priced_in_their_own_phase() -> None:
    row = RUN | {"decode_batch_size": 8, "decode_tp_size": 2, "decode_attention_dp_size": 4, "decode_moe_tp_size": 1}
    row |= {"model_path": "deepseek-ai/DeepSeek-V3", "prefill_batch_size": 1, "prefill_tp_size": 8, "concurrency": 32}
    decode, prefill = disagg_worker(row, "decode"), disagg_worker(row, "prefill")
    assert isinstance(decode, ServingRun)
    assert isinstance(prefill, ServingRun)
    assert (decode.phase, decode.strategy.batch, decode.strategy.ep, decode.gpus) == ("decode", 32, 8, 8)
    assert (prefill.phase, prefill.strategy.batch, prefill.gpus) == ("prefill", 1, 8)
    assert disagg_worker(row, "decode") == decode
    nothing = row | {"decode_batch_size": "", "concurrency": ""}
    assert isinstance(disagg_worker(nothing, "decode"), Skipped)
    alone = disagg_worker(row | {"decode_batch_size": "", "concurrency": 45, "decode_num_workers": 2}, "decode")
    assert isinstance(alone, ServingRun)
    assert alone.strategy.batch == 23
    # Requests over the workers are all attention ranks' together, not each one's.
    all_ranks = row | {"decode_batch_size": 23, "concurrency": 45, "decode_num_workers": 2}
    assert disagg_worker(all_ranks, "decode") == alone


def test_published_names_find_their_models() -> None:
    names = {
        "deepseek-ai/DeepSeek-V3": ("deepseek_v3", "fp8_block"),
        "DeepSeek-V3/R1": ("deepseek_v3", "fp8_block"),
        "Qwen/Qwen3-235B-A22B-FP8": ("qwen3_235b_a22b", "fp8_block"),
        "Qwen3-235B-A22B": ("qwen3_235b_a22b", "bf16"),
        "Qwen/Qwen3.5-397B-A17B": ("qwen3_5_397b_a17b", "bf16"),
        "zhipuai/GLM-5": ("glm_5", "bf16"),
        "moonshotai/Kimi-K2.5": ("kimi_k2_5", "bf16"),
        "Qwen/Qwen3-32B": ("qwen3_32b", "bf16"),
        "Llama-3.3-70B": ("llama_3_1_70b", "bf16"),
        "Llama-4-Maverick-17B-128E": ("llama_4_maverick", "bf16"),
        "Mixtral-8x22B": ("mixtral_8x22b", "bf16"),
    }
    for name, expected in names.items():
        found = known_model(name)
        assert found is not None
        assert (found[0].name, found[1]) == expected


def test_versions_of_vllm_without_asynchronous_scheduling_are_an_engine_of_their_own() -> None:
    assert engine_of("vllm", "0.12.0") == "vllm<0.14"
    assert engine_of("vllm", "0.18.0") == engine_of("vllm", np.nan) == "vllm"
    assert engine_of("trtllm", "0.12.0") == "trtllm"


def test_a_run_of_the_hard_coded_client_is_read_as_the_middle_of_its_sweep(tmp_path: Path) -> None:
    hidden = RUN | {
        "source": "source_file=2026-04-06.csv",
        "backend": "vllm",
        "backend_version": "0.11.2",
        "model_path": "openai/gpt-oss-120b",
        "tp_size": 4,
        "moe_tp_size": 4,
        "concurrency": 512,
        "batch_size": 512,
    }
    found = run_of(**hidden)
    assert (found.strategy.batch, found.stated, found.states_its_batch) == (16, 512, False)
    assert "512 requests at once read as a server that admits 16" in found.reread[0]
    assert found.engine == "vllm"  # the script schedules asynchronously
    assert as_stated(found).strategy.batch == 512
    assert sorted(SWEPT)[len(SWEPT) // 2] == 16
    changes = ({"concurrency": 64}, {"backend": "trtllm"}, {"source": "own"}, {"model_path": "MiniMaxAI/MiniMax-M2.5"})
    for change in changes:
        other = run_of(**(hidden | change))
        assert other.states_its_batch
        assert other.strategy.batch == other.stated


def test_runs_that_hide_their_batch_move_no_engine_and_are_scored(tmp_path: Path) -> None:
    stated = [
        RUN | {"concurrency": c, "batch_size": c, "backend": "vllm", "isl": i} for c in (4, 64) for i in (256, 512)
    ]
    hidden = RUN | {"backend": "vllm", "model_path": "openai/gpt-oss-120b", "source": "source_file=x", "tp_size": 1}
    hidden |= {"concurrency": 512, "batch_size": 512, "silicon_tpot_ms": 900.0}
    alone, both = (
        write(tmp_path / str(len(rows)), "endtoend_ttft_tpot.csv", rows) for rows in (stated, [*stated, hidden])
    )
    fits = [fit_serving(folder, H100) for folder in (alone, both)]
    assert fits[0] is not None
    assert fits[1] is not None
    first, second = (fit["engines"]["vllm"] for fit in fits if fit)
    assert [first[name] for name in ("step_s", "prefill_share")] == [
        second[name] for name in ("step_s", "prefill_share")
    ]
    assert (fits[1]["batch_not_stated"], fits[1]["rows"]) == (1, 5)
    found = compare_serving(both, CALIBRATION, H100)
    assert found is not None
    assert np.isfinite(found.predicted).all()
    assert found.extra["rows_that_state_their_batch"]["rows"] == 4
    assert found.extra["every_row_taken_literally"]["rows"] == 5
    assert [len(names) for how, names in found.reread.items() if "512" in how] == [1]


def test_runs_that_are_scored_alone_move_no_engine_and_are_scored(tmp_path: Path) -> None:
    steady = [
        RUN | {"concurrency": c, "batch_size": c, "isl": i, "silicon_tpot_ms": 9.0 + c / 8 + i / 256}
        for c in (4, 64)
        for i in (256, 512)
    ]
    sweep = {"source": "InferenceX export tensorrtllm-runtime:0.9.0", "model_path": "Qwen/Qwen3-32B"}
    unexplained = RUN | sweep | {"silicon_tpot_ms": 900.0}
    alone, both = (
        write(tmp_path / str(len(rows)), "endtoend_ttft_tpot.csv", rows) for rows in (steady, [*steady, unexplained])
    )
    first, second = ((fit_serving(folder, H100) or {})["engines"]["trtllm"] for folder in (alone, both))
    times = ("step_s", "layer_s", "sequence_s", "kernel_factor", "prefill_share")
    assert [first.get(name) for name in times] == [second.get(name) for name in times]
    pooled = measured_runs([(both, "h100_sxm")], measured_machine)
    assert pooled.pool.weights.tolist() == [1.0, 1.0, 1.0, 1.0, 0.0]
    found = compare_serving(both, CALIBRATION, H100)
    assert found is not None
    assert len(found.predicted) == 5


SWEEP = [
    RUN | {"id": f"{c} {isl} {osl}", "concurrency": c, "batch_size": c, "isl": isl, "osl": osl}
    for c in (4, 16, 64, 128)
    for isl in (256, 2048)
    for osl in (128, 1024)
]


def test_engine_parameters_are_recovered_from_runs_made_with_them(tmp_path: Path) -> None:
    truth = EngineTimes(1e-3, 2e-5, 0.8)
    frame = read_serving_runs(write(tmp_path, "endtoend_ttft_tpot.csv", SWEEP))
    assert frame is not None
    steps = steps_of(agg_runs(frame).runs, H100)
    assert steps.priced.all()
    measured = steps.tpot_s(truth)
    found = fit_engine(steps, measured)
    assert found.step_s == pytest.approx(truth.step_s, rel=0.1)
    assert found.prefill_share == pytest.approx(truth.prefill_share, rel=0.05)
    assert found.sequence_s == pytest.approx(truth.sequence_s, rel=0.1)
    rows = [row | {"silicon_tpot_ms": seconds * 1e3} for row, seconds in zip(SWEEP, measured, strict=True)]
    record = fit_serving(write(tmp_path, "endtoend_ttft_tpot.csv", rows), H100)
    assert record is not None
    assert record["engines"]["trtllm"]["mape"] < 0.03
    assert json.dumps(record, allow_nan=False)
    assert fit_serving(tmp_path / "empty", H100) is None


def test_validation_prices_a_row_as_a_search_prices_a_strategy(tmp_path: Path) -> None:
    rows = [*SWEEP[::3], *UNSEEN["endtoend_ttft_tpot.csv"][5:8]]
    found = compare_serving(write(tmp_path, "endtoend_ttft_tpot.csv", rows), CALIBRATION, H100)
    frame = read_serving_runs(tmp_path)
    assert found is not None
    assert frame is not None
    runs = agg_runs(frame).runs
    assert len(runs) == len(found.predicted) == len(rows)
    steps, times = steps_of(runs, H100), [engine_times(CALIBRATION, run) for run in runs]
    fitted_on = steps.tpot_of_each_s(times)
    for run, each, shown_ms, fitted_s in zip(runs, times, found.predicted, fitted_on, strict=True):
        searched = evaluate(run.workload(H100, each), run.strategy)
        assert shown_ms == pytest.approx(searched.tpot_s * 1e3, rel=1e-12)
        assert fitted_s == pytest.approx(searched.tpot_s, rel=1e-12)


def test_engines_charge_no_more_than_the_whole_of_other_requests_prompts() -> None:
    for name, record in CALIBRATION.data["serving"]["engines"].items():
        assert 0 <= record["prefill_share"] <= 1, name
    pace = Pace(0.5, 0.9, 1, 16)
    with_prompts = np.linspace(1.0, 4.0, 7)
    shares = np.linspace(0.0, 1.0, 5)
    for decode_s in (1.0, 1.5):
        tpot_s = np.array([PacedSteps(pace, EngineTimes(0.1, 0.0, s), decode_s, with_prompts).tpot_s for s in shares])
        assert (np.diff(tpot_s, axis=1) >= -1e-12).all()  # a longer step with prompts never makes a token faster


def test_one_outlier_does_not_move_an_engine() -> None:
    batch = np.array([4.0, 8, 16, 32, 64, 128, 256])
    decode_s = 5e-3 + 1e-5 * batch
    pace = Pace(batch / 512, 1 - 1 / batch, np.ones(7), batch)
    steps = Steps(pace, decode_s, decode_s + 30e-3, batch, np.ones((7, 2)))
    measured = steps.tpot_s(EngineTimes(1e-3, 2e-5, 1.0))
    bent = measured * np.array([1, 1, 1, 1, 1, 1, 0.05])
    assert fit_engine(steps, bent).step_s == pytest.approx(fit_engine(steps, measured).step_s, rel=0.2)


def test_an_engine_held_out_has_not_seen_the_groups_of_its_fold(tmp_path: Path) -> None:
    frame = read_serving_runs(write(tmp_path, "endtoend_ttft_tpot.csv", SWEEP))
    assert frame is not None
    runs = agg_runs(frame).runs
    steps = steps_of(runs, H100)
    measured = steps.tpot_s(EngineTimes(1e-3, 2e-5, 0.8))
    shapes = shapes_of(runs)
    odd = np.array([shape == shapes[0] for shape in shapes])
    times = held_out_times(runs, steps, np.where(odd, 100 * measured, measured), shapes)
    bent = {times[row] for row in np.flatnonzero(~odd)}
    assert times[0] not in bent
    assert times[0].step_s == pytest.approx(1e-3, rel=0.1)


def test_runs_of_several_machines_are_read_by_machine(tmp_path: Path) -> None:
    rows = [RUN | {"id": name, "system": name} for name in ("h200_sxm", "gb200")]
    write(tmp_path, "runs.csv", rows)
    for hardware, wanted in (("h200_sxm", ["h200_sxm"]), ("gb200_nvl72", ["gb200"]), ("", ["h200_sxm", "gb200"])):
        found = read_serving_runs(tmp_path, hardware)
        assert found is not None
        assert list(found["id"]) == wanted


def test_serving_and_published_families_are_absent_without_their_files(tmp_path: Path) -> None:
    assert compare_serving(tmp_path, CALIBRATION, H100) is None
    assert compare_published(tmp_path, CALIBRATION, H100) is None


def test_a_second_gpu_gives_room_for_more_than_twice_the_sequences(tmp_path: Path) -> None:
    rows = [PUBLISHED, PUBLISHED | {"parallelism": "TP2", "tok_s_per_gpu": 2400.0}]
    found = compare_published(write(tmp_path, "endtoend.csv", rows), CALIBRATION, H100)
    assert found is not None
    (cliff,) = found.extra["capacity_cliff"]
    assert cliff["measured_gain"] == pytest.approx(3.0)
    assert 2 < cliff["predicted_gain"] < 6


def test_held_out_predictions_come_from_the_folder_itself(raysearch, tmp_path: Path) -> None:
    rows = [
        {"framework": "vllm", "dtype": "bfloat16", "m": m, "n": n, "k": 1024, "latency_us": 10.0 + 1e-6 * m * n}
        for m in (1, 16, 128, 1024, 4096)
        for n in (256, 512, 1024, 2048, 4096, 8192)
    ]
    done = raysearch("validate", write(tmp_path, "gemm.csv", rows), "--set", "held_out", "--json")
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["gemm"]["mape"] < 0.5


def test_a_wrong_file_of_runs_is_an_input_error(tmp_path: Path) -> None:
    write(tmp_path, "endtoend_ttft_tpot.csv", [RUN | {"isl": "long"}])
    with pytest.raises(InputError, match="column isl"):
        read_serving_runs(tmp_path)


def test_a_run_that_states_a_batch_alone_is_one_replica() -> None:
    found = agg_run(RUN | {"concurrency": float("nan"), "batch_size": 16})
    assert isinstance(found, ServingRun)
    assert (found.replicas, found.strategy.batch, found.gpus) == (1, 16, 2)


OPEN = {
    "source": "InferenceX export tensorrtllm-runtime:0.8.1.post1",
    "backend": "trtllm",
    "backend_version": "0.8.1.post1",
    "model_path": "deepseek-ai/DeepSeek-R1",
    "system": "h200_sxm",
    "precision": "fp8",
    "isl": 1024.0,
    "osl": 1024.0,
    "decode_tp_size": 8.0,
    "decode_num_workers": float("nan"),
}
"""A row that states neither how many workers there are nor what they draft."""


@pytest.mark.parametrize(
    ("requests", "workers", "ranks", "drafted"),
    [(36.0, 9, 1, 0), (13.0, 11, 1, 3), (896.0, 7, 8, 3), (3584.0, 7, 8, 0)],
)
def test_workers_that_a_row_leaves_out_are_those_of_its_published_deployment(
    requests: float, workers: int, ranks: int, drafted: int
) -> None:
    row = completed(OPEN | {"concurrency": requests})
    assert isinstance(row, dict)
    assert (row["decode_num_workers"], row["draft_tokens"]) == (workers, drafted)
    assert (row["decode_attention_dp_size"], row["decode_tp_size"]) == (ranks, 8 // ranks)
    assert row["decode_moe_tp_size"] * row["decode_moe_ep_size"] == 8
    stated = OPEN | {"concurrency": requests, "decode_num_workers": 2.0}
    assert completed(stated) == stated


def test_a_row_that_fits_two_published_deployments_or_none_is_not_priced() -> None:
    both, none = (completed(OPEN | {"concurrency": requests}) for requests in (144.0, 37.0))
    assert isinstance(both, Skipped)
    assert both.reason.endswith("are published with and without drafted tokens")
    assert isinstance(none, Skipped)
    assert none.reason.endswith("no deployment of as many requests is published")


def test_rows_tell_two_deployments_apart_where_both_were_measured() -> None:
    slow, again, quick, alone = (
        OPEN | {"concurrency": requests, "silicon_tpot_ms": time_ms}
        for requests, time_ms in ((144.0, 9.0), (144.0, 9.04), (144.0, 5.5), (36.0, 7.0))
    )
    found = recipes_by_time([slow, quick, again, alone])
    assert [each and each.draft_tokens > 0 for each in found] == [False, True, False, None]
    row = completed(quick, found[1])
    assert isinstance(row, dict)
    assert row["draft_tokens"] == 3
    assert recipes_by_time([slow, again]) == [None, None]  # which of the two was measured is not known


def test_a_release_has_the_deployments_of_its_own_time() -> None:
    gb200 = OPEN | {"system": "gb200", "precision": "fp4", "concurrency": 144.0}
    earlier = completed(gb200 | {"backend_version": "0.5.1-rc0.pre3"})
    assert isinstance(earlier, dict)
    assert (earlier["decode_num_workers"], earlier["draft_tokens"]) == (4, 3)
    other = completed(gb200 | {"model_path": "zhipuai/GLM-5"})
    assert isinstance(other, Skipped)


def test_published_deployments_share_their_gpus_evenly() -> None:
    assert len(recipes()) > 200
    for found in recipes().values():
        for each in found:
            assert each.decode_gpus % each.decode_ep == 0
            assert min(each.prefill_workers, each.decode_workers, each.prefill_gpus) >= 1
