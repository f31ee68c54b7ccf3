"""One question, asked of every command and of Python: the same words, the same defaults, the same figures."""

from __future__ import annotations

import json
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest
from typer.main import get_command
from typer.testing import CliRunner

import raysearch as rs
from raysearch.cli.app import app
from raysearch.cli.commands.settings import settings_of
from sim.config.files import CatalogError
from sim.config.question import QUESTION_FIELDS, Question, option_of
from sim.simulate import evaluate
from sim.strategy import Strategy
from sim.workload import Workload

PRICING = ("evaluate", "explain", "optimum", "recommend", "replay", "pools", "search", "export", "tune-live")
COMMANDS = get_command(app).commands  # type: ignore[attr-defined]
RUNNER = CliRunner()
WORDS = ("--model", "llama_3_1_8b", "--isl", "1000", "--osl", "100")
ASKED = Question(model="llama_3_1_8b", isl=1000, osl=100)


def told(*words: object) -> dict[str, Any]:
    shown = RUNNER.invoke(app, [*map(str, words), "--json"], catch_exceptions=False)
    assert shown.exit_code == 0, shown.output
    return json.loads(shown.stdout)


@pytest.mark.parametrize("command", PRICING)
def test_every_command_that_prices_has_every_option_of_a_question(command: str) -> None:
    options = {option: parameter for parameter in COMMANDS[command].params for option in parameter.opts}
    settings = settings_of(COMMANDS[command].callback)
    for name, about in QUESTION_FIELDS.items():
        told = settings[name].about if about.rare else options[option_of(name)]
        assert told.help == about.help
        assert (settings[name] if about.rare else told).default is None


def test_no_command_declares_an_option_of_a_question_anew() -> None:
    ours = {option_of(name) for name in QUESTION_FIELDS}
    elsewhere = {
        (command, option)
        for command in COMMANDS.keys() - set(PRICING)
        for parameter in COMMANDS[command].params
        for option in parameter.opts
        if option in ours
    }
    # What is measured or placed is no deployment: a machine whose kernels are timed, the GPUs of a fleet.
    assert elsewhere <= {
        ("measure", "--gpus"),
        ("place", "--gpus"),
        ("calibrate", "--hardware"),
        ("validate", "--hardware"),
    }


def test_an_option_means_the_same_in_every_command() -> None:
    meanings: dict[str, set[str]] = {}
    for name, command in COMMANDS.items():
        for parameter in command.params:
            meanings.setdefault(parameter.opts[0], set()).add(parameter.help or "")
            assert parameter.help, f"{name} {parameter.opts[0]}"
    # A calibration is a file, pictures of a validation go beside what is there; each command has settings of its own.
    arguments = {name for name in meanings if not name.startswith("-")}
    assert {option for option, texts in meanings.items() if len(texts) > 1} - arguments == {"--out", "--set"}


def test_the_commands_have_no_more_than_45_parameters_between_them() -> None:
    names = {parameter.name for command in COMMANDS.values() for parameter in command.params}
    settings = {name for command in COMMANDS.values() for name in settings_of(command.callback)}
    assert len(names) <= 45
    assert not names & settings


def test_a_setting_means_the_same_in_every_command() -> None:
    meanings: dict[str, set[str]] = {}
    for command in COMMANDS.values():
        for name, setting in settings_of(command.callback).items():
            meanings.setdefault(name, set()).add(setting.about.help)
    assert {name for name, texts in meanings.items() if len(texts) > 1} == set()


def test_the_same_question_has_the_same_figure_in_every_command_and_in_python(tmp_path: Path) -> None:
    limits = ("--gpus", "2", "--tpot-ms", "20")
    workload = replace(ASKED, gpus=2, tpot_ms=20.0).load()
    best = told("recommend", *WORDS, *limits, "--set", "top=1", "--out", tmp_path / "answer")["best"]
    strategy = best["strategy"]
    mine = evaluate(workload, Strategy(**strategy | {"dims": tuple(strategy["dims"])}))
    degrees = [word for name in ("tp", "ep", "pp", "batch") for word in (f"--{name}", strategy[name])]
    evaluated = told("evaluate", *WORDS, *limits, *degrees, "--dims", ",".join(map(str, strategy["dims"])))
    assert mine.tokens_per_s_per_gpu == best["tokens_per_s_per_gpu"] == evaluated["tokens_per_s_per_gpu"]
    optimum = told("optimum", *WORDS, *limits)
    assert optimum["tokens_per_s_per_gpu"] >= best["tokens_per_s_per_gpu"]  # of a replica, whatever GPUs are left over
    assert (optimum["engine"], optimum["phase"]) == ("vllm", "serve")
    asked = replace(ASKED, gpus=2, tpot_ms=20.0)
    in_python = rs.optimum(asked).tokens_per_s_per_gpu, rs.recommend(asked, top=1).to_rows()[0]["tokens_per_s_per_gpu"]
    assert in_python == (optimum["tokens_per_s_per_gpu"], best["tokens_per_s_per_gpu"])
    drawn = told("explain", *WORDS, *limits, *degrees)
    assert drawn["heading"].startswith("llama_3_1_8b_serve on h100_sxm: ")
    one = told("pools", *WORDS, *limits)["points"][0]["ways"]["one"]
    again = Strategy(**one["pool"]["strategy"] | {"dims": tuple(one["pool"]["strategy"]["dims"])})
    chunked = replace(asked, chunk_tokens=one["chunk_tokens"]).load()
    assert evaluate(chunked, again).tokens_per_s_per_gpu == one["pool"]["tokens_per_s_per_gpu"]
    exported = told("export", tmp_path / "answer")
    assert exported["strategy"] == {**exported["strategy"], **{k: strategy[k] for k in ("tp", "ep", "pp", "batch")}}
    searched = told("search", *WORDS, *limits, "-s", "random", "-b", "3", "--out", tmp_path / "run")
    assert searched["config_hash"] == optimum["config_hash"] == workload.config_hash
    assert searched["optimum"] == optimum["tokens_per_s_per_gpu"]


