"""One question, asked of every command and of Python: the same words, the same defaults, the same figures."""

from __future__ import annotations

import json
from dataclasses import fields, replace
from math import inf
from pathlib import Path
from typing import Any

import pytest
from typer.main import get_command
from typer.testing import CliRunner

import raysearch as rs
from envs.rows import read_rows
from raysearch.base.file_io import as_strategy, strategy_dict
from raysearch.base.priced_heading import priced_dict, priced_text
from raysearch.cli.app import app
from raysearch.cli.commands.settings import settings_of
from sim.batched import evaluate_many
from sim.config.files import CatalogError
from sim.config.question import MS_PER_PROMPT_TOKEN, QUESTION_FIELDS, USUAL_TPOT_MS, USUAL_TTFT_MS, Question, option_of
from sim.pools.best_pools import OnePool
from sim.simulate import evaluate
from sim.strategy import Strategy
from sim.workload import OWN_SPACES, Workload

PRICING = (
    "evaluate",
    "explain",
    "optimum",
    "complete",
    "recommend",
    "replay",
    "pools",
    "search",
    "export",
    "tune-live",
)
OF_OTHERS = {"place", "forecast", "study", "report", "verify"}
"""What else gives figures of deployments: the first two are compared below, the others in test_api."""
OF_NOTHING = {"calibrate", "list", "matmul", "measure", "pretrain", "status", "validate", "verify-rules"}
"""What prices no deployment that a question describes."""
COMMANDS = get_command(app).commands  # type: ignore[attr-defined]
RUNNER = CliRunner()
WORDS = ("--model", "llama_3_1_8b", "--isl", "1000", "--osl", "100")
ASKED = Question(model="llama_3_1_8b", isl=1000, osl=100)


def answer_of(*words: object) -> dict[str, Any]:
    shown = RUNNER.invoke(app, [*map(str, words), "--json"], catch_exceptions=False)
    assert shown.exit_code == 0, shown.output
    return json.loads(shown.stdout)


@pytest.mark.parametrize("command", PRICING)
def test_every_command_that_prices_has_every_option_of_a_question(command: str) -> None:
    options = {option: parameter for parameter in COMMANDS[command].params for option in parameter.opts}
    settings = settings_of(COMMANDS[command].callback)
    for name, about in QUESTION_FIELDS.items():
        option = settings[name].about if about.rare else options[option_of(name)]
        assert option.help == about.help
        assert (settings[name] if about.rare else option).default is None


def test_the_help_on_spaces_has_every_one() -> None:
    assert all(f"{name!r}: " in QUESTION_FIELDS["space"].help for name in OWN_SPACES)
    assert {replace(ASKED, engine="none", space=name).load().space for name in OWN_SPACES} == set(OWN_SPACES)


def test_every_command_is_known_to_price_a_question_or_not_to() -> None:
    assert {*PRICING, *OF_OTHERS, *OF_NOTHING} == set(COMMANDS)
    assert len(PRICING) + len(OF_OTHERS) + len(OF_NOTHING) == len(COMMANDS)


def test_no_command_declares_an_option_of_a_question_anew() -> None:
    ours = {option_of(name) for name in QUESTION_FIELDS}
    elsewhere = {
        (command, option)
        for command in COMMANDS.keys() - set(PRICING)
        for parameter in COMMANDS[command].params
        for option in parameter.opts
        if option in ours
    }
    # What is measured, placed, multiplied or proven is no deployment: a machine whose kernels are timed, a fleet.
    assert elsewhere <= {
        ("measure", "--gpus"),
        ("place", "--gpus"),
        ("calibrate", "--hardware"),
        ("validate", "--hardware"),
        ("matmul", "--hardware"),
        ("verify", "--workload"),
    }


def test_an_option_means_the_same_in_every_command() -> None:
    meanings: dict[str, set[str]] = {}
    for name, command in COMMANDS.items():
        for parameter in command.params:
            meanings.setdefault(parameter.opts[0], set()).add(parameter.help or "")
            assert parameter.help, f"{name} {parameter.opts[0]}"
    # A calibration is a file, pictures of a validation go beside what is there; each command has settings of its own;
    # export writes the benchmark that tune-live runs; complete leaves choices open.
    arguments = {name for name in meanings if not name.startswith("-")}
    assert {option for option, texts in meanings.items() if len(texts) > 1} - arguments == {
        "--out",
        "--set",
        "--benchmark",
        "--dims",
    }


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


