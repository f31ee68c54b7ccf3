"""The exact optimum of models whose layers differ: by brute force, with shared and with own choices."""

from __future__ import annotations

import dataclasses
import itertools
import math

import numpy as np
import pytest

from sim.batched import evaluate_many
from sim.config.catalog import load_model
from sim.config.files import list_names
from sim.engines.engine_registry import in_space
from sim.layers.mixers import GroupedAttention, LinearMixer
from sim.layers.model import FeedForward, LayerGroup, Model
from sim.ops.dims import dims_of, spread_choices
from sim.ops.heuristics import megatron_dims
from sim.optimum.exact_search import find_best
from sim.optimum.spaces import Space, extended_space, joint_space, space_of
from sim.simulate import evaluate
from sim.strategy import Strategy
from sim.workload import GroupChoices, PhaseName, Speculation, Workload
from tests.questions import question_about

FULL = GroupedAttention(heads=8, kv_heads=2, head_dim=16)
GROUPS = (
    LayerGroup("dense", 2, dataclasses.replace(FULL, window=64), FeedForward(512)),
    LayerGroup("experts", 3, FULL, FeedForward(96, 4, 2)),
)
STATES = (
    LayerGroup("delta", 3, LinearMixer("gated_delta", 8, 4, 16, 16), FeedForward(96)),
    LayerGroup("full", 2, FULL, FeedForward(96)),
)

PARTS = (
    LayerGroup("state", 3, LinearMixer("mamba2", 8, 4, 16, 16), None),
    LayerGroup("dense", 1, None, FeedForward(96, gated=False)),
    LayerGroup("experts", 2, None, FeedForward(96, 4, 2)),
    LayerGroup("full", 1, FULL, None),
)
"""Layers of one part each, as Nemotron-H has them."""


def some(workload: Workload, *, few: tuple[str, ...], extended: bool = False) -> Space:
    """A space of a few choices: both of the named ops, one of the others."""
    space = extended_space(workload, ("context", "degrees")) if extended else joint_space(workload)
    one = {"qkv_proj": 1, "attention": 1, "o_proj": 0, "ffn1": 1, "activation": 1, "ffn2": 0}
    choices = {
        dim.name: (0, 2) if dim.name in few or dim.op.name in few else (one.get(dim.op.name, 2),)
        for dim in dims_of(workload)
    }
    degrees = {"cp": (1, 2), "dp": (1, 2)} if extended else {}
    return dataclasses.replace(space, tp=(1, 2, 4), ep=(1, 2), pp=(1, 2, 3), batch=(4, 16), choices=choices, **degrees)


def brute_force(space: Space) -> float:
    strategies = [
        Strategy(tp, ep, pp, batch, dims, cp, dp)
        for (tp, cp, dp, ep), pp, batch in itertools.product(space.meshes(), space.pp, space.batch)
        for dims in itertools.product(*space.choices.values())
    ]
    every = evaluate_many(space.workload, strategies)
    return float(every.tokens_per_s_per_gpu[every.feasible].max(initial=0.0))


@pytest.mark.parametrize(
    ("groups", "order", "hbm_bytes"),
    [
        ("shared", (0, 0, 1, 1, 1), 1e9),
        ("shared", (1, 0, 1, 0, 1), 2.5e6),
        ("own", (0, 0, 1, 1, 1), 2.5e6),
        ("own", (1, 0, 1, 0, 1), 1e9),
    ],
)
def test_the_best_of_mixed_layers_is_that_of_brute_force(
    toy_moe: Workload, groups: str, order: tuple[int, ...], hbm_bytes: float
) -> None:
    workload = dataclasses.replace(
        toy_moe,
        model=Model("mixed", 64, 1000, GROUPS, order),
        hardware=dataclasses.replace(toy_moe.hardware, hbm_bytes=hbm_bytes),
        groups=groups,
        tpot_slo_s=1e-3,
    )
    few = ("attn_norm", "attn_residual", "combine", "ffn_norm")
    space = some(workload, few=few if groups == "shared" else ("dense.attn_residual", "combine", "experts.attn_norm"))
    found = find_best(space)
    assert found.evaluation is not None
    assert found.swept_tokens_per_s_per_gpu == pytest.approx(found.evaluation.tokens_per_s_per_gpu, rel=1e-12)
    assert found.evaluation.tokens_per_s_per_gpu == pytest.approx(brute_force(space), rel=1e-12)


