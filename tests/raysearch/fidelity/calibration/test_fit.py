"""The fit finds what it was given, shrugs at outliers, and is judged on rows that it never saw."""

from __future__ import annotations

import numpy as np
import pandas as pd
import pytest

from raysearch.fidelity.calibration.fit import (
    H100_SXM,
    cross_validated,
    errors,
    fit_family,
    fold_numbers,
    inside_interval,
    interval,
    interval_groups,
)
from raysearch.fidelity.calibration.lattice import Lattice, LatticePart, fit_terms
from raysearch.fidelity.calibration.predict import bare_roofline, moe_routing, predict, series_of
from sim.prices.tables import made_monotone


def test_terms_are_found_whatever_the_outliers() -> None:
    rng = np.random.default_rng(1)
    phi = np.exp(rng.uniform(-2, 2, (200, 3)))
    time = phi @ [1.0, 0.0, 3.0]
    time[:20] *= 30
    assert fit_terms(phi, time) == pytest.approx([1.0, 0.0, 3.0], abs=0.02)


def test_a_correction_keeps_the_table_from_falling_where_the_rows_do() -> None:
    lattice = Lattice([[1, 2, 4, 8]], [LatticePart([[1, 2, 4, 8]], (1e-4,), (1e-4,))], (0,), (1,), iterations=1000)
    points = lattice.points.repeat(20, axis=0)
    rows = np.array([0.0, 1.0, 0.5, 2.0]).repeat(20)  # falls in the middle
    found = lattice.spread @ lattice.correction(points, rows, np.zeros(4))
    assert (np.diff(found) >= -1e-3).all()
    assert found == pytest.approx([0.0, 0.75, 0.75, 2.0], abs=0.05)
    assert made_monotone(found, (4,), (0,)) == pytest.approx(found, abs=1e-3)


def test_a_made_up_machine_is_recovered_on_rows_held_out(gemms: pd.DataFrame) -> None:
    clean = slice(10, None)  # the first ten rows are the outliers
    held_out = cross_validated("gemm", gemms, H100_SXM)[clean]
    measured = gemms["latency_us"].to_numpy()[clean]
    assert errors(held_out, measured)["median_ape"] < 0.05
    assert (
        errors(held_out, measured)["median_ape"]
        < errors(bare_roofline("gemm", gemms, H100_SXM)[clean], measured)["median_ape"]
    )


def test_the_fit_does_not_depend_on_the_order_of_the_rows(gemms: pd.DataFrame) -> None:
    shuffled = gemms.sample(frac=1, random_state=3)
    found = [predict("gemm", gemms, fit_family("gemm", rows)) for rows in (gemms, shuffled)]
    assert found[0] == pytest.approx(found[1], rel=0.02)  # percent integers are what is kept


def test_rows_of_one_shape_never_lie_on_both_sides_of_a_fold(gemms: pd.DataFrame) -> None:
    fold = fold_numbers("gemm", gemms)
    assert set(fold) == set(range(5))
    assert (pd.Series(fold).groupby([gemms["n"], gemms["k"]]).nunique() == 1).all()


def test_a_series_that_was_never_fitted_has_no_prediction(gemms: pd.DataFrame) -> None:
    other = gemms.assign(framework="vllm")
    assert np.isnan(predict("gemm", other, fit_family("gemm", gemms))).all()
    assert set(series_of("gemm", other)) == {"gemm/vllm/fp8"}


@pytest.mark.parametrize(("family", "length"), [("attention_decode", "kv_len"), ("attention_prefill", "isl")])
def test_kernels_under_a_sliding_window_depart_from_those_of_the_whole_context(family: str, length: str) -> None:
    rng = np.random.default_rng(5)
    rows = pd.DataFrame({"batch_size": 2 ** rng.integers(0, 8, 240), length: 2 ** rng.integers(6, 13, 240)})
    rows = rows.assign(framework="vllm", num_heads=16, num_kv_heads=4, head_dim=128, kv_cache_dtype="bfloat16")
    rows = rows.assign(attn_dtype="bfloat16", window_size=np.where(np.arange(240) % 3 == 0, 256, 0))
    seen = np.where(rows["window_size"] > 0, np.minimum(rows[length], 256), rows[length]) / 1e3
    pairs = rows["batch_size"] * (seen * rows[length] / 1e3 - (family == "attention_prefill") * seen**2 / 2)
    work = pairs if family == "attention_prefill" else rows["batch_size"] * seen
    rows["latency_us"] = (10 + 20 * work) * np.where(rows["window_size"] > 0, 1.4, 1.0)
    found, windowed = fit_family(family, rows), rows["window_size"] > 0
    for part in (rows.loc[windowed], rows.loc[~windowed]):
        assert errors(predict(family, part, found), part["latency_us"].to_numpy())["median_ape"] < 0.08
    assert sum(name.endswith("/window") for name in found.series) == 1
    without = fit_family(family, rows.loc[~windowed])
    assert errors(predict(family, rows.loc[windowed], without), rows.loc[windowed, "latency_us"])["bias"] < -0.15


