"""`raysearch tune-live` from the command line: benchmarks of both kinds, what is kept, going on, mistakes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from envs.chain import chained_line
from raysearch.app import app
from raysearch.errors import InputError, Interrupted, RunFailed
from raysearch.live.benchmark import of_command
from raysearch.live.session import HEAD_FILE, ROWS_FILE
from sim.config.described import Description, described_workload
from sim.layers.heuristics import megatron_dims
from sim.strategy import Strategy

MODEL = ("--model", "llama_3_1_8b", "--phase", "serve", "--isl", "1000", "--osl", "100", "--engine", "vllm")
WHAT = (*MODEL, "--max-gpus", "2", "--space", "paper")
TRUTH = """
import signal
from dataclasses import replace
from pathlib import Path
from raysearch.errors import Interrupted
from raysearch.simulators.measurement import Measurement
from sim.simulate import evaluate

def measure(workload, strategy):
    calls = Path(__file__).with_name("calls")
    made = len(calls.read_text()) if calls.exists() else 0
    stop = Path(__file__).with_name("stop")
    if stop.exists() and made == 1:
        stop.unlink()
        raise Interrupted(signal.SIGINT)
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


def run(*arguments: str) -> dict:
    result = CliRunner().invoke(app, ["tune-live", *arguments, "--json"], catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return json.loads(result.stdout)


def test_it_finds_the_best_and_keeps_every_measurement(benchmark: str, tmp_path: Path) -> None:
    found = run(*WHAT, "--benchmark", benchmark, "--out", str(tmp_path / "out"))
    assert found["known"]
    assert found["best"]["confidence"] >= 0.9
    assert found["best"]["interval"][0] <= found["best"]["tokens_per_s_per_gpu"] <= found["best"]["interval"][1]
    lines = (tmp_path / "out" / ROWS_FILE).read_text().splitlines()
    assert len(lines) == len(found["measurements"]) == len((tmp_path / "calls").read_text())
    words = ["export", str(tmp_path / "out"), "--to", "megatron", "--json"]
    exported = CliRunner().invoke(app, words, catch_exceptions=False)
    assert json.loads(exported.stdout)["strategy"] == found["best"]["strategy"]


def test_an_interrupted_tuning_goes_on_as_if_nothing_had_been(benchmark: str, tmp_path: Path) -> None:
    whole = run(*WHAT, "--benchmark", benchmark, "--out", str(tmp_path / "whole"))
    (tmp_path / "calls").unlink()
    (tmp_path / "stop").touch()
    with pytest.raises(Interrupted, match="1 measurements, all kept"):
        run(*WHAT, "--benchmark", benchmark, "--out", str(tmp_path / "out"))
    with (tmp_path / "out" / ROWS_FILE).open("a") as file:
        file.write('{"strategy": {"tp"')  # as a lost machine leaves it
    parts = run(*WHAT, "--benchmark", benchmark, "--out", str(tmp_path / "out"), "--resume")
    assert {**parts, "folder": ""} == {**whole, "folder": ""}
    assert len((tmp_path / "calls").read_text()) == len(whole["measurements"])


def test_another_tuning_is_not_gone_on_with(benchmark: str, tmp_path: Path) -> None:
    run(*WHAT, "--benchmark", benchmark, "--out", str(tmp_path / "out"))
    with pytest.raises(InputError, match="another tuning"):
        run(*WHAT, "--benchmark", benchmark, "--out", str(tmp_path / "out"), "--resume", "--within", "5%")


@pytest.mark.parametrize("damage", ["edited", "lost", "forged"])
def test_measurements_that_were_changed_are_put_aside_and_made_again(
    benchmark: str, tmp_path: Path, damage: str, caplog: pytest.LogCaptureFixture
) -> None:
    command = (*WHAT, "--benchmark", benchmark, "--confidence", "0.999", "--out", str(tmp_path / "out"))
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
        with pytest.raises(InputError, match="line 2 is damaged"):
            verified(tmp_path / "out")
    assert run(*command, "--resume") == whole
    assert "1 measurements before it are kept" in caplog.text
    assert (tmp_path / "out" / f"{ROWS_FILE}.0").exists()
    assert len((tmp_path / "calls").read_text()) == 2 * len(whole["measurements"]) - 1
    assert verified(tmp_path / "out") == 0


def verified(folder: Path) -> int:
    return CliRunner().invoke(app, ["verify", str(folder)], catch_exceptions=False).exit_code


def test_a_record_that_was_changed_is_refused(benchmark: str, tmp_path: Path) -> None:
    command = (*WHAT, "--benchmark", benchmark, "--out", str(tmp_path / "out"))
    run(*command)
    (tmp_path / "out" / HEAD_FILE).write_text("{}")
    for again in (lambda: run(*command, "--resume"), lambda: verified(tmp_path / "out")):
        with pytest.raises(InputError, match=r"is damaged.*bring it back from a copy, or use another folder$"):
            again()


@pytest.mark.parametrize(
    "end",
    [
        "sys.exit(0)",
        "raise KeyboardInterrupt",
        "raise GeneratorExit",
        "raise type('Own', (BaseException,), {})",
        "return type('Answer', (), {'__repr__': lambda self: sys.exit(0)})()",
        "return type('Answer', (), {'__repr__': lambda self: 1 / 0})()",
    ],
)
def test_a_benchmark_that_ends_the_process_has_failed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest, end: str
) -> None:
    name = f"ending_{abs(hash(request.node.name))}"
    (tmp_path / f"{name}.py").write_text(f"import sys\ndef measure(workload, strategy):\n    {end}\n")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(RunFailed, match=r"the benchmark .* failed.*0 measurements, all kept"):
        run(*WHAT, "--benchmark", f"{name}:measure", "--out", str(tmp_path / "out"), "--retries", "0")


