"""Where the `raysearch` command begins: all else is imported from here, so that an import that fails is one message."""

from __future__ import annotations

import sys

from raysearch.cli.bytecode import BYTECODE_ERRORS, cut_off_bytecode


def start_command() -> None:
    """Runs the command line; see `raysearch.cli.main`."""
    try:
        from raysearch.cli import main as command
    except BYTECODE_ERRORS as error:
        sys.exit(cut_off_bytecode(error))
    command.main()
