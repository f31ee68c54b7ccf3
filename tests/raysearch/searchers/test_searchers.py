import math
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest

from envs import StrategySpace
from raysearch.base.errors import InputError
from raysearch.searchers.interface import Outcome, Searcher
from raysearch.searchers.merit import merit
from raysearch.searchers.registry import make_searcher
from raysearch.simulators.opening import searched_space
from raysearch.testing.landscapes import DENSE, MOE, barren, tiny_workload
from raysearch.testing.searcher_suite import ConformanceRun, ConformanceSetting, SearcherSuite
from sim.config.catalog import load_workload
from sim.ops.heuristics import megatron_dims, megatron_sp_dims
from sim.optimum.spaces import space_of
from sim.simulate import evaluate
from sim.workload import SpaceName

SPACE = StrategySpace(load_workload(MOE))
NOTHING = np.full((3, 16), -1.0, np.float32)
PEERS = (
    "annealing_tuned",
    "mcmc",
    "genetic",
    "ant_colony",
    "optuna_tpe",
    "optuna_cmaes",
    pytest.param("nevergrad", marks=pytest.mark.slow),
)


class TestRandom(SearcherSuite):
    searcher = "random"


class TestRandomWalk(SearcherSuite):
    searcher = "random_walk"


class TestAnnealing(SearcherSuite):
    searcher = "annealing"


class TestCoordinate(SearcherSuite):
    searcher = "coordinate"


class TestMegatron(SearcherSuite):
    searcher = "megatron"
    seeded = False


class TestMegatronSP(TestMegatron):
    searcher = "megatron_sp"


class TestAnnealingTuned(SearcherSuite):
    searcher = "annealing_tuned"


class TestMCMC(SearcherSuite):
    searcher = "mcmc"


class TestGenetic(SearcherSuite):
    searcher = "genetic"


class TestAntColony(SearcherSuite):
    searcher = "ant_colony"


class LibrarySuite(SearcherSuite):
    """Of the slow ones: just beyond what they sample at random to begin with."""

    budget = 24


class TestOptunaTPE(LibrarySuite):
    searcher = "optuna_tpe"


class TestOptunaCmaEs(LibrarySuite):
    searcher = "optuna_cmaes"
    options: ClassVar = {"population": 6, "restart_after": 15}


@pytest.mark.slow
class TestNevergrad(LibrarySuite):
    searcher = "nevergrad"


@pytest.mark.slow
class TestSB3PPO(LibrarySuite):
    searcher = "sb3_ppo"
    options: ClassVar = {"embedding": 16}


def outcome(raw: float, excess: float = 0.0, *, best: float | None = None) -> Outcome:
    best = raw if best is None else best
    return Outcome(raw=raw, feasible=raw > 0, reward=0.0, best=best, observation=NOTHING, excess=excess)


def ask(searcher: Searcher) -> np.ndarray:
    action = searcher.ask(NOTHING)
    assert action is not None
    return action


def differences(first: np.ndarray, second: np.ndarray) -> int:
    return int(np.count_nonzero(first != second))


# --- random walk ----------------------------------------------------------------------------------


def test_the_random_walk_changes_one_coordinate_per_call_whatever_it_is_answered() -> None:
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
    for seed in range(400):
        searcher = make_searcher("annealing", SPACE, seed=seed, budget=10**9)
        searcher.tell(ask(searcher), outcome(300.0))
        searcher.tell(ask(searcher), outcome(250.0))
        taken += searcher.metrics()["current"] == 250.0
    assert taken / 400 == pytest.approx(math.exp(-0.5), abs=4 * 0.5 / math.sqrt(400))


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
        run = ConformanceRun(ConformanceSetting(name, 200, load_workload(MOE), evaluate), tmp_path / name).advance()
        run.close()
        best[name] = run.gate.best_raw
    assert best["coordinate"] > best["random"]


# --- Megatron -------------------------------------------------------------------------------------


@pytest.mark.parametrize(("name", "model"), [("megatron", DENSE), ("megatron_sp", MOE)])
def test_megatron_calls_every_combination_of_degrees_once_with_its_own_dims(
    name: str, model: str, tmp_path: Path
) -> None:
    workload = load_workload(model)
    degrees = replace(workload.degrees, batch=workload.degrees.batch[:3])
    workload = replace(workload, degrees=degrees)
    run = ConformanceRun(ConformanceSetting(name, 10**6, workload, barren), tmp_path).advance()
    run.close()
    combinations = len(degrees.tp) * len(degrees.ep) * len(degrees.pp) * len(degrees.batch)
    assert run.searcher.sweep_calls(run.searcher.space) == combinations
    assert run.gate.calls == run.gate.unique_calls == combinations
    dims = (megatron_dims if name == "megatron" else megatron_sp_dims)(workload.model)
    assert {run.space.decode(action).dims for action in run.actions} == {dims}
    assert run.searcher.ask(run.observation) is None


