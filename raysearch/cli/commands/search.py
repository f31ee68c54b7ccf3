"""`raysearch search`: one run in this process; only workers need Ray."""

from __future__ import annotations

import sys
import time
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from raysearch.base.errors import InputError, Interrupted, RunFailed
from raysearch.base.file_io import as_strategy, read_record, results_folder
from raysearch.cli.commands.options import (
    JsonOption,
    OnFailureOption,
    OutOption,
    RetriesOption,
    SimulatorOption,
    TimeoutOption,
    TrustCodeOption,
    WorkersOption,
    print_json,
)
from raysearch.cli.commands.question_options import loaded, takes_question
from raysearch.optima.named_spaces import optimum_value
from raysearch.processes.claim import claimed
from raysearch.processes.watcher import can_go_on_with
from raysearch.runs.records import HEAD_FILE, SAVE_EVERY_S, WORKLOAD_OPTIONS, RunHead, check_code, run_name
from raysearch.searchers.registry import check_options, run_budget
from raysearch.simulators.choice import evaluating
from raysearch.simulators.opening import Patience, searched_space
from sim.config.question import Question
from sim.config.schemas import any_degrees
from sim.json_object import JsonFields, JsonObject
from sim.nearness import near_limits
from sim.simulate import evaluate
from sim.workload import Workload

if TYPE_CHECKING:
    from raysearch.runs.run import SearchRun

_CALLS_BETWEEN_UPDATES = 20
_DEFAULT_BUDGET = 4000
"""[published] "Learning to Shard", section 4."""


@takes_question
def search_workload(
    question: Question,
    searcher: Annotated[
        str, typer.Option("--searcher", "-s", help="Name (see `raysearch list`), or module:Class of your own.")
    ],
    seed: Annotated[int, typer.Option(help="Equal seeds give equal calls, bit for bit.")] = 0,
    budget: Annotated[
        int | None,
        typer.Option(
            "--budget", "-b", help="Strategies to evaluate.", show_default="4000, or a heuristic's whole sweep"
        ),
    ] = None,
    simulator: SimulatorOption = None,
    workers: WorkersOption = None,
    timeout_s: TimeoutOption = Patience.timeout_s,
    retries: RetriesOption = Patience.retries,
    on_failure: OnFailureOption = None,
    out: OutOption = None,
    resume: Annotated[bool, typer.Option("--resume", help="Continue the unfinished search in --out.")] = False,
    trust_code: TrustCodeOption = False,
    as_json: JsonOption = False,
) -> None:
    """Run one searcher on one workload, scored against the exact optimum.

    Every call is on disk before the next one begins. Ctrl-C keeps all; the same command with --resume continues.

    \b
    Examples:
      raysearch search -w gpt_moe_1_2t_16k -s annealing
      raysearch search -w gpt_moe_1_2t_16k -s ppo_paper --seed 1 --budget 4000 --out results/ppo --json
      raysearch search -w gpt_moe_1_2t_1m -s annealing --space extended
      raysearch search -w gpt_moe_1_2t_16k -s annealing --engine vllm
      raysearch search -w mine.toml -s annealing --groups own --any-degrees pp,ep
      raysearch search --model qwen3_32b --isl 4000 --osl 500 --tpot-ms 30 -s annealing
      raysearch search -w mine.toml -s annealing --simulator my_package.cluster:measure --workers 8
      raysearch search -w gpt_moe_1_2t_16k -s examples.cross_entropy:CrossEntropy
    """
    from raysearch.runs.records import RunSpec
    from raysearch.runs.run import SearchRun, finished_summary

    workload = loaded(question)
    if resume and out is None:
        raise InputError("--resume needs --out: the folder of the search to continue")
    check_options(searcher, {})
    patience = Patience(timeout_s, retries)
    failures = on_failure.value if on_failure else "stop"
    if budget is None:
        budget = run_budget(searcher, searched_space(workload, simulator, searcher), _DEFAULT_BUDGET)
    folder = results_folder(out, run_name(workload.name, searcher, seed))
    with claimed(folder, resume=resume):
        begun = _begun(folder, trust_code) if resume else None
        finished = finished_summary(folder) if begun else None
        if begun and workers is None:  # it was measured, and decides what is called
            workers = begun["workers"]
        with evaluating(simulator, workload, patience, workers, forgiving=failures == "infeasible") as chosen:
            spec = RunSpec(
                searcher=searcher,
                seed=seed,
                budget=budget,
                simulator=simulator,
                workers=chosen,
                on_failure=failures,
                **_of_question(question, workload),
            )
            if begun and RunSpec(**begun) != spec:
                raise InputError(f"{folder} contains another search: {begun}; resume with the same options")
            if finished is None:
                optimum = _optimum(workload, simulator)
                run = SearchRun(spec, folder, optimum=optimum, resume=resume, patience=patience)
                can_go_on_with([*sys.argv[1:], *_going_on(folder, out, resume)])
                finished = _drive(run)
    summary = finished
    if as_json:
        print_json({**summary, **_trust(workload, summary["strategy"], simulator), "folder": str(folder)})
    else:
        from raysearch.cli.commands.report import print_report

        print_report(folder)


