"""Hardware without a calibration of its own takes over the efficiencies of one that has, at its own peak rates."""

from __future__ import annotations

import json
import pickle
from pathlib import Path

import pytest

from sim.config.catalog import load_calibration, load_hardware, load_machine_header, load_workload
from sim.config.files import CatalogError, config_path
from sim.ops.heuristics import megatron_dims
from sim.prices.curves import Curves, DecodeAttention, Gemm
from sim.simulate import evaluate
from sim.strategy import Strategy


@pytest.fixture
def carried_over(tmp_path: Path) -> Path:
    """An H200 of which nothing was measured."""
    text = config_path("hardware", "h200_sxm").read_text(encoding="utf-8")
    path = tmp_path / "carried_over.toml"
    path.write_text(text.replace('calibration = "h200_sxm"\n', ""), encoding="utf-8")
    return path


@pytest.mark.parametrize("workload", ["gpt_moe_1_2t_16k", "gpt_moe_1_2t_64k", "llama_3_1_405b_8k"])
@pytest.mark.parametrize("batch", [64, 256])
def test_an_h200_decodes_faster_than_an_h100_by_no_more_than_its_memory(
    workload: str, batch: int, carried_over: Path
) -> None:
    old, new = (load_workload(workload, hardware=name) for name in ("h100_sxm", carried_over))
    degrees = (8, 8, 2) if old.model.is_moe else (8, 1, 2)
    strategy = Strategy(*degrees, batch, megatron_dims(old.model))
    gain = evaluate(old, strategy).tpot_s / evaluate(new, strategy).tpot_s
    assert 1 < gain < 4800 / 3350
    assert any("efficiencies carried over from h100_sxm" in what for what in evaluate(new, strategy).extrapolated)
    assert evaluate(new, strategy).expected_error > evaluate(old, strategy).expected_error


def test_scaling_to_the_measured_machine_itself_changes_no_time(tmp_path: Path) -> None:
    text = config_path("hardware", "h100_sxm").read_text(encoding="utf-8")
    path = tmp_path / "same.toml"
    path.write_text(text.replace('calibration = "h100_sxm"', 'scaled_from = "h100_sxm"'), encoding="utf-8")
    old, new = (load_workload("gpt_moe_1_2t_16k", hardware=name) for name in ("h100_sxm", path))
    strategy = Strategy(8, 8, 2, 64, megatron_dims(old.model))
    assert evaluate(old, strategy).tpot_s == evaluate(new, strategy).tpot_s


def test_scaling_twice_is_scaling_once_to_the_last_machine() -> None:
    measured, headers = load_calibration("h100_sxm"), [load_machine_header(name) for name in ("b200_sxm", "h200_sxm")]
    once, twice = measured.scaled_to(headers[1]), measured.scaled_to(headers[0]).scaled_to(headers[1])
    assert twice.data == once.data
    back = measured.scaled_to(headers[0]).scaled_to({part: measured.data[part] for part in headers[0]})
    # Links are as fast as where messages were measured, and a message takes what was measured, to the bit.
    assert back.send_recv_us("intra", 1e6) == measured.send_recv_us("intra", 1e6)
    # Over links half as fast, twice over, 1 MB takes what 4 MB took: launch, 4 MB, their root, what sets in up to 1 MB.
    terms = zip(measured.series["send_recv/intra"]["terms"], (1, 4, 2, 1, 0.1), strict=True)
    header = {part: dict(measured.data[part]) for part in headers[0]}
    scaled = measured
    for _ in range(2):
        header["speed_of_light"]["nvlink_gb_per_s"] /= 2
        scaled = scaled.scaled_to(header)
    assert scaled.send_recv_us("intra", 1e6) == pytest.approx(sum(each * size for each, size in terms))


