"""Runs whose calls overtake each other, in this process and the same way whenever they are made."""

from __future__ import annotations

import contextlib
from pathlib import Path

from envs.rows import read_rows
from raysearch.runs.in_flight import recorded_order
from raysearch.runs.records import RunSpec
from raysearch.runs.run import SearchRun
from raysearch.simulators.plugin import load_plugin
from raysearch.simulators.protocol import InProcess
from sim.strategy import Strategy

BOX = "tests.raysearch.simulators.boxes:hilly"
BUDGET = 60


class Overtaken(InProcess):
    """Answers about the first, the second or the third of the calls under way, by turns."""

    turn = 0

    def take(self, strategy: Strategy | None = None) -> Strategy:
        """The given one, or the one whose turn it is."""
        self.turn += 1
        return super().take(strategy or self._begun[self.turn % min(3, len(self._begun))])


def assert_order_repeats_run(searcher: str, cut: int, folder: Path) -> None:
    """Makes sure that a run in the recorded order makes the same calls, and one that is cut off those after its state.

    Args:
        searcher: Whose.
        cut: Calls after which the run's state is kept; 0: it is not cut off.
        folder: Of the runs.
    """
    spec = RunSpec("gpt_moe_1_2t_16k", searcher, seed=0, budget=BUDGET, simulator=BOX, workers=2)
    with contextlib.ExitStack() as stack:

        def start(name: str, simulator: InProcess, **given) -> SearchRun:
            run = SearchRun(spec, folder / name, simulator=simulator, **given)
            return stack.enter_context(contextlib.closing(run))

        run = start("overtaken", Overtaken(load_plugin(BOX)))
        if cut:
            run.advance(cut)
            run.save()
            run.advance(17)  # lost with the process, and made again
            run.close()
            lost = (run.out_dir / "rows.jsonl").read_bytes()
            run = start("overtaken", Overtaken(load_plugin(BOX)), resume=True)
            assert run.calls == cut
            run.advance(17)
            assert (run.out_dir / "rows.jsonl").read_bytes() == lost
        run.advance(BUDGET)
        order = recorded_order(run.out_dir)
        assert read_rows(run.out_dir)["call"].tolist() == sorted(order) == list(range(1, BUDGET + 1))
        assert order != sorted(order)
        again = start("again", InProcess(load_plugin(BOX)), order=order)
        again.advance(BUDGET)
        assert again.summary()["digest"] == run.summary()["digest"]
