"""Files and options that are broken at random, seeded: a few in the default run, many by `make fuzz`.

The rule is that of `tests/raysearch/studies/test_damage.py`: a clear refusal, or the same result bit for bit.
"""

from __future__ import annotations

import contextlib
import random
import shutil
import sys
from pathlib import Path

import pytest

from raysearch.base.errors import InputError
from raysearch.cli import app
from raysearch.fidelity.calibration.measured_tables import MEASURED_FAMILIES, read_csv
from raysearch.optima.optimum_cache import cache_dir, find_cached_optimum
from raysearch.runs.checkpoint import pack, unpack
from raysearch.runs.run import SearchRun, finished_summary
from raysearch.searchers.registry import check_options
from raysearch.simulators.cache import AnswerCache
from raysearch.studies.damage import set_aside_damaged
from raysearch.studies.results import read_study_runs, survey, verify
from raysearch.studies.study_file import Study, StudyFile, check_study, load_study, run_dir, write_study
from raysearch.studies.study_status import read_status
from sim.config.catalog import load_workload
from sim.config.files import CatalogError
from sim.simulate import evaluate
from sim.strategy import Strategy
from tests.conftest import CHECKOUT
from tests.raysearch.fuzzing import broken, inputs, runs
from tests.raysearch.fuzzing import within_memory as within_memory


@pytest.fixture(scope="module")
def study(tiny_workload: Path) -> Study:
    searchers = ("random_walk", "annealing", "genetic")
    return check_study(StudyFile(name="s", workloads=(str(tiny_workload),), searchers=searchers, seeds=(0,), budget=40))


