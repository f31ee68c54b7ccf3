"""The Python interface: what `import raysearch as rs` offers, as the commands answer it."""

from __future__ import annotations

import inspect
import json
import math
import re
import subprocess
import sys
from collections.abc import Callable
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from typer.main import get_command
from typer.testing import CliRunner

import raysearch as rs
from raysearch.answers.completed import WEIGHTS, CompletionResult
from raysearch.answers.exported import ExportResult
from raysearch.answers.optimal import OptimumResult
from raysearch.answers.placed import PlacementResult
from raysearch.answers.recommended import RecommendationResult
from raysearch.answers.result import Result
from raysearch.answers.searched import SearchResult
from raysearch.base.arguments import BOUNDS, as_arguments, option_names
from raysearch.base.errors import InputError
from raysearch.base.file_io import degrees_text
from raysearch.cli.app import app
from raysearch.cli.commands.settings import settings_of
from raysearch.runs.run import SearchRun
from raysearch.studies.study_file import load_study, run_dir, write_study
from sim.config.files import CatalogError
from sim.config.question import QUESTION_FIELDS, Question
from sim.simulate import evaluate
from tests.conftest import CHECKOUT

RUNNER = CliRunner()
LLAMA = ("--model", "llama_3_1_8b", "--isl", "1000", "--osl", "100")
WORDS = (*LLAMA, "--gpus", "2", "--tpot-ms", "20")
QUESTION = rs.question(model="llama_3_1_8b", isl=1000, osl=100, gpus=2, tpot_ms=20)
FUNCTIONS = [
    "evaluate",
    "export",
    "optimum",
    "place",
    "pools",
    "question",
    "recommend",
    "replay",
    "report",
    "search",
    "study",
]
OF_SEARCHERS = ["NoOptions", "Outcome", "Searcher", "merit"]
"""What a searcher of one's own takes."""


def answer_of(*words: object) -> Any:
    return json.loads(RUNNER.invoke(app, [*map(str, words), "--json"], catch_exceptions=False).stdout)


def plain(result: Result) -> Any:
    return json.loads(json.dumps(result.to_dict()))


@pytest.fixture(scope="module")
def recommended() -> RecommendationResult:
    return rs.recommend(QUESTION, top=2)


@pytest.fixture(scope="module")
def searched(tiny_workload: Path, tmp_path_factory: pytest.TempPathFactory) -> SearchResult:
    out = tmp_path_factory.mktemp("searched") / "out"
    return rs.search(rs.question(workload=str(tiny_workload)), "annealing", budget=40, out=out)


@pytest.fixture(scope="module")
def landscape(tiny_workload: Path) -> OptimumResult:
    return rs.optimum(rs.question(workload=str(tiny_workload)))


@pytest.fixture(scope="module")
def placed() -> PlacementResult:
    return rs.place("bursty_qwens", requests=100, seeds=1, gpus=2)


def test_nothing_else_is_public() -> None:
    assert dir(rs) == sorted(["__version__", *FUNCTIONS, *OF_SEARCHERS])
    assert all(callable(getattr(rs, name)) and getattr(rs, name).__doc__ for name in [*FUNCTIONS, *OF_SEARCHERS])
    with pytest.raises(AttributeError, match="no attribute 'valuate'"):
        _ = rs.valuate  # type: ignore[attr-defined]


REQUIRED = {
    "question": QUESTION,
    "batch": 1,
    "fleet": "bursty_qwens",
    "searcher": "random",
    "file": "quickstart",
    "folder": "results",
    "source": "best.json",
}
"""Right arguments for parameters without a default."""
PARAMETERS = [
    (function, each) for function in FUNCTIONS for each in inspect.signature(getattr(rs, function)).parameters.values()
]
WRONG = {"str": 3, "int": "8", "float": "2", "bool": 1, "Path": b"x", "Question": {"model": "qwen3_32b"}}
"""By the first type of an annotation, what is of another."""