def test_a_setting_has_one_default_or_says_of_which_command_it_is_another() -> None:
    defaults: dict[str, dict[str, str]] = {}
    for name, command in COMMANDS.items():
        for setting, each in settings_of(command.callback).items():
            # What a file or a folder says comes before any default.
            usual = each.usual.removeprefix("the folder's, else ")
            if usual != "the file's":
                defaults.setdefault(setting, {})[name] = usual
    texts = {
        name: each.about.help for command in COMMANDS.values() for name, each in settings_of(command.callback).items()
    }
    for setting, usual in defaults.items():
        named = {command for command in usual if f"`{command}`" in texts[setting]}
        assert len({default for command, default in usual.items() if command not in named}) <= 1, (setting, usual)


def test_every_setting_has_bounds_a_default_and_a_meaning_and_is_listed() -> None:
    listed = answer_of("list")["settings"]
    for name, command in COMMANDS.items():
        for setting, each in settings_of(command.callback).items():
            assert each.about.help.endswith("."), setting
            assert each.kind not in (int, float) or each.about.least is not None, f"{name} --set {setting}"
            assert listed[setting]["help"] == each.about.help
            assert each.values in listed[setting]["values"]
            assert {name, "every question"} & set(listed[setting]["commands"])


ASKED_EVERYWHERE = {
    "usual": Question(model="llama_3_1_8b", isl=1000, osl=100, gpus=1, tpot_ms=20),
    "no limits": Question(model="qwen3_32b", isl=1000, osl=100, gpus=1, chunk_tokens=0),
    "every option": Question(
        model="mixtral_8x7b",
        isl=1000,
        osl=100,
        gpus=2,
        tpot_ms=40,
        engine="sglang",
        engine_version="0.5.18",
        weights="fp8",
        kv_cache="fp8",
        chunk_tokens=512,
        expert_exchange="all_gather",
        redundant_experts=8,
    ),
}


def words_of(asked: Question) -> list[str]:
    return [str(word) for name, value in asked.given() for word in (option_of(name), value)]


def degrees_of(strategy: Strategy) -> dict[str, Any]:
    """As commands and Python take them; dp only where attention has a mesh of its own."""
    found = {name: getattr(strategy, name) for name in ("tp", "ep", "pp", "batch", "dp")}
    return {name: value for name, value in found.items() if value is not None}


def as_words_of(strategy: Strategy) -> list[str]:
    return [word for name, value in degrees_of(strategy).items() for word in (f"--{name}", str(value))]


def as_dims(strategy: Strategy) -> str:
    return ",".join(map(str, strategy.dims))


def strategy_of_row(row: dict[str, Any]) -> dict[str, Any]:
    """The strategy of a call, whose column dims is "2,1" or "2,1;cp=1;dp=2"."""
    dims, *mesh = row["dims"].split(";")
    beyond = {name: int(value) for name, value in (each.split("=") for each in mesh)}
    return {
        **{name: row[name] for name in ("tp", "ep", "pp", "batch")},
        **beyond,
        "dims": [int(each) for each in dims.split(",")],
    }


def text_of(words: list[str], *, err: bool = False) -> str:
    shown = RUNNER.invoke(app, words, catch_exceptions=False)
    return shown.stderr if err else shown.stdout


