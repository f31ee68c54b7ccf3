"""Each process of a command is stopped, killed or denied the disk, and the clock is set: rows stay, nothing is left.

A few disturbances in the default run; by `make fuzz` each process of a study, a search and a tuning, in each way, at
three moments of one run.
"""

from __future__ import annotations

import functools
import os
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import pytest

from raysearch.base.file_io import write_bytes
from raysearch.deploy.export.source import TUNED_FILE
from raysearch.deploy.live.session import ROWS_FILE as MEASUREMENTS_FILE
from raysearch.runs.records import SUMMARY_FILE
from raysearch.studies.results import read_study_runs
from tests.conftest import command_environment
from tests.processes import LONGEST_S, Started, children, descendants, started_by
from tests.raysearch.gated import BOXES, BUDGET, digests, holds_rows, rows_of, undisturbed, write_study
from tests.raysearch.gated import let_pass as let_pass

CHAOS = """
import sys
from raysearch.cli import main as cli
from raysearch.processes import vigil, watcher
watcher.WATCHER_SILENT_S, vigil.VIGIL_SILENT_S = 10.0, 5.0
watcher.MOST_STARTS = 100  # limits as short as these are passed on a busy machine, too
sys.argv[0] = "raysearch"
cli.main()
"""
JUMPING = """
import os, time
real = time.time
def jumped():
    with open(os.environ["CHAOS_CLOCK"]) as file:
        return real() + float(file.read())
time.time = jumped
"""
RAYS = {"gcs_server": "/gcs_server\0", "raylet": "/raylet\0", "worker": "ray::SimulatorWorker"}
MEASURE = """
while [ $(cat out/measurements.jsonl 2>/dev/null | wc -l) -ge $(cat gate) ]; do sleep 0.1; done
echo '{"tokens_per_s_per_gpu": 1'{tp}{batch}'}'
"""
Disturbed = tuple[str, str, int]
"""How, whom, and after how many rows."""


@dataclass(frozen=True)
class Commanded:
    """A command that starts processes.

    Attributes:
        words: What it is called with, but `--out` and `--resume`, given its folder and a workload's file.
        kinds: Its processes.
        moments: Rows after which one is disturbed.
        result: What it ends with, bit for bit, given its folder.
        rows: How many are on disk.
        last: The file that it writes last.
    """

    words: Callable[[Path, Path], list[str]]
    kinds: tuple[str, ...]
    moments: tuple[int, ...]
    result: Callable[[Path], object]
    rows: Callable[[Path], int]
    last: str


def of_a_study(folder: Path, workload: Path) -> list[str]:
    study = write_study(folder, workload, searchers=["annealing"], timeout_s=LONGEST_S)
    return ["study", str(study), "--set", "cpus=2"]


def of_a_search(_: Path, workload: Path) -> list[str]:
    box = ["--simulator", f"{BOXES}gated", "--set", "workers=1", "--set", f"timeout_s={LONGEST_S}"]
    return ["search", "-w", str(workload), "-s", "annealing", "--seed", "0", "--budget", str(BUDGET), *box]


def of_a_tuning(_: Path, workload: Path) -> list[str]:
    given = [
        "--benchmark",
        MEASURE,
        "--set",
        "certainty=0.999",
        "--budget",
        "6",
        "--set",
        "timeout_s=15",
        "--set",
        "retries=9",
    ]
    return ["tune-live", "-w", str(workload), "--space", "paper", *given]


def lines_of(path: Path) -> int:
    return path.read_bytes().count(b"\n") if path.exists() else 0


