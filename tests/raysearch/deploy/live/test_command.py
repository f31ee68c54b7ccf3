"""`raysearch tune-live` from the command line: benchmarks of both kinds, what is kept, going on, mistakes."""

from __future__ import annotations

import json
import os
import resource
import shlex
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import suppress
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from typer.testing import CliRunner

from envs.chain import Chain, chained_line, links
from raysearch.base.errors import InputError, Interrupted, RunFailed
from raysearch.cli.app import app
from raysearch.deploy.live.benchmark import checked_benchmark, of_command
from raysearch.deploy.live.deployment_candidates import Candidates, candidates_of
from raysearch.deploy.live.session import HEAD_FILE, ROWS_FILE, Folder, Settings, tune
from raysearch.simulators.measurement import Measurement
from sim.ops.heuristics import megatron_dims
from sim.optimum.spaces import heuristic_space
from sim.strategy import Strategy
from tests.processes import LONGEST_S, children, ended, wait_until
from tests.questions import question_about

MODEL = ("--model", "llama_3_1_8b", "--phase", "serve", "--isl", "1000", "--osl", "100", "--engine", "vllm")
WHAT = (*MODEL, "--gpus", "2", "--space", "paper")
TRUTH = """
import os, signal, time
from pathlib import Path
from sim.simulate import evaluate

def measure(workload, strategy):
    calls = Path(__file__).with_name("calls")
    made = len(calls.read_text()) if calls.exists() else 0
    stop = Path(__file__).with_name("stop")
    if stop.exists() and made == 1:
        command = int(stop.read_text())
        stop.unlink()
        os.kill(command, signal.SIGINT)
        time.sleep(600)
    calls.write_text("x" * (made + 1))
    found = evaluate(workload, strategy)
    return {"tokens_per_s_per_gpu": found.tokens_per_s_per_gpu * (1 - 0.1 * (strategy.tp == 1)), "tpot_s": found.tpot_s}
"""