@pytest.mark.parametrize(
    ("function", "parameter"), PARAMETERS, ids=[f"{function}-{each.name}" for function, each in PARAMETERS]
)
def test_an_argument_of_a_wrong_type_is_one_error_that_names_it(
    function: str, parameter: inspect.Parameter, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    others = inspect.signature(getattr(rs, function)).parameters.values()
    needed = {each.name: REQUIRED[each.name] for each in others if each.default is each.empty}
    kind = str(parameter.annotation).removeprefix("Annotated[").lstrip().split()[0].rstrip(",")
    name = f"{parameter.name}:" if function == "question" else f"{function}({parameter.name}=...)"
    usual = True if "str | float" in str(parameter.annotation) else WRONG.get(kind, 2.5)
    for wrong in (object(), usual, ["x"] if "Sequence" not in kind else {}):
        with pytest.raises((InputError, CatalogError)) as refusal:
            getattr(rs, function)(**{**needed, parameter.name: wrong})
        assert "expected" in str(refusal.value)
        assert "\n" not in str(refusal.value)
        if parameter.name != "source":  # of which many kinds are taken
            assert str(refusal.value).startswith(name)
            assert "got " in str(refusal.value)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("function", FUNCTIONS)
def test_arguments_that_a_function_has_not_or_lacks_are_one_error_that_names_them(function: str) -> None:
    parameters = inspect.signature(getattr(rs, function)).parameters
    needed = {name: REQUIRED[name] for name, each in parameters.items() if each.default is each.empty}
    last = list(parameters)[-1]
    with pytest.raises(InputError, match=rf"^{function}\({last}_=\.\.\.\): there is no such argument: .*'{last}'\?$"):
        getattr(rs, function)(**needed, **{f"{last}_": 1})
    with pytest.raises(InputError, match=rf"^{function}\(\.\.\.\): expected .*, got 'much' too$"):
        getattr(rs, function)(*["much"] * (len(parameters) + 1))
    for name in needed:
        with pytest.raises(InputError, match=rf"^{function}\({name}=\.\.\.\): expected .*, got nothing$"):
            getattr(rs, function)(**{each: value for each, value in needed.items() if each != name})
        with pytest.raises(InputError, match=rf"^{function}\({name}=\.\.\.\): given twice"):
            getattr(rs, function)(*needed.values(), **{name: needed[name]})


@pytest.mark.parametrize(
    ("call", "ending"),
    [
        (lambda: rs.recommend(QUESTION, tpot_ms=3), "tpot_ms is of rs.question(...)"),
        (lambda: rs.question(batch=3), "batch is of rs.evaluate and rs.replay"),
        (lambda: rs.question(price=3), "price is of rs.recommend"),
        (lambda: rs.question(requests_per_s=3), "requests_per_s is of rs.recommend, rs.pools and rs.replay"),
    ],
)
def test_an_argument_of_another_function_is_said_to_be_its(call: Callable[[], object], ending: str) -> None:
    with pytest.raises(InputError) as refusal:
        call()
    assert str(refusal.value).endswith(f": there is no such argument: {ending}")


def test_a_value_that_is_none_of_a_few_is_refused_in_plain_words() -> None:
    with pytest.raises(InputError, match=r"expected 'aggregated' or 'disaggregated', got 'foo'"):
        rs.recommend(QUESTION, only="foo")  # type: ignore[arg-type]


def test_numbers_of_numpy_and_paths_are_taken_as_pythons() -> None:
    lengths: Any = {"isl": np.int64(1000), "osl": np.int32(100), "gpus": np.uint8(2), "tpot_ms": np.float32(20)}
    asked = rs.question(model=Path("llama_3_1_8b"), **lengths)  # type: ignore[arg-type]
    assert asked == QUESTION
    assert all(type(value) in (str, int, float) for _, value in asked.given())
    assert rs.evaluate(asked, tp=np.int64(2), batch=np.int64(8)).strategy.batch == 8  # type: ignore[arg-type]


ASKED = rs.question(model="llama_3_1_8b", isl=1000, osl=100)
MISTAKES: list[tuple[Callable[[], object], tuple[str, ...], str]] = [
    (lambda: rs.question(isl=0), ("evaluate", "--isl", "0"), "isl: expected 1 to "),
    (lambda: rs.question(margin=5), ("evaluate", "--set", "margin=5"), "margin: expected "),
    (lambda: rs.evaluate(ASKED), ("evaluate", *LLAMA), "expected tp=, or layout= with a name"),
    (
        lambda: rs.evaluate(ASKED, layout="tp2", dp=2),
        ("evaluate", *LLAMA, "--layout", "tp2", "--dp", "2"),
        "layout=tp2 already sets dp: ",
    ),
    (lambda: rs.evaluate(ASKED, tp=2, dims="x"), ("evaluate", *LLAMA, "--tp", "2", "--dims", "x"), "dims: expected "),
    (
        lambda: rs.evaluate(rs.question(workload="mixtral_8x22b_8k", family="x"), tp=1),
        ("evaluate", "-w", "mixtral_8x22b_8k", "--as", "x", "--tp", "1"),
        "family=x is about the config.json that model= names: give model= too",
    ),
    (
        lambda: rs.recommend(ASKED, cv=2.0),
        ("recommend", *LLAMA, "--set", "cv=2"),
        "cv=2: only for requests that come at random: give requests_per_s=, and no trace",
    ),
    (
        lambda: rs.recommend(ASKED, concurrency=8, requests_per_s=1),
        ("recommend", *LLAMA, "--concurrency", "8", "--requests-per-s", "1"),
        "give requests_per_s= or concurrency=, not both",
    ),
    (lambda: rs.pools(ASKED, afd=True), ("pools", *LLAMA, "--set", "afd"), "afd: llama_3_1_8b has no experts"),
    (
        lambda: rs.pools(ASKED, mix=[(1, 1, 1)]),
        ("pools", *LLAMA, "--set", "mix=1:1:1"),
        "give isl= and osl=, or mix=, not both: mix has lengths of its own",
    ),
    (
        lambda: rs.replay(ASKED, tp=1, batch=1),
        ("replay", *LLAMA, "--tp", "1", "--batch", "1"),
        "expected the traffic: requests_per_s=, concurrency=, or trace=",
    ),
    (
        lambda: rs.search(ASKED, "random", start="x"),
        ("search", *LLAMA, "-s", "random", "--set", "start=x"),
        "start=x: expected rule, optimum, or a folder or file that is there",
    ),
    (lambda: rs.search(ASKED, resume=True), ("search", *LLAMA, "--resume"), "resume= needs out: the folder"),
]


@pytest.mark.parametrize(("call", "words", "message"), MISTAKES, ids=[each[2][:30] for each in MISTAKES])
def test_a_mistake_names_arguments_in_python_and_options_in_a_command(
    call: Callable[[], object], words: tuple[str, ...], message: str
) -> None:
    with pytest.raises((InputError, CatalogError)) as in_python:
        call()
    assert str(in_python.value).startswith(message)
    assert "--" not in str(in_python.value)
    answer = RUNNER.invoke(app, words)
    refused = str(answer.exception) if isinstance(answer.exception, ValueError) else answer.stderr
    assert "--" in refused
    names = option_names(*inspect.signature(getattr(rs, words[0])).parameters)
    if isinstance(answer.exception, CatalogError | InputError) and "margin" not in message:  # the command's own
        assert as_arguments(refused, names) == str(in_python.value)


DEPLOYING = """if True:
    import sys
    from importlib.machinery import PathFinder
    absent, find = {"ray", "torch", "optuna", "cmaes", "tensorboardX"}, PathFinder.find_spec
    PathFinder.find_spec = lambda name, *rest: None if name.partition(".")[0] in absent else find(name, *rest)
    import raysearch as rs
    question = rs.question(model="llama_3_1_8b", isl=1000, osl=100, gpus=1, tpot_ms=9, chunk_tokens=8192)
    assert rs.evaluate(question, tp=1, batch=4).feasible
    best = rs.recommend(question, top=1)
    assert rs.optimum(question).strategy == best.strategy
    assert rs.pools(question).feasible
    assert rs.export(best).command.startswith("vllm serve")
    assert rs.place("bursty_qwens", gpus=2, requests=100, seeds=1).to_rows()
    assert rs.search(question, "random", budget=3, out=sys.argv[1]).summary["calls"] == 3
    assert rs.report(sys.argv[1]).complete
    for call in (
        lambda: rs.search(question, "ppo", budget=3),
        lambda: rs.search(question, "optuna_tpe", budget=3),
        lambda: rs.search(question, "random", budget=3, workers=1, out=sys.argv[1] + "2"),
        lambda: rs.study(sys.argv[2], out=sys.argv[1] + "3"),
    ):
        try:
            call()
        except ValueError as error:
            print(error)
"""
OTHERS = "annealing, annealing_tuned, ant_colony, coordinate, mcmc, megatron, megatron_sp, prior, random, random_walk"
BY_SEARCH = "pip install -e '.[search]' in the checkout, or 'FILE.whl[search]'"
LACKING = f"""\
searcher 'ppo' needs RLlib and PyTorch: {BY_SEARCH.replace("[search]", "[rllib]")}; without: {OTHERS}
searcher 'optuna_tpe' needs Ray and Optuna: {BY_SEARCH}; without: {OTHERS}
a search with workers needs Ray and Optuna: {BY_SEARCH}; without: the built-in simulator, with no workers
a study needs Ray and Optuna: {BY_SEARCH}; without: each of its runs by `raysearch search`
"""


@pytest.mark.slow
def test_without_ray_and_torch_all_works_but_what_says_in_a_line_that_it_needs_them(tmp_path: Path) -> None:
    (tmp_path / "s.toml").write_text(
        'name = "s"\nworkloads = ["mixtral_8x7b_32k_slo15"]\nsearchers = ["megatron"]\nseeds = [0]\nbudget = 5\n'
    )
    command = [sys.executable, "-c", DEPLOYING, tmp_path / "out", tmp_path / "s.toml"]
    assert subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True, cwd=CHECKOUT).stdout == LACKING


