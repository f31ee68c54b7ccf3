"""Engines as spaces: their rules on cases worked out by hand, their exact optimum against brute force."""

from __future__ import annotations

import dataclasses
import itertools
import pickle
from pathlib import Path

import numpy as np
import pytest

from sim.batched import evaluate_many
from sim.config.catalog import load_model, load_workload, under_engine
from sim.config.files import CatalogError
from sim.config.question import Question
from sim.engines.engine_registry import (
    UnknownEngine,
    engine_names,
    engine_rules,
    engine_rules_of,
    in_space,
    lacking_formats,
    register_engine,
    withdraw_engine,
)
from sim.engines.engine_rules import EngineRules
from sim.evaluation import Evaluation
from sim.layers.model import Model
from sim.ops.heuristics import megatron_dims, megatron_sp_dims
from sim.optimum.exact_search import find_best, find_bests
from sim.optimum.spaces import engine_space, extended_space, heuristic_space, space_of
from sim.simulate import evaluate
from sim.strategy import Strategy
from sim.workload import DegreeTables, Workload
from tests.questions import question_about

SHIPPED = ("vllm", "sglang", "trtllm", "megatron_core")
H100 = load_workload("gpt_moe_1_2t_16k").hardware
ODD = {"tp": 4, "dp": 2, "ep": 8, "pp": 3}
FLAGSHIP = dataclasses.replace(load_workload("gpt_moe_1_2t_16k"), expert_exchange="all_gather")


def served(model: str, engine: str, **fields: object) -> Workload:
    question = question_about(model, isl=4000, osl=500, phase="serve", engine=engine, **fields)  # type: ignore[arg-type]
    return question.load()


def refused(workload: Workload, engine: str, **degrees: int) -> list[str]:
    """What an engine says to degrees under its first plan."""
    rules = engine_rules(engine)
    dims = rules.plans(workload)[0].dims
    return rules.refusals(workload, Strategy(**{"tp": 1, "ep": 1, "pp": 1, "batch": 8, "dims": dims, **degrees}))  # type: ignore[arg-type]


# --- rules ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("engine", "degrees", "runs"),
    [
        ("vllm", {"tp": 8, "dp": 4, "ep": 32}, True),  # expert parallelism on
        ("vllm", {"tp": 8, "dp": 4, "ep": 1}, True),  # off: moe_tp 32
        ("vllm", {"tp": 4, "dp": 4, "ep": 4}, False),  # the paper's meshes with tp > 1
        ("vllm", {"tp": 8, "dp": 2, "ep": 16, "pp": 2}, True),  # ranks of two whole nodes
        ("vllm", {"tp": 4, "dp": 2, "ep": 8, "pp": 3}, False),  # ranks of a node and a half
        ("vllm", {"tp": 4, "dp": 1, "ep": 4, "pp": 3}, True),  # a single rank lies anywhere
        ("sglang", {"tp": 4, "dp": 4, "ep": 4}, True),  # attn_dp 4 of tp-size 16, ep 4, moe_tp 4
        ("trtllm", {"tp": 16, "dp": 1, "ep": 4}, True),  # attention all-TP, any factors of the experts
        ("trtllm", {"tp": 1, "dp": 16, "ep": 4}, True),  # attention all-DP
        ("trtllm", {"tp": 4, "dp": 4, "ep": 4}, False),  # nothing between
        ("megatron_core", {"tp": 4, "dp": 4, "ep": 4}, True),
    ],
)
def test_degrees_run_where_the_engines_flags_can_say_them(engine: str, degrees: dict[str, int], runs: bool) -> None:
    found = refused(FLAGSHIP, engine, **degrees)
    assert (not found) == runs
    for text in found:
        assert text.startswith(f"{engine_rules(engine).title} {engine_rules(engine).version}: ")


def test_an_all_to_all_makes_sglangs_experts_lie_on_all_gpus() -> None:
    travelling = dataclasses.replace(FLAGSHIP, expert_exchange="all_to_all")
    assert refused(travelling, "sglang", tp=4, dp=4, ep=4)
    assert not refused(travelling, "sglang", tp=4, dp=4, ep=16)
    assert not refused(travelling, "sglang", tp=4, dp=16, ep=1)  # experts cut, not shared out: nothing travels
    assert not refused(FLAGSHIP, "sglang", tp=4, dp=4, ep=4)


