"""Runs: exact budgets, equal calls for equal specs, resuming bit for bit."""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from envs.reward import ImprovementReward
from envs.rows import ROWS_FILE, RowsTaken, read_rows
from envs.space import StrategySpace
from raysearch.base.errors import InputError
from raysearch.runs.checkpoint import CHECKPOINT_FILE
from raysearch.runs.records import RunSpec
from raysearch.runs.run import SearchRun, finish_rows, finished_summary
from raysearch.searchers.registry import make_searcher
from sim.config.catalog import load_workload

SEARCHERS = ["random", "random_walk", "annealing", "coordinate", "megatron", "ppo_paper"]
CHUNK = ("chunk", "chunk_best", "chunk_done")
NO_CLOCK = {"optimum", "fraction_of_optimum", "wall_s", "improvements", "metrics"}


def spec(workload: Path, searcher: str = "annealing", seed: int = 0, budget: int = 60) -> RunSpec:
    return RunSpec(str(workload), searcher, seed=seed, budget=budget)


def finished(run: SearchRun) -> dict:
    run.advance(run.spec.budget)
    assert run.done
    return {key: value for key, value in run.finish().items() if key not in NO_CLOCK}


def test_a_run_makes_exactly_its_budget_of_calls_and_writes_a_row_for_each(tiny_workload: Path, tmp_path: Path) -> None:
    run = SearchRun(spec(tiny_workload, budget=33), tmp_path)
    run.advance(1000)
    run.advance(1000)
    assert run.calls == 33
    assert read_rows(tmp_path)["call"].tolist() == list(range(1, 34))
    run.close()


def test_rows_are_on_disk_while_the_run_goes_on(tiny_workload: Path, tmp_path: Path) -> None:
    run = SearchRun(spec(tiny_workload), tmp_path)
    run.advance(7)
    assert len(read_rows(tmp_path)) == 7
    run.close()


def test_an_exhausted_searcher_ends_its_run_before_the_budget(tiny_workload: Path, tmp_path: Path) -> None:
    run = SearchRun(spec(tiny_workload, "megatron", budget=60), tmp_path)
    summary = finished(run)
    assert summary["calls"] == summary["unique_calls"] == 16


@pytest.mark.parametrize("searcher", SEARCHERS)
def test_equal_specs_give_equal_calls_in_whatever_pieces_they_are_made(
    tiny_workload: Path, tmp_path: Path, searcher: str
) -> None:
    whole = SearchRun(spec(tiny_workload, searcher), tmp_path / "whole")
    pieces = SearchRun(spec(tiny_workload, searcher), tmp_path / "pieces")
    for _ in range(20):
        pieces.advance(3)
    assert finished(whole) == finished(pieces)
    assert read_rows(tmp_path / "whole").equals(read_rows(tmp_path / "pieces"))


def test_another_seed_gives_other_calls(tiny_workload: Path, tmp_path: Path) -> None:
    digests = {finished(SearchRun(spec(tiny_workload, seed=seed), tmp_path / str(seed)))["digest"] for seed in range(3)}
    assert len(digests) == 3


@pytest.mark.parametrize("searcher", [name for name in SEARCHERS if name != "ppo_paper"])  # see its conformance
def test_a_run_killed_after_its_checkpoint_ends_as_if_never_stopped(
    tiny_workload: Path, tmp_path: Path, searcher: str
) -> None:
    straight = finished(SearchRun(spec(tiny_workload, searcher), tmp_path / "straight"))
    killed = SearchRun(spec(tiny_workload, searcher), tmp_path / "resumed")
    killed.advance(13)
    killed.save()
    killed.advance(20)  # calls that the checkpoint does not know of
    killed.close()
    resumed = SearchRun(spec(tiny_workload, searcher), tmp_path / "resumed", resume=True)
    assert resumed.calls == 13
    assert finished(resumed) == straight
    assert read_rows(tmp_path / "resumed").equals(read_rows(tmp_path / "straight"))


def test_every_improvement_is_timed_also_across_a_resume(tiny_workload: Path, tmp_path: Path) -> None:
    killed = SearchRun(spec(tiny_workload, budget=200), tmp_path)
    killed.advance(40)
    killed.save()
    killed.advance(20)
    killed.close()
    run = SearchRun(spec(tiny_workload, budget=200), tmp_path, resume=True)
    run.advance(200)
    summary = run.finish()
    best = read_rows(tmp_path)["best_so_far"].to_numpy()
    rises = (np.flatnonzero(np.diff(best, prepend=0.0)) + 1).tolist()
    assert rises[0] <= 40 < rises[-1]
    assert [call for call, _ in summary["improvements"]] == rises
    times = [wall_s for _, wall_s in summary["improvements"]]
    assert times == sorted(times)
    assert 0.0 < times[0] <= times[-1] <= summary["wall_s"]