def test_an_evaluation_is_the_command_s() -> None:
    found = rs.evaluate(QUESTION, tp=2, batch=64)
    assert plain(found) == answer_of("evaluate", *WORDS, "--tp", "2", "--batch", "64")
    assert (found.feasible, found.broken) == (True, [])
    assert not rs.evaluate(QUESTION, tp=2, batch=4096).feasible
    frame = found.to_frame()
    assert list(frame["name"]) == [op.name for op in found.evaluation.ops]
    assert found.figure().axes[0].get_xlabel() == "us of one layer"


def test_a_recommendation_has_a_strategy_a_table_and_a_picture(recommended: RecommendationResult) -> None:
    assert recommended.strategy is not None
    assert list(recommended.to_frame()["layout"]) == [row["layout"] for row in recommended.to_rows()]
    assert len(recommended.figure().axes[0].lines) > 0


def test_an_optimum_has_a_text_a_picture_and_a_certificate(tmp_path: Path) -> None:
    found = rs.optimum(QUESTION)
    assert found.best is not None
    assert found.tokens_per_s_per_gpu == found.best.tokens_per_s_per_gpu
    assert "strategies of the space 'vllm'" in str(found)
    assert found.figure().axes
    assert [row["name"] for row in found.to_rows()] == [op.name for op in found.best.ops]
    assert found.write_certificate(tmp_path / "proof.json") > 0
    proof = answer_of("verify", tmp_path / "proof.json")
    assert (proof["strategy"], proof["tokens_per_s_per_gpu"]) == (plain(found)["strategy"], found.tokens_per_s_per_gpu)
    nothing = rs.optimum(rs.question(model="llama_3_1_8b", isl=1000, osl=100, gpus=1, tpot_ms=0.01))
    assert (nothing.feasible, nothing.strategy, nothing.tokens_per_s_per_gpu) == (False, None, 0.0)
    assert "No strategy of" in str(nothing)
    assert nothing.to_rows() == []