@pytest.fixture(scope="module")
def begun(study: Study, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("study") / "out"
    write_study(study, dict.fromkeys(study.workloads), out)
    for run_id, spec in study.specs().items():
        run = SearchRun(spec, run_dir(out, run_id))
        run.advance(40 if spec.searcher == "random_walk" else 20)
        run.save()
        run.finish() if run.done else run.close()
    return out


def gone_on(study: Study, out: Path) -> dict[str, str]:
    set_aside_damaged(out)
    for run_id, spec in study.specs().items():
        if finished_summary(run_dir(out, run_id)) is None:
            run = SearchRun(spec, run_dir(out, run_id), resume=True)
            run.advance(40)
            run.finish()
    return {run["run_id"]: run["digest"] for run in read_study_runs(out)}


@pytest.mark.parametrize("seed", range(runs(5)))
def test_a_study_with_a_broken_file_ends_the_same_or_is_refused(
    study: Study, begun: Path, tmp_path: Path, seed: int
) -> None:
    rng = random.Random(seed)
    whole, out = (Path(shutil.copytree(begun, tmp_path / name)) for name in ("whole", "out"))
    victim = rng.choice(sorted(path for path in out.rglob("*") if path.is_file()))
    victim.write_bytes(broken(victim.read_bytes(), rng))
    try:
        survey(out)
        read_status(out)
        digests = gone_on(study, out)
    except InputError as refusal:
        assert victim.name in str(refusal)  # noqa: PT017
        return
    assert digests == gone_on(study, whole)
    assert verify(out).damaged == {}


@pytest.mark.parametrize("kind", ["workloads", "studies", "models", "hardware"])
def test_a_broken_configuration_is_refused_or_understood(tmp_path: Path, kind: str) -> None:
    shipped = sorted((CHECKOUT / "configs" / kind).glob("*.toml"))
    for seed in range(inputs(12)):
        rng = random.Random(seed)
        path = tmp_path / "broken.toml"
        path.write_bytes(broken(rng.choice(shipped).read_bytes(), rng))
        try:
            if kind == "workloads":
                load_workload(str(path))
            elif kind == "hardware":
                load_workload("gpt_moe_1_2t_16k", str(path))
            elif kind == "models":
                text = (CHECKOUT / "configs/workloads/gpt_moe_1_2t_16k.toml").read_text()
                (tmp_path / "w.toml").write_text(text.replace('model = "gpt_moe_1_2t"', 'model = "broken.toml"'))
                load_workload(str(tmp_path / "w.toml"))
            else:
                load_study(path)
        except (CatalogError, InputError) as refusal:
            assert "\n" not in str(refusal)  # noqa: PT017


LEARNING = [pytest.param(name, marks=pytest.mark.slow) for name in ("ppo", "ppo_paper", "nevergrad")]  # to import


@pytest.mark.parametrize("searcher", ["annealing", "mcmc", "genetic", "ant_colony", *LEARNING])
def test_broken_options_are_refused_or_understood(searcher: str) -> None:
    values = [None, -1, 0, 0.5, 10**400, float("inf"), float("nan"), "x", [], {}, True]
    preset = check_options(searcher, {}).model_dump()
    for seed in range(inputs(12)):
        rng = random.Random(seed)
        options = {**preset, rng.choice([*preset, "unknown"]): rng.choice(values)}
        try:
            check_options(searcher, options)
        except InputError as refusal:
            assert searcher in str(refusal)  # noqa: PT017


def test_a_broken_archive_is_no_state() -> None:
    whole = pack({"a": [1, (2, 3)], "rng": {"state": 2**100}})
    for seed in range(inputs(240)):
        with contextlib.suppress(ValueError):
            assert isinstance(unpack(broken(whole, random.Random(seed))), dict)


GEMMS = "framework,dtype,m,n,k,latency_us\n" + "".join(f"trt,fp8,{2**i},4096,4096,{5.5 * (i + 1)}\n" for i in range(9))


def test_a_broken_table_is_refused_in_one_line_or_read_within_its_bounds(tmp_path: Path) -> None:
    path = tmp_path / "gemm.csv"
    for seed in range(inputs(120)):
        path.write_bytes(broken(GEMMS.encode(), random.Random(seed)))
        try:
            frame = read_csv(path, MEASURED_FAMILIES["gemm"].schema)
        except InputError as refusal:
            assert str(path) in str(refusal)  # noqa: PT017
            assert len(str(refusal)) < 10_000  # noqa: PT017
        else:
            assert (frame[["m", "n", "k", "latency_us"]] > 0).all(axis=None)


def test_a_comma_at_the_ends_of_lines_is_no_name_of_a_row(tmp_path: Path) -> None:
    (tmp_path / "gemm.csv").write_text(GEMMS.replace("\n", ",\n").replace("us,", "us"))
    with pytest.raises(InputError, match="more cells than the header's 6"):
        read_csv(tmp_path / "gemm.csv", MEASURED_FAMILIES["gemm"].schema)


@pytest.mark.parametrize(
    ("table", "most"),
    [(",\n" * 3_000_000, "4,000,000 cells"), ("a," * 10**6 + "\n", "1,000 columns"), ("\n" * 5 * 10**6, "cells")],
    ids=["rows", "columns", "empty lines"],
)
def test_a_table_of_more_cells_than_any_is_refused_before_it_is_taken_apart(
    tmp_path: Path, table: str, most: str
) -> None:
    (tmp_path / "gemm.csv").write_text(table)
    with pytest.raises(InputError, match=f"it is too long: expected at most .*{most}"):
        read_csv(tmp_path / "gemm.csv", MEASURED_FAMILIES["gemm"].schema)


def test_a_broken_cache_of_optima_is_not_believed(
    tiny_workload: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RAYSEARCH_CACHE_DIR", str(tmp_path))
    workload = load_workload(str(tiny_workload))
    found = find_cached_optimum(workload)
    (kept,) = cache_dir().glob("*.json")
    whole = kept.read_bytes()
    for seed in range(runs(4)):
        kept.write_bytes(broken(whole, random.Random(seed)))
        again = find_cached_optimum(workload)
        assert (again.tokens_per_s_per_gpu, again.strategy) == (found.tokens_per_s_per_gpu, found.strategy)


def test_a_broken_cache_of_answers_is_not_believed(
    tiny_workload: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    workload = load_workload(str(tiny_workload))
    strategies = [Strategy(2, 4, 1, 256, (dim,) * 12) for dim in (0, 1, 2)]
    whole = tmp_path / "whole.sqlite"
    right = [evaluate(workload, strategy) for strategy in strategies]
    with contextlib.closing(AnswerCache(whole, workload)) as answers:
        for answer in right:
            answers.keep(answer)
    for seed in range(inputs(12)):
        path = tmp_path / f"{seed}.sqlite"
        path.write_bytes(broken(whole.read_bytes(), random.Random(seed)))
        with contextlib.closing(AnswerCache(path, workload)) as answers:
            kept = [answers.read(strategy) for strategy in strategies]
        for answer, true in zip(kept, right, strict=True):
            assert answer is None or answer.tokens_per_s_per_gpu == true.tokens_per_s_per_gpu


VALUES = ["", "-1", "0", "1e999", "nan", "9" * 400, "x", "\udcff", "../..", "a:b", "[", "-h", "\0", "8", "2,1", "."]
FLAGS = {
    "evaluate": ["--workload", "--tp", "--ep", "--pp", "--batch", "--dims", "--hardware", "--space", "--set"],
    "explain": ["--workload", "--tp", "--dims", "--set", "--space"],
    "search": ["--searcher", "--seed", "--budget", "--hardware", "--set"],
    "report": ["--json"],
    "status": ["--json"],
    "verify": ["--json"],
    "list": ["--json"],
}
SETTINGS = ["margin", "any_degrees", "against", "workers", "retries", "on_failure", "trust_code", "timeout_s"]
GOOD = {
    "evaluate": ["--tp", "2", "--ep", "4", "--pp", "1", "--batch", "256", "--dims", "megatron"],
    "explain": ["--tp", "2", "--ep", "4", "--pp", "1", "--batch", "256", "--dims", "megatron"],
    "search": ["--searcher", "random", "--budget", "2"],
}


def test_broken_options_of_a_command_are_one_message_or_understood(
    tiny_workload: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    for seed in range(runs(16)):
        rng = random.Random(seed)
        command = rng.choice(list(FLAGS))
        good = ["--workload", str(tiny_workload), *GOOD[command]] if command in GOOD else []
        value = rng.choice(VALUES)
        flag = rng.choice(FLAGS[command])
        value = f"{rng.choice(SETTINGS)}={value}" if flag == "--set" and rng.random() < 0.8 else value
        bad = [flag, value] if rng.random() < 0.8 else [value]
        monkeypatch.setattr(sys, "argv", ["raysearch", command, *good, *bad])
        code = app.run_command()
        output = capsys.readouterr().err
        assert code in (0, 1, 2, 3), (sys.argv, output)
        assert "Traceback" not in output
        assert code == 0 or len(output) < 10_000
