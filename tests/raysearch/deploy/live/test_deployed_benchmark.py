"""Benchmarks of servers that are started: scripts, what tools say, and a tuning with programs that stand for both."""

from __future__ import annotations

import contextlib
import json
import os
import random
import socket
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path

import pytest

from raysearch.answers.exported import ExportResult
from raysearch.base.errors import InputError, RunFailed
from raysearch.deploy.export.deployment import Deployment
from raysearch.deploy.live.benchmark import checked_benchmark, opened_benchmark
from raysearch.deploy.live.benchmark_tools import benchmark_tool, measurement_of
from raysearch.deploy.live.deployed_benchmark import (
    BENCHMARK_FILE,
    BENCHMARK_SCRIPT,
    LAST_MEASUREMENT,
    _answers,
    measure_deployed,
)
from raysearch.simulators.measurement import Measurement
from sim.ops.heuristics import megatron_dims
from sim.strategy import Strategy
from tests.processes import wait_until
from tests.questions import question_about
from tests.raysearch.forging import WRONG, encoded, places, replaced
from tests.raysearch.fuzzing import INPUTS, broken

TOOLS = ("aiperf", "vllm-bench", "genai-perf", "guidellm")
PROFILE = {
    "output_token_throughput": {"unit": "tokens/sec", "avg": 800.0},
    "inter_token_latency": {"unit": "ms", "avg": 20.0},
    "time_to_first_token": {"unit": "ms", "avg": 300.0},
}
METRICS = {"output_tokens_per_second": 800.0, "inter_token_latency_ms": 20.0, "time_to_first_token_ms": 300.0}
STATED = {
    "aiperf": PROFILE,
    "genai-perf": PROFILE,
    "vllm-bench": {"output_throughput": 800.0, "mean_tpot_ms": 20.0, "mean_ttft_ms": 300.0},
    "guidellm": {
        "benchmarks": [{"metrics": {name: {"successful": {"mean": value}} for name, value in METRICS.items()}}]
    },
}


NAME = """org/it's $(touch X) "`touch X`" """


def deployment(batch: int = 4) -> Deployment:
    workload = question_about("llama_3_1_8b", isl=1000, osl=100, gpus=8, engine="vllm").load()
    return Deployment(workload, Strategy(2, 1, 1, batch, megatron_dims(workload.model)), NAME, replicas=2)


def exported(folder: Path, tool: str) -> Path:
    ExportResult.of({"": deployment()}, "vllm").measured_by(tool).write(folder)
    return folder


def program(folder: Path, name: str, code: str) -> None:
    """A program of that name, first on the path."""
    folder.mkdir(exist_ok=True)
    (folder / name).write_text(f"#!{sys.executable}\nimport json, os, pathlib, sys\n{code}\n")
    (folder / name).chmod(0o755)


def writes(tool: str) -> str:
    """Code of a tool that writes its results, and what it was told beside them."""
    path = f"results/{benchmark_tool(tool).file}"
    code = f"pathlib.Path('results').mkdir(); pathlib.Path({path!r}).write_text({json.dumps(STATED[tool])!r})"
    return f"{code}; pathlib.Path('told').write_text(json.dumps(sys.argv[1:])); print('progress')"


@pytest.mark.slow
@pytest.mark.parametrize("tool", TOOLS)
def test_the_script_measures_what_runs_and_prints_what_tune_live_reads(tool: str, tmp_path: Path) -> None:
    folder = exported(tmp_path / "out", tool)
    program(tmp_path / "bin", tool.partition("-bench")[0], writes(tool))
    path = f"{tmp_path / 'bin'}:{Path(sys.executable).parent}:{os.environ['PATH']}"
    url = "http://there:1?a=b&c"
    ran = subprocess.run(
        ["sh", BENCHMARK_SCRIPT],
        cwd=folder,
        env={**os.environ, "PATH": path, "URL": url},
        capture_output=True,
        text=True,
    )
    assert ran.returncode == 0, ran.stderr
    assert json.loads(ran.stdout) == asdict(Measurement(200.0, 0.02, 4, ttft_s=0.3))  # on 2 x 2 GPUs
    words = " ".join(json.loads((folder / "told").read_text()))
    for word in (url, NAME, "1000", "100", "8", "40"):  # 2 replicas of batch 4, five rounds of them
        assert word in words or json.dumps(word)[1:-1] in words  # GuideLLM's own options are JSON
    assert not (folder / "X").exists()
    without = subprocess.run(["sh", BENCHMARK_SCRIPT], cwd=folder, env={"PATH": path}, capture_output=True, text=True)
    assert without.returncode != 0
    assert "URL" in without.stderr


def test_results_that_are_missing_or_lack_a_figure_are_no_measurement(tmp_path: Path) -> None:
    tool = benchmark_tool("aiperf")
    with pytest.raises(RunFailed, match="no results in"):
        measurement_of(tool, tmp_path, 2)
    (tmp_path / tool.file).write_text(json.dumps({**PROFILE, "inter_token_latency": {}}))
    with pytest.raises(RunFailed, match="lacks a figure: 'avg'"):
        measurement_of(tool, tmp_path, 2)
    with pytest.raises(InputError, match="did you mean 'aiperf'"):
        benchmark_tool("aiprf")


