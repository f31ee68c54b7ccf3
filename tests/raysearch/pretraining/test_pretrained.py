"""`raysearch pretrain`, small: the same whoever draws it, gone on with after a stop, and of use to a search."""

from __future__ import annotations

import io
import json
import os
import random
import signal
import struct
import subprocess
import sys
import time
import zipfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
from safetensors import safe_open
from safetensors.numpy import save
from typer.testing import CliRunner

from envs import StrategySpace
from raysearch.base.errors import InputError, Interrupted, RunFailed
from raysearch.cli.app import app
from raysearch.pretraining.array_files import ArrayFiles, make_files
from raysearch.pretraining.dataset import NETWORK_TARGETS, Rows, _asked, _evaluated, read_files
from raysearch.pretraining.pretrained import PRIOR_FILE, pretrain
from raysearch.pretraining.pretraining_file import Distribution, Network, PretrainingFile
from raysearch.pretraining.random_workloads import random_workload
from raysearch.pretraining.training import trained
from raysearch.searchers.prior.network import FACTOR_COUNT, read_prior
from raysearch.searchers.prior.strategy_features import OPS, SHARES
from raysearch.searchers.registry import make_searcher
from sim.config.catalog import load_workload
from sim.config.files import CatalogError, config_path, read_config
from tests.conftest import command_environment
from tests.processes import Started, descendants, started_by, wait_until
from tests.raysearch.fuzzing import INPUTS, LONG, bounded_memory, broken

SMALL = "seed = 1\nworkloads = 40\nstrategies = 40\n[network]\nwidth = 8\nsteps = {}\nbatch = 32\n"
SMALL += "[distribution]\nextended_share = 0.0\nserve_share = 0.1\n"


@contextmanager
def no_bar(description: str) -> Iterator[Callable[[int, int], None]]:
    yield lambda done, total: None


class Stopped(Exception):
    pass


@contextmanager
def stopping_bar(description: str) -> Iterator[Callable[[int, int], None]]:
    def show(done: int, total: int) -> None:
        if description == "evaluating workloads" and done >= 1:
            raise Stopped

    yield show


def config(folder: Path, steps: int = 20) -> str:
    path = folder / f"small_{steps}.toml"
    path.write_text(SMALL.format(steps))
    return str(path)


def test_a_workload_is_the_same_in_whatever_order_workloads_are_drawn() -> None:
    distribution = Distribution()
    there = [random_workload(distribution, 3, index)[0] for index in range(6)]
    back = [random_workload(distribution, 3, index)[0] for index in reversed(range(6))]
    for one, other in zip(there, reversed(back), strict=True):
        assert (one.model, one.degrees, one.tpot_slo_s) == (other.model, other.degrees, other.tpot_slo_s)
        assert one.hardware.hbm_bandwidth_bytes_per_s == other.hardware.hbm_bandwidth_bytes_per_s


def test_machines_lie_around_the_measured_one_and_some_are_it() -> None:
    drawn = [random_workload(Distribution(), 0, index) for index in range(60)]
    rates = np.array([workload.hardware.hbm_bandwidth_bytes_per_s for workload, _ in drawn])
    np.testing.assert_array_equal(rates == 3.35e12, [known for _, known in drawn])
    assert 0.1 < (rates == 3.35e12).mean() < 0.6
    assert rates.min() < 2e12 < 8e12 < rates.max()  # of an A100 and of a B300
    links = np.array([workload.hardware.collectives.all_reduce_bandwidth_bytes_per_s for workload, _ in drawn])
    assert links.min() < 4e10 < 9e11 < links.max()  # of an L40S on PCIe 4.0 and of a B300


def test_only_workloads_kept_from_training_are_on_machines_of_unknown_efficiencies() -> None:
    pretraining = PretrainingFile(workloads=20, strategies=40)
    spreads = {"as it is": 0.25, "none": 0.0}
    rows = {
        name: [
            _evaluated(pretraining.model_copy(update={"distribution": Distribution(efficiency_spread=spread)}), index)[
                0
            ]
            for index in (18, 19)
        ]
        for name, spread in spreads.items()
    }
    (learned, kept), (same, other) = rows["as it is"], rows["none"]
    np.testing.assert_array_equal(learned.targets, same.targets)
    assert not kept.known.any()
    assert np.abs(kept.targets[:5] - other.targets[:5]).max() > 0.05
    assert np.abs(kept.missed[:5]).max() > 0.05  # by what expects nothing of what was measured of the machine
    np.testing.assert_allclose(other.missed, 0, atol=1e-9)


