"""The command as processes of its own: its forms, its JSON, its errors, its signals, its start."""

from __future__ import annotations

import contextlib
import json
import os
import pty
import re
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from envs.rows import read_rows
from raysearch.runs.records import RunSpec
from raysearch.runs.run import SearchRun
from tests.conftest import command_environment, raysearch_command, run_here
from tests.processes import LONGEST_S, wait_until

Command = Callable[..., subprocess.CompletedProcess[str]]
Start = Callable[..., "subprocess.Popen[str]"]

STRATEGY = ("--tp", "8", "--ep", "16", "--pp", "2", "--batch", "512")
DIMS = "2,1,1,0,2,2,2,2,1,1,0,2"


def evaluate(*changes: str) -> tuple[str, ...]:
    """Arguments of a good evaluation; later options win over earlier ones."""
    return ("evaluate", "--workload", "gpt_moe_1_2t_16k", *STRATEGY, "--dims", DIMS, *changes)


@pytest.mark.parametrize(
    "command", ["list", "evaluate", "explain", "optimum", "search", "study", "report", "verify-rules"]
)
def test_every_command_has_help_with_examples_and_json(raysearch: Command, command: str) -> None:
    shown = raysearch(command, "--help")
    assert shown.returncode == 0
    assert f"raysearch {command}" in shown.stdout.split("Examples:")[1]
    assert "--json" in shown.stdout


def test_help_and_version_have_the_flags_that_everybody_tries(raysearch: Command) -> None:
    assert raysearch("-h").stdout == raysearch("--help").stdout
    assert raysearch("evaluate", "-h").stdout == raysearch("evaluate", "--help").stdout
    assert re.fullmatch(r"raysearch \d+\.\d+\.\d+\S*\n", raysearch("--version").stdout)


COARSE = ("--set", "batches=powers_of_two")
QUESTION = ("--model", "llama_3_1_8b", "--isl", "1000", "--osl", "100", "--tpot-ms", "0.01", *COARSE)


@pytest.mark.parametrize(
    "command", [("optimum", "--gpus", "2"), ("recommend", "--gpus", "2"), ("pools", "--gpus", "2")]
)
def test_where_nothing_is_feasible_the_process_ends_with_3(raysearch: Command, command: tuple[str, ...]) -> None:
    asked = raysearch(*command, *QUESTION)
    assert asked.returncode == 3, asked.stderr
    assert asked.stdout


def test_a_damaged_search_has_a_status_of_1(raysearch: Command, tmp_path: Path) -> None:
    run = SearchRun(RunSpec("gpt_moe_1_2t_16k", "random", seed=0, budget=5), tmp_path)
    run.advance(5)
    run.finish()
    assert raysearch("status", tmp_path).returncode == 0
    (tmp_path / "rows.parquet").write_bytes(b"")
    result = raysearch("status", tmp_path)
    assert (result.returncode, "damaged" in result.stdout) == (1, True)


@pytest.mark.parametrize(
    ("command", "default"),
    [("search", "4000, 300 of prior, or a heuristic's whole sweep"), ("study", "$RAY_ADDRESS, else a local Ray")],
)
def test_help_says_what_holds_without_an_option(raysearch: Command, command: str, default: str) -> None:
    assert default in " ".join(raysearch(command, "--help").stdout.replace("│", " ").split())


def test_evaluate_tells_all_about_one_strategy(raysearch: Command) -> None:
    answer = json.loads(raysearch(*evaluate("--json")).stdout)
    assert {"feasible", "tokens_per_s_per_gpu", "tpot_s", "memory_bytes", "gpus", "violations", "ops"} <= answer.keys()
    assert answer["gpus"] == 8 * 16 * 2
    assert len(answer["ops"]) == 12
    kinds = dict(answer["memory_bytes"])
    assert kinds.pop("total") == pytest.approx(sum(kinds.values()))


