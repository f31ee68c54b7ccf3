"""Writing result files so that an interrupted write leaves the old file or none, never half of one."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from raysearch.errors import InputError
from sim.catalog import Kind, config_path
from sim.types import Strategy

RESULTS_ROOT = Path("results")
"""Where commands without --out put their folders, relative to the working directory."""


def write_atomically(path: Path, content: bytes) -> None:
    """Writes a file, and its folder if need be, through a temporary file beside it and a rename."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{os.getpid()}")  # several processes may write the same cache entry
    try:
        temporary.write_bytes(content)
        temporary.replace(path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


def write_json(path: Path, value: Mapping[str, Any]) -> None:
    """Writes a JSON object; see `write_atomically`."""
    write_atomically(path, (json.dumps(value, indent=2, allow_nan=False) + "\n").encode())


def read_json(path: Path) -> dict[str, Any]:
    """The object of a JSON file."""
    return json.loads(path.read_text(encoding="utf-8"))


def fresh_folder(out: Path | None, name: str) -> Path:
    """The folder for new results: `out`, or results/<name>-<UTC time>. Creates nothing yet.

    Raises:
        InputError: The folder holds something already, or cannot be made.
    """
    folder = out or RESULTS_ROOT / f"{name}-{datetime.now(UTC):%Y%m%dT%H%M%SZ}"
    existing = next(path for path in (folder, *folder.absolute().parents) if path.exists())
    if not (existing.is_dir() and os.access(existing, os.W_OK)):
        raise InputError(f"cannot put results into {folder}: {existing} is not a folder that you may write to")
    if existing == folder and any(folder.iterdir()):
        raise InputError(f"{folder} holds results already; give --out a folder that is new or empty")
    return folder


def anchored(kind: Kind, name_or_path: str, *, beside: Path | None = None) -> str:
    """A shipped name as it is; a path made absolute, so that results read back from any working directory.

    Raises:
        CatalogError: No such name or file.
    """
    path = config_path(kind, name_or_path, beside=beside)
    return str(path.resolve()) if name_or_path.endswith(".toml") else name_or_path


def strategy_dict(strategy: Strategy) -> dict[str, Any]:
    """A strategy as it stands in JSON: tp, ep, pp, batch and the list dims."""
    return {
        "tp": strategy.tp,
        "ep": strategy.ep,
        "pp": strategy.pp,
        "batch": strategy.batch,
        "dims": list(strategy.dims),
    }


def as_strategy(fields: Mapping[str, Any]) -> Strategy:
    """A strategy from its JSON form."""
    return Strategy(**{**fields, "dims": tuple(fields["dims"])})