def test_a_landscape_is_counted_where_ops_are_chosen_one_by_one(landscape: OptimumResult, tiny_workload: Path) -> None:
    found = landscape
    assert plain(found) == answer_of("optimum", "-w", tiny_workload)
    assert found.around is not None
    assert found.to_rows()[-1]["tokens_per_s_per_gpu"] <= found.tokens_per_s_per_gpu
    beside = found.compare_spaces()
    assert plain(beside) == answer_of("optimum", "-w", tiny_workload, "--set", "compare_spaces")
    assert {row["space"] for row in beside.to_rows()} >= {"paper", "joint", "extended"}
    assert "the exact best of each space" in str(beside)


def test_pools_are_the_command_s(tmp_path: Path) -> None:
    found = rs.pools(QUESTION, sweep={"ttft_ms": [200, 2000]})
    assert plain(found) == answer_of("pools", *WORDS, "--set", "sweep=ttft-ms=200,2000")
    assert [row["ttft_ms"] for row in found.to_rows()] == [200, 2000]
    assert found.figure().axes
    found.write(tmp_path)
    assert (tmp_path / "pools.png").is_file()
    assert rs.export(found).to_dict() == rs.export(tmp_path).to_dict()
    with pytest.raises(InputError, match="cannot sweep batch"):
        rs.pools(QUESTION, sweep={"batch": [1]})