def test_context_is_shared_by_gpus_that_would_repeat_a_kv_head_and_by_no_others() -> None:
    qwen = served("qwen3_235b_a22b", "vllm")
    assert (qwen.model.heads, qwen.model.groups[0].attention.kv_heads) == (64, 4)
    assert not refused(qwen, "vllm", tp=4, cp=4, dp=1, ep=16)  # tensor-parallel size 16 repeats each KV head 4 times
    assert refused(qwen, "vllm", tp=2, cp=4, dp=1, ep=8)  # size 8 repeats them twice, and 4 GPUs would share one
    assert not refused(served("deepseek_v3", "vllm"), "vllm", tp=1, cp=8, dp=1, ep=8)  # a latent cache has no heads
    assert not refused(dataclasses.replace(qwen, phase="decode"), "trtllm", tp=4, cp=4, dp=1, ep=16)


@pytest.mark.parametrize(
    ("engine", "model", "degrees", "runs"),
    [
        (
            "vllm",
            "deepseek_v3",
            {"tp": 4, "cp": 2, "dp": 1, "ep": 8},
            False,
        ),  # NIXL: all GPUs of a rank, or none
        ("vllm", "deepseek_v3", {"tp": 1, "cp": 8, "dp": 1, "ep": 8}, True),
        ("vllm", "llama_3_1_70b", {"tp": 8, "cp": 2}, False),  # and sends shared caches of latent attention alone
        ("sglang", "deepseek_v3", {"tp": 4, "cp": 2, "dp": 1, "ep": 8}, True),
        ("sglang", "glm_5", {"tp": 4, "cp": 2, "dp": 1, "ep": 8}, False),  # of sparse attention none
        ("sglang", "llama_3_1_70b", {"tp": 8, "cp": 2}, False),
    ],
)
def test_pools_share_contexts_that_their_engine_can_send(
    engine: str, model: str, degrees: dict[str, int], runs: bool
) -> None:
    whole, pool = (
        question_about(model, isl=4000, osl=500, phase=phase, engine=engine, gpus=16).load()
        for phase in ("serve", "decode")
    )
    assert not refused(whole, engine, **degrees)
    assert (not refused(pool, engine, **degrees)) == runs


@pytest.mark.parametrize(
    ("engine", "model", "phase", "runs"),
    [
        ("vllm", "qwen3_32b", "prefill", True),  # NixlPushConnector
        ("vllm", "qwen3_32b", "decode", False),  # kv_consumer
        ("vllm", "gpt_oss_120b", "prefill", False),  # windows beside whole contexts
        ("vllm", "qwen3_5_397b_a17b", "prefill", False),  # linear mixers
        ("sglang", "qwen3_32b", "decode", True),
        ("trtllm", "qwen3_32b", "decode", True),
    ],
)
def test_pools_have_the_pipelines_whose_caches_their_engine_can_send(
    engine: str, model: str, phase: str, runs: bool
) -> None:
    whole, pool = (
        question_about(model, isl=4000, osl=500, phase=each, engine=engine, gpus=16).load() for each in ("serve", phase)
    )
    assert not refused(whole, engine, tp=1, pp=2)
    assert (not refused(pool, engine, tp=1, pp=2)) == runs


def test_old_versions_send_the_caches_of_one_stage() -> None:
    for version, runs in (("0.12.0", False), ("0.19.1", False), ("0.31.0", True), (None, True)):
        named = {"engine_version": version} if version else {}
        pool = question_about("qwen3_32b", isl=4000, osl=500, phase="prefill", engine="vllm", gpus=4, **named).load()
        assert (not refused(pool, "vllm", tp=1, pp=2)) == runs


