"""A fused op that nobody in `sim` knows, registered here alone: a gate behind attention, with its own projection."""

from __future__ import annotations

import dataclasses
import io
import itertools
import json
import math
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
from rich.console import Console

from raysearch.deploy.layers.sharded_layer import unshown
from raysearch.deploy.recommend.demand import Demand
from raysearch.deploy.recommend.recommendation import recommended
from raysearch.reports.explain.layer_text import draw_text
from raysearch.reports.explain.picture import pictures_of
from raysearch.reports.explain.svg import draw_svg
from sim.batched import evaluate_many
from sim.config.catalog import load_workload
from sim.config.files import config_path
from sim.engines.engine_registry import in_space
from sim.layers.model import LayerGroup
from sim.layers.ops import FusedOp, Megatron
from sim.ops.dims import dims_of
from sim.ops.heuristics import megatron_dims, megatron_sp_dims
from sim.ops.layers import all_operations, layer_of, op_names, register_op, withdraw_op
from sim.ops.rank import Rank, Work, elementwise, gemm
from sim.ops.work import norm_work
from sim.optimum.certificate import certify
from sim.optimum.checker import check
from sim.optimum.exact_search import find_best
from sim.optimum.landscape import find_optimum
from sim.optimum.spaces import Space, extended_space, joint_space, paper_space, space_of
from sim.prices.curves import Gemm
from sim.prices.dtypes import DTYPE_BYTES
from sim.sharding.operations import OPERATIONS
from sim.sharding.placement import Array
from sim.sharding.rule_check import WrongRule, check_operation
from sim.sharding.rules import Operation, label_rules, written
from sim.simulate import evaluate
from sim.strategy import NONE, Strategy
from sim.strategy_checks import StrategyError, check_strategy
from sim.workload import Workload

Command = Callable[..., subprocess.CompletedProcess[str]]


def gate(results: Array, hidden: Array, weight: Array) -> Array:
    return results / (1 + np.exp(-(hidden @ weight)))


def gate_work(rank: Rank, op: FusedOp, label: str) -> Work:
    rows = rank.shard(rank.sizes.tokens, when=label == "t")
    hidden, columns = rank.sizes.columns["d"], rank.shard(rank.sizes.columns["a"], when=label == "a")
    dtype = rank.workload.precisions.weights
    product = gemm(rank, dtype, Gemm(rows, hidden, columns), rank.activation_each)
    gating = elementwise(rank, 5.0 * rows * columns, 3 * rows * columns * rank.activation_each)
    return Work((product, gating), weight_bytes=hidden * columns * DTYPE_BYTES[dtype])


GATE = FusedOp(
    name="attn_gate",
    kind="sigmoid_gate",
    side="attention",
    labels=("t", "a"),
    inputs=("attn_out", "attn_in"),
    output="attn_gated",
    letters="ta",
    operation=Operation("sigmoid_gate", "ta,td,da->ta", gate, free="ta"),
    work=gate_work,
    megatron=Megatron(1, 1),
    weighted=True,
)
# A gate is positive, so parts of every kind that a positive factor leaves as they are pass.
RULES = (
    label_rules,
    written(*(f"{part}, R, R -> {part}" for part in ("P(sum)", "P(avg)", "P(max)", "P(min)", "NP(2)"))),
)


def is_gated(group: LayerGroup) -> bool:
    return group.name == "gated"


@pytest.fixture(scope="module", autouse=True)
def _registered() -> Iterator[None]:
    register_op(GATE, RULES, where=is_gated)
    yield
    withdraw_op("attn_gate")


# --- nothing below says anything of the gate to the simulator ---------------------------------------------


def gated(workload: Workload, *more: LayerGroup) -> Workload:
    """The workload with gates in its layers."""
    (group,) = workload.model.groups
    model = dataclasses.replace(workload.model, groups=(dataclasses.replace(group, name="gated"), *more), order=())
    return dataclasses.replace(workload, model=model, name="gated")


@pytest.fixture(scope="module", params=["decode", "serve", "prefill"])
def served(request: pytest.FixtureRequest, toy_moe: Workload) -> Workload:
    roomy = dataclasses.replace(toy_moe.hardware, hbm_bytes=1e12)
    return dataclasses.replace(
        gated(toy_moe), phase=request.param, prompt_tokens=600, output_tokens=100, tpot_slo_s=1e9, hardware=roomy
    )


