"""Hardware without a calibration of its own takes over the efficiencies of one that has, at its own peak rates."""

from __future__ import annotations

from pathlib import Path

import pytest

from sim.config.catalog import load_hardware, load_workload
from sim.config.files import CatalogError, config_path
from sim.layers.heuristics import megatron_dims
from sim.simulate import evaluate
from sim.strategy import Strategy


@pytest.mark.parametrize("workload", ["gpt_moe_1_2t_16k", "gpt_moe_1_2t_64k", "llama_3_1_405b_8k"])
@pytest.mark.parametrize("batch", [64, 256])
def test_an_h200_decodes_faster_than_an_h100_by_no_more_than_its_memory(workload: str, batch: int) -> None:
    old, new = (load_workload(workload, hardware=name) for name in ("h100_sxm", "h200_sxm"))
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


def test_one_cannot_have_a_calibration_and_borrow_another(tmp_path: Path) -> None:
    text = config_path("hardware", "h200_sxm").read_text(encoding="utf-8")
    path = tmp_path / "both.toml"
    path.write_text(text.replace("scaled_from", 'calibration = "h100_sxm"\nscaled_from'), encoding="utf-8")
    with pytest.raises(CatalogError, match=r"give calibration .* or scaled_from .*, not both"):
        load_hardware(path)
    path.write_text(text.replace('scaled_from = "h100_sxm"', 'scaled_from = "h200_sxm"'), encoding="utf-8")
    with pytest.raises(CatalogError, match="'h200_sxm', which has no calibration"):
        load_hardware(path)
    measured = config_path("hardware", "h100_sxm").read_text(encoding="utf-8")
    path.write_text(measured.replace("bandwidth_gb_per_s = 3350.0", "bandwidth_gb_per_s = 4800.0"), encoding="utf-8")
    with pytest.raises(CatalogError, match=r"hbm_gb_per_s = 3350.*scale it to this machine with `scaled_from`"):
        load_hardware(path)
