import json
import math
import pickle
from dataclasses import replace

import numpy as np
import pytest
from gymnasium.utils.env_checker import check_env

from envs import ImprovementReward, SimulatorFailure, StrategyEnv, VectorStrategyEnv
from raysearch.testing.landscapes import DENSE, MOE, barren, evaluation, hilly, tiny_workload
from sim.batched import evaluate_many
from sim.config.catalog import load_workload
from sim.evaluation import Evaluation
from sim.simulate import evaluate
from sim.strategy import Strategy
from sim.workload import Workload
from tests.envs.fakes import by_batch

TP, EP, PP, BATCH = range(4)


def action_of(env: StrategyEnv, **degrees: int) -> np.ndarray:
    """The action of a strategy that is tp=ep=pp=batch=1 with all dims 0, except as told."""
    ones = Strategy(tp=1, ep=1, pp=1, batch=1, dims=(0,) * (len(env.space.names) - 4))
    return env.space.encode(replace(ones, **degrees))


@pytest.mark.parametrize("workload", [load_workload(MOE), load_workload(DENSE), tiny_workload()], ids=lambda w: w.name)
@pytest.mark.parametrize("simulator", [evaluate, hilly, barren])
def test_gymnasiums_checker_accepts_it(workload: Workload, simulator) -> None:
    check_env(StrategyEnv(workload, evaluate=simulator), skip_render_check=True)


def test_rewards_follow_equation_1_with_the_best_before_the_call() -> None:
    simulator = by_batch({1: 40.0, 2: 80.0, 4: 60.0})
    env = StrategyEnv(load_workload(MOE), evaluate=simulator, reward=ImprovementReward(2.0, 3.0, 50.0))
    env.reset()

    def reward(batch: int) -> float:
        return float(env.step(action_of(env, batch=batch))[1])

    assert reward(1) == (2 * 40 + 3 * (40 - 0)) / 40
    assert reward(2) == (2 * 80 + 3 * (80 - 40)) / 80
    assert reward(4) == (2 * 60 + 3 * (60 - 80)) / 80
    assert reward(2) == (2 * 80 + 3 * (80 - 80)) / 80
    assert reward(8) == -50.0


def test_the_reward_is_a_function_that_can_be_replaced() -> None:
    seen = []

    def record(raw: float, best: float, feasible: bool) -> float:
        seen.append((raw, best, feasible))
        return 0.25

    env = StrategyEnv(load_workload(MOE), evaluate=by_batch({1: 40.0, 2: 30.0}), reward=record)
    assert [env.step(action_of(env, batch=batch))[1] for batch in (1, 2, 4)] == [0.25] * 3
    assert seen == [(40.0, 0.0, True), (30.0, 40.0, True), (0.0, 40.0, False)]


def test_info_says_what_the_call_was_worth() -> None:
    env = StrategyEnv(load_workload(MOE), evaluate=by_batch({1: 40.0, 2: 80.0}))
    infos = [env.step(action_of(env, batch=batch))[4] for batch in (1, 2, 4)]
    assert [(info["raw"], info["feasible"], info["best"]) for info in infos] == [
        (40.0, True, 40.0),
        (80.0, True, 80.0),
        (0.0, False, 80.0),
    ]
    assert infos[2]["evaluation"].violations[0].kind == "hbm"
    assert [info["excess"] for info in infos] == [0.0, 0.0, pytest.approx(math.log(2))]  # 2 bytes for 1
    assert [info["simulated"] for info in infos] == [40.0, 80.0, 1e9]


def test_observations_are_the_distinct_elites_best_first_scaled_and_padded() -> None:
    env = StrategyEnv(load_workload(MOE), evaluate=by_batch({1: 40.0, 2: 80.0, 4: 60.0, 8: 20.0}), elites=3)
    scale = np.maximum(env.space.nvec - 1, 1)
    padding = np.full(16, -1.0)

    def rows(*batches: int) -> np.ndarray:
        elites = [env.space.folded(action_of(env, batch=batch)) / scale for batch in batches]
        return np.array([*elites, *[padding] * (3 - len(elites))], np.float32)

    observation, info = env.reset(seed=0)
    np.testing.assert_array_equal(observation, rows())
    assert info == {}
    for batch, elites in [(1, [1]), (16, [1]), (2, [2, 1]), (1, [2, 1]), (4, [2, 4, 1]), (8, [2, 4, 1])]:
        observation, _, terminated, truncated, _ = env.step(action_of(env, batch=batch))
        np.testing.assert_array_equal(observation, rows(*elites))
        assert observation.dtype == np.float32
        assert not terminated
        assert not truncated


