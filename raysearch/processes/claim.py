"""A results folder belongs to one process at a time, on this host and on all that share the folder.

Two things hold it. A lock on the folder itself ends with its process however that ends, but not every network file
system carries it to other hosts. For those a file in the folder names the holder, who touches it every few seconds:
a claim that nobody has touched for long has lapsed and may be taken over. Ages are read off the file system's own
clock, so that the hosts' clocks need not agree; as even that may be set, whoever takes over has watched for a while.
"""

from __future__ import annotations

import fcntl
import json
import os
import socket
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from envs.strategy_env import brief
from raysearch.base.errors import InputError
from raysearch.processes.heartbeat import BEAT_S, Pulse, beating
from sim.config.reading import Unreadable, opened, parse_object
from sim.json_object import JsonObject

CLAIM_FILE = ".claim"
LAPSE_S = 60.0
"""[assumed] A claim untouched for so long is nobody's: far above the few seconds a network file system may stall."""
WITNESSED_S = 2 * BEAT_S
"""[assumed] A claim that seems to have lapsed is watched for so long before it is taken over."""
_LONGEST_BYTES = 4096
"""[assumed] A claim has 200; what is longer is none."""
_RESULTS = (
    "run.json",
    "study.json",
    "tune_live.json",
    "recommendation.json",
    "pools.json",
    "placement.json",
    "replay.json",
)
"""Files by which a folder is known for results that another answer does not belong to."""
_LOOK_S = 0.1
"""A claim is tried again after it: `in_use` holds the lock for the moment of its look."""


@contextmanager
def claimed(folder: Path, *, resume: bool = False) -> Iterator[None]:
    """Makes a folder and keeps it for this process; what is still empty at the end is removed.

    A process that is killed leaves its claim behind; it counts no more on the same host, and elsewhere once it lapsed.

    Args:
        folder: For results; new or empty, unless `resume`.
        resume: Whether it may hold something.

    Raises:
        InputError: It cannot be written to, holds something already, or another process has it.
    """
    made = [path for path in (folder, *folder.parents) if not os.path.lexists(path)]
    handle = _open_folder(folder)
    try:
        alone = _lock(handle, folder)
        try:
            with _claim_kept(folder, alone):
                if not resume and any(path.name != CLAIM_FILE for path in folder.iterdir()):
                    raise InputError(f"{folder} contains results already; give --out a folder that is new or empty")
                yield
        finally:
            with suppress(OSError):  # the first that holds something ends it
                for path in made:
                    path.rmdir()
    finally:
        os.close(handle)


def check_folder(folder: Path | None, own: str | None = None) -> None:
    """Makes sure that results can be put into a folder before they are computed; what it makes to see is removed again.

    Args:
        folder: Which, perhaps new; None for none.
        own: File of the answer, which replaces an earlier one but stands beside no other results, "" for one of any
            name; None of a file that may lie beside them.

    Raises:
        InputError: They cannot.
    """
    if folder is None:
        return
    made = [path for path in (folder, *folder.parents) if not os.path.lexists(path)]
    try:
        os.close(_open_folder(folder))
    finally:
        with suppress(OSError):
            for path in made:
                path.rmdir()
    others = [name for name in _RESULTS if own is not None and name != own and os.path.lexists(folder / name)]
    if others:
        raise InputError(f"{folder} contains other results ({others[0]}); use another folder")


def in_use(folder: Path) -> bool:
    """Whether a process has claimed the folder; one of another host counts until its claim has lapsed."""
    path = folder / CLAIM_FILE
    try:
        claim, touched_s = _read(path), path.stat().st_mtime
    except FileNotFoundError:
        return False
    if _parse(claim).get("machine") != _machine():
        return _is_fresh(_now_s(folder) - touched_s)
    handle = os.open(folder, os.O_RDONLY)
    try:
        return not _locked(handle, fcntl.LOCK_SH)  # let go of with the handle, at once
    finally:
        os.close(handle)


def _open_folder(folder: Path) -> int:
    try:
        folder.mkdir(parents=True, exist_ok=True)
        writable = os.access(folder, os.W_OK)
        handle = os.open(folder, os.O_RDONLY)
    except OSError as error:
        raise _unusable(folder, error) from error
    except RecursionError as error:
        raise InputError(f"cannot put results into {brief(str(folder))}: it nests too deep") from error
    if not writable:
        os.close(handle)
        raise InputError(f"cannot put results into {folder}: you may not write to it")
    return handle


