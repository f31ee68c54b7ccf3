"""Files of arrays that processes make side by side, some workloads each.

A file that is there is not made again, so a stopped run goes on where it was.
"""

from __future__ import annotations

import os
import signal
import zipfile
from collections.abc import Callable, Mapping, Sequence
from multiprocessing import get_context
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from raysearch.base.errors import RunFailed
from raysearch.base.spawning import spawning
from raysearch.processes.descendants import die_with_parent
from raysearch.processes.table import Stopped, read_process
from sim.config.reading import opened
from sim.config.writing import write_atomically

PER_FILE = 20
"""Workloads of a file."""
_LOOKED_EVERY_S = 2.0
_MOST_LOOKS = 10
"""[assumed] A process that was stopped at so many looks in a row stays stopped."""
_LARGEST_BYTES = 256 * 1024**2
"""[assumed] With the usual number of strategies, a file has a hundredth."""
UNREADABLE = (
    *(zipfile.BadZipFile, RuntimeError, OSError, EOFError),  # the archive, which may say that it is encrypted
    *(ValueError, LookupError, TypeError, MemoryError, OverflowError),  # what is in it
)
"""Errors of `read_array_file` and of looking at what it gave."""


class ArrayFiles(NamedTuple):
    """What files are to be made.

    Attributes:
        stem: Of their names.
        workloads: In all.
        write: Called with `arguments`, the indices of a file's workloads, and its path; a function of a module.
        arguments: Of `write`, which other processes can be given.
    """

    stem: str
    workloads: int
    write: Callable[..., None]
    arguments: tuple[Any, ...]

    def make(self, number: int, path: str) -> None:
        """Makes one."""
        indices = range(number * PER_FILE, min((number + 1) * PER_FILE, self.workloads))
        self.write(*self.arguments, indices, Path(path))


def _make_some(files: ArrayFiles, lacking: Sequence[tuple[int, str]], parent: int) -> None:
    die_with_parent(parent)
    for number, path in lacking:
        files.make(number, path)


def make_files(files: ArrayFiles, folder: Path, processes: int, progress: Callable[[int, int], None]) -> list[Path]:
    """All files, those that lack made now, `processes` at a time.

    Raises:
        RunFailed: A process ended before its work did, or stayed stopped and was ended.
    """
    count = -(-files.workloads // PER_FILE)
    paths = [folder / f"{files.stem}-{number:05d}.npz" for number in range(count)]
    lacking = [(number, str(path)) for number, path in enumerate(paths) if not path.is_file()]
    done = count - len(lacking)
    progress(done, count)
    if processes == 1:
        for number, path in lacking:
            files.make(number, path)
            progress(done := done + 1, count)
        return paths
    # No pool: one that is interrupted waits for locks of processes that have ended.
    spawned = get_context("spawn")
    shares = [lacking[first::processes] for first in range(min(processes, len(lacking)))]
    workers = [spawned.Process(target=_make_some, args=(files, share, os.getpid()), daemon=True) for share in shares]
    stopped = Stopped(_MOST_LOOKS)
    with spawning():
        for worker in workers:
            worker.start()
    try:
        while running := [worker for worker in workers if worker.is_alive()]:
            wait([worker.sentinel for worker in running], _LOOKED_EVERY_S)
            seen = {worker.pid: found for worker in running if worker.pid and (found := read_process(worker.pid))}
            for pid in stopped.among(seen):
                os.kill(pid, signal.SIGKILL)
            made = count - sum(not path.is_file() for path in paths)
            if made > done:
                progress(done := made, count)
    finally:
        for worker in workers:
            worker.terminate()
            worker.join()
    if broken := [worker.exitcode for worker in workers if worker.exitcode]:
        raise RunFailed(f"a process that evaluates ended with {broken[0]}: the same command continues")
    return paths


def write_array_file(path: Path, arrays: Mapping[str, NDArray[Any]]) -> None:
    """Writes arrays, whole or not at all."""

    def save(temporary: Path) -> None:
        with temporary.open("wb") as file:
            np.savez(file, allow_pickle=False, **arrays)

    write_atomically(path, save)


def read_array_file(path: Path) -> dict[str, NDArray[Any]]:
    """What `write_array_file` wrote. Raises: One of `UNREADABLE`."""
    with opened(path) as file:
        if (size := os.fstat(file.fileno()).st_size) > _LARGEST_BYTES:
            raise ValueError(f"it is too long: expected at most {_LARGEST_BYTES:,} bytes")
        with zipfile.ZipFile(file) as archive:  # one that unfolds to more than it is was never ours
            members = archive.infolist()
        if any(member.compress_type != zipfile.ZIP_STORED for member in members):
            raise ValueError("its arrays are compressed")
        if sum(member.file_size for member in members) > size:
            raise ValueError("it holds some arrays twice")
        file.seek(0)
        with np.load(file, allow_pickle=False) as stored:
            found = {name: stored[name] for name in stored.files}
    if not all(isinstance(each, np.ndarray) for each in found.values()):  # what does not begin like one are bytes
        raise ValueError("it holds more than arrays")
    return found
