"""Exports to engines: only options that the engine has, degrees that multiply to the GPUs, and honest costs."""

from __future__ import annotations

import json
import re
import shlex
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import yaml

from raysearch.errors import InputError
from raysearch.export.deployment import Deployment
from raysearch.export.registry import exporter, exporter_names, register_exporter
from sim.config.catalog import load_model
from sim.config.described import Description, described_workload
from sim.engines.registry import engine_rules
from sim.layers.heuristics import megatron_dims, megatron_sp_dims
from sim.optimum.spaces import engine_space
from sim.simulate import evaluate
from sim.strategy import Strategy
from sim.workload import Speculation, Workload

OPTIONS = json.loads((Path(__file__).parent / "options.json").read_text())
ENGINES = {"vllm": "vllm", "sglang": "sglang", "trtllm": "trtllm", "megatron": "megatron_core"}
"""Export target -> engine."""


def served(model: str, engine: str | None = None, **said: object) -> Workload:
    asked = {"isl": 4000, "osl": 500, "phase": "serve", "max_gpus": 64, **said}
    return described_workload(Description(model, engine=engine, **asked))  # type: ignore[arg-type]


def options_of(command: str) -> dict[str, str]:
    """Options of a command and their values."""
    parts = shlex.split(command.replace("\\\n", " "))
    named = [at for at, word in enumerate(parts) if word.startswith("--")]
    return {parts[at]: "" if at + 1 in named or at + 1 == len(parts) else parts[at + 1] for at in named}


def some_strategies(target: str, workload: Workload, count: int) -> list[Strategy]:
    """Strategies that the engine runs, drawn over its meshes, stages and plans."""
    space = engine_space(workload, engine_rules(ENGINES[target]))
    rng = np.random.default_rng(0)
    every = [(part, mesh, pp) for part in space.parts() for mesh in part.meshes() for pp in part.stages(mesh)]
    every = [(part, mesh, pp) for part, mesh, pp in every if mesh[0] * mesh[1] * mesh[2] * pp <= workload.max_gpus]
    drawn = [every[index] for index in rng.choice(len(every), min(count, len(every)), replace=False)]
    return [Strategy(tp, ep, pp, 64, part.only_dims, cp, dp) for part, (tp, cp, dp, ep), pp in drawn]


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
    for strategy in some_strategies(target, workload, 12):
        made = exporter(target)(Deployment(workload, strategy, "org/model"))
        told = options_of(made.command)
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
        known = {*OPTIONS[target]["options"], *(OPTIONS["torchrun"]["options"] if target == "megatron" else ())}
        assert set(told) <= known
        if target == "vllm":
            sizes = ("--tensor-parallel-size", "--pipeline-parallel-size", "--data-parallel-size")
            assert np.prod([int(told.get(size, 1)) for size in sizes]) == strategy.gpus
            assert int(told["--max-num-seqs"]) * int(told.get("--data-parallel-size", 1)) >= strategy.batch
            assert ("--enable-expert-parallel" in told) == (strategy.ep > 1)
        if target == "sglang":
            tp, groups = int(told["--tp-size"]), int(told.get("--attn-dp-size", 1))
            assert tp * int(told.get("--pp-size", 1)) == strategy.gpus
            assert tp // groups == strategy.tp * strategy.cp
            assert tp % int(told.get("--ep-size", 1)) == 0
        if target == "megatron":
            model_parallel = strategy.tp * strategy.pp
            processes = int(told["--nproc-per-node"]) * int(told.get("--nnodes", 1))
            assert processes == strategy.gpus
            assert processes // model_parallel == strategy.attention_dp
            experts = int(told.get("--expert-model-parallel-size", 1)) * int(
                told.get("--expert-tensor-parallel-size", 1)
            )
            assert not workload.model.is_moe or experts * strategy.pp == processes


