"""Nothing that a handed folder says is imported or run: commands on forged folders, under an audit hook.

The hook sees every import, every execution of code, every process and every connection of the interpreter.
"""

from __future__ import annotations

import io
import json
import os
import pickle
import random
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from raysearch.base.terminal import inert
from raysearch.cli import app
from raysearch.deploy.export.source import RECOMMENDATION_FILE, TUNED_FILE
from raysearch.deploy.live.deployment_candidates import candidates_of
from raysearch.deploy.live.session import Folder, Settings
from raysearch.runs.records import RunSpec
from raysearch.runs.run import SearchRun
from raysearch.simulators.measurement import Measurement
from raysearch.studies.results import read_spec, read_study_runs
from raysearch.studies.study_file import load_study, run_dir, write_study
from sim.config.catalog import load_workload
from sim.optimum.spaces import space_of
from tests.conftest import CHECKOUT, command_environment, raysearch_command
from tests.raysearch.forging import forge, places, resealed
from tests.raysearch.fuzzing import runs

CODE = "open('ran', 'w').close()\n\ndef f(*_):\n    open('ran', 'w').close()\n\nclass F: pass\n"
PROGRAM = """
import io, json, os, sys, sysconfig

own = [os.path.realpath(path) for path in (sys.prefix, sys.base_prefix, *json.loads(sys.argv[2]))]
inside = tuple(path + os.sep for path in own)
seen = []

def hook(event, args):
    if event == "exec":
        name = getattr(args[0], "co_filename", "")
        generated = name.startswith("<") or not os.path.exists(name)  # by templates of dataclasses and others
        if not generated and not os.path.realpath(name).startswith(inside):
            seen.append(f"exec {name}")
    elif event == "import" and args[1] and not os.path.realpath(args[1]).startswith(inside):
        seen.append(f"import {args[1]}")
    elif event in ("subprocess.Popen", "os.system", "os.exec", "os.posix_spawn", "os.fork", "pty.spawn"):
        seen.append(f"{event} {args!r}")
    elif event in ("socket.connect", "socket.bind", "socket.sendto", "pickle.find_class", "ctypes.dlopen"):
        seen.append(f"{event} {args!r}"[:200])

import matplotlib.font_manager  # which may look for fonts by a command, once on a machine
import pyarrow.parquet, pandas  # whose libraries load others of theirs
from raysearch.cli import app

os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})  # no fork beside this one, which the hook would not see
sys.addaudithook(hook)
for folder, words in json.load(open(sys.argv[1])):
    os.chdir(folder)
    sys.argv = ["raysearch", *words]
    sys.stdout, sys.stderr = io.StringIO(), io.StringIO()
    before = len(seen)
    try:
        code = app.run_command()
    except BaseException as error:
        code = f"{type(error).__name__}: {error}"
    output = sys.stderr.getvalue() + sys.stdout.getvalue()
    sys.stdout, sys.stderr = sys.__stdout__, sys.__stderr__
    report = {"words": words, "code": code, "seen": seen[before:], "output": output[-2000:]}
    report["traceback"] = "Traceback" in output
    print(json.dumps(report), flush=True)
"""


Report = dict[str, Any]


def under_audit(commands: list[tuple[Path, list[str]]], program: Path) -> list[Report]:
    """What each command did in its folder, one after the other in one process; forged modules lie where it looks."""
    program.write_text(json.dumps([(str(folder), words) for folder, words in commands]))
    packages = json.dumps([str(CHECKOUT / name) for name in ("sim", "envs", "raysearch")])
    done = subprocess.run(
        [sys.executable, "-P", "-c", PROGRAM, str(program), packages],
        cwd=program.parent,
        env={**os.environ, "PYTHONPATH": str(CHECKOUT)},
        capture_output=True,
        text=True,
        check=False,
    )
    reports = [json.loads(line) for line in done.stdout.splitlines()]
    assert len(reports) == len(commands), done.stderr[-2000:]
    return reports


