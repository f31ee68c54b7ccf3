import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from envs import StrategySpace
from raysearch.registry import make_searcher
from raysearch.searcher import Outcome, Searcher
from sim.catalog import load_workload
from sim.heuristics import megatron_dims, megatron_sp_dims
from sim.simulate import evaluate
from tests.envs.fakes import DENSE, MOE, barren, tiny_workload
from tests.raysearch.searcher_suite import Run, SearcherSuite, Setting

SPACE = StrategySpace(load_workload(MOE))
NOTHING = np.full((3, 16), -1.0, np.float32)


class TestRandom(SearcherSuite):
    @pytest.fixture
    def name(self) -> str:
        return "random"


class TestRandomWalk(SearcherSuite):
    @pytest.fixture
    def name(self) -> str:
        return "random_walk"


class TestAnnealing(SearcherSuite):
    @pytest.fixture
    def name(self) -> str:
        return "annealing"


class TestCoordinate(SearcherSuite):
    @pytest.fixture
    def name(self) -> str:
        return "coordinate"


class TestMegatron(SearcherSuite):
    @pytest.fixture
    def name(self) -> str:
        return "megatron"

    @pytest.fixture
    def seeded(self) -> bool:
        return False


class TestMegatronSP(TestMegatron):
    @pytest.fixture
    def name(self) -> str:
        return "megatron_sp"


class TestAnnealingTuned(SearcherSuite):
    @pytest.fixture
    def name(self) -> str:
        return "annealing_tuned"


class TestMCMC(SearcherSuite):
    @pytest.fixture
    def name(self) -> str:
        return "mcmc"


class TestGenetic(SearcherSuite):
    @pytest.fixture
    def name(self) -> str:
        return "genetic"


class TestAntColony(SearcherSuite):
    @pytest.fixture
    def name(self) -> str:
        return "ant_colony"


class LibrarySuite(SearcherSuite):
    """Of the slow ones: just beyond what they sample at random to begin with."""

    @pytest.fixture
    def budget(self) -> int:
        return 24


class TestOptunaTPE(LibrarySuite):
    @pytest.fixture
    def name(self) -> str:
        return "optuna_tpe"


class TestOptunaCmaEs(LibrarySuite):
    @pytest.fixture
    def name(self) -> str:
        return "optuna_cmaes"

    @pytest.fixture
    def options(self) -> dict[str, Any]:
        return {"population": 6, "restart_after": 15}


class TestNevergrad(LibrarySuite):
    @pytest.fixture
    def name(self) -> str:
        return "nevergrad"


class TestSB3PPO(LibrarySuite):
    @pytest.fixture
    def name(self) -> str:
        return "sb3_ppo"

    @pytest.fixture
    def options(self) -> dict[str, Any]:
        return {"embedding": 16}


def outcome(raw: float) -> Outcome:
    return Outcome(raw=raw, feasible=raw > 0, reward=0.0, best=raw, observation=NOTHING)


def ask(searcher: Searcher) -> np.ndarray:
    action = searcher.ask(NOTHING)
    assert action is not None
    return action


def differences(first: np.ndarray, second: np.ndarray) -> int:
    return int(np.count_nonzero(first != second))


# --- random walk ----------------------------------------------------------------------------------


def test_the_random_walk_changes_one_coordinate_per_call_whatever_it_is_told() -> None:
    searcher = make_searcher("random_walk", SPACE, seed=0, budget=100)
    previous = ask(searcher)
    for raw in [5.0, 0.0, 1.0, 0.0] * 20:
        searcher.tell(previous, outcome(raw))
        action = ask(searcher)
        assert differences(action, previous) == 1
        previous = action


# --- annealing ------------------------------------------------------------------------------------


def test_the_temperature_falls_from_100_to_0_on_a_cosine_over_the_budget() -> None:
    searcher = make_searcher("annealing", SPACE, seed=0, budget=4)
    temperatures = []
    for _ in range(5):
        temperatures.append(searcher.metrics()["temperature"])
        searcher.tell(ask(searcher), outcome(1.0))
    expected = [50 * (1 + math.cos(math.pi * k / 4)) for k in range(5)]
    assert temperatures == pytest.approx(expected)
    assert temperatures[0] == 100.0
    assert temperatures[2] == pytest.approx(50.0)
    assert temperatures[4] == 0.0


def test_annealing_proposes_neighbours_of_where_it_stands_and_always_moves_uphill() -> None:
    searcher = make_searcher("annealing", SPACE, seed=0, budget=50)
    position = ask(searcher)
    searcher.tell(position, outcome(1.0))
    for raw in range(2, 50):
        action = ask(searcher)
        assert differences(action, position) == 1
        searcher.tell(action, outcome(float(raw)))
        assert searcher.metrics()["current"] == raw
        position = action