def test_a_small_budget_leaves_out_the_largest_tensor_parallel_degrees() -> None:
    searcher = make_searcher("megatron", searched_space(tiny_workload(), None, "megatron"), seed=0, budget=3)
    assert [tuple(ask(searcher)[:4]) for _ in range(4)] == [(0, 0, 0, 0), (0, 0, 0, 1), (0, 0, 1, 0), (0, 0, 1, 1)]
    space = searched_space(load_workload(MOE), None, "megatron")
    searcher = make_searcher("megatron", space, seed=0, budget=1000)
    tp = [int(ask(searcher)[0]) for _ in range(1000)]
    assert tp == sorted(tp)


def test_megatron_refuses_a_space_whose_dims_are_searched() -> None:
    with pytest.raises(InputError, match="megatron_sp has dims of its own: expected a space of degrees alone"):
        make_searcher("megatron_sp", SPACE, seed=0, budget=3)


@pytest.mark.parametrize("name", ["paper", "joint", "extended"])
def test_a_heuristic_keeps_its_dims_whatever_others_search(name: SpaceName) -> None:
    workload = load_workload(MOE, space=name)
    space = searched_space(workload, None, "megatron_sp")
    action = ask(make_searcher("megatron_sp", space, seed=0, budget=3))
    assert space.decode(action).dims == megatron_sp_dims(workload.model)
    assert bool(space_of(workload).outside(space.decode(action))) == (name == "paper")


# --- tuned annealing and MCMC ---------------------------------------------------------------------


def test_merit_puts_every_feasible_call_above_every_infeasible_one_and_those_by_their_excess() -> None:
    calls = [
        outcome(0.0, excess=9.0),
        outcome(0.0, excess=0.01),
        outcome(1e-9),
        outcome(0.5),
        outcome(500.0),
    ]
    merits = [merit(call) for call in calls]
    assert merits == sorted(merits)
    assert merits[1] < merits[2]
    assert merit(outcome(500.0)) - merit(outcome(250.0)) == pytest.approx(math.log(2))


def test_the_tuned_temperature_falls_on_a_half_cosine_in_every_chain() -> None:
    options = {"initial_temperature": 1.0, "final_temperature": 0.2, "chains": 2}
    searcher = make_searcher("annealing_tuned", SPACE, seed=0, budget=8, **options)
    temperatures = []
    for _ in range(8):
        temperatures.append(searcher.metrics()["temperature"])
        searcher.tell(ask(searcher), outcome(1.0))
    chain = [1.0, 0.6 + 0.4 * math.sqrt(0.5), 0.6, 0.6 - 0.4 * math.sqrt(0.5)]
    assert temperatures == pytest.approx([*chain, *chain])


def test_a_new_chain_starts_at_the_best_strategy_so_far() -> None:
    options = {"initial_temperature": 1e9, "final_temperature": 1e9, "chains": 2}
    searcher = make_searcher("annealing_tuned", SPACE, seed=0, budget=20, **options)
    best = ask(searcher)
    searcher.tell(best, outcome(100.0))
    for _ in range(9):
        searcher.tell(ask(searcher), outcome(1.0, best=100.0))
    assert differences(ask(searcher), best) == 1


@pytest.mark.parametrize(("ratio", "beta"), [(0.5, 1.0), (0.9, 5.0)])
def test_mcmc_takes_a_slower_strategy_with_the_ratio_of_costs_to_the_power_of_beta(ratio: float, beta: float) -> None:
    """Whatever the workload's scale: a detailed balance between two strategies for p ~ cost ** -beta."""
    taken = 0
    for seed in range(400):
        searcher = make_searcher("mcmc", SPACE, seed=seed, budget=10, beta=beta, patience=0)
        first = ask(searcher)
        searcher.tell(first, outcome(40.0))
        second = ask(searcher)
        searcher.tell(second, outcome(40.0 * ratio, best=40.0))
        taken += searcher.get_state()["chain"][0][0].tolist() == second.tolist()
    assert taken / 400 == pytest.approx(ratio**beta, abs=4 * 0.5 / math.sqrt(400))


def test_mcmc_goes_back_to_the_best_when_nothing_better_came() -> None:
    searcher = make_searcher("mcmc", SPACE, seed=0, budget=10, beta=1e-9, patience=3)
    best = ask(searcher)
    searcher.tell(best, outcome(10.0))
    for _ in range(3):
        searcher.tell(ask(searcher), outcome(5.0, best=10.0))
    assert differences(ask(searcher), best) == 1


@pytest.mark.parametrize("name", ["mcmc", "annealing_tuned"])
def test_infeasible_ground_lies_a_gap_and_its_excess_below_the_best(name: str) -> None:
    """At temperature 1 (beta 1) from the best into excess 0.5 with a gap of 0.5: probability exp(-1)."""
    hot = {"initial_temperature": 1.0, "final_temperature": 1.0, "chains": 1}
    options = {"beta": 1.0, "patience": 0} if name == "mcmc" else hot
    moved = 0
    for seed in range(400):
        searcher = make_searcher(name, SPACE, seed=seed, budget=10, gap=0.5, **options)
        best = ask(searcher)
        searcher.tell(best, outcome(40.0))
        searcher.tell(ask(searcher), outcome(0.0, 0.5, best=40.0))
        moved += differences(ask(searcher), best) != 1
    assert moved / 400 == pytest.approx(math.exp(-1), abs=0.08)  # a step may lead back to one change