@pytest.mark.parametrize(("phase", "slo"), [("decode", "--ttft-ms"), ("prefill", "--tpot-ms")])
def test_an_slo_that_a_phase_cannot_break_is_taken_with_a_warning(raysearch: Command, phase: str, slo: str) -> None:
    answer = json.loads(raysearch(*of_model("--isl", "10", "--osl", "1", "--phase", phase, slo, "9", "--json")).stdout)
    (warning,) = answer["warnings"]
    assert "limits nothing" in warning


def test_evaluate_prints_every_op_and_why_a_strategy_is_not_allowed(raysearch: Command) -> None:
    good, bad = raysearch(*evaluate()), raysearch(*evaluate("--batch", "1000000"))
    for op in ("qkv_proj", "dispatch", "combine", "kv cache", "Violations: none"):
        assert op in good.stdout
    assert bad.returncode == 3
    broken = bad.stdout.split("\n")[2]  # below the heading
    assert broken.startswith("Infeasible: ")
    assert bad.stdout.count(broken.removeprefix("Infeasible: ")[:30]) == 1
    assert "Violations" not in bad.stdout


def test_evaluate_knows_the_heuristics_dims(raysearch: Command) -> None:
    plain, named = (json.loads(raysearch(*evaluate("--dims", dims, "--json")).stdout) for dims in (DIMS, "megatron"))
    assert plain == named
    split = json.loads(raysearch(*evaluate("--dims", "megatron-sp", "--json")).stdout)
    assert split["strategy"]["dims"] != plain["strategy"]["dims"]


def test_optimum_tells_the_exact_best(raysearch: Command, tiny_workload: Path) -> None:
    answer = json.loads(raysearch("optimum", "--workload", tiny_workload, "--json").stdout)
    assert {"tokens_per_s_per_gpu", "strategy", "space_size", "feasible_share", "wall_s"} <= answer.keys()
    assert set(answer["strategy"]) == {"tp", "ep", "pp", "batch", "dims"}
    assert answer["space_size"] == answer["distinct_size"] == 16 * 3**12  # with tp 2 and 4 every choice matters
    few = json.loads(raysearch("optimum", "--workload", tiny_workload, "--set", "landscape=no", "--json").stdout)
    assert "quantiles" not in few
    assert few["tokens_per_s_per_gpu"] == pytest.approx(answer["tokens_per_s_per_gpu"], rel=1e-12)
    again = raysearch("optimum", "--workload", tiny_workload)
    assert f"{answer['tokens_per_s_per_gpu']:,.2f} tokens/s/GPU" in again.stdout


def test_optimum_warns_where_another_format_s_best_is_several_times_faster(raysearch: Command) -> None:
    form = ("optimum", "--model", "qwen3_235b_a22b", "--phase", "serve", "--isl", "1024", "--osl", "1024", "--json")
    limits = ("--engine", "vllm", "--tpot-ms", "50", "--gpus", "4", *COARSE, "--set", "landscape=no")
    slow, published = (json.loads(raysearch(*form, *limits, *weights).stdout) for weights in (("--weights", "fp8"), ()))
    assert published["precisions"]["weights"] == "fp8_block"  # the form in which Qwen publishes it
    times = published["tokens_per_s_per_gpu"] / slow["tokens_per_s_per_gpu"]
    match = re.search(r"with fp8_block it is ([\d.]+) times as many", slow["warnings"][0])
    assert match
    assert 2 < float(match[1]) <= times  # of the same strategy, which another one may beat in the other format
    assert published["warnings"] == []


def test_search_scores_a_run_against_the_optimum(raysearch: Command, tiny_workload: Path, tmp_path: Path) -> None:
    form = ("search", "--workload", tiny_workload, "--searcher", "annealing", "--seed", "3", "--budget", "60")
    answer = json.loads(raysearch(*form, "--out", tmp_path / "run", "--json").stdout)
    optimum = json.loads(raysearch("optimum", "--workload", tiny_workload, "--json").stdout)["tokens_per_s_per_gpu"]
    assert answer["calls"] == 60
    assert answer["fraction_of_optimum"] == answer["best"] / optimum <= 1
    assert answer["unique_calls"] <= 60
    assert answer["feasible_calls"] <= 60
    assert answer["wall_s"] > 0
    assert set(answer["strategy"]) == {"tp", "ep", "pp", "batch", "dims"}
    assert len(read_rows(tmp_path / "run")) == 60
    reported = json.loads(raysearch("report", tmp_path / "run", "--json").stdout)
    assert reported["runs"][0]["best"] == answer["best"]
    (best,) = reported["best"]
    assert 0 < answer["expected_error"] == best["expected_error"] < 1
    assert answer["extrapolated"] == best["extrapolated"]
    table = raysearch("report", tmp_path / "run").stdout
    assert "annealing" in table
    assert "Violations: none" in table