def some(space: Space) -> Space:
    """Few choices besides the gate's, whose neighbours have several."""
    table = dict(zip(space.choices, ((choice,) for choice in megatron_dims(space.workload.model)), strict=True))
    open_ops = ("attn_gate", "attention", "o_proj", "attn_norm", "attn_residual")
    table |= {name: space.choices[name][: 2 if "attn_" in name and name != "attn_gate" else 3] for name in open_ops}
    degrees = {"tp": (1, 2, 4), "ep": (1, 2), "pp": (1, 2), "batch": (8, 16)}
    return dataclasses.replace(space, **degrees, cp=space.cp[:2], dp=space.dp[:2], choices=table)


def strategies(space: Space) -> list[Strategy]:
    return [
        Strategy(tp, ep, pp, batch, dims, cp, dp)
        for (tp, cp, dp, ep) in space.meshes()
        for pp, batch in itertools.product(space.pp, space.batch)
        for dims in itertools.product(*space.choices.values())
    ]


def test_it_stands_behind_attention_and_the_projection_reads_it(toy_moe: Workload, toy_dense: Workload) -> None:
    for workload in (toy_moe, toy_dense):
        layer = layer_of(gated(workload).model.groups[0])
        names = list(layer.op_by_name)
        assert names[2:5] == ["attention", "attn_gate", "o_proj"]
        assert layer.op("o_proj").inputs == ("attn_gated",)
        assert layer.tensor("attn_out").consumers == ("attn_gate",)
        assert layer.tensor("attn_in").consumers == ("qkv_proj", "attn_gate")
        assert "attn_gate" not in layer_of(workload.model.groups[0]).op_by_name
    alone = dataclasses.replace(gated(toy_dense).model.groups[0], feed_forward=None)
    assert list(layer_of(alone).op_by_name)[3] == "attn_gate"


def test_a_strategy_has_a_choice_for_it_in_the_groups_that_have_it(toy_moe: Workload) -> None:
    plain = toy_moe.model.groups[0]
    mixed = gated(toy_moe, dataclasses.replace(plain, name="plain"))
    assert next(dim for dim in dims_of(mixed) if dim.name == "attn_gate").groups == (0,)
    own = [dim.name for dim in dims_of(dataclasses.replace(mixed, groups="own"))]
    assert "gated.attn_gate" in own
    assert "plain.attn_gate" not in own
    ops = evaluate(mixed, Strategy(2, 2, 1, 8, megatron_dims(mixed.model))).ops
    assert [(op.group, op.name) for op in ops].count(("gated", "attn_gate")) == 1
    assert len(ops) == 13 + 12
    with pytest.raises(StrategyError, match="13 dims"):
        check_strategy(mixed, Strategy(2, 2, 1, 8, (NONE,) * 12))


def test_its_rules_are_proved_and_none_is_missing() -> None:
    verdict = check_operation("attn_gate", all_operations()["attn_gate"])
    assert verdict.proved, (verdict.wrong, [str(rule) for rule in verdict.missing])


def test_every_space_has_its_choices(served: Workload) -> None:
    assert joint_space(served).choices["attn_gate"] == (0, 1, 2)
    assert paper_space(served).choices["attn_gate"] == (1, 2)
    assert "attn_gate" in [each.name for each in extended_space(served).coordinates]
    for dims in (megatron_dims(served.model), megatron_sp_dims(served.model)):
        assert dict(zip(op_names(served.model), dims, strict=True))["attn_gate"] == 1


@pytest.mark.parametrize(("choice", "rows", "columns"), [(0, 2, 128), (1, 8, 32), (2, 8, 128)])
def test_its_price_by_hand(toy_moe: Workload, choice: int, rows: int, columns: int) -> None:
    # tp = 4 of 8 tokens per ep rank, [8, 64] x [64, 128]
    workload = gated(toy_moe)
    dims = dict(zip(op_names(workload.model), megatron_dims(workload.model), strict=True)) | {"attn_gate": choice}
    explained = {op.name: op for op in evaluate(workload, Strategy(4, 2, 1, 16, tuple(dims.values()))).ops}["attn_gate"]
    assert explained.work_flops == 2 * rows * 64 * columns + 5 * rows * columns
    assert explained.traffic_bytes == rows * 64 * 2 + 64 * columns + rows * columns * 2 + 3 * rows * columns * 2
    assert explained.label == {0: "tokens", 1: "heads", 2: "none"}[choice]


