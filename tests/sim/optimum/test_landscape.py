"""The exact optimum against brute force on small spaces, and against sampling on the real ones."""

from __future__ import annotations

import dataclasses
import itertools
import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sim.batched import evaluate_many
from sim.config.catalog import load_workload
from sim.layers.model import uniform_model
from sim.ops.heuristics import megatron_dims, megatron_sp_dims
from sim.ops.layers import op_names
from sim.optimum.landscape import Optimum, find_optimum
from sim.optimum.spaces import space_of
from sim.simulate import evaluate
from sim.strategy import Strategy
from sim.workload import DegreeTables, Workload

ALONG_TOKENS = {"attn_norm", "attention", "attn_residual", "ffn_norm", "router", "dispatch", "activation", "combine"}


@dataclasses.dataclass(frozen=True)
class Landscape:
    """Every strategy of a small space.

    Figures do not depend on the SLO and the memory, so one sweep serves any such limits.
    """

    workload: Workload
    tokens_per_s_per_gpu: np.ndarray
    tpot_s: np.ndarray
    memory_bytes: np.ndarray

    def limited(self, tpot_slo_s: float = 1.0, hbm_bytes: float = 1e12) -> tuple[Workload, np.ndarray]:
        """The workload under other limits, and which of its strategies they leave."""
        hardware = dataclasses.replace(self.workload.hardware, hbm_bytes=hbm_bytes)
        workload = dataclasses.replace(self.workload, hardware=hardware, tpot_slo_s=tpot_slo_s)
        return workload, (self.tpot_s <= tpot_slo_s) & (self.memory_bytes <= hbm_bytes)


def sweep(workload: Workload, *, tokens_suffice: bool) -> Landscape:
    """Evaluates a whole space with loops of its own, many strategies at once, some of them one by one as well.

    Args:
        workload: With small degree tables and no limit on time and memory.
        tokens_suffice: False where no tp degree leaves a token to every rank: then every choice along
            tokens is infeasible (which a test samples) and the sweep leaves it out.
    """
    names, tables = op_names(workload.model), workload.degrees
    choices = [(0, 1, 2) if tokens_suffice or name not in ALONG_TOKENS else (1, 2) for name in names]
    strategies = [
        Strategy(*degrees, dims)
        for degrees in itertools.product(tables.tp, tables.ep, tables.pp, tables.batch)
        if evaluate(workload, Strategy(*degrees, (2,) * len(names))).feasible  # what no choice mends
        for dims in itertools.product(*choices)
    ]
    found = evaluate_many(workload, strategies)
    for at in range(0, len(strategies), 499):
        one = evaluate(workload, strategies[at])
        assert (one.feasible, one.tokens_per_s_per_gpu) == (found.feasible[at], found.tokens_per_s_per_gpu[at])
        assert (one.tpot_s, one.memory_bytes.total) == (found.tpot_s[at], found.memory_bytes[at])
    kept = found.feasible
    return Landscape(workload, found.tokens_per_s_per_gpu[kept], found.tpot_s[kept], found.memory_bytes[kept])


def unlimited(workload: Workload, degrees: DegreeTables) -> Workload:
    roomy = dataclasses.replace(workload.hardware, hbm_bytes=1e12)
    return dataclasses.replace(workload, hardware=roomy, degrees=degrees)


@pytest.fixture(scope="module")
def dense_landscape(toy_dense: Workload) -> Landscape:
    """All 3^10 choices of one tuple of degrees; a small vocabulary, so that ops set the peak of the activations."""
    workload = dataclasses.replace(toy_dense, model=dataclasses.replace(toy_dense.model, vocab=16))
    return sweep(unlimited(workload, DegreeTables((4,), (1,), (2,), (6,))), tokens_suffice=True)