def test_sglang_connects_pools_of_alike_pipelines_or_of_none_in_decode() -> None:
    def says(engine: str, prefill: int, decode: int) -> list[str]:
        pools = (Strategy(1, 1, pp, 8, megatron_dims(load_model("qwen3_32b"))) for pp in (prefill, decode))
        return engine_rules(engine).pair_refusals(*pools)

    assert not any(says("sglang", *stages) for stages in ((1, 1), (4, 1), (2, 2)))
    assert says("sglang", 4, 2) == [
        "SGLang 0.5.23: --pp-size of the decode pool is 1 or that of the prefill pool, 4, not 2"
    ]
    assert says("sglang", 1, 2)
    assert not says("trtllm", 1, 2)


def test_blocks_of_fp8_weights_are_not_cut() -> None:
    qwen = served("qwen3_235b_a22b", "vllm", weights="fp8_block")
    assert qwen.model.groups[0].feed_forward.ffn_hidden == 12 * 128
    assert not refused(qwen, "vllm", tp=4, dp=1)  # 3 blocks each
    assert "inside blocks" in refused(qwen, "vllm", tp=8, dp=1)[0]
    assert not refused(qwen, "vllm", tp=8, dp=1, ep=8)  # whole experts


def test_a_rank_lies_within_a_host_of_several_that_fast_links_join() -> None:
    rack = served("qwen3_235b_a22b", "vllm", hardware="gb200_nvl72", gpus=72)
    assert "12 GPUs do neither on nodes of 8" in refused(dataclasses.replace(rack, hardware=H100), "vllm", **ODD)[0]
    assert not refused(rack, "vllm", **ODD)  # three trays of 4
    assert "6 GPUs do neither on nodes of 4" in refused(rack, "vllm", **{**ODD, "tp": 2, "ep": 4})[0]


def test_ranks_of_a_dense_model_are_replicas() -> None:
    dense = served("qwen3_32b", "vllm")
    assert {name: bool(refused(dense, name, tp=2, dp=2)) for name in SHIPPED} == dict.fromkeys(SHIPPED, True)


def test_norms_over_tokens_are_megatrons_and_of_sglangs_prefill() -> None:
    def sharded(engine: str, model: Model, phase: str, tp: int = 2) -> list[str]:
        workload = dataclasses.replace(FLAGSHIP, model=model, phase=phase)  # type: ignore[arg-type]
        return engine_rules(engine).refusals(workload, Strategy(tp, 1, 1, 8, megatron_sp_dims(model), dp=1))

    moe, dense = load_model("qwen3_235b_a22b"), load_model("qwen3_32b")
    runs = {
        (e, m.name, p) for e in SHIPPED for m in (moe, dense) for p in ("decode", "prefill") if not sharded(e, m, p)
    }
    megatrons = {("megatron_core", m.name, p) for m in (moe, dense) for p in ("decode", "prefill")}
    assert runs == {*megatrons, ("sglang", dense.name, "prefill")}
    assert "attn_norm 2, not 0" in sharded("vllm", moe, "decode")[0]
    assert not sharded("vllm", dense, "decode", tp=1)  # one GPU has all tokens and all columns


def test_an_evaluation_names_the_engines_rule() -> None:
    workload = in_space(FLAGSHIP, "vllm")
    strategy = Strategy(4, 16, 1, 256, megatron_dims(workload.model))
    broken = [violation for violation in evaluate(workload, strategy).violations if violation.kind == "engine"]
    assert [violation.message for violation in broken] == engine_rules("vllm").refusals(workload, strategy)
    assert broken[0].message.startswith("vLLM 0.33.0: expert parallelism is all or nothing")
    assert broken[0].excess == 1.0
    assert not [v for v in evaluate(FLAGSHIP, strategy).violations if v.kind == "engine"]


def test_rules_are_the_engine_s_that_a_workload_has_whatever_is_registered() -> None:
    mine = dataclasses.replace(engine_rules("vllm"), name="mine", title="Mine", version="1")
    workload = dataclasses.replace(FLAGSHIP, space="mine", rules=mine)
    strategy = Strategy(4, 16, 1, 256, megatron_dims(workload.model))
    broken = [violation.message for violation in evaluate(workload, strategy).violations if violation.kind == "engine"]
    assert broken
    assert all(message.startswith("Mine 1: ") for message in broken)
    assert space_of(workload).engine is mine
    assert dataclasses.replace(workload, space="joint").rules is None
    with pytest.raises(ValueError, match="in_space"):
        dataclasses.replace(workload, space="vllm")


