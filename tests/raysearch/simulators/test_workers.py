"""Runs whose calls are evaluated by workers, with simulators that fail in every way there is."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import sqlite3
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from envs.calls import parse_dims_text
from envs.rows import read_rows
from envs.space import StrategySpace
from envs.strategy_env import SimulatorFailure, StrategyEnv
from raysearch.base.errors import InputError
from raysearch.base.file_io import SEAL, as_strategy, write_record
from raysearch.runs.in_flight import recorded_order
from raysearch.runs.records import SUMMARY_FILE, RunSpec
from raysearch.runs.run import SearchRun
from raysearch.simulators import choice
from raysearch.simulators.choice import choose_workers
from raysearch.simulators.opening import Patience
from raysearch.simulators.plugin import load_simulator
from raysearch.simulators.protocol import InProcess
from raysearch.simulators.workers import Workers
from raysearch.studies.results import verify
from sim.config.catalog import load_workload
from sim.config.files import config_path
from sim.simulate import evaluate
from tests.raysearch.simulators.boxes import BAD_BATCH

BOXES = "tests.raysearch.simulators.boxes:"
WORKLOAD = "gpt_moe_1_2t_16k"
SHORT = Patience(timeout_s=2.0, retries=1)
pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("ray_of_nine")]

NewRun = Callable[..., SearchRun]


@pytest.fixture
def new_run(tmp_path: Path) -> Iterator[NewRun]:
    """Starts runs; those `here` ask their box in this process, as far ahead as those many workers would be asked."""
    with contextlib.ExitStack() as stack:

        def start(
            folder: str,
            box: str | None,
            *,
            workers: int,
            searcher="annealing",
            budget=60,
            workload=WORKLOAD,
            here=False,
            **given,
        ):
            name = BOXES + box if box else None
            spec = RunSpec(str(workload), searcher, seed=0, budget=budget, simulator=name, workers=workers)
            simulator = InProcess(load_simulator(name)) if here else None
            run = SearchRun(spec, tmp_path / folder, patience=SHORT, simulator=simulator, **given)
            return stack.enter_context(contextlib.closing(run))

        yield start


def finished(run: SearchRun) -> dict:
    run.advance(run.spec.budget)
    assert run.done
    return run.summary()


def test_the_recorded_order_of_answers_repeats_a_run_bit_by_bit_without_its_workers(new_run: NewRun) -> None:
    """One that is cut off makes the calls after its checkpoint again first, in their order: see also `overtaken`."""
    run = new_run("late", "late_first", workers=2)
    run.advance(23)
    run.save()
    run.advance(17)  # lost with the process, and made again
    run.close()
    lost = (run.out_dir / "rows.jsonl").read_bytes()
    run = new_run("late", "late_first", workers=2, resume=True)
    assert run.calls == 23
    run.advance(17)
    assert (run.out_dir / "rows.jsonl").read_bytes() == lost
    found = finished(run)
    order = recorded_order(run.out_dir)
    assert read_rows(run.out_dir)["call"].tolist() == sorted(order) == list(range(1, 61))
    assert order != sorted(order)  # a slow answer, of whichever worker was the first to begin, keeps no other back
    again = finished(new_run("again", "hilly", workers=2, order=order, here=True))
    assert again["digest"] == found["digest"]


def test_the_order_of_another_run_is_refused(new_run: NewRun) -> None:
    run = new_run("run", "hilly", workers=1, here=True, order=[1, 2, 30])
    with pytest.raises(InputError, match="expected rows of this very run, got an answer to decision 30"):
        run.advance(5)


def test_one_worker_answers_in_the_order_of_the_decisions_whatever_was_asked_before(new_run: NewRun) -> None:
    here = finished(new_run("here", "hilly", workers=1, here=True))
    assert finished(new_run("cold", "hilly", workers=1))["digest"] == here["digest"]
    finished(new_run("others", "hilly", workers=1, searcher="coordinate"))  # fills the cache
    assert finished(new_run("warm", "hilly", workers=1))["digest"] == here["digest"]


def test_a_sweep_ends_by_itself_with_all_its_calls(new_run: NewRun, tmp_path: Path) -> None:
    text = config_path("workloads", WORKLOAD).read_text(encoding="utf-8")
    few = re.sub(r"^(tp|pp|batch) = .*$", r"\1 = [1, 2, 4]", text, flags=re.MULTILINE)
    (tmp_path / "few.toml").write_text(few, encoding="utf-8")
    run = new_run("sweep", "by_degrees", workers=2, searcher="megatron", budget=10_000, workload=tmp_path / "few.toml")
    summary = finished(run)
    assert summary["calls"] == summary["unique_calls"] == 3 * 5 * 3 * 3


def test_the_budget_is_never_exceeded_ahead_of_it(new_run: NewRun, log: Path) -> None:
    finished(new_run("exact", "hilly", workers=3, searcher="random", budget=11))
    assert len(log.read_text().splitlines()) == 11


def test_a_worker_killed_in_the_middle_loses_no_call(new_run: NewRun) -> None:
    run = new_run("hurt", "hilly", workers=2)
    run.advance(20)
    workers = run._simulator._workers  # pyright: ignore[reportAttributeAccessIssue]
    where = next(each.where for each in workers if each.where)  # on a busy machine one may not have begun yet
    os.kill(where.pid, signal.SIGKILL)
    finished(run)
    order = recorded_order(run.out_dir)
    assert read_rows(run.out_dir)["call"].tolist() == sorted(order) == list(range(1, 61))


def test_a_simulator_that_dies_once_per_strategy_is_asked_again(new_run: NewRun) -> None:
    hurt = new_run("hurt", "dies_once", workers=2, searcher="random", budget=12)
    found = finished(hurt)
    order = recorded_order(hurt.out_dir)
    whole = finished(new_run("whole", "hilly", workers=2, searcher="random", budget=12, here=True, order=order))
    assert found["digest"] == whole["digest"]


@pytest.mark.parametrize(
    ("box", "reason", "workers"),
    [
        ("hangs", "no answer within 2 s", 2),
        ("stops", "no answer within 2 s", 1),
        ("dies", "process died", 1),
        ("raises", "ZeroDivisionError: no such batch", 1),
        ("nan", "finite tokens_per_s_per_gpu", 1),
    ],
)
def test_a_simulator_that_always_fails_stops_the_run_at_the_strategy_and_keeps_every_row(
    new_run: NewRun, box: str, reason: str, workers: int
) -> None:
    run = new_run("run", box, workers=workers, searcher="random", budget=200)
    with pytest.raises(SimulatorFailure, match=reason) as failure:
        run.advance(200)
    assert failure.value.strategy.batch == BAD_BATCH
    rows = read_rows(run.out_dir)
    assert len(rows) == run.calls
    assert BAD_BATCH not in rows["batch"].tolist()


def test_what_was_answered_once_is_not_asked_again_and_failures_are(new_run: NewRun, log: Path) -> None:
    first = finished(new_run("first", "hilly", workers=1, searcher="random"))
    asked = log.read_text().splitlines()
    second = finished(new_run("second", "hilly", workers=1, searcher="random"))
    assert second["best"] == first["best"]
    assert log.read_text().splitlines() == asked


def test_a_cache_that_cannot_be_used_is_one_note_and_no_more(
    new_run: NewRun, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "a file").touch()
    monkeypatch.setenv("RAYSEARCH_CACHE_DIR", str(tmp_path / "a file" / "cache"))
    assert finished(new_run("run", "hilly", workers=1, budget=5))["calls"] == 5
    assert caplog.text.count("are not kept") == 1


def test_our_own_simulator_says_the_same_in_workers() -> None:
    workload = load_workload(WORKLOAD)
    with contextlib.closing(Workers(None, workload, workers=1, patience=Patience(timeout_s=30.0))) as pool:
        strategy = StrategySpace(workload).decode(StrategySpace(workload).nvec - 1)
        assert pool(workload, strategy) == evaluate(workload, strategy)


@pytest.mark.parametrize(("box", "workers"), [("hilly", 1), ("very_slow", 4)])
def test_a_slow_black_box_gets_the_workers_and_a_fast_one_a_single_one(
    box: str, workers: int, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(choice, "WORTH_WORKERS_S", 0.5)  # far from both, however busy the machine is
    assert choose_workers(BOXES + box, load_workload(WORKLOAD), SHORT, available=4) == workers
    assert f"--set workers={workers}" in capsys.readouterr().err


def test_a_strategy_that_fails_for_good_may_be_an_infeasible_call_which_the_rows_say(tmp_path: Path) -> None:
    figures = {"seed": 0, "budget": 120, "simulator": BOXES + "raises", "workers": 1}
    spec = RunSpec(WORKLOAD, "random", on_failure="infeasible", **figures)
    with contextlib.closing(SearchRun(spec, tmp_path / "run", patience=SHORT)) as run:
        run.advance(120)
        run.finish()
    rows = read_rows(tmp_path / "run")
    failed = rows[rows["violations"] == "failed"]
    assert len(failed) > 0
    assert set(failed["batch"]) == {BAD_BATCH}
    assert not failed["feasible"].any()
    assert BAD_BATCH not in set(rows[rows["violations"] != "failed"]["batch"])
    with pytest.raises(InputError, match="is for plugged-in simulators"):
        RunSpec(WORKLOAD, "random", 0, 10, on_failure="infeasible")


def test_a_black_box_that_does_not_repeat_itself_is_found_out(new_run: NewRun, log: Path) -> None:
    pure = new_run("pure", "hilly", workers=1, searcher="random", budget=20)
    pure.advance(20)
    assert pure.finish()["answers_differ"] == []
    noisy = new_run("noisy", "noisy", workers=1, searcher="random", budget=20)
    noisy.advance(20)
    differing = noisy.finish()["answers_differ"]
    best = noisy.summary()["best"]
    assert 1 <= len(differing) <= 3
    assert f": {best:.6g} tokens/s/GPU, asked again " in differing[0]


@pytest.mark.parametrize("searcher", ["prior", "genetic"])
def test_of_answers_that_are_declared_noisy_the_luckiest_is_not_taken_for_the_best(
    new_run: NewRun, tiny_workload: Path, searcher: str
) -> None:
    run = new_run("noisy", "scattered", workers=1, searcher=searcher, budget=100, workload=tiny_workload, here=True)
    run.advance(100)
    found = run.finish()
    rows = read_rows(run.out_dir)
    luckiest = rows.loc[rows["tokens_per_s_per_gpu"].where(rows["feasible"], 0.0).idxmax()]
    workload = run.workload
    truths = [
        evaluate(workload, as_strategy(each)).tokens_per_s_per_gpu
        for each in (found["strategy"], {**luckiest[["tp", "ep", "pp", "batch"]], **parse_dims_text(luckiest["dims"])})
    ]
    assert truths[0] > truths[1]
    assert found["best"] == pytest.approx(truths[0], rel=0.05)
    assert found["best"] < luckiest["tokens_per_s_per_gpu"]
    assert "answers_differ" not in found  # they are meant to
    (verified,) = verify(run.out_dir).runs
    assert verified.get("noise") == found["noise"] == 0.1
    path = run.out_dir / SUMMARY_FILE
    summary = json.loads(path.read_text())
    del summary[SEAL]
    write_record(path, {**summary, "strategy": {**summary["strategy"], "batch": 7}})
    (damaged,) = verify(run.out_dir).damaged.values()
    assert "none of its rows within all limits is the best" in damaged


def test_what_a_black_box_says_is_one_line_that_can_be_read() -> None:
    workload = load_workload(WORKLOAD)
    with contextlib.closing(Workers(BOXES + "unspeakable", workload, workers=1, patience=SHORT)) as pool:
        env = StrategyEnv(workload, evaluate=pool)
        for batch, reason in enumerate(
            (
                r"RuntimeError: x{486} \.\.\. \(10,000,014 characters\)",
                "Unpicklable: cannot be sent",
                "SystemExit: enough",
                "KeyboardInterrupt:",
            )
        ):
            with pytest.raises(SimulatorFailure) as failure:
                env.step([0, 0, 0, batch] + [0] * 12)
            output = str(failure.value)
            assert re.fullmatch(rf"the simulator failed on Strategy\([^\n]*: {reason}", output), output[:2000]


def test_an_evaluation_with_nonsense_in_it_is_refused_before_it_is_kept(new_run: NewRun, tmp_path: Path) -> None:
    with pytest.raises(SimulatorFailure, match="expected a finite tokens_per_s_per_gpu"):
        new_run("run", "nan_evaluation", workers=1, searcher="random", budget=3).advance(3)
    (kept,) = (tmp_path / "cache" / "answers").glob("*.sqlite")
    with contextlib.closing(sqlite3.connect(kept)) as database:
        assert database.execute("SELECT COUNT(*) FROM answers").fetchone() == (0,)