def test_strategies_that_do_the_same_are_one_elite() -> None:
    env = StrategyEnv(load_workload(MOE), evaluate=by_batch({1: 40.0}), elites=3)
    first = action_of(env, tp=1)
    for place in range(4, 16):
        same = first.copy()
        same[place] = 1
        observation = env.step(same)[0]
    assert (observation[1:] == -1).all()
    env.step(action_of(env, tp=2))
    assert (env.observation[1] >= 0).all()


def test_a_table_with_one_value_is_observed_as_zero() -> None:
    env = StrategyEnv(tiny_workload(), evaluate=by_batch({1: 1.0, 2: 1.0}))
    observation = env.step(action_of(env, pp=2, batch=2))[0]
    np.testing.assert_array_equal(observation[0, :4], [0.0, 0.0, 1.0, 1.0])


def test_an_observation_given_out_is_not_touched_again() -> None:
    env = StrategyEnv(load_workload(MOE), evaluate=by_batch({1: 40.0, 2: 80.0}))
    first, _ = env.reset()
    first[:] = 7.0
    second = env.step(action_of(env, batch=1))[0]
    kept = second.copy()
    env.step(action_of(env, batch=2))
    np.testing.assert_array_equal(second, kept)
    np.testing.assert_array_equal(env.reset()[0], np.full((3, 16), -1.0))


def test_reset_forgets_elites_and_best() -> None:
    env = StrategyEnv(load_workload(MOE), evaluate=by_batch({1: 40.0}))
    env.step(action_of(env, batch=1))
    assert env.best == 40.0
    env.reset()
    assert env.best == 0.0
    assert env.archive.entries == ()


def test_a_restored_environment_goes_on_as_the_one_that_was_saved() -> None:
    workload, rng = load_workload(MOE), np.random.default_rng(0)
    env, restored = StrategyEnv(workload, evaluate=hilly), StrategyEnv(workload, evaluate=hilly)
    for _ in range(20):
        env.step(env.space.sample(rng))
    restored.set_state(json.loads(json.dumps(env.get_state())))
    np.testing.assert_array_equal(restored.observation, env.observation)
    for _ in range(20):
        action = env.space.sample(rng)
        ours, theirs = env.step(action), restored.step(action)
        np.testing.assert_array_equal(ours[0], theirs[0])
        assert ours[1:] == theirs[1:]


def failing(workload: Workload, strategy: Strategy) -> Evaluation:
    raise ZeroDivisionError("no bandwidth")


def returning(**figures: float):
    return lambda workload, strategy: replace(evaluation(strategy, 1.0), **figures)


@pytest.mark.parametrize(
    ("simulator", "message"),
    [
        (failing, "ZeroDivisionError: no bandwidth"),
        (returning(tokens_per_s_per_gpu=math.nan), "finite tokens_per_s_per_gpu >= 0, got nan"),
        (returning(tokens_per_s_per_gpu=math.inf), "finite tokens_per_s_per_gpu >= 0, got inf"),
        (returning(tokens_per_s_per_gpu=-1.0), "finite tokens_per_s_per_gpu >= 0, got -1"),
        (returning(tpot_s=math.nan), "finite tpot_s >= 0, got nan"),
        (lambda workload, strategy: evaluation(replace(strategy, pp=48), 1.0), "got one of .*pp=48"),
        (lambda workload, strategy: None, "expected a sim.evaluation.Evaluation, got None"),
    ],
)
def test_a_broken_simulator_stops_the_search_and_names_the_strategy(simulator, message: str) -> None:
    env = StrategyEnv(load_workload(MOE), evaluate=simulator)
    before = env.get_state()
    with pytest.raises(SimulatorFailure, match=message) as failure:
        env.step(action_of(env, tp=8, batch=64))
    assert failure.value.strategy == env.space.decode(action_of(env, tp=8, batch=64))
    assert "tp=8" in str(failure.value)
    assert env.get_state() == before


