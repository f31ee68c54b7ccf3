"""Names the strategy with which a simulator takes its own process down.

Nobody is left to tell of the first death. So a run that goes on repeats the call at which the rows end with a note on
disk, and a run that finds the note of that very call does not try a third time.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from envs.strategy_env import SimulatorFailure
from raysearch.files import strategy_dict, write_json
from sim.types import Strategy

SUSPECT_FILE = "suspect.json"


@contextmanager
def suspected(run_dir: Path, call: int, strategy: Strategy) -> Iterator[None]:
    """Leaves a note in the run's folder for as long as the call lasts.

    Raises:
        SimulatorFailure: The note is there already. It is gone then: whoever resumes the run tries the call again.
    """
    path = run_dir / SUSPECT_FILE
    note = {"call": call, "strategy": strategy_dict(strategy)}
    if path.is_file() and json.loads(path.read_bytes()) == note:
        path.unlink()
        raise SimulatorFailure(strategy, f"its process died at call {call}, and again when the call was repeated")
    write_json(path, note)
    try:
        yield
    finally:  # whatever is raised, the process lives
        path.unlink()