@pytest.fixture(scope="module")
def degrees_landscape(toy_dense: Workload) -> Landscape:
    """Several degrees, some of them forbidden: ep = 2 of a dense model, too many GPUs."""
    workload = dataclasses.replace(toy_dense, max_gpus=8)
    return sweep(unlimited(workload, DegreeTables((2, 8), (1, 2), (1, 2, 3), (1,))), tokens_suffice=False)


@pytest.fixture(scope="module")
def moe_landscape(toy_moe: Workload) -> Landscape:
    """One token per ep rank, and skewed routing: 1 * 2 * 1.25 copies are still fewer than 4 ranks.

    Wide but shallow, so that combine, between the segments of the sweep, sets the peak of the activations.
    """
    model = uniform_model("wide", 4, 128, 16, 8, 2, 16, 16, 8, 2)
    workload = dataclasses.replace(toy_moe, model=model, load_imbalance=1.25)
    return sweep(unlimited(workload, DegreeTables((4,), (2,), (2,), (2,))), tokens_suffice=False)


@pytest.fixture(params=["dense_landscape", "degrees_landscape", "moe_landscape"])
def landscape(request: pytest.FixtureRequest) -> Landscape:
    return request.getfixturevalue(request.param)


def agrees(found: Optimum, landscape: Landscape, feasible: np.ndarray) -> None:
    """Count, best and quantiles of the sweep equal those of brute force."""
    assert found.feasible_count == feasible.sum()
    if not feasible.any():
        assert found.evaluation is None
        assert found.fastest == 0.0
        return
    values = landscape.tokens_per_s_per_gpu[feasible]
    assert found.evaluation is not None
    assert found.evaluation.feasible
    assert found.evaluation.tokens_per_s_per_gpu == pytest.approx(values.max(), rel=1e-12)
    assert found.fastest == pytest.approx(values.max(), rel=5e-4)
    assert all(quantile <= found.evaluation.tokens_per_s_per_gpu for quantile in found.quantiles.values())
    for share, quantile in found.quantiles.items():
        exact = np.quantile(values, share, method="inverted_cdf")
        assert quantile == pytest.approx(exact, rel=5e-4)


def test_the_optimum_of_an_unlimited_space_is_that_of_brute_force(landscape: Landscape) -> None:
    workload, feasible = landscape.limited()
    assert feasible.all()
    agrees(find_optimum(workload), landscape, feasible)


@pytest.mark.parametrize("share", [0.001, 0.5, 0.9])
def test_the_optimum_under_a_tight_slo_is_that_of_brute_force(landscape: Landscape, share: float) -> None:
    # A hair above the quantile, so that strategies as fast as it, save for rounding, are on one side.
    slo_s = float(np.quantile(landscape.tpot_s, share, method="inverted_cdf")) * (1 + 1e-9)
    workload, feasible = landscape.limited(tpot_slo_s=slo_s)
    assert 0 < feasible.sum() < len(feasible)
    agrees(find_optimum(workload), landscape, feasible)


@pytest.mark.parametrize("share", [0.001, 0.3, 0.9])
def test_the_optimum_in_little_memory_is_that_of_brute_force(landscape: Landscape, share: float) -> None:
    hbm_bytes = float(np.quantile(landscape.memory_bytes, share, method="inverted_cdf"))
    workload, feasible = landscape.limited(hbm_bytes=hbm_bytes)
    assert 0 < feasible.sum() < len(feasible)
    agrees(find_optimum(workload), landscape, feasible)


@pytest.mark.parametrize("shares", [(0.3, 0.3), (0.5, 0.2), (0.2, 0.6), (0.8, 0.8)])
def test_the_optimum_under_both_limits_is_that_of_brute_force(
    landscape: Landscape, shares: tuple[float, float]
) -> None:
    slo_s = float(np.quantile(landscape.tpot_s, shares[0], method="inverted_cdf")) * (1 + 1e-9)
    hbm_bytes = float(np.quantile(landscape.memory_bytes, shares[1], method="inverted_cdf"))
    workload, feasible = landscape.limited(slo_s, hbm_bytes)
    agrees(find_optimum(workload), landscape, feasible)


