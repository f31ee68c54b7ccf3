"""Result folders and the files in them: claimed by one process, written whole, checked when read."""

from __future__ import annotations

import fcntl
import json
import os
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ValidationError

from envs.files import write_atomically
from raysearch.errors import InputError
from sim.config_files import Kind, config_path, explain
from sim.types import Strategy

RESULTS_ROOT = Path("results")
"""Where commands without --out put their folders, relative to the working directory."""


def write_bytes(path: Path, content: bytes) -> None:
    """Writes a file; see `envs.files.write_atomically`."""
    write_atomically(path, lambda temporary: temporary.write_bytes(content))


def write_json(path: Path, value: Mapping[str, Any]) -> None:
    """Writes a JSON object; see `envs.files.write_atomically`."""
    write_bytes(path, (json.dumps(value, indent=2, allow_nan=False) + "\n").encode())


def read_json(path: Path, schema: type[BaseModel]) -> dict[str, Any]:
    """The object of a JSON file of ours.

    Raises:
        InputError: It is not what `schema` says.
        OSError: There is no such file, or it cannot be read.
    """
    try:
        fields = json.loads(path.read_bytes())
        schema.model_validate(fields)
    except ValidationError as error:
        raise damaged(f"{path} is damaged: {explain(error, schema)}") from error
    except ValueError as error:
        raise damaged(f"{path} is damaged: {error}") from error
    return fields


def damaged(what: str) -> InputError:
    """The error for a result that cannot be read, with what can be done about it."""
    return InputError(f"{what}; bring it back from a copy, or run again into another folder")


def results_folder(out: Path | None, name: str) -> Path:
    """Where new results go: `out`, or results/<name>-<UTC time>. Creates nothing."""
    return out or RESULTS_ROOT / f"{name}-{datetime.now(UTC):%Y%m%dT%H%M%SZ}"


_LOOK_S = 0.1
"""A claim is tried again after it: `in_use` holds the lock for the moment of its look."""


@contextmanager
def claimed(folder: Path, *, resume: bool = False) -> Iterator[None]:
    """Makes a folder and keeps it for this process; what is still empty at the end is removed.

    The claim is a lock on the folder itself: it leaves no trace, and ends with the process however that ends.

    Args:
        folder: For results; new or empty, unless `resume`.
        resume: Whether it may hold something.

    Raises:
        InputError: It cannot be written to, holds something already, or another process has it.
    """
    made = [path for path in (folder, *folder.parents) if not os.path.lexists(path)]
    handle = _open_folder(folder)
    try:
        _lock(handle, folder)
        try:
            if not resume and any(folder.iterdir()):
                raise InputError(f"{folder} holds results already; give --out a folder that is new or empty")
            yield
        finally:
            with suppress(OSError):  # the first that holds something ends it
                for path in made:
                    path.rmdir()
    finally:
        os.close(handle)


def _open_folder(folder: Path) -> int:
    try:
        folder.mkdir(parents=True, exist_ok=True)
        writable = os.access(folder, os.W_OK)
        handle = os.open(folder, os.O_RDONLY)
    except OSError as error:
        raise InputError(f"cannot put results into {folder}: {error.strerror} ({error.filename})") from error
    if not writable:
        os.close(handle)
        raise InputError(f"cannot put results into {folder}: you may not write to it")
    return handle


def _lock(handle: int, folder: Path) -> None:
    in_use = InputError(f"{folder} is in use by another search or study; give --out another folder")
    if not _locked(handle, fcntl.LOCK_EX):
        time.sleep(_LOOK_S)
        if not _locked(handle, fcntl.LOCK_EX):
            raise in_use
    # Who held it may have removed the empty folder since we opened it: then the lock is on nothing that has a name.
    if not (folder.exists() and os.path.samestat(os.fstat(handle), folder.stat())):
        raise in_use


def _locked(handle: int, how: int) -> bool:
    try:
        fcntl.flock(handle, how | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def in_use(folder: Path) -> bool:
    """Whether a process has claimed the folder, on this machine or, if the file system tells, on another."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        return not _locked(handle, fcntl.LOCK_SH)  # let go of with the handle, at once
    finally:
        os.close(handle)


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
