"""No name becomes a command: whatever models and weights are called, what reads an export reads these names."""

from __future__ import annotations

import json
import os
import re
import resource
import subprocess
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import example, given, settings
from hypothesis import strategies as st
from typer.testing import CliRunner

from raysearch.base.errors import NOTHING_FEASIBLE, InputError
from raysearch.base.file_io import write_together
from raysearch.cli.app import app
from raysearch.deploy.export.deployment import Deployment
from raysearch.deploy.export.formats import exporter
from raysearch.deploy.export.render import (
    Call,
    Command,
    SourceName,
    Variable,
    python_text,
    shell_text,
    words,
    yaml_text,
)
from sim.config.catalog import load_model
from sim.layers.model import Published
from sim.ops.heuristics import megatron_dims
from sim.strategy import Strategy
from sim.workload import Speculation, Workload
from tests.processes import LONGEST_S
from tests.raysearch.deploy.export.test_engines import served
from tests.raysearch.fuzzing import inputs, runs

HOSTILE = (
    "m $(touch X) x",
    "`touch X`",
    "a'b\"c\\",
    "two\nlines\n",
    "\n#!/bin/sh\ntouch X",
    "*",
    "~/x",
    "$HOME ${HOME} $$",
    "$(HOME)",
    "yes",
    "null",
    "1e3",
    "0o17",
    "1_000",
    ": ",
    "a: b # c",
    "{{ .Values }}",
    "{tp}",
    "%s",
    "'''\n\"\"\"",
    "模型\u2028é\x85",
    "\t",
    "a\\\nb",
    "!!python/object:os.system x",
    "&a *a",
)
EXAMPLES = runs(5)
"""Of what evaluates a model of each name anew, or starts a process."""
NAMES = st.one_of(st.sampled_from(HOSTILE), st.text(st.characters(codec="utf-8", exclude_characters="\0"), min_size=1))
HOSTILE_NAMES = NAMES.filter(lambda name: not name.startswith("-") and name.strip())
STUB = '#!/bin/sh\nprintf "%s\\0" "${0##*/}" "$@" > "$STUB_OUT/words"\nenv -0 > "$STUB_OUT/environment"\n'
GIVEN = {"HEAD_ADDRESS": "10.0.0.1 ; touch X", "NODE_RANK": "1", "CHECKPOINT": "my checkpoint"}