@pytest.mark.parametrize("limits", [{"tpot_slo_s": 1e-7}, {"hbm_bytes": 1.01e6}])
def test_a_space_without_a_feasible_strategy_has_no_optimum(landscape: Landscape, limits: dict[str, float]) -> None:
    workload, feasible = landscape.limited(**limits)
    assert not feasible.any()
    found = find_optimum(workload)
    agrees(found, landscape, feasible)
    assert found.feasible_share == 0
    assert not found.quantiles


@pytest.mark.parametrize(
    ("tp", "pp", "batch"), [(8, 1, 32), (8, 2, 64), (8, 3, 32), (16, 1, 64), (16, 3, 32), (16, 6, 64)]
)
def test_an_slo_that_the_fastest_strategy_meets_exactly_lets_it_in(
    dense: Workload, tp: int, pp: int, batch: int
) -> None:
    # An SLO is often the TPOT of a strategy that somebody runs. `evaluate` lets it pass, so must the oracle.
    workload = dataclasses.replace(dense, degrees=DegreeTables((tp,), (1,), (pp,), (batch,)))
    fastest = find_optimum(dataclasses.replace(workload, tpot_slo_s=1e3)).evaluation
    assert fastest is not None
    exact = dataclasses.replace(workload, tpot_slo_s=fastest.tpot_s)
    assert evaluate(exact, fastest.strategy).feasible
    found = find_optimum(exact).evaluation
    assert found is not None
    assert found.feasible


def test_what_the_sweeps_leave_out_is_infeasible(degrees_landscape: Landscape, moe_landscape: Landscape) -> None:
    rng = np.random.default_rng(3)
    for landscape in (degrees_landscape, moe_landscape):
        workload = landscape.workload
        names, tables = op_names(workload.model), workload.degrees
        along_tokens = [index for index, name in enumerate(names) if name in ALONG_TOKENS]
        for _ in range(200):
            dims = rng.integers(0, 3, len(names))
            dims[rng.choice(along_tokens)] = 0
            strategy = Strategy(int(rng.choice(tables.tp)), tables.ep[0], 1, tables.batch[0], tuple(dims.tolist()))
            assert "tokens" in [violation.kind for violation in evaluate(workload, strategy).violations]


def test_two_degrees_are_compared_with_each_other(degrees_landscape: Landscape) -> None:
    workload, _ = degrees_landscape.limited()
    counts = {
        (tp, pp): find_optimum(
            dataclasses.replace(workload, degrees=DegreeTables((tp,), (1,), (pp,), (1,)))
        ).feasible_count
        for tp, pp in itertools.product((2, 8), (1, 2, 3))
    }
    # tp 2 with 1 to 3 stages, of 1, 2 and 1 of the 4 layers too; tp 8 fills the 8 GPUs alone.
    # 6 of 10 ops lose their choice along tokens.
    whole = 2**6 * 3**4
    assert counts == {(2, 1): whole, (2, 2): whole, (2, 3): whole, (8, 1): whole, (8, 2): 0, (8, 3): 0}
    assert find_optimum(workload).feasible_count == 4 * whole


@settings(derandomize=True, deadline=None, max_examples=8)
@given(
    tp=st.sampled_from([1, 2, 3, 4, 8]),
    ep=st.sampled_from([1, 2, 3, 4]),
    pp=st.sampled_from([1, 2, 4]),
    batch=st.integers(1, 64),
    imbalance=st.sampled_from([1.0, 1.3]),
    seed=st.integers(0, 99),
)
def test_no_sampled_strategy_of_a_full_moe_space_beats_its_optimum(
    toy_moe: Workload, tp: int, ep: int, pp: int, batch: int, imbalance: float, seed: int
) -> None:
    workload = dataclasses.replace(
        toy_moe, load_imbalance=imbalance, degrees=DegreeTables((tp,), (ep,), (pp,), (batch,))
    )
    found = find_optimum(workload)
    sampled_feasible = 0
    for dims in np.random.default_rng(seed).integers(0, 3, (100, 12)).tolist():
        evaluation = evaluate(workload, Strategy(tp, ep, pp, batch, tuple(dims)))
        if evaluation.feasible:
            sampled_feasible += 1
            assert found.evaluation is not None
            assert evaluation.tokens_per_s_per_gpu <= found.evaluation.tokens_per_s_per_gpu * (1 + 1e-12)
    assert (sampled_feasible > 0) <= (found.feasible_count > 0)


