"""Commands that are told to stop, at any moment and twice; a Ray that dies; and who may talk to a Ray of ours."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from raysearch.base.errors import STOPS
from raysearch.cli import main as cli
from raysearch.studies.results import verify
from tests.conftest import command_environment
from tests.processes import LONGEST_S, children, descendants, hears, listening, started_by, wait_until
from tests.raysearch.gated import let_pass as let_pass

CHILD = """
import os, signal, subprocess, sys, time
from pathlib import Path
from raysearch.cli import main as cli
from raysearch.processes import watcher as supervision
def run():
    {}
cli._run, supervision.GRACE_S = run, 0.5
supervision.WATCHER_SILENT_S, supervision.WATCHER_BEAT_S = 3.0, 0.2
sys.argv = ["raysearch", "study"]
cli.main()
"""
SAY = "print('ready', *sys.argv[1:], flush=True)"
ORPHAN = "global orphan; orphan = subprocess.Popen(['sleep', '600'], start_new_session=True)"
DEAF = "[signal.signal(s, signal.SIG_IGN) for s in (2, 15, 1)]; signal.pthread_sigmask(signal.SIG_UNBLOCK, (2, 15, 1))"
GOES_ON = "supervision.can_go_on_with(['study', 'mine', '--resume'])"


def start_child(*statements: str) -> subprocess.Popen[str]:
    script = CHILD.format("\n    ".join(statements))
    return subprocess.Popen(
        [sys.executable, "-c", script],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=command_environment(),
        start_new_session=True,
    )


@pytest.mark.slow
@pytest.mark.parametrize("signum", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def test_a_command_that_hears_nothing_is_ended_with_all_it_has_started_and_one_message(signum: int) -> None:
    process = start_child(DEAF, GOES_ON, ORPHAN, SAY, "time.sleep(600)")
    assert process.stdout is not None
    assert process.stdout.readline() == "ready study\n"
    started = started_by(process.pid)
    assert len(started) == 3  # the keeper, the command, and its orphan
    process.send_signal(signum)
    process.send_signal(signum)
    _, stderr = process.communicate(timeout=LONGEST_S)
    name = signal.Signals(signum).name
    rest = "every call so far is kept. Go on with: raysearch study mine --resume"
    assert stderr == f"interrupted by {name}; {rest}\n"
    assert process.returncode == 128 + signum
    assert all(each.ended for each in started)


@pytest.mark.slow
def test_a_command_that_was_reported_to_stop_when_it_had_done_all_has_succeeded() -> None:
    watcher = "int(Path(f'/proc/{os.getppid()}/stat').read_text().rpartition(')')[2].split()[1])"  # the keeper's parent
    process = start_child(DEAF, GOES_ON, SAY, f"os.kill({watcher}, signal.SIGTERM)", "return 0")
    assert process.communicate(timeout=LONGEST_S) == ("ready study\n", "")
    assert process.returncode == 0


@pytest.mark.slow
def test_a_command_that_dies_leaves_nothing_behind_and_says_how_to_go_on() -> None:
    process = start_child(GOES_ON, ORPHAN, SAY, "os.kill(os.getpid(), signal.SIGKILL)")
    _, stderr = process.communicate(timeout=LONGEST_S)
    assert process.returncode == 1
    assert stderr.startswith(
        "error: the command was ended by SIGKILL; every call so far is kept. Go on with: raysearch "
    )


@pytest.mark.slow
@pytest.mark.parametrize("code", [2, 3])
def test_a_mistake_is_not_followed_by_how_to_go_on(code: int) -> None:
    process = start_child("sys.argv += ['--resume']", f"return {code}")
    assert process.communicate(timeout=LONGEST_S) == ("", "")
    assert process.returncode == code


@pytest.mark.slow
@pytest.mark.parametrize("code", [0, 3])
def test_a_command_that_other_code_ended_has_not_succeeded(code: int) -> None:
    process = start_child(SAY, GOES_ON, f"os._exit({code})")
    _, stderr = process.communicate(timeout=LONGEST_S)
    assert process.returncode == 1
    what = f"code that the command called has ended its process, with exit code {code}"
    assert stderr.startswith(f"error: {what}; every call so far is kept.")


@pytest.mark.slow
@pytest.mark.parametrize("end", ["os._exit(1)", "os.abort()"])
def test_a_ray_that_ends_the_process_while_it_starts_is_started_anew(end: str) -> None:
    process = start_child(SAY, "ray = supervision.starting_ray()", "ray.__enter__()", end)
    printed, stderr = process.communicate(timeout=LONGEST_S)
    assert printed == "ready study\n" * 4
    assert stderr == "error: Ray died again and again\n"
    assert process.returncode == 1


@pytest.mark.slow
def test_a_ray_that_has_started_has_nothing_to_do_with_an_end() -> None:
    process = start_child("with supervision.starting_ray(): pass", SAY, "os._exit(1)")
    assert process.communicate(timeout=LONGEST_S)[0] == "ready study\n"


@pytest.mark.slow
def test_a_command_whose_ray_has_died_is_gone_on_with_and_given_up_at_last() -> None:
    process = start_child(SAY, GOES_ON, "supervision.start_anew()")
    printed, stderr = process.communicate(timeout=LONGEST_S)
    assert printed.splitlines() == ["ready study", *["ready study mine --resume"] * 3]
    assert stderr.startswith("error: Ray died again and again")
    assert process.returncode == 1


@pytest.mark.slow
def test_a_command_that_gets_on_is_begun_anew_however_often_its_ray_dies(tmp_path: Path) -> None:
    starts = f"starts = open({str(tmp_path / 'starts')!r}, 'a+'); starts.write('x'); starts.seek(0)"
    further = "made = min(len(starts.read()), 3); starts.close(); supervision.got_on(made); time.sleep(0.5)"
    process = start_child(SAY, GOES_ON, starts, further, "supervision.start_anew()")
    printed, stderr = process.communicate(timeout=LONGEST_S)
    assert len(printed.splitlines()) == 3 + 4  # and is given up when it gets no further
    assert stderr.startswith("error: Ray died again and again")


@pytest.mark.slow
def test_a_command_that_cannot_go_on_once_its_ray_has_died_says_how_to_later() -> None:
    again = "if '--resume' in sys.argv: return 2"
    process = start_child(again, GOES_ON, "supervision.start_anew()")
    assert process.communicate(timeout=LONGEST_S)[1].startswith("note: every call so far is kept. Go on with: ")
    assert process.returncode == 2


AGAIN = "if '--resume' in sys.argv: return 0"


@pytest.mark.slow
@pytest.mark.parametrize("victim", ["keeper", "command"])
def test_a_command_that_is_stopped_is_reported_of_and_begun_anew(victim: str) -> None:
    process = start_child(GOES_ON, SAY, AGAIN, ORPHAN, "time.sleep(600)")
    assert process.stdout is not None
    assert process.stdout.readline() == "ready study\n"
    started = started_by(process.pid)
    os.kill(kin(process)[victim], signal.SIGSTOP)
    printed, stderr = process.communicate(timeout=LONGEST_S)
    assert (printed, process.returncode) == ("ready study mine --resume\n", 0)
    assert stderr == "note: the command gave no sign of life for 3 s and is restarted\n"
    assert all(each.ended for each in started)


@pytest.mark.slow
def test_a_command_that_hangs_and_lets_no_thread_of_its_own_run_is_begun_anew() -> None:
    process = start_child(SAY, AGAIN, GOES_ON, "import ctypes; ctypes.PyDLL(None).sleep(600)")
    printed, stderr = process.communicate(timeout=LONGEST_S)
    assert printed == "ready study\nready study mine --resume\n"
    assert stderr.startswith("note: the command gave no sign of life")
    assert process.returncode == 0


@pytest.mark.slow
def test_a_command_that_hangs_again_and_again_is_given_up() -> None:
    process = start_child(SAY, GOES_ON, "import ctypes; ctypes.PyDLL(None).sleep(600)")
    printed, stderr = process.communicate(timeout=LONGEST_S)
    assert len(printed.splitlines()) == 4
    assert stderr.splitlines()[-1].startswith(
        "error: the command fell silent again and again; every call so far is kept"
    )
    assert process.returncode == 1


@pytest.mark.slow
def test_a_command_that_is_paused_as_a_whole_goes_on() -> None:
    process = start_child(SAY, "time.sleep(3)", "print('done')", "return 0")
    assert process.stdout is not None
    process.stdout.readline()
    for signum in (signal.SIGSTOP, signal.SIGCONT):
        os.killpg(process.pid, signum)  # as Ctrl-Z and fg do: all but the keeper
        time.sleep(5)
    assert process.communicate(timeout=LONGEST_S) == ("done\n", "")


@pytest.mark.slow
@pytest.mark.parametrize("victim", ["watcher", "keeper", "group"])
def test_whichever_is_killed_nothing_that_was_started_is_left(victim: str) -> None:
    process = start_child(GOES_ON, ORPHAN, SAY, "time.sleep(600)")
    assert process.stdout is not None
    process.stdout.readline()
    started = started_by(process.pid)
    if victim == "group":
        os.killpg(process.pid, signal.SIGKILL)
    else:
        os.kill(kin(process)[victim], signal.SIGKILL)
    _, stderr = process.communicate(timeout=LONGEST_S)
    wait_until(lambda: all(each.ended for each in started))
    if victim == "keeper":
        assert stderr.startswith("error: the command was ended by SIGKILL; every call so far is kept. Go on with: ")


def kin(process: subprocess.Popen[str]) -> dict[str, int]:
    """The processes between the shell and what the command starts."""
    (keeper,) = children(process.pid)
    (command,) = children(keeper)
    return {"watcher": process.pid, "keeper": keeper, "command": command}


def test_a_signal_that_came_before_it_could_be_heard_is_one_message_too(capsys: pytest.CaptureFixture[str]) -> None:
    before = {signum: signal.getsignal(signum) for signum in STOPS}
    signal.pthread_sigmask(signal.SIG_BLOCK, STOPS)
    try:
        signal.pthread_kill(threading.get_ident(), signal.SIGTERM)
        assert cli._run() == 128 + signal.SIGTERM
    finally:
        for signum, handler in before.items():
            signal.signal(signum, handler)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, STOPS)
    assert capsys.readouterr().err == "interrupted by SIGTERM\n"


class Finalised:
    """Is told to stop as it goes, where Python ignores exceptions."""

    def __del__(self) -> None:
        signal.raise_signal(signal.SIGTERM)


def test_a_signal_amid_a_finaliser_is_one_message_too(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def run() -> int:
        Finalised()
        time.sleep(60)
        return 0

    before = {signum: signal.getsignal(signum) for signum in (*STOPS, signal.SIGALRM)}
    hook, timer = sys.unraisablehook, signal.getitimer(signal.ITIMER_REAL)
    monkeypatch.setattr("raysearch.cli.app.run_command", run)
    try:
        assert cli._run() == 128 + signal.SIGTERM
    finally:
        for signum, handler in before.items():
            signal.signal(signum, handler)
        signal.setitimer(signal.ITIMER_REAL, *timer)  # pytest-timeout's
    assert sys.unraisablehook is hook
    assert capsys.readouterr().err == "interrupted by SIGTERM\n"


Happened = Callable[["subprocess.Popen[str]"], object]


def after(seconds: float) -> Happened:
    until_s = time.monotonic() + seconds
    return lambda process: time.monotonic() > until_s and hears(process.pid, signal.SIGTERM)


def raylet_runs(process: subprocess.Popen[str]) -> bool:
    return any("/raylet\0" in title for title in descendants(process.pid).values())


LONG = int(os.environ.get("RAYSEARCH_FUZZ", "0")) > 0
MOMENTS: list[tuple[Callable[[], Happened], signal.Signals]] = [
    (lambda: after(0.3), signal.SIGTERM),
    (lambda: raylet_runs, signal.SIGINT),
    *((lambda s=tenth / 10: after(s), STOPS[tenth % 3]) for tenth in range(3, 120, 4) if LONG),
]


@pytest.mark.slow
@pytest.mark.timeout(900 + LONG * 7200)
def test_a_study_that_is_stopped_twice_at_any_moment_says_so_once_and_leaves_nothing(
    tiny_workload: Path, tmp_path: Path, start: Callable[..., subprocess.Popen[str]]
) -> None:
    keys = {"name": "s", "workloads": [str(tiny_workload)], "seeds": [0], "searchers": ["random"], "budget": 10**8}
    study, out = tmp_path / "study.toml", tmp_path / "out"
    study.write_text("".join(f"{key} = {json.dumps(value)}\n" for key, value in keys.items()))
    for moment, signum in MOMENTS:
        begun = (out / "study.json").exists()
        process = start("study", study, "--out", out, "--set", "cpus=1", *(["--resume"] if begun else []))
        happened = moment()
        while not happened(process):
            assert process.poll() is None, process.communicate()
            time.sleep(0.02)
        started = started_by(process.pid)
        for _ in range(2):
            os.killpg(process.pid, signum)  # as a terminal does: to all that was started from it
        _, stderr = process.communicate(timeout=LONGEST_S)
        assert process.returncode == 128 + signum, stderr
        assert stderr.count("interrupted") == 1, stderr
        assert "Traceback" not in stderr
        assert all(each.ended for each in started)
        if (out / "study.json").exists():
            assert verify(out).damaged == {} if list(out.glob("runs/*/run.json")) else True
            assert "--resume" in stderr


STRANGER = """
import os, sys
import ray
try:
    ray.init(sys.argv[1], logging_level="ERROR")
