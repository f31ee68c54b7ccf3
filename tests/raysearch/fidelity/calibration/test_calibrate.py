"""`raysearch calibrate`: a folder of measurements in, a file of coefficients out."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from typer.testing import CliRunner

import raysearch as rs
from raysearch.base.errors import InputError
from raysearch.cli.app import app
from raysearch.cli.commands.calibrate import _SHARES, _row
from raysearch.fidelity.calibration import coefficients
from raysearch.fidelity.calibration.coefficients import fit_directory, kernels_of_sister
from raysearch.fidelity.calibration.fit import H100_SXM
from raysearch.fidelity.calibration.measured_tables import read_table
from sim.config.catalog import load_calibrated, load_calibration, load_hardware, load_machine, load_machine_header
from sim.config.files import config_path
from sim.json_object import JsonObject
from sim.prices.calibration import MissingSeries

H100 = partial(load_machine, "h100_sxm")


def calibrate(*arguments: object) -> dict[str, object]:
    result = CliRunner().invoke(app, ["calibrate", *map(str, arguments), "--json"], catch_exceptions=False)
    assert result.exit_code == 0
    return json.loads(result.stdout)


@pytest.fixture(scope="module")
def fitted(tmp_path_factory: pytest.TempPathFactory, gemms: pd.DataFrame) -> JsonObject:
    """Coefficients of what `measured` holds."""
    folder = tmp_path_factory.mktemp("fitted")
    gemms.to_csv(folder / "gemm.csv", index=False)
    return fit_directory(folder, {}, H100_SXM, H100)


@pytest.fixture
def fitted_before(monkeypatch: pytest.MonkeyPatch, fitted: JsonObject) -> None:
    """What `measured` holds is not fitted again where a test is about what lies beside it."""
    fit = coefficients._fit
    known = fitted["series"], fitted["families"]["gemm"]
    monkeypatch.setattr(coefficients, "_fit", lambda family, *rest: known if family == "gemm" else fit(family, *rest))


def test_a_folder_becomes_a_file_that_a_hardware_file_can_name_and_that_equal_rows_make_again(
    measured: Path, tmp_path: Path, fitted: JsonObject
) -> None:
    out = tmp_path / "mine.json"
    printed = calibrate(measured, "--out", out, "--set", "source=own machine")
    assert printed["written"] is True
    families = printed["families"]
    assert isinstance(families, dict)
    assert families["gemm"]["rows"] == 300
    assert families["gemm"]["median_ape"] < 0.05 < families["gemm"]["bare_roofline_mape"]
    assert families["moe"] == {"rows": 0, "file": "moe.csv", "left_at_defaults": "no file"}
    assert json.loads(out.read_text())["provenance"]["source"] == "own machine"
    assert json.loads(out.read_text())["series"] == json.loads(json.dumps(fitted))["series"]
    assert list(load_calibration(out).series) == ["gemm/trtllm/fp8"]
    hardware = config_path("hardware", "h100_sxm").read_text().replace('"h100_sxm"', '"mine.json"', 2)
    (tmp_path / "mine.toml").write_text(hardware.replace('name = "mine.json"', 'name = "mine"'))
    assert load_hardware(tmp_path / "mine.toml").curves is not None


RUNS = """id,backend,backend_version,model_path,mode,gemm_quant_mode,isl,osl,silicon_tpot_ms,concurrency,batch_size,\
tp_size,attention_dp_size,moe_tp_size,moe_ep_size
run,sglang,0.5,meta-llama/Llama-3.1-8B-Instruct,agg,,1024,256,9.0,16,16,2,,1,1
"""


@pytest.mark.usefixtures("fitted_before")
def test_serving_runs_beside_too_few_kernels_leave_serving_at_the_defaults(measured: Path, tmp_path: Path) -> None:
    (measured / "endtoend_ttft_tpot.csv").write_text(RUNS)
    printed = calibrate(measured, "--out", tmp_path / "mine.json")
    serving = printed["serving"]
    assert isinstance(serving, dict)
    assert serving["unpredicted"] == 1
    assert "needs a kernel that no file measures" in serving["left_at_defaults"]
    assert list(load_calibration(tmp_path / "mine.json").series) == ["gemm/trtllm/fp8"]
    with pytest.raises(MissingSeries, match="attention_decode/sglang/bf16/gqa"):
        load_calibration(tmp_path / "mine.json").attention_decode_us("sglang", "bf16", 1, 64, 8, 2, 128)


def test_only_with_force_is_other_content_replaced(
    measured: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fitted: JsonObject
) -> None:
    monkeypatch.setattr(coefficients, "fit_directory", lambda *_: fitted)
    out = tmp_path / "mine.json"
    calibrate(measured, "--out", out)
    assert calibrate(measured, "--out", out)["written"] is False
    out.write_text("something of mine")
    with pytest.raises(InputError, match=r"has other content; give --set force"):
        calibrate(measured, "--out", out)
    assert out.read_text() == "something of mine"
    assert calibrate(measured, "--out", out, "--set", "force")["written"] is True
    assert sorted(path.name for path in tmp_path.iterdir()) == ["measured", "mine.json"]


@pytest.mark.parametrize(
    ("old", "new", "complaint"),
    [
        ("latency_us", "latency_ms", r"gemm.csv: no column 'latency_us'; did you mean 'latency_ms'\?"),
        ("trtllm,fp8,", "trtllm,fp4,", r"gemm.csv, line 2, column dtype: .*got 'fp4'"),
        ("trtllm,fp8,", "trtllm,fp8,-", r"gemm.csv, line 2, column m: .*got '-"),
        ("trtllm,", "trt/llm,", r"gemm.csv, line 2, column framework: expected a name of letters.*, got 'trt/llm'"),
        ("trtllm,", ",", r"gemm.csv, line 2, column framework: expected a name of letters.*, got ''"),
        ("trtllm,", '"trt llm",', r"gemm.csv, line 2, column framework: expected a name of letters.*, got 'trt llm'"),
        ("\n", "\ntrtllm,fp8,1,1,1,nan\n", r"gemm.csv, line 2, column latency_us: .*got 'nan'"),
        ("\n", "\ntrtllm,fp8,1,1,1,0\n", r"gemm.csv, line 2, column latency_us: .*got '0'"),
    ],
)
def test_a_bad_file_is_met_with_its_line_and_column(measured: Path, old: str, new: str, complaint: str) -> None:
    path = measured / "gemm.csv"
    path.write_text(path.read_text().replace(old, new, 1))
    with pytest.raises(InputError, match=complaint):
        read_table(measured, "gemm")


def test_an_empty_or_missing_folder_names_what_it_should_hold(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"none of the files to fit: gemm\.csv, "):
        fit_directory(tmp_path, {}, H100_SXM, H100)
    with pytest.raises(InputError, match="no such folder"):
        fit_directory(tmp_path / "nowhere", {}, H100_SXM, H100)


def test_a_handful_of_rows_is_no_calibration(measured: Path) -> None:
    path = measured / "gemm.csv"
    path.write_text("\n".join(path.read_text().splitlines()[:20]) + "\n")
    with pytest.raises(InputError, match=r"too few rows to fit: gemm\.csv has 19 rows, 30 are needed"):
        fit_directory(measured, {}, H100_SXM, H100)
    path.write_text("\n".join(path.read_text().splitlines()[:2]) + "\n")
    with pytest.raises(InputError, match=r"gemm\.csv has 1 row, 30 are needed"):
        fit_directory(measured, {}, H100_SXM, H100)


def test_a_series_of_few_rows_is_left_at_the_defaults(measured: Path, gemms: pd.DataFrame) -> None:
    few = gemms.head(20).assign(framework="vllm")
    alike = gemms.head(40).assign(framework="sglang", m=range(1, 41), n=4096, k=4096)
    pd.concat([gemms.tail(60), few, alike]).to_csv(measured / "gemm.csv", index=False)
    content = fit_directory(measured, {}, H100_SXM, H100)
    assert list(content["series"]) == ["gemm/trtllm/fp8"]
    left = content["families"]["gemm"]["series_left_at_defaults"]
    assert left["gemm/vllm/fp8"] == "has 20 rows, 30 are needed"
    assert "could not be cross-validated" in left["gemm/sglang/fp8"]
    assert content["families"]["gemm"]["rows"] == 60


@pytest.mark.usefixtures("fitted_before")
def test_a_family_that_cannot_be_cross_validated_is_named_in_the_table(measured: Path, tmp_path: Path) -> None:
    sizes = np.arange(40)
    rows = {"mla_dtype": "bfloat16", "kv_cache_dtype": "fp8", "batch_size": 8, "kv_len": 1024, "num_heads": 16}
    pd.DataFrame(rows | {"latency_us": 20.0 + sizes}).to_csv(measured / "mla_decode.csv", index=False)
    out = tmp_path / "mine.json"
    result = CliRunner().invoke(app, ["calibrate", str(measured), "-o", str(out)], catch_exceptions=False)
    assert result.exit_code == 0
    assert "cross-validated" in result.stdout
    assert json.loads(out.read_text())["families"]["mla_decode"]["rows"] == 0
    assert _row("gemm", {"rows": 0, **dict.fromkeys(_SHARES)})[1:] == ("0", "-", "-", "-", "-", "-")


def test_the_shipped_hardware_has_the_peaks_its_calibration_was_fitted_under() -> None:
    data = load_calibration("h100_sxm").data
    assert load_machine_header("h100_sxm") == {name: data[name] for name in H100_SXM} == H100_SXM


def test_the_shipped_coefficients_say_where_they_come_from_and_how_good_they_are() -> None:
    data = load_calibration("h100_sxm").data
    assert "Apache-2.0" in data["provenance"]["source"]
    assert data["provenance"]["date"]
    for figures in data["families"].values():
        assert 0.85 <= figures["coverage"] <= 0.95
    targets = {"gemm": 0.065, "attention_decode": 0.06, "collectives": 0.08, "moe_alltoall_deepep": 0.05}
    for family, target in targets.items():
        assert data["families"][family]["mape"] <= target
        assert data["families"][family]["rows"] > 1000
    assert data["families"]["moe"]["median_ape"] <= 0.10
    assert data["families"]["attention_prefill"]["mape"] <= 0.10


def test_kernels_of_formats_that_were_not_measured_are_those_of_a_machine_with_the_same_chip() -> None:
    header, h200 = load_machine_header("h100_sxm"), load_calibrated("h200_sxm")
    own: dict[str, JsonObject] = {"gemm/vllm/bf16": {}, "moe/vllm/some_kernel/fp8": {}}
    taken = kernels_of_sister(own, header, h200)
    assert not {"gemm/vllm/bf16", "send_recv/intra", *own} & set(taken)
    assert not [name for name in taken if name.startswith("moe/vllm/") and name.endswith("/fp8")]  # a kernel is known
    assert all(record["measured_on"] == "h200_sxm" for record in taken.values())
    mxfp4 = "moe/trtllm/moe_torch_flow/mxfp4"
    assert {**taken[mxfp4], "measured_on": None} == {**h200.series[mxfp4], "measured_on": None}
    with pytest.raises(InputError, match="is no sister: its bf16_tflops is"):
        kernels_of_sister(own, header, load_calibrated("b200_sxm"))


def test_what_was_measured_on_a_sister_counts_as_extrapolated() -> None:
    found = rs.evaluate(rs.question(model="gpt_oss_120b", isl=2000, osl=100, engine="vllm"), tp=2, batch=64).evaluation
    assert "vllm mxfp4 experts as measured on h200_sxm" in str(found.extrapolated)