@pytest.mark.parametrize(
    ("groups", "few"),
    [
        ("shared", ("attn_norm", "attn_residual", "ffn_norm", "combine")),
        ("own", ("state.attn_residual", "dense.combine", "experts.ffn_norm", "full.attn_norm")),
    ],
)
def test_so_it_is_where_layers_have_one_part_each(
    toy_moe: Workload, groups: GroupChoices, few: tuple[str, ...]
) -> None:
    order = (0, 2, 0, 3, 1, 0, 2)
    workload = dataclasses.replace(toy_moe, model=Model("parts", 64, 1000, PARTS, order), groups=groups)
    space = dataclasses.replace(some(workload, few=few), tp=(1, 4))
    found = find_best(space)
    assert found.evaluation is not None
    assert found.swept_tokens_per_s_per_gpu == pytest.approx(found.evaluation.tokens_per_s_per_gpu, rel=1e-12)
    assert found.evaluation.tokens_per_s_per_gpu == pytest.approx(brute_force(space), rel=1e-12)


@pytest.mark.parametrize(("mixed", "groups"), [(GROUPS, "shared"), (STATES, "own"), (PARTS, "own")])
def test_so_it_is_on_meshes_of_attentions_own(toy_moe: Workload, groups: str, mixed: tuple[LayerGroup, ...]) -> None:
    workload = dataclasses.replace(
        toy_moe, model=Model("mixed", 64, 1000, mixed), groups=groups, phase="serve", prompt_tokens=96, output_tokens=32
    )
    space = some(workload, few=("combine",), extended=True)
    if not workload.model.is_moe:
        space = dataclasses.replace(space, ep=(1,))
    found = find_best(space)
    assert found.evaluation is not None
    assert found.evaluation.tokens_per_s_per_gpu == pytest.approx(brute_force(space), rel=1e-12)


@pytest.mark.parametrize(("phase", "groups"), [("decode", "shared"), ("serve", "own")])
def test_so_it_is_of_steps_that_verify_drafted_tokens(
    toy_moe: Workload, phase: PhaseName, groups: GroupChoices
) -> None:
    workload = dataclasses.replace(
        toy_moe,
        model=Model("mixed", 64, 1000, GROUPS, mtp_layers=1),
        hardware=dataclasses.replace(toy_moe.hardware, hbm_bytes=2.5e6),
        groups=groups,
        phase=phase,
        prompt_tokens=96,
        output_tokens=32,
        speculation=Speculation(2, (0.8, 0.6), "mtp"),
    )
    space = some(workload, few=("combine",), extended=True)
    found = find_best(space)
    assert found.evaluation is not None
    assert found.evaluation.tokens_per_s_per_gpu == pytest.approx(brute_force(space), rel=1e-12)


def test_own_choices_are_never_worse_than_shared_ones(toy_moe: Workload) -> None:
    def best(groups: str) -> float:
        model = Model("mixed", 64, 1000, GROUPS)
        workload = dataclasses.replace(toy_moe, model=model, groups=groups)  # type: ignore[arg-type]
        few = ("attn_norm", "attn_residual", "ffn_norm", "combine")
        space = dataclasses.replace(some(workload, few=few), tp=(4,), ep=(2,), pp=(1, 2), batch=(16,))
        found = find_best(space).evaluation
        assert found is not None
        return found.tokens_per_s_per_gpu

    assert best("own") >= best("shared") * (1 - 1e-12)