# --- the real workloads ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "size"),
    [
        ("gpt_moe_1_2t_16k", 2_763_493_200),  # 8 * 5 * 10 * 13 * 3^12
        ("gpt_moe_1_2t_32k", 2_763_493_200),
        ("gpt_moe_1_2t_64k", 2_763_493_200),
        ("gpt_moe_1_6t_16k", 1_934_445_240),  # 8 * 5 * 7 * 13 * 3^12
        ("gpt_moe_1_6t_32k", 1_934_445_240),
        ("gpt_moe_1_6t_64k", 1_934_445_240),
        ("llama_3_1_405b_8k", 8 * 1 * 8 * 11 * 3**10),
    ],
)
def test_the_space_has_every_combination_of_degrees_and_choices(name: str, size: int) -> None:
    assert space_of(load_workload(name)).size == size


REAL = ["mixtral_8x22b_8k", "llama_3_1_405b_8k"]


def real(name: str) -> Workload:
    """With every third pipeline degree and batch."""
    workload = load_workload(name)
    tables = workload.degrees
    return dataclasses.replace(
        workload, degrees=dataclasses.replace(tables, pp=tables.pp[::3], batch=tables.batch[::3])
    )


@pytest.fixture(scope="module")
def real_optima() -> dict[str, Optimum]:
    return {name: find_optimum(real(name)) for name in REAL}


def sample(workload: Workload, rng: np.random.Generator) -> Strategy:
    tables = workload.degrees
    tp, ep, pp, batch = (int(rng.choice(table)) for table in (tables.tp, tables.ep, tables.pp, tables.batch))
    return Strategy(tp, ep, pp, batch, tuple(rng.integers(0, 3, len(op_names(workload.model))).tolist()))


@pytest.mark.parametrize("name", REAL)
def test_the_optimum_is_a_strategy_of_the_space_and_equals_its_evaluation(
    name: str, real_optima: dict[str, Optimum]
) -> None:
    workload, found = real(name), real_optima[name].evaluation
    assert found is not None
    assert found.feasible
    strategy = found.strategy
    for degree in ("tp", "ep", "pp", "batch"):
        assert getattr(strategy, degree) in getattr(workload.degrees, degree)
    again = evaluate(workload, strategy)
    assert again.tokens_per_s_per_gpu == pytest.approx(found.tokens_per_s_per_gpu, rel=1e-12)
    assert found.tokens_per_s_per_gpu >= real_optima[name].quantiles[0.999] * (1 - 5e-4)


@pytest.mark.parametrize("name", REAL)
def test_the_fastest_that_is_counted_is_the_one_that_the_search_finds(name: str) -> None:
    workload, rng = real(name), np.random.default_rng(5)
    counts: list[int] = []
    for _ in range(16):  # one combination of degrees at a time
        degrees = DegreeTables(
            *((int(rng.choice(table)),) for table in dataclasses.astuple(workload.degrees)),
        )
        found = find_optimum(dataclasses.replace(workload, tpot_slo_s=1e6, degrees=degrees))
        counts.append(found.feasible_count)
        best = found.evaluation.tokens_per_s_per_gpu if found.evaluation else 0.0
        assert found.fastest == pytest.approx(best, rel=5e-4)
    assert 4 < np.count_nonzero(counts) < 16