@pytest.fixture(scope="module")
def stubs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of programs that only tell their arguments and environment."""
    folder = tmp_path_factory.mktemp("stubs")
    for name in ("vllm", "python", "python3", "torchrun", "mpirun", "program"):
        (folder / name).write_text(STUB)
        (folder / name).chmod(0o755)
    return folder


def started(folder: Path, script: list[str], **environment: str) -> tuple[list[str], dict[str, str]]:
    """Arguments and environment of the program in a folder of stubs that a script starts."""
    own = {"PATH": f"{folder}:{os.environ['PATH']}", "STUB_OUT": str(folder), **environment}
    before = sorted(folder.iterdir())
    subprocess.run(script, check=True, env=own, cwd=folder, timeout=LONGEST_S, capture_output=True)
    assert {*folder.iterdir()} <= {*before, folder / "words", folder / "environment"}, "something else was run"
    found, variables = ((folder / name).read_bytes().decode() for name in ("words", "environment"))
    return found.split("\0")[:-1], dict(line.split("=", 1) for line in variables.split("\0")[:-1])


def resolved(command: Command) -> list[str]:
    return [word if isinstance(word, str) else GIVEN[word.name] + word.suffix for word in command.words]


def in_kubernetes(text: str, environment: dict[str, str]) -> str:
    """A word of a container as Kubernetes expands it."""
    known = lambda name: environment.get(name, f"$({name})")  # noqa: E731
    return re.sub(r"\$(\$|\(([^)]*)\))", lambda found: "$" if found[1] == "$" else known(found[2]), text)


@cache
def workloads() -> dict[str, Workload]:
    dense = served("qwen3_32b", "vllm", gpus=32)
    named = {engine: served("deepseek_v3", engine, gpus=32) for engine in ("vllm", "sglang", "trtllm")}
    return {"dense": dense, "megatron": served("mixtral_8x7b", gpus=32), **named}


def deployment(target: str, path: str, model: str) -> Deployment:
    """A deployment over two nodes with a draft model, all of whose names are given."""
    known = {"dynamo": "vllm", "llm-d": "vllm", "jax": "dense", "dtensor": "dense"}
    workload = workloads()[known.get(target, target)]
    draft = replace(load_model("qwen3_32b"), name=model, published=Published())
    workload = replace(workload, model=replace(workload.model, name=model))
    if target not in ("megatron", "jax", "dtensor"):
        workload = replace(workload, speculation=Speculation(2, (0.8, 0.6), draft))
    if not workload.model.is_moe:
        strategy = Strategy(4, 1, 1, 16, megatron_dims(workload.model))
    else:
        ep = 8 if target == "megatron" else 16
        strategy = Strategy(2, ep, 16 // ep, 64, megatron_dims(workload.model), dp=ep // 2)
        strategy = strategy if target != "trtllm" else replace(strategy, tp=16, dp=1)
    return Deployment(workload, strategy, path)


@pytest.mark.parametrize("target", ["vllm", "sglang", "trtllm", "megatron"])
@settings(max_examples=EXAMPLES, deadline=None)
@given(path=HOSTILE_NAMES, model=HOSTILE_NAMES)
@example(path="m $(touch X) x", model="two\nlines\n")
def test_a_script_starts_its_program_with_the_words_that_were_meant(
    stubs: Path, target: str, path: str, model: str
) -> None:
    made = exporter(target)(deployment(target, path, model))
    assert made.command is not None
    found, environment = started(stubs, ["sh", "-c", made.all_files["start.sh"]], **GIVEN)
    assert found == resolved(made.command)
    assert {name: environment[name] for name in made.command.environment} == made.command.environment
    if target != "megatron":  # which takes a checkpoint by the variable
        assert path in found
    if target == "trtllm":
        assert yaml.safe_load(made.files["config.yaml"])["speculative_config"]["speculative_model"] == model
    if target == "vllm":
        assert json.loads(found[found.index("--speculative-config") + 1])["model"] == model
    if target == "sglang":
        assert found[found.index("--speculative-draft-model-path") + 1] == model


@pytest.mark.parametrize("target", ["dynamo", "llm-d"])
@settings(max_examples=EXAMPLES, deadline=None)
@given(path=HOSTILE_NAMES, model=HOSTILE_NAMES)
@example(path="$(HOME) $$", model="1e3")
def test_pods_start_their_program_with_the_words_that_were_meant(
    stubs: Path, target: str, path: str, model: str
) -> None:
    made = exporter(target)(deployment(target, path, model))
    assert made.command is None
    manifest = yaml.safe_load(next(iter(made.files.values())))
    if target == "dynamo":
        container = manifest["spec"]["components"][1]["podTemplate"]["spec"]["containers"][0]
        resource_name = manifest["metadata"]["name"]
    else:
        container = manifest["spec"]["leaderWorkerTemplate"]["workerTemplate"]["spec"]["containers"][0]
        resource_name = manifest["metadata"]["labels"]["llm-d.ai/model"]
    assert re.fullmatch(r"[a-z]([-a-z0-9]{0,61}[a-z0-9])?", resource_name)
    stated = [each for each in container.get("env", []) if "value" in each]
    variables = {each["name"]: each["value"] for each in stated} | {"HOME": "/root"}
    nodes = {"LWS_WORKER_INDEX": "1", "LWS_LEADER_ADDRESS": "leader"}
    script = [in_kubernetes(word, variables) for word in container["command"] + container["args"]]
    found, _ = started(stubs, script, **{name: in_kubernetes(each, {}) for name, each in variables.items()}, **nodes)
    assert found[found.index("serve" if target == "llm-d" else "--model") + 1] == path
    assert json.loads(found[found.index("--speculative-config") + 1])["model"] == model
    if target == "llm-d":
        assert found[found.index("--data-parallel-start-rank") + 1] == "4"  # of the second node's
        assert found[found.index("--data-parallel-address") + 1] == "leader"
        assert "--data-parallel-multi-port-external-lb" in found


@pytest.mark.parametrize("target", ["jax", "dtensor"])
@settings(max_examples=EXAMPLES, deadline=None)
@given(path=HOSTILE_NAMES, model=HOSTILE_NAMES)
@example(path="x", model='"""\nimport os\n')
def test_an_exported_file_is_python_that_has_the_model_s_name(target: str, path: str, model: str) -> None:
    made = exporter(target)(deployment(target, path, model))
    found: dict[str, Any] = {}
    code = made.files["sharding.py"]
    compile(code, "sharding.py", "exec")
    constants = "\n".join(line for line in code.splitlines() if line.startswith(("MODEL", "EP", "TP")))
    exec(constants, found)
    assert (found["MODEL"], found["EP"], found["TP"]) == (model, 1, 4)


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | NAMES,
    lambda inner: st.lists(inner) | st.dictionaries(NAMES, inner),
    max_leaves=8,
)


