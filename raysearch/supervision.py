"""A command that uses Ray runs in a child process, watched by one that does nothing else.

Ray puts its own handlers in place of ours, may hang in C++ code, and leaves daemons behind when its driver dies. The
watcher imports none of it, so it hears every signal, says one thing, and leaves nothing behind: whatever the child
has started comes to it when the child ends. It may be killed itself, and the kernel ends the child for it.
"""

from __future__ import annotations

import ctypes
import json
import os
import shlex
import signal
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from types import FrameType
from typing import Any, NamedTuple

from raysearch.errors import FAILURE, INPUT_ERROR, STOPS
from raysearch.hangup import let_go_of_terminal

GRACE_S = 6.0
"""[assumed] For a command that was told to stop to say what it kept; then it is ended. Every row is on disk already."""
START_ANEW = 75
"""Exit code of a child that is to run again, as sysexits.h has it for a failure that passes."""
MOST_STARTS = 4
"""[assumed] A Ray that died as often dies for a reason that stays."""
_LOOK_S = 0.05
_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36

_pipe: int | None = None
"""In the child: where it writes with what it can be gone on with, whether Ray starts, and null at its end."""


def supervised(run: Callable[[], int]) -> int:
    """Runs a command in a child process; returns its exit code, 128 + n if signal n stopped it.

    Args:
        run: The command, by sys.argv. It hears of a stop by the signal itself, once.
    """
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)
    stops = _Stops()
    end, going_on, anew = _End(START_ANEW), resumed_with(), False
    for _ in range(MOST_STARTS):
        end = _watch(run, stops)
        going_on = end.going_on or going_on
        if not end.passes or stops.signum is not None:
            break
        sys.argv[1:], anew = going_on or sys.argv[1:], True
    kept = kept_by(going_on) if going_on else ""
    rest = f"; {kept}" if kept else ""
    if stops.signum is not None:
        if end.code <= 128:  # it did not say so itself
            print(f"interrupted by {signal.Signals(stops.signum).name}{rest}", file=sys.stderr)
        return 128 + stops.signum
    if not end.reached:
        print(f"error: {end.why}{rest}", file=sys.stderr)
        return FAILURE
    stopped = end.code == FAILURE or (end.code == INPUT_ERROR and anew)  # the second: its cluster has not come back
    if stopped and kept and not end.going_on:
        print(f"note: {kept}", file=sys.stderr)
    return end.code


class _End(NamedTuple):
    """How a child ended.

    Attributes:
        code: Its exit code; negative if a signal ended it.
        going_on: What it can be gone on with, if it said so.
        reached: Whether it ran to its end; not if code that it called, or a signal, ended the process.
        amid_ray: Whether that was while Ray started.
    """

    code: int
    going_on: list[str] | None = None
    reached: bool = False
    amid_ray: bool = False

    @property
    def passes(self) -> bool:
        """Whether to try again: Ray has died, with this process if it pleased to end it."""
        return self.code == START_ANEW or (self.amid_ray and not self.reached)

    @property
    def why(self) -> str:
        """Why it did not run to its end."""
        if self.passes:
            return "Ray died again and again"
        if self.code < 0:
            return f"the command was ended by {signal.Signals(-self.code).name}"
        return f"code that the command called has ended its process, with exit code {self.code}"


def resumed_with() -> list[str] | None:
    """The arguments of a command that goes on with something: they do so again, from its first moment on."""
    return sys.argv[1:] if "--resume" in sys.argv else None


def kept_by(arguments: Sequence[str]) -> str:
    """What is said of a command that was stopped."""
    return f"every call so far is kept. Go on with: raysearch {shlex.join(arguments)}"


def can_go_on_with(arguments: Sequence[str]) -> None:
    """Tells the watcher how what was begun is gone on with: for its last words, and to do so when Ray dies."""
    _say(list(arguments))


@contextmanager
def starting_ray() -> Iterator[None]:
    """Tells the watcher that Ray starts, whose C++ code ends the process where that fails; it is to be tried again."""
    _say(True)
    try:
        yield
    finally:
        _say(False)


def _say(what: list[str] | bool | None) -> None:
    if _pipe is not None:
        os.write(_pipe, json.dumps(what).encode() + b"\n")


def private_prefix(pid: int) -> str:
    """How the names of a process's private folders begin, which its watcher removes if it cannot do so itself."""
    return f"raysearch-{pid}-"


def start_anew() -> None:
    """Ends this process at once, to be gone on with by another; returns where nobody watches."""
    if _pipe is not None:
        os._exit(START_ANEW)


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
    """Runs a child, and leaves nothing of what it started."""
    read, write = os.pipe()
    parent = os.getpid()
    sys.stdout.flush()
    sys.stderr.flush()
    signal.pthread_sigmask(signal.SIG_BLOCK, STOPS)
    child = os.fork()
    if child == 0:
        _be_child(run, parent, write)
    stops.child = child
    signal.pthread_sigmask(signal.SIG_UNBLOCK, STOPS)
    os.close(write)
    try:
        if stops.signum is not None:  # between two children
            os.kill(child, stops.signum)
        code = _wait_for(child, stops)
        os.set_blocking(read, False)
        said: list[Any] = []
        with suppress(BlockingIOError):
            said = [json.loads(line) for line in os.read(read, 1 << 16).splitlines()]
        going_on = [words for words in said if isinstance(words, list)]
        amid_ray = [flag for flag in said if isinstance(flag, bool)]
        return _End(code, going_on[-1] if going_on else None, None in said, amid_ray[-1:] == [True])
    finally:
        stops.child = None
        os.close(read)
        _end_descendants()
        _remove_private(child)


def _remove_private(child: int) -> None:
    """Removes what a child that was killed could not remove itself."""
    import shutil  # not before: signals are heard from the first moment on
    import tempfile

    for folder in Path(tempfile.gettempdir()).glob(f"{private_prefix(child)}*"):
        shutil.rmtree(folder, ignore_errors=True)


def _be_child(run: Callable[[], int], parent: int, write: int) -> None:
    global _pipe
    _pipe = write
    _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # it has gone already
        os._exit(1)
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


def _wait_for(child: int, stops: _Stops) -> int:
    while True:
        with suppress(InterruptedError):
            ended, status = os.waitpid(child, os.WNOHANG)
            if ended:
                return os.waitstatus_to_exitcode(status)
        _reap(child)
        if stops.signum is not None and time.monotonic() - stops.came_at_s > GRACE_S:
            with suppress(ProcessLookupError):
                os.kill(child, signal.SIGKILL)
        time.sleep(_LOOK_S)


def _reap(child: int) -> None:
    """Lets go of adopted processes that have ended, but not of the child, whose exit code is wanted."""
    for pid in _children():
        if pid != child:
            with suppress(ChildProcessError):
                os.waitpid(pid, os.WNOHANG)


def _end_descendants() -> None:
    """Kills all that the child left behind: its orphans are ours, and so are theirs once those are gone."""
    while children := _children():
        for pid in children:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        for pid in children:
            with suppress(ChildProcessError):
                os.waitpid(pid, 0)


def _children() -> list[int]:
    try:
        return [int(pid) for pid in Path(f"/proc/self/task/{os.getpid()}/children").read_text().split()]
    except OSError:  # a kernel without it
        return []


def _prctl(option: int, value: int) -> None:
    ctypes.CDLL(None, use_errno=True).prctl(option, value, 0, 0, 0)