@pytest.mark.parametrize("name", REAL)
def test_no_random_strategy_beats_the_optimum_and_the_feasible_share_is_that_of_a_sample(
    name: str, real_optima: dict[str, Optimum]
) -> None:
    workload, found = real(name), real_optima[name]
    assert found.evaluation is not None
    rng = np.random.default_rng(11)
    trials = 1500
    drawn = evaluate_many(workload, [sample(workload, rng) for _ in range(trials)])
    feasible = drawn.tokens_per_s_per_gpu[drawn.feasible]
    assert feasible.max() <= found.evaluation.tokens_per_s_per_gpu * (1 + 1e-12)
    share = found.feasible_share
    assert abs(len(feasible) / trials - share) < 5 * math.sqrt(share * (1 - share) / trials)
    below = (feasible <= found.quantiles[0.5]).sum()
    assert abs(below - len(feasible) / 2) < 5 * math.sqrt(len(feasible)) / 2


@pytest.mark.parametrize("name", REAL)
def test_no_neighbour_of_the_optimum_is_better(name: str, real_optima: dict[str, Optimum]) -> None:
    workload, found = real(name), real_optima[name].evaluation
    assert found is not None
    best, tables = found.strategy, workload.degrees
    moved = [
        dataclasses.replace(best, **{degree: value})
        for degree in ("tp", "ep", "pp", "batch")
        for value in getattr(tables, degree)
    ]
    moved += [
        dataclasses.replace(best, dims=(*best.dims[:index], choice, *best.dims[index + 1 :]))
        for index in range(len(best.dims))
        for choice in (0, 1, 2)
    ]
    for strategy in moved:
        evaluation = evaluate(workload, strategy)
        if evaluation.feasible:
            assert evaluation.tokens_per_s_per_gpu <= found.tokens_per_s_per_gpu * (1 + 1e-12)


@pytest.mark.parametrize("name", REAL)
def test_no_megatron_strategy_beats_the_optimum(name: str, real_optima: dict[str, Optimum]) -> None:
    workload, found = real(name), real_optima[name].evaluation
    assert found is not None
    tables = workload.degrees
    ratios = {}
    for dims in (megatron_dims(workload.model), megatron_sp_dims(workload.model)):
        best = max(
            evaluation.tokens_per_s_per_gpu * evaluation.feasible
            for degrees in itertools.product(tables.tp, tables.ep, tables.pp, tables.batch)
            for evaluation in [evaluate(workload, Strategy(*degrees, dims))]
        )
        ratios[dims] = found.tokens_per_s_per_gpu / best
    assert all(1 - 1e-12 <= ratio < 2.5 for ratio in ratios.values())


def test_progress_is_reported_part_by_part(toy_dense: Workload) -> None:
    reports: list[tuple[int, int]] = []
    workload = dataclasses.replace(toy_dense, degrees=DegreeTables((2, 4), (1,), (1, 2), (1, 2, 4)))
    found = find_optimum(workload, progress=lambda done, total: reports.append((done, total)))
    assert [done for done, _ in reports] == list(range(1, reports[0][1] + 1))
    assert {total for _, total in reports} == {reports[-1][0]}
    assert found == find_optimum(workload)


def test_any_number_of_pipeline_degrees_has_a_landscape(toy_dense: Workload) -> None:
    """What few are counted at once must count alike, however the others are shared out."""
    model = uniform_model("deep", 70, 64, 96, 8, 2, 16, 1000, 1, 1, True)

    def landscape(depths: range) -> Optimum:
        degrees = DegreeTables((2,), (1,), tuple(depths), (4,))
        return find_optimum(dataclasses.replace(toy_dense, model=model, max_gpus=140, degrees=degrees))

    parts = [landscape(range(1, 36)), landscape(range(36, 71))]
    whole = landscape(range(1, 71))
    assert whole.feasible_count == sum([each.feasible_count for each in parts]) > 0
    assert whole.fastest == max([each.fastest for each in parts])
