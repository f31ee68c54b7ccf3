"""Intervals of serving runs hold nine of ten rows that they have not seen: narrow where runs agree, else wide."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from raysearch.fidelity.calibration.intervals import Residuals, coverage, fit_widths, held_out_coverage, inside

ROWS = 400


def made(seed: int, *, offset: float = 0.0, experts: float = 0.0) -> Residuals:
    """Runs whose scatter grows with the share of prompts, in five groups."""
    rng = np.random.default_rng(seed)
    share, moe = rng.uniform(0, 0.6, ROWS), rng.random(ROWS) < 0.4
    log = offset + rng.normal(0, 0.05 + 0.3 * share + experts * moe)
    return Residuals(log, share, moe, np.ones((ROWS, 2)), rng.integers(0, 5, ROWS).tolist(), few=False)


def test_nine_of_ten_runs_of_groups_held_out_lie_inside() -> None:
    kept = held_out_coverage(made(0, experts=0.05))
    assert 0.87 <= kept["all"] <= 0.95
    for share in (kept["dense"], kept["moe"], *kept["by_share_of_prompts"].values()):
        assert 0.8 <= share <= 0.99
    assert list(kept["by_share_of_prompts"]) == ["0-0.05", "0.05-0.15", "0.15-0.4", "0.4-1"]


def test_widths_grow_with_the_share_of_prompts_and_with_experts() -> None:
    widths = fit_widths(made(0, experts=0.1))
    few, many = widths.at(0.0, moe=False), widths.at(0.6, moe=False)
    assert many[0] < few[0] < 1 < few[1] < many[1]
    assert widths.at(0.3, moe=True)[1] > widths.at(0.3, moe=False)[1]
    # 1.645 standard deviations hold nine of ten
    assert np.log(widths.at(0.3, moe=False)[1]) == pytest.approx(1.645 * 0.14, rel=0.35)


def test_runs_that_all_err_to_one_side_get_a_one_sided_interval() -> None:
    widths = fit_widths(made(1, offset=2.0))
    assert widths.low == (0.0, 0.0, 0.0)
    low, high = widths.at(0.0, moe=False)
    assert low == 1.0
    assert high > np.exp(2)


def test_of_few_groups_the_wider_side_holds_for_both_and_experts_have_no_width_of_their_own() -> None:
    few = replace(made(1, offset=2.0, experts=0.1), few=True)
    widths = fit_widths(few)
    assert widths.low == widths.high
    assert widths.high[2] == 0.0
    assert inside(few, [widths] * ROWS).mean() >= 0.9


def test_kernels_wider_than_usual_widen_the_interval_and_narrow_ones_do_not() -> None:
    residuals = made(2)
    widths = [fit_widths(residuals)] * ROWS
    alone = inside(residuals, widths)
    narrow = inside(replace(residuals, kernels=np.tile([1.2, 0.8], (ROWS, 1))), widths)
    wide = inside(replace(residuals, kernels=np.tile([0.5, 2.0], (ROWS, 1))), widths)
    assert (narrow == alone).all()
    assert (wide >= alone).all()
    assert wide.sum() > alone.sum()
    assert coverage(residuals, alone)["rows"] == ROWS