@pytest.fixture(scope="module")
def handed(tiny_workload: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A working directory with folders of every command, and code that nobody named on a command line."""
    top = tmp_path_factory.mktemp("handed")
    (top / "evil.py").write_text(CODE)
    (top / "handed").mkdir()
    (top / "handed" / "evil.py").write_text(CODE)
    text = tiny_workload.read_text()
    (top / "w.toml").write_text(text)
    declared = 'declared_choices = "handed.evil:f"\nspace = "extended"\n' + text
    (top / "handed" / "w.toml").write_text(declared)
    run = SearchRun(RunSpec(str(top / "w.toml"), "random", seed=0, budget=4), top / "search")
    run.advance(4)
    run.finish()
    half = SearchRun(RunSpec(str(top / "w.toml"), "annealing", seed=0, budget=20), top / "half")
    half.advance(4)
    half.save()
    half.close()
    (top / "tune").mkdir()
    tuning = Folder(top / "tune", candidates_of(space_of(load_workload(str(top / "w.toml")))), Settings())
    tuning.begin()
    tuning.keep(0, Measurement(100.0, 0.01))
    (top / "s.toml").write_text(
        'name = "s"\nworkloads = ["w.toml"]\nsearchers = ["random"]\nseeds = [0, 1]\nbudget = 4\n'
    )
    study = load_study(top / "s.toml")
    write_study(study, dict.fromkeys(study.workloads), top / "study")
    for run_id, spec in study.specs().items():
        run = SearchRun(spec, run_dir(top / "study", run_id))
        run.advance(4)
        run.finish()
    strategy = {"tp": 2, "ep": 1, "pp": 1, "batch": 8, "dims": [0, 1, 1, 0, 0, 0, 1, 1, 0, 0]}
    question = {"model": "qwen3_32b", "isl": 400, "osl": 50, "engine": "vllm", "phase": "serve", "gpus": 8}
    answer = {"question": question, "best": {"strategy": strategy}, "alternatives": [], "feasible": True}
    for name in (RECOMMENDATION_FILE, TUNED_FILE):
        (top / name).write_text(json.dumps(resealed(answer)))
    return top


HOSTILE = ["handed/w.toml", "evil:f", "handed.evil:f", "evil", "handed/evil.py", "$(touch ran)", "../handed/w.toml"]
NAMED = {
    "search/run.json": "search",
    "search/summary.json": "search",
    "half/run.json": "half",
    "study/study.json": "study",
    "study/runs/tiny-random-s0/run.json": "study",
    "tune/tune_live.json": "tune",
    RECOMMENDATION_FILE: RECOMMENDATION_FILE,
    TUNED_FILE: TUNED_FILE,
}
ASKED = ["--model", "llama_3_1_8b", "--isl", "500", "--osl", "50", "--engine", "vllm", "--gpus", "1"]


def commands_on(folder: str) -> list[list[str]]:
    if folder.endswith(".json"):
        anew = ["recommend", *ASKED, "--out", str(Path(folder).parent)]  # there is nothing to resume: it is asked again
        return [["export", folder], ["export", folder, "--to", "sglang", "--json"], anew]
    commands = [["status", folder], ["report", folder], ["verify", folder], ["export", folder, "--json"]]
    if folder.endswith("half"):
        given = ["-w", "w.toml", "-s", "annealing", "--budget", "20", "--out", folder, "--resume"]
        return [*commands, ["search", *given]]
    if folder.endswith("tune"):  # all is measured, so that no benchmark is started
        given = ["-w", "w.toml", "--benchmark", "true", "--budget", "1", "--out", folder, "--resume"]
        return [["verify", folder], ["tune-live", *given], *commands]
    return commands


def commands_on_forged_folders(top: Path) -> list[list[str]]:
    """Forges a folder of each kind, and more at random; what is done with them."""
    rng, commands = random.Random(0), []
    for number in range(len(NAMED) + runs(4)):
        name = list(NAMED)[number % len(NAMED)]
        base = NAMED[name]
        place = top / str(number)
        if base.endswith(".json"):
            place.mkdir()
            shutil.copy(top / base, place / base)
            path, named = place / base, f"{number}/{base}"
        else:
            shutil.copytree(top / base, place / base)
            path, named = place / name, f"{number}/{base}"
        fields = json.loads(path.read_text())
        texts = [at for at in places(fields) if isinstance(_at(fields, at), str | None) and at != ("sha256",)]
        for at in rng.sample(texts, min(len(texts), rng.choice([1, 1, 3]))):
            forge(path, at, rng.choice(HOSTILE))
        commands += commands_on(named)
        if name == "study/study.json":  # all runs are finished, so that no Ray is started
            commands.append(["study", "s.toml", "--out", named, "--resume"])
    shutil.copytree(top / "half", top / "searcher" / "half")
    forge(top / "searcher" / "half" / "run.json", ("spec", "searcher"), "evil:f")
    return [*commands, *commands_on("searcher/half")]


def commands_on_a_workload_that_names_code(top: Path) -> list[list[str]]:
    forge(top / "search" / "run.json", ("spec", "workload"), "handed/w.toml")
    forge(top / RECOMMENDATION_FILE, ("question",), {"workload": "handed/w.toml"})
    forge(top / TUNED_FILE, ("question",), {"workload": "handed/w.toml"})
    return [*commands_on("search"), ["export", RECOMMENDATION_FILE], ["export", TUNED_FILE]]


class _Runs:
    """Whatever unpickles it runs code."""

    def __reduce__(self) -> tuple[Any, tuple[str, str]]:
        return open, ("ran", "w")


MODEL_FILES = (
    "configuration_evil.py",
    "modeling_evil.py",
    "__init__.py",
    "conftest.py",
    "setup.py",
    "sitecustomize.py",
)
WORKING_DIRECTORY = (
    *("json.py", "numpy.py", "torch.py", "typer.py", "sim.py", "raysearch.py", "usercustomize.py"),
    *("pydantic.py", "fsspec.py", "pandas.py", "cupy.py", "ray.py"),
)
"""What Python, or a library, looks for by these names where it looks for modules."""
PLUGINS = ("raysearch.simulators", "raysearch.searchers", "gymnasium.envs", "pydantic", "console_scripts")
TRACE = {"timestamp": 2, "input_length": 40, "output_length": 3, "hash_ids": ["$(touch ran)"]}
MODEL = {
    "model_type": "llama",
    "auto_map": {"AutoConfig": "configuration_evil.F", "AutoModelForCausalLM": "modeling_evil.F"},
    "architectures": ["evil:f"],
    "num_hidden_layers": 2,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_attention_heads": 8,
    "vocab_size": 100,
}
GEMM = "framework,dtype,m,n,k,latency_us\nevil:f,fp8,64,64,64,=cmd|'/c touch ran'!A1\n"
FLEET = """
name = "f"
hardware = "h100_sxm"
gpus = 2
[[models]]
model = "handed"
requests_per_s = 1.0
isl = 8
osl = 8
ttft_ms = 900.0
"""


def commands_on_what_else_is_read(top: Path) -> list[list[str]]:
    """Models, priors, pre-training, traces, measurements and answers that somebody made, with code inside."""
    folder = top / "handed"
    for name in MODEL_FILES:
        (folder / name).write_text(CODE)
    for name in WORKING_DIRECTORY:
        (top / name).write_text(CODE)
    (top / "x.pth").write_text("import evil\n")
    (top / "evil-1.dist-info").mkdir()
    (top / "evil-1.dist-info" / "METADATA").write_text("Metadata-Version: 2.1\nName: evil\nVersion: 1\n")
    points = "".join(f"[{group}]\nevil = evil:f\n" for group in PLUGINS)
    (top / "evil-1.dist-info" / "entry_points.txt").write_text(points)
    (folder / "config.json").write_text(json.dumps(MODEL))
    (folder / "trace.jsonl").write_text(json.dumps(TRACE) + "\n")
    (folder / "trace.csv").write_text("TIMESTAMP,ContextTokens,GeneratedTokens\n__import__('evil'),$(touch ran),1\n")
    for name in ("gemm.csv", "serving.csv", "disaggregated.csv", "agg.csv"):
        (folder / name).write_text(GEMM)
    (folder / "fleet.toml").write_text(FLEET)
    proof = {"workload": "w", "config_hash": "", "space": "joint", "tokens_per_s_per_gpu": 0.0, "leaves": []}
    (folder / "proof.json").write_text(
        json.dumps({"question": {"workload": "handed/w.toml"}, **proof, "strategy": None})
    )
    point = {"kinds": [{"prompt_tokens": 8, "output_tokens": 8, "share": 1.0}], "winner": "aggregated"}
    (top / "pools").mkdir()
    (top / "pools" / "pools.json").write_text(
        json.dumps(resealed({"question": {"workload": "handed/w.toml"}, "points": [{**point, "ways": {}}]}))
    )
    (folder / "master.yaml").write_text("e: !!python/object/apply:os.system ['touch ran']\n")
    skipped = {"\x1b[2J": {"\u202e": 1}}
    forecast = {"made_by": "evil:f", "date": "$(touch ran)", "predictions": [], "not_predicted": skipped}
    (folder / "forecast.json").write_text(json.dumps(resealed(forecast)))
    (folder / "published.json").write_text(json.dumps([{"model": "evil:f", "framework": "$(touch ran)", "tp": "evil"}]))
    (folder / "release.toml").write_text('engine = "vllm"\nversion = "9"\nmodule = "evil:f"\n')
    (folder / "aiter").mkdir()
    (folder / "aiter" / "a8w8_tuned.csv").write_text("gfx,cu_num,M,N,K,us\nevil:f,256,1,1,1,=cmd|'/c touch ran'!A1\n")
    (folder / "h.toml").write_text('name = "h"\nmodule = "evil:f"\n')
    (folder / "pre.toml").write_text("workloads = 20\nstrategies = 50\n")
    pickled = pickle.dumps(_Runs())
    for name in (
        "prior.safetensors",
        "training.safetensors",
        "rows-00000.npz",
        "gemm.parquet",
        "calibration.json",
        "x.whl",
    ):
        (folder / name).write_bytes(pickled)
    (folder / "half").mkdir()
    shutil.copytree(top / "half", folder / "half", dirs_exist_ok=True)
    (folder / "half" / "checkpoint.bin").write_bytes(pickled)
    arrays = io.BytesIO()
    np.savez(arrays, allow_pickle=True, asked=np.array([_Runs()], object), inputs=np.array([_Runs()], object))
    (top / "pre").mkdir()
    (top / "pre" / "rows-00000.npz").write_bytes(arrays.getvalue())
    asked = ["--model", "handed", "--isl", "8", "--osl", "8", "--engine", "vllm", "--gpus", "1"]
    run, searched = ["--tp", "1", "--batch", "4"], ["search", "-w", "w.toml", "--budget", "2", "--out"]
    replayed = ["replay", *asked, *run, "--set", "requests=10"]
    starts = ["search", "half", "study", "handed/half", RECOMMENDATION_FILE, TUNED_FILE, "handed", "handed/w.toml"]
    return [
        ["evaluate", *asked, *run],
        ["export", *asked, *run, "--to", "vllm", "--set", "serve=handed"],
        ["export", *asked, *run, "--to", "jax"],
        ["optimum", *asked],
        ["explain", *asked, *run, "--hardware", "handed/h.toml"],
        ["recommend", *asked, "--out", "answer"],
        ["replay", "answer", "--requests-per-s", "1", "--set", "requests=10"],
        ["replay", "handed", "--requests-per-s", "1"],
        ["replay", RECOMMENDATION_FILE, "--requests-per-s", "1", "--set", "requests=10"],
        *([*replayed, "--set", f"trace=handed/{name}"] for name in ("trace.jsonl", "trace.csv", "x.whl", "evil.py")),
        *([*searched, f"s{at}", "-s", "random", "--set", f"start={each}"] for at, each in enumerate(starts)),
        ["search", "-w", "w.toml", "-s", "annealing", "--budget", "20", "--out", "handed/half", "--resume"],
        [*searched, "again", "-s", "annealing", "--set", "replay=handed/half"],
        ["complete", *asked, "--layout", "tp1"],
        ["pools", *asked, "--out", "pools"],
        ["verify", "pools"],
        ["evaluate", *asked, *run, "--engine-version", "handed/release.toml"],
        ["matmul", "A[I, J_X] B[J_X, K] -> C[I, K]", "--mesh", "X=4", "--hardware", "handed/h.toml"],
        ["verify-rules", "--set", "view=4,8,6->32,6"],
        ["list", "--json"],
        *([command, "handed/half"] for command in ("status", "report", "verify")),
        ["place", "handed/fleet.toml", "--out", "placed", "--set", "requests=100"],
        ["verify", "placed"],
        ["export", "placed"],
        ["calibrate", "handed", "--hardware", "h100_sxm", "--out", "c.json"],
        ["calibrate", "handed/x.whl", "--hardware", "h100_sxm", "--out", "c.json"],
        ["calibrate", "handed/aiter", "--hardware", "mi355x", "--set", "system=gfx950", "--out", "c.json"],
        ["validate", "handed"],
        ["validate", "handed", "--set", "calibration=handed/calibration.json"],
        ["verify", "handed/proof.json"],
        ["export", "handed/proof.json"],
        ["export", "pools"],
        ["forecast", "handed/master.yaml", "--out", "f.json"],
        ["forecast", "handed/master.yaml", "--out", "f.json", "--set", "known=handed/published.json"],
        ["forecast", "handed/forecast.json"],
        *(["forecast", "handed/forecast.json", "--score", f"handed/{name}"] for name in ("published.json", "agg.csv")),
        ["verify", "handed/forecast.json"],
        ["pretrain", "handed/pre.toml", "--out", "pre", "--set", "processes=1"],
        ["pretrain", "handed/pre.toml", "--out", "handed", "--set", "processes=1"],
    ]


NAMING = ["evaluate", "-w", "handed/w.toml", "--tp", "1", "--batch", "1"]
"""A command whose user names the code."""


@pytest.fixture(scope="module")
def audited(handed: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Path, list[Report]]]:
    """By test, a working directory and what commands did there: all in one process, which imports us once."""
    made = {
        "forged": commands_on_forged_folders,
        "workload": commands_on_a_workload_that_names_code,
        "others": commands_on_what_else_is_read,
    }
    tops, commands = {}, []
    for name in (*made, "named"):  # the last has the code imported
        tops[name] = Path(shutil.copytree(handed, tmp_path_factory.mktemp(name) / "top", symlinks=True))
        words = made[name](tops[name]) if name in made else [NAMING]
        commands += [(tops[name], each) for each in words]
    reports = under_audit(commands, tmp_path_factory.mktemp("audited") / "commands.json")
    of = {
        top: [each for (where, _), each in zip(commands, reports, strict=True) if where == top] for top in tops.values()
    }
    return {name: (top, of[top]) for name, top in tops.items()}


@pytest.mark.slow
@pytest.mark.parametrize("name", ["forged", "others"])
def test_nothing_that_is_handed_has_anything_imported_or_run(
    audited: dict[str, tuple[Path, list[Report]]], name: str
) -> None:
    top, reports = audited[name]
    for each in reports:
        assert not each["seen"], each
        assert not each["traceback"], each
        assert inert(each["output"]) == each["output"], each
        assert each["code"] in (0, 1, 2, 3), each
    assert not list(top.rglob("ran"))


def _at(value: Any, at: tuple[str | int, ...]) -> Any:
    for key in at:
        value = value[key]
    return value


@pytest.mark.slow
def test_a_record_whose_workload_names_code_is_reported_without_it(
    audited: dict[str, tuple[Path, list[Report]]],
) -> None:
    top, reports = audited["workload"]
    assert [each["code"] for each in reports] == [0, 0, 0, 2, 2, 2]
    assert not [each["seen"] for each in reports if each["seen"]]
    for each in (reports[1], *reports[3:]):
        assert "choices of ops that handed.evil:f declares, and code is run only where you name it" in each["output"]
    assert not list(top.rglob("ran"))


@pytest.mark.slow
def test_the_hook_sees_what_a_user_names(audited: dict[str, tuple[Path, list[Report]]]) -> None:
    top, (report,) = audited["named"]
    assert report["seen"] == [f"exec {top / 'handed' / 'evil.py'}"]
    assert (top / "ran").exists()


WATCHED = """
import os, sys

own = (*os.environ["INSIDE"].split(":"), sys.prefix, sys.base_prefix)
inside = tuple(os.path.realpath(path) + os.sep for path in own)
log = os.open(os.environ["SEEN"], os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)

def hook(event, args):
    if event == "exec":
        what = getattr(args[0], "co_filename", "")
        what = what if os.path.isabs(what) else ""
    elif event == "import":
        what = args[1]
    elif event in ("subprocess.Popen", "os.exec", "os.posix_spawn", "os.system", "pty.spawn"):
        what = os.fsdecode(args[0] or args[1][0])
    else:
        return
    if what and not os.path.realpath(what).startswith(inside):
        os.write(log, f"{event} {what}\\n".encode())

sys.addaudithook(hook)
"""
"""As PROGRAM, in every interpreter that is started: the command's, its watchers', Ray's and the runs'."""


@pytest.mark.slow
def test_a_study_of_forged_runs_is_gone_on_with_and_no_process_of_its_ray_runs_what_they_name(
    handed: Path, tmp_path: Path
) -> None:
    top, site = Path(shutil.copytree(handed, tmp_path / "top")), tmp_path / "site"
    site.mkdir()
    (site / "sitecustomize.py").write_text(WATCHED)
    for name in WORKING_DIRECTORY:
        (top / name).write_text(CODE)
    study = load_study(top / "s.toml")
    runs = [run_dir(top / "begun", run_id) for run_id in study.specs()]
    for out in ("begun", "straight"):
        write_study(study, dict.fromkeys(study.workloads), top / out)
    for folder, spec in zip(runs, study.specs().values(), strict=True):
        begun = SearchRun(spec, folder)
        begun.advance(2)
        begun.save()
        begun.close()
        straight = SearchRun(spec, run_dir(top / "straight", folder.name))
        straight.advance(4)
        straight.finish()
    for folder in (top / "begun/tune", top / "begun/tune" / runs[0].name):  # what Tune resumes from
        folder.mkdir()
        for name in ("tuner.pkl", "trainable.pkl", "params.pkl", "searcher_state.pkl", "experiment_state-1.json"):
            (folder / name).write_bytes(pickle.dumps(_Runs()))
    forge(runs[0] / "run.json", ("spec", "simulator"), "evil:f")
    forge(runs[1] / "run.json", ("spec", "workload"), "handed/w.toml")
    packages = [str(CHECKOUT / name) for name in ("sim", "envs", "raysearch")]
    python, *words = raysearch_command("study", "s.toml", "--out", "begun", "--resume", "--set", "cpus=1")
    done = subprocess.run(
        [python, "-P", *words],  # as the installed command
        cwd=top,
        env={
            **command_environment(),
            "PYTHONPATH": f"{site}:{CHECKOUT}",
            "INSIDE": ":".join([*packages, str(site)]),
            "SEEN": str(tmp_path / "seen"),
        },
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert len(list((top / "begun/damaged").iterdir())) == 2
    assert [run["digest"] for run in read_study_runs(top / "begun")] == [
        run["digest"] for run in read_study_runs(top / "straight")
    ]
    seen = {Path(line.partition(" ")[2]).name for line in (tmp_path / "seen").read_text().splitlines()}
    assert seen == {"bash"}  # by which Ray starts its workers
    assert not list(top.rglob("ran"))


def test_other_code_than_a_run_was_begun_with_is_gone_on_with_only_by_leave(
    tiny_workload: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "own.py").write_text("def f(workload, strategy): ...\n")
    run = SearchRun(RunSpec(str(tiny_workload), "random", seed=0, budget=4), tmp_path / "out")
    run.advance(2)
    run.save()
    run.close()
    assert read_spec(tmp_path / "out", run.run_id)["simulator"] is None
    forge(tmp_path / "out" / "run.json", ("code",), {"own:f": "0" * 16})
    words = [
        "raysearch",
        "search",
        "-w",
        str(tiny_workload),
        "-s",
        "random",
        "--budget",
        "4",
        "--out",
        "out",
        "--resume",
    ]
    monkeypatch.setattr(sys, "argv", words)
    assert app.run_command() == 2
    assert "the code of own:f has changed since out/run.json was begun" in capsys.readouterr().err
    assert "own" not in sys.modules
    monkeypatch.setattr(sys, "argv", [*words, "--set", "trust_code"])
    assert app.run_command() == 0
