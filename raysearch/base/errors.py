"""What can go wrong that is not a bug: a caller's mistake, or a signal that asks us to stop."""

from __future__ import annotations

import signal

STOPS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
"""Signals that ask the command to stop: Ctrl-C, a scheduler or `kill`, a terminal or connection that went away."""

FAILURE = 1
"""Exit code of a run that broke down, or of a disk that is full."""
INPUT_ERROR = 2
"""Exit code of a caller's mistake."""
NOTHING_FEASIBLE = 3
"""Exit code where nothing keeps the limits."""
OUT_OF_MEMORY = "error: the memory that this process may have is used up (`ulimit -v` shows a limit)"
"""The message where it is."""


class InputError(ValueError):
    """Something the caller gave cannot be used; the message says what was expected and how to mend it."""


class RunFailed(RuntimeError):
    """A search stopped because something broke; the message names it and says what was kept."""


class Interrupted(BaseException):
    """A signal asked the program to stop.

    Derives from BaseException, as KeyboardInterrupt does, so that no `except Exception` on the way swallows it.

    Attributes:
        exit_code: 128 + the signal's number, as shells report it.
    """

    def __init__(self, signum: int, message: str = "") -> None:
        super().__init__(message or f"interrupted by {signal.Signals(signum).name}")
        self.signum = signum
        self.exit_code = 128 + signum