def test_a_checkpoint_is_on_the_disk_only_after_its_rows(
    tiny_workload: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else a host that is lost may leave others a checkpoint without rows."""
    run = SearchRun(spec(tiny_workload), tmp_path / "run")
    run.advance(5)
    synced = []
    monkeypatch.setattr(os, "fsync", lambda handle: synced.append(Path(f"/proc/self/fd/{handle}").readlink().name))
    run.save()
    run.close()
    rows, checkpoint = synced
    assert rows == ROWS_FILE
    assert checkpoint.startswith(f".{CHECKPOINT_FILE}.")


def test_a_run_killed_before_its_first_checkpoint_starts_again(tiny_workload: Path, tmp_path: Path) -> None:
    killed = SearchRun(spec(tiny_workload), tmp_path / "again")
    killed.advance(20)
    killed.close()
    again = SearchRun(spec(tiny_workload), tmp_path / "again", resume=True)
    assert again.calls == 0
    assert finished(again) == finished(SearchRun(spec(tiny_workload), tmp_path / "straight"))


def test_a_process_that_was_given_up_for_dead_cannot_harm_the_run_that_another_goes_on_with(
    tiny_workload: Path, tmp_path: Path
) -> None:
    straight = finished(SearchRun(spec(tiny_workload), tmp_path / "straight"))
    lost = SearchRun(spec(tiny_workload), tmp_path / "run")
    lost.advance(20)
    lost.save()
    successor = SearchRun(spec(tiny_workload), tmp_path / "run", resume=True)
    successor.advance(10)
    lost.advance(40)
    for end in (lost.save, lost.finish):
        with pytest.raises(RowsTaken, match="has been taken over by another process"):
            end()
    lost.close()
    assert len(read_rows(tmp_path / "run")) == 30
    shutil.copy(tmp_path / "straight" / "summary.json", tmp_path / "run")  # as if it had asked a moment earlier
    with pytest.raises(RowsTaken, match="30 rows of 60"):
        finish_rows(tmp_path / "run")
    assert finished(successor) == straight
    with pytest.raises(RowsTaken):  # nor once the other is done
        lost.save()
    assert read_rows(tmp_path / "run").equals(read_rows(tmp_path / "straight"))


@pytest.mark.parametrize(
    ("name", "damage"),
    [
        (CHECKPOINT_FILE, lambda content: content[:-1]),
        (CHECKPOINT_FILE, lambda content: b""),
        (CHECKPOINT_FILE, lambda content: content[:-100] + b"?" + content[-99:]),
        (ROWS_FILE, lambda content: b"".join(content.splitlines(keepends=True)[:5])),
    ],
)
def test_a_run_with_a_damaged_checkpoint_starts_again_and_says_so(
    tiny_workload: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture, name: str, damage: Callable[[bytes], bytes]
) -> None:
    killed = SearchRun(spec(tiny_workload), tmp_path / "again")
    killed.advance(13)
    killed.save()
    killed.close()
    path = tmp_path / "again" / name
    path.write_bytes(damage(path.read_bytes()))
    again = SearchRun(spec(tiny_workload), tmp_path / "again", resume=True)
    assert again.calls == 0
    assert str(path) in caplog.text
    assert "its run starts again from the first call" in caplog.text
    assert finished(again) == finished(SearchRun(spec(tiny_workload), tmp_path / "straight"))


@pytest.mark.parametrize("end", [SearchRun.close, SearchRun.finish])
def test_a_new_run_leaves_another_in_its_folder_alone(
    tiny_workload: Path, tmp_path: Path, end: Callable[[SearchRun], object]
) -> None:
    first = SearchRun(spec(tiny_workload), tmp_path)
    first.advance(10)
    end(first)
    before = {path: path.read_bytes() for path in tmp_path.iterdir()}
    with pytest.raises(InputError, match="contains a run already"):
        SearchRun(spec(tiny_workload, seed=1), tmp_path)
    assert {path: path.read_bytes() for path in tmp_path.iterdir()} == before


def test_a_checkpoint_of_another_run_is_refused(tiny_workload: Path, tmp_path: Path) -> None:
    run = SearchRun(spec(tiny_workload, seed=0), tmp_path)
    run.save()
    run.close()
    with pytest.raises(InputError, match="another run"):
        SearchRun(spec(tiny_workload, seed=1), tmp_path, resume=True)


def test_a_checkpoint_of_a_workload_that_has_changed_since_is_refused(tiny_workload: Path, tmp_path: Path) -> None:
    own = tmp_path / "own.toml"
    own.write_text(tiny_workload.read_text())
    run = SearchRun(spec(own), tmp_path / "run")
    run.save()
    run.close()
    own.write_text(own.read_text().replace("16384", "8192"))
    with pytest.raises(InputError, match="changed since"):
        SearchRun(spec(own), tmp_path / "run", resume=True)


def test_finishing_leaves_a_summary_and_compact_rows_only(tiny_workload: Path, tmp_path: Path) -> None:
    run = SearchRun(spec(tiny_workload), tmp_path, optimum=1000.0)
    run.advance(30)
    run.save()
    assert finished_summary(tmp_path) is None
    finished(run)
    assert {path.name for path in tmp_path.iterdir()} == {"run.json", "rows.parquet", "summary.json"}
    summary = finished_summary(tmp_path)
    assert summary is not None
    assert summary["fraction_of_optimum"] == summary["best"] / 1000.0
    assert not (tmp_path / CHECKPOINT_FILE).exists()
    finish_rows(tmp_path)  # a second time changes nothing


def test_metrics_have_the_same_names_for_every_searcher(tiny_workload: Path, tmp_path: Path) -> None:
    names = set()
    for searcher in SEARCHERS:
        run = SearchRun(spec(tiny_workload, searcher), tmp_path / searcher, optimum=1.0)
        run.advance(4)
        names.add(tuple(name for name in run.metrics() if not name.startswith("searcher/")))
        run.close()
    assert names == {("calls", "best", "fraction_of_optimum", "unique_calls", "feasible_calls", "wall_s", *CHUNK)}


@pytest.mark.parametrize(
    ("change", "message"),
    [({"budget": 0}, "budget"), ({"budget": -5}, "-5"), ({"seed": -1}, "seed"), ({"seed": 2**63}, "seed")],
)
def test_impossible_specs_are_refused(change: dict[str, int], message: str) -> None:
    with pytest.raises(InputError, match=message):
        RunSpec(**{"workload": "w", "searcher": "random", "seed": 0, "budget": 10, **change})


def test_unknown_names_and_options_are_refused_before_anything_is_written(tiny_workload: Path, tmp_path: Path) -> None:
    with pytest.raises(InputError, match="did you mean 'annealing'"):
        SearchRun(spec(tiny_workload, "anealing"), tmp_path / "run")
    with pytest.raises(InputError, match="heat"):
        SearchRun(RunSpec(str(tiny_workload), "annealing", 0, 9, options={"heat": 3.0}), tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_a_run_may_stop_where_a_chunk_ends_and_says_how_that_one_went(tmp_path):
    spec = RunSpec("gpt_moe_1_2t_16k", "ppo_paper", seed=0, budget=23, options={"embedding": 16, "hidden": 16})
    ends = []
    with contextlib.closing(SearchRun(spec, tmp_path)) as run:
        while not run.done:
            run.advance(100, within_chunk=True)
            metrics = run.metrics()
            ends.append((metrics["calls"], metrics["chunk"], metrics["chunk_done"]))
            assert metrics["chunk_best"] <= metrics["best"]
    assert ends == [(6, 1, 1), (12, 2, 1), (18, 3, 1), (23, 4, 1)]


@pytest.mark.parametrize("name", ["ppo_paper", "sb3_ppo"])
def test_elites_and_reward_are_what_the_searcher_s_options_say(name: str, tiny_workload: Path, tmp_path: Path) -> None:
    def rewards(folder: str, **options: float) -> list[float]:
        run = SearchRun(RunSpec(str(tiny_workload), name, 0, 2, options=options), tmp_path / folder)
        run.advance(2)
        run.close()
        return read_rows(tmp_path / folder)["reward"].tolist()

    assert make_searcher(name, StrategySpace(load_workload("gpt_moe_1_2t_16k")), seed=0, budget=2).environment == {
        "elites": 3,
        "reward": ImprovementReward(),
    }
    plain, scaled = rewards("plain"), rewards("scaled", alpha=2.0, beta=2.0, penalty=20.0, elites=5)
    assert scaled[0] == 2 * plain[0]
    with pytest.raises(InputError, match="penalty must exceed beta"):
        rewards("wrong", beta=10.0)