@pytest.mark.slow
def test_a_pretraining_that_was_stopped_goes_on_and_a_search_can_use_it(tmp_path: Path) -> None:
    whole, stopped = tmp_path / "whole", tmp_path / "stopped"
    header = pretrain(config(tmp_path), whole, 1, no_bar)
    assert header.figures["workloads"] == 40
    with pytest.raises(Stopped):
        pretrain(config(tmp_path), stopped, 2, stopping_bar)
    assert len(list(stopped.glob("rows-*.npz"))) >= 1
    pretrain(config(tmp_path), stopped, 1, no_bar)
    one, other = (read_prior(folder / PRIOR_FILE) for folder in (whole, stopped))
    for name, array in one.arrays.items():
        np.testing.assert_array_equal(array, other.arrays[name])
    space = StrategySpace(load_workload("gpt_moe_1_2t_16k"))
    searcher = make_searcher("prior", space, seed=0, budget=1, weights=str(whole / PRIOR_FILE))
    action = searcher.ask(np.zeros((3, 16), np.float32))
    assert action is not None
    space.decode(action)
    other_seed = Path(config(tmp_path, 21))
    other_seed.write_text(other_seed.read_text().replace("seed = 1", "seed = 2"))
    with pytest.raises(InputError, match="holds other workloads"):
        pretrain(str(other_seed), whole, 1, no_bar)


