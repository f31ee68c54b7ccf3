"""Simulators of other packages, as far as they can be asked without being installed."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

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
    with pytest.raises(InputError, match=f"knows no {what}"):
        measure(workload, Strategy(1, 1, 1, 8, megatron_dims(workload.model)))