@pytest.mark.parametrize("name", TOOLS)
def test_results_that_are_forged_are_a_measurement_or_refused(name: str, tmp_path: Path) -> None:
    tool, asked = benchmark_tool(name), deployment()
    for seed in range(INPUTS):
        rng = random.Random(f"{name} {seed}")
        wrong = rng.choice([*WRONG, "8", 1e-300, 1e300, [STATED[name]]])
        content = encoded(replaced(STATED[name], rng.choice(list(places(STATED[name]))), wrong), rng)
        (tmp_path / tool.file).write_bytes(broken(content, rng) if rng.random() < 0.2 else content)
        with contextlib.suppress(RunFailed):
            measured = measurement_of(tool, tmp_path, 2)
            assert checked_benchmark(measured, asked.workload, asked.strategy) == measured


@pytest.mark.slow
def test_the_reader_of_results_says_in_one_line_what_it_misses(tmp_path: Path) -> None:
    reads = [sys.executable, "-m", "raysearch.deploy.live.benchmark_tools"]
    ran = subprocess.run([*reads, "aiperf", str(tmp_path), "2"], capture_output=True, text=True)
    assert (ran.returncode, ran.stderr.count("\n")) == (1, 1)
    assert ran.stderr.startswith(f"error: no results in {tmp_path}")


@pytest.mark.parametrize(
    "url",
    ["nonsense", "file:///etc/passwd", "http://a b\n:x/", "http://h:99999999/", f"http://{'a' * 300}/", "http://"],
)
def test_an_address_that_is_no_server_s_is_refused_before_anything_starts(url: str, tmp_path: Path) -> None:
    folder = exported(tmp_path / "out", "aiperf")
    benchmark = json.loads((folder / BENCHMARK_FILE).read_text())
    (folder / BENCHMARK_FILE).write_text(json.dumps(benchmark | {"url": url}))
    asked = deployment()
    with pytest.raises(InputError, match="url: "):
        measure_deployed(folder, tmp_path, asked.workload, asked.strategy)


def test_a_folder_that_export_did_not_write_is_no_benchmark_and_no_shell_command(tmp_path: Path) -> None:
    with (
        pytest.raises(InputError, match=r"has no benchmark\.json: write one with export --benchmark TOOL"),
        opened_benchmark(str(tmp_path), deployment().workload, 10.0, tmp_path),
    ):
        pass


_SERVES = """
import http.server
batch = sys.argv[sys.argv.index("--max-num-seqs") + 1]
if batch == "64":
    sys.exit("CUDA out of memory")
class Answers(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200 if self.path == "/health" else 404)
        self.end_headers()
http.server.HTTPServer(("localhost", PORT), Answers).serve_forever()
"""


def test_a_folder_s_benchmark_starts_each_strategy_measures_it_and_ends_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = exported(tmp_path / "out", "aiperf")
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
    benchmark = json.loads((folder / BENCHMARK_FILE).read_text())
    benchmark |= {"url": f"http://localhost:{port}", "start_s": 60}
    (folder / BENCHMARK_FILE).write_text(json.dumps(benchmark))
    program(tmp_path / "bin", "vllm", f"PORT = {port}\n{_SERVES}")
    program(tmp_path / "bin", "aiperf", writes("aiperf"))
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}:{os.environ['PATH']}")
    asked, tuning = deployment(), tmp_path / "tuning"
    tuning.mkdir()
    (tuning / LAST_MEASUREMENT).symlink_to(tmp_path / "bin")  # where somebody points elsewhere, nothing is lost there
    before = {each.name for each in folder.iterdir()}
    with opened_benchmark(str(folder), asked.workload, 120.0, tuning) as measure:
        assert measure(asked.strategy) == Measurement(400.0, 0.02, 2, ttft_s=0.3)
        failed = measure(deployment(batch=64).strategy)
        assert "ended with exit code 1 before it answered: CUDA out of memory" in failed.unsupported
        program(tmp_path / "bin", "aiperf", r"sys.stderr.buffer.write(b'\xff '); sys.exit('no such model')")
        with pytest.raises(RunFailed, match="aiperf ended with 1: \ufffd no such model"):
            measure(asked.strategy)
        stale = subprocess.Popen(["vllm", "serve", "--max-num-seqs", "1"], stderr=subprocess.DEVNULL)
        wait_until(lambda: stale.poll() is not None or _answers(benchmark["url"]))
        with pytest.raises(RunFailed, match=f"a server answers at http://localhost:{port} already: end it"):
            measure(asked.strategy)
        stale.kill()
        stale.wait()
        assert "CUDA out of memory" not in (tuning / LAST_MEASUREMENT / "server.log").read_text()
    assert {each.name for each in folder.iterdir()} == before
    assert [each.name for each in tuning.iterdir()] == [LAST_MEASUREMENT]
    probe = subprocess.run(
        [sys.executable, "-c", f"import socket; socket.create_connection(('localhost', {port}), 1)"],
        capture_output=True,
    )
    assert probe.returncode  # nothing listens any more