def test_more_groups_than_a_key_has_digits_for_are_solved(toy_moe: Workload) -> None:
    """Seven kinds of layers, each with choices of its own, and the same kind once more under another name."""
    kinds = tuple(
        LayerGroup(f"kind{at}", 1, dataclasses.replace(FULL, window=16 * at), FeedForward(96)) for at in range(7)
    )
    workload = dataclasses.replace(toy_moe, model=Model("kinds", 64, 1000, kinds), groups="own")
    one = {dim.name: ((0, 2) if dim.name == "kind3.ffn_norm" else (2,)) for dim in dims_of(workload)}
    space = dataclasses.replace(joint_space(workload), tp=(2,), ep=(1,), pp=(1, 3), batch=(4,), choices=one)
    found = find_best(space).evaluation
    assert found is not None
    assert found.tokens_per_s_per_gpu == pytest.approx(brute_force(space), rel=1e-12)


def test_what_a_file_says_of_groups_and_stages_is_searched() -> None:
    question = question_about("gpt_oss_120b", isl=1024, osl=256, gpus=16)
    workload = dataclasses.replace(question, groups="own").load()
    assert len(dims_of(workload)) == 24
    assert workload.degrees.pp == (1, 2, 3, 4, 6, 8, 9, 12, 16)
    named = spread_choices(workload, megatron_dims(workload.model))
    shared = dataclasses.replace(workload, groups="shared")
    own, common = (
        evaluate(each, Strategy(2, 2, 4, 16, dims))
        for each, dims in ((workload, named), (shared, megatron_dims(workload.model)))
    )
    assert own.tokens_per_s_per_gpu == pytest.approx(common.tokens_per_s_per_gpu, rel=1e-12)
    for engine in ("vllm", "megatron_core"):
        space = dataclasses.replace(space_of(in_space(workload, engine)), tp=(2, 4), pp=(1,), batch=(16,))
        alike = dataclasses.replace(space_of(in_space(shared, engine)), tp=(2, 4), pp=(1,), batch=(16,))
        best, same = find_best(space).evaluation, find_best(alike).evaluation
        assert best is not None
        assert same is not None
        assert best.tokens_per_s_per_gpu == pytest.approx(same.tokens_per_s_per_gpu, rel=1e-12)
        assert space.size == alike.size


@pytest.mark.parametrize("groups", ["shared", "own"])
def test_the_best_of_degrees_that_divide_nothing_is_that_of_brute_force(
    toy_moe: Workload, groups: GroupChoices
) -> None:
    workload = dataclasses.replace(toy_moe, model=Model("mixed", 64, 1000, GROUPS), groups=groups, max_gpus=12)
    space = some(workload, few=("combine",), extended=True)
    space = dataclasses.replace(space, tp=(1, 2), ep=(1, 3, 4), pp=(1, 2, 3, 4, 5), dp=(1, 3, 6), batch=(5, 16))
    found = find_best(space)
    assert found.evaluation is not None
    assert found.evaluation.tokens_per_s_per_gpu == pytest.approx(brute_force(space), rel=1e-12)