@pytest.fixture
def benchmark(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> str:
    name = f"machine_{abs(hash(request.node.name))}"
    (tmp_path / f"{name}.py").write_text(TRUTH)
    monkeypatch.syspath_prepend(tmp_path)
    return f"{name}:measure"


@pytest.fixture(scope="module")
def candidates() -> Candidates:
    """Few, so that a decision over them is made in a moment."""
    workload = question_about("llama_3_1_8b", isl=100, osl=10).load()
    return Candidates(workload, candidates_of(heuristic_space(workload, sequence_parallel=False)).evaluations[:8])


@pytest.fixture
def interruptible() -> Iterator[None]:
    """Has SIGINT heard as the command hears it."""

    def stop(signum: int, _: object) -> None:
        raise Interrupted(signum)

    before = signal.signal(signal.SIGINT, stop)
    yield
    signal.signal(signal.SIGINT, before)


def run(*arguments: str) -> dict:
    result = CliRunner().invoke(app, ["tune-live", *arguments, "--json"], catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return json.loads(result.stdout)


@pytest.mark.slow
def test_it_finds_the_best_keeps_every_measurement_and_goes_on_with_no_other_tuning(
    benchmark: str, tmp_path: Path
) -> None:
    command = (*WHAT, "--benchmark", benchmark, "--out", str(tmp_path / "out"))
    found = run(*command)
    assert found["known"]
    assert found["best"]["confidence"] >= 0.9
    assert found["best"]["interval"][0] <= found["best"]["tokens_per_s_per_gpu"] <= found["best"]["interval"][1]
    lines = (tmp_path / "out" / ROWS_FILE).read_text().splitlines()
    assert len(lines) == len(found["measurements"]) == len((tmp_path / "calls").read_text())
    words = ["export", str(tmp_path / "out"), "--to", "megatron", "--json"]
    exported = CliRunner().invoke(app, words, catch_exceptions=False)
    assert json.loads(exported.stdout)["strategy"] == found["best"]["strategy"]
    with pytest.raises(InputError, match="another tuning"):
        run(*command, "--resume", "--set", "within=5%")
    (tmp_path / "out" / HEAD_FILE).write_text("{}")
    for again in (lambda: run(*command, "--resume"), lambda: verified(tmp_path / "out")):
        with pytest.raises(InputError, match=r"is damaged.*bring it back from a copy, or use another folder$"):
            again()


@pytest.mark.slow
def test_an_interrupted_tuning_goes_on_as_if_nothing_had_been(
    benchmark: str, tmp_path: Path, interruptible: None
) -> None:
    whole = run(*WHAT, "--benchmark", benchmark, "--out", str(tmp_path / "whole"))
    (tmp_path / "calls").unlink()
    (tmp_path / "stop").write_text(str(os.getpid()))
    with pytest.raises(Interrupted, match="1 measurements, all kept"):
        run(*WHAT, "--benchmark", benchmark, "--out", str(tmp_path / "out"))
    with (tmp_path / "out" / ROWS_FILE).open("a") as file:
        file.write('{"strategy": {"tp"')  # as a lost machine leaves it
    parts = run(*WHAT, "--benchmark", benchmark, "--out", str(tmp_path / "out"), "--resume")
    assert {**parts, "folder": ""} == {**whole, "folder": ""}
    assert len((tmp_path / "calls").read_text()) == len(whole["measurements"])


@pytest.mark.slow
@pytest.mark.parametrize("damage", ["edited", "lost", "forged"])
def test_measurements_that_were_changed_are_put_aside_and_made_again(
    benchmark: str, tmp_path: Path, damage: str, caplog: pytest.LogCaptureFixture
) -> None:
    command = (*WHAT, "--benchmark", benchmark, "--set", "certainty=0.999", "--out", str(tmp_path / "out"))
    whole = run(*command)
    assert verified(tmp_path / "out") == 0
    rows = tmp_path / "out" / ROWS_FILE
    first, second, *others = rows.read_text().splitlines(keepends=True)
    changed = second.replace('"tokens_per_s_per_gpu": ', '"tokens_per_s_per_gpu": 9')
    if damage == "forged":  # right by its digest, but no measurement
        body = b'"call": 2, "strategy": 7'
        changed = chained_line(first.partition(', "call"')[0].encode(), body, json.loads(first)["digest"])[0].decode()
        others = []
    rows.write_text("".join([first, *([] if damage == "lost" else [changed]), *others]))
    if damage != "forged":
        with pytest.raises(RunFailed, match="line 2 is damaged"):
            verified(tmp_path / "out")
    assert run(*command, "--resume") == whole
    assert "1 measurements before it are kept" in caplog.text
    assert (tmp_path / "out" / f"{ROWS_FILE}.0").exists()
    assert len((tmp_path / "calls").read_text()) == 2 * len(whole["measurements"]) - 1
    assert verified(tmp_path / "out") == 0


def verified(folder: Path) -> int:
    return CliRunner().invoke(app, ["verify", str(folder)], catch_exceptions=False).exit_code


@pytest.mark.slow
@pytest.mark.parametrize(
    "end",
    [
        "sys.exit(0)",
        "raise KeyboardInterrupt",
        "raise GeneratorExit",
        "raise type('Own', (BaseException,), {})",
        "return type('Answer', (), {'__repr__': lambda self: sys.exit(0)})()",
        "return type('Answer', (), {'__repr__': lambda self: 1 / 0})()",
        "os._exit(0)",
        "os.abort()",
        "time.sleep(600)",
    ],
)
def test_a_benchmark_that_ends_the_process_has_failed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest, end: str
) -> None:
    name = f"ending_{abs(hash(request.node.name))}"
    (tmp_path / f"{name}.py").write_text(f"import os, sys, time\ndef measure(workload, strategy):\n    {end}\n")
    monkeypatch.syspath_prepend(tmp_path)
    why = r"the benchmark.* (failed|cannot be used|took more than 3 s).*0 measurements, all kept"
    patience = ("--set", "retries=0", "--set", "timeout_s=3")
    with pytest.raises(RunFailed, match=why):
        run(*WHAT, "--benchmark", f"{name}:measure", "--out", str(tmp_path / "out"), *patience)


def test_a_shell_command_is_a_benchmark_too(tmp_path: Path) -> None:
    command = """echo starting; printf '{"tokens_per_s_per_gpu": %d}\\n' $((100 * {batch} / {gpus}))"""
    found = run(*WHAT, "--benchmark", command, "--out", str(tmp_path / "out"), "--budget", "3")
    first = found["measurements"][0]
    gpus = first["strategy"]["tp"] * first["strategy"]["ep"] * first["strategy"]["pp"]
    assert first["tokens_per_s_per_gpu"] == 100 * first["strategy"]["batch"] // gpus
    if not found["known"]:
        assert found["ended_because"] == "--budget was reached"


@pytest.mark.slow
def test_it_says_when_no_candidate_is_left(tmp_path: Path) -> None:
    command = """printf '{"unsupported": "no such kernel"}\n'"""
    words = ["tune-live", *WHAT, "--benchmark", command, "--out", str(tmp_path / "out"), "--budget", "1000"]
    result = CliRunner().invoke(app, [*words, "--json"], catch_exceptions=False)
    assert result.exit_code == 3
    assert json.loads(result.stdout)["ended_because"] == "no candidate is left to measure"


def quoted(statement: str) -> str:
    return shlex.join([sys.executable, "-c", f"import os, sys\n{statement}"])


@pytest.mark.parametrize(
    ("command", "message"),
    [
        ("echo no json", "JSON object"),
        ("true", "JSON object on its last line, got 'nothing'"),
        ("echo out of luck >&2; exit 3", "exit code 3.*out of luck"),
        ("sleep 30", "more than 0.3 s"),
        ("sleep 30 & exec >&- 2>&-; sleep 30", "more than 0.3 s"),
        ("""echo '{"tokens_per_s": 3}'""", "did you mean"),
        ("echo '{}'", "above 0"),
        ("echo 7", "JSON object"),
        ("""echo '{"tpot_s": 1, "tpot_s": 2}'""", "JSON object"),
        ("""echo '{"unsupported": "\\ud800"}'""", "JSON object"),
        ("""echo '{"unsupported": 5}'""", "expected `unsupported` to be text, got 5"),
        ("""echo '{"unsupported": {"a": 7}}'""", "cannot be used"),
        (quoted("print('[' * 100_000)"), "JSON object"),
        (quoted("""print('{"tokens_per_s_per_gpu": 1' + '0' * 4000 + '}')"""), "JSON object"),
        (quoted("""print('{"unsupported": "' + 'x' * 2_000_000 + '"}')"""), "JSON object"),
        (quoted("while True: print('x' * 100_000)"), "more than 0.3 s"),
        (quoted("""sys.stdout.write('{"tokens_per_s_per_gpu": 7')"""), "JSON object"),
        (quoted("sys.stdout.buffer.write(os.urandom(10**6) + bytes([10, 255, 0]))"), "JSON object"),
        (quoted("sys.stderr.buffer.write(os.urandom(10**6)); sys.exit(1)"), "exit code 1"),
    ],
)
def test_a_benchmark_that_fails_is_an_error_of_one_line_and_no_low_score(command: str, message: str) -> None:
    with pytest.raises(RunFailed, match=message) as failure:
        measured_by(command, timeout_s=0.3 if message == "more than 0.3 s" else 30.0)
    assert str(failure.value).isprintable()
    assert len(str(failure.value)) < 2000


def measured_by(command: str, timeout_s: float = 30.0) -> Measurement:
    workload = question_about("llama_3_1_8b", isl=100, osl=10).load()
    return of_command(command, workload, timeout_s)(Strategy(1, 1, 1, 8, megatron_dims(workload.model)))


@pytest.mark.parametrize("figure", [10**40, np.float32(7.0), Fraction(7, 2)])
def test_a_figure_of_any_kind_of_number_is_kept_and_decided_on(
    tmp_path: Path, figure: Any, candidates: Candidates
) -> None:
    folder = Folder(tmp_path, candidates, Settings())
    answers = {"tokens_per_s_per_gpu": figure, "tpot_s": 0.01, "gpus": np.int64(1)}

    def measure(candidate: int) -> Measurement:
        folder.keep(
            candidate, found := checked_benchmark(answers, candidates.workload, candidates.strategies[candidate])
        )
        return found

    assert list(tune(candidates, Settings(), measure, folder.begin(), 2))
    assert {each.measurement.tokens_per_s_per_gpu for each in folder.resume()} == {float(figure)}


def test_half_a_character_in_an_answer_is_kept_as_a_question_mark(tmp_path: Path, candidates: Candidates) -> None:
    folder = Folder(tmp_path, candidates, Settings())
    folder.begin()
    folder.keep(0, checked_benchmark({"unsupported": "no \ud800"}, candidates.workload, candidates.strategies[0]))
    assert [each.measurement.unsupported for each in folder.resume()] == ["no ?"]


def test_only_the_last_line_counts_and_what_was_printed_before_is_not_kept_whoever_still_prints() -> None:
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    answer = """'{"tokens_per_s_per_gpu": 7}'"""
    latin = quoted(
        """sys.stdout.buffer.write(bytes([233, 10, 0, 10]) + b'{"tokens_per_s_per_gpu": 7}' + bytes([10, 10]))"""
    )
    assert measured_by(latin).tokens_per_s_per_gpu == 7
    flood = quoted(f"print('x' * 3 * 10**7); print({answer})")
    assert measured_by(flood).tokens_per_s_per_gpu == 7
    assert measured_by(f"echo {answer}; sleep 30 & true").tokens_per_s_per_gpu == 7
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 20_000  # kB


def test_a_failed_measurement_is_tried_again_as_often_as_was_stated(tmp_path: Path) -> None:
    count = f"echo x >> {tmp_path}/tries; test $(wc -l < {tmp_path}/tries) -ge 3 && "
    command = count + """printf '{"tokens_per_s_per_gpu": %d}\n' {batch}"""
    words = (*WHAT, "--tpot-ms", "0", "--benchmark", command, "--budget", "2")
    with pytest.raises(RunFailed, match="exit code 1"):
        run(*words, "--out", str(tmp_path / "impatient"), "--set", "retries=1")
    (tmp_path / "tries").unlink()
    assert len(run(*words, "--out", str(tmp_path / "patient"), "--set", "retries=2")["measurements"]) == 2


@pytest.mark.parametrize(
    ("option", "message"),
    [
        (("--set", "retries=-1"), "--set retries: expected a whole number from 0 to 1,000, got '-1'"),
        (("--set", "timeout_s=0"), "timeout_s must be above 0 s"),
        (("--set", "timeout_s=nan"), "--set timeout_s: expected a number from 0 to 2,592,000"),
    ],
)
def test_impossible_patience_is_refused_before_anything_runs(
    tmp_path: Path, option: tuple[str, str], message: str
) -> None:
    with pytest.raises(InputError, match=message):
        run(*WHAT, "--benchmark", f"touch {tmp_path}/ran", "--out", str(tmp_path / "out"), *option)
    assert list(tmp_path.iterdir()) == []


def test_a_measurement_that_a_full_disk_takes_a_part_of_is_not_kept(tmp_path: Path, candidates: Candidates) -> None:
    folder = Folder(tmp_path, candidates, Settings())
    folder.begin()
    folder.keep(0, Measurement(100.0, 0.01))
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, ((tmp_path / ROWS_FILE).stat().st_size + 10, before[1]))
        with pytest.raises(OSError, match="too large"):
            folder.keep(1, Measurement(99.0, 0.01))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert [measured.candidate for measured in Folder(tmp_path, candidates, Settings()).resume()] == [0]