def test_a_version_of_an_engine_has_one_figure_in_every_command_and_in_python(tmp_path: Path) -> None:
    limits = ("--gpus", "1", "--tpot-ms", "20", "--engine-version", "0.12.0")
    asked = replace(ASKED, gpus=1, tpot_ms=20.0, engine_version="0.12.0")
    shown = RUNNER.invoke(app, ["recommend", *WORDS, *limits, "--set", "top=1"], catch_exceptions=False)
    assert shown.stdout.startswith("vLLM 0.12.0: tp 1")
    best, first = rs.optimum(asked), rs.optimum(replace(asked, engine_version=None))
    assert best.tokens_per_s_per_gpu < first.tokens_per_s_per_gpu  # the scheduler's time comes on top of every step
    optimum = told("optimum", *WORDS, *limits)
    assert (optimum["tokens_per_s_per_gpu"], optimum["engine_version"]) == (best.tokens_per_s_per_gpu, "0.12.0")
    assert best.strategy is not None
    degrees = ("--tp", 1, "--batch", best.strategy.batch)
    assert told("evaluate", *WORDS, *limits, *degrees)["tokens_per_s_per_gpu"] == best.tokens_per_s_per_gpu
    searched = told("search", *WORDS, *limits, "-s", "random", "-b", "3", "--out", tmp_path / "run")
    assert (searched["optimum"], searched["config_hash"]) == (best.tokens_per_s_per_gpu, optimum["config_hash"])
    assert told("pools", *WORDS, *limits)["engine_version"] == "0.12.0"


def test_with_an_engine_the_phase_is_serve_and_the_bare_machine_decodes() -> None:
    bare = replace(ASKED, engine="none").load()
    assert (ASKED.load().phase, ASKED.load().space) == ("serve", "vllm")
    assert (bare.phase, bare.space, bare.engine) == ("decode", "joint", None)


CHANGES: dict[str, Any] = {
    "hardware": "h200_sxm",
    "engine": "sglang",
    "engine_version": "0.12.0",
    "phase": "decode",
    "isl": 500,
    "osl": 50,
    "weights": "bf16",
    "kv_cache": "bf16",
    "chunk_tokens": 512,
    "prompt_wait_steps": 5,
    "expert_exchange": "all_to_all",
    "redundant_experts": 8,
    "draft_tokens": 2,
    "tpot_ms": 30.0,
    "ttft_ms": 400.0,
    "gpus": 4,
    "margin": 0.1,
    "space": "extended",
    "groups": "own",
    "batches": "powers_of_two",
    "any_degrees": "pp",
}
BESIDE: dict[str, dict[str, Any]] = {
    "prompt_wait_steps": {"engine": "sglang"},
    "draft_tokens": {"acceptance": "0.8", "draft": "ngram"},
}


@pytest.mark.parametrize("name", CHANGES)
@pytest.mark.parametrize(
    "asked",
    [
        Question(model="mixtral_8x7b", isl=1000, osl=100),
        Question(workload="mixtral_8x22b_8k", phase="serve", isl=1000, osl=100, engine="vllm", weights="fp8"),
    ],
    ids=["described", "named"],
)
def test_every_field_changes_the_workload_that_it_is_about(asked: Question, name: str) -> None:
    before = replace(asked, **BESIDE.get(name, {}) if name != "draft_tokens" else {}).load()
    after = replace(asked, **BESIDE.get(name, {}), **{name: CHANGES[name]}).load()
    assert _differences(before, after), name
    assert set(CHANGES) | {"workload", "model", "family", "acceptance", "draft"} == {
        each.name for each in fields(Question)
    }


def _differences(before: Workload, after: Workload) -> set[str]:
    names = {each.name for each in fields(Workload)} - {"config_hash", "name"}
    return {name for name in names if repr(getattr(before, name)) != repr(getattr(after, name))}


def test_a_record_of_a_question_is_the_question_with_its_defaults() -> None:
    record = json.loads(json.dumps(ASKED.record()))
    assert record["engine"] == "vllm"
    assert Question.of_record(record).load().config_hash == ASKED.load().config_hash


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ({"mdel": "x"}, "a question has no field 'mdel': did you mean 'model'?"),
        ({"isl": "many"}, "--isl: "),
        ({"isl": 0}, "--isl: expected at least 1, got 0"),
        ({"gpus": 2.5}, "--gpus: "),
        ({"model": 5}, "--model: "),
    ],
)
def test_a_record_that_is_no_question_is_one_message(content: dict[str, Any], message: str) -> None:
    with pytest.raises(CatalogError) as raised:
        Question.of_record(content)
    assert str(raised.value).startswith(message)


def test_a_question_names_or_describes_a_workload_and_not_both() -> None:
    with pytest.raises(CatalogError, match="one or the other"):
        Question(workload="mixtral_8x22b_8k", model="mixtral_8x7b", isl=1, osl=1).load()
    with pytest.raises(CatalogError, match="expected --workload NAME, or --model NAME"):
        Question().load()