# --- the exact optimum ---------------------------------------------------------------------------


@pytest.fixture(scope="module")
def small(toy_moe: Workload) -> Workload:
    degrees = DegreeTables((1, 2, 4), (1, 2, 4), (1, 2), (8, 16))
    return dataclasses.replace(toy_moe, degrees=degrees, max_gpus=16, tpot_slo_s=1e9, expert_exchange="all_gather")


@pytest.mark.parametrize("engine", SHIPPED)
def test_the_best_is_that_of_brute_force(small: Workload, engine: str) -> None:
    workload = in_space(small, engine)
    space = space_of(workload)
    plans = {plan.dims for plan in space.engine.plans(workload)} if space.engine else set()
    meshes = itertools.product(space.tp, space.ep, space.pp, space.batch, space.cp, space.dp)
    strategies = [
        Strategy(tp, ep, pp, batch, dims, cp, dp)
        for tp, ep, pp, batch, cp, dp in meshes
        if tp * cp * dp <= 16
        for dims in plans
    ]
    every = evaluate_many(workload, strategies)
    runs = every.feasible
    assert 0 < runs.sum() <= sum(not space.outside(each) for each in strategies) < len(strategies)
    for share in (1.0, 0.3):
        slo_s = float(np.quantile(every.tpot_s[runs], share, method="inverted_cdf")) * (1 + 1e-9)
        best = every.tokens_per_s_per_gpu[runs & (every.tpot_s <= slo_s)].max()
        found = find_best(dataclasses.replace(space, workload=dataclasses.replace(workload, tpot_slo_s=slo_s)))
        assert found.evaluation is not None
        assert found.evaluation.feasible
        assert found.evaluation.tokens_per_s_per_gpu == pytest.approx(best, rel=1e-12)


@pytest.mark.parametrize("engine", SHIPPED)
def test_a_spaces_size_counts_what_the_engine_runs(small: Workload, engine: str) -> None:
    space = dataclasses.replace(engine_space(small, engine_rules(engine)), tp=(1, 4))
    box = itertools.product(space.tp, space.ep, space.pp, space.cp, space.dp)
    plans = engine_rules(engine).plans(small)
    runs = [
        strategy
        for tp, ep, pp, cp, dp in box
        for plan in plans
        if not space.outside(strategy := Strategy(tp, ep, pp, 8, plan.dims, cp, dp))
        and not [v for v in evaluate(small, strategy).violations if v.kind == "meshes"]
    ]
    assert space.size == len(runs) * len(space.batch)
    assert space.distinct_size <= space.size


def test_an_engine_has_no_more_than_the_extended_space_and_megatron_no_less_than_its_heuristic(small: Workload) -> None:
    def best(space: object) -> Evaluation:
        found = find_best(space).evaluation  # type: ignore[arg-type]
        assert found is not None
        return found

    most = best(extended_space(small)).tokens_per_s_per_gpu
    bests = {name: best(engine_space(small, engine_rules(name))).tokens_per_s_per_gpu for name in SHIPPED}
    assert max(bests.values()) <= most * (1 + 1e-12)
    for sequence_parallel in (True, False):
        heuristic = best(heuristic_space(small, sequence_parallel=sequence_parallel)).tokens_per_s_per_gpu
        assert bests["megatron_core"] >= heuristic * (1 - 1e-12)


# --- the registry --------------------------------------------------------------------------------


def _even(_workload: Workload, strategy: Strategy) -> list[str]:
    return [] if strategy.tp % 2 == 0 else ["tensor parallelism is even"]


@pytest.fixture
def mine() -> object:
    rules = dataclasses.replace(engine_rules("sglang"), name="mine", title="Mine", version="1", refuses=_even)
    register_engine(rules)
    yield rules
    withdraw_engine("mine")


def test_a_registered_engine_is_a_space_and_charges_its_memory(mine: EngineRules) -> None:
    workload = served("mixtral_8x7b", "mine", gpus=8)
    assert workload.space == "mine"
    assert workload.engine is not None
    assert workload.engine.memory == mine.memory
    found = find_best(space_of(workload)).evaluation
    assert found is not None
    assert found.strategy.tp % 2 == 0
    assert "mine" in engine_names()
    with pytest.raises(ValueError, match="already"):
        register_engine(mine)