@pytest.mark.slow
def test_going_on_reads_each_measurement_once(benchmark: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    command = (*WHAT, "--benchmark", benchmark, "--set", "certainty=0.999", "--out", str(tmp_path / "out"))
    whole = run(*command)
    read: list[int] = []

    def counted(path: Path) -> Iterator[tuple[bytes, Chain]]:
        for line, chain in links(path):
            read.append(chain.lines)
            yield line, chain

    monkeypatch.setattr("raysearch.deploy.live.session.links", counted)
    assert run(*command, "--resume") == whole
    assert read == list(range(1, len(whole["measurements"]) + 1))


ENGINE = """
for cleared in "env -i" ""; do
    $cleared setsid sh -c 'echo $$ >> {folder}/pids; exec sleep 600' &
done
echo $$ >> {folder}/pids
wait
"""
SERVER = """
import os, subprocess
from pathlib import Path

def measure(workload, strategy):
    environments = ({"PATH": os.environ["PATH"]}, None)
    engines = [subprocess.Popen(["sleep", "600"], start_new_session=True, env=each) for each in environments]
    Path(__file__).with_name("pids").write_text(f"{os.getpid()} {engines[0].pid} {engines[1].pid}")
    engines[0].wait()
"""


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "victims"), [("command", 1), ("benchmark", 3), ("command", 4), ("benchmark", 4)])
def test_a_tuning_that_is_killed_takes_its_benchmark_along_or_is_not_gone_on_with_while_that_lives(
    tmp_path: Path, start: Callable[..., subprocess.Popen[str]], kind: str, victims: int
) -> None:
    (tmp_path / "server.py").write_text(SERVER)
    given = (
        ("--benchmark", ENGINE.replace("{folder}", str(tmp_path)))
        if kind == "command"
        else ("--benchmark", "server:measure")
    )
    words = ("tune-live", *WHAT, *given, "--out", tmp_path / "out")
    process = start(*words, cwd=tmp_path)
    pids = tmp_path / "pids"
    wait_until(lambda: pids.exists() and len(pids.read_text().split()) == 3)
    benchmarks = [int(pid) for pid in pids.read_text().split()]
    (keeper,) = children(process.pid)
    (command,) = children(keeper)
    (guard,) = children(command)
    killed = (process.pid, keeper, command, guard)[:victims]
    for pid in killed:
        os.kill(pid, signal.SIGSTOP)  # so that none of them can do anything about it
    for pid in killed:
        os.kill(pid, signal.SIGKILL)
    process.wait()  # for the command alone: a benchmark that lives on has its stderr
    if victims < 4:
        wait_until(lambda: all(ended(pid) for pid in (*benchmarks, keeper, command, guard)))
        return
    wait_until(lambda: sum(ended(pid) for pid in benchmarks) == 1)  # what the guard itself has started
    resumed = start(*words, "--resume", cwd=tmp_path)
    _, stderr = resumed.communicate(timeout=LONGEST_S)
    assert resumed.returncode == 2
    (line,) = stderr.splitlines()
    assert "still runs; end it first: kill -9 " in line
    named = set(map(int, line.rpartition("kill -9 ")[2].split()))
    assert {pid for pid in benchmarks if not ended(pid)} <= named  # with an empty environment, too
    for pid in named:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    wait_until(lambda: all(ended(pid) for pid in benchmarks))


@pytest.mark.slow
def test_mistakes_are_reported_with_their_remedy() -> None:
    for arguments, message in (
        ((*WHAT, "--benchmark", "nowhere:measure", "--resume"), "--resume needs"),
        ((*WHAT, "--benchmark", "nowhere:measure"), "cannot import nowhere"),
    ):
        with pytest.raises(InputError, match=message):
            CliRunner().invoke(app, ["tune-live", *arguments], catch_exceptions=False)
