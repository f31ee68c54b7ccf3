"""Simulators of other packages, as far as they can be asked without being installed."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from raysearch.base.errors import InputError
from raysearch.simulators import aisimulate, genz
from sim.config.catalog import load_workload
from sim.ops.heuristics import megatron_dims
from sim.strategy import Strategy
from sim.workload import Speculation


@pytest.mark.parametrize("measure", [genz.measure, aisimulate.measure])
@pytest.mark.parametrize(
    ("changes", "what"),
    [
        ({"speculation": Speculation(1, (0.8,))}, "speculative decoding"),
        ({"redundant_experts": 8}, "redundant experts"),
    ],
)
def test_what_they_would_leave_out_is_refused(
    measure: Callable[..., object], changes: dict[str, object], what: str
) -> None:
    workload = replace(load_workload("mixtral_8x22b_8k"), **changes)
    with pytest.raises(InputError, match=f"does not model {what}"):
        measure(workload, Strategy(1, 1, 1, 8, megatron_dims(workload.model)))


def test_a_deployment_of_a_forecast_is_asked_of_aisimulate_in_its_words(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Requests of a rank, degrees of attention and of experts; of pools and drafts it is not asked."""
    package = tmp_path / "aisimulate" / "legacy_cli"
    package.mkdir(parents=True)
    for each in (package.parent, package):
        (each / "__init__.py").write_text("")
    lines = (
        "class Found:",
        "    tpot = 12.5",
        "def cli_estimate(**asked):",
        "    Found.asked = asked",
        "    return Found",
    )
    (package / "api.py").write_text("\n".join(lines))
    monkeypatch.syspath_prepend(tmp_path)
    for name in ("aisimulate", "aisimulate.legacy_cli", "aisimulate.legacy_cli.api"):
        monkeypatch.setitem(sys.modules, name, sys)  # so that what is imported here goes when the test ends
        del sys.modules[name]
    worker = {"count": 1, "gpus": 8, "ep": 8, "dp": 4, "pp": 1}
    prediction = {"model": "deepseek_v3", "machine": "gb200_nvl72", "engine": "trtllm", "precision": "fp4"}
    prediction |= {"isl": 8192, "osl": 1024, "draft_tokens": 0, "requests": 30, "decode": worker}
    assert aisimulate.forecast_tpot_ms(prediction) == 12.5
    asked = importlib.import_module("aisimulate.legacy_cli.api").Found.asked
    assert (asked["model_path"], asked["system_name"]) == ("deepseek-ai/DeepSeek-V3", "gb200")
    assert (asked["batch_size"], asked["tp_size"], asked["attention_dp_size"]) == (8, 2, 4)
    assert (asked["moe_tp_size"], asked["moe_ep_size"], asked["moe_quant_mode"]) == (1, 8, "nvfp4")
    assert aisimulate.forecast_tpot_ms({**prediction, "draft_tokens": 1}) is None
    assert aisimulate.forecast_tpot_ms({**prediction, "prefill": worker}) is None
