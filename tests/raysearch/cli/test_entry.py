"""How a command starts: whose bytecode and settings it reads, and on which streams; with what message it fails."""

from __future__ import annotations

import ast
import py_compile
import resource
import subprocess
import sys
from pathlib import Path

import pytest

from raysearch.base.errors import OUT_OF_MEMORY
from raysearch.cli.bytecode import cut_off_bytecode
from tests.conftest import CHECKOUT, command_environment

IMPORTING = """
import sys
sys.path.insert(0, sys.argv.pop(1))
import raysearch.cli.app
raysearch.cli.app.run_command = lambda: __import__("mine.cut")
from raysearch.cli.entry import start_command
start_command()
"""
PLOTTING = """
import sys
sys.argv[1:] = ["--version"]
from raysearch.cli.app import run_command
run_command()
import matplotlib
print(matplotlib.rcParams["text.usetex"], matplotlib.rcParams["backend"])
"""
MEASURING = """
import os, sys
from raysearch.cli.entry import start_command
sys.argv[1:] = ["--version"]
try:
    start_command()
finally:
    os.write(9, repr([os.readlink(f"/proc/self/fd/{number}") for number in range(3)]).encode())
"""
EXHAUSTING = """
import raysearch.cli.app
def run_command():
    raise MemoryError
raysearch.cli.app.run_command = run_command
from raysearch.cli.entry import start_command
start_command()
"""
CACHING = """
import sys
sys.dont_write_bytecode, sys.pycache_prefix = False, sys.argv[1]
import raysearch.base.errors
"""


@pytest.mark.slow
def test_bytecode_that_was_cut_off_is_named_with_what_mends_it(tmp_path: Path) -> None:
    package = tmp_path / "mine"
    package.mkdir()
    (package / "__init__.py").touch()
    (package / "cut.py").write_text("VALUES = [1, 2, 3]\n")
    compiled = Path(py_compile.compile(str(package / "cut.py"), doraise=True) or "")
    compiled.write_bytes(compiled.read_bytes()[:-20])
    run = [sys.executable, "-c", IMPORTING, str(tmp_path), "list"]
    done = subprocess.run(run, env=command_environment(), cwd=tmp_path, capture_output=True, text=True)
    assert (done.returncode, done.stderr.count("\n")) == (1, 1)
    assert done.stderr.startswith(f"error: Python's bytecode {compiled} is damaged: marshal data too short")
    mend = done.stderr.partition("run the command again: ")[2]
    subprocess.run(["sh", "-c", mend], check=True)
    assert not compiled.exists()
    assert mend.startswith(f"find {package} ")


def test_an_error_that_no_bytecode_is_behind_is_raised_again() -> None:
    with pytest.raises(ValueError, match="other"):
        cut_off_bytecode(ValueError("other"))


@pytest.mark.slow
def test_settings_of_plots_in_the_working_directory_are_not_read(tmp_path: Path) -> None:
    (tmp_path / "matplotlibrc").write_text("text.usetex: True\nbackend: module://evil\n")
    run = [sys.executable, "-P", "-c", PLOTTING]
    environment = command_environment() | {"MPLBACKEND": "agg"}
    done = subprocess.run(run, env=environment, cwd=tmp_path, capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[1:] == ["False agg"]


@pytest.mark.slow
@pytest.mark.parametrize(("limit", "kept"), [(4096, ["__init__"]), (-1, ["__init__", "errors"])])
def test_under_a_limit_on_file_sizes_no_bytecode_is_written(tmp_path: Path, limit: int, kept: list[str]) -> None:
    subprocess.run(
        [sys.executable, "-c", CACHING, str(tmp_path)],
        env=command_environment() | {"PYTHONPATH": str(CHECKOUT)},
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (limit, -1)),
        check=True,
    )
    ours = (tmp_path / str(CHECKOUT).removeprefix("/") / "raysearch").rglob("*.pyc")
    found = {path.name.partition(".")[0] for path in ours}
    assert found & {"__init__", "errors"} == set(kept)  # the package's own is written before it runs


@pytest.mark.slow
@pytest.mark.parametrize("closed", [(1,), (0, 2), (0, 1, 2)])
def test_streams_that_were_closed_lead_nowhere_and_to_no_file_of_ours(closed: tuple[int, ...]) -> None:
    shut = " ".join(f"{number}>&-" for number in closed)
    done = subprocess.run(
        ["sh", "-c", f'exec "$0" -c "$1" 9>&1 {shut}', sys.executable, MEASURING],
        env=command_environment(),
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        check=True,
    )
    places = ast.literal_eval(done.stdout[done.stdout.index("[") :])
    assert [number for number in range(3) if places[number] == "/dev/null"] == sorted({0, *closed})
    assert not done.stderr


@pytest.mark.slow
def test_memory_that_is_used_up_is_one_message() -> None:
    run = [sys.executable, "-c", EXHAUSTING, "list"]
    done = subprocess.run(run, env=command_environment(), capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (1, f"{OUT_OF_MEMORY}\n")
