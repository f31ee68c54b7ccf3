"""Versions of engines: every export is in the words of the version that is to run it."""

from __future__ import annotations

from dataclasses import replace

import pytest

from raysearch.deploy.export.deployment import Deployment
from raysearch.deploy.export.engine_words import Capability, capability_of, read_capability
from raysearch.deploy.export.formats import exporter
from raysearch.deploy.export.models import repository
from sim.config.catalog import engine_versions, load_model, read_versions
from sim.engines.engine_registry import engine_rules
from sim.ops.heuristics import megatron_dims
from sim.strategy import Strategy
from sim.workload import Speculation, Workload
from tests.raysearch.deploy.export.test_engines import ENGINES, OPTIONS, served

VERSIONS = [
    (target, version) for target in ("vllm", "sglang", "megatron") for version in read_versions(ENGINES[target])
]


def cases(target: str, version: str) -> list[Deployment]:
    """Deployments that differ in what an engine must be told."""
    engine, drafts = ENGINES[target], Speculation(1, (0.8,), "mtp")
    stated = {"engine": engine, "engine_version": version, "gpus": 32}
    if target == "megatron":
        stated |= {"weights": "bf16", "kv_cache": "bf16"}
    wide, small = served("deepseek_v3", **stated), served("llama_3_1_70b", **stated)
    sparse, scout = served("qwen3_235b_a22b", **stated), served("llama_4_scout", **stated)
    sends = replace(
        wide, expert_exchange="all_to_all", redundant_experts=32, two_batch_overlap=True, speculation=drafts
    )
    draft = replace(small, speculation=Speculation(3, (0.8, 0.6, 0.4), load_model("llama_3_1_8b")))
    looked_up = replace(small, speculation=Speculation(3, (0.8, 0.6, 0.4), None))
    pools = [served("deepseek_v3", phase=phase, **stated) for phase in ("prefill", "decode")]
    wishes: list[tuple[Workload, tuple[int, ...]]] = [
        (sends, (1, 32, 1, 8192)),
        (replace(sends, deepep_mode="normal"), (1, 16, 1, 64)),
        (replace(wide, prompt_wait_steps=40, chunk_tokens=2048), (1, 8, 1, 64)),
        (draft, (4, 1, 1, 16)),
        (looked_up, (8, 1, 1, 16)),
        (sparse, (8, 1, 4, 64)),
        (scout, (4, 1, 1, 16)),
        *((pool, (1, 16, 1, 64)) for pool in pools),
    ]
    return [
        Deployment(workload, Strategy(*degrees, megatron_dims(workload.model)), repository(workload), replicas=2)
        for workload, degrees in wishes
    ]


@pytest.mark.parametrize(("target", "version"), VERSIONS)
def test_what_is_exported_is_in_the_words_of_the_version_that_is_named(target: str, version: str) -> None:
    engine = ENGINES[target]
    known = read_capability(engine, version)
    for deployment in cases(target, version):
        made = exporter(target)(deployment)
        assert made.command is not None
        flags = [flag for flag in made.command.flags if flag[0] not in (*OPTIONS["torchrun"]["options"], "-m")]
        variables = {} if target == "megatron" else made.command.environment
        assert not known.refusals(flags, variables)
        assert not [text for text in made.dropped if "it has no" in text]
        old = [name for name, _ in flags if known.options[name].get("deprecated")]
        assert not old


@pytest.mark.parametrize("engine", ["vllm", "sglang"])
@pytest.mark.parametrize("release", read_versions("dynamo"))
def test_dynamo_s_workers_are_given_what_their_image_s_engine_takes(engine: str, release: str) -> None:
    version = read_capability("dynamo", release).pins[engine]
    known = read_capability(engine, version).beside(read_capability("dynamo", release))
    for deployment in cases(engine, version):
        (text,) = exporter("dynamo")(deployment).files.values()
        assert f"{engine}-runtime:" in text
        words = [line.strip().removeprefix("- ") for line in text.splitlines()]
        assert {word for word in words if word.startswith("--")} <= set(known.options)
    newest = read_versions("dynamo")[-1]
    assert f"-runtime:{newest if version == read_capability('dynamo', newest).pins[engine] else release}" in text


