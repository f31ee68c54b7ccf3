"""A run as Ray Tune sees it: one Trainable for all searchers, so that their trials compare like with like."""

from __future__ import annotations

import time
from contextlib import ExitStack
from dataclasses import asdict, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ray import tune
from ray.util import get_node_ip_address

from envs.chain import DamagedRows
from envs.rows import RowsTaken
from envs.strategy_env import SimulatorFailure
from raysearch.base.errors import InputError, RunFailed
from raysearch.processes.heartbeat import beating
from raysearch.runs.records import HEAD_FILE, SAVE_EVERY_S, STUDY_FILE, RunSpec, renamed_fields
from raysearch.runs.run import SearchRun, finish_rows, finished_summary
from raysearch.simulators.opening import Patience
from sim.json_object import JsonFields, JsonObject

if TYPE_CHECKING:
    from raysearch.base.progress import RunMetrics

_PATIENCE = Patience()
FAILURE_KEY = "failure"
"""Key of a trial's last report if its run cannot go on; the value says why."""


def trial_config(
    spec: RunSpec,
    folder: Path,
    *,
    optimum: float | None,
    report_every: int,
    cpus: int,
    patience: Patience = _PATIENCE,
) -> JsonObject:
    """What a trial needs to know, as plain values.

    Args:
        spec: The run.
        folder: Absolute; where the run's rows and summary go. On a cluster: a folder that all nodes share.
        optimum: f* of the workload, for the scores only.
        report_every: Calls between two reports; a checkpoint is made with one if `SAVE_EVERY_S` have passed.
        cpus: Reserved for the trial; its workers have their own.
        patience: With the workers.
    """
    return {
        "run": {
            **asdict(spec),
            "run_id": folder.name,
            "folder": str(folder),
            "optimum": optimum,
            "report_every": report_every,
            "cpus": cpus,
            **asdict(patience),
        }
    }


class SearchTrial(tune.Trainable):
    """Advances one `SearchRun` per trial; the actor is reused for the next trial.

    A run checkpoints itself into its own folder, so Tune keeps none: whether a trial starts, starts again after its
    process died, or is resumed with the study, it continues from its folder. While it runs it touches its run.json:
    a process that stops doing so is taken for dead by the study.
    """

    def setup(self, config: dict[str, Any]) -> None:
        """Takes a trial's configuration; see `trial_config`."""
        self._trial: JsonFields = config["run"]
        self._run: SearchRun | None = None
        self._life = ExitStack()
        self._saved_at_s = time.monotonic()

    def step(self) -> JsonObject:
        """Makes the next calls and reports how far the run is, or why it cannot go on.

        These are `report_every` calls, or what is left of a chunk: at its end the run is saved and may go on elsewhere.

        What would happen again is reported under `FAILURE_KEY` and not raised: Tune would start the run again in vain,
        and keep the reason in the same folder, be its disk full or not. A process that dies is Tune's to replace.
        """
        try:
            return self._advance(Path(self._trial["folder"]))
        except (SimulatorFailure, RowsTaken, DamagedRows, InputError) as error:
            return self._failed(str(error))
        except OSError as error:
            return self._failed(f"cannot write to {self._trial['folder']}: {error.strerror or error}")

    def _advance(self, folder: Path) -> JsonObject:
        finished = finished_summary(folder)
        if finished is not None:  # its process was killed after the run's end and before Tune had noted it
            finish_rows(folder)
            return self._report(finished["metrics"], done=True)
        if self._run is None:
            self._run = self._build(folder)
            self._life.enter_context(beating(folder / HEAD_FILE))
        self._run.advance(self._trial["report_every"], within_chunk=True)
        if self._run.done:
            self._run.finish()
        elif self._run.metrics().get("chunk_done") or time.monotonic() - self._saved_at_s >= SAVE_EVERY_S:
            self._run.save()
            self._saved_at_s = time.monotonic()
        return self._report(self._run.metrics(), done=self._run.done)

    def _failed(self, reason: str) -> JsonObject:
        nothing: RunMetrics = {"calls": 0, "best": 0.0, "wall_s": 0.0}
        metrics = self._run.metrics() if self._run else nothing
        self.cleanup()
        return {**self._report(metrics, done=True), FAILURE_KEY: reason}

    def reset_config(self, new_config: dict[str, Any]) -> bool:
        """Turns this actor to the next trial."""
        self.cleanup()
        self.setup(new_config)
        return True

    def cleanup(self) -> None:
        """Closes the run's files."""
        self._life.close()
        if self._run is not None:
            self._run.close()
            self._run = None

    @classmethod
    def default_resource_request(cls, config: dict[str, Any]) -> tune.PlacementGroupFactory:
        """What the study reserves per run: for the searcher, and for each worker."""
        run = config["run"]
        worker = {"CPU": run["cpus_per_worker"], "GPU": run["gpus_per_worker"]}
        worker = {kind: float(share) for kind, share in worker.items() if share}
        workers = [worker] * run["workers"] if worker else []
        return tune.PlacementGroupFactory([{"CPU": float(run["cpus"])}, *workers])

    def _build(self, folder: Path) -> SearchRun:
        study = folder.parents[1]
        if not (study / STUDY_FILE).is_file():  # on a node that joined later than the study looked
            raise RunFailed(f"node {get_node_ip_address()} does not see the results folder {study}")
        trial = renamed_fields(self._trial)
        spec = RunSpec(**{field.name: trial[field.name] for field in fields(RunSpec)})
        patience = Patience(**{field.name: self._trial[field.name] for field in fields(Patience)})
        return SearchRun(spec, folder, optimum=self._trial["optimum"], resume=True, patience=patience)

    @staticmethod
    def _report(metrics: RunMetrics, *, done: bool) -> JsonObject:
        # TensorBoard takes timesteps_total for its x axis: calls, the same for every searcher and after a resume.
        return {**metrics, "timesteps_total": metrics["calls"], "done": done}