# --- populations ----------------------------------------------------------------------------------


@pytest.mark.parametrize("name", PEERS)
def test_peers_find_their_way_out_of_infeasible_ground(name: str) -> None:
    """Feasible are indices that sum to less than 11, a share of 1e-3, and only the amounts show the way.

    Uniform samples find two or more in 100 calls with a probability of 0.5 %.
    """
    searcher = make_searcher(name, SPACE, seed=0, budget=150)
    found = 0
    for _ in range(100):
        action = ask(searcher)
        excess = max(float(action.sum()) - 10.0, 0.0)
        found += excess == 0.0
        searcher.tell(action, outcome(0.0 if excess else 1.0, excess, best=float(found > 0)))
    assert found >= 2


@pytest.mark.parametrize("name", PEERS)
def test_peers_learn_from_calls_in_flight_and_from_what_they_never_asked(name: str) -> None:
    searcher = make_searcher(name, SPACE, seed=0, budget=100)
    for k in range(6):
        for action in [ask(searcher) for _ in range(4)]:
            searcher.tell(action, outcome(10.0))
        searcher.tell(SPACE.nvec - 1, outcome(100.0 + k))


@pytest.mark.parametrize("name", [*PEERS, pytest.param("sb3_ppo", marks=pytest.mark.slow)])
def test_peers_search_spaces_of_other_shapes(name: str) -> None:
    extended = StrategySpace(load_workload("gpt_moe_1_2t_1m_extended"))
    degrees_only = StrategySpace(load_workload(MOE), fixed_dims=megatron_dims(load_workload(MOE).model))
    for space in (extended, degrees_only):
        searcher = make_searcher(name, space, seed=0, budget=20)
        for _ in range(20):
            action = searcher.ask(np.full((3, len(space.sizes)), -1.0, np.float32))
            assert action is not None
            space.indices(action)
            searcher.tell(action, Outcome(1.0, True, 0.0, 1.0, np.zeros((3, len(space.sizes)), np.float32)))
        if name != "sb3_ppo":  # which learns from what it asked
            searcher.tell(space.nvec - 1, outcome(2.0))


LONG = StrategySpace(
    replace(
        load_workload(MOE),
        degrees=replace(load_workload(MOE).degrees, batch=tuple(range(1, 4097))),
    )
)


@pytest.mark.parametrize(
    "name",
    [
        *("random", "random_walk", "coordinate", "annealing", *PEERS, "ppo_paper", "ppo"),
        pytest.param("sb3_ppo", marks=pytest.mark.slow),
    ],
)
def test_any_batch_is_searched(name: str, tmp_path: Path) -> None:
    run = ConformanceRun(ConformanceSetting(name, 40, LONG.workload), tmp_path / "run").advance()
    batches = [run.space.decode(action).batch for action in run.actions]
    assert len(batches) == 40
    assert any(batch & (batch - 1) for batch in batches)  # no power of two
    if name in ("random", "genetic", "ant_colony", "optuna_tpe", "ppo_paper", "ppo"):  # begin all over the space
        assert min(batches) < 64 < 512 < max(batches)
    run.close()


@pytest.mark.parametrize("name", [*PEERS[2:]])
def test_what_was_not_asked_for_can_be_stated_of_any_batch(name: str) -> None:
    searcher = make_searcher(name, LONG, seed=0, budget=40)
    rng = np.random.default_rng(0)
    for action in (np.zeros(16, np.int64), LONG.nvec - 1, LONG.sample(rng)):
        searcher.tell(action, outcome(1.0))
    LONG.indices(ask(searcher))


@pytest.mark.parametrize("name", ["optuna_tpe", "optuna_cmaes"])
def test_all_degrees_are_numbers_and_no_choice_is_one(name: str) -> None:
    from optuna.distributions import IntDistribution

    space = StrategySpace(load_workload(MOE, space="extended"))
    options = {"degrees": "ordered"} if name == "optuna_tpe" else {"choices": "one_hot"}
    searcher: Any = make_searcher(name, space, seed=0, budget=40, **options)
    numbers = [name for name, each in searcher._distributions.items() if isinstance(each, IntDistribution)]
    assert sorted(numbers) == ["batch", "cp", "dp", "ep", "pp", "tp"]


def test_pheromone_never_falls_below_its_least_share() -> None:
    searcher = make_searcher("ant_colony", SPACE, seed=0, budget=1000, ants=5, least_share=0.1, patience=0)
    for _ in range(500):
        ask(searcher)
        searcher.tell(np.zeros(16, np.int64), outcome(1.0))
    for trail, size in zip(searcher.get_state()["pheromone"], SPACE.sizes, strict=True):
        assert trail.sum() == pytest.approx(1.0)
        assert trail.min() >= 0.1 / size / (1 + 0.1)  # least share, then scaled to sum 1
        assert trail[0] == trail.max()
