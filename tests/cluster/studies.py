"""What the tests of clusters share: a study to submit, and what its runs find alone."""

from __future__ import annotations

import json
from pathlib import Path

from raysearch.runs.records import RunSpec
from raysearch.runs.run import SearchRun
from raysearch.studies.results import study_frame
from raysearch.studies.study_file import load_study


def write_study(
    path: Path, workload: Path, *, searchers: list[str], seeds: list[int], budget: int, report_every: int = 100
) -> Path:
    keys = {
        "name": "submitted",
        "workloads": [str(workload)],
        "searchers": searchers,
        "seeds": seeds,
        "budget": budget,
        "report_every": report_every,
    }
    path.write_text("".join(f"{key} = {json.dumps(value)}\n" for key, value in keys.items()), encoding="utf-8")
    return path


def digests(out: Path) -> dict[str, str]:
    """The digest of each finished run in a results folder."""
    frame = study_frame(out)
    return {run_id: digest for run_id, digest in zip(frame["run_id"], frame["digest"], strict=True) if digest}


def hosts(out: Path) -> dict[str, set[str]]:
    """The addresses of the hosts that reported of each run of a study."""
    reports = {path.parent.name: path.read_text(encoding="utf-8") for path in out.glob("tune/*/result.json")}
    # The last line may be under way: what follows the last line break does not count.
    lines = {run_id: text.split("\n")[:-1] for run_id, text in reports.items()}
    return {run_id: {json.loads(line)["node_ip"] for line in whole} for run_id, whole in lines.items()}


def digests_alone(study: Path, folder: Path) -> dict[str, str]:
    """The same, of the runs of a study made one by one in this process."""
    return {run_id: _digest_alone(spec, folder / run_id) for run_id, spec in load_study(study).specs().items()}


def _digest_alone(spec: RunSpec, folder: Path) -> str:
    run = SearchRun(spec, folder)
    run.advance(spec.budget)
    return run.finish()["digest"]
