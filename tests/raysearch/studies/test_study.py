"""Studies: what a file may say, and real ones on Ray, also interrupted, killed and resumed."""

from __future__ import annotations

import json
import re
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

import raysearch as rs
from envs.rows import read_rows
from raysearch.base.errors import InputError
from raysearch.cli.commands.study import run as study_command
from raysearch.runs.records import RunSpec
from raysearch.runs.run import SearchRun
from raysearch.studies.results import study_frame
from raysearch.studies.study_file import load_study, run_dir
from raysearch.studies.study_file import write_study as write_record
from sim.config.catalog import load_workload
from sim.config.files import CatalogError, list_names
from sim.simulate import evaluate
from sim.strategy import Strategy
from tests.conftest import command_environment, raysearch_command, run_here
from tests.processes import LONGEST_S

Ended = tuple[int, str, str]
"""A command's exit code, and what it printed on stdout and stderr."""


def write_study(folder: Path, workload: Path, **changes: Any) -> Path:
    """A study file; a change to None leaves the key out."""
    keys = {
        "name": "test",
        "workloads": [str(workload)],
        "searchers": ["random_walk", "annealing"],
        "seeds": [0, 1],
        "budget": 60,
        **changes,
    }
    path = folder / "study.toml"
    path.write_text("".join(f"{key} = {json.dumps(value)}\n" for key, value in keys.items() if value is not None))
    return path


def alone(workload: Path, searcher: str, seed: int, budget: int, folder: Path) -> str:
    """The digest of the same run made by itself, in this process."""
    options = HOT if searcher == "annealing" else {}
    run = SearchRun(RunSpec(str(workload), searcher, seed, budget, options=options), folder / f"{searcher}-{seed}")
    run.advance(budget)
    return run.finish()["digest"]


def test_a_study_is_every_workload_with_every_searcher_and_seed(tiny_workload: Path, tmp_path: Path) -> None:
    study = load_study(write_study(tmp_path, tiny_workload))
    assert set(study.specs()) == {f"tiny-{name}-s{seed}" for name in ("random_walk", "annealing") for seed in (0, 1)}
    assert all(spec.budget == 60 and spec.workload == str(tiny_workload) for spec in study.specs().values())


def test_a_study_s_space_is_that_of_all_its_runs(tiny_workload: Path, tmp_path: Path) -> None:
    study = load_study(write_study(tmp_path, tiny_workload, space="paper", searchers=["annealing", "megatron_sp"]))
    assert {spec.space for spec in study.specs().values()} == {"paper"}
    assert {workload.space for workload in study.workloads.values()} == {"paper"}
    with pytest.raises(CatalogError, match="space"):
        load_study(write_study(tmp_path, tiny_workload, space="papers"))


def test_workloads_take_turns_so_that_none_waits_for_another_to_be_done(tiny_workload: Path, tmp_path: Path) -> None:
    other = tmp_path / "other.toml"
    other.write_text(tiny_workload.read_text().replace('name = "tiny"', 'name = "other"'))
    study = load_study(write_study(tmp_path, tiny_workload, workloads=[str(tiny_workload), str(other)]))
    assert [spec.workload for spec in study.specs().values()] == [str(tiny_workload), str(other)] * 4


def test_workload_paths_are_tried_beside_the_study_file_first(tiny_workload: Path, tmp_path: Path) -> None:
    (tmp_path / "mine.toml").write_text(tiny_workload.read_text())
    study = load_study(write_study(tmp_path, Path("mine.toml")))
    assert list(study.workloads) == [str(tmp_path / "mine.toml")]


def test_options_reach_their_searcher_alone(tiny_workload: Path, tmp_path: Path) -> None:
    path = write_study(tmp_path, tiny_workload)
    path.write_text(path.read_text() + "[options.annealing]\ninitial_temperature = 30.0\n")
    by_searcher = {spec.searcher: spec.options for spec in load_study(path).specs().values()}
    assert by_searcher == {"random_walk": {}, "annealing": {"initial_temperature": 30.0}}


