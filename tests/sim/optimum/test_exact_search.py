"""The best of the extended space: against brute force, against the sweep of smaller ones, and its neighbours."""

from __future__ import annotations

import dataclasses
import itertools

import numpy as np
import pytest

from sim.batched import Evaluations, evaluate_many
from sim.config.catalog import load_workload
from sim.layers.model import uniform_model
from sim.optimum.exact_search import Known, find_best, find_bests
from sim.optimum.landscape import find_optimum
from sim.optimum.spaces import EXTENSIONS, Space, extended_space, heuristic_space, joint_space, space_of
from sim.simulate import evaluate
from sim.strategy import GATHERED, GATHERED_TOKENS, NONE, TOKENS, Strategy
from sim.workload import DegreeTables, SpaceName, Workload


def everything(space: Space) -> Evaluations:
    """Every strategy of a small space, by loops of its own."""
    return evaluate_many(
        space.workload,
        [
            Strategy(tp, ep, pp, batch, dims, cp, dp)
            for tp, ep, pp, batch, cp in itertools.product(space.tp, space.ep, space.pp, space.batch, space.cp)
            for dp in space.dp or (ep,)
            for dims in itertools.product(*space.choices.values())
        ],
    )


@pytest.fixture(scope="module")
def small(toy_moe: Workload) -> Space:
    """Every extension at once, with a few choices of the ops that tell them apart; wide, so that peaks matter."""
    model = uniform_model("wide", 4, 128, 16, 8, 2, 16, 16, 8, 2)
    roomy = dataclasses.replace(toy_moe.hardware, hbm_bytes=1e12)
    workload = dataclasses.replace(toy_moe, model=model, hardware=roomy, max_gpus=16, tpot_slo_s=1e9)
    space = extended_space(workload)
    some = {
        "attn_norm": (0, 2),
        "qkv_proj": (1, TOKENS, GATHERED),
        "attention": (0, 1),
        "o_proj": (0, GATHERED_TOKENS),
        "attn_residual": (0, 2),
        "ffn_norm": (2,),
        "router": (2,),
        "dispatch": (0, 2),
        "ffn1": (1, GATHERED),
        "activation": (1,),
        "ffn2": (0, TOKENS),
        "combine": (0, 2),
    }
    return dataclasses.replace(space, tp=(1, 2), cp=(1, 2), dp=(1, 4), ep=(1, 2), pp=(1, 2), batch=(8,), choices=some)


@pytest.fixture(scope="module")
def evaluations(small: Space) -> Evaluations:
    return everything(small)


def best_of(evaluations: Evaluations, slo_s: float, hbm_bytes: float) -> float:
    within = evaluations.feasible & (evaluations.tpot_s <= slo_s) & (evaluations.memory_bytes <= hbm_bytes)
    return float(evaluations.tokens_per_s_per_gpu[within].max(initial=0.0))


def limited(space: Space, slo_s: float, hbm_bytes: float) -> Space:
    hardware = dataclasses.replace(space.workload.hardware, hbm_bytes=hbm_bytes)
    workload = dataclasses.replace(space.workload, hardware=hardware, tpot_slo_s=slo_s)
    return dataclasses.replace(space, workload=workload)


@pytest.mark.parametrize("memory_share", [0.005, 0.3])
@pytest.mark.parametrize("time_share", [0.0005, 0.02, 1.0])
def test_the_best_is_that_of_brute_force_under_any_limits(
    small: Space, evaluations: Evaluations, time_share: float, memory_share: float
) -> None:
    assert len(evaluations) == small.size
    feasible = evaluations.feasible
    chosen = itertools.compress(evaluations.strategies, feasible)
    assert len({(strategy.cp, strategy.dp, strategy.ep) for strategy in chosen}) == 8
    slo_s = float(np.quantile(evaluations.tpot_s[feasible], time_share, method="inverted_cdf")) * (1 + 1e-9)
    hbm_bytes = float(np.quantile(evaluations.memory_bytes[feasible], memory_share, method="inverted_cdf"))
    found = find_best(limited(small, slo_s, hbm_bytes))
    wanted = best_of(evaluations, slo_s, hbm_bytes)
    assert (found.evaluation is None) == (wanted == 0.0)
    if found.evaluation:
        assert found.evaluation.feasible
        assert found.evaluation.tokens_per_s_per_gpu == pytest.approx(wanted, rel=1e-12)
        assert found.swept_tokens_per_s_per_gpu == pytest.approx(wanted, rel=1e-12)