@pytest.mark.parametrize("draft", ["mtp", "qwen3_32b", None])
def test_drafts_and_copies_of_experts_are_told_in_each_engine_s_words(draft: str | None) -> None:
    drafter = load_model(draft) if draft == "qwen3_32b" else "mtp" if draft else None
    said = Speculation(3, (0.8, 0.6, 0.4), drafter)
    workload = replace(served("deepseek_v3", max_gpus=32), speculation=said, redundant_experts=32)
    deployment = Deployment(workload, Strategy(1, 32, 1, 64, megatron_dims(workload.model)), "m")
    made = {target: exporter(target)(deployment) for target in ENGINES}
    for target in ("vllm", "sglang"):
        assert set(options_of(made[target].command)) <= set(OPTIONS[target]["options"])

    vllm, sglang = (options_of(made[target].command) for target in ("vllm", "sglang"))
    config = json.loads(vllm["--speculative-config"])
    assert config["num_speculative_tokens"] == 3
    assert config["method"] == {"mtp": "mtp", "qwen3_32b": "draft_model", None: "ngram"}[draft]
    assert config.get("model") == ("Qwen/Qwen3-32B" if draft == "qwen3_32b" else None)
    assert json.loads(vllm["--eplb-config"]) == {"num_redundant_experts": 32}
    assert sglang["--speculative-num-draft-tokens"] == "4"  # with the token that the target model adds
    assert sglang["--ep-num-redundant-experts"] == "32"
    trtllm = yaml.safe_load(made["trtllm"].files["config.yaml"])
    kinds = {"mtp": "MTP", "qwen3_32b": "Draft_Target", None: "NGram"}
    assert trtllm["speculative_config"]["decoding_type"] == kinds[draft]
    assert 3 in trtllm["speculative_config"].values()
    assert trtllm["moe_config"]["load_balancer"]["num_slots"] == 256 + 32
    assert f"without {said.drafter} drafts, without copies of experts" in " ".join(made["megatron"].dropped)


def test_deprecated_options_are_not_written() -> None:
    workload = served("deepseek_v3")
    strategy = Strategy(1, 16, 1, 64, megatron_dims(workload.model))
    told = exporter("sglang")(Deployment(workload, strategy, "m")).command
    assert "--attn-dp-size 16" in told
    assert "--enable-dp-attention" not in told
    assert "--enable-dp-attention" not in OPTIONS["sglang"]["options"]


def test_what_an_engine_cannot_be_told_is_named_with_its_cost() -> None:
    workload = served("qwen3_235b_a22b", max_gpus=32)
    wished = Strategy(4, 4, 1, 64, megatron_sp_dims(workload.model))
    made = exporter("vllm")(Deployment(workload, wished, "m"))
    assert made.dropped[0].startswith("vLLM 0.33.0: expert parallelism is all or nothing")
    assert "attn_norm 2, not 0" in made.dropped[1]
    after = re.search(r"([\d.]+) tokens/s/GPU, not ([\d.]+) \(([-+.\d]+)%\)", made.dropped[2])
    assert after is not None
    assert float(after[2]) == pytest.approx(evaluate(workload, wished).tokens_per_s_per_gpu, abs=0.06)
    assert float(after[3]) == pytest.approx(100 * (float(after[1]) / float(after[2]) - 1), abs=0.2)
    told = options_of(made.command)
    sizes = [int(told.get(size, 1)) for size in ("--tensor-parallel-size", "--data-parallel-size")]
    assert np.prod(sizes) == 16  # as many GPUs as wished


def test_megatron_runs_sequence_parallelism_and_keeps_bf16() -> None:
    workload = served("mixtral_8x7b", max_gpus=8)
    strategy = Strategy(2, 4, 1, 16, megatron_sp_dims(workload.model))
    made = exporter("megatron")(Deployment(workload, strategy, "m"))
    assert "--sequence-parallel" in made.command
    assert "bf16" in made.dropped[0]
    plain = replace(strategy, dims=megatron_dims(workload.model))
    assert "--sequence-parallel" not in exporter("megatron")(Deployment(workload, plain, "m")).command


def test_an_unknown_target_is_told_with_a_suggestion() -> None:
    with pytest.raises(InputError, match="did you mean 'vllm'"):
        exporter("vlm")
    with pytest.raises(ValueError, match="registered already"):
        register_exporter("vllm", "", "a:b")
    assert set(ENGINES) <= set(exporter_names())