@settings(max_examples=inputs(15), deadline=None)
@given(value=st.dictionaries(NAMES, VALUES))
@example(value={name: name for name in HOSTILE})
def test_yaml_loads_back_as_it_was(value: dict[str, Any]) -> None:
    assert yaml.safe_load(yaml_text(value)) == value


def test_yaml_repeats_what_occurs_twice() -> None:
    each = {"name": "HF_TOKEN"}
    assert yaml_text({"first": each, "second": [each]}) == "first:\n  name: HF_TOKEN\nsecond:\n- name: HF_TOKEN\n"


@settings(max_examples=inputs(15), deadline=None)
@given(value=st.dictionaries(NAMES, VALUES), texts=st.lists(NAMES).map(tuple))
def test_constants_of_a_python_file_evaluate_to_what_they_were(value: dict[str, Any], texts: tuple[str, ...]) -> None:
    found: dict[str, Any] = {}
    called = Call("dict", (), {"a": SourceName("TRUE"), "b": texts})
    exec(python_text("TRUE = True", {"VALUE": value, "TEXTS": texts, "CALLED": called}, "END = 1"), found)
    assert (found["VALUE"], found["TEXTS"], found["END"]) == (value, texts, 1)
    assert found["CALLED"] == {"a": True, "b": texts}


@settings(max_examples=EXAMPLES, deadline=None)
@given(
    spoken=st.lists(NAMES),
    environment=st.dictionaries(st.sampled_from(["ONE", "TWO"]), st.one_of(NAMES, st.just(""))),
    suffix=NAMES,
)
def test_any_command_reaches_its_program_word_for_word(
    stubs: Path, spoken: list[str], environment: dict[str, str], suffix: str
) -> None:
    flags = (
        *(("--option", word) for word in spoken),
        ("--switch", None),
        ("--rank", Variable("NODE_RANK", suffix)),
    )
    command = Command(("program", *spoken), flags, environment)
    found, variables = started(stubs, ["sh", "-c", shell_text(command)], **GIVEN)
    assert found == resolved(command)
    assert {name: variables[name] for name in environment} == environment
    assert words(flags)[-1] == Variable("NODE_RANK", suffix)


def test_a_command_says_which_variable_is_not_set(stubs: Path) -> None:
    text = shell_text(Command(("program",), (("--rank", Variable("NODE_RANK")),)))
    ran = subprocess.run(["/bin/sh", "-c", text], capture_output=True, text=True, env={"PATH": str(stubs)})
    assert ran.returncode != 0
    assert "NODE_RANK" in ran.stderr


def test_what_yaml_1_2_takes_for_a_number_is_quoted_too() -> None:
    for text in ("1e3", "0o17", "-.5E-2", "0x1F"):
        assert yaml_text({"name": text}) == f"name: '{text}'\n"


@pytest.mark.parametrize("path", ["-x", "--help", "a\0b", "\udcff"])
def test_weights_that_no_command_can_name_are_refused(path: str) -> None:
    with pytest.raises(InputError, match="weights '"):
        deployment("vllm", path, "m")
    if path.startswith("-"):
        with pytest.raises(InputError, match=re.escape(f"write ./{path}")):
            exporter("sglang")(deployment("sglang", "m", path))


QWEN = ("--model", "qwen3_32b", "--isl", "4000", "--osl", "500", "--phase", "serve")