def test_a_shell_command_is_a_benchmark_too(tmp_path: Path) -> None:
    command = """echo starting; printf '{"tokens_per_s_per_gpu": %d}\\n' $((100 * {batch} / {gpus}))"""
    found = run(*WHAT, "--command", command, "--out", str(tmp_path / "out"), "--max-measurements", "3")
    first = found["measurements"][0]
    gpus = first["strategy"]["tp"] * first["strategy"]["ep"] * first["strategy"]["pp"]
    assert first["tokens_per_s_per_gpu"] == 100 * first["strategy"]["batch"] // gpus
    if not found["known"]:
        assert found["ended_because"] == "--max-measurements was reached"


def test_it_says_when_no_candidate_is_left(tmp_path: Path) -> None:
    command = """printf '{"unsupported": "no such kernel"}\n'"""
    words = ["tune-live", *WHAT, "--command", command, "--out", str(tmp_path / "out"), "--max-measurements", "1000"]
    result = CliRunner().invoke(app, [*words, "--json"], catch_exceptions=False)
    assert result.exit_code == 3
    assert json.loads(result.stdout)["ended_because"] == "no candidate is left to measure"


@pytest.mark.parametrize(
    ("command", "said"),
    [
        ("echo no json", "JSON object"),
        ("echo out of luck >&2; exit 3", "exit code 3.*out of luck"),
        ("sleep 30", "more than 0.2 s"),
        ("""echo '{"tokens_per_s": 3}'""", "did you mean"),
        ("echo '{}'", "above 0"),
    ],
)
def test_a_benchmark_that_fails_is_an_error_and_no_low_score(command: str, said: str) -> None:
    workload = described_workload(Description("llama_3_1_8b", isl=100, osl=10))
    with pytest.raises(RunFailed, match=said):
        of_command(command, workload, timeout_s=0.2 if "sleep" in command else 30.0)(
            Strategy(1, 1, 1, 8, megatron_dims(workload.model))
        )


def test_mistakes_are_told_with_their_remedy() -> None:
    for arguments, said in (
        (WHAT, "--benchmark module:function or --command"),
        ((*WHAT, "--resume"), "--resume needs"),
    ):
        with pytest.raises(InputError, match=said):
            CliRunner().invoke(app, ["tune-live", *arguments], catch_exceptions=False)