def test_annealing_takes_a_loss_as_often_as_metropolis_says() -> None:
    """At T = 100 a loss of 50 tokens/s/GPU is taken with probability exp(-1/2)."""
    taken = 0
    for seed in range(2000):
        searcher = make_searcher("annealing", SPACE, seed=seed, budget=10**9)
        searcher.tell(ask(searcher), outcome(300.0))
        searcher.tell(ask(searcher), outcome(250.0))
        taken += searcher.metrics()["current"] == 250.0
    assert taken / 2000 == pytest.approx(math.exp(-0.5), abs=4 * 0.5 / math.sqrt(2000))


def test_cold_annealing_refuses_losses() -> None:
    searcher = make_searcher("annealing", SPACE, seed=0, budget=200, initial_temperature=1e-9)
    searcher.tell(ask(searcher), outcome(300.0))
    for _ in range(199):
        searcher.tell(ask(searcher), outcome(299.0))
        assert searcher.metrics()["current"] == 300.0


def test_among_infeasible_strategies_annealing_walks_freely() -> None:
    searcher = make_searcher("annealing", SPACE, seed=0, budget=100)
    previous = ask(searcher)
    for _ in range(50):
        searcher.tell(previous, outcome(0.0))
        action = ask(searcher)
        assert differences(action, previous) == 1
        previous = action


# --- coordinate search ----------------------------------------------------------------------------


def test_coordinate_search_climbs_to_the_optimum_of_a_separable_landscape_within_two_sweeps() -> None:
    """Every coordinate counts for itself, so one sweep finds the top and a second shows that it is one."""
    searcher = make_searcher("coordinate", SPACE, seed=0, budget=1000)
    best = 0.0
    calls = 0
    while searcher.metrics()["starts"] <= 1:
        action = ask(searcher)
        if searcher.metrics()["starts"] > 1:
            break
        calls += 1
        best = max(best, 1.0 + float(action.sum()))
        searcher.tell(action, outcome(1.0 + float(action.sum())))
    assert best == 1.0 + sum(SPACE.sizes) - len(SPACE.sizes)
    assert calls <= 1 + 2 * (sum(SPACE.sizes) - len(SPACE.sizes))


def test_coordinate_search_tries_every_other_value_of_a_coordinate_before_the_next() -> None:
    searcher = make_searcher("coordinate", SPACE, seed=3, budget=1000)
    start = ask(searcher)
    searcher.tell(start, outcome(10.0))
    tried: dict[int, set[int]] = {}
    for _ in range(sum(SPACE.sizes) - len(SPACE.sizes)):  # one sweep in which nothing is better
        action = ask(searcher)
        assert differences(action, start) == 1
        coordinate = int(np.flatnonzero(action != start)[0])
        tried.setdefault(coordinate, set()).add(int(action[coordinate]))
        searcher.tell(action, outcome(5.0))
    assert tried == {
        coordinate: set(range(size)) - {int(start[coordinate])} for coordinate, size in enumerate(SPACE.sizes)
    }
    assert searcher.metrics()["starts"] == 1
    assert differences(ask(searcher), start) > 1
    assert searcher.metrics()["starts"] == 2


def test_coordinate_search_drifts_over_plateaus() -> None:
    searcher = make_searcher("coordinate", SPACE, seed=0, budget=1000)
    start = ask(searcher)
    action = start
    for _ in range(40):
        searcher.tell(action, outcome(0.0))
        action = ask(searcher)
    assert searcher.metrics()["starts"] == 1
    assert differences(action, start) > 3


def test_coordinate_search_beats_independent_samples_on_the_real_workload(tmp_path: Path) -> None:
    best = {}
    for name in ("coordinate", "random"):
        run = Run(Setting(name, 1000, load_workload(MOE), evaluate), tmp_path / name).advance()
        run.close()
        best[name] = run.gate.best_raw
    assert best["coordinate"] > best["random"]


# --- Megatron -------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["megatron", "megatron_sp"])
@pytest.mark.parametrize("model", [MOE, DENSE])
def test_megatron_calls_every_combination_of_degrees_once_with_its_own_dims(
    name: str, model: str, tmp_path: Path
) -> None:
    workload = load_workload(model)
    run = Run(Setting(name, 10**6, workload, barren), tmp_path).advance()
    run.close()
    degrees = workload.degrees
    combinations = len(degrees.tp) * len(degrees.ep) * len(degrees.pp) * len(degrees.batch)
    assert run.searcher.sweep_calls(run.searcher.space) == combinations
    assert run.gate.calls == run.gate.unique_calls == combinations
    dims = (megatron_dims if name == "megatron" else megatron_sp_dims)(workload.model)
    assert {tuple(action[4:]) for action in run.actions} == {dims}
    assert run.searcher.ask(run.observation) is None


def test_a_small_budget_leaves_out_the_largest_tensor_parallel_degrees() -> None:
    searcher = make_searcher("megatron", StrategySpace(tiny_workload()), seed=0, budget=3)
    assert [tuple(ask(searcher)[:4]) for _ in range(4)] == [(0, 0, 0, 0), (0, 0, 0, 1), (0, 0, 1, 0), (0, 0, 1, 1)]
    searcher = make_searcher("megatron", SPACE, seed=0, budget=1000)
    tp = [int(ask(searcher)[0]) for _ in range(1000)]
    assert tp == sorted(tp)
