"""A margin keeps a share of SLO and memory free; what stays nearer to a limit than its error is said so."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from sim.config.catalog import load_workload
from sim.config.files import CatalogError
from sim.nearness import near_limits
from sim.ops.heuristics import megatron_dims
from sim.optimum.exact_search import find_best
from sim.optimum.landscape import find_optimum
from sim.optimum.spaces import paper_space
from sim.simulate import evaluate
from sim.strategy import Strategy
from sim.workload import DegreeTables, Workload

SHIPPED = Path(__file__).resolve().parents[2] / "configs/workloads/gpt_moe_1_2t_16k.toml"


def strategy_of(workload: Workload) -> Strategy:
    return Strategy(2, 2, 1, 16, megatron_dims(workload.model))


def test_a_margin_takes_its_share_of_both_limits(toy_moe: Workload) -> None:
    plain = evaluate(toy_moe, strategy_of(toy_moe))
    hardware = replace(toy_moe.hardware, hbm_bytes=plain.memory_bytes.total / 0.96)
    limited = replace(toy_moe, tpot_slo_s=plain.tpot_s / 0.96, hardware=hardware)
    assert evaluate(replace(limited, margin=0.03), strategy_of(toy_moe)).feasible
    broken = evaluate(replace(limited, margin=0.05), strategy_of(toy_moe)).violations
    assert [violation.kind for violation in broken] == ["hbm", "tpot"]
    for violation, limit in zip(broken, (hardware.hbm_bytes, limited.tpot_slo_s), strict=True):
        assert violation.allowed == pytest.approx(0.95 * limit)
        assert "less a margin of 5.0%" in violation.message


@pytest.mark.parametrize("margin", [0.1, 0.6])
def test_both_solvers_keep_the_margin(toy_moe: Workload, margin: float) -> None:
    degrees = DegreeTables((1, 2, 4), (1, 2), (1, 2), (4, 16))
    loose = replace(toy_moe, degrees=degrees, space="paper")
    fastest = find_best(paper_space(loose)).evaluation
    assert fastest is not None
    hbm_bytes, tpot_s = fastest.memory_bytes.total, fastest.tpot_s
    tight = replace(loose, tpot_slo_s=tpot_s, hardware=replace(loose.hardware, hbm_bytes=hbm_bytes))
    kept = replace(tight, margin=margin)
    # A margin is the same as smaller limits.
    small = replace(
        tight,
        tpot_slo_s=tpot_s * (1 - margin),
        hardware=replace(tight.hardware, hbm_bytes=hbm_bytes * (1 - margin)),
    )
    assert find_optimum(kept).feasible_count == find_optimum(small).feasible_count < find_optimum(tight).feasible_count
    best, fastest_counted = find_best(paper_space(kept)).evaluation, find_optimum(kept).fastest
    assert (best is None) == (fastest_counted == 0.0)
    if best:
        assert best.tokens_per_s_per_gpu == pytest.approx(fastest_counted, rel=5e-4)
        assert best.tokens_per_s_per_gpu < fastest.tokens_per_s_per_gpu


def test_a_limit_that_is_nearer_than_the_error_is_named(toy_moe: Workload) -> None:
    plain = evaluate(toy_moe, strategy_of(toy_moe))
    error = plain.expected_error

    def kinds(tpot_slack: float, memory_slack: float) -> list[str]:
        hardware = replace(toy_moe.hardware, hbm_bytes=plain.memory_bytes.total / (1 - memory_slack))
        limited = replace(toy_moe, tpot_slo_s=plain.tpot_s / (1 - tpot_slack), hardware=hardware)
        return [near.kind for near in near_limits(limited, evaluate(limited, strategy_of(limited)))]

    assert kinds(0.5 * error, 0.5) == ["tpot"]
    assert kinds(min(0.99, 1.5 * error), 0.02) == ["hbm"]
    assert kinds(min(0.99, 1.5 * error), 0.5) == []
    assert kinds(-0.1, 0.5) == []  # broken, and told as such


def test_a_workload_file_may_name_its_margin(tmp_path: Path) -> None:
    path = tmp_path / "mine.toml"
    path.write_text("margin = 0.05\n" + SHIPPED.read_text(encoding="utf-8"), encoding="utf-8")
    mine, shipped = load_workload(path), load_workload(SHIPPED)
    assert (mine.margin, shipped.margin) == (0.05, 0.0)
    assert mine.config_hash == load_workload(SHIPPED, margin=0.05).config_hash != shipped.config_hash
    path.write_text("margin = 1.0\n" + SHIPPED.read_text(encoding="utf-8"), encoding="utf-8")
    with pytest.raises(CatalogError, match="margin"):
        load_workload(path)