def test_unknown_engines_and_spaces_are_reported_with_a_suggestion() -> None:
    with pytest.raises(UnknownEngine, match="did you mean 'sglang'"):
        engine_rules("sgalng")
    with pytest.raises(CatalogError, match="did you mean 'vllm'"):
        served("mixtral_8x7b", "vlm")
    with pytest.raises(CatalogError, match="unknown space 'extnded': did you mean 'extended'"):
        question_about("mixtral_8x7b", isl=100, osl=10, space="extnded").load()


def test_a_version_has_rules_and_times_of_its_own_and_the_first_is_the_default(tmp_path: Path) -> None:
    first = served("qwen3_32b", "vllm")
    named = served("qwen3_32b", "vllm", engine_version=engine_rules("vllm").version)
    assert (named.engine, named.config_hash) == (first.engine, first.config_hash)
    old = served("qwen3_32b", "vllm", engine_version="0.12.0")
    assert old.engine
    assert first.engine
    assert old.engine.times.step_s > first.engine.times.step_s
    assert old.config_hash != first.config_hash
    path = tmp_path / "mine.toml"
    path.write_text('engine = "vllm"\nversion = "0.40"\nsource = "mine"\nweights = ["bf16"]\n', encoding="utf-8")
    with pytest.raises(CatalogError, match=r"vLLM 0\.40: it keeps its weights in bf16, not in fp8"):
        served("qwen3_32b", "vllm", engine_version=str(path), weights="fp8")
    assert pickle.loads(pickle.dumps(old)).engine == old.engine
    rules = engine_rules_of(served("qwen3_32b", "vllm", engine_version=str(path), weights="bf16"))
    assert rules is not None
    assert rules.version == "0.40"


@pytest.mark.parametrize(
    ("engine", "version", "message"),
    [
        ("vllm", "0.20", r"unknown version '0\.20' of vLLM: known: 0\.33\.0, .*, 0\.12\.0; for another, give"),
        ("sglang", "0.12.0", r"unknown version '0\.12\.0' of SGLang: known: "),
        ("vllm", "nowhere.toml", "nowhere.toml"),
        ("none", "0.12.0", "the bare machine has none"),
    ],
)
def test_an_unknown_version_is_reported_with_those_that_are_known(engine: str, version: str, message: str) -> None:
    with pytest.raises(CatalogError, match=message):
        served("qwen3_32b", engine, engine_version=version)


def test_an_engine_searches_what_it_runs_unless_asked_otherwise() -> None:
    assert served("mixtral_8x7b", "trtllm").space == "trtllm"
    old = question_about("mixtral_8x7b", isl=100, osl=10, engine="vllm<0.14").load()
    assert old.space == "vllm"
    joint = question_about("mixtral_8x7b", isl=100, osl=10, engine="vllm", space="joint").load()
    assert joint.space == "joint"
    assert question_about("mixtral_8x7b", isl=100, osl=10).load().space == "joint"


