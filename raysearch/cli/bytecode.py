"""The message about Python's own bytecode that cannot be read.

CPython takes no notice when a full disk or a limit on the size of files cuts off the bytecode that it writes, and every
later import of that module fails. [spec] FileIO.write returns how much was written, which importlib does not look at.
"""

from __future__ import annotations

import shlex
import sys
import traceback
from pathlib import Path

BYTECODE_ERRORS = (EOFError, ValueError, TypeError)
"""[spec] What marshal.loads raises of bytes that are no bytecode."""


def cut_off_bytecode(error: BaseException) -> int:
    """Says which module's bytecode cannot be read, and how to mend it; returns the exit code.

    Args:
        error: Of `BYTECODE_ERRORS`; one that comes from elsewhere is raised again.
    """
    for frame, _ in traceback.walk_tb(error.__traceback__):
        path = frame.f_locals.get("bytecode_path")
        if path and frame.f_code.co_name == "get_code" and "importlib" in frame.f_code.co_filename:
            break
    else:
        raise error
    print(
        f"error: Python's bytecode {path} is damaged: {error} (a full disk or a limit on the size of files cuts it off "
        f"when it is written); delete it and its neighbours, and run the command again: "
        f"find {shlex.quote(str(_package(Path(path))))} -name '*.pyc' -delete",
        file=sys.stderr,
    )
    return 1


def _package(bytecode: Path) -> Path:
    """The outermost package of a module, or the folder of its bytecode."""
    folder = bytecode.parent
    while (folder.parent / "__init__.py").exists():
        folder = folder.parent
    return folder
