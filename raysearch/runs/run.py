"""One run: a searcher on a workload with a seed and a budget of calls, and the one loop that drives it.

Every searcher, alone or in a study, is driven by `SearchRun.advance`, so equal specs give equal calls bit for bit
wherever they run. With workers the answers come in any order, which the rows record: in that order, too, equal specs
give equal calls. A run that is resumed first makes the calls after its checkpoint again, in the order of their rows.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, cast

from envs.recording import CallGate, saved_rows
from envs.rows import COMPACT_FILE, ROWS_FILE, RowsTaken, RowWriter, compact, read_rows, write_compact
from envs.saved_state import SavedState
from envs.strategy_env import SimulatorFailure, StrategyEnv, failure_text
from raysearch.base.errors import InputError, RunFailed
from raysearch.base.file_io import read_record, strategy_dict, write_record
from raysearch.base.version import __version__
from raysearch.runs.checkpoint import CHECKPOINT_FILE, read_checkpoint, write_checkpoint
from raysearch.runs.in_flight import CallsInFlight, recorded_order
from raysearch.runs.records import HEAD_FILE, SUMMARY_FILE, RunSpec, RunSummary, renamed_fields, run_name
from raysearch.searchers.interface import Searcher
from raysearch.searchers.registry import make_searcher
from raysearch.simulators.opening import Patience, declared_noise, open_simulator, searched_space
from raysearch.simulators.protocol import Simulator
from sim.config.code import source_digests
from sim.json_object import JsonObject

if TYPE_CHECKING:
    from raysearch.base.progress import RunMetrics

_log = logging.getLogger(__name__)


class SearchRun:
    """A run in progress; its folder holds what it is (run.json), its rows and, once finished, its summary.

    >>> import tempfile, pathlib
    >>> spec = RunSpec("gpt_moe_1_2t_16k", "random", seed=0, budget=3)
    >>> run = SearchRun(spec, pathlib.Path(tempfile.mkdtemp()))
    >>> run.advance(10)
    >>> run.calls, run.done
    (3, True)
    >>> run.close()
    """

    def __init__(
        self,
        spec: RunSpec,
        out_dir: Path,
        *,
        optimum: float | None = None,
        resume: bool = False,
        patience: Patience | None = None,
        simulator: Simulator | None = None,
        order: Sequence[int] = (),
    ) -> None:
        """Starts a run from its first call, or continues from its last checkpoint.

        Args:
            spec: What to run.
            out_dir: The run's folder. Rows beyond the checkpoint's calls are dropped: they are computed again.
            optimum: f* of the workload, tokens/s/GPU. For the scores only: no searcher sees it.
            resume: Whether to go on from the folder's checkpoint, if there is one.
            patience: With a simulator that hangs or fails; by default `Patience()`.
            simulator: What evaluates, and is closed with the run; by default what the spec names.
            order: In which the answers of an equal run arrived, see `recorded_order`: this one takes them in alike.

        Raises:
            InputError, CatalogError, UnknownName: The spec cannot be run, is not the checkpoint's, or the folder
                holds a run and is not to be resumed.
        """
        self.spec, self.out_dir, self.optimum = spec, out_dir, optimum
        self.workload = spec.load()
        self._space = searched_space(self.workload, spec.simulator, spec.searcher)
        self._searcher = self._new_searcher()
        self._patience = patience = patience or Patience()
        self._simulator = simulator or open_simulator(
            spec.simulator,
            self.workload,
            patience,
            workers=spec.workers,
            forgiving=spec.on_failure == "infeasible",
        )
        out_dir.mkdir(parents=True, exist_ok=True)
        state = self._read_checkpoint() if resume else None
        recorded = recorded_order(out_dir) if resume and spec.workers else []
        self._order = [*recorded, *order[len(recorded) :]]
        self._began_s = time.perf_counter()
        self._goes_on = state is not None and self._goes_on_from(state)
        if not self._goes_on:
            self._begin(self._rows_anew() if resume else self._new_rows())
        write_record(out_dir / HEAD_FILE, self._head())

    def _new_searcher(self) -> Searcher:
        spec = self.spec
        return make_searcher(spec.searcher, self._space, seed=spec.seed, budget=spec.budget, **spec.options)

    def _begin(self, rows: RowWriter) -> None:
        """Stands before the first call."""
        self._env = StrategyEnv(
            self.workload,
            evaluate=self._simulator,
            space=self._space,
            retries=self._patience.retries,
            **self._searcher.environment,
        )
        self._rows = rows
        self._gate = CallGate(self._env, self.spec.budget, rows, self.run_id)
        self._calls = CallsInFlight(
            self._gate,
            self._simulator,
            self._space,
            most=self.spec.in_flight,
            order=self._order[self._rows.lines :],
            taken=self._note,
        )
        self._wall_s = self._best = 0.0
        self._improvements: list[tuple[int, float]] = []

    @property
    def run_id(self) -> str:
        """Names the run within a study."""
        return run_name(self.workload.name, self.spec.searcher, self.spec.seed)

    @property
    def calls(self) -> int:
        """Strategies evaluated so far."""
        return self._gate.calls

    @property
    def done(self) -> bool:
        """Whether the budget is spent or the searcher has nothing left to propose."""
        return self._gate.calls_left == 0 or (self._calls.exhausted and not self._calls.under_way)

    def advance(self, calls: int, *, within_chunk: bool = False) -> None:
        """Makes at most `calls` further calls; fewer if the run is done before, or its chunk, where that matters."""
        self._began_s, chunk = time.perf_counter() - self._wall_s, self._searcher.chunk
        goal = self.calls + min(calls, self._gate.calls_left)
        try:
            while self.calls < goal and not self.done:
                self._step(goal - self.calls)
                if within_chunk and self._searcher.chunk != chunk:
                    break
        finally:
            self._wall_s = time.perf_counter() - self._began_s

    def _note(self) -> None:
        """Notes a call that raised the best."""
        if self._gate.best_raw > self._best:
            self._best = self._gate.best_raw
            self._improvements.append((self.calls, time.perf_counter() - self._began_s))

    def _step(self, calls: int) -> None:
        """Has the searcher make some calls.

        A state may be restored that the searcher stumbles over only now. Then the run is made again, and where it
        stumbles once more, the state was not what was wrong.
        """
        try:
            self._searcher.step(self._calls, calls)
        except (OSError, InputError, RunFailed, SimulatorFailure, RowsTaken):
            raise
        except Exception as error:
            if not self._goes_on:
                raise
            self._goes_on = False
            self._gate.close()
            self._start_again(error)
            self._begin(self._rows_anew())
            self._searcher.step(self._calls, calls)

    def metrics(self) -> RunMetrics:
        """How far the run is: the same names for every searcher, then the searcher's own under "searcher/"."""
        gate = self._gate
        metrics: JsonObject = {
            "calls": gate.calls,
            "best": gate.best_raw,
            "fraction_of_optimum": gate.best_raw / self.optimum if self.optimum else None,
            "unique_calls": gate.unique_calls,
            "feasible_calls": gate.feasible_calls,
            "wall_s": self._wall_s,
            "chunk": 1.0,
            "chunk_best": gate.best_raw,
            "chunk_done": float(self.done),
            **self._searcher.chunk_figures(),
            **{f"searcher/{name}": value for name, value in self._searcher.metrics().items()},
        }
        return cast("RunMetrics", metrics)

    def summary(self) -> JsonObject:
        """What the run found. Equal specs give equal summaries, so no clock is in it."""
        gate = self._gate
        return {
            "run_id": self.run_id,
            "workload": self.workload.name,
            "hardware": self.workload.hardware.name,
            "searcher": self.spec.searcher,
            "seed": self.spec.seed,
            "budget": self.spec.budget,
            "calls": gate.calls,
            "unique_calls": gate.unique_calls,
            "feasible_calls": gate.feasible_calls,
            "best": gate.best_raw,
            "strategy": strategy_dict(gate.best_strategy) if gate.best_strategy else None,
            "digest": gate.digest,
            "config_hash": self.workload.config_hash,
            "version": __version__,
        }

    def finish(self) -> JsonObject:
        """Writes the summary, with scores and wall times, then turns the rows into Parquet; returns what it wrote.

        Between two improvements the best stays as it is, so their times are all of the anytime curve against time.
        The Parquet file is complete before the summary names its digest, and the JSON Lines go only then: a run that is
        killed in between is either not finished or finished, and `finish_rows` clears up.

        Raises:
            RowsTaken: See `save`.
        """
        self._rows.check_ours()
        self._rows.sync()
        metrics = self.metrics()
        scores = {"optimum": self.optimum, "fraction_of_optimum": metrics.get("fraction_of_optimum")}
        written = {**self.summary(), **scores, "wall_s": self._wall_s, "metrics": metrics}
        written["improvements"] = self._improvements
        if noise := declared_noise(self.spec.simulator):
            from raysearch.runs.believed import believed_best  # it needs scipy, most runs do not

            written |= {"noise": noise, **believed_best(self._space, read_rows(self.out_dir), noise)}
        else:
            written["answers_differ"] = self._simulator.asked_twice(self.workload)
        compacted = write_compact(
            self.out_dir / ROWS_FILE, self.out_dir / COMPACT_FILE, calls=self.calls, seal=self._rows.seal()
        )
        self._rows.check_ours()
        write_record(self.out_dir / SUMMARY_FILE, {**written, "rows_sha256": compacted})
        self.close()
        finish_rows(self.out_dir)
        (self.out_dir / CHECKPOINT_FILE).unlink(missing_ok=True)
        return written

    def close(self) -> None:
        """Lets go of the rows file and of what the searcher holds; every row is on disk."""
        self._gate.close()
        self._searcher.close()
        self._simulator.close()

    def save(self) -> None:
        """Replaces the checkpoint in the run's folder: all that a later process needs to go on bit-identically.

        It is never ahead of the rows, not even where a host is lost whose writes another host had not seen.

        Raises:
            RowsTaken: Another process has resumed the run meanwhile; nothing was written.
        """
        self._rows.check_ours()
        self._rows.sync()
        state = {
            "spec": asdict(self.spec),
            "config_hash": self.workload.config_hash,
            "gate": self._gate.get_state(),
            "searcher": self._searcher.get_state(),
            "calls": self._calls.get_state(),
            "wall_s": self._wall_s,
            "improvements": self._improvements,
        }
        write_checkpoint(self.out_dir, state)

    def _goes_on_from(self, state: SavedState) -> bool:
        """Stands where the checkpoint was made; False, with a note, if it and the rows do not fit together."""
        rows = None
        try:
            if state["gate"]["calls"] < 0:
                raise ValueError(f"it was made after {state['gate']['calls']} calls")
            rows = RowWriter.resume(self.out_dir / ROWS_FILE, state["gate"]["calls"], saved_rows(state["gate"]))
            self._begin(rows)
            self._gate.set_state(state["gate"])
            if self._gate.digest != state["gate"]["digest"]:
                raise ValueError(f"{self.out_dir / ROWS_FILE} does not match the rows that it was saved after")
            self._searcher.set_state(state["searcher"])
            self._calls.set_state(state["calls"], self._env.observation)
            self._wall_s, self._best = float(state["wall_s"]), self._gate.best_raw
            self._improvements = [(int(call), float(wall_s)) for call, wall_s in state["improvements"]]
        except OSError:
            raise
        except Exception as error:  # whatever a searcher stumbles over in a state that is none of its own
            if rows:
                rows.close()
            self._start_again(error)
            return False
        return True

    def _start_again(self, error: Exception) -> None:
        """Lets go of a searcher that cannot go on from the checkpoint, and says so."""
        self._searcher.close()
        self._searcher = self._new_searcher()
        reason = failure_text(error)
        path = self.out_dir / CHECKPOINT_FILE
        _log.warning("note: cannot continue from %s (%s): its run starts again from the first call", path, reason)

    def _rows_anew(self) -> RowWriter:
        (self.out_dir / CHECKPOINT_FILE).unlink(missing_ok=True)  # it would contradict them
        return RowWriter.resume(self.out_dir / ROWS_FILE, 0)

    def _new_rows(self) -> RowWriter:
        try:
            return RowWriter(self.out_dir / ROWS_FILE)
        except FileExistsError as error:
            raise InputError(str(error)) from error

    def _read_checkpoint(self) -> SavedState | None:
        path = self.out_dir / CHECKPOINT_FILE
        state = read_checkpoint(self.out_dir)
        if state is None:
            return None
        spec = state.get("spec")
        if (renamed_fields(spec) if isinstance(spec, dict) else spec) != asdict(self.spec):
            raise InputError(f"{path} is of another run: {spec}, not {self.spec}")
        if state.get("config_hash") != self.workload.config_hash:
            raise InputError(
                f"the configuration of workload {self.workload.name!r} changed since {path} was written; "
                f"restore it, or start again in another folder"
            )
        return state

    def _head(self) -> JsonObject:
        return {
            "run_id": self.run_id,
            "spec": asdict(self.spec),
            "workload": self.workload.name,
            "hardware": self.workload.hardware.name,
            "config_hash": self.workload.config_hash,
            "optimum": self.optimum,
            "version": __version__,
            "code": source_digests(self.spec.searcher, self.spec.simulator, self.workload.declarations),
        }


def finished_summary(run_dir: Path) -> JsonObject | None:
    """The summary of a finished run, or None while it is not finished.

    Raises:
        InputError: It is damaged.
    """
    path = run_dir / SUMMARY_FILE
    return read_record(path, RunSummary) if path.is_file() else None


def finish_rows(run_dir: Path) -> None:
    """Turns a finished run's rows into Parquet unless that has been done.

    Raises:
        RowsTaken: Another process makes the run again, beyond its checkpoint.
    """
    finished = finished_summary(run_dir)
    compact(run_dir / ROWS_FILE, run_dir / COMPACT_FILE, calls=finished["calls"] if finished else None)