def test_what_it_reads_is_moved_to_where_it_reads_it(toy_moe: Workload) -> None:
    workload = gated(toy_moe)
    dims = dict(zip(op_names(workload.model), megatron_dims(workload.model), strict=True))
    whole = evaluate(workload, Strategy(4, 2, 1, 16, tuple((dims | {"attn_gate": NONE}).values())))
    moved = {op.name: [(each.kind, each.tensor) for each in op.collectives] for op in whole.ops}
    assert moved["attn_gate"] == [("all_gather", "attn_out")]
    kept = evaluate(workload, Strategy(4, 2, 1, 16, tuple(dims.values())))
    assert not {op.name: op.collectives for op in kept.ops}["attn_gate"]


@pytest.mark.parametrize("of", [joint_space, extended_space])
def test_the_optimum_is_that_of_brute_force(served: Workload, of: Callable[[Workload], Space]) -> None:
    space = some(of(served))
    every = evaluate_many(served, strategies(space))
    best = find_best(space).evaluation
    assert best is not None
    assert best.tokens_per_s_per_gpu == pytest.approx(every.tokens_per_s_per_gpu[every.feasible].max(), rel=1e-12)


def test_its_optimum_is_proven(toy_moe: Workload) -> None:
    space = some(joint_space(gated(toy_moe)))
    best = find_best(space).evaluation
    assert best is not None
    check(space, certify(space, best))


def test_many_at_once_have_the_figures_of_one_by_one(served: Workload) -> None:
    space, rng = extended_space(served), np.random.default_rng(4)
    sampled = [space.sample(rng) for _ in range(24)]
    many = evaluate_many(served, sampled)
    for index, strategy in enumerate(sampled):
        one = evaluate(served, strategy)
        assert (one.tokens_per_s_per_gpu, one.tpot_s, one.ttft_s, one.feasible) == (
            many.tokens_per_s_per_gpu[index],
            many.tpot_s[index],
            many.ttft_s[index],
            many.feasible[index],
        )


def test_the_landscape_counts_its_choices(toy_moe: Workload) -> None:
    degrees = dataclasses.replace(toy_moe.degrees, tp=(2,), ep=(2,), pp=(1,), batch=(16,))
    workload = dataclasses.replace(gated(toy_moe), degrees=degrees, space="paper")
    space, found = space_of(workload), find_optimum(workload)
    assert (
        found.space_size == space.size == 3 * 2 * space_of(dataclasses.replace(workload, model=toy_moe.model)).size // 3
    )
    best = find_best(space).evaluation
    assert best is not None
    assert best.tokens_per_s_per_gpu == pytest.approx(found.fastest, rel=5e-4)


def test_it_is_recommended_and_drawn(best_alone: None) -> None:
    shipped = load_workload("mixtral_8x22b_8k")
    degrees = dataclasses.replace(shipped.degrees, batch=(1, 2, 4, 8, 16))
    workload = dataclasses.replace(
        in_space(gated(shipped), "vllm"),
        phase="serve",
        prompt_tokens=1000,
        output_tokens=100,
        max_gpus=8,
        degrees=degrees,
    )
    options = recommended(Demand(workload, gpus=8)).options
    assert options
    best = options[0].evaluation
    assert best.strategy.dims == megatron_dims(workload.model)
    assert len(best.strategy.dims) == 13

    pictures = pictures_of("mine", workload, best)
    assert "attn_gate" in [node.name for node in pictures[0].nodes]
    console = Console(width=200, record=True, file=io.StringIO())
    console.print(*draw_text("gated", [pictures]))
    assert "attn_gate" in console.export_text()
    assert "attn_gate" in draw_svg("gated", [pictures])


def test_layers_that_run_say_that_they_have_it_not(toy_dense: Workload) -> None:
    assert unshown(gated(toy_dense).model) == ("attn_gate (an op that somebody registered)",)


# --- an op of a kind that there is, on the other side -----------------------------------------------------

POST_NORM = FusedOp(
    name="post_norm",
    kind="norm",
    side="experts",
    labels=("t", "d"),
    inputs=("ffn_out",),
    output="ffn_normed",
    letters="td",
    operation=OPERATIONS["norm"],
    work=norm_work,
    megatron=Megatron(NONE, 0),
)


@pytest.fixture(scope="module")
def sandwiched(toy_dense: Workload) -> Iterator[Workload]:
    """Layers with a norm behind the feed-forward network, too."""
    register_op(POST_NORM, where=lambda group: group.name == "sandwich")
    (group,) = toy_dense.model.groups
    model = dataclasses.replace(toy_dense.model, groups=(dataclasses.replace(group, name="sandwich"),))
    yield dataclasses.replace(toy_dense, model=model, tpot_slo_s=1e9)
    withdraw_op("post_norm")