OWN = ("watcher", "keeper", "command")
COMMANDS = {
    "study": Commanded(
        of_a_study,
        (*OWN, *RAYS, "run"),
        (0, 20, 45),
        lambda out: digests(out)["annealing"],
        rows_of,
        f"runs/tiny-annealing-s0/{SUMMARY_FILE}",
    ),
    "search": Commanded(
        of_a_search,
        (*OWN, *RAYS),
        (0, 20, 45),
        lambda out: next(run["digest"] for run in read_study_runs(out)),
        lambda out: lines_of(out / "rows.jsonl"),
        SUMMARY_FILE,
    ),
    "tune-live": Commanded(
        of_a_tuning,
        (*OWN, "benchmark"),
        (0, 2, 4),
        lambda out: (out / MEASUREMENTS_FILE).read_bytes(),
        lambda out: lines_of(out / MEASUREMENTS_FILE),
        TUNED_FILE,
    ),
}
ENDS = {("KILL", "watcher"), ("KILL", "keeper"), ("KILL", "command")}
"""What the command does not survive; whoever asks for it with --resume goes on."""
TOO_BUSY = "no worker started within"
"""Told by a run on a machine that is too busy to start a process in two minutes; it may be gone on with."""
LOOK_S = 0.2
"""Between two looks at all processes of the machine, which take a few hundredths of a second."""
LONG = int(os.environ.get("RAYSEARCH_FUZZ", "0")) > 0
SCENARIOS: list[tuple[str, tuple[Disturbed, ...]]] = [
    (
        "study",
        (
            ("STOP", "worker", 5),
            ("STOP", "run", 15),
            ("clock", "all", 20),
            ("KILL", "watcher", 40),
        ),
    ),
    (
        "tune-live",
        (
            ("KILL", "benchmark", 1),
            ("clock", "all", 2),
            ("STOP", "benchmark", 2),
            ("STOP", "command", 3),
            ("KILL", "command", 4),
        ),
    ),
    *(
        (name, tuple((how, kind, rows) for rows in command.moments))
        for name, command in COMMANDS.items()
        for how, kinds in (*((how, command.kinds) for how in ("STOP", "KILL", "full disk")), ("clock", ("all",)))
        for kind in kinds
        if LONG
    ),
]


def called(scenario: tuple[str, tuple[Disturbed, ...]]) -> str:
    return "-".join([scenario[0], *("_".join(map(str, each)) for each in scenario[1])])


@pytest.fixture
def begun() -> Iterator[list[subprocess.Popen[str]]]:
    """Commands of a test; what a test that failed leaves of them is ended."""
    commands: list[subprocess.Popen[str]] = []
    yield commands
    for process in commands:
        for pid in [process.pid, *descendants(process.pid)] if process.poll() is None else []:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)


