"""What all tests share: a small workload of their own and a cache that is not the user's."""

from __future__ import annotations

import functools
import gc
import io
import os
import re
import signal
import subprocess
import sys
import traceback
import warnings
from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from pathlib import Path

# Before NumPy is imported: its threads wait for each other in loops, which doubles the CPU where the cores are busy.
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")

import hypothesis
import pytest
import typer.main
import typer.testing

from raysearch.base.errors import STOPS
from raysearch.cli import app
from tests.processes import LONGEST_S

hypothesis.settings.register_profile("drawn", max_examples=int(os.environ.get("RAYSEARCH_FUZZ", "0")) or 25)
hypothesis.settings.load_profile("drawn")  # of what states no number of examples itself

CHECKOUT = Path(__file__).resolve().parent.parent
Command = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture(scope="session", autouse=True)
def own_environment(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Keeps optima found by tests out of the user's cache, and tests away from the user's Ray.

    A shell that starts the tests in the background, or nohup, has signals ignored, and what they start inherits that.
    """
    for signum in STOPS:
        if signal.getsignal(signum) is signal.SIG_IGN:
            signal.signal(signum, signal.default_int_handler if signum == signal.SIGINT else signal.SIG_DFL)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RAYSEARCH_CACHE_DIR", str(tmp_path_factory.mktemp("cache")))
        patch.setenv("RAY_AUTH_MODE", "disabled")
        patch.delenv("RAY_ADDRESS", raising=False)
        patch.setenv("RAY_worker_niceness", "0")  # at its usual 15, workers starve beside the other tests
        patch.setenv("RAY_prestart_worker_first_driver", "0")  # a process for each CPU, used or not
        # Typer makes all commands anew for every call, which takes as long as many of the answers.
        for module in (typer.main, typer.testing):
            name = "get_command" if module is typer.main else "_get_command"
            patch.setattr(module, name, cached_command)
        yield


cached_command = functools.cache(typer.main.get_command)


@pytest.hookimpl(wrapper=True)
def pytest_collect_file() -> Generator[None, list[pytest.Collector], list[pytest.Collector]]:
    """Looks for examples in no file of tests, which would import those that are processes of their own."""
    return [each for each in (yield) if type(each) is pytest.Module]


def pytest_collection_finish() -> None:
    """Takes what was imported so far, some million objects, out of every later search for garbage, and searches seldom.

    Together they save a tenth and more of the tests' CPU.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(100_000, 50, 100)


def pytest_sessionfinish() -> None:
    """Leaves what the tests kept out of the searches for garbage with which pytest ends, of some seconds."""
    gc.collect()
    gc.freeze()


@contextmanager
def bests_alone() -> Iterator[None]:
    """Recommendations without what stands beside the best, half of the time: other spaces, gains, fronts."""
    with pytest.MonkeyPatch.context() as patch:
        for beside in ("_best_beside", "variations", "front"):
            patch.setattr(f"raysearch.deploy.recommend.recommendation.{beside}", lambda *_: ())
        yield


@pytest.fixture
def best_alone() -> Iterator[None]:
    """Of one test: see `bests_alone`."""
    with bests_alone():
        yield


@pytest.fixture(scope="module")
def every_best_alone() -> Iterator[None]:
    """Of all tests of a module: see `bests_alone`."""
    with bests_alone():
        yield


@contextmanager
def unsought_breaking_load() -> Iterator[None]:
    """Replays without the load at which the limits break: the larger part of what they take."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("raysearch.deploy.replay.replay_report._breaks_at", lambda *_: None)
        yield


@pytest.fixture
def breaking_load_unsought() -> Iterator[None]:
    """Of one test: see `unsought_breaking_load`."""
    with unsought_breaking_load():
        yield


@pytest.fixture(scope="session")
def tiny_workload(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A workload file with 16 combinations of degrees, so that its optimum is found in a moment."""
    text = (CHECKOUT / "configs/workloads/gpt_moe_1_2t_16k.toml").read_text(encoding="utf-8")
    text = text.replace('name = "gpt_moe_1_2t_16k"', 'name = "tiny"')
    for degree, values in {"tp": "[2, 4]", "ep": "[4, 16]", "pp": "[1, 2]", "batch": "[256, 1024]"}.items():
        text, found = re.subn(rf"(?m)^{degree} = \[.*?\]", f"{degree} = {values}", text)
        assert found == 1
    path = tmp_path_factory.mktemp("workloads") / "tiny.toml"
    path.write_text(text, encoding="utf-8")
    return path


@pytest.fixture(scope="session")
def raysearch() -> Command:
    """Runs a command to its end: `raysearch("list", "--json")`.

    Those that start Ray, and those in another folder, where they may find modules, are processes of their own; the
    others run in this one, whose imports they share. A search starts Ray for workers alone.
    """

    def run(*arguments: str | Path, cwd: Path | None = None) -> subprocess.CompletedProcess[str]:
        if cwd is None and (arguments[0] not in ("study", "tune-live") or "--help" in arguments):
            return run_here(*arguments)
        return subprocess.run(
            raysearch_command(*arguments),
            capture_output=True,
            text=True,
            cwd=cwd,
            env=command_environment(),
            timeout=LONGEST_S,
        )

    return run


def run_here(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
    """Runs a command in this process, its exit code and output as those of a process."""
    out, err = io.StringIO(), io.StringIO()
    with pytest.MonkeyPatch.context() as patch, redirect_stdout(out), redirect_stderr(err), warnings.catch_warnings():
        warnings.simplefilter("default")
        patch.setattr(sys, "argv", ["raysearch", *map(str, arguments)])
        try:
            code = app.run_command()
        except Exception:
            traceback.print_exc()
            code = 1
    return subprocess.CompletedProcess(list(arguments), code, out.getvalue(), err.getvalue())


def raysearch_command(*arguments: str | Path) -> list[str]:
    return [sys.executable, "-m", "raysearch", *map(str, arguments)]


def command_environment() -> dict[str, str]:
    """Lets the checkout be found from any working directory, installed or not."""
    return {**os.environ, "PYTHONPATH": str(CHECKOUT), "PYTHONWARNINGS": "default"}


@pytest.fixture
def start() -> Iterator[Callable[..., subprocess.Popen[str]]]:
    """Starts the command and leaves it running; what still runs at the end of the test is killed."""
    processes: list[subprocess.Popen[str]] = []

    def run(*arguments: str | Path, cwd: Path | None = None) -> subprocess.Popen[str]:
        process = subprocess.Popen(
            raysearch_command(*arguments),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            cwd=cwd,
            env=command_environment(),
            start_new_session=True,
        )
        processes.append(process)
        return process

    yield run
    for process in processes:
        if process.poll() is None:
            process.kill()
        process.communicate()