@pytest.mark.slow
def test_search_without_out_makes_a_folder_under_results(
    raysearch: Command, tiny_workload: Path, tmp_path: Path
) -> None:
    done = raysearch("search", "-w", tiny_workload, "-s", "random", "-b", "5", "--json", cwd=tmp_path)
    assert (tmp_path / json.loads(done.stdout)["folder"] / "summary.json").is_file()
    assert [path.name.rsplit("-", 1)[0] for path in (tmp_path / "results").iterdir()] == ["tiny-random-s0"]


EXPORT = ("export", "--model", "qwen3_32b", "--isl", "100", "--osl", "10", "--tp", "2", "--batch", "8")
SEARCH = ("search", "-w", "gpt_moe_1_2t_16k", "-s", "random", "--out", "out")


def of_model(*options: str) -> tuple[str, ...]:
    return ("evaluate", "--model", "qwen3_32b", "--tp", "1", "--batch", "1", *options)


TWO_GPUS = ("--model", "llama_3_1_8b", "--isl", "500", "--osl", "50", "--engine", "vllm", "--gpus", "2")


def test_an_infeasible_strategy_is_explained_with_what_it_breaks_first() -> None:
    shown = run_here("explain", *TWO_GPUS, "--tp", "3", "--batch", "8")
    assert shown.returncode == 3
    assert shown.stdout.splitlines()[3] == "Infeasible: needs 3 GPUs, the budget is 2"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (evaluate("--workload", "gpt_moe_1_2t_16"), "did you mean 'gpt_moe_1_2t_16k'"),
        (evaluate("--workload", "absent.toml"), "absent.toml"),
        (evaluate("--hardware", "h10_sxm"), "did you mean 'h100_sxm'"),
        (evaluate("--tp", "0"), "tp"),
        (evaluate("--batch", "-1"), "batch"),
        (evaluate("--pp", "two"), "--pp"),
        (evaluate("--pp", "2.5"), "--pp"),
        (evaluate("--pq", "2"), "--pp"),
        (evaluate("--dims", "2,1,1"), "12"),
        (evaluate("--dims", DIMS.replace("0", "7")), "7"),
        (evaluate("--dims", "megatron-ps"), "megatron-sp"),
        (of_model(), "--isl and --osl are missing"),
        (of_model("--isl", "10", "--osl", "1", "--engine", "vlm"), "unknown engine 'vlm': did you mean 'vllm'?"),
        (
            of_model("--isl", "10", "--osl", "1", "--engine", "none", "--chunk-tokens", "9"),
            "--chunk-tokens is of phase 'serve'",
        ),
        (("evaluate",), "--workload"),
        (("evaluate", "-w", "gpt_moe_1_2t_16k"), "--tp"),
        (("optimum", "-w", "nope"), "unknown workload"),
        (("optimum", "-w", "bad.toml"), "not valid TOML"),
        ((*SEARCH, "-s", "rndom"), "did you mean 'random'"),
        ((*SEARCH, "-b", "0"), "budget"),
        ((*SEARCH, "-b", "-3"), "budget"),
        ((*SEARCH, "--seed", "-1"), "seed"),
        ((*SEARCH, "--seed", str(2**63)), "below 2**63"),
        ((*SEARCH, "--workload", "w" * 300), "www"),
        ((*SEARCH, "--out", "o" * 300), "cannot put results into ooo"),
        ((*SEARCH, "--out", "dangling"), "cannot put results into dangling"),
        ((*SEARCH, "--out", "/proc/x"), "cannot put results into /proc/x"),
        ((*SEARCH, "--out", "full"), "contains results already"),
        ((*SEARCH, "--out", "bad.toml"), "bad.toml"),
        (("study", "quickstrat"), "did you mean 'quickstart'"),
        (("study", "bad.toml", "--out", "out"), "not valid TOML"),
        (("study", "smoke", "--out", "full"), "contains results already"),
        (("study", "smoke", "--resume"), "--out"),
        (("study", "smoke", "--set", "cpus=0", "--out", "out"), "cpus"),
        (("report", "full"), "no results in"),
        (("report", "absent"), "no results in"),
        (("report", "r" * 300), "no results in"),
        (("report", "r" * 3000), "r... (3,0"),
        (("export", "r" * 3000), "cannot read a strategy from rrr"),
        (("export", "s3://bucket/x"), "s3://bucket/x: expected a path of a file system, not an address"),
        ((*EXPORT, "--set", "serve= "), "the name of weights is empty"),
        (
            ("export", "wrong.json"),
            "wrong.json is damaged: best.strategy.tp: expected a whole number, got 'x';",
        ),
        (("forecast", "any.yaml"), "--out is missing: expected the name of the .json file to write"),
        (
            ("forecast", "any.yaml", "--out", "x.txt"),
            "--out: expected the name of the .json file to write, got 'x.txt'",
        ),
        (
            ("optimum", "-w", "gpt_moe_1_2t_16k", "--out", "best"),
            "--out: expected the name of the .json file to write, got 'best'",
        ),
        (
            ("optimum", "-w", "gpt_moe_1_2t_16k", "--set", "compare_spaces", "--out", "best.json"),
            "--out is for the certificate of one space",
        ),
        (
            ("optimum", "-w", "gpt_moe_1_2t_16k", "--space", "generated", "--out", "best.json"),
            "the space 'generated' has no certificate",
        ),
        (
            ("replay", *TWO_GPUS, "--tp", "3", "--batch", "8", "--concurrency", "8"),
            "cannot be replayed: needs 3 GPUs, the budget is 2",
        ),
        (("validate", "full", "--out", "bad.toml"), "cannot put results into bad.toml"),
        (("forecast", "any.yaml", "--out", "bad.toml/x.json"), "cannot put results into bad.toml"),
        (("nothing",), "nothing"),
    ],
)
def test_a_mistake_is_one_message_and_writes_nothing(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, arguments: tuple[str, ...], message: str
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "bad.toml").write_text("name = [")
    (tmp_path / "wrong.json").write_text('{"question": {"workload": "x"}, "best": {"strategy": {"tp": "x"}}}')
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "thesis.txt").write_text("the only copy")
    (tmp_path / "dangling").symlink_to("nowhere")
    before = sorted(tmp_path.rglob("*"))
    refused = run_here(*arguments)
    assert refused.returncode == 2
    assert message in refused.stderr
    assert refused.stderr.startswith("error: ")
    assert refused.stderr.count("\n") == 1
    assert refused.stdout == ""
    assert sorted(tmp_path.rglob("*")) == before