def test_a_placement_is_the_command_s(placed: PlacementResult) -> None:
    few = ("--set", "requests=100", "--set", "seeds=1", "--gpus", "2")
    assert plain(placed) == answer_of("place", "bursty_qwens", *few)
    assert [row["placement"] for row in placed.to_rows()] == [option.name for option in placed.plan.options]
    assert "placements simulated" in str(placed)


def test_a_search_and_its_report_are_the_commands(searched: SearchResult, tiny_workload: Path, tmp_path: Path) -> None:
    words = ("search", "-w", tiny_workload, "-s", "annealing", "-b", "40", "--out", tmp_path / "out")
    same = answer_of(*words)
    moving = {"folder", "wall_s", "improvements", "metrics", "rows_sha256"}
    assert {name: value for name, value in plain(searched).items() if name not in moving} == {
        name: value for name, value in same.items() if name not in moving
    }
    assert searched.fraction_of_optimum == pytest.approx(searched.tokens_per_s_per_gpu / same["optimum"])
    assert len(searched.to_frame()) == 40
    report = rs.report(searched.folder)
    assert report.complete
    assert report.to_rows()[0]["searcher"] == "annealing"
    assert str(report) == str(searched)
    assert report.figure().axes
    drawn = answer_of("report", searched.folder)
    assert {**drawn, "curve": None, "comparison": None} == plain(report)
    assert searched.strategy is not None
    best = evaluate(rs.question(workload=str(tiny_workload)).load(), searched.strategy)
    assert drawn["best"][0]["tokens_per_s_per_gpu"] == best.tokens_per_s_per_gpu == searched.tokens_per_s_per_gpu


def test_a_search_takes_settings_of_its_searcher_and_refuses_what_nothing_has(
    tiny_workload: Path, tmp_path: Path
) -> None:
    options = {"initial_temperature": 0.5}
    question = rs.question(workload=str(tiny_workload))
    found = rs.search(question, "annealing", budget=9, out=tmp_path / "api", options=options)
    words = ("search", "-w", tiny_workload, "-s", "annealing", "-b", "9")
    answer_of(*words, "--set", "initial-temperature=0.5", "--out", tmp_path / "cli")
    heads = [json.loads((tmp_path / name / "run.json").read_text())["spec"] for name in ("api", "cli")]
    assert heads[0]["options"] == heads[1]["options"] == options
    assert len(found.to_frame()) == 9
    for setting, message in (("tempo=1", "'annealing' has a setting 'tempo'"), ("workers_=2", "mean 'workers'")):
        with pytest.raises(InputError, match=message):
            answer_of(*words, "--set", setting)