@pytest.mark.usefixtures("best_alone")
@pytest.mark.parametrize("name", ["no limits", "every option"])
def test_the_same_question_has_the_same_figure_in_every_command_and_in_python(name: str, tmp_path: Path) -> None:
    """Whatever a command says of a strategy is what `evaluate` says of it, and its first line says of what it is."""
    asked = ASKED_EVERYWHERE[name]
    workload, words = asked.load(), words_of(asked)
    best = rs.optimum(asked)
    assert best.strategy is not None
    degrees = as_words_of(best.strategy)
    stated = [*degrees, "--dims", as_dims(best.strategy)]
    (tmp_path / "bench.sh").write_text('echo \'{"tokens_per_s_per_gpu": 9, "tpot_s": 0.01}\'\n')
    bench = ["--benchmark", f"sh {tmp_path}/bench.sh", "-b", "1"]
    commands: dict[str, list[str]] = {
        "evaluate": [*words, *stated],
        "optimum": words,
        "complete": [*words, *degrees, "--dims", ",".join("?" * len(best.strategy.dims))],
        "recommend": [*words, "--set", "top=1"],
        "explain": [*words, *stated],
        "replay": [*words, *stated, "--requests-per-s", "1", "--set", "requests=20", "--set", "seeds=1"],
        "pools": words,
        "search": [*words, "-s", "random", "-b", "3", "--out", str(tmp_path / "run")],
        "tune-live": [*words, *bench, "--out", str(tmp_path / "tuned")],
        "export": [*words, *stated, "--to", asked.engine or "vllm"],
    }
    answers = {command: answer_of(command, *options) for command, options in commands.items()}
    one = answers["pools"]["points"][0]["ways"]["aggregated"]
    called = read_rows(tmp_path / "run").to_dict("records")[0]
    (measured,) = answers["tune-live"]["measurements"]
    found: dict[str, tuple[Any, float]] = {
        "evaluate": (answers["evaluate"]["strategy"], answers["evaluate"]["tokens_per_s_per_gpu"]),
        "optimum": (answers["optimum"]["strategy"], answers["optimum"]["tokens_per_s_per_gpu"]),
        "complete": (answers["complete"]["best"]["strategy"], answers["complete"]["best"]["tokens_per_s_per_gpu"]),
        "recommend": (answers["recommend"]["best"]["strategy"], answers["recommend"]["best"]["tokens_per_s_per_gpu"]),
        "explain": (strategy_dict(best.strategy), answers["explain"]["pictures"][0]["tokens_per_s_per_gpu"]),
        "replay": (answers["replay"]["strategy"], answers["replay"]["steady_state"]["tokens_per_s_per_gpu"]),
        "pools": (one["pool"]["strategy"], one["pool"]["tokens_per_s_per_gpu"]),
        "search": (strategy_of_row(called), called["tokens_per_s_per_gpu"]),
        "tune-live": (measured["strategy"], measured["predicted_tokens_per_s_per_gpu"]),
    }
    for command, (strategy, figure) in found.items():
        assert strategy is not None, command
        chosen = {"pools": one, "recommend": answers["recommend"]["best"]}.get(command)  # who choose chunks
        chunk_tokens = chosen["chunk_tokens"] if chosen else asked.chunk_tokens
        under = replace(asked, chunk_tokens=chunk_tokens).load()
        assert figure == evaluate(under, as_strategy(strategy)).tokens_per_s_per_gpu, command
    laid = {**degrees_of(best.strategy), "dims": as_dims(best.strategy)}
    in_python = {
        "evaluate": rs.evaluate(asked, **laid),
        "optimum": best,
        "recommend": rs.recommend(asked, top=1),
        "replay": rs.replay(asked, **laid, requests_per_s=1, requests=20, seeds=1),
        "pools": rs.pools(asked),
        "search": rs.search(asked, "random", budget=3, out=tmp_path / "again"),
    }
    for command in in_python.keys() - {"search"}:  # whose folder and seconds are its own
        assert json.loads(json.dumps(in_python[command].to_dict())) == answers[command], command
    assert in_python["search"].to_dict()["digest"] == answers["search"]["digest"]
    assert best.tokens_per_s_per_gpu == answers["optimum"]["tokens_per_s_per_gpu"] == answers["search"]["optimum"]
    assert best.tokens_per_s_per_gpu == found["complete"][1]
    assert answers["export"]["strategy"] == answers["optimum"]["strategy"]
    recommended = answers["recommend"]["best"]  # the optimum under the chunk that it chose
    chosen_best = rs.optimum(replace(asked, chunk_tokens=recommended["chunk_tokens"])).strategy
    assert chosen_best is not None
    assert strategy_dict(chosen_best) == recommended["strategy"]
    assert answers["evaluate"]["feasible"]
    assert answers["evaluate"]["probability_within"]["tpot"] >= workload.confidence - 1e-9
    assert answers["search"]["config_hash"] == answers["optimum"]["config_hash"] == workload.config_hash
    for command in commands:
        assert {key: answers[command][key] for key in priced_dict(workload)} == priced_dict(workload), command
    texts = {command: str(result) for command, result in in_python.items() if command != "search"}
    for command in ("complete", "explain", "export"):
        texts[command] = text_of([command, *commands[command]], err=command == "export")
    for command, text in texts.items():
        first = " ".join(text.split())
        assert priced_text(workload) in first[: len(priced_text(workload)) + 2], command


