"""A terminal that goes away tells the command to stop, once or twice; what is still said then goes nowhere."""

from __future__ import annotations

import os
import signal

_terminals = [stream for stream in (1, 2) if os.isatty(stream)]  # asked now: one that went away says no


def let_go_of_terminal() -> None:
    """Hears no second SIGHUP, and turns output that went to a terminal to nowhere.

    The shell and the kernel may both send one, and writing to a terminal that is gone would fail in mid-farewell.
    """
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    nowhere = os.open(os.devnull, os.O_WRONLY)
    for stream in _terminals:
        os.dup2(nowhere, stream)
    os.close(nowhere)