def test_a_version_that_no_image_of_dynamo_has_is_refused_with_those_that_there_are() -> None:
    asked = cases("vllm", "0.32.0")[0]
    with pytest.raises(ValueError, match=r"has vLLM 0\.32\.0, but 0\.31\.0 \(1\.6\.1\), .*0\.28\.0 \(1\.5\.1\)"):
        exporter("dynamo")(asked)
    with pytest.raises(ValueError, match=r"has vLLM 0\.33\.0, but"):  # though it is what is priced by default
        exporter("dynamo")(cases("vllm", engine_rules("vllm").version)[0])
    plain = served("qwen3_32b", "vllm")
    made = exporter("dynamo")(Deployment(plain, Strategy(4, 1, 1, 16, megatron_dims(plain.model)), "m"))
    assert "the image has vLLM 0.31.0; priced was 0.33.0" in made.notes


def test_what_has_other_words_in_an_older_version_is_written_in_those() -> None:
    groups = ("--attn-dp-size", 8)
    assert read_capability("sglang", "0.5.21").words([groups]) == (
        [("--dp-size", 8), ("--enable-dp-attention", None)],
        [],
    )
    assert read_capability("sglang", "0.5.22").words([groups]) == ([groups], [])
    old = read_capability("vllm", "0.19.1")
    assert old.words([("--quantization", "fp8_per_tensor")]) == ([("--quantization", "fp8")], [])
    words, lost = old.words([("--quantization", "fp8_per_block"), ("--no-such", 1)])
    assert not words
    assert lost == [
        "vLLM 0.19.1: --quantization has no choice fp8_per_block",
        "vLLM 0.19.1: it has no option --no-such",
    ]
    scout = served("llama_4_scout", "vllm", weights="fp8_block", engine_version="0.19.1")
    made = exporter("vllm")(Deployment(scout, Strategy(4, 1, 1, 16, megatron_dims(scout.model)), repository(scout)))
    assert "does not quantise" in " ".join(made.notes)  # and so the checkpoint must be made before


def test_a_parser_s_refusals_name_what_is_wrong() -> None:
    options = {
        "--size": {"type": "int"},
        "--fast": {"type": "switch"},
        "--kind": {"type": "choice", "choices": ["a", "b"]},
        "--more": {"type": "json"},
    }
    known = Capability("vllm", "0", options, {"--more": ["method", "n"]}, frozenset({"mtp"}), frozenset({"HOME"}))
    right = [("--size", 3), ("--fast", None), ("--kind", "a"), ("--more", '{"method": "mtp", "n": 1}')]
    assert not known.refusals(right, {"HOME": "x"})
    wrong = [("--size", "x"), ("--fast", 1), ("--kind", "c"), ("--more", '{"method": "no", "k": 1}'), ("--none", 1)]
    assert known.refusals(wrong, {"AWAY": ""}) == [
        "--size is a whole number, not x",
        "--fast takes no value",
        "--kind has no choice c",
        "--more has no key k",
        "--more has no method no",
        "it has no option --none",
        "it reads no variable AWAY",
    ]


def test_a_version_that_was_not_read_is_written_in_the_newest_words_and_says_so() -> None:
    workload = served("qwen3_32b", "vllm", engine_version="0.12.0")
    known, notes = capability_of(workload, "vllm")
    assert known.version == read_versions("vllm")[-1]
    assert notes == [f"written with the options of vLLM {known.version}; those of 0.12.0 were not read"]
    assert {"0.12.0", *read_versions("vllm")} == set(engine_versions("vllm"))
    assert read_versions("vllm") == tuple(
        sorted(read_versions("vllm"), key=lambda text: tuple(map(int, text.split("."))))
    )