def test_a_study_is_run_and_reported(tiny_workload: Path, tmp_path: Path) -> None:
    (tmp_path / "s.toml").write_text(
        f'name = "s"\nworkloads = ["{tiny_workload}"]\nsearchers = ["random"]\nseeds = [0, 1]\nbudget = 5\n'
    )
    study = load_study(tmp_path / "s.toml")
    write_study(study, dict.fromkeys(study.workloads), tmp_path / "out")
    for run_id, spec in study.specs().items():  # all finished, so that no Ray is started
        run = SearchRun(spec, run_dir(tmp_path / "out", run_id))
        run.advance(5)
        run.finish()
    found = rs.study(tmp_path / "s.toml", out=tmp_path / "out", resume=True)
    assert found.complete
    assert plain(found) == plain(rs.report(tmp_path / "out"))


def test_an_export_is_the_command_s(recommended: RecommendationResult, tmp_path: Path) -> None:
    recommended.write(tmp_path)
    for to in ("vllm", "llm-d"):
        found = rs.export(recommended, to)
        assert plain(found) == plain(rs.export(tmp_path, to)) == answer_of("export", tmp_path, "--to", to)
        assert found.command in str(found)
    second = rs.export(recommended, alternative=1, serve="./weights")
    assert "./weights" in second.command
    asked = ("--model", "llama_3_1_8b", "--isl", "1000", "--osl", "100", "--layout", "tp2", "--batch", "8")
    one = rs.evaluate(rs.question(model="llama_3_1_8b", isl=1000, osl=100), layout="tp2", batch=8)
    assert plain(rs.export(one, "sglang", replicas=3)) == answer_of(
        "export", *asked, "--to", "sglang", "--set", "replicas=3"
    )


def test_an_answer_that_is_printed_in_python_names_arguments(recommended: RecommendationResult) -> None:
    assert "at even odds (confidence=0.5)" in str(recommended)
    assert "at even odds (--set confidence=0.5)" in RUNNER.invoke(app, ["recommend", *WORDS, "--set", "top=2"]).stdout
    assert "--tensor-parallel-size 2" in str(rs.export(rs.evaluate(ASKED, layout="tp2", batch=8)))


def test_the_brackets_of_an_interval_are_no_markup(recommended: RecommendationResult) -> None:
    text = str(recommended)
    assert "tokens/s/GPU [" in text
    assert "Recommendation and alternatives" in text


BY_METHODS = {
    "out": ("write", "write_certificate"),
    "benchmark": ("measured_by",),
    "compare_spaces": ("compare_spaces",),
    "as_json": ("to_dict",),
}
"""Options that are methods of an answer."""
STRATEGY = {"tp", "batch", "ep", "pp", "dims", "cp", "dp", "layout", "vocabulary"}
"""Options of `export` that in Python are those of the answer of `evaluate` that it is given."""


@pytest.mark.parametrize("function", [name for name in FUNCTIONS if name != "question"])
def test_a_command_s_options_and_the_arguments_in_python_are_the_same_with_the_same_defaults(function: str) -> None:
    command: Any = get_command(app).commands[function]  # type: ignore[attr-defined]
    signature = inspect.signature(getattr(rs, function))
    defaults = {name: each.default for name, each in settings_of(command.callback).items()}
    defaults |= {each.name: each.default for each in command.params}
    asked = QUESTION_FIELDS if "question" in signature.parameters else {}
    words = {name: default for name, default in defaults.items() if name not in asked}
    beyond = words.keys() - signature.parameters - {"assignments"}
    answer = str(signature.return_annotation)
    (kind,) = [each for each in Result.__subclasses__() if each.__name__ == answer]
    if "path" in words and "path" in beyond:
        first = next(iter(signature.parameters.values()))
        assert (first.name, first.default) in {(name, first.empty) for name in ("file", "fleet", "folder", "source")}
        beyond.remove("path")
    for name in beyond & BY_METHODS.keys():
        assert any(hasattr(kind, method) for method in BY_METHODS[name]), name
    assert beyond - BY_METHODS.keys() == (STRATEGY if function == "export" else set())
    for name, parameter in signature.parameters.items():
        if name in words:
            assert parameter.default == words[name], name
        else:  # the question's options, what progress a terminal is shown, and `--set` of a searcher's own settings
            assert name in {"question", "progress", "file", "fleet", "folder", "source", "options"}, name