@pytest.mark.slow
@pytest.mark.timeout(2000 if not LONG else 6000)
@pytest.mark.parametrize("scenario", SCENARIOS, ids=called)
def test_chaos_changes_no_row_and_leaves_nothing(
    tiny_workload: Path,
    tmp_path: Path,
    let_pass: Callable[[int], None],
    monkeypatch: pytest.MonkeyPatch,
    begun: list[subprocess.Popen[str]],
    undisturbed_result: Callable[[str], object],
    record_property: Callable[[str, object], None],
    scenario: tuple[str, tuple[Disturbed, ...]],
) -> None:
    name, disturbances = scenario
    command = COMMANDS[name]
    (clock := tmp_path / "clock").write_text("0")
    (tmp_path / "jumping").mkdir()
    (tmp_path / "jumping/sitecustomize.py").write_text(JUMPING)
    monkeypatch.setenv("CHAOS_CLOCK", str(clock))
    out = tmp_path / "out"
    words = [sys.executable, "-c", CHAOS, *command.words(tmp_path, tiny_workload), "--out", str(out)]
    own = command_environment()
    own["PYTHONPATH"] = f"{tmp_path / 'jumping'}{os.pathsep}{own['PYTHONPATH']}"
    started, messages, found = set[Started](), list[str](), dict[str, int]()

    def begin() -> subprocess.Popen[str]:
        resume = ["--resume"] if out.exists() and list(out.glob("*.json")) else []
        process = subprocess.Popen(
            [*words, *resume],
            cwd=tmp_path,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
            env=own,
            start_new_session=True,
        )
        begun.append(process)
        return process

    def gone(killed: str = "") -> None:
        process.wait()
        ended_s = time.monotonic()
        if killed == "watcher":  # else it has the last word
            wait_until(lambda: all(each.ended for each in started))
        assert all(each.ended for each in started)
        record_property("left_s", time.monotonic() - ended_s)
        messages.append(process.communicate()[1])  # until nobody has it open any more

    def living() -> bool:
        found.clear()
        found.update(victims(process, out))
        return found.keys() >= set(command.kinds)

    def may_end() -> bool:
        return TOO_BUSY in messages[-1] or "full disk" in {how for how, _, _ in disturbances}

    def go_on_until(true: Callable[[], bool]) -> None:
        nonlocal process
        while not true():
            if process.poll() is not None:
                gone()
                assert may_end(), "\n".join(messages)
                process = begin()
            time.sleep(LOOK_S)

    let_pass(0)  # by a file that is replaced: one that is written to is empty for a moment
    process = begin()
    for how, kind, rows in disturbances:
        process.send_signal(signal.SIGCONT)  # to a watcher that was stopped before
        let_pass(rows)
        go_on_until(lambda rows=rows: command.rows(out) >= rows)
        go_on_until(living)
        started |= started_by(process.pid)
        disturb(how, found.get(kind, 0), clock)
        if (how, kind) in ENDS:
            gone(killed=kind)
            process = begin()
    let_pass(1000)
    while process.poll() is None:
        started |= started_by(process.pid)
        time.sleep(LOOK_S)
        if disturbances[-1][:2] == ("STOP", "watcher") and (out / command.last).exists():
            os.kill(process.pid, signal.SIGCONT)
    gone()
    while process.returncode:  # a disk without room is told, and gone on with once there is some
        assert may_end(), "\n".join(messages)
        process = begin()
        gone()
    assert process.returncode == 0, "\n".join(messages)
    assert not any("Traceback" in each for each in messages), "\n".join(messages)
    assert command.result(out) == undisturbed_result(name)


@pytest.fixture(scope="session")
def undisturbed_result(tiny_workload: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], object]:
    """What a command ends with where nobody disturbs it; each is worked out once."""

    @functools.cache
    def result(name: str) -> object:
        folder = tmp_path_factory.mktemp(name)
        if name != "tune-live":
            return undisturbed(tiny_workload, folder)["annealing"]
        (folder / "gate").write_text("1000")
        words = [sys.executable, "-m", "raysearch", *of_a_tuning(folder, tiny_workload), "--out", "out"]
        subprocess.run(words, cwd=folder, env=command_environment(), check=True, capture_output=True)
        return COMMANDS[name].result(folder / "out")

    return result


def wait_until(true: Callable[[], bool]) -> None:
    """Waits as long as the test may take: how long that is says nothing but how busy the machine is."""
    while not true():
        time.sleep(LOOK_S)


def victims(process: subprocess.Popen[str], out: Path) -> dict[str, int]:
    """The living processes of a command by their kind."""
    titles = descendants(process.pid)
    found = {"watcher": process.pid}
    for pid, title in titles.items():
        found |= {kind: pid for kind, part in RAYS.items() if part in title}
        if "cat gate" in title and "raysearch" not in title:
            found.setdefault("benchmark", pid)  # its subshells, which last for a moment, are called the same
        if holds_rows(pid, out):
            found["run"] = pid
    for keeper in children(process.pid) if process.poll() is None else []:
        found["keeper"] = keeper
        found |= dict(zip(["command"], children(keeper), strict=False))
    return found


def disturb(how: str, pid: int, clock: Path) -> None:
    if how == "clock":
        write_bytes(clock, b"-1e6" if clock.read_text() != "0" else b"1e6")  # never empty to whoever reads it
    elif how == "full disk":
        resource.prlimit(pid, resource.RLIMIT_FSIZE, (0, resource.RLIM_INFINITY))  # what it starts has it, too
    else:
        os.kill(pid, getattr(signal, f"SIG{how}"))