def test_a_target_is_written_whole_or_not_at_all(tmp_path: Path) -> None:
    def export(out: Path, target: str) -> None:
        asked = ["export", *QWEN, "--tp", "4", "--batch", "32", "--to", target, "--out", str(out)]
        assert CliRunner().invoke(app, asked, catch_exceptions=False).exit_code == 0

    old = tmp_path / "old"
    export(old, "trtllm")
    (old / "mine.txt").write_text("mine")
    before = {path.name: path.read_bytes() for path in old.iterdir()}
    export(tmp_path / "whole", "dtensor")
    sizes = sorted(path.stat().st_size for path in (tmp_path / "whole").iterdir())
    unlimited = resource.getrlimit(resource.RLIMIT_FSIZE)
    for out in (old, tmp_path / "new" / "deep" / "er"):
        resource.setrlimit(resource.RLIMIT_FSIZE, (sizes[-1] - 1, unlimited[1]))  # the larger file has no room
        try:
            with pytest.raises(OSError, match="too large"):
                export(out, "dtensor")
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, unlimited)
    assert {path.name: path.read_bytes() for path in old.iterdir()} == before
    assert sorted(path.name for path in tmp_path.iterdir()) == ["old", "whole"]
    export(old, "dtensor")
    assert {path.name for path in old.iterdir()} == {*before, "sharding.py", "styles.py"}


def test_files_of_several_folders_appear_together(tmp_path: Path) -> None:
    write_together(tmp_path / "a" / "b", {"one/x": b"1", "two/x": b"2", "y": b"3"})
    assert (tmp_path / "a" / "b" / "two" / "x").read_bytes() == b"2"
    write_together(tmp_path / "a" / "b", {"three/x": b"4", "y": b"5"})
    found = {str(path.relative_to(tmp_path)): path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    assert found == {"a/b/one/x": b"1", "a/b/two/x": b"2", "a/b/y": b"5", "a/b/three/x": b"4"}


@pytest.mark.parametrize("place", ["one", "one/x", "y"])
@pytest.mark.parametrize("kind", ["link", "other"])
def test_nothing_is_written_behind_a_link_or_in_the_place_of_a_folder(tmp_path: Path, place: str, kind: str) -> None:
    (away := tmp_path / "away").mkdir()
    (taken := tmp_path / "out" / place).parent.mkdir(parents=True)
    file = place != "one"
    taken.symlink_to(away) if kind == "link" else taken.mkdir() if file else taken.touch()
    before = sorted(tmp_path.rglob("*"))
    files = {"one/x": b"1", "y": b"2"}
    if file and kind == "link":  # a link in a file's place is replaced by it
        write_together(tmp_path / "out", files)
        assert (taken.is_symlink(), taken.is_file()) == (False, True)
    else:
        with pytest.raises(OSError, match="or nothing, in its place"):
            write_together(tmp_path / "out", files)
        assert sorted(tmp_path.rglob("*")) == before
    assert list(away.iterdir()) == []


def test_what_does_not_fit_says_so_first_and_the_exit_code_is_3(tmp_path: Path) -> None:
    asked = ["export", *QWEN, "--tp", "1", "--batch", "512", "--to", "megatron"]
    shown = CliRunner().invoke(app, [*asked, "--out", str(tmp_path)], catch_exceptions=False)
    assert shown.exit_code == NOTHING_FEASIBLE
    assert re.match(r"infeasible: .*GB", shown.stderr)
    assert shown.stdout.startswith("CUDA_DEVICE_MAX_CONNECTIONS=1 torchrun")
    assert (tmp_path / "start.sh").is_file()
    result = CliRunner().invoke(app, [*asked, "--json"], catch_exceptions=False)
    assert result.exit_code == NOTHING_FEASIBLE
    assert "GB" in json.loads(result.stdout)["violations"][0]


@pytest.mark.parametrize(
    ("asked", "says"),
    [
        (("--tp", "1", "--batch", "512"), "GB"),
        (("--tp", "4", "--batch", "32", "--dims", "megatron-sp", "--engine", "vllm"), "vLLM 0.33.0"),
    ],
)
def test_evaluate_says_first_what_an_illegal_strategy_breaks(asked: tuple[str, ...], says: str) -> None:
    shown = CliRunner().invoke(app, ["evaluate", *QWEN, *asked], catch_exceptions=False)
    assert shown.exit_code == NOTHING_FEASIBLE
    assert re.match(rf"(.*\n)+?Infeasible: .*{re.escape(says)}", shown.stdout)
    result = CliRunner().invoke(app, ["evaluate", *QWEN, *asked, "--json"], catch_exceptions=False)
    assert result.exit_code == NOTHING_FEASIBLE
    assert json.loads(result.stdout)["violations"] or json.loads(result.stdout)["outside_space"]