def test_experts_are_shared_out_to_any_number_of_ranks_where_it_is_asked() -> None:
    question = question_about("deepseek_v3", hardware="gb200_nvl72", isl=8192, osl=1024, gpus=72)
    workload = dataclasses.replace(question, space="extended", any_degrees="ep,pp").load()
    assert workload.degrees.ep == tuple(range(1, 73))
    assert workload.degrees.pp == tuple(range(1, 62))
    assert question.load().degrees.ep == (1, 2, 4, 8, 16, 32, 64)
    space, dims = extended_space(workload), spread_choices(workload, megatron_dims(workload.model))
    for ep in (6, 12, 24, 40, 72):
        strategy = Strategy(1, ep, 1, 1024, dims, dp=ep)
        assert not space.outside(strategy)
        found = evaluate(workload, strategy)
        assert not [each for each in found.violations if each.kind != "hbm"]
        experts = -(-256 // ep) * 3 * 7168 * 2048 * 58  # of the fullest rank, in fp8
        assert 0 < found.memory_bytes.weights - experts < 30e9


def test_any_pipeline_is_searched_where_a_file_says_so() -> None:
    asked = question_about("qwen3_235b_a22b", isl=1024, osl=256, gpus=512, any_degrees="pp").load()
    workload = dataclasses.replace(asked, degrees=dataclasses.replace(asked.degrees, tp=(8,), ep=(16,), batch=(64,)))
    assert workload.degrees.pp == tuple(range(1, 65))
    found = find_best(space_of(workload)).evaluation
    evens = dataclasses.replace(workload, degrees=dataclasses.replace(workload.degrees, pp=(1, 2, 47)))
    even = find_best(space_of(evens)).evaluation
    assert found is not None
    assert even is not None
    assert found.tokens_per_s_per_gpu >= even.tokens_per_s_per_gpu


@pytest.mark.parametrize("name", list_names("models"))
def test_every_shipped_model_is_searched(name: str) -> None:
    workload = question_about(name, isl=1024, osl=256, tpot_ms=500.0, gpus=4096).load()
    tp, ep = (8,), (workload.degrees.ep[-1],)
    space = dataclasses.replace(joint_space(workload), tp=tp, ep=ep, pp=(1, 3), batch=(64, 256))
    found = find_best(space).evaluation
    assert found is not None
    assert found.feasible
    assert {op.group for op in found.ops} == {group.name for group in workload.model.groups}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "groups"),
    [(name, "own" if len(load_model(name).groups) > 1 else "shared") for name in list_names("models")],
)
def test_every_shipped_model_is_searched_in_the_extended_space_too(name: str, groups: GroupChoices) -> None:
    question = question_about(name, phase="serve", isl=1024, osl=256, gpus=64, tpot_ms=0, ttft_ms=0)
    workload = dataclasses.replace(question.load(), space="extended", groups=groups)
    whole, rng = space_of(workload), np.random.default_rng(0)
    drawn = evaluate_many(workload, [whole.sample(rng) for _ in range(6)])
    assert np.isfinite(drawn.tpot_s).all()
    named = spread_choices(workload, megatron_dims(workload.model))
    choices = {name: (choice,) for name, choice in zip(whole.choices, named, strict=True)}
    one = next(name for name in choices if name.endswith("ffn2"))
    ep = (workload.degrees.ep[min(3, len(workload.degrees.ep) - 1)],)
    space = dataclasses.replace(whole, tp=(4,), cp=(1, 2), dp=(2,), ep=ep, pp=(4,), batch=(32,))
    space = dataclasses.replace(space, choices=choices | {one: whole.choices[one]})
    found = find_best(space).evaluation
    assert found is not None
    assert found.feasible


def test_the_way_from_dense_layers_to_experts_on_two_meshes_is_added_up_as_it_is_priced() -> None:
    """Tokens of a group are a fraction where prompts are cut: one axis moves them as such, a route whole ones."""
    asked = question_about("deepseek_v3", phase="serve", isl=100, osl=50, gpus=256, engine="none", chunk_tokens=2048)
    workload = dataclasses.replace(dataclasses.replace(asked, groups="own").load(), space="extended")
    dims = (2, 1, 1, 5, 0, 2, 1, 2, 3, 1, 2, 5, 1, 0, 0, 1, 0, 2, 3, 2, 2, 2)
    space = extended_space(dataclasses.replace(workload, tpot_slo_s=math.inf))
    choices = {name: (choice,) for name, choice in zip(space.choices, dims, strict=True)}
    mesh = {"tp": (16,), "cp": (1,), "dp": (8,), "ep": (32,), "pp": (1,)}
    found = find_best(dataclasses.replace(space, batch=(653,), choices=choices, **mesh))
    assert found.evaluation is not None
    assert found.swept_tokens_per_s_per_gpu == pytest.approx(found.evaluation.tokens_per_s_per_gpu, rel=1e-12)