def _lock(handle: int, folder: Path) -> bool:
    """Locks the folder; False where the file system has no such locks."""
    try:
        if not _locked(handle, fcntl.LOCK_EX):
            time.sleep(_LOOK_S)
            if not _locked(handle, fcntl.LOCK_EX):
                raise _in_use(folder)
    except OSError:
        return False
    # Who held it may have removed the empty folder since we opened it: then the lock is on nothing that has a name.
    if not (folder.exists() and os.path.samestat(os.fstat(handle), folder.stat())):
        raise _in_use(folder)
    return True


def _locked(handle: int, how: int) -> bool:
    try:
        fcntl.flock(handle, how | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


@contextmanager
def _claim_kept(folder: Path, alone: bool) -> Iterator[None]:
    """Keeps a claim in the folder and touches it now and then."""
    path = folder / CLAIM_FILE
    mine = _new_claim()
    try:
        handle = _stake(path, mine, alone)
    except OSError as error:
        raise _unusable(folder, error) from error
    try:
        with beating(handle):  # what was taken over has no name any more; touching it harms nobody
            yield
    finally:
        os.close(handle)
        with suppress(OSError, InputError):
            if _read(path) == mine:
                path.unlink()


def _stake(path: Path, mine: bytes, alone: bool) -> int:
    """Makes the claim, in place of one that has lapsed if need be; returns its open file."""
    try:
        return _create(path, mine)
    except FileExistsError:
        _bury(path, alone)
    try:
        return _create(path, mine)
    except FileExistsError:  # another was faster
        raise _in_use(path.parent) from None


def _create(path: Path, content: bytes) -> int:
    handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o644)
    try:
        os.write(handle, content)
    except OSError:
        os.close(handle)
        path.unlink()
        raise
    return handle


def _bury(path: Path, alone: bool) -> None:
    """Takes away a claim that has lapsed.

    Args:
        path: The claim.
        alone: Whether no other process of this host has the folder.

    Raises:
        InputError: It has not.
    """
    try:
        claim = _read(path)
        age_s = _now_s(path.parent) - path.stat().st_mtime
    except FileNotFoundError:  # given up this moment
        return
    holder = _parse(claim)
    killed_here = alone and holder.get("machine") == _machine()
    if not killed_here and (_is_fresh(age_s) or _beats(path)):
        raise _in_use(path.parent, holder, age_s)
    grave = path.with_name(f"{CLAIM_FILE}.{os.urandom(4).hex()}")
    try:
        path.rename(grave)  # of several who try at once, one succeeds ...
    except FileNotFoundError:
        raise _in_use(path.parent) from None
    taken = _read(grave) == claim
    if not taken:  # ... and whoever comes late gives back the claim that the first has made meanwhile
        with suppress(FileExistsError):
            os.link(grave, path)
    grave.unlink()
    if not taken:
        raise _in_use(path.parent)


def _is_fresh(age_s: float) -> bool:
    """Whether a claim of that age counts unseen; one from the future, where a clock was set, must beat."""
    return abs(age_s) < LAPSE_S


def _beats(path: Path) -> bool:
    """Whether somebody touches a claim while we look."""
    pulse = Pulse(path)
    time.sleep(WITNESSED_S)
    return pulse.silent_s < WITNESSED_S


def _now_s(folder: Path) -> float:
    """The time by the clock of the file system, which on a network is not this host's."""
    with tempfile.TemporaryFile(dir=folder) as probe:
        return os.fstat(probe.fileno()).st_mtime


def _new_claim() -> bytes:
    holder = {"host": socket.gethostname(), "process": os.getpid(), "machine": _machine(), "claim": os.urandom(8).hex()}
    return json.dumps(holder).encode()


def _machine() -> str:
    """Names the running kernel: the same in all of its containers, another after a restart."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:  # not Linux
        return socket.gethostname()


def _read(path: Path) -> bytes:
    try:
        with opened(path) as file:
            return file.read(_LONGEST_BYTES)
    except Unreadable:
        raise InputError(f"{path} is not a file, which a claim is; remove it") from None  # a pipe would never end


def _parse(claim: bytes) -> JsonObject:
    try:
        return parse_object(claim)
    except Unreadable:  # its process was killed before it had written it
        return {}


def _in_use(folder: Path, holder: JsonObject | None = None, age_s: float = 0.0) -> InputError:
    who = ""
    if holder:
        who = (
            f" (process {holder.get('process')} on {holder.get('host')}, heard of {max(age_s, 0):.0f} s ago; "
            f"silent for {LAPSE_S:.0f} s it counts as dead)"
        )
    return InputError(f"{folder} is in use by another search or study{who}; give --out another folder")


def _unusable(folder: Path, error: OSError) -> InputError:
    return InputError(f"cannot put results into {folder}: {error.strerror} ({error.filename or folder})")