def test_a_failure_survives_pickling() -> None:
    failure = SimulatorFailure(Strategy(1, 1, 1, 1, (0, 1)), "ValueError: x")
    copied = pickle.loads(pickle.dumps(failure))
    assert str(copied) == str(failure)
    assert copied.strategy == failure.strategy


@pytest.mark.parametrize(("retries", "succeeds"), [(0, False), (1, False), (2, True)])
def test_a_failing_call_is_retried_as_often_as_asked(retries: int, succeeds: bool) -> None:
    attempts = []

    def flaky(workload: Workload, strategy: Strategy) -> Evaluation:
        attempts.append(strategy)
        if len(attempts) < 3:
            raise TimeoutError("no answer")
        return evaluation(strategy, 5.0)

    env = StrategyEnv(load_workload(MOE), evaluate=flaky, retries=retries)
    if succeeds:
        assert env.step(action_of(env))[4]["raw"] == 5.0
    else:
        with pytest.raises(SimulatorFailure, match="TimeoutError: no answer"):
            env.step(action_of(env))
    assert len(attempts) == min(retries + 1, 3)


def test_repeated_strategies_are_simulated_once() -> None:
    simulated = []

    def counting(workload: Workload, strategy: Strategy) -> Evaluation:
        simulated.append(strategy)
        return evaluation(strategy, 5.0)

    env = StrategyEnv(load_workload(MOE), evaluate=counting)
    for _ in range(3):
        env.step(action_of(env))
    env.reset()
    env.step(action_of(env))
    assert len(simulated) == 1


def test_negative_retries_are_refused() -> None:
    with pytest.raises(ValueError, match="retries >= 0, got -1"):
        StrategyEnv(tiny_workload(), retries=-1)


def test_long_coordinates_are_written_in_digits_where_that_is_asked_for():
    workload = load_workload(MOE)
    any_batch = replace(workload, degrees=replace(workload.degrees, batch=tuple(range(1, 201))))
    plain, factored = StrategyEnv(any_batch), StrategyEnv(any_batch, factored=True)
    digits = plain.space.factored
    assert max(plain.action_space.sizes) == 200
    assert max(factored.action_space.sizes) == 16
    assert factored.observation_space.shape == (3, len(digits.actions.sizes))
    rng = np.random.default_rng(0)
    found = 0
    for _ in range(60):
        action = plain.space.sample(rng)
        expected, got = plain.step(action), factored.step(digits.encode(action))
        assert got[1:4] == expected[1:4]
        assert got[4]["evaluation"] == expected[4]["evaluation"]
        found += got[4]["feasible"]
    assert found > 1
    assert [elite.raw for elite in factored.archive.entries] == [elite.raw for elite in plain.archive.entries]
    for elite in factored.archive.entries:
        strategy = plain.space.decode(digits.decode(np.array(elite.action)))
        assert evaluate(any_batch, strategy).tokens_per_s_per_gpu == elite.raw
    wrong = digits.actions.nvec.astype(np.int64)
    with pytest.raises(ValueError, match="expected actions below"):
        factored.step(wrong)


def test_factored_environments_are_stepped_together_as_one_by_one():
    workload = load_workload(MOE)
    any_batch = replace(workload, degrees=replace(workload.degrees, batch=tuple(range(1, 201))))
    many = VectorStrategyEnv([StrategyEnv(any_batch, factored=True) for _ in range(6)], evaluate_many=evaluate_many)
    one = StrategyEnv(any_batch, factored=True)
    many.reset(seed=0)
    many.action_space.seed(0)
    actions = many.action_space.sample()
    infos = many.step(actions)[4]
    assert infos["simulated"].tolist() == [one.step(action)[4]["simulated"] for action in actions]
