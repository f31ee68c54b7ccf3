"""One run of a searcher."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass, fields
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

from envs.strategy_env import brief
from raysearch.answers.optimal import Bars, no_bars
from raysearch.answers.reported import ReportResult
from raysearch.answers.result import Result
from raysearch.answers.starts import start_strategies
from raysearch.base.errors import InputError, Interrupted, RunFailed
from raysearch.base.file_io import as_strategy, read_record, results_folder
from raysearch.base.priced_heading import priced_dict, priced_text
from raysearch.optima.named_spaces import optimum_value
from raysearch.processes.claim import claimed
from raysearch.processes.watcher import got_on
from raysearch.runs.in_flight import recorded_order
from raysearch.runs.records import (
    HEAD_FILE,
    SAVE_EVERY_S,
    WORKLOAD_OPTIONS,
    OnFailure,
    RunHead,
    RunSpec,
    check_code,
    run_name,
)
from raysearch.runs.run import SearchRun, finished_summary
from raysearch.searchers.registry import START, check_options, run_budget, searcher_class
from raysearch.simulators.choice import evaluating
from raysearch.simulators.opening import Patience, searched_space
from sim.config.question import Question, load_question
from sim.config.schemas import any_degrees
from sim.json_object import JsonFields, JsonObject
from sim.nearness import near_limits
from sim.serving.phases import phase_of
from sim.simulate import evaluate
from sim.strategy import Strategy
from sim.workload import Workload

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.figure import Figure
    from rich.console import RenderableType

    from raysearch.base.progress import RunMetrics

_log = logging.getLogger(__name__)
_CALLS_BETWEEN_UPDATES = 20

RunBar = Callable[[str, int], AbstractContextManager[Callable[["RunMetrics"], None]]]
"""Shows how far a run is: of its name and budget, called with its metrics."""


def no_bar(run_id: str, budget: int) -> AbstractContextManager[Callable[[RunMetrics], None]]:
    """Shows nothing."""
    return nullcontext(lambda metrics: None)


@dataclass(frozen=True, repr=False)
class SearchResult(Result):
    """What a searcher found, and where all its calls lie.

    Attributes:
        question: What was asked.
        workload: What it is about.
        folder: Holds every call.
        summary: Of the run; see `raysearch.runs.records.RunSummary`.
        simulator: The plugged-in black box that was searched; None for our own.
    """

    question: Question
    workload: Workload
    folder: Path
    summary: JsonFields
    simulator: str | None = None

    @classmethod
    def of(
        cls,
        question: Question,
        searcher: str,
        *,
        seed: int,
        budget: int | None,
        simulator: str | None,
        workers: int | None,
        patience: Patience,
        on_failure: OnFailure,
        out: Path | None,
        resume: bool,
        trust_code: bool,
        replay: Path | None = None,
        start: str | None = None,
        options: JsonFields | None = None,
        begun: Callable[[Path], None] = lambda _: None,
        bars: Bars = no_bars,
        bar: RunBar = no_bar,
    ) -> SearchResult:
        """Searches, or continues; see `raysearch.api.search`. `begun` is called when the folder can be resumed."""
        workload = load_question(question)
        if resume and out is None:
            raise InputError("--resume needs --out: the folder of the search to continue")
        own = check_options(searcher, options or {}).model_dump(mode="json", include=set(options or {}))
        space = searched_space(workload, simulator, searcher)  # refused before anything is computed
        if budget is None:
            budget = run_budget(searcher, space, searcher_class(searcher).usual_budget)
        started: JsonObject = {START: start_strategies(start, question, space)} if start else {}
        folder = results_folder(out, run_name(workload.name, searcher, seed))
        with claimed(folder, resume=resume):
            before = _begun(folder, trust_code) if resume else None
            summary = finished_summary(folder) if before else None
            repeated = _repeated(replay) if replay else None
            if workers is None and (known := before or repeated):  # it was measured, and decides what is called
                workers = known["workers"]
            forgiving = on_failure == "infeasible"
            with evaluating(simulator, workload, patience, workers, forgiving=forgiving) as chosen:
                spec = RunSpec(
                    searcher=searcher,
                    seed=seed,
                    budget=budget,
                    simulator=simulator,
                    workers=chosen,
                    on_failure=on_failure,
                    options=own | started,
                    **_of_question(question, workload),
                )
                if before and (other := _changed(RunSpec.of_record(before), spec)):
                    raise InputError(f"{folder} contains another search: {other}; resume with the same options")
                if repeated and (other := _changed(RunSpec(**repeated), spec)):
                    raise InputError(f"{replay} contains another search: {other}; replay it with the same options")
                if summary is None:
                    optimum = _optimum(workload, simulator, bars)
                    order = recorded_order(replay) if replay else ()
                    run = SearchRun(spec, folder, optimum=optimum, resume=resume, patience=patience, order=order)
                    begun(folder)
                    summary = _drive(run, bar)
        return cls(question, workload, folder, summary, simulator)

    @property
    def strategy(self) -> Strategy | None:
        """The best strategy that was found; None where none was feasible."""
        return as_strategy(self.summary["strategy"]) if self.summary["strategy"] else None

    @property
    def feasible(self) -> bool:
        """Whether a strategy within the limits was found."""
        return self.strategy is not None

    @property
    def tokens_per_s_per_gpu(self) -> float:
        """Of the best strategy that was found; 0.0 where none was feasible."""
        return self.summary["best"]

    @property
    def fraction_of_optimum(self) -> float | None:
        """The same as a share of the exact optimum; None where that is not known."""
        return self.summary["fraction_of_optimum"]

    @property
    def gap(self) -> float | None:
        """In phase traffic, by which share of the bound the best goodput may be better, at most; else None."""
        if not phase_of(self.workload).replayed or self.fraction_of_optimum is None:
            return None
        return 1 - self.fraction_of_optimum

    @property
    def bound_text(self) -> Iterator[str]:
        """In phase traffic, what f* is there and how far the best goodput may be from it."""
        if gap := self.gap:
            yield (
                "In phase traffic f* is a bound, the optimum of the steady state. The best goodput of all strategies\n"
                f"is at most {self.summary['optimum']:,.2f} tokens/s/GPU, a gap of {gap:.1%}; "
                "`raysearch optimum` narrows it down."
            )

    @cached_property
    def report(self) -> ReportResult:
        """What its folder says."""
        return ReportResult.of(self.folder)

    def to_dict(self) -> JsonObject:
        """The answer as `raysearch search --json` prints it, with how far the best figure can be trusted."""
        trust: JsonObject = dict.fromkeys(("expected_error", "extrapolated", "near_limits"))
        if self.strategy is not None and self.simulator is None:
            best = evaluate(self.workload, self.strategy)
            near = [asdict(limit) for limit in near_limits(self.workload, best)]
            trust = {"expected_error": best.expected_error, "extrapolated": list(best.extrapolated)}
            trust["near_limits"] = near
        if (gap := self.gap) is not None:
            trust |= {"bound_tokens_per_s_per_gpu": self.summary["optimum"], "gap": gap}
        asked = {"question": self.question.record(), **priced_dict(self.workload)}
        return {**asked, **self.summary, **trust, "folder": str(self.folder)}

    def to_rows(self) -> list[JsonObject]:
        """A row per call."""
        return [{str(name): value for name, value in row.items()} for row in self.to_frame().to_dict("records")]

    def to_frame(self) -> pd.DataFrame:
        """A row per call: strategy, tokens/s/GPU, whether it is feasible, the best so far."""
        from envs.rows import read_rows

        return read_rows(self.folder)

    def blocks(self) -> Iterator[RenderableType]:
        """What `raysearch search` prints: what was searched, and the report of its folder."""
        if not self.feasible:  # else the report of the best has it
            yield priced_text(self.workload)
        yield from self.report.blocks()
        yield from self.bound_text

    def figure(self) -> Figure:
        """The anytime curve."""
        return self.report.figure()


def _of_question(question: Question, workload: Workload) -> JsonObject:
    """The fields of the spec that define its workload."""
    asked = question.record()
    named = asked.pop("workload", workload.name)
    fields = {name: asked.pop(name) for name in WORKLOAD_OPTIONS if name in asked}
    if "any_degrees" in fields:
        fields["any_degrees"] = ",".join(sorted(any_degrees(fields["any_degrees"])))
    return {"workload": named, **fields, "question": asked}


def _begun(folder: Path, trusted: bool) -> JsonObject | None:
    """What the search in a folder is, from its beginnings; None if it is damaged, and made again."""
    from raysearch.studies.damage import set_aside_damaged_search

    if what := set_aside_damaged_search(folder):
        _log.warning("note: %s: the search is made again", what)
        return None
    if not (folder / HEAD_FILE).is_file():
        raise InputError(f"nothing to resume in {folder}: it has no {HEAD_FILE}")
    head = read_record(folder / HEAD_FILE, RunHead)
    check_code(folder / HEAD_FILE, head.get("code", {}), trusted=trusted)
    return head["spec"]


def _changed(before: RunSpec, spec: RunSpec) -> str:
    """In what the search of a folder differs from the one that is asked for; "" if in nothing."""
    pairs = {each.name: (getattr(before, each.name), getattr(spec, each.name)) for each in fields(RunSpec)}
    return "; ".join(
        f"{name} {brief(str(was))}, not {brief(str(now))}" for name, (was, now) in pairs.items() if was != now
    )


def _repeated(folder: Path) -> JsonObject:
    """What the search in a folder is whose answers are to arrive in the same order."""
    if not (folder / HEAD_FILE).is_file():
        raise InputError(f"expected the folder of a search to replay, got {folder}: it has no {HEAD_FILE}")
    return read_record(folder / HEAD_FILE, RunHead)["spec"]


def _optimum(workload: Workload, simulator: str | None, bars: Bars) -> float | None:
    """f* of our own simulator; of no other one it is known."""
    if simulator is not None:
        return None
    with bars(f"exact optimum of {workload.name}") as progress:
        return optimum_value(workload, progress)


def _drive(run: SearchRun, bar: RunBar) -> JsonObject:
    from envs.strategy_env import SimulatorFailure

    try:
        saved_at_s = time.monotonic()
        with bar(run.run_id, run.spec.budget) as show:
            while not run.done:
                run.advance(1 if run.spec.simulator else _CALLS_BETWEEN_UPDATES)
                show(run.metrics())
                got_on(run.calls)
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
        f"the same command with --out={run.out_dir} and --resume continues"
    )