def test_parts_of_a_sum_are_reduced_before_a_norm_behind_them(sandwiched: Workload) -> None:
    ops = {op.name: op for op in evaluate(sandwiched, Strategy(4, 1, 1, 16, megatron_dims(sandwiched.model))).ops}
    assert [(each.kind, each.tensor) for each in ops["post_norm"].collectives] == [("all_reduce", "ffn_out")]
    assert not ops["combine"].collectives


@pytest.mark.parametrize("of", [joint_space, extended_space])
def test_so_is_the_optimum_over_it(sandwiched: Workload, of: Callable[[Workload], Space]) -> None:
    space = of(sandwiched)
    table = dict(zip(space.choices, ((choice,) for choice in megatron_sp_dims(sandwiched.model)), strict=True))
    table |= dict.fromkeys(("post_norm", "ffn2", "combine", "ffn_norm", "attn_residual"), (0, 1, 2))
    degrees = {"tp": (1, 2, 4), "ep": (1, 2), "pp": (1, 2), "batch": (8, 16)}
    space = dataclasses.replace(space, **degrees, cp=space.cp[:2], dp=space.dp[:2], choices=table)
    every = evaluate_many(sandwiched, strategies(space))
    best = find_best(space).evaluation
    assert best is not None
    assert best.tokens_per_s_per_gpu == pytest.approx(every.tokens_per_s_per_gpu[every.feasible].max(), rel=1e-12)


MODULE = """
from sim.layers.ops import FusedOp, Megatron
from sim.ops.layers import register_op
from sim.ops.work import norm_work
from sim.sharding.operations import OPERATIONS

def declare():
    register_op(
        FusedOp(
            "post_norm", "norm", "experts", ("t", "d"), ("ffn_out",), "ffn_normed", "td",
            OPERATIONS["norm"], norm_work, Megatron(2, 0),
        )
    )
"""


@pytest.mark.slow
def test_a_workload_file_brings_its_op_to_commands(raysearch: Command, tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(MODULE, encoding="utf-8")
    shipped = config_path("workloads", "llama_3_1_405b_8k").read_text(encoding="utf-8")
    text = shipped.replace("phase =", 'declared_choices = "mine:declare"\nphase =', 1)
    (tmp_path / "mine.toml").write_text(text, encoding="utf-8")
    degrees = ("--tp", "8", "--pp", "4", "--ep", "1", "--batch", "32", "--dims", "megatron-sp")
    answer = json.loads(raysearch("explain", "-w", "mine.toml", *degrees, "--json", cwd=tmp_path).stdout)
    assert [node["name"] for node in answer["pictures"][0]["nodes"]][-2:] == ["post_norm", "combine"]


# --- refused ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"name": "router"}, "already"),
        ({"output": "attn_out"}, "already"),
        ({"name": "attn_gate"}, "already"),
        ({"inputs": ("ffn_mid",)}, "on the side of attention it can read"),
        ({"inputs": ("residual_in",)}, "on the side of attention it can read"),
        ({"letters": "tx"}, "columns must be one of"),
        ({"labels": ("t", "d")}, "shards 'd'"),
    ],
)
def test_what_cannot_be_is_refused(changes: dict[str, object], message: str) -> None:
    other = {"name": "other", "output": "other_out"} | changes
    with pytest.raises(ValueError, match=message):
        register_op(dataclasses.replace(GATE, **other))
    assert "other" not in all_operations()


def test_a_wrong_rule_is_refused_with_numbers() -> None:
    summed = dataclasses.replace(GATE.operation, kind="wrong_gate")
    with pytest.raises(WrongRule, match="wrong_gate"):
        register_op(
            dataclasses.replace(GATE, name="other", output="other_out", operation=summed),
            (label_rules, written("R, P(sum), R -> P(sum)")),  # a sigmoid is not linear
        )
    assert "other" not in all_operations()


def test_layers_that_are_in_use_get_no_op_behind_their_back(toy_moe: Workload) -> None:
    layer_of(toy_moe.model.groups[0])
    with pytest.raises(ValueError, match="in use without 'other'"):
        register_op(dataclasses.replace(GATE, name="other", output="other_out"))
    assert math.isfinite(evaluate(toy_moe, Strategy(1, 1, 1, 1, (NONE,) * 12)).tpot_s)


def test_withdrawing_names_what_there_is() -> None:
    with pytest.raises(ValueError, match="did you mean 'attn_gate'"):
        withdraw_op("attn_gates")
