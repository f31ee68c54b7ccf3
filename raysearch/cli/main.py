"""The `raysearch` command: what it exits with, and how it ends when it is stopped.

Imports next to nothing, so that a signal is heard from the first moment on; the commands are in `raysearch.cli.app`.
"""

from __future__ import annotations

import signal
import sys
from typing import Any, NoReturn

from raysearch.base.errors import FAILURE, OUT_OF_MEMORY, STOPS, Interrupted
from raysearch.base.terminal import inert_output
from raysearch.cli.bytecode import BYTECODE_ERRORS, cut_off_bytecode
from raysearch.processes.watcher import kept_by, let_go_of_terminal, resumed_with, supervised

_WATCHED = ("search", "study", "tune-live", "pretrain")
"""Commands that may start Ray, take hours, or call code of others."""
AGAIN_S = 0.01
"""[assumed] A finaliser takes less; one that takes longer is waited for again."""


def main() -> None:
    """Runs the command line; what the caller can correct is one line on stderr, never a traceback.

    Exit codes: 0 done, 1 something broke, 2 a mistake in what was given, 3 nothing is feasible, 128 + n stopped by
    signal n.
    """
    watched = len(sys.argv) > 1 and sys.argv[1] in _WATCHED
    with inert_output():
        code = supervised(_run) if watched else _run()
    sys.exit(code)


def _run() -> int:
    unraisable, sys.unraisablehook = sys.unraisablehook, _raise_again
    for signum in STOPS:
        if signal.getsignal(signum) is not signal.SIG_IGN:  # as nohup has it ignored
            signal.signal(signum, stop)
    try:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, STOPS)  # which may raise at once what came meanwhile
        from raysearch.cli.app import run_command

        return run_command()
    except BYTECODE_ERRORS as error:
        return cut_off_bytecode(error)
    except MemoryError:
        print(OUT_OF_MEMORY, file=sys.stderr)
        return FAILURE
    except Interrupted as stopped:
        again = None if "--resume" in str(stopped) else resumed_with()
        print(f"{stopped}; {kept_by(again)}" if again else stopped, file=sys.stderr)
        return stopped.exit_code
    finally:
        sys.unraisablehook = unraisable


def stop(signum: int, _frame: Any) -> NoReturn:
    """Hears the first signal; those that follow do not disturb the farewell."""
    for which in STOPS:
        signal.signal(which, signal.SIG_IGN)
    if signum == signal.SIGHUP:
        let_go_of_terminal()
    raise Interrupted(signum)


def _raise_again(ignored: sys.UnraisableHookArgs) -> None:
    """Has a stop that came amid a finaliser, whose exceptions Python ignores, come again in a moment."""
    stopped = ignored.exc_value
    if isinstance(stopped, Interrupted):
        signal.signal(signal.SIGALRM, lambda _, frame: stop(stopped.signum, frame))
        signal.setitimer(signal.ITIMER_REAL, AGAIN_S)
    else:
        sys.__unraisablehook__(ignored)