@pytest.mark.slow
@pytest.mark.parametrize(("signum", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_stopped_search_keeps_every_row(
    start: Start, raysearch: Command, tiny_workload: Path, tmp_path: Path, signum: int, code: int
) -> None:
    process = start("search", "-w", tiny_workload, "-s", "random", "-b", "1000000", "--out", tmp_path / "run")
    rows = tmp_path / "run" / "rows.jsonl"
    wait_until(lambda: process.poll() is not None or (rows.is_file() and rows.stat().st_size > 50_000))
    process.send_signal(signum)
    _, stderr = process.communicate(timeout=LONGEST_S)
    assert process.returncode == code
    assert "Traceback" not in stderr
    assert rows.read_bytes().endswith(b"\n")
    (run,) = json.loads(raysearch("report", tmp_path / "run", "--json").stdout)["runs"]
    assert not run["complete"]
    assert f"{run['calls']:,} of 1,000,000 calls" in stderr


STOPPED_BETWEEN_ROW_AND_COUNT = """
import os, signal, raysearch.cli.main
from envs.rows import RowWriter

write = RowWriter.write
def write_and_stop(self, row):
    write(self, row)
    if row.call == 7:
        os.kill(os.getpid(), signal.SIGTERM)
RowWriter.write = write_and_stop
raysearch.cli.main.main()
"""


@pytest.mark.slow
def test_a_search_stopped_between_a_row_and_its_count_says_what_is_on_disk(tiny_workload: Path, tmp_path: Path) -> None:
    arguments = ["search", "-w", tiny_workload, "-s", "random", "-b", "100", "--out", tmp_path / "run"]
    stopped = subprocess.run(
        [sys.executable, "-c", STOPPED_BETWEEN_ROW_AND_COUNT, *map(str, arguments)],
        env=command_environment(),
        capture_output=True,
        text=True,
    )
    assert stopped.returncode == 128 + signal.SIGTERM
    assert len(read_rows(tmp_path / "run")) == 7
    assert "after 7 of 100 calls" in stopped.stderr


@pytest.mark.slow
@pytest.mark.parametrize("command", ["search", "study"])
def test_a_closed_terminal_ends_the_command_as_other_signals_do(
    command: str, tiny_workload: Path, tmp_path: Path
) -> None:
    """A real one: all that was started in it is told, perhaps twice, and can no longer write to it."""
    study = tmp_path / "study.toml"
    study.write_text(
        f'name = "long"\nworkloads = ["{tiny_workload}"]\nsearchers = ["random"]\nseeds = [0]\nbudget = 1000000\n'
    )
    what = ["-w", tiny_workload, "-s", "random", "-b", "1000000"] if command == "search" else [study, "--set", "cpus=1"]
    arguments = raysearch_command(command, *what, "--out", tmp_path / "out")
    ours, theirs = pty.openpty()
    process = subprocess.Popen(
        arguments, stdout=theirs, stderr=theirs, env=command_environment(), start_new_session=True
    )
    os.close(theirs)
    deadline = time.monotonic() + LONGEST_S
    while sum(path.stat().st_size for path in (tmp_path / "out").rglob("rows.jsonl")) < 50_000:
        assert time.monotonic() < deadline
        if select.select([ours], [], [], 0.02)[0]:
            os.read(ours, 4096)  # else it would be full, and the command wait
    os.close(ours)
    os.killpg(process.pid, signal.SIGHUP)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGHUP)
    assert process.wait(timeout=LONGEST_S) == 128 + signal.SIGHUP
    (rows,) = (tmp_path / "out").rglob("rows.jsonl")
    assert rows.read_bytes().endswith(b"\n")


HEAVY = {"ray", "torch", "pandas", "matplotlib", "scipy"}
"""Packages whose imports take longer than all that a command which needs none of them does."""


@pytest.mark.slow
@pytest.mark.parametrize("arguments", [("--help",), ("list",), evaluate(), ("study", "quickstrat")])
def test_commands_that_need_no_ray_import_nothing_heavy(arguments: tuple[str, ...]) -> None:
    environment = command_environment() | {"PYTHONPROFILEIMPORTTIME": "1"}
    shown = subprocess.run(raysearch_command(*arguments), capture_output=True, text=True, env=environment)
    imported = {
        line.rpartition("|")[2].strip() for line in shown.stderr.splitlines() if line.startswith("import time:")
    }
    assert "raysearch.cli.app" in imported
    assert not imported & HEAVY
    of_all = arguments in (("--help",), ("list",))  # which name all commands, or the settings of all
    assert ("raysearch.answers.exported" in imported) == of_all


@pytest.mark.slow
@pytest.mark.parametrize("arguments", [("list",), evaluate("--json")])
def test_output_into_a_closed_pipe_ends_in_silence(arguments: tuple[str, ...]) -> None:
    read, write = os.pipe()
    os.close(read)
    shown = output_into(write, *arguments)
    os.close(write)
    assert (shown.returncode, shown.stderr) == (1, "")


@pytest.mark.slow
@pytest.mark.parametrize("arguments", [("--help",), evaluate("--json")])
def test_output_onto_a_full_disk_is_one_line(arguments: tuple[str, ...]) -> None:
    with Path("/dev/full").open("wb") as full:
        shown = output_into(full.fileno(), *arguments)
    assert (shown.returncode, shown.stderr) == (1, "error: [Errno 28] No space left on device\n")


def output_into(stdout: int, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        raysearch_command(*arguments),
        stdout=stdout,
        stderr=subprocess.PIPE,
        text=True,
        env=command_environment(),
    )


@pytest.mark.slow
def test_a_signal_during_the_first_imports_is_heard(tmp_path: Path) -> None:
    (tmp_path / "pydantic.py").write_text("import os, signal; os.kill(os.getpid(), signal.SIGINT)")
    environment = command_environment()
    environment["PYTHONPATH"] = f"{tmp_path}{os.pathsep}{environment['PYTHONPATH']}"
    stopped = subprocess.run(raysearch_command("list"), capture_output=True, text=True, env=environment)
    assert (stopped.returncode, stopped.stderr) == (130, "interrupted by SIGINT\n")


@pytest.mark.slow
def test_of_two_searches_into_one_folder_one_is_refused(start: Start, tiny_workload: Path, tmp_path: Path) -> None:
    form = ("search", "-w", tiny_workload, "-s", "random", "-b", "2000", "--out", tmp_path / "run", "--json")
    both = [start(*form), start(*form)]
    stderr = [process.communicate(timeout=LONGEST_S)[1] for process in both]
    codes = [process.returncode for process in both]
    assert sorted(codes) == [0, 2]
    assert "error: " in stderr[codes.index(2)]
    assert list(read_rows(tmp_path / "run")["call"]) == list(range(1, 2001))


def test_a_workload_without_anything_feasible_is_a_result(
    raysearch: Command, tiny_workload: Path, tmp_path: Path
) -> None:
    hopeless = tmp_path / "hopeless.toml"
    hopeless.write_text(re.sub(r"(?m)^tpot_slo_ms = .*$", "tpot_slo_ms = 0.001", tiny_workload.read_text()))
    best = raysearch("optimum", "-w", hopeless, "--json")
    assert best.returncode == 3
    assert json.loads(best.stdout)["tokens_per_s_per_gpu"] is None
    searched = raysearch("search", "-w", hopeless, "-s", "random", "-b", "20", "--out", tmp_path / "run", "--json")
    assert searched.returncode == 0
    assert json.loads(searched.stdout)["strategy"] is None
    for shown, code in ((raysearch("optimum", "-w", hopeless), 3), (raysearch("report", tmp_path / "run"), 0)):
        assert shown.returncode == code
        assert len(re.findall("o( feasible)? strategy of tiny .*(feasible|found)", shown.stdout)) == 1


@pytest.mark.slow
def test_a_cache_that_cannot_be_written_costs_one_note(tiny_workload: Path, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    environment = {**command_environment(), "RAYSEARCH_CACHE_DIR": str(tmp_path / "file")}
    command = raysearch_command("optimum", "-w", tiny_workload, "--json")
    found = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert found.returncode == 0
    assert json.loads(found.stdout)["space_size"] == 16 * 3**12
    assert found.stderr.count("\n") == found.stderr.count("note: optima cannot be kept") == 1


def test_a_folder_may_have_any_name(raysearch: Command, tiny_workload: Path, tmp_path: Path) -> None:
    folder = tmp_path / "[/foo] :100: [red]"
    shown = raysearch("search", "-w", tiny_workload, "-s", "random", "-b", "20", "--out", folder)
    assert shown.returncode == 0
    assert f"[/foo] :100: [red]{os.sep}curve.png" in shown.stdout.replace("\n", "")


def test_what_a_terminal_would_obey_in_a_name_is_written_out(raysearch: Command) -> None:
    refused = raysearch(
        "evaluate", "--model", "\x1b[31mred\x07", "--isl", "10", "--osl", "1", "--tp", "1", "--batch", "1"
    )
    assert refused.returncode == 2
    assert "\x1b" not in refused.stderr
    assert r"\x1b[31mred\x07" in refused.stderr
