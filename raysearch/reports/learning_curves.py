"""How far every run of a study had come after each call and after each second, as arrays that can be compared."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np

from raysearch.base.file_io import Damaged
from raysearch.runs.records import RunRow
from raysearch.studies.results import planned_budget, run_folder, run_rows
from sim.arrays import Floats


class Block(NamedTuple):
    """A workload and a seed. Runs of one block are paired: they differ in the searcher alone."""

    workload: str
    seed: int


@dataclass(frozen=True)
class AnytimeCurves:
    """The finished runs of a study, in blocks that every searcher has finished.

    Scores are best so far over the workload's exact optimum; where none is known, over the best that any run found.

    Attributes:
        blocks: In the order of the rows below, workload by workload.
        best: By searcher: the scores after each call, [blocks, budget]. A run that ended before the budget keeps its
            last one; of a sweep beyond the budget the first calls count.
        runs: By searcher: the runs behind those rows, as `read_runs` gives them.
        exact: Whether every score is a fraction of an exact optimum.
        left_out: Runs that are not among them: unfinished, or without a partner in their block.
    """

    blocks: tuple[Block, ...]
    best: Mapping[str, Floats]
    runs: Mapping[str, tuple[RunRow, ...]]
    exact: bool
    left_out: int

    @property
    def workloads(self) -> tuple[str, ...]:
        """Those with a block, in order."""
        return tuple(dict.fromkeys(block.workload for block in self.blocks))

    def strata(self, values: Floats, workload: str | None = None) -> list[Floats]:
        """Splits the rows of an array [blocks, ...] by workload: all of them, or only the one that is named."""
        names = np.array([block.workload for block in self.blocks])
        return [values[names == name] for name in ([workload] if workload else self.workloads)]

    def timed(self, searcher: str) -> bool:
        """Whether the improvements of all its runs were timed: not so in results of older versions."""
        return all(run["improvements"] is not None for run in self.runs[searcher])

    def best_at(self, searcher: str, seconds: Floats) -> Floats:
        """The scores of a `timed` searcher after so many seconds of each run, [blocks, seconds].

        Exact between the seconds too: the best changes only with the improvements.
        """
        curves = zip(self.best[searcher], self.runs[searcher], strict=True)
        return np.stack([_after(seconds, curve, run["improvements"] or []) for curve, run in curves])

    def seconds_until(self, searcher: str, calls: Floats) -> Floats:
        """When each run of a `timed` searcher made its improvement of that call, [blocks]; infinite past the budget."""
        budget = self.best[searcher].shape[1]
        timed = zip(
            (dict(run["improvements"] or []) for run in self.runs[searcher]),
            calls,
            strict=True,
        )
        return np.array([times[int(call)] if call <= budget else np.inf for times, call in timed])


def _after(seconds: Floats, curve: Floats, improvements: Sequence[tuple[int, float]]) -> Floats:
    calls, times = np.array([(0, 0.0), *improvements]).T
    made = calls[np.searchsorted(times, seconds, side="right") - 1].astype(int)  # the last improvement's call, or 0
    return np.concatenate(([0.0], curve))[np.minimum(made, len(curve))]


def best_so_far(directory: Path, run: RunRow) -> Floats:
    """The best throughput of a run after each of its calls, tokens/s/GPU, [calls].

    Raises:
        InputError: Its rows are damaged, or not those that its summary is of.
    """
    folder = run_folder(directory, run["run_id"])
    best = run_rows(folder, ["best_so_far"])["best_so_far"].to_numpy()
    if run["complete"]:
        improved = (np.flatnonzero(np.diff(best, prepend=0.0) > 0) + 1).tolist()
        if len(best) != run["calls"] or [call for call, _ in run["improvements"] or []] != improved:
            raise Damaged(f"{folder} is damaged: its rows have other calls or improvements than its summary")
    return best


def read_curves(
    directory: Path, runs: Sequence[RunRow], best_calls: Mapping[str, Floats] | None = None
) -> AnytimeCurves:
    """The curves of a results folder's finished runs; while none has a call, as far as all others have come.

    Args:
        directory: The folder.
        runs: As `raysearch.studies.results.read_study_runs` gives them for it.
        best_calls: By run id, as `best_so_far` gives them; by default they are read.

    Raises:
        InputError: Rows are damaged.
    """
    best_calls = best_calls or {run["run_id"]: best_so_far(directory, run) for run in runs}
    usable = [run for run in runs if run["complete"]]
    # Not more than any run has: memory grows with the calls made, however large the budget of a sweep is.
    budget = min(planned_budget(directory, runs), max((run["calls"] for run in usable), default=0))
    if not any(run["calls"] for run in usable):
        usable = [run for run in runs if run["calls"]]
        budget = min((run["calls"] for run in usable), default=0)
    by_block = _complete_blocks(usable)
    searchers = list(next(iter(by_block.values()))) if by_block else []
    kept = {searcher: tuple(of_block[searcher] for of_block in by_block.values()) for searcher in searchers}
    best = {
        searcher: np.stack([_curve(best_calls[run["run_id"]], _reference(run, runs), budget) for run in of_searcher])
        for searcher, of_searcher in kept.items()
    }
    exact = all(run["optimum"] for of_searcher in kept.values() for run in of_searcher)
    return AnytimeCurves(tuple(by_block), best, kept, exact, left_out=len(runs) - sum(map(len, kept.values())))


def _reference(run: RunRow, runs: Sequence[RunRow]) -> float:
    return run["optimum"] or max(other["best"] for other in runs if other["workload"] == run["workload"]) or 1.0


def _complete_blocks(usable: Sequence[RunRow]) -> dict[Block, dict[str, RunRow]]:
    """The blocks with a run of each searcher that has any, workload by workload; their runs by searcher."""
    searchers = sorted({run["searcher"] for run in usable})
    found: dict[Block, dict[str, RunRow]] = {}
    for run in sorted(usable, key=lambda run: (run["workload"], run["seed"])):
        found.setdefault(Block(run["workload"], run["seed"]), {})[run["searcher"]] = run
    return {
        block: {searcher: of_block[searcher] for searcher in searchers}
        for block, of_block in found.items()
        if len(of_block) == len(searchers)
    }


def _curve(best: Floats, reference: float, budget: int) -> Floats:
    best = best[:budget] / reference
    return np.pad(best, (0, budget - len(best)), mode="edge") if len(best) else np.zeros(budget)