@pytest.mark.parametrize("by_fill", [False, True])
def test_the_best_of_different_degrees_are_those_of_brute_force(small: Workload, by_fill: bool) -> None:
    workload = in_space(dataclasses.replace(small, max_gpus=8), "megatron_core")
    space = space_of(workload)

    def score(value: float, gpus: int) -> float:
        return value * (6 // gpus) * gpus / 6 if by_fill else value  # of 6 GPUs

    strategies = [
        Strategy(tp, ep, pp, batch, part.only_dims, cp, dp)
        for part in space.parts()
        for tp, cp, dp, ep in part.meshes()
        for pp, batch in itertools.product(part.stages((tp, cp, dp, ep)), space.batch)
    ]
    every, of_degrees = evaluate_many(workload, strategies), dict[tuple[int, ...], float]()
    for each, value in zip(strategies, (every.tokens_per_s_per_gpu * every.feasible).tolist(), strict=True):
        key = (each.tp, each.cp, each.attention_dp, each.ep, each.pp)
        of_degrees[key] = max(score(value, each.gpus), of_degrees.get(key, 0.0))
    wanted = [value for value in sorted(of_degrees.values(), reverse=True)[:7] if value > 0]
    bests = find_bests(space, 7, score)
    assert [score(each.tokens_per_s_per_gpu, each.gpus) for each in bests] == pytest.approx(wanted, rel=1e-12)
    assert len({(s.tp, s.cp, s.attention_dp, s.ep, s.pp) for s in (each.strategy for each in bests)}) == len(bests)


def test_formats_and_machines_are_an_engine_s_own() -> None:
    """A recommendation must be what its engine runs: formats come from its rules, and others are refused by them."""
    for engine, formats in {"megatron_core": ("bf16", "bf16"), "vllm": ("fp8_block", "bf16")}.items():
        precisions = served("qwen3_32b", engine).precisions
        assert (precisions.weights, precisions.kv_cache) == formats
    published = {"llama_3_1_8b": "bf16", "mixtral_8x7b": "bf16", "deepseek_v3": "fp8_block", "gpt_oss_120b": "bf16"}
    for model, weights in published.items():  # what an engine loads without being told more
        assert served(model, "vllm").precisions.weights == weights
    for asked in ({"weights": "fp8"}, {"kv_cache": "fp8"}):
        with pytest.raises(CatalogError, match=r"Megatron-Core 0.16.1: it keeps its .* in bf16, not in fp8"):
            served("qwen3_32b", "megatron_core", **asked)
    with pytest.raises(CatalogError, match=r"TensorRT-LLM 1.3.0rc: it runs on NVIDIA GPUs alone, not on mi300x"):
        served("qwen3_32b", "trtllm", hardware="mi300x")
    assert served("qwen3_32b", "vllm", hardware="mi300x").engine
    mine = dataclasses.replace(
        engine_rules("vllm"), name="mine", title="Mine", weights=("int4",), lacks_machine=lambda _: ["it has no driver"]
    )
    register_engine(mine)
    try:
        with pytest.raises(CatalogError, match=r"Mine 0.33.0: it keeps its weights in int4, not in bf16"):
            served("qwen3_32b", "mine", weights="bf16")
        with pytest.raises(CatalogError, match=r"Mine 0.33.0: it has no driver"):
            served("qwen3_32b", "mine")  # its weights are int4 then
    finally:
        withdraw_engine("mine")


def test_a_workload_keeps_its_formats_under_an_engine_that_it_was_not_written_for_and_says_so() -> None:
    written = load_workload("gpt_moe_1_2t_16k")
    under = load_workload("gpt_moe_1_2t_16k", engine="megatron_core")
    assert under.precisions == written.precisions
    assert [text.partition(": ")[2] for text in lacking_formats(under)] == [
        "it keeps its weights in bf16, not in fp8",
        "it keeps its KV cache in bf16, not in fp8",
    ]
    assert lacking_formats(written) == lacking_formats(load_workload("gpt_moe_1_2t_16k", engine="vllm")) == []


def test_another_engine_has_its_own_kernels_memory_and_time() -> None:
    """A workload put under an engine is the one that names it from the start."""
    strategy = Strategy(4, 1, 1, 16, megatron_dims(load_model("qwen3_32b")))
    for engine in ("sglang", "trtllm"):
        moved = under_engine(served("qwen3_32b", "vllm"), engine)
        assert evaluate(moved, strategy) == evaluate(served("qwen3_32b", engine), strategy)


def test_which_models_sglang_splits_norms_of_stands_in_their_files_not_in_their_names() -> None:
    asked = Question(model="qwen3_32b", isl=4000, osl=100, phase="prefill", engine="sglang", space="sglang").load()
    published = dataclasses.replace(asked.model.published, layernorm_sp=())
    for model, splits in (
        (dataclasses.replace(asked.model, name="mine"), True),
        (dataclasses.replace(asked.model, published=published), False),
    ):
        plans = engine_rules("sglang").plans(dataclasses.replace(asked, model=model))
        assert any("--enable-layernorm-sp" in plan.name for plan in plans) == splits
