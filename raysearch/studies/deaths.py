"""Which deaths of a run's process count: those in a row without a new row on disk."""

from __future__ import annotations

from pathlib import Path
from typing import Any, final

from envs.rows import ROWS_FILE

MOST_IDLE_RESTARTS = 2
"""[assumed] Restarts in a row of a run whose process dies without a new row, before the run counts as failed."""


@final
class Deaths:
    """Grants Tune's trials further restarts as their rows grow. Tune alone would count every death of a long run."""

    def __init__(self) -> None:
        self._largest_bytes: dict[str, int] = {}

    def began(self, trial: Any) -> None:
        """To be called when a trial's process starts, also again."""
        self._largest_bytes.setdefault(_folder(trial), _rows_bytes(trial))

    def reported(self, trial: Any) -> None:
        """To be called when a trial reports."""
        self._forgive(trial, trial.num_failures)

    def recovered(self, trial: Any) -> None:
        """To be called when a trial's process has died and will be started again."""
        self._forgive(trial, trial.num_failures - 1)

    def _forgive(self, trial: Any, deaths: int) -> None:
        """Lets the first deaths of a trial no longer count if its rows are more than they ever were."""
        size_bytes = _rows_bytes(trial)
        if size_bytes > self._largest_bytes.setdefault(_folder(trial), size_bytes):  # it may die before it starts
            self._largest_bytes[_folder(trial)] = size_bytes
            trial.max_failures = deaths + MOST_IDLE_RESTARTS


def _folder(trial: Any) -> str:
    return trial.config["run"]["folder"]


def _rows_bytes(trial: Any) -> int:
    try:
        return (Path(_folder(trial)) / ROWS_FILE).stat().st_size
    except OSError:
        return 0