@pytest.mark.parametrize("name", sorted(list_names("studies")))
def test_the_shipped_studies_can_be_run(name: str) -> None:
    assert load_study(name).file.name == name


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"searchers": ["random_wlak"]}, "did you mean 'random_walk'"),
        ({"workloads": ["gpt_moe_1_2t_16"]}, "did you mean 'gpt_moe_1_2t_16k'"),
        ({"hardware": "h10_sxm"}, "did you mean 'h100_sxm'"),
        ({"budgett": 9}, "did you mean 'budget'"),
        ({"budget": 0}, "budget"),
        ({"budget": 10.5}, "budget"),
        ({"budget": None}, "missing"),
        ({"seeds": [-1]}, r"seeds\.0: [^;]*$"),  # one mistake, one message
        ({"seeds": []}, "seeds: expected at least one"),
        ({"workloads": []}, "workloads: expected at least one"),
        ({"seeds": [1, 1]}, "must not repeat"),
        ({"cpus_per_run": 0}, "cpus_per_run"),
        ({"name": "../up"}, "name"),
        ({"seeds": [2**63]}, "seeds"),
    ],
)
def test_a_study_that_cannot_be_run_is_refused(
    tiny_workload: Path, tmp_path: Path, changes: dict[str, Any], message: str
) -> None:
    with pytest.raises((InputError, CatalogError), match=message):
        load_study(write_study(tmp_path, tiny_workload, **changes))


@pytest.mark.parametrize(
    ("table", "message"),
    [
        ("[options.annealing]\ntemp = 1.0", "temp"),
        ("[options.coordinate]", "not among the searchers"),
        ("[options", "not valid TOML"),
        ('[tuning]\nworkloads = ["{workload}"]\nseeds = [7]', r"workloads \['tiny'\] are named under \[tuning\]"),
        ('[tuning]\nworkloads = ["llama_3_1_405b_8k"]\nseeds = [1, 7]', r"seeds \[1\] are named under \[tuning\]"),
        ('[tuning]\nworkloads = ["llama_3_1_405b"]\nseeds = [7]', "did you mean 'llama_3_1_405b_8k'"),
        ('[published]\n{published}\nbases = ["random"]\n[published.ratios]', "searcher 'random' is not among the"),
        ('[published]\n{published}\nbases = ["annealing"]\n[published.ratios.w]', "workload 'w' is not among the"),
        ('[published]\nsource = "x"\nstatistic = "median"', "statistic"),
    ],
)
def test_sections_that_cannot_be_used_are_refused(
    tiny_workload: Path, tmp_path: Path, table: str, message: str
) -> None:
    path = write_study(tmp_path, tiny_workload)
    table = table.replace("{workload}", str(tiny_workload)).replace("{published}", 'source = "x"\nstatistic = "mean"')
    path.write_text(path.read_text() + table + "\n")
    with pytest.raises((InputError, CatalogError), match=message):
        load_study(path)


def test_a_workload_that_was_tuned_on_is_known_under_another_name(tiny_workload: Path, tmp_path: Path) -> None:
    (tmp_path / "copy.toml").write_text(tiny_workload.read_text())
    path = write_study(tmp_path, tiny_workload)
    path.write_text(path.read_text() + '[tuning]\nworkloads = ["copy.toml"]\nseeds = [7]\n')
    with pytest.raises(InputError, match="tuned on"):
        load_study(path)


def half(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:100])


@pytest.mark.parametrize("damage", [half, lambda path: path.write_text("{}")])
def test_a_study_whose_record_is_damaged_is_not_gone_on_with(
    tiny_workload: Path, tmp_path: Path, damage: Callable[[Path], object]
) -> None:
    file, out = begun(tmp_path, tiny_workload)
    damage(out / "study.json")
    with pytest.raises(InputError, match=rf"{re.escape(str(out))}/study.json is damaged: "):
        study_command(path=str(file), out=out, resume=True)


