"""A program runs below a guard, which ends all that it has started when it ends, or when whoever started it does.

    command
      guard      in a session of its own; adopts what is orphaned below it
        program  dies with the guard

So a benchmark ends, also what it put into other sessions or gave an empty environment, though every process of the
command is killed at once.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Sequence

from raysearch.base.errors import STOPS
from raysearch.processes.descendants import adopt_orphans, die_with_parent, end_descendants, reap

_GUARD_LOOK_S = 0.2
"""Between two looks for who started it."""
_GUARD_GRACE_S = 5.0
"""[assumed] A guard that was asked to end all below it, and has not within this time, is stopped."""
_HEARD = (signal.SIGCHLD, *STOPS)


def guarded(program: Sequence[str], stdin: int, stdout: int, stderr: int | None = None) -> subprocess.Popen[bytes]:
    """Starts a program with its streams; its exit code is the guard's, 128 + n if signal n ended it."""
    guard = f"import sys; sys.path[:] = {sys.path!r}; from raysearch.processes.guard import run_guard; run_guard()"
    words = [sys.executable, "-c", guard, str(os.getpid()), *program]
    return subprocess.Popen(words, stdin=stdin, stdout=stdout, stderr=stderr, start_new_session=True)


def end_guarded(guard: subprocess.Popen[bytes]) -> None:
    """Ends a guard and all below it."""
    guard.terminate()
    try:
        guard.wait(_GUARD_GRACE_S)
    except subprocess.TimeoutExpired:
        guard.kill()
        guard.wait()


def run_guard() -> None:
    """Runs as the guard: its arguments are who started it, and the program."""
    parent, program = int(sys.argv[1]), sys.argv[2:]
    guard = os.getpid()

    def begin() -> None:
        die_with_parent(guard)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, _HEARD)

    signal.pthread_sigmask(signal.SIG_BLOCK, _HEARD)  # each waits until it is asked for
    adopt_orphans()
    with subprocess.Popen(program, preexec_fn=begin) as process:  # nothing runs beside it here: a fork is safe
        while (code := process.poll()) is None and os.getppid() == parent:
            heard = signal.sigtimedwait(_HEARD, _GUARD_LOOK_S)
            if heard and heard.si_signo != signal.SIGCHLD:
                break
            reap(process.pid)
        end_descendants()
    if code is None:
        sys.exit(1)
    sys.exit(code if code >= 0 else 128 - code)
