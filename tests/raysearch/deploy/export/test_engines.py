"""Exports to engines: only options that the engine has, degrees that multiply to the GPUs, and honest costs."""

from __future__ import annotations

import json
import re
import shlex
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml

from raysearch.base.errors import InputError
from raysearch.cli.commands.question_options import loaded
from raysearch.deploy.export.deployment import Deployment, Export
from raysearch.deploy.export.engine_words import read_capability
from raysearch.deploy.export.fitting import on_engine
from raysearch.deploy.export.formats import exporter, exporter_names, register_exporter
from raysearch.deploy.export.models import CHECKPOINT, repository
from sim.config.catalog import load_model, read_versions
from sim.config.question import Question
from sim.engines.engine_registry import engine_rules
from sim.layers.eagle3_head import eagle3_head
from sim.ops.heuristics import megatron_dims, megatron_sp_dims
from sim.optimum.spaces import engine_space
from sim.simulate import evaluate
from sim.strategy import Strategy
from sim.workload import Speculation, Workload
from tests.questions import question_about

OPTIONS = json.loads((Path(__file__).parent / "options.json").read_text())
ENGINES = {"vllm": "vllm", "sglang": "sglang", "trtllm": "trtllm", "megatron": "megatron_core"}
"""Export target -> engine."""


@cache
def served(model: str, engine: str = "none", **fields: object) -> Workload:
    asked = {"isl": 4000, "osl": 500, "phase": "serve", **fields}
    return question_about(model, engine=engine, **asked).load()


def options_of(command: str) -> dict[str, str]:
    """Options of a command and their values."""
    parts = shlex.split(command.replace("\\\n", " "))
    named = [at for at, word in enumerate(parts) if word.startswith("--")]
    return {parts[at]: "" if at + 1 in named or at + 1 == len(parts) else parts[at + 1] for at in named}


def some_strategies(target: str, workload: Workload, count: int) -> list[Strategy]:
    """Strategies that the engine runs, drawn over its meshes, stages and plans."""
    rules = engine_rules(ENGINES[target])
    space = engine_space(on_engine(workload, rules), rules)
    rng = np.random.default_rng(0)
    every = [(part, mesh) for part in space.parts() for mesh in part.layouts()]
    found: list[Strategy] = []
    for part, (tp, cp, dp, ep) in (every[index] for index in rng.permutation(len(every))):
        most = workload.max_gpus // (tp * cp * dp)
        if len(found) < count and (stages := [pp for pp in part.stages((tp, cp, dp, ep)) if pp <= most]):
            found.append(Strategy(tp, ep, int(rng.choice(stages)), 64, part.only_dims, cp, dp))
    return found