def test_what_a_search_worked_out_serves_those_with_other_limits(small: Space, evaluations: Evaluations) -> None:
    known: Known = {}
    tpot_s = sorted(evaluations.tpot_s[evaluations.feasible].tolist())
    kept = sorted(evaluations.memory_bytes[evaluations.feasible].tolist())
    limits = [(tpot_s[-1], 1e12), (tpot_s[len(tpot_s) // 50], 1e12), (tpot_s[len(tpot_s) // 2], 1e12)]
    for slo_s, hbm_bytes in (*limits, (tpot_s[-1], kept[len(kept) // 4]), (tpot_s[-1], kept[len(kept) // 2])):
        alone, sharing = (find_best(limited(small, slo_s, hbm_bytes), known=each) for each in (None, known))
        assert alone.evaluation is not None
        assert sharing.evaluation is not None
        assert sharing.evaluation.strategy == alone.evaluation.strategy
        assert (sharing.opened, sharing.space_size) == (alone.opened, small.size)


@pytest.mark.parametrize("share", [0.3, 1.0])
def test_the_best_of_each_degrees_is_that_of_brute_force_even_where_many_are_as_good_as_can_be(
    small: Space, evaluations: Evaluations, share: float
) -> None:
    values = evaluations.tokens_per_s_per_gpu.tolist()
    enough = share * max(itertools.compress(values, evaluations.feasible))

    def score(tokens_per_s_per_gpu: float, gpus: int) -> float:
        return min(tokens_per_s_per_gpu, enough) / gpus

    wanted: dict[tuple[int, ...], float] = {}
    for chosen, value in itertools.compress(zip(evaluations.strategies, values, strict=True), evaluations.feasible):
        degrees = chosen.tp, chosen.cp, chosen.attention_dp, chosen.ep, chosen.pp
        wanted[degrees] = max(wanted.get(degrees, 0.0), score(value, chosen.gpus))
    for count in (1, 3, 10**6):
        found = [score(each.tokens_per_s_per_gpu, each.gpus) for each in find_bests(small, count, score)]
        assert found == pytest.approx(sorted(wanted.values(), reverse=True)[:count], rel=1e-12)


def test_what_is_known_to_be_reached_changes_no_answer(small: Space) -> None:
    (best,) = find_bests(small, 1)
    for reached in (0.5 * best.tokens_per_s_per_gpu, best.tokens_per_s_per_gpu):
        assert find_bests(small, 1, reached=reached) == (best,)
    assert find_bests(small, 1, reached=1.01 * best.tokens_per_s_per_gpu) == ()


def test_some_limits_leave_nothing(small: Space) -> None:
    found = find_best(limited(small, 1e9, 1.1e6))
    assert found.evaluation is None
    assert found.swept_tokens_per_s_per_gpu == 0.0


@pytest.mark.parametrize("space", ["paper", "joint"])
@pytest.mark.parametrize("name", ["gpt_moe_1_2t_16k", "qwen3_235b_a22b_16k", "llama_3_1_405b_8k"])
def test_a_space_with_one_mesh_has_the_optimum_that_adding_it_up_finds(name: str, space: SpaceName) -> None:
    workload = load_workload(name, space=space)
    few = dataclasses.replace(workload.degrees, tp=(8,), pp=workload.degrees.pp[:2], batch=(64, 1024))
    workload = dataclasses.replace(workload, degrees=few)
    swept, found = find_optimum(workload), find_best(space_of(workload))
    assert found.opened == 1  # bounds of the others count all moves
    assert found.space_size == swept.space_size
    assert found.evaluation is not None
    assert found.evaluation.tokens_per_s_per_gpu == pytest.approx(swept.fastest, rel=5e-4)


@pytest.fixture(scope="module")
def long_context() -> Workload:
    """GPT-MoE 1.2T at a million tokens, with fewer degrees."""
    workload = load_workload("gpt_moe_1_2t_1m")
    few = dataclasses.replace(workload.degrees, tp=(8,), pp=(1,), batch=(16, 64))
    return dataclasses.replace(workload, degrees=few)


@pytest.mark.slow
def test_every_space_contains_the_ones_it_widens(long_context: Workload) -> None:
    workload = long_context
    values = {
        extensions: find_best(extended_space(workload, extensions)).swept_tokens_per_s_per_gpu
        for extensions in ((), ("context",), ("degrees",), ("context", "degrees"))
    }
    heuristics = [
        find_best(heuristic_space(workload, sequence_parallel=parallel)).swept_tokens_per_s_per_gpu
        for parallel in (False, True)
    ]
    assert values[()] >= max(heuristics) * (1 - 1e-12)
    assert values["context",] > values[()] * 1.02  # at a million tokens the context is worth cutting
    assert values["context", "degrees"] >= max(values["context",], values["degrees",]) * (1 - 1e-12)


def test_no_neighbour_of_the_best_is_better(long_context: Workload) -> None:
    workload = long_context
    space = extended_space(workload)
    found = find_best(space)
    assert found.evaluation is not None
    best = found.evaluation.strategy
    degrees = {"tp": space.tp, "cp": space.cp, "dp": space.dp, "ep": space.ep, "pp": space.pp, "batch": space.batch}
    neighbours = [dataclasses.replace(best, **{name: value}) for name, table in degrees.items() for value in table]
    for index, choices in enumerate(space.choices.values()):
        neighbours += [
            dataclasses.replace(best, dims=(*best.dims[:index], choice, *best.dims[index + 1 :])) for choice in choices
        ]
    values = [e.tokens_per_s_per_gpu for s in neighbours if (e := evaluate(workload, s)).feasible]
    assert len(values) > 20
    assert max(values) <= found.evaluation.tokens_per_s_per_gpu * (1 + 1e-12)


@pytest.mark.slow
def test_sampled_strategies_of_the_extended_space_never_beat_its_best() -> None:
    workload = load_workload("gpt_moe_1_6t_16k")
    few = DegreeTables((2, 8), (4, 16), (1, 2), (256, 1024))
    space = extended_space(dataclasses.replace(workload, degrees=few), EXTENSIONS)
    found, rng = find_best(space), np.random.default_rng(0)
    drawn = evaluate_many(space.workload, [space.sample(rng) for _ in range(300)])
    assert drawn.feasible.any()
    assert drawn.tokens_per_s_per_gpu[drawn.feasible].max() <= found.swept_tokens_per_s_per_gpu


def test_an_unknown_extension_is_refused(toy_moe: Workload) -> None:
    with pytest.raises(ValueError, match="unknown extension 'contexts'; expected some of context, degrees"):
        extended_space(toy_moe, ["contexts"])


def test_progress_reaches_its_end(toy_moe: Workload) -> None:
    reports: list[tuple[int, int]] = []
    find_best(joint_space(toy_moe), progress=lambda done, total: reports.append((done, total)))
    assert reports[-1][0] == reports[-1][1]
    shares = [done / total for done, total in reports]
    assert shares == sorted(shares)


@pytest.mark.parametrize("name", ["paper", "joint"])
def test_where_choices_do_nothing_the_best_has_none(name: SpaceName) -> None:
    """With one GPU per group all dims are one strategy, and it is shown as the one that shards nothing."""
    workload = load_workload("qwen3_235b_a22b_16k")
    degrees = dataclasses.replace(workload.degrees, tp=(1,))
    workload = dataclasses.replace(workload, space=name, degrees=degrees)
    best = find_best(space_of(workload)).evaluation
    assert best is not None
    assert set(best.strategy.dims) == {NONE}
