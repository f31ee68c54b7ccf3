"""Writing files that an interruption leaves whole or as they were, never half written."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from pathlib import Path


def write_atomically(path: Path, write: Callable[[Path], object]) -> None:
    """Makes or replaces a file, and its folder if need be, through a temporary file beside it.

    Args:
        path: The file.
        write: Given the temporary path, writes all of it there.

    Raises:
        OSError: It cannot be written, or is a pipe or a device, and names a file; what was at `path` is still there.
    """
    if path.exists() and not path.is_file():  # a user who may do so would replace /dev/null
        raise OSError(errno.EEXIST, "expected a file, or nothing, in its place", str(path))
    path.parent.mkdir(parents=True, exist_ok=True)
    # Several processes, of several hosts perhaps, may write the same file.
    temporary = path.with_name(f".{path.name}.{os.urandom(4).hex()}")
    try:
        write(temporary)
        with temporary.open("rb+") as file:
            os.fsync(file.fileno())
        temporary.replace(path)
    except BaseException as error:
        temporary.unlink(missing_ok=True)
        if isinstance(error, OSError) and error.filename is None:  # the error of a full disk has no name
            error.filename = str(path)
        raise