def test_rows_far_from_small_sizes_leave_no_vertex_without_a_time() -> None:
    rng = np.random.default_rng(3)
    batch, kv_len = 2 ** rng.integers(9, 15, 60), 2 ** rng.integers(4, 8, 60)
    heads = {"num_heads": 8, "num_kv_heads": 2, "head_dim": 128}
    rows = pd.DataFrame({"framework": "vllm", "kv_cache_dtype": "fp8", "batch_size": batch, "kv_len": kv_len, **heads})
    rows["latency_us"] = 0.05 * (2 * batch - 528)  # exactly a term that is zero for few streams
    found = fit_family("attention_decode", rows)
    few, many = (found.attention_decode_us("vllm", "fp8", b, 128, 8, 2, 128) for b in (1, 2**14))
    assert 1 < few < many
    assert errors(predict("attention_decode", rows, found), rows["latency_us"].to_numpy())["median_ape"] < 0.05


def test_nine_in_ten_rows_held_out_lie_in_an_interval_that_has_not_seen_them() -> None:
    rng = np.random.default_rng(5)
    n, k = (2 ** rng.integers(7, 14, 1000) for _ in range(2))
    rows = pd.DataFrame({"framework": "vllm", "dtype": "fp8", "m": 2 ** rng.integers(0, 12, 1000), "n": n, "k": k})
    predicted = np.full(1000, 10.0)
    for noise in (rng.normal(0, 0.1, 1000), rng.exponential(0.3, 1000)):
        rows["latency_us"] = 10 * np.exp(noise)
        assert 0.86 <= inside_interval("gemm", rows, predicted).mean() <= 0.93
        low, high = interval(predicted, rows["latency_us"].to_numpy())
        assert np.mean((noise >= np.log(low)) & (noise <= np.log(high))) == pytest.approx(0.9, abs=0.005)


def test_an_interval_knows_nothing_of_the_fold_that_it_judges() -> None:
    rows = pd.DataFrame({"framework": "vllm", "dtype": "fp8", "m": 1, "n": [128, 256, 512, 1024, 2048] * 20, "k": 128})
    fold = fold_numbers("gemm", rows)
    rows["latency_us"] = np.where(fold == 0, 20.0, 10.0)  # one fold is off by as much as no other
    inside = inside_interval("gemm", rows, np.full(100, 10.0))
    assert not inside[fold == 0].any()
    assert inside[fold != 0].all()


def test_ranks_of_one_release_multiplied_every_choice_of_the_tokens_that_visit_them() -> None:
    layer = {"framework": ["sglang", "sglang", "vllm"], "distribution": "balanced"}
    rows = pd.DataFrame(layer | {"framework_version": ["0.5.10", "0.5.14", "0.5.10"]})
    assert [moe_routing(row)["all_choices"] for row in rows.itertuples()] == [True, False, False]
    unstated = rows[list(layer)].itertuples()
    assert not any(moe_routing(row)["all_choices"] for row in unstated)


def test_experts_that_a_gpu_has_almost_to_itself_have_an_interval_of_their_own() -> None:
    layer = {"framework": "vllm", "kernel_source": "x", "dtype": "fp8", "num_tokens": 64, "hidden_size": 4096}
    layer |= {"inter_size": 1024, "topk": 2, "num_experts": 8, "moe_tp_size": 1, "distribution": "balanced"}
    rows = pd.DataFrame([layer | {"num_experts": 32, "moe_ep_size": ep, "latency_us": 1.0} for ep in (1, 2, 4, 8)])
    assert list(interval_groups("moe", rows)) == ["moe/vllm/x/fp8"] * 2 + ["moe/vllm/x/fp8 few"] * 2
