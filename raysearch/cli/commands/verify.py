"""`raysearch verify`: whether a folder of results is what was written."""

from __future__ import annotations

from pathlib import Path

from raysearch.base.errors import RunFailed
from raysearch.cli.commands.options import JsonOption, ResultsArgument, print_json


def verify_results(
    directory: ResultsArgument,
    as_json: JsonOption = False,
) -> None:
    """Check a study, a search, a tuning or an answer: every digest, every row, and each summary against its rows.

    Exit code 0 if all can be trusted, 1 if something cannot.

    \b
    Examples:
      raysearch verify results/smoke
    """
    from raysearch.base.file_io import Damaged

    try:
        _verify(directory, as_json)
    except Damaged as damage:
        raise RunFailed(str(damage)) from damage


def _verify(directory: Path, as_json: bool) -> None:
    from raysearch.deploy.export.source import verified_answers
    from raysearch.deploy.live.session import is_tuning, verify_tuning
    from raysearch.studies.results import verify

    answers = verified_answers(directory)
    if answers and not is_tuning(directory):
        if as_json:
            print_json({"folder": str(directory), "answers": answers, "damaged": {}})
        else:
            print(f"As written: {', '.join(answers)}")
        return
    if is_tuning(directory):
        measurements = verify_tuning(directory)
        if as_json:
            print_json({"folder": str(directory), "measurements": measurements, "damaged": {}})
        else:
            print(f"{measurements:,} measurements are as they were written")
        return
    found = verify(directory)
    calls = sum(run["calls"] for run in found.runs)
    if as_json:
        print_json({"folder": str(directory), "runs": len(found.runs), "calls": calls, "damaged": found.damaged})
    else:
        print(f"{len(found.runs):,} runs with {calls:,} calls are as they were written")
    if found.damaged:
        raise RunFailed("; ".join(found.damaged.values()))
