"""Checkpoints: what they hold comes back as it was, and none of them can run code."""

from __future__ import annotations

import ast
import hashlib
import io
import os
import pickle
import re
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from raysearch.pretraining.array_files import UNREADABLE, read_array_file
from raysearch.runs.checkpoint import CHECKPOINT_FILE, LARGEST_BYTES, pack, read_checkpoint, unpack, write_checkpoint
from raysearch.runs.records import RunSpec
from raysearch.runs.run import SearchRun
from raysearch.searchers.registry import searcher_names
from tests.conftest import CHECKOUT

LEAVES = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=5)
ARRAYS = st.sampled_from([np.arange(6).reshape(2, 3).astype(dtype) for dtype in ("i8", "i2", "f4", "f8", "u1", "?")])
TREES = st.recursive(
    LEAVES | ARRAYS,
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.lists(inner, max_size=3).map(tuple)
        | st.dictionaries(st.text(alphabet="$ab", max_size=3) | st.integers(0, 3), inner, max_size=3)
    ),
    max_leaves=8,
)


def same(left: Any, right: Any) -> bool:
    if type(left) is not type(right):
        return False
    if isinstance(left, np.ndarray):
        return left.dtype == right.dtype and left.shape == right.shape and bool((left == right).all())
    if isinstance(left, dict):
        return list(left) == list(right) and all(same(left[key], right[key]) for key in left)
    if isinstance(left, (list, tuple)):
        return len(left) == len(right) and all(map(same, left, right))
    return left == right


@settings(deadline=None)
@given(st.dictionaries(st.text(alphabet="$ab", max_size=3), TREES, max_size=4))
def test_what_is_packed_comes_back_as_it_was(state: dict[str, Any]) -> None:
    assert same(unpack(pack(state)), state)


def test_numbers_of_any_size_come_back() -> None:
    state = {"generator": 2**127 + 1, "best": float("-inf"), "raw": np.float64(0.1)}
    assert unpack(pack(state)) == {"generator": 2**127 + 1, "best": float("-inf"), "raw": 0.1}


@pytest.mark.parametrize("value", [object(), np.array([None]), np.datetime64("2026-01-01"), {1, 2}, b"bytes"])
def test_what_is_neither_plain_nor_an_array_of_numbers_is_refused_with_its_place(value: Any) -> None:
    with pytest.raises(TypeError, match=r"plain data or an array of numbers at state\.inner\[1\]"):
        pack({"inner": [0, value]})