def test_help_reads_as_python() -> None:
    for name in FUNCTIONS:
        shown = f"{inspect.signature(getattr(rs, name))}"
        assert "Annotated" not in shown
        assert ": '" not in shown
    text = inspect.getdoc(rs.question) or ""
    assert all(f"\n    {name}: " in text for name in QUESTION_FIELDS)
    assert not re.search(r"(?<!enable-)--(workload|model|space)", text)


def test_rates_and_layers_are_numbers_in_python_and_text_in_records() -> None:
    drafted: dict[str, Any] = {"model": "deepseek_v3", "isl": 1000, "osl": 100, "draft_tokens": 2}
    assert rs.question(**drafted, acceptance=0.8) == rs.question(**drafted, acceptance="0.8")
    asked = rs.question(**drafted, acceptance=(0.9, 0.7), stage_layers=[30, 31])
    assert (asked.record()["acceptance"], asked.record()["stage_layers"]) == ("0.9,0.7", "30,31")


@pytest.mark.parametrize("function", ["place", "replay", "recommend", "pools", "export", "search", "study", "optimum"])
def test_numbers_have_the_bounds_that_they_have_in_commands(function: str) -> None:
    command: Any = get_command(app).commands[function]  # type: ignore[attr-defined]
    parameters = inspect.signature(getattr(rs, function)).parameters
    known = [(name, each.about.least, each.about.most) for name, each in settings_of(command.callback).items()]
    known += [(each.name, each.min, each.max) for each in command.params]
    wanted = {
        name: (least, math.inf if most is None else most)
        for name, least, most in known
        if name in parameters and least is not None
    }
    assert wanted == BOUNDS.get(function, {})


@pytest.mark.parametrize(
    ("function", "given", "message"),
    [
        ("place", {"rate": -1.0}, r"place\(rate=...\): expected a number from 0.001 to 1,000.0, got -1.0"),
        ("place", {"seeds": 0}, r"place\(seeds=...\): expected a number from 1 to 10,000, got 0"),
        ("place", {"rate": math.nan}, r"got nan"),
        ("recommend", {"top": 0}, r"recommend\(top=...\): expected a number of at least 1, got 0"),
        ("replay", {"requests": 0}, r"replay\(requests=...\): expected a number from 10 to"),
    ],
)
def test_a_number_out_of_bounds_is_one_error_that_names_it(function: str, given: dict[str, Any], message: str) -> None:
    first = "bursty_qwens" if function == "place" else QUESTION
    with pytest.raises(InputError, match=message):
        getattr(rs, function)(first, **given)


@pytest.fixture(scope="module")
def answers(
    recommended: RecommendationResult, searched: SearchResult, landscape: OptimumResult, placed: PlacementResult
) -> dict[str, Result]:
    """An answer of each kind, by the name of its class."""
    found = [
        rs.evaluate(QUESTION, tp=2, batch=64),
        recommended,
        rs.export(recommended),
        landscape,
        landscape.compare_spaces(),
        CompletionResult.of(QUESTION, QUESTION.load(), WEIGHTS, {"tp": 1}),
        rs.pools(QUESTION),
        rs.replay(QUESTION, tp=1, batch=8, requests_per_s=1, requests=20, seeds=1),
        placed,
        searched,
        rs.report(searched.folder),
    ]
    return {type(each).__name__: each for each in found}


def test_every_function_returns_an_answer_that_is_tested(answers: dict[str, Result]) -> None:
    assert answers.keys() == {kind.__name__ for kind in Result.__subclasses__()}
    returned = {str(inspect.signature(getattr(rs, name)).return_annotation) for name in FUNCTIONS if name != "question"}
    assert returned == answers.keys() - {"SpacesResult", "CompletionResult"}


