"""Where the `raysearch` command begins: all else is imported from here, so that an import that fails is one message."""

from __future__ import annotations

import gc
import os
import sys

from raysearch.base.errors import OUT_OF_MEMORY
from raysearch.cli.bytecode import BYTECODE_ERRORS, cut_off_bytecode

_OBJECTS = 100_000
"""New ones until Python looks for cycles: ours are in none, and looking among more takes longer."""


def start_command() -> None:
    """Runs the command line; see `raysearch.cli.main`."""
    _open_streams()
    # Before NumPy is imported: its threads cost more to start than products as small as ours save.
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
    gc.set_threshold(_OBJECTS, *gc.get_threshold()[1:])
    try:
        from raysearch.cli import main as command
    except BYTECODE_ERRORS as error:
        sys.exit(cut_off_bytecode(error))
    except MemoryError:
        sys.exit(OUT_OF_MEMORY)
    command.main()


def _open_streams() -> None:
    """Has what was closed lead nowhere: a file of results would have its number, and take what a child prints."""
    for number, name, mode in ((0, "stdin", "r"), (1, "stdout", "w"), (2, "stderr", "w")):
        try:
            os.fstat(number)
        except OSError:
            os.set_inheritable(os.open(os.devnull, os.O_RDWR), True)  # the lowest number that is free
            setattr(sys, name, os.fdopen(number, mode, closefd=False))