@pytest.fixture
def half_measured(tmp_path: Path, carried_over: Path) -> Path:
    """An H200 of which GEMMs alone were measured."""
    measured = json.loads(config_path("calibration", "h100_sxm").read_text(encoding="utf-8"))
    gemms = {name: record for name, record in measured["series"].items() if name.startswith("gemm/")}
    own = {**measured, **load_machine_header("h200_sxm"), "series": gemms, "serving": {}}
    (tmp_path / "gemms.json").write_text(json.dumps(own), encoding="utf-8")
    text = carried_over.read_text(encoding="utf-8")
    path = tmp_path / "half.toml"
    path.write_text(text.replace("scaled_from", 'calibration = "gemms.json"\nscaled_from'), encoding="utf-8")
    return path


def test_what_a_calibration_lacks_is_carried_over_from_the_machine_that_is_named(
    half_measured: Path, carried_over: Path
) -> None:
    half, carried = load_hardware(half_measured).curves, load_hardware(carried_over).curves
    assert half is not None
    assert carried is not None
    own = Curves(load_calibration(half_measured.with_name("gemms.json")), "trtllm", "trtllm")
    gemm, attention = Gemm(64, 4096, 4096), DecodeAttention(32, 4000, 8, 1, 128, multi_head=False)
    assert half.kernel(gemm, "fp8", "fp8") == own.kernel(gemm, "fp8", "fp8")
    assert half.kernel(gemm, "fp8", "fp8") != carried.kernel(gemm, "fp8", "fp8")
    assert half.kernel(attention, "bf16", "fp8") == carried.kernel(attention, "bf16", "fp8") is not None
    assert half.collective("all_reduce", 8, 1e6) == carried.collective("all_reduce", 8, 1e6) is not None
    assert half.send_recv(same_node=True, sent_bytes=1e6) == carried.send_recv(same_node=True, sent_bytes=1e6)
    sent = ("dispatch", 64, 7168, 1.0, 256, 8, 8, 1)
    assert half.expert_all_to_all(*sent) == carried.expert_all_to_all(*sent) is not None
    again = pickle.loads(pickle.dumps(half))
    assert again.kernel(attention, "bf16", "fp8") == half.kernel(attention, "bf16", "fp8")


def test_a_machine_measured_in_part_says_so_and_keeps_its_bar(half_measured: Path, carried_over: Path) -> None:
    half, carried, whole = (
        load_workload("llama_3_1_405b_8k", hardware=name) for name in (half_measured, carried_over, "h100_sxm")
    )
    strategy = Strategy(8, 1, 2, 64, megatron_dims(half.model))
    mine, its, measured = (evaluate(workload, strategy) for workload in (half, carried, whole))
    assert any("efficiencies carried over from h100_sxm" in what for what in mine.extrapolated)
    assert "what was not measured here is of h100_sxm" in mine.interval_because
    bar, known = (each.tpot_interval_s[1] / each.tpot_interval_s[0] for each in (mine, measured))
    assert bar > known * 1.3
    assert mine.expected_error < its.expected_error
    assert len({half.config_hash, carried.config_hash, whole.config_hash}) == 3


def test_a_machine_measured_by_nobody_lends_nothing(tmp_path: Path, half_measured: Path, carried_over: Path) -> None:
    text = carried_over.read_text(encoding="utf-8")
    path = tmp_path / "both.toml"
    path.write_text(text.replace('scaled_from = "h100_sxm"', f'scaled_from = "{carried_over}"'), encoding="utf-8")
    with pytest.raises(CatalogError, match="'h200_sxm', which has no calibration"):
        load_hardware(path)
    path.write_text(text.replace('scaled_from = "h100_sxm"', f'scaled_from = "{half_measured}"'), encoding="utf-8")
    with pytest.raises(CatalogError, match="its own efficiencies from another"):
        load_hardware(path)
    measured = config_path("hardware", "h100_sxm").read_text(encoding="utf-8")
    path.write_text(measured.replace("bandwidth_gb_per_s = 3350.0", "bandwidth_gb_per_s = 4800.0"), encoding="utf-8")
    with pytest.raises(CatalogError, match=r"hbm_gb_per_s = 3350.*scale it to this machine with `scaled_from`"):
        load_hardware(path)
