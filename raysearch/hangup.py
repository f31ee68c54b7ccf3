"""A terminal that goes away tells the command to stop, once or twice; what is still said then goes nowhere."""

from __future__ import annotations

import os

_terminals = [stream for stream in (1, 2) if os.isatty(stream)]  # asked now: one that went away says no


def let_go_of_terminal() -> None:
    """Turns output that went to a terminal to nowhere: writing to one that is gone would fail in mid-farewell."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    for stream in _terminals:
        os.dup2(nowhere, stream)
    os.close(nowhere)