def test_a_forecast_has_the_figures_that_evaluate_has_of_the_same_deployment(tmp_path: Path) -> None:
    layouts = [{"tp": 8, "ep": 8, "dp-attn": True, "conc-list": [64]}, {"tp": 8, "conc-list": [4, 16]}]
    entry = {"model-prefix": "dsr1", "runner": "h200", "framework": "sglang", "precision": "fp8", "image": "any"}
    lengths = {"isl": 1000, "osl": 100, "search-space": layouts}
    announced = {"entry": {**entry, "model": "any", "scenarios": {"fixed-seq-len": [lengths]}}}
    (tmp_path / "announced.yaml").write_text(json.dumps(announced))
    forecast = answer_of("forecast", tmp_path / "announced.yaml", "--out", tmp_path / "forecast.json")
    assert len(forecast["predictions"]) == 3
    for predicted in forecast["predictions"]:
        asked = Question(
            **{name: predicted[name] for name in ("model", "engine", "isl", "osl")},
            hardware=predicted["machine"],
            weights="fp8_block",
            kv_cache="bf16",
        )
        ranks = predicted["decode"]
        degrees = ("--tp", ranks["gpus"] // ranks["dp"], "--ep", ranks["ep"], "--dp", ranks["dp"])
        found = answer_of("evaluate", *words_of(asked), *degrees, "--batch", predicted["requests"])
        assert predicted["tokens_per_s_per_gpu"][0] == pytest.approx(found["tokens_per_s_per_gpu"], rel=1e-3)
        times_ms = [time_s * 1e3 for time_s in (found["tpot_s"], *found["tpot_interval_s"])]
        assert predicted["tpot_ms"] == pytest.approx(times_ms, rel=1e-3)


@pytest.mark.usefixtures("best_alone")
def test_whole_prompts_can_be_asked_for_in_every_command_that_searches_chunks() -> None:
    """Where chunks serve more, those who search them have the optimum's figure for the same question."""
    usual = Question(model="qwen3_32b", isl=4000, osl=500, gpus=8, tpot_ms=30, ttft_ms=2000)
    asked = replace(usual, batches="powers_of_two")
    whole = replace(asked, chunk_tokens=0)
    assert whole.load().config_hash == asked.load().config_hash
    best = rs.optimum(whole)
    assert rs.recommend(whole, top=1, only="aggregated").best == best.best
    free = rs.recommend(asked, top=1, only="aggregated")
    assert free.best is not None
    assert free.best.tokens_per_s_per_gpu > best.tokens_per_s_per_gpu
    way = rs.pools(whole).points[0].ways["aggregated"]
    assert isinstance(way, OnePool)
    assert (way.evaluation.strategy, way.workload.chunk_tokens) == (best.strategy, None)


def test_without_limits_a_question_has_the_default_ones_which_zero_takes_away() -> None:
    asked = Question(model="qwen3_32b", isl=1000, osl=100, gpus=4)
    workload, free = asked.load(), replace(asked, tpot_ms=0, ttft_ms=0).load()
    assert (workload.tpot_slo_s, workload.ttft_slo_s) == (0.1, 11.0)
    assert (asked.record()["tpot_ms"], asked.record()["ttft_ms"]) == (100.0, 11_000.0)
    assert (free.tpot_slo_s, free.ttft_slo_s) == (inf, inf)
    assert priced_text(workload).endswith("; limits 100 ms per token and 11,000 ms to the first at confidence 0.9")
    assert "limits" not in priced_text(free)
    for phase in ("decode", "prefill"):
        assert replace(asked, phase=phase).load().tpot_slo_s == inf
    assert replace(asked, tpot_ms=30).load().ttft_slo_s == 11.0
    named = Question(workload="mixtral_8x22b_8k")
    assert replace(named, tpot_ms=0).load().tpot_slo_s == inf > named.load().tpot_slo_s
    assert f"{USUAL_TPOT_MS:g} in phases serve" in QUESTION_FIELDS["tpot_ms"].usual
    assert f"{USUAL_TTFT_MS:,.0f} and {MS_PER_PROMPT_TOKEN:g} more" in QUESTION_FIELDS["ttft_ms"].usual


def test_an_export_keeps_to_the_limits_that_evaluate_has() -> None:
    asked = ASKED_EVERYWHERE["usual"]
    best = rs.optimum(asked).strategy
    assert best is not None
    above = as_words_of(replace(best, batch=best.batch + 1))
    judged = json.loads(text_of(["evaluate", *words_of(asked), *above, "--json"]))
    exported = json.loads(text_of(["export", *words_of(asked), *above, "--json"]))
    assert exported["violations"] == [each["message"] for each in judged["violations"]] != []


def test_without_a_batch_a_strategy_has_its_best_one_in_every_command_and_in_python() -> None:
    asked = replace(ASKED_EVERYWHERE["usual"], gpus=2)
    workload, one = asked.load(), rs.evaluate(asked, tp=2, batch=1).strategy
    every = evaluate_many(workload, [replace(one, batch=batch) for batch in range(1, 400)])
    best = every.strategies[int((every.tokens_per_s_per_gpu * every.feasible).argmax())]
    chosen = {
        rs.evaluate(asked, tp=2).strategy,
        as_strategy(answer_of("evaluate", *words_of(asked), "--tp", 2)["strategy"]),
    }
    chosen.add(as_strategy(answer_of("export", *words_of(asked), "--tp", 2)["strategy"]))
    assert chosen == {best}
    assert f"batch {best.batch} " in answer_of("explain", *words_of(asked), "--tp", 2)["heading"] + " "
    assert not rs.evaluate(replace(asked, tpot_ms=0.1), tp=2).feasible  # which says what even the smallest breaks


def test_a_fleet_asks_the_question_of_a_model_of_its(tmp_path: Path) -> None:
    (tmp_path / "fleet.toml").write_text(
        'name = "one"\nhardware = "h100_sxm"\ngpus = 1\nengine_version = "0.31.0"\n[[models]]\nmodel = "llama_3_1_8b"\n'
        'requests_per_s = 1.0\nisl = 1000\nosl = 100\ntpot_ms = 20.0\ndraft_tokens = 2\ndraft = "ngram"\n'
        "acceptance = [0.8, 0.5]\nchunk_tokens = 512\nconfidence = 0.8\n"
    )
    more = {"draft_tokens": 2, "draft": "ngram", "acceptance": "0.8,0.5", "chunk_tokens": 512, "confidence": 0.8}
    asked = replace(ASKED, gpus=1, batches="powers_of_two", tpot_ms=0, ttft_ms=0, engine_version="0.31.0", **more)
    workload = asked.load()
    placed = rs.place(tmp_path / "fleet.toml", requests=100, seeds=1)
    assert placed.to_dict()["config_hashes"] == [workload.config_hash]
    assert placed.to_dict()["precisions"] == [priced_dict(workload)["precisions"]]
    first = str(next(iter(placed.blocks())))
    assert first == "one on h100_sxm under vLLM 0.31.0: phase serve, 1 model on 1 GPU; weights bf16, KV cache bf16"


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
    "two_batch_overlap": True,
    "overlap_parts": 4,
    "tp_inner": 4,
    "all_reduce": "nccl",
    "fp8_gather": True,
    "merge_collectives": True,
    "deepep_mode": "normal",
    "routing": "balanced",
    "draft_tokens": 2,
    "tpot_ms": 30.0,
    "ttft_ms": 400.0,
    "gpus": 4,
    "margin": 0.1,
    "confidence": 0.95,
    "space": "extended",
    "groups": "own",
    "batches": "powers_of_two",
    "serving": "searched",
    "any_degrees": "pp",
}
BESIDE: dict[str, dict[str, Any]] = {
    "prompt_wait_steps": {"engine": "sglang"},
    "draft_tokens": {"acceptance": "0.8", "draft": "ngram"},
    "serving": {"phase": "traffic"},
    "two_batch_overlap": {"expert_exchange": "all_to_all"},
    "deepep_mode": {"expert_exchange": "all_to_all"},
    "overlap_parts": {"engine": "none", "phase": "decode"},
    "tp_inner": {"engine": "none", "phase": "decode", "space": "two_dimensional"},
    "fp8_gather": {"engine": "none", "phase": "decode"},
    "merge_collectives": {"engine": "none", "phase": "decode"},
}