@pytest.mark.parametrize("target", ENGINES)
@pytest.mark.parametrize(
    "workload",
    [
        served("qwen3_235b_a22b"),
        served("deepseek_v3", chunk_tokens=2048, weights="fp8_block"),
        served("qwen3_32b", phase="prefill"),
        replace(served("mixtral_8x7b", phase="decode"), expert_exchange="all_to_all"),
    ],
    ids=lambda workload: workload.name,
)
def test_every_option_exists_and_degrees_multiply_to_the_gpus(target: str, workload: Workload) -> None:
    for strategy in some_strategies(target, workload, 3):
        made = exporter(target)(Deployment(workload, strategy, "org/model"))
        options = options_of(made.command_text)
        assert not [text for text in made.dropped if "cannot" in text or "in its place" in text]
        if target == "trtllm":
            config = yaml.safe_load(made.files["config.yaml"])
            assert set(config) <= set(OPTIONS["trtllm"]["options"])
            gpus = config["tensor_parallel_size"] * config["pipeline_parallel_size"]
            assert gpus * config.get("context_parallel_size", 1) == strategy.gpus
            if workload.model.is_moe:
                stage = strategy.gpus // strategy.pp
                assert config["moe_tensor_parallel_size"] * config["moe_expert_parallel_size"] == stage
            assert config["max_num_tokens"] % config["kv_cache_config"]["tokens_per_block"] == 0
            continue
        assert made.command is not None
        engine, torchrun = ENGINES[target], OPTIONS["torchrun"]["options"]
        written = [flag for flag in made.command.flags if flag[0] not in (*torchrun, "-m")]
        for version in read_versions(engine):
            words, lost = read_capability(engine, version).words(written)
            assert not [text for text in lost if "--enable-layernorm-sp" not in text]  # which older ones do not know
            assert not read_capability(engine, version).refusals(words, {})
        if target == "vllm":
            sizes = ("--tensor-parallel-size", "--pipeline-parallel-size", "--data-parallel-size")
            assert np.prod([int(options.get(size, 1)) for size in sizes]) == strategy.gpus
            assert int(options["--max-num-seqs"]) * int(options.get("--data-parallel-size", 1)) >= strategy.batch
            assert ("--enable-expert-parallel" in options) == (strategy.ep > 1)
        if target == "sglang":
            tp, groups = int(options["--tp-size"]), int(options.get("--attn-dp-size", 1))
            assert tp * int(options.get("--pp-size", 1)) == strategy.gpus
            assert tp // groups == strategy.tp * strategy.cp
            assert tp % int(options.get("--ep-size", 1)) == 0
        if target == "megatron":
            model_parallel = strategy.tp * strategy.pp
            processes = int(options["--nproc-per-node"]) * int(options.get("--nnodes", 1))
            assert processes == strategy.gpus
            assert processes // model_parallel == strategy.attention_dp
            experts = int(options.get("--expert-model-parallel-size", 1)) * int(
                options.get("--expert-tensor-parallel-size", 1)
            )
            assert not workload.model.is_moe or experts * strategy.pp == processes


@pytest.mark.parametrize("draft", ["mtp", "qwen3_32b", "eagle3", None])
def test_drafts_and_copies_of_experts_are_written_in_each_engine_s_words(draft: str | None) -> None:
    head = eagle3_head(load_model("gpt_oss_120b"))
    drafters = {"qwen3_32b": load_model("qwen3_32b"), "eagle3": head, "mtp": "mtp", None: None}
    speculation = Speculation(3, (0.8, 0.6, 0.4), drafters[draft], eagle3=draft == "eagle3")
    workload = replace(served("deepseek_v3", gpus=32), speculation=speculation, redundant_experts=32)
    deployment = Deployment(workload, Strategy(1, 32, 1, 64, megatron_dims(workload.model)), "m")
    made = {target: exporter(target)(deployment) for target in ENGINES}
    vllm, sglang = (options_of(made[target].command_text) for target in ("vllm", "sglang"))
    config = json.loads(vllm["--speculative-config"])
    assert config["num_speculative_tokens"] == 3
    assert config["method"] == {"mtp": "mtp", "qwen3_32b": "draft_model", "eagle3": "eagle3", None: "ngram"}[draft]
    weights = {"qwen3_32b": "Qwen/Qwen3-32B", "eagle3": "RedHatAI/gpt-oss-120b-speculator.eagle3"}.get(draft or "")
    assert config.get("model") == sglang.get("--speculative-draft-model-path") == weights
    algorithms = {"mtp": "EAGLE", "qwen3_32b": "STANDALONE", "eagle3": "EAGLE3", None: "NGRAM"}
    assert sglang["--speculative-algorithm"] == algorithms[draft]
    assert json.loads(vllm["--eplb-config"]) == {"num_redundant_experts": 32}
    assert sglang["--speculative-num-draft-tokens"] == "4"  # with the token that the target model adds
    assert sglang["--ep-num-redundant-experts"] == "32"
    trtllm = yaml.safe_load(made["trtllm"].files["config.yaml"])
    kinds = {"mtp": "MTP", "qwen3_32b": "Draft_Target", "eagle3": "Eagle3", None: "NGram"}
    assert trtllm["speculative_config"]["decoding_type"] == kinds[draft]
    assert 3 in trtllm["speculative_config"].values()
    assert trtllm["moe_config"]["load_balancer"]["num_slots"] == 256 + 32
    assert f"without {speculation.drafter} drafts, without copies of experts" in " ".join(made["megatron"].dropped)


