"""A command that starts processes runs in a child, watched by processes that do nothing else.

    watcher     the command's process, as the shell knows it: hears every signal, starts the command, has the last word
      keeper    in a process group of its own: ends all that is left when the command, or the watcher, has gone
        child   the command; Ray and whatever else it starts

Ray puts its own handlers in place of ours, may hang in C++ code, and leaves daemons behind when its driver dies.
Watcher and keeper import none of it, and adopt what is orphaned below them: whichever of the three is killed, another
ends the rest. The child sends a beat every few seconds; where none comes it counts as dead, and is begun again.
"""

from __future__ import annotations

import json
import os
import shlex
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from types import FrameType
from typing import Any, NamedTuple, NoReturn

from raysearch.base.errors import FAILURE, INPUT_ERROR, NOTHING_FEASIBLE, STOPS
from raysearch.processes.descendants import adopt_orphans, die_with_parent, end_descendants, reap

GRACE_S = 6.0
"""[assumed] For a command that was stopped to print what it kept; then it is ended. Every row is on disk already."""
START_ANEW = 75
"""Exit code of a child that is to run again, as sysexits.h has it for a failure that passes."""
MOST_STARTS = 4
"""[assumed] A command that was begun so often in a row without getting further will not get further."""
WATCHER_BEAT_S = 2.0
"""[assumed] Between two beats of a child."""
WATCHER_SILENT_S = 50.0
"""[assumed] A child without a beat for so long is stopped or hangs; loading a large library holds Python for long.
Counted in looks, not by a clock: whoever pauses all of us, by Ctrl-Z or a scheduler, lets no time pass."""
_LOOK_S = 0.05

_terminals = [stream for stream in (1, 2) if os.isatty(stream)]  # asked now: one that went away says no
_pipe: int | None = None
"""In the child: where it writes how it can be resumed, whether Ray starts, beats, and null at its end."""
_calls = 0
"""In the child: how many were made. A beat is an object with it."""
_speaking = threading.Lock()
PRIVATE_PREFIX = f"raysearch-{os.urandom(4).hex()}-"
"""How the names of a command's private folders begin, which its watcher removes if it cannot do so itself; not by its
process id, which another has that sees the same folder from another container."""


def supervised(run: Callable[[], int]) -> int:
    """Runs a command in a child process; returns its exit code, 128 + n if signal n stopped it.

    Args:
        run: The command, by sys.argv. It hears of a stop by the signal itself, once.
    """
    adopt_orphans()
    stops = _Stops()
    end, resuming, restarted = _End(START_ANEW), resumed_with(), False
    calls = in_vain = 0
    while in_vain < MOST_STARTS:
        end = _watch(run, stops)
        in_vain = 0 if end.calls > calls else in_vain + 1
        calls = max(calls, end.calls)
        resuming = end.resuming or resuming
        if not end.passes or stops.signum is not None:
            break
        sys.argv[1:], restarted = resuming or sys.argv[1:], True
    kept = kept_by(resuming) if resuming else ""
    rest = f"; {kept}" if kept else ""
    if stops.signum is not None and not end.finished:
        if end.code <= 128:  # it did not say so itself
            print(f"interrupted by {signal.Signals(stops.signum).name}{rest}", file=sys.stderr)
        return 128 + stops.signum
    if not end.reached:
        print(f"error: {end.why}{rest}", file=sys.stderr)
        return FAILURE
    stopped = end.code == FAILURE or (
        end.code == INPUT_ERROR and restarted
    )  # the second: its cluster has not come back
    if stopped and kept and not end.resuming:
        print(f"note: {kept}", file=sys.stderr)
    return end.code


class _End(NamedTuple):
    """How a child ended.

    Attributes:
        code: Its exit code; negative if a signal ended it.
        resuming: The arguments that resume it, if it has stated them.
        reached: Whether it ran to its end; not if code that it called, or a signal, ended the process.
        amid_ray: Whether that was while Ray started.
        silent: Whether it had to be ended because it gave no sign of life.
        calls: How many were made by then, as far as its beats say.
    """

    code: int
    resuming: list[str] | None = None
    reached: bool = False
    amid_ray: bool = False
    silent: bool = False
    calls: int = 0

    @property
    def finished(self) -> bool:
        """Whether it did all that it was to do; a stop that comes then, as the kernel's of a stopped group, is none."""
        return self.reached and self.code in (0, NOTHING_FEASIBLE)

    @property
    def passes(self) -> bool:
        """Whether to try again: it fell silent, or Ray has died, with this process if it pleased to end it."""
        return self.silent or self.code == START_ANEW or (self.amid_ray and not self.reached)

    @property
    def why(self) -> str:
        """Why it did not run to its end."""
        if self.silent:
            return "the command fell silent again and again"
        if self.passes:
            return "Ray died again and again"
        if self.code < 0:
            return f"the command was ended by {signal.Signals(-self.code).name}"
        return f"code that the command called has ended its process, with exit code {self.code}"