@pytest.mark.slow
def test_a_training_that_was_stopped_learns_what_one_that_never_was_would(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    inputs, workload = rng.normal(size=(400, SHARES.stop)).astype(np.float16), np.arange(400) // 10
    targets = (inputs[:, :4] ** 2).astype(np.float32)
    about = inputs[:, 5] > 1, np.ones(400, np.float32), workload, inputs[:, 0] > 0
    rows = Rows(inputs, targets, *about, np.zeros((400, FACTOR_COUNT)), np.zeros(400))
    network = Network(width=8, steps=1200, batch=16)

    def train(checkpoint: Path, stop_at: int) -> dict[str, np.ndarray]:
        def show(done: int, total: int) -> None:
            if done == stop_at:
                raise Stopped

        return trained(rows, network, 0, checkpoint, show, lambda *_: None)

    whole = train(tmp_path / "whole.safetensors", 0)
    with pytest.raises(Stopped):
        train(tmp_path / "stopped.safetensors", 500)
    went_on = train(tmp_path / "stopped.safetensors", 0)
    for name, array in whole.items():
        np.testing.assert_array_equal(went_on[name], array)


def test_a_mistake_in_the_file_is_one_error(tmp_path: Path) -> None:
    path = tmp_path / "wrong.toml"
    path.write_text("workloads = 40\nworkload = 3\n")
    with pytest.raises(CatalogError, match="workload: unknown key; did you mean 'workloads'"):
        pretrain(str(path), tmp_path / "out", 1, no_bar)


@bounded_memory()
def test_forged_rows_are_learnt_from_or_refused(tmp_path: Path) -> None:
    asked, path = PretrainingFile(workloads=20), tmp_path / "rows.npz"
    whole: dict[str, np.ndarray] = {
        "asked": np.frombuffer(json.dumps(_asked(asked)).encode(), np.uint8),
        "inputs": np.zeros((3, 4), np.float16),
        "targets": np.zeros((3, len(NETWORK_TARGETS)), np.float32),
        "broken": np.zeros(3, bool),
        "weights": np.ones(3, np.float32),
        "workload": np.arange(3),
        "known": np.ones(3, bool),
        "choices": np.zeros((1, len(OPS)), np.int8),
    }
    for seed in range(INPUTS):
        rng = random.Random(seed)
        name = rng.choice(list(whole))
        others = [whole[name][:1], whole[name] * np.nan, whole[name].T[None], np.array("x"), np.zeros(0), np.array(7)]
        arrays = whole | ({name: rng.choice(others)} if rng.random() < 0.5 else {})
        saved = io.BytesIO()
        rng.choice([np.savez, np.savez, np.savez_compressed])(saved, **arrays)
        path.write_bytes(broken(saved.getvalue(), rng) if rng.random() < 0.5 else saved.getvalue())
        try:
            rows, _ = read_files([path], asked)
        except ValueError as refusal:
            assert str(path) in str(refusal)  # noqa: PT017
        else:
            assert np.isfinite(rows.inputs).all()


@bounded_memory()
def test_an_archive_that_claims_more_than_it_holds_is_refused(tmp_path: Path) -> None:
    def archive(shape: str, data: bytes = b"", magic: bytes = np.lib.format.magic(1, 0)) -> bytes:
        header = f"{{'descr': '<f4', 'fortran_order': False, 'shape': {shape}}}\n".encode()
        with zipfile.ZipFile(saved := io.BytesIO(), "w") as made:
            made.writestr("a.npy", magic + struct.pack("<H", len(header)) + header + data)
        return saved.getvalue()

    once = archive("(1000000,)", bytes(4 * 10**6))
    at, end = once.index(b"PK\1\2"), once.index(b"PK\5\6")
    listed = once[at:end] * 300
    thrice = once[:at] + listed + struct.pack("<4s4H2LH", b"PK\5\6", 0, 0, 300, 300, len(listed), at, 0)
    claims = [archive(shape) for shape in (f"({10**13},)", f"({10**30},)", f"({2**63},)", "(-1,)")]
    path = tmp_path / "rows.npz"
    for content in (*claims, archive("(1,)", magic=b"text"), thrice, once):
        path.write_bytes(content)
        os.truncate(path, len(content) if content is not once else 3 * 10**9)  # takes no room on disk
        with pytest.raises(ValueError, match=r"rows\.npz is damaged"):
            read_files([path], PretrainingFile(workloads=20))


def test_a_checkpoint_that_is_none_is_one_error(tmp_path: Path) -> None:
    inputs, targets = np.zeros((40, SHARES.stop), np.float16), np.zeros((40, 4), np.float32)
    about = np.zeros(40, bool), np.ones(40, np.float32), np.arange(40), np.ones(40, bool)
    rows = Rows(inputs, targets, *about, np.zeros((40, FACTOR_COUNT)), np.zeros(40))
    path = tmp_path / "training.safetensors"

    def train(width: int) -> None:
        trained(rows, Network(width=width, steps=2, batch=4), 0, path, lambda *_: None, lambda *_: None)

    train(8)
    whole = path.read_bytes()
    with safe_open(path, "numpy") as file:
        tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 no dictionary
    deep = save(tensors, {"step": "1", "groups": "[" * 20_000})
    with bounded_memory():
        for content in (b"", b"x" * 100, whole[:-1], whole.replace(b"0.0001", b'"abcd"'), deep):
            path.write_bytes(content)
            with pytest.raises(InputError, match="delete it, and the same command trains again"):
                train(8)
        os.truncate(path, 3 * 10**9)  # takes no room on disk
        with pytest.raises(InputError, match=r"more than any; delete it"):
            train(8)
    path.write_bytes(whole)
    with pytest.raises(InputError, match="or of another network"):
        train(16)


def test_a_pretraining_that_is_stopped_says_how_to_go_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def stopped(*_: object) -> None:
        raise Interrupted(signal.SIGINT)

    monkeypatch.setattr("raysearch.pretraining.pretrained.pretrain", stopped)
    with pytest.raises(Interrupted, match=rf"is kept in {tmp_path}: the same command continues"):
        CliRunner().invoke(app, ["pretrain", "default", "--out", str(tmp_path)], catch_exceptions=False)


def test_a_pretraining_says_what_it_makes_before_it_begins() -> None:
    shipped = read_config(config_path("pretraining", "default"), PretrainingFile)
    assert shipped.work.startswith("4,000 workloads of some 180 strategies, 4,500 steps of training; 460 black boxes")
    assert shipped.work.endswith("about 18 minutes of a core")
    small = PretrainingFile(workloads=20, strategies=40, network=Network(steps=10))
    assert small.work == "20 workloads of some 40 strategies, 10 steps of training; about 1 minute of a core"


SPAWNING = """
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from raysearch.base.spawning import spawning
if __name__ == "__main__":
    with spawning(), ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool:
        print(pool.submit(abs, -3).result())
"""


def test_processes_run_nothing_that_lies_in_the_working_directory(tmp_path: Path) -> None:
    (tmp_path / "here").mkdir()
    (tmp_path / "here" / "multiprocessing.py").write_text("raise SystemExit('run')")
    (tmp_path / "script.py").write_text(SPAWNING)
    words = [sys.executable, str(tmp_path / "script.py")]
    done = subprocess.run(words, cwd=tmp_path / "here", capture_output=True, text=True, check=False)
    assert (done.stdout, done.returncode) == ("3\n", 0), done.stderr


@pytest.mark.slow
def test_a_pretraining_that_is_killed_leaves_no_process(tmp_path: Path) -> None:
    (tmp_path / "long.toml").write_text("workloads = 20000\nstrategies = 4000\n")
    words = [sys.executable, "-m", "raysearch", "pretrain", "long.toml", "--out", "out", "--set", "processes=2"]
    process = subprocess.Popen(words, cwd=tmp_path, env=command_environment(), stderr=subprocess.DEVNULL)
    wait_until(lambda: working(process.pid))
    started = started_by(process.pid)
    process.kill()
    process.wait()
    wait_until(lambda: all(each.ended for each in started))


def write_but_first(indices: range, path: Path) -> None:
    if indices.start == 0:
        path.with_suffix(".waits").write_text(str(os.getpid()))
        time.sleep(600)
    path.touch()


@pytest.mark.slow
def test_a_process_that_stays_stopped_is_ended_and_what_the_others_made_is_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("raysearch.pretraining.array_files._LOOKED_EVERY_S", 0.2)

    def stop_one(done: int, total: int) -> None:
        if done == 2:
            while not (waiting := tmp_path / "rows-00000.waits").exists() or not waiting.read_text():
                time.sleep(0.01)
            os.kill(int(waiting.read_text()), signal.SIGSTOP)

    with pytest.raises(RunFailed, match="a process that evaluates ended with -9: the same command continues"):
        make_files(ArrayFiles("rows", 60, write_but_first, ()), tmp_path, 3, stop_one)
    assert sorted(path.name for path in tmp_path.glob("*.npz")) == ["rows-00001.npz", "rows-00002.npz"]


STAGES = [
    ("rows-00000.npz", signal.SIGKILL),
    ("training.safetensors", signal.SIGTERM),
    ("tables-00000.npz", signal.SIGINT),
    ("imitation.safetensors", signal.SIGKILL),
    ("policy-0000.safetensors", signal.SIGKILL),
    ("policy-0001.safetensors", signal.SIGTERM),
    ("policy-0002.safetensors", signal.SIGINT),
]
"""What a pre-training has just written when it is stopped; the last three are RLlib's."""
POLICY = "[policy]\ntables = 16\ncalls = 3\nsearches = 1\nwidth = 8\ndepth = 1\nsteps = 4\nbatch = 8\n"
POLICY += "iterations = 4\ncalls_per_iteration = 12\n"


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.skipif(not LONG, reason="ten starts of PyTorch and Ray: see `make fuzz`")
def test_a_pretraining_that_is_stopped_at_each_stage_leaves_nothing_and_ends_as_one_that_never_was(
    tmp_path: Path,
) -> None:
    (tmp_path / "small.toml").write_text(SMALL.format(60) + POLICY)

    def begin(out: str) -> subprocess.Popen[bytes]:
        words = [sys.executable, "-m", "raysearch", "pretrain", "small.toml", "--out", out]
        return subprocess.Popen(words, cwd=tmp_path, env=command_environment(), stderr=subprocess.DEVNULL)

    for name, signum in STAGES:
        process, started = begin("stopped"), set[Started]()
        while not (tmp_path / "stopped" / name).exists() and process.poll() is None:
            started |= started_by(process.pid)
            time.sleep(0.05)
        process.send_signal(signum)
        process.wait()
        wait_until(lambda started=started: all(each.ended for each in started))
    assert (begin("stopped").wait(), begin("straight").wait()) == (0, 0)
    for path in (tmp_path / "straight").glob("*.safetensors"):
        assert arrays_of(tmp_path / "stopped" / path.name) == arrays_of(path), path.name


def arrays_of(path: Path) -> dict[str, bytes]:
    with safe_open(path, "numpy") as file:
        return {name: file.get_tensor(name).tobytes() for name in file.keys()}  # noqa: SIM118 no dictionary


def working(command: int) -> list[int]:
    """The processes that evaluate for a command, once both have begun."""
    found = [pid for pid, title in descendants(command).items() if "spawn_main" in title]
    mapped = [pid for pid in found if "numpy" in Path(f"/proc/{pid}/maps").read_text()]
    return found if len(mapped) == 2 else []