def test_prompts_that_wait_for_each_other_are_passed_to_engines_that_can() -> None:
    workload = replace(served("deepseek_v3", gpus=32), prompt_wait_steps=40)
    dims = megatron_dims(workload.model)
    own, shared = (Deployment(workload, Strategy(8 // dp, 8, 1, 64, dims, 1, dp), "m") for dp in (8, 1))
    flags = options_of(exporter("sglang")(own).command_text)
    assert "--enable-prefill-delayer" in flags
    assert flags["--prefill-delayer-max-delay-passes"] == "40"
    assert not [each for each in options_of(exporter("sglang")(shared).command_text) if "delayer" in each]
    config = yaml.safe_load(exporter("trtllm")(own).files["config.yaml"])
    assert config["attention_dp_config"] == {"enable_balance": True, "timeout_iters": 40, "batching_wait_iters": 0}
    assert "attention_dp_config" not in yaml.safe_load(exporter("trtllm")(shared).files["config.yaml"])
    assert "was priced for the bare machine" in " ".join(exporter("vllm")(own).notes)


def test_stages_of_unequal_depth_are_a_list_or_a_layout_elsewhere() -> None:
    workload = served("qwen3_235b_a22b")  # 94 layers
    deployment = Deployment(workload, Strategy(8, 1, 4, 64, megatron_dims(workload.model)), "org/model")
    assert yaml.safe_load(exporter("trtllm")(deployment).files["config.yaml"])["pp_partition"] == [23, 24, 24, 23]
    assert "--pipeline-model-parallel-layout 'Et*23|t*24|t*24|t*23,L'" in exporter("megatron")(deployment).command_text


@pytest.mark.parametrize("target", ["vllm", "sglang"])
def test_stages_of_unequal_depth_have_the_layers_that_they_were_priced_with(target: str) -> None:
    workload = served("qwen3_235b_a22b")  # 94 layers
    dims = megatron_dims(workload.model)
    even, uneven = (
        exporter(target)(Deployment(workload, Strategy(8, 1, pp, 64, dims), "org/model")).command_text for pp in (2, 4)
    )
    assert "PARTITION" not in even
    assert f"{target.upper()}_PP_LAYER_PARTITION=23,24,24,23 " in uneven


@pytest.mark.parametrize("target", ["vllm", "sglang", "trtllm", "megatron"])
def test_engines_are_given_whose_all_reduce_was_priced_and_which_algorithm(target: str) -> None:
    def made(asked: str | None) -> str:
        engine = {"megatron": "megatron_core"}.get(target, target)
        workload = Question(model="llama_3_1_70b", isl=1000, osl=100, engine=engine, gpus=4, all_reduce=asked).load()
        found = exporter(target)(Deployment(workload, Strategy(4, 1, 1, 16, megatron_dims(workload.model)), "m"))
        return "\n".join(found.all_files.values())

    words = {
        "vllm": "--disable-custom-all-reduce",
        "sglang": "--disable-custom-all-reduce",
        "trtllm": "allreduce_strategy: NCCL",
    }
    own, by_nccl, by_tree = made(None), made("nccl"), made("tree")
    assert words.get(target, "NCCL_ALGO") not in own
    assert words.get(target, "") in by_nccl
    assert words.get(target, "") in by_tree
    assert "NCCL_ALGO" not in by_nccl
    assert "NCCL_ALGO=allreduce:tree" in by_tree
    if target == "trtllm":
        assert "allreduce_strategy: TWOSHOT" in made("two_shot")


def test_sglang_mixes_chunks_of_prompts_with_what_decodes_where_they_were_charged_so() -> None:
    whole = served("qwen3_32b")
    chunked = replace(whole, chunk_tokens=2048)
    drafted = replace(chunked, speculation=Speculation(3, (0.8, 0.6, 0.4), None))
    for workload, mixes in ((whole, False), (chunked, True), (drafted, False)):
        deployment = Deployment(workload, Strategy(4, 1, 1, 16, megatron_dims(workload.model)), "m")
        made = exporter("sglang")(deployment)
        assert ("--enable-mixed-chunk" in made.command_text) == mixes
        assert ("separate steps" in " ".join(made.notes)) != mixes


def test_deprecated_options_are_not_written() -> None:
    workload = served("deepseek_v3")
    strategy = Strategy(1, 16, 1, 64, megatron_dims(workload.model))
    text = exporter("sglang")(Deployment(workload, strategy, "m")).command_text
    assert "--attn-dp-size 16" in text
    assert "--enable-dp-lm-head" in text  # each group has a vocabulary of its own, as was charged
    assert "--enable-dp-attention" not in text
    assert read_capability("sglang", "0.5.23").options["--enable-dp-attention"]["deprecated"]


def test_dense_layers_and_buffers_of_wide_expert_parallelism_fit_sglang() -> None:
    workload = replace(served("deepseek_v3", gpus=64), expert_exchange="all_to_all")
    for batch, buffer in ((64 * 128, None), (64 * 200, "256"), (64 * 257, "384"), (64 * 1500, "1024")):
        deployment = Deployment(workload, Strategy(1, 64, 1, batch, megatron_dims(workload.model)), "m")
        made = exporter("sglang")(deployment)
        assert made.command is not None
        assert made.command.environment.get("SGLANG_DEEPEP_NUM_MAX_DISPATCH_TOKENS_PER_RANK") == buffer
        assert options_of(made.command_text)["--moe-dense-tp-size"] == "1"
        assert any("buffers of DeepEP hold tokens of 1024" in text for text in made.violations) == (batch > 64 * 1024)
    sparse = served("qwen3_235b_a22b", gpus=8)
    alike = Deployment(sparse, Strategy(1, 8, 1, 64, megatron_dims(sparse.model)), "m")
    assert "--moe-dense-tp-size" not in exporter("sglang")(alike).command_text


def test_tensorrt_llm_is_given_no_backend_that_is_gone() -> None:
    workload = replace(served("deepseek_v3", gpus=32), expert_exchange="all_to_all")
    made = exporter("trtllm")(Deployment(workload, Strategy(1, 32, 1, 64, megatron_dims(workload.model)), "m"))
    assert "moe_config" not in yaml.safe_load(made.files["config.yaml"])


def test_what_an_engine_cannot_be_given_is_named_with_its_cost() -> None:
    workload = served("qwen3_235b_a22b", gpus=32)
    wished = Strategy(4, 4, 1, 64, megatron_sp_dims(workload.model))
    made = exporter("vllm")(Deployment(workload, wished, "m"))
    assert made.dropped[0].startswith("vLLM 0.33.0: expert parallelism is all or nothing")
    assert "attn_norm 2, not 0" in made.dropped[1]
    after = re.search(r"([\d.]+) tokens/s/GPU, not ([\d.]+) \(([-+.\d]+)%\)", made.dropped[2])
    assert after is not None
    there = replace(served("qwen3_235b_a22b", "vllm", gpus=32), expert_exchange="all_to_all", space="extended")
    assert float(after[2]) == pytest.approx(evaluate(there, wished).tokens_per_s_per_gpu, abs=0.06)
    assert float(after[3]) == pytest.approx(100 * (float(after[1]) / float(after[2]) - 1), abs=0.2)
    options = options_of(made.command_text)
    sizes = [int(options.get(size, 1)) for size in ("--tensor-parallel-size", "--data-parallel-size")]
    assert np.prod(sizes) == 16  # as many GPUs as wished


@pytest.mark.parametrize(
    "chosen",
    [{"overlap_parts": 8}, {"fp8_gather": True}, {"merge_collectives": True}, {"all_reduce": "two_shot"}, {}],
    ids=str,
)
@pytest.mark.parametrize("target", ["vllm", "megatron", "dtensor", "jax"])
def test_how_collectives_were_priced_and_nobody_runs_them_is_named_with_its_cost(
    target: str, chosen: dict[str, Any]
) -> None:
    """Under the engine that runs it, too; a framework's layer sends what it says it does."""
    plain, asked = (
        served("llama_3_1_70b", "vllm", phase="prefill", weights="fp8", kv_cache="fp8", space="joint", **each)
        for each in ({}, chosen)
    )
    strategy = Strategy(8, 1, 1, 1, megatron_sp_dims(plain.model))
    made, without = (exporter(target)(Deployment(each, strategy, "m")) for each in (asked, plain))
    assert (made.command_text, _but_left_out(made)) == (without.command_text, _but_left_out(without))
    dropped = [text for text in made.dropped if "has no option for" in text]
    assert len(dropped) == len(chosen)
    if chosen:
        (name,) = chosen
        cost = re.search(rf"has no option for {name}.*: ([\d.,]+) tokens/s/GPU, not ([\d.,]+) \(", dropped[0])
        assert cost is not None
        found = [float(text.replace(",", "")) for text in cost.groups()]
        both = [evaluate(each, strategy).tokens_per_s_per_gpu for each in (plain, asked)]
        assert found == pytest.approx(both, abs=0.06)


def _but_left_out(made: Export) -> dict[str, list[str]]:
    """Lines of its files, without what a framework's file says that it leaves out."""
    return {
        name: [line for line in text.splitlines() if not re.search(r"^LEFT_OUT|has no option for|^\)$", line)]
        for name, text in made.files.items()
    }


@pytest.mark.parametrize("target", ["dtensor", "jax"])
def test_frameworks_are_given_the_algorithm_and_the_layers_of_each_stage(target: str) -> None:
    workload = served("llama_3_1_70b", phase="decode", all_reduce="ring", stage_layers="42,38")
    strategy = Strategy(4, 1, 2, 16, megatron_sp_dims(workload.model))
    made = exporter(target)(Deployment(workload, strategy, "m"))
    assert "start it with NCCL_ALGO=allreduce:ring, as it was priced" in made.notes
    assert made.dropped[0].endswith("its layers, 42,38")


@pytest.mark.parametrize("hardware", ["h100_sxm", "mi300x"])
@pytest.mark.parametrize("source", ["none", "sglang"])
def test_a_strategy_is_priced_on_the_engine_that_is_to_run_it(source: str, hardware: str) -> None:
    workload, there = (served("mixtral_8x7b", each, gpus=8, hardware=hardware) for each in (source, "vllm"))
    there = replace(there, expert_exchange=workload.expert_exchange)
    strategy = Strategy(4, 1, 1, 32, megatron_dims(workload.model))
    assert on_engine(workload, engine_rules("vllm")).engine == there.engine
    moved, asked = (evaluate(each, strategy) for each in (on_engine(workload, engine_rules("vllm")), there))
    assert moved.tokens_per_s_per_gpu == asked.tokens_per_s_per_gpu
    assert moved.memory_bytes == asked.memory_bytes
    assert [violation.message for violation in moved.violations] == [each.message for each in asked.violations]

    note = exporter("vllm")(Deployment(workload, strategy, repository(workload))).notes[0]
    told_of = "the bare machine" if source == "none" else source
    assert f"for {told_of}; on vLLM {asked.tokens_per_s_per_gpu:,.1f} tokens/s/GPU" in note
    assert not exporter("vllm")(Deployment(there, strategy, repository(there))).notes


@pytest.mark.parametrize("weights", ["bf16", "fp8", "fp8_block", "mxfp4", "int4"])
@pytest.mark.parametrize("target", ["vllm", "sglang", "trtllm"])
def test_weights_come_in_the_format_that_was_charged(target: str, weights: str) -> None:
    def start(model: str, kv_cache: str = "fp8") -> tuple[str, Export]:
        workload = served(model, target, weights=weights, kv_cache=kv_cache, gpus=16)
        strategy = Strategy(4, 1, 1, 16, megatron_dims(workload.model))
        made = exporter(target)(Deployment(workload, strategy, repository(workload)))
        at_start = re.search(r"--quantization (\S+)", made.command_text)
        path = re.search(r"(?:serve|--model-path) (\S+)", made.command_text)
        assert path is not None
        return f"{path[1]} {at_start[1] if at_start else ''}".strip(), made

    scout, quantised = "meta-llama/Llama-4-Scout-17B-16E-Instruct", "nvidia/Llama-4-Scout-17B-16E-Instruct-FP8"
    words = {
        "vllm": {"fp8": "fp8_per_tensor", "fp8_block": "fp8_per_block", "mxfp4": "mxfp4"},
        "sglang": {"fp8": "fp8"},
        "trtllm": dict[str, str](),
    }[target]
    shown = f'"${{{CHECKPOINT.name}:?}}"'
    checkpoint, made = start("llama_4_scout")
    assert not made.dropped
    if weights == "bf16" or weights in words:
        assert checkpoint == f"{scout} {words.get(weights, '')}".strip()
    elif weights == "fp8":
        assert checkpoint == quantised
        assert start("llama_4_scout", kv_cache="bf16")[0] == shown  # NVIDIA's has its cache in fp8, too
    else:
        assert checkpoint == shown
        assert f"does not quantise {scout} to {weights}" in made.notes[0]

    checkpoint, made = start("gpt_oss_120b")  # stored quantised: no engine takes it for anything else
    assert checkpoint == "openai/gpt-oss-120b"
    assert bool(made.dropped) == (weights != "bf16")
    if made.dropped:
        kept = served("gpt_oss_120b", target, weights="bf16", kv_cache="fp8", gpus=16)
        figure = evaluate(kept, Strategy(4, 1, 1, 16, megatron_dims(kept.model))).tokens_per_s_per_gpu
        assert f"bf16 with experts in mxfp4, which stay so; priced was {weights}: {figure:,.1f}" in made.dropped[0]
    checkpoint, made = start("deepseek_v3")
    assert checkpoint == "deepseek-ai/DeepSeek-V3"
    assert bool(made.dropped) == (weights != "fp8_block")


def test_weights_that_lie_in_a_folder_are_of_the_format_that_it_says(tmp_path: Path) -> None:
    workload = served("qwen3_32b", "vllm", weights="fp8")
    deployment = Deployment(workload, Strategy(4, 1, 1, 16, megatron_dims(workload.model)), str(tmp_path))
    made = exporter("vllm")(deployment)
    assert "--quantization" not in made.command_text
    assert made.notes == (f"weights must be in fp8, as priced: {tmp_path}",)
    (tmp_path / "config.json").write_text(json.dumps(QWEN_CONFIG))
    assert "--quantization fp8_per_tensor" in exporter("vllm")(deployment).command_text
    blocks = {"quant_method": "fp8", "weight_block_size": [128, 128]}
    (tmp_path / "config.json").write_text(json.dumps({**QWEN_CONFIG, "quantization_config": blocks}))
    made = exporter("vllm")(deployment)
    assert "--quantization" not in made.command_text
    assert "weights in fp8_block, which stay so; priced was fp8" in made.dropped[0]


QWEN_CONFIG = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "hidden_size": 5120,
    "intermediate_size": 25600,
    "num_hidden_layers": 64,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "vocab_size": 151936,
    "torch_dtype": "bfloat16",
}


@pytest.mark.parametrize(("tp", "dp", "pp"), [(1, 16, 1), (2, 16, 1), (8, 4, 1), (16, 2, 1), (2, 4, 3), (16, 1, 1)])
def test_a_replica_over_several_nodes_says_what_lies_on_each(tp: int, dp: int, pp: int) -> None:
    workload = served("qwen3_235b_a22b", "vllm", gpus=64)
    strategy = Strategy(tp, tp * dp, pp, 64, megatron_dims(workload.model), dp=dp)
    made = exporter("vllm")(Deployment(workload, strategy, repository(workload)))
    options = options_of(made.command_text)
    assert options["--distributed-executor-backend"] == "ray"
    ranks, gpus = dp, tp * pp
    nodes = re.search(r"cluster of (\d+) nodes", " ".join(made.notes))
    assert nodes is not None
    if ranks > 1 and gpus <= 8:  # the default, all ranks on the head, cannot be placed
        local = int(options["--data-parallel-size-local"])
        assert local * gpus <= 8
        assert (int(nodes[1]) - 1) * local < ranks <= int(nodes[1]) * local
    assert ("span" in made.command_text) == (ranks > 1 and gpus > 8)


def test_a_node_is_a_host_where_fast_links_join_several() -> None:
    rack = served("qwen3_235b_a22b", "vllm", hardware="gb200_nvl72", gpus=72)  # trays of 4 in one NVLink domain
    dims = megatron_dims(rack.model)
    one, two = (Deployment(rack, Strategy(4, 4, pp, 64, dims, dp=1), "m") for pp in (1, 2))
    assert "ray" not in exporter("vllm")(one).command_text
    assert options_of(exporter("vllm")(two).command_text)["--distributed-executor-backend"] == "ray"
    assert options_of(exporter("sglang")(two).command_text)["--nnodes"] == "2"
    megatron = options_of(exporter("megatron")(two).command_text)
    assert (megatron["--nnodes"], megatron["--nproc-per-node"]) == ("2", "4")
    for target in ENGINES:
        assert "2 nodes must be of the 72 GPUs that NVLink joins" in " ".join(exporter(target)(two).notes)
        assert "NVLink" not in " ".join(exporter(target)(one).notes)
    ranks = exporter("vllm")(Deployment(rack, Strategy(1, 16, 1, 512, dims), "m"))
    assert options_of(ranks.command_text)["--data-parallel-size-local"] == "4"


@pytest.mark.parametrize("phase", ["prefill", "decode"])
def test_a_pool_says_what_joins_it_with_the_other(phase: str) -> None:
    workload = served("qwen3_32b", phase=phase, isl=4000, osl=500)
    pool = Deployment(workload, Strategy(4, 1, 1, 16, megatron_dims(workload.model)), "m", replicas=5)
    joined = {"vllm": "VLLM_NIXL_SIDE_CHANNEL_HOST", "sglang": "--pd-disaggregation", "trtllm": "generation_servers"}
    for target, how in joined.items():
        notes = " ".join(exporter(target)(pool).notes)
        assert how in notes
        assert f"start 5 of these in the {phase} pool" in notes
        assert how not in " ".join(exporter(target)(replace(pool, workload=served("qwen3_32b"))).notes)
    config = yaml.safe_load(exporter("trtllm")(pool).files["config.yaml"])
    assert config.get("disable_overlap_scheduler", False) == (phase == "prefill")  # as its context servers need it
    assert config["cache_transceiver_config"]["max_tokens_in_buffer"] >= 4500


def test_requests_longer_than_a_model_takes_are_reported(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    fits, long = (loaded(Question(model="llama_2_70b", isl=4000, osl=osl)) for osl in (96, 97))
    warned = capsys.readouterr().err
    assert warned.count("warning: ") == 1
    assert "requests of 4,097 tokens: llama_2_70b takes 4,096" in warned
    short, over = (Deployment(each, Strategy(8, 1, 1, 8, megatron_dims(each.model)), "m") for each in (fits, long))
    assert not [note for note in exporter("vllm")(short).notes if "requests of" in note]
    assert [note for note in exporter("vllm")(over).notes if "requests of 4,097 tokens" in note]
    stretched = {**QWEN_CONFIG, "max_position_embeddings": 8192}  # of the weights that are served
    (tmp_path / "config.json").write_text(json.dumps(stretched))
    stretched_there = exporter("vllm")(replace(over, served_model=str(tmp_path))).notes
    assert not [note for note in stretched_there if "requests of" in note]


def test_nodes_that_are_not_filled_are_all_alike() -> None:
    workload = served("llama_3_1_70b", "sglang", gpus=64, weights="bf16")
    deployment = Deployment(workload, Strategy(4, 1, 5, 64, megatron_dims(workload.model)), "m")  # 20 GPUs
    made = exporter("sglang")(deployment)
    assert options_of(made.command_text)["--nnodes"] == "5"  # 3 nodes have no whole stages
    assert "4 of the 8 GPUs of each node" in " ".join(made.notes)
    with pytest.raises(ValueError, match="20 GPUs cannot be divided evenly among 3 nodes"):
        exporter("megatron")(deployment)
    moe = served("qwen3_235b_a22b", "vllm", gpus=64)
    with pytest.raises(ValueError, match="on NVIDIA GPUs alone, not on mi300x"):
        exporter("trtllm")(replace(deployment, workload=served("qwen3_32b", hardware="mi300x")))
    made = exporter("vllm")(Deployment(moe, Strategy(4, 8, 3, 64, megatron_dims(moe.model), dp=2), "m"))
    assert "a data-parallel rank lies within a node or fills whole ones, and tp*cp*pp = 12 GPUs" in made.dropped[0]


@pytest.mark.parametrize(
    ("phase", "batch", "fields", "tokens"),
    [
        ("prefill", 14, {}, 14 * 1000),
        ("decode", 14, {}, 14),
        ("serve", 14, {}, 14 + 1000),
        ("serve", 250, {}, 250 + 3 * 1000),  # answers of 100 tokens: 2.5 prompts take the place of those that end
        ("serve", 14, {"chunk_tokens": 512}, 14 + 512),
    ],
)
def test_a_step_has_room_for_the_prompts_that_were_charged(
    phase: str, batch: int, fields: dict[str, Any], tokens: int
) -> None:
    workload = served("llama_3_1_8b", phase=phase, isl=1000, osl=100, weights="bf16", kv_cache="bf16", **fields)
    deployment = Deployment(workload, Strategy(1, 1, 1, batch, megatron_dims(workload.model)), "m")
    made = {target: exporter(target)(deployment) for target in ENGINES}
    vllm, sglang, megatron = (options_of(made[target].command_text) for target in ("vllm", "sglang", "megatron"))
    assert vllm["--max-num-batched-tokens"] == megatron["--inference-dynamic-batching-max-tokens"] == str(tokens)
    config = yaml.safe_load(made["trtllm"].files["config.yaml"])
    assert 0 <= config["max_num_tokens"] - tokens < config["kv_cache_config"]["tokens_per_block"]
    prompts = tokens if phase == "prefill" else tokens - batch
    assert int(sglang.get("--max-prefill-tokens", 0)) == prompts
    speculative = replace(workload, speculation=Speculation(3, (0.8, 0.6, 0.4), None))
    drafted = options_of(exporter("vllm")(replace(deployment, workload=speculative)).command_text)
    assert phase != "decode" or drafted["--max-num-batched-tokens"] == str(4 * batch)


def test_megatron_runs_sequence_parallelism_and_keeps_bf16() -> None:
    workload = served("mixtral_8x7b", gpus=8, weights="fp8")
    strategy = Strategy(2, 4, 1, 16, megatron_sp_dims(workload.model))
    made = exporter("megatron")(Deployment(workload, strategy, "m"))
    assert "--sequence-parallel" in made.command_text
    assert "bf16" in made.dropped[0]
    plain = replace(strategy, dims=megatron_dims(workload.model))
    assert "--sequence-parallel" not in exporter("megatron")(Deployment(workload, plain, "m")).command_text


def test_an_unknown_target_is_reported_with_a_suggestion() -> None:
    with pytest.raises(InputError, match="did you mean 'vllm'"):
        exporter("vlm")
    with pytest.raises(ValueError, match="registered already"):
        register_exporter("vllm", "", "a:b")
    assert set(ENGINES) <= set(exporter_names())


@pytest.mark.parametrize(("model", "own"), [("kimi_k2_5", True), ("deepseek_v3", False)])
def test_an_export_says_that_a_repository_s_own_code_may_be_needed(model: str, own: bool) -> None:
    workload = served(model, "vllm", gpus=8)
    strategy = some_strategies("vllm", workload, 1)[0]
    found = exporter("vllm")(Deployment(workload, strategy, repository(workload)))
    assert any("--trust-remote-code" in note for note in found.notes) == own
    elsewhere = exporter("vllm")(Deployment(workload, strategy, "/weights"))  # whose code is its user's
    assert not any("--trust-remote-code" in note for note in elsewhere.notes)