def begun(folder: Path, workload: Path) -> tuple[Path, Path]:
    """A study that was killed with one run finished and one under way: its file and its folder."""
    file, out = write_study(folder, workload, seeds=[0]), folder / "out"
    study = load_study(file)
    write_record(study, {str(workload): None}, out)
    for run_id, spec in study.specs().items():
        run = SearchRun(spec, run_dir(out, run_id))
        run.advance(spec.budget if spec.searcher == "random_walk" else 20)
        run.save()
        run.finish() if run.done else run.close()
    return file, out


# --- on Ray ----------------------------------------------------------------------------------------

SEARCHERS = ["random_walk", "annealing", "megatron"]  # those on RLlib: tests/raysearch/searchers/ppo/test_engine.py
HOT = {"initial_temperature": 300.0}


def write_whole_study(folder: Path, workload: Path, **changes: Any) -> Path:
    path = write_study(folder, workload, searchers=SEARCHERS, report_every=25, **changes)
    path.write_text(path.read_text() + f"[options.annealing]\ninitial_temperature = {HOT['initial_temperature']}\n")
    return path


@pytest.fixture(scope="module")
def twice(tiny_workload: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[Ended]]:
    """A folder, and how a study ended that was started there twice at once: as it should, and refused."""
    folder = tmp_path_factory.mktemp("study")
    study = write_whole_study(folder, tiny_workload)
    command = raysearch_command("study", study, "--out", folder / "out", "--set", "cpus=1", "--json")
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True, "env": command_environment()}
    both = [subprocess.Popen(command, **pipes) for _ in range(2)]
    printed = [process.communicate(timeout=LONGEST_S) for process in both]
    return folder, sorted((process.returncode, *output) for process, output in zip(both, printed, strict=True))


@pytest.fixture(scope="module")
def finished(twice: tuple[Path, list[Ended]]) -> tuple[Path, str]:
    """A study that has run: its folder and what it printed as JSON."""
    folder, ((code, printed, stderr), _) = twice
    assert code == 0, stderr
    return folder, printed


@pytest.mark.slow
def test_of_two_studies_into_one_folder_one_is_refused(twice: tuple[Path, list[Ended]]) -> None:
    assert [code for code, _, _ in twice[1]] == [0, 2], twice[1]
    assert twice[1][1][2].startswith("error: ")


@pytest.mark.slow
def test_a_study_prints_nothing_but_json_with_a_record_per_run(finished: tuple[Path, str]) -> None:
    printed = json.loads(finished[1])
    assert printed["complete"]
    assert {(run["searcher"], run["seed"]) for run in printed["runs"]} == {(s, n) for s in SEARCHERS for n in (0, 1)}
    for run in printed["runs"]:
        assert run["workload"] == "tiny"
        assert run["calls"] == (16 if run["searcher"] == "megatron" else 60)
        assert 0 <= run["best"] <= run["optimum"]
        assert run["fraction_of_optimum"] == run["best"] / run["optimum"]
        assert run["wall_s"] > 0
        assert bool(run["improvements"]) == (run["best"] > 0)
    statistics = printed["statistics"]
    assert set(statistics["searchers"]) == set(SEARCHERS)
    assert (statistics["budget"], statistics["seeds"], statistics["left_out"]) == (60, [2], 0)
    assert len(statistics["pairs"]) == 3
    assert Path(printed["comparison"]).is_file()


@pytest.mark.slow
@pytest.mark.parametrize("searcher", SEARCHERS)
def test_a_study_makes_the_calls_that_its_runs_make_alone(
    finished: tuple[Path, str], tiny_workload: Path, tmp_path: Path, searcher: str
) -> None:
    frame = study_frame(finished[0] / "out").set_index(["searcher", "seed"])
    for seed in (0, 1):
        assert frame.loc[(searcher, seed), "digest"] == alone(tiny_workload, searcher, seed, 60, tmp_path)


