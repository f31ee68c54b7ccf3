"""Whatever stands in the name of a folder or in a file, nothing that is printed moves a cursor or adds a line."""

from __future__ import annotations

import functools
import io
import json
import os
import re
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from rich.control import strip_control_codes

from raysearch.base import progress
from raysearch.base.console import InertConsole
from raysearch.base.terminal import inert, inert_output, verbatim
from raysearch.cli import app
from raysearch.runs.records import RunSpec
from raysearch.runs.run import SearchRun
from tests.raysearch.forging import forge, places

HOSTILE = "a\x1b[2J\x1b]0;t\x07\r\b\x9b3m\u202e[red]:bomb:[x]b"
OBEYED = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e]")


def of(value: Any, at: tuple[str | int, ...]) -> Any:
    return functools.reduce(lambda inside, key: inside[key], at, value)


@pytest.fixture
def hostile(tiny_workload: Path, tmp_path: Path) -> Path:
    """A finished search in a folder of such a name, with a workload of such a path."""
    folder = tmp_path / HOSTILE
    folder.mkdir()
    shutil.copy(tiny_workload, workload := folder / f"{HOSTILE}.toml")
    run = SearchRun(RunSpec(str(workload), "random", seed=0, budget=4), folder / "out")
    run.advance(4)
    run.finish()
    return folder


@pytest.fixture
def printed(capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Callable[..., str]:
    def run(*words: object) -> str:
        monkeypatch.setattr(sys, "argv", ["raysearch", *map(str, words)])
        code = app.run_command()
        captured = capfd.readouterr()
        assert code in (0, 1, 2, 3), captured.err
        return captured.out + captured.err

    return run


@pytest.mark.slow
def test_no_name_of_a_folder_or_a_file_reaches_the_terminal_as_it_is(
    hostile: Path, printed: Callable[..., str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    workload, out = next(hostile.glob("*.toml")), hostile / "out"
    strategy = ("--tp", 2, "--ep", 4, "--batch", 256, "--dims", "megatron")
    commands = [
        *([name, out] for name in ("status", "report", "verify", "export")),
        *([name, hostile] for name in ("status", "report", "verify", "export", "replay", "calibrate", "validate")),
        ["evaluate", "-w", workload, *strategy, "--out", hostile / "e"],
        ["explain", "-w", workload, *strategy, "--out", hostile / "p.svg"],
        ["export", "-w", workload, *strategy, "--to", "megatron", "--out", hostile / "m"],
        ["search", "-w", workload, "-s", "random", "--budget", 2, "--out", hostile / "s"],
        ["place", workload],
        ["study", hostile / "none.toml"],
        ["evaluate", "--model", hostile, "--isl", 10, "--osl", 1, "--tp", 1, "--batch", 1],
        [HOSTILE],
    ]
    monkeypatch.chdir(hostile)
    for command in commands:
        output = printed(*command)
        assert output
        assert not OBEYED.search(output), (command, output)
    for name in ("run.json", "summary.json"):
        whole = json.loads((out / name).read_text())
        for at in (at for at in places(whole) if isinstance(of(whole, at), str | None)):
            forged = Path(shutil.copytree(out, tmp_path / "forged", dirs_exist_ok=True))
            forge(forged / name, at, HOSTILE)
            for look in ("status", "report", "verify"):
                assert not OBEYED.search(printed(look, forged)), (name, at)


def test_a_table_and_progress_show_names_as_text(monkeypatch: pytest.MonkeyPatch) -> None:
    page = io.StringIO()
    console = InertConsole(file=page, force_terminal=True, color_system="standard", width=200)
    console.print(HOSTILE, style="bold")
    monkeypatch.setattr(progress, "console", console)
    with progress.telling(HOSTILE) as tell:
        tell(HOSTILE)
    with progress.searching(HOSTILE, 3) as show:
        show({"calls": 1, "best": 1.0})
    own = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", page.getvalue()).replace("\r", "")  # Rich's colours and its cursor
    assert not OBEYED.search(own)
    shown = inert(strip_control_codes(HOSTILE))
    assert own.count(shown) >= 3
    assert "\x1b[1m" in page.getvalue()


def test_what_goes_to_a_file_or_a_program_is_as_it_was_built(capfd: pytest.CaptureFixture[str]) -> None:
    with inert_output():
        print(HOSTILE, file=verbatim(sys.stdout))
    assert capfd.readouterr().out == f"{HOSTILE}\n"
    with open(os.open("/dev/ptmx", os.O_RDWR | os.O_NOCTTY), "w") as terminal:
        assert verbatim(terminal) is terminal


@pytest.mark.parametrize("word", ["a\nerror: b", "--out=a\nb", "\udcff"], ids=repr)
def test_a_word_of_several_lines_or_of_no_text_is_refused(printed: Callable[..., str], word: str) -> None:
    output = printed("status", word)
    assert output.startswith("error: ")
    assert output.count("\n") == 1


def test_a_stream_that_is_closed_is_left_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdout", None)
    with inert_output():
        print("nowhere")
    assert sys.stdout is None
