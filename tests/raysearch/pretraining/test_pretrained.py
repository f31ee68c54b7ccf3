"""`raysearch pretrain`, small: the same whoever draws it, gone on with after a stop, and of use to a search."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest

from envs import StrategySpace
from raysearch.base.errors import InputError
from raysearch.pretraining.dataset import Rows
from raysearch.pretraining.pretrained import PRIOR_FILE, pretrain
from raysearch.pretraining.pretraining_file import Distribution, Network
from raysearch.pretraining.random_workloads import random_workload
from raysearch.pretraining.training import trained
from raysearch.searchers.prior.network import read_prior
from raysearch.searchers.registry import make_searcher
from sim.config.catalog import load_workload
from sim.config.files import CatalogError

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
        if description == "evaluating workloads" and done == 1:
            raise Stopped

    yield show


def config(folder: Path, steps: int = 20) -> str:
    path = folder / f"small_{steps}.toml"
    path.write_text(SMALL.format(steps))
    return str(path)


def test_a_workload_is_the_same_in_whatever_order_workloads_are_drawn() -> None:
    distribution = Distribution()
    there = [random_workload(distribution, 3, index) for index in range(6)]
    back = [random_workload(distribution, 3, index) for index in reversed(range(6))]
    for one, other in zip(there, reversed(back), strict=True):
        assert (one.model, one.degrees, one.tpot_slo_s) == (other.model, other.degrees, other.tpot_slo_s)
        assert one.hardware.hbm_bandwidth_bytes_per_s == other.hardware.hbm_bandwidth_bytes_per_s


def test_machines_lie_around_the_measured_one_and_some_are_it() -> None:
    drawn = [random_workload(Distribution(), 0, index).hardware for index in range(60)]
    rates = np.array([each.hbm_bandwidth_bytes_per_s for each in drawn])
    assert 0.1 < (rates == 3.35e12).mean() < 0.6
    assert rates.min() < 2e12 < 8e12 < rates.max()  # of an A100 and of a B300


@pytest.mark.slow
def test_a_pretraining_that_was_stopped_goes_on_and_a_search_can_use_it(tmp_path: Path) -> None:
    whole, stopped = tmp_path / "whole", tmp_path / "stopped"
    header = pretrain(config(tmp_path), whole, 1, no_bar)
    assert header.figures["workloads"] == 40
    with pytest.raises(Stopped):
        pretrain(config(tmp_path), stopped, 1, stopping_bar)
    assert len(list(stopped.glob("rows-*.npz"))) == 1
    pretrain(config(tmp_path), stopped, 1, no_bar)
    one, other = (read_prior(folder / PRIOR_FILE) for folder in (whole, stopped))
    for mine, its in zip(one.weights, other.weights, strict=True):
        np.testing.assert_array_equal(mine, its)
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
    inputs, workload = rng.normal(size=(400, 6)).astype(np.float16), np.arange(400) // 10
    targets = (inputs[:, :4] ** 2).astype(np.float32)
    rows = Rows(inputs, targets, inputs[:, 5] > 1, np.ones(400, np.float32), workload)
    network = Network(width=8, steps=1200, batch=16)

    def train(checkpoint: Path, stop_at: int) -> dict[str, np.ndarray]:
        def show(done: int, total: int) -> None:
            if done == stop_at:
                raise Stopped

        arrays, _ = trained(rows, network, 0, checkpoint, show, lambda *_: None)
        return arrays

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