@pytest.mark.parametrize("kind", [each.__name__ for each in Result.__subclasses__()])
def test_an_answer_is_text_a_notebook_s_cell_a_table_data_and_a_picture(kind: str, answers: dict[str, Result]) -> None:
    answer = answers[kind]
    assert all(f"        {field.name}: " in str(type(answer).__doc__) for field in fields(answer))  # type: ignore[arg-type]
    assert str(answer).strip()
    assert answer._repr_html_().startswith("<pre")
    assert repr(answer).startswith(f"<{type(answer).__name__}: ")
    assert len(repr(answer)) < 300
    assert plain(answer)
    assert isinstance(answer.feasible, bool)
    assert len(answer.to_frame()) == len(answer.to_rows()) > 0
    if not isinstance(answer, ExportResult):  # a command has no picture
        assert answer.figure().axes[0].has_data()  # type: ignore[attr-defined]


def test_what_cannot_be_met_is_a_result() -> None:
    impossible = rs.recommend(rs.question(model="llama_3_1_8b", isl=1000, osl=100, gpus=1, tpot_ms=0.01), top=1)
    assert (impossible.feasible, impossible.best) == (False, None)
    assert "Nothing is feasible" in str(impossible)
    refused = rs.evaluate(
        rs.question(model="deepseek_v3", engine="sglang", isl=1000, osl=100, gpus=16), tp=16, ep=3, batch=8
    )
    assert len(refused.broken) == len(set(refused.broken)) == 2  # GPUs, and what engine and space refuse alike


@pytest.mark.parametrize(
    ("asked", "why"),
    [
        ({"phase": "serve", "engine": "none"}, "phase 'serve' has steps with prompts and without"),
        ({"phase": "traffic", "engine": "vllm"}, "phase 'traffic' is judged by replays"),
    ],
)
def test_stages_that_cannot_differ_are_refused_before_anything_is_searched(asked: dict[str, str], why: str) -> None:
    question = Question(model="deepseek_v3", isl=4000, osl=500, gpus=64, **asked)  # type: ignore[arg-type]
    with pytest.raises(InputError, match=f"--set uneven_stages: .*{why}"):
        OptimumResult(question, question.load(), uneven_stages=True)


def test_embedding_lm_head_and_sampling_have_an_option_in_every_command_of_a_strategy() -> None:
    asked = rs.question(model="llama_3_1_8b", isl=1000, osl=100, gpus=4, phase="decode", engine="none")
    strategy = replace(rs.evaluate(asked, tp=4, batch=64).evaluation.strategy, vocabulary=(3, 1, 2))
    expected = evaluate(asked.load(), strategy)
    assert expected.tpot_s != rs.evaluate(asked, tp=4, batch=64).evaluation.tpot_s
    words = (*LLAMA, "--gpus", "4", "--phase", "decode", "--engine", "none")
    degrees = ("--tp", "4", "--batch", "64", "--set", "vocabulary=3,1,2")
    assert rs.evaluate(asked, tp=4, batch=64, vocabulary="3,1,2").evaluation == expected
    assert answer_of("evaluate", *words, *degrees)["tokens_per_s_per_gpu"] == expected.tokens_per_s_per_gpu
    assert answer_of("evaluate", *words, "--layout", degrees_text(strategy))["strategy"]["vocabulary"] == [3, 1, 2]
    (picture,) = answer_of("explain", *words, *degrees)["pictures"]
    assert picture["tokens_per_s_per_gpu"] == expected.tokens_per_s_per_gpu
    exported = {to: answer_of("export", *words, *degrees, "--to", to) for to in ("jax", "vllm")}
    assert any("vocabulary 3,1,2" in text for text in exported["jax"]["dropped"])
    assert any("embedding, LM head and sampling" in text for text in exported["vllm"]["violations"])
    refused = RUNNER.invoke(app, ["evaluate", *WORDS, "--layout", "tp2, batch 8, vocabulary 3,1,2", *degrees[4:]])
    assert "already sets --set vocabulary" in str(refused.exception)
