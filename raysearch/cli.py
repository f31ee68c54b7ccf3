"""The `raysearch` command: what it exits with, and how it ends when it is told to stop.

Imports next to nothing, so that a signal is heard from the first moment on; the commands are in `raysearch.app`.
"""

from __future__ import annotations

import signal
import sys
from typing import Any, NoReturn

from raysearch.errors import Interrupted
from raysearch.hangup import let_go_of_terminal

STOPS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
"""Signals that ask the command to stop: Ctrl-C, a scheduler or `kill`, a terminal or connection that went away."""


def main() -> None:
    """Runs the command line; what the caller can mend is one line on stderr, never a traceback.

    Exit codes: 0 done, 1 something broke, 2 a mistake in what was given, 128 + n stopped by signal n.
    """
    for signum in STOPS:
        if signal.getsignal(signum) is not signal.SIG_IGN:  # as nohup has it ignored
            signal.signal(signum, _stop)
    try:
        from raysearch.app import run

        code = run()
    except Interrupted as stop:
        print(stop, file=sys.stderr)
        code = stop.exit_code
    sys.exit(code)


def _stop(signum: int, _frame: Any) -> NoReturn:
    if signum == signal.SIGHUP:
        let_go_of_terminal()
    raise Interrupted(signum)