def _of_question(question: Question, workload: Workload) -> JsonObject:
    """The fields of the spec that define its workload."""
    asked = question.record()
    named = asked.pop("workload", workload.name)
    fields = {name: asked.pop(name) for name in WORKLOAD_OPTIONS if name in asked}
    if "any_degrees" in fields:
        fields["any_degrees"] = ",".join(sorted(any_degrees(fields["any_degrees"])))
    return {"workload": named, **fields, "described": asked}


def _going_on(folder: Path, out: Path | None, resume: bool) -> list[str]:
    """The options that continue what the command began."""
    return [*([] if out else ["--out", str(folder)]), *([] if resume else ["--resume"])]


def _begun(folder: Path, trusted: bool) -> JsonObject | None:
    """What the search in a folder is, from its beginnings; None if it is damaged, and made again."""
    from raysearch.studies.damage import set_aside_damaged_search

    if what := set_aside_damaged_search(folder):
        print(f"note: {what}: the search is made again", file=sys.stderr)
        return None
    if not (folder / HEAD_FILE).is_file():
        raise InputError(f"nothing to resume in {folder}: it has no {HEAD_FILE}")
    head = read_record(folder / HEAD_FILE, RunHead)
    check_code(folder / HEAD_FILE, head.get("code", {}), trusted=trusted)
    return head["spec"]


def _trust(workload: Workload, strategy: JsonFields | None, simulator: str | None) -> JsonObject:
    """The error to expect of our own simulator's best figure, and what of it no measurement covers."""
    if strategy is None or simulator is not None:
        return {"expected_error": None, "extrapolated": None, "near_limits": None}
    best = evaluate(workload, as_strategy(strategy))
    near = [asdict(limit) for limit in near_limits(workload, best)]
    return {"expected_error": best.expected_error, "extrapolated": list(best.extrapolated), "near_limits": near}


def _optimum(workload: Workload, simulator: str | None) -> float | None:
    """f* of our own simulator; of no other one it is known."""
    from raysearch.base.progress import stepping

    if simulator is not None:
        return None
    with stepping(f"exact optimum of {workload.name}") as progress:
        return optimum_value(workload, progress)


def _drive(run: SearchRun) -> JsonObject:
    from envs.strategy_env import SimulatorFailure
    from raysearch.base.progress import searching

    try:
        saved_at_s = time.monotonic()
        with searching(run.run_id, run.spec.budget) as show:
            while not run.done:
                run.advance(1 if run.spec.simulator else _CALLS_BETWEEN_UPDATES)
                show(run.metrics())
                if time.monotonic() - saved_at_s >= SAVE_EVERY_S:
                    run.save()
                    saved_at_s = time.monotonic()
        return run.finish()
    except Interrupted as stop:
        raise Interrupted(stop.signum, f"{stop} after {_kept(run)}") from None
    except SimulatorFailure as failure:
        raise RunFailed(f"{failure}; stopped after {_kept(run)}") from failure
    except OSError as error:
        raise RunFailed(f"cannot write results: {error.strerror or error}; stopped after {_kept(run)}") from error
    finally:
        run.close()


def _kept(run: SearchRun) -> str:
    from envs.rows import last_row

    row = last_row(run.out_dir)  # a signal may come between a call's row and its being counted
    made = max(run.calls, row.call if row else 0)
    return (
        f"{made:,} of {run.spec.budget:,} calls, all kept in {run.out_dir}; "
        f"the same command with --out {run.out_dir} --resume continues"
    )