class Planted:
    """Makes a file where it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (str(self.path),)


def as_object_array(planted: Planted) -> bytes:
    buffer = io.BytesIO()
    np.savez(buffer, tree=np.array([planted], dtype=object), allow_pickle=True)
    return buffer.getvalue()


def as_object_array_beside_a_tree(planted: Planted) -> bytes:
    buffer = io.BytesIO(pack({"inner": np.arange(3)}))
    forged = io.BytesIO()
    np.save(forged, np.array([planted], dtype=object), allow_pickle=True)
    joined = io.BytesIO()
    with zipfile.ZipFile(buffer) as whole, zipfile.ZipFile(joined, "w") as archive:
        archive.writestr("tree.npy", whole.read("tree.npy"))
        archive.writestr("0.npy", forged.getvalue())
    return joined.getvalue()


@pytest.mark.parametrize("forge", [pickle.dumps, as_object_array, as_object_array_beside_a_tree])
def test_a_forged_checkpoint_runs_nothing_and_counts_as_damaged(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, forge: Callable[[Planted], bytes]
) -> None:
    content, trace = forge(Planted(tmp_path / "ran")), tmp_path / "ran"
    (tmp_path / CHECKPOINT_FILE).write_bytes(hashlib.sha256(content).digest() + content)
    assert read_checkpoint(tmp_path) is None
    assert not trace.exists()
    assert "is damaged" in caplog.text


def test_an_archive_that_would_unfold_is_refused() -> None:
    buffer = io.BytesIO()
    np.savez_compressed(buffer, tree=np.zeros(10**7, np.uint8))
    with pytest.raises(ValueError, match="compressed"):
        unpack(buffer.getvalue())


def test_an_archive_that_says_it_is_encrypted_is_refused(tmp_path: Path) -> None:
    packed = bytearray(pack({"a": np.arange(3)}))
    packed[packed.index(b"PK\1\2") + 8] |= 1  # the flag of its first member
    with pytest.raises(ValueError, match="is encrypted"):
        unpack(bytes(packed))
    (tmp_path / "rows.npz").write_bytes(packed)
    with pytest.raises(UNREADABLE, match="is encrypted"):
        read_array_file(tmp_path / "rows.npz")


def test_an_array_that_no_memory_holds_is_refused() -> None:
    header = io.BytesIO()
    np.lib.format.write_array_header_1_0(header, {"descr": "<f8", "fortran_order": False, "shape": (10**13,)})
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as archive:
        archive.writestr("tree.npy", header.getvalue())
    with pytest.raises(ValueError, match="Error"):
        unpack(buffer.getvalue())


def test_a_checkpoint_larger_than_any_is_not_read(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / CHECKPOINT_FILE).touch()
    os.truncate(tmp_path / CHECKPOINT_FILE, LARGEST_BYTES + 1)  # takes no room on disk
    assert read_checkpoint(tmp_path) is None
    assert "too long: expected at most 536,870,912 bytes" in caplog.text


def saved_after_six(spec: RunSpec, folder: Path) -> dict[str, Any]:
    """What a run has in its checkpoint after six calls."""
    run = SearchRun(spec, folder)
    run.advance(6)
    run.save()
    run.close()
    state = read_checkpoint(folder)
    assert state is not None
    return state


@pytest.mark.parametrize("searcher", [name for name in searcher_names() if name != "sb3_ppo"])
def test_a_run_whose_checkpoint_makes_no_sense_starts_again(
    tiny_workload: Path, tmp_path: Path, searcher: str, caplog: pytest.LogCaptureFixture
) -> None:
    """With the right digest, and of the right run: only the searcher can tell."""
    spec = RunSpec(str(tiny_workload), searcher, seed=0, budget=12, options=small(searcher))
    state = saved_after_six(spec, tmp_path)
    write_checkpoint(tmp_path, {**state, "searcher": {"rng": {"state": "none"}}})
    again = SearchRun(spec, tmp_path, resume=True)
    assert again.calls == 0
    assert "starts again from the first call" in caplog.text
    again.advance(12)
    again.close()


@pytest.mark.parametrize(
    "forged",
    [
        lambda state: {"wall_s": "x"},
        lambda state: {"improvements": 5},
        lambda state: {"improvements": [(1, "x")]},
        lambda state: {"gate": {**state["gate"], "calls": -5}},
        lambda state: {"gate": {**state["gate"], "calls": "six"}},
    ],
)
def test_what_a_run_itself_cannot_use_of_a_checkpoint_has_it_start_again(
    tiny_workload: Path, tmp_path: Path, forged: Callable[[dict[str, Any]], dict[str, Any]]
) -> None:
    spec = RunSpec(str(tiny_workload), "random", seed=0, budget=12)
    state = saved_after_six(spec, tmp_path)
    write_checkpoint(tmp_path, {**state, **forged(state)})
    again = SearchRun(spec, tmp_path, resume=True)
    assert again.calls == 0
    again.advance(12)
    assert again.finish()["calls"] == 12


def small(searcher: str) -> dict[str, Any]:
    return {"embedding": 16, "hidden": 16, "feed_forward": 16} if searcher == "ppo_paper" else {}


LOADERS = {"pickle", "cloudpickle", "dill", "shelve", "marshal", "joblib"}
SUSPECT = re.compile("|".join((*LOADERS, r"\b(?:open|read_text|read_bytes|load|fromfile|read_pickle|eval|exec)\(")))
"""What a module that is refused has somewhere: most have not, and need not be parsed."""
OF_OUR_OWN = {
    *("sim/config/writing.py", "raysearch/deploy/live/deployed_benchmark.py"),  # what was just written
    *("raysearch/fidelity/measuring/links.py", "raysearch/fidelity/calibration/coefficients.py"),  # or just read
    *("raysearch/deploy/export/dtensor.py", "raysearch/deploy/export/engine_words.py"),  # shipped
    *("raysearch/fidelity/calibration/disaggregated_recipes.py", "raysearch/optima/optimum_cache.py"),
    "raysearch/simulators/plugin.py",  # the source of a function that a user named
    *(f"raysearch/processes/{name}.py" for name in ("claim", "descendants", "marked", "table", "watcher")),  # /proc
}
"""Modules that open files otherwise than by `sim.config.reading`, none of which anybody else hands over."""


def opens_a_file(call: ast.Call) -> bool:
    """Whether a call reads a file past `sim.config.reading`."""
    name = call.func.attr if isinstance(call.func, ast.Attribute) else ast.unparse(call.func)
    if name in ("read_text", "read_bytes"):
        return isinstance(call.func, ast.Attribute)
    given = [
        each.value for each in (*call.args, *(word.value for word in call.keywords)) if isinstance(each, ast.Constant)
    ]
    modes = [each for each in given if isinstance(each, str) and set(each) <= set("rwxabt+")]
    return name == "open" and ast.unparse(call.func) != "os.open" and not any(set("wxa") & set(mode) for mode in modes)


def test_no_module_makes_objects_of_files_or_reads_them_past_the_one_door() -> None:
    for path in [*CHECKOUT.glob("raysearch/**/*.py"), *CHECKOUT.glob("envs/*.py"), *CHECKOUT.glob("sim/**/*.py")]:
        may_open = path.relative_to(CHECKOUT).as_posix() in OF_OUR_OWN
        text = path.read_text(encoding="utf-8")
        for node in ast.walk(ast.parse(text if SUSPECT.search(text) else "")):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            names += [node.module] if isinstance(node, ast.ImportFrom) and node.module else []
            assert not LOADERS & {name.partition(".")[0] for name in names}, path
            if isinstance(node, ast.Call):
                assert may_open or not opens_a_file(node), f"{path}: read files by sim.config.reading"
                last = getattr(node.func, "attr", getattr(node.func, "id", ""))
                called = ast.unparse(node.func) if last in {"load", "fromfile", "read_pickle", "eval", "exec"} else ""
                assert called not in {"torch.load", "np.fromfile", "pd.read_pickle", "eval", "exec"}, path
                if called in {"np.load", "numpy.load"}:
                    keywords = {keyword.arg: ast.unparse(keyword.value) for keyword in node.keywords}
                    assert keywords.get("allow_pickle") == "False", path