def resumed_with() -> list[str] | None:
    """The arguments of a command that resumes something: they resume it again, from its first moment on."""
    return sys.argv[1:] if "--resume" in sys.argv else None


def kept_by(arguments: Sequence[str]) -> str:
    """The message about a command that was stopped."""
    what = "what is finished" if arguments[0] == "pretrain" else "every call so far"
    return f"{what} is kept. Go on with: raysearch {shlex.join(arguments)}"


def can_go_on_with(arguments: Sequence[str]) -> None:
    """Tells the watcher how what was begun is resumed: for its last words, and to do so when Ray dies."""
    _say(list(arguments))


@contextmanager
def starting_ray() -> Iterator[None]:
    """Tells the watcher that Ray starts, whose C++ code ends the process where that fails; it is to be tried again."""
    _say(True)
    try:
        yield
    finally:
        _say(False)


def got_on(calls: int) -> None:
    """Tells the watcher, with the next beat, how many calls were made in all: a command that got on is begun again."""
    global _calls
    _calls = calls


def _say(what: list[str] | bool | dict[str, int] | None) -> None:
    if _pipe is not None:
        with _speaking:  # what is long is not written at once
            os.write(_pipe, json.dumps(what).encode() + b"\n")


def start_anew() -> None:
    """Ends this process at once, to be resumed by another; returns where nobody watches."""
    if _pipe is not None:
        os._exit(START_ANEW)


def let_go_of_terminal() -> None:
    """Hears no second SIGHUP, and turns output that went to a terminal to nowhere.

    A terminal that goes away tells the command so once or twice, by the shell and by the kernel; and writing to one
    that is gone would fail in mid-farewell.
    """
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    nowhere = os.open(os.devnull, os.O_WRONLY)
    for stream in _terminals:
        os.dup2(nowhere, stream)
    os.close(nowhere)


class _Stops:
    """The first signal that asked to stop. Further ones change nothing."""

    def __init__(self) -> None:
        self.signum: int | None = None
        self.came_at_s = 0.0
        self.child: int | None = None
        for which in STOPS:
            if signal.getsignal(which) is not signal.SIG_IGN:  # as nohup has it ignored
                signal.signal(which, self._hear)

    def _hear(self, signum: int, _frame: FrameType | None) -> None:
        if self.signum is not None:
            return
        self.signum, self.came_at_s = signum, time.monotonic()
        if signum == signal.SIGHUP:
            let_go_of_terminal()
        if self.child is not None:
            with suppress(ProcessLookupError):
                os.kill(self.child, signum)


def _watch(run: Callable[[], int], stops: _Stops) -> _End:
    """Runs the command once, and leaves nothing of what it started."""
    read, write = os.pipe()
    os.set_blocking(read, False)
    watcher = os.getpid()
    sys.stdout.flush()
    sys.stderr.flush()
    signal.pthread_sigmask(signal.SIG_BLOCK, STOPS)
    keeper = os.fork()
    if keeper == 0:
        os.close(read)
        _keep(run, watcher, write)
    stops.child = keeper
    signal.pthread_sigmask(signal.SIG_UNBLOCK, STOPS)
    os.close(write)
    try:
        if stops.signum is not None:  # between two children
            os.kill(keeper, stops.signum)
        return _hear_out(keeper, _Ear(read), stops)
    finally:
        stops.child = None
        os.close(read)
        end_descendants()
        _remove_private()