except ConnectionError as error:
    print("refused")
else:
    print("let in")
"""


@pytest.mark.slow
def test_a_ray_of_ours_lets_nobody_in_without_its_token(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import ray

    from raysearch.processes.connection import CLUSTERS_VARIABLE, NICENESS_VARIABLE, connected

    assert not ray.is_initialized()
    for name in ("RAY_prestart_worker_first_driver", NICENESS_VARIABLE):
        monkeypatch.delenv(name)
    before, heard = tokens(), [signal.getsignal(which) for which in STOPS]
    with connected(cpus=2):
        assert [signal.getsignal(which) for which in STOPS] == heard
        address = ray.get_runtime_context().gcs_address
        assert address.startswith("127.0.0.1:")
        unasked = ("/default_worker.py\0", "ray::IDLE\0")
        assert not any(part in title for title in descendants(os.getpid()).values() for part in unasked)
        assert ray.get(ray.remote(lambda: os.nice(0)).remote()) == os.nice(0)
        token = Path(os.environ["RAY_AUTH_TOKEN_PATH"])
        assert (token.stat().st_mode & 0o777, token.parent.stat().st_mode & 0o777) == (0o600, 0o700)
        (sockets,) = token.parent.glob("ray/session_2*/sockets")
        assert not any(path.name == sockets.parent.name for path in Path("/tmp/ray").glob("session_*"))
        assert {"raylet", "plasma_store"} <= {path.name for path in sockets.iterdir()}
        rays = descendants(os.getpid())
        assert any("/gcs_server\0" in title for title in rays.values())
        assert not any(part in title for title in rays.values() for part in ("monitor.py\0", "dashboard.py\0"))
        assert not any(token.read_text() in text for pid in rays for text in (rays[pid], environment_of(pid)))
        own = {name: value for name, value in command_environment().items() if "RAY_AUTH" not in name}
        assert own[CLUSTERS_VARIABLE] == "0"  # so that they, too, ask at 127.0.0.1
        strangers = [
            subprocess.Popen(
                [sys.executable, "-c", STRANGER, address],
                env={**own, **mode, "HOME": str(tmp_path)},
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                text=True,
            )
            for mode in (
                {"RAY_AUTH_MODE": "disabled"},
                {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": "0" * 64},
                {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN_PATH": str(token)},
            )
        ]  # at a time: each tries for half a minute
        assert [stranger.communicate()[0] for stranger in strangers] == [*["refused\n"] * 2, "let in\n"]
        assert {host for host, _ in listening([os.getpid(), *descendants(os.getpid())])} == {"127.0.0.1"}
    assert tokens() == before
    assert not token.exists()


def environment_of(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/environ").read_text(errors="replace")
    except OSError:  # it has ended meanwhile
        return ""


def tokens() -> dict[str, str]:
    return {name: value for name, value in os.environ.items() if name.startswith("RAY_")}
