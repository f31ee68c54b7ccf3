"""A run as Ray Tune sees it: one Trainable for all searchers, so that their trials compare like with like."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any

import ray
from ray import tune

from raysearch.records import RunSpec
from raysearch.run import SearchRun, finish_rows, finished_summary


def trial_config(spec: RunSpec, folder: Path, *, optimum: float | None, report_every: int, cpus: int) -> dict[str, Any]:
    """What a trial needs to know, as plain values.

    Args:
        spec: The run.
        folder: Absolute; where the run's rows and summary go. On a cluster: a folder that all nodes share.
        optimum: f* of the workload, for the scores only.
        report_every: Calls between two reports, each of which is a checkpoint.
        cpus: Reserved for the trial.
    """
    return {
        "run": {
            **asdict(spec),
            "run_id": folder.name,
            "folder": str(folder),
            "optimum": optimum,
            "report_every": report_every,
            "cpus": cpus,
        }
    }


class SearchTrial(tune.Trainable):
    """Advances one `SearchRun` per trial; the actor is reused for the next trial.

    A run checkpoints itself into its own folder, so Tune keeps none: whether a trial starts, starts again after its
    process died, or is restored with the study, it goes on where its folder says.
    """

    def setup(self, config: dict[str, Any]) -> None:
        """Takes a trial's configuration; see `trial_config`."""
        self._trial: Mapping[str, Any] = config["run"]
        self._run: SearchRun | None = None

    def step(self) -> dict[str, Any]:
        """Makes the next `report_every` calls and reports how far the run is."""
        _name_process(self._trial["run_id"])
        folder = Path(self._trial["folder"])
        finished = finished_summary(folder)
        if finished is not None:  # the study was killed after the run's end and before Tune had noted it
            finish_rows(folder)
            return self._report(finished["metrics"], done=True)
        self._run = self._run or self._build(folder)
        self._run.advance(self._trial["report_every"])
        if self._run.done:
            self._run.finish()
        else:
            self._run.save()
        return self._report(self._run.metrics(), done=self._run.done)

    def reset_config(self, new_config: dict[str, Any]) -> bool:
        """Turns this actor to the next trial."""
        self.cleanup()
        self.setup(new_config)
        return True

    def cleanup(self) -> None:
        """Closes the run's files."""
        if self._run is not None:
            self._run.close()
            self._run = None

    @classmethod
    def default_resource_request(cls, config: dict[str, Any]) -> tune.PlacementGroupFactory:
        """The CPUs that the study reserves per run."""
        return tune.PlacementGroupFactory([{"CPU": float(config["run"]["cpus"])}])

    def _build(self, folder: Path) -> SearchRun:
        spec = RunSpec(**{field.name: self._trial[field.name] for field in fields(RunSpec)})
        return SearchRun(spec, folder, optimum=self._trial["optimum"], resume=True)

    @staticmethod
    def _report(metrics: Mapping[str, Any], *, done: bool) -> dict[str, Any]:
        # TensorBoard takes timesteps_total for its x axis: calls, the same for every searcher and after a resume.
        return {**metrics, "timesteps_total": metrics["calls"], "done": done}


def _name_process(run_id: str) -> None:
    """Shows the run in the dashboard's list of worker processes and in ps; Ray takes it away when the step is done.

    A name of the actor, which Ray's dashboard lists too, would be that of its first run: actors are reused.
    """
    ray._raylet.setproctitle(f"ray::SearchTrial {run_id}")  # pyright: ignore[reportAttributeAccessIssue]