def _hear_out(keeper: int, ear: _Ear, stops: _Stops) -> _End:
    """Waits for the end, and listens to what is reported until then."""
    messages: list[Any] = []
    quiet = stopped = 0  # looks in a row
    calls = 0
    silent = False
    while True:
        ended, status = _waited_for(keeper)
        heard = ear.hear()
        messages += [each for each in heard if not isinstance(each, dict)]
        calls = max(calls, *(each["calls"] for each in heard if isinstance(each, dict)), 0)
        if ended:
            codes = [each for each in messages if type(each) is int]
            resuming = [each for each in messages if isinstance(each, list)]
            amid_ray = [each for each in messages if isinstance(each, bool)]
            code = codes[-1] if codes else os.waitstatus_to_exitcode(status)
            starting = amid_ray[-1:] == [True]
            return _End(code, resuming[-1] if resuming else None, None in messages, starting, silent, calls)
        quiet = 0 if heard else quiet + 1
        stopped = stopped + 1 if _is_stopped(keeper) else 0
        if max(quiet, stopped) * _LOOK_S > WATCHER_SILENT_S and not silent:
            silent = True
            print(
                f"note: the command gave no sign of life for {WATCHER_SILENT_S:g} s and is restarted", file=sys.stderr
            )
        if silent or (stops.signum is not None and time.monotonic() - stops.came_at_s > GRACE_S):
            with suppress(ProcessLookupError):
                os.kill(keeper, signal.SIGKILL)
        reap(keeper)
        time.sleep(_LOOK_S)


def _waited_for(pid: int) -> tuple[int, int]:
    with suppress(InterruptedError):
        return os.waitpid(pid, os.WNOHANG)
    return 0, 0


class _Ear:
    """What a child says, line by line."""

    def __init__(self, read: int) -> None:
        self._read, self._rest = read, b""

    def hear(self) -> list[Any]:
        """What was reported since the last time."""
        with suppress(BlockingIOError):
            while part := os.read(self._read, 1 << 16):
                self._rest += part
        *lines, self._rest = self._rest.split(b"\n")
        return [json.loads(line) for line in lines]


def _is_stopped(child: int) -> bool:
    with suppress(ChildProcessError):
        return os.waitid(os.P_PID, child, os.WSTOPPED | os.WNOHANG | os.WNOWAIT) is not None
    return False


def _remove_private() -> None:
    """Removes what a child that was killed could not remove itself."""
    import shutil  # not before: signals are heard from the first moment on
    import tempfile

    with suppress(FileNotFoundError):  # where no disk has room, Python finds no folder for what is temporary
        for folder in Path(tempfile.gettempdir()).glob(f"{PRIVATE_PREFIX}*"):
            shutil.rmtree(folder, ignore_errors=True)


def _keep(run: Callable[[], int], watcher: int, write: int) -> NoReturn:
    """Runs the child; ends all below when it has ended, or the watcher has.

    A kill of the watcher with its process group does not reach it. The child stays in that group, for the terminal.
    """
    group, keeper = os.getpgrp(), os.getpid()
    os.setpgid(0, 0)
    adopt_orphans()
    child = os.fork()
    if child == 0:
        with suppress(PermissionError):  # the group has gone: so has the watcher
            os.setpgid(0, group)
        _be_child(run, keeper, write)
    for which in STOPS:
        signal.signal(which, lambda signum, _: os.kill(child, signum))
    signal.pthread_sigmask(signal.SIG_UNBLOCK, STOPS)
    ended, status = 0, 0
    while not ended and os.getppid() == watcher:
        time.sleep(_LOOK_S)
        ended, status = _waited_for(child)
        reap(child)
    for which in STOPS:
        signal.signal(which, signal.SIG_IGN)  # the child, whose pid may be another's by now, gets no more signals
    end_descendants()
    _remove_private()
    if ended:
        with suppress(OSError):
            os.write(write, f"{os.waitstatus_to_exitcode(status)}\n".encode())
    os._exit(0)


def _be_child(run: Callable[[], int], keeper: int, write: int) -> NoReturn:
    global _pipe
    _pipe = write
    die_with_parent(keeper)
    threading.Thread(target=_beat, daemon=True).start()
    code = 1
    try:
        code = run()
    except BaseException:
        traceback.print_exc()
    finally:
        with suppress(OSError):
            sys.stdout.flush()
            sys.stderr.flush()
        with suppress(OSError):
            _say(None)
        os._exit(code)


def _beat() -> None:
    with suppress(OSError):  # the watcher has gone, and the keeper ends us
        while True:
            _say({"calls": _calls})
            time.sleep(WATCHER_BEAT_S)