@pytest.mark.slow
def test_tune_logs_the_same_metrics_for_every_searcher(finished: tuple[Path, str]) -> None:
    tune = finished[0] / "out" / "tune"
    common = {
        "calls",
        "best",
        "fraction_of_optimum",
        "unique_calls",
        "feasible_calls",
        "wall_s",
        "chunk",
        "chunk_best",
        "chunk_done",
    }
    tags: set[frozenset[str]] = set()
    for searcher in SEARCHERS:
        trial = tune / f"tiny-{searcher}-s0"
        last = json.loads((trial / "result.json").read_text().splitlines()[-1])
        assert common <= last.keys()
        assert last["timesteps_total"] == last["calls"]
        logged = EventAccumulator(str(trial)).Reload()
        assert {f"ray/tune/{name}" for name in common} <= set(logged.Tags()["scalars"])
        for name in common:
            final = logged.Scalars(f"ray/tune/{name}")[-1]
            assert (final.step, final.value) == (last["calls"], pytest.approx(last[name], rel=1e-6))
        tags.add(frozenset(tag for tag in logged.Tags()["scalars"] if not tag.startswith("ray/tune/searcher/")))
    assert len(tags) == 1  # all else that TensorBoard shows is the same for every searcher, too
    assert not list(tune.glob("*/checkpoint_*"))


@pytest.mark.slow
def test_every_row_of_a_study_has_the_figure_that_evaluate_has_of_its_strategy(
    finished: tuple[Path, str], tiny_workload: Path
) -> None:
    workload = load_workload(str(tiny_workload))
    best = rs.optimum(rs.question(workload=str(tiny_workload))).tokens_per_s_per_gpu
    for run in json.loads(finished[1])["runs"]:
        assert run["optimum"] == best
        rows = read_rows(finished[0] / "out" / "runs" / run["run_id"]).to_dict("records")
        for row in rows[:20]:
            dims = tuple(int(each) for each in row["dims"].split(","))
            found = evaluate(workload, Strategy(row["tp"], row["ep"], row["pp"], row["batch"], dims))
            assert row["tokens_per_s_per_gpu"] == found.tokens_per_s_per_gpu
            assert row["feasible"] == found.feasible


@pytest.mark.slow
def test_rows_end_as_parquet_and_frames_are_pandas(finished: tuple[Path, str]) -> None:
    frame = study_frame(finished[0] / "out")
    assert isinstance(frame, pd.DataFrame)
    assert frame["complete"].all()
    for run_id, calls in zip(frame["run_id"], frame["calls"], strict=True):
        folder = finished[0] / "out" / "runs" / run_id
        assert {path.name for path in folder.iterdir()} == {"run.json", "rows.parquet", "summary.json"}
        assert len(read_rows(folder)) == calls


@pytest.mark.slow
def test_a_folder_with_results_is_refused_and_left_alone(finished: tuple[Path, str]) -> None:
    folder = finished[0]
    before = sorted(folder.rglob("*"))
    refused = run_here("study", folder / "study.toml", "--out", folder / "out")
    assert refused.returncode == 2
    assert refused.stderr.startswith("error: ")
    assert "contains results already" in refused.stderr
    assert sorted(folder.rglob("*")) == before


@pytest.mark.slow
def test_resuming_a_finished_study_only_reports(finished: tuple[Path, str]) -> None:
    folder = finished[0]
    again = run_here("study", folder / "study.toml", "--out", folder / "out", "--resume", "--json")
    assert again.returncode == 0
    assert json.loads(again.stdout) == json.loads(finished[1])


@pytest.mark.slow
def test_resuming_with_another_study_is_refused(
    finished: tuple[Path, str], tiny_workload: Path, tmp_path: Path
) -> None:
    other = write_whole_study(tmp_path, tiny_workload, budget=61)
    refused = run_here("study", other, "--out", finished[0] / "out", "--resume")
    assert refused.returncode == 2
    assert "budget" in refused.stderr
    nothing = run_here("study", other, "--out", tmp_path / "nowhere", "--resume")
    assert nothing.returncode == 2
    assert "nothing to resume" in nothing.stderr