@pytest.mark.parametrize("name", CHANGES)
@pytest.mark.parametrize(
    "asked",
    [
        Question(model="mixtral_8x7b", isl=1000, osl=100),
        Question(workload="mixtral_8x22b_8k", phase="serve", isl=1000, osl=100, engine="vllm", weights="fp8"),
    ],
    ids=["of a model", "of a workload"],
)
def test_every_field_changes_the_workload_that_it_is_about(asked: Question, name: str) -> None:
    before = replace(asked, **BESIDE.get(name, {}) if name != "draft_tokens" else {}).load()
    after = replace(asked, **BESIDE.get(name, {}), **{name: CHANGES[name]}).load()
    assert _differences(before, after), name
    assert set(CHANGES) | {"workload", "model", "family", "acceptance", "draft", "stage_layers"} == {
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
        ({"isl": 0}, "--isl: expected 1 to 1000000000, got 0"),
        ({"gpus": 2.5}, "--gpus: "),
        ({"model": 5}, "--model: "),
    ],
)
def test_a_record_that_is_no_question_is_one_message(content: dict[str, Any], message: str) -> None:
    with pytest.raises(CatalogError) as raised:
        Question.of_record(content)
    assert str(raised.value).startswith(message)


def test_a_question_names_or_describes_a_workload_and_not_both() -> None:
    with pytest.raises(CatalogError, match="give one of them"):
        Question(workload="mixtral_8x22b_8k", model="mixtral_8x7b", isl=1, osl=1).load()
    with pytest.raises(CatalogError, match="expected workload=, or model= with isl="):
        Question().load()
