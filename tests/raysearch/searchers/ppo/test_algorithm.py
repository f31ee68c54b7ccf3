"""The algorithm as RLlib's users have it: in environments of its own, with their workers, saved and restored."""

import os
import signal
import time

import numpy as np
import pytest
from ray.rllib.core.rl_module.rl_module import RLModule

from envs.rows import read_rows
from envs.strategy_env import SimulatorFailure
from raysearch.processes.connection import connected
from raysearch.runs.in_flight import recorded_order
from raysearch.runs.records import RunSpec
from raysearch.runs.run import SearchRun
from raysearch.runs.search_environment import SearchEnvironment
from raysearch.searchers.ppo.algorithm import CopyConfig, LearnToShard, LearnToShardConfig
from raysearch.searchers.ppo.ppo_options import Options
from raysearch.simulators.protocol import InProcess
from sim.simulate import evaluate
from tests.processes import descendants
from tests.raysearch.simulators.boxes import BAD_BATCH
from tests.raysearch.simulators.overtaken import assert_order_repeats_run

BUDGET = 45
WORKLOAD = {"workload": "gpt_moe_1_2t_16k"}


@pytest.fixture(autouse=True)
def _own_results(tmp_path, monkeypatch):
    monkeypatch.setattr("ray.tune.trainable.trainable.DEFAULT_STORAGE_PATH", str(tmp_path / "results"))


@pytest.fixture(scope="module")
def two_cpus():
    with connected(cpus=2):
        yield


@pytest.fixture
def algorithm():
    """Builds the algorithm of a configuration, and stops it afterwards."""
    built = []

    def build(config):
        config.calls_per_training_step = 7
        built.append(config.build_algo())
        return built[-1]

    yield build
    for each in built:
        each.stop()


def finish(algorithm) -> list[dict]:
    results = [algorithm.train()]
    while not results[-1]["done"]:
        results.append(algorithm.train())
    return results


def weights(algorithm) -> list[np.ndarray]:
    return [parameter.detach().numpy() for parameter in algorithm.get_module().parameters()]


def same(some, others) -> bool:
    return all(np.array_equal(one, other) for one, other in zip(some, others, strict=True))


def actions(algorithm) -> list:
    return algorithm.env_runner_group.local_env_runner.env.env.actions


@pytest.mark.parametrize("preset", ["paper", "ours"])
def test_train_makes_the_calls_of_a_run_that_steps_it(toy, algorithm, preset):
    make, search = {"paper": (toy.config, toy.search), "ours": (toy.copy_config, toy.copy_search)}[preset]
    stepped = search(budget=BUDGET, seed=3).advance(BUDGET)
    trained = algorithm(make(budget=BUDGET, seed=3).environment(toy.Environment))
    results = finish(trained)
    assert actions(trained) == stepped.env.actions
    assert same(weights(trained), stepped.weights)
    assert isinstance(trained.get_module(), RLModule)
    assert (results[-1]["calls"], results[-1]["best"]) == (BUDGET, stepped.env.best)
    assert results[-1]["env_runners"]["num_env_steps_sampled_lifetime"] == BUDGET
    assert np.isfinite(results[-1]["learners"]["default_policy"]["policy_loss"])


def test_each_chunk_ends_a_report_with_its_number_and_its_best(toy, algorithm):
    results = finish(algorithm(toy.config(budget=BUDGET, seed=3).environment(toy.Environment)))
    ends = [(result["chunk"], result["calls"]) for result in results if result["chunk_done"]]
    assert ends == [(1, 10), (2, 20), (3, 30), (4, 40), (5, BUDGET)]
    assert max(result["chunk_best"] for result in results) == results[-1]["best"] > 0


def test_a_restored_algorithm_goes_on_bit_identically(toy, algorithm, tmp_path):
    def start():
        return algorithm(toy.copy_config(budget=BUDGET, seed=3).environment(toy.Environment, env_config={"most": 3}))

    unbroken, saved = start(), start()
    finish(unbroken)
    for iterations in (1, 3):
        for _ in range(iterations):
            saved.train()
        saved.save_to_path(tmp_path / str(iterations))
        restored = LearnToShard.from_checkpoint(tmp_path / str(iterations))
        finish(restored)
        assert actions(restored) == actions(unbroken)
        assert same(weights(restored), weights(unbroken))
        restored.stop()


@pytest.mark.parametrize(("preset", "searcher"), [(LearnToShardConfig, "ppo_paper"), (CopyConfig, "ppo")])
def test_in_the_products_environment_it_writes_the_rows_of_the_same_search(algorithm, tmp_path, preset, searcher):
    folder = tmp_path / "rows"
    config = preset().search(budget=20, seed=1)
    trained = algorithm(config.environment(SearchEnvironment, env_config={**WORKLOAD, "folder": folder}))
    result = finish(trained)[-1]
    run = SearchRun(RunSpec(**WORKLOAD, searcher=searcher, seed=1, budget=20), tmp_path / "run")
    run.advance(20)
    figures = ["call", "raw", "feasible", "best"]
    assert read_rows(folder, figures).equals(read_rows(tmp_path / "run", figures))
    assert result["best"] == run.metrics()["best"]
    assert result["best_strategy"] == run.summary()["strategy"] != {}
    run.close()


@pytest.mark.slow
def test_its_environment_replaces_a_worker_that_is_killed_and_its_rows_repeat_the_search(two_cpus, algorithm, tmp_path):
    folder = tmp_path / "rows"

    config = CopyConfig().search(budget=30, seed=1)
    config.environment(SearchEnvironment, env_config={**WORKLOAD, "folder": folder})
    config.env_runners(num_env_runners=2, num_cpus_per_env_runner=0.5)
    trained = algorithm(config)
    trained.train()
    workers: list[int] = []
    while len(workers) < 2:  # on a busy machine the first call may be answered before the other has begun
        time.sleep(0.05)
        workers = [pid for pid, title in descendants(os.getpid()).items() if "SimulatorWorker" in title]
    os.kill(workers[0], signal.SIGKILL)
    finish(trained)
    order = recorded_order(folder)
    assert sorted(order) == list(range(1, 31))
    run = SearchRun(
        RunSpec(**WORKLOAD, searcher="ppo", seed=1, budget=30, workers=2),
        tmp_path / "again",
        order=order,
        simulator=InProcess(evaluate),
    )
    run.advance(30)
    figures = ["call", "asked", "raw", "best"]
    assert read_rows(folder, figures).equals(read_rows(tmp_path / "again", figures))
    run.close()


@pytest.mark.slow
@pytest.mark.parametrize("searcher", ["ppo_paper", "ppo"])
def test_the_recorded_order_of_answers_repeats_a_search_bit_by_bit(searcher, tmp_path):
    assert_order_repeats_run(searcher, 23, tmp_path)


@pytest.mark.slow
def test_a_call_that_never_returns_is_ended_and_the_search_goes_on_or_names_it(two_cpus, algorithm, tmp_path):
    def search(on_failure):
        own = {**WORKLOAD, "simulator": "tests.raysearch.simulators.boxes:hangs", "retries": 0}
        own |= {"on_failure": on_failure, "folder": tmp_path / on_failure}
        config = LearnToShardConfig().search(budget=5, seed=3).environment(SearchEnvironment, env_config=own)
        config.env_runners(num_env_runners=1, sample_timeout_s=1.0)
        return finish(algorithm(config))

    assert search("infeasible")[-1]["calls"] == 5
    rows = read_rows(tmp_path / "infeasible")
    never = rows["batch"] == BAD_BATCH
    assert never.any()
    assert set(rows["violations"][never]) == {"failed"}
    with pytest.raises(SimulatorFailure, match=r"Strategy\(.*: no answer within 1 s$"):
        search("stop")


def test_config_carries_the_papers_preset_in_rllibs_own_words():
    config = LearnToShardConfig().search(budget=1234, seed=5)
    assert (config.budget, config.search_seed, config.seed) == (1234, 5, None)
    assert (config.train_batch_size_per_learner, config.num_epochs, config.minibatch_size) == (2, 2, None)
    assert (config.lr, config.gamma, config.lambda_, config.clip_param) == (1e-3, 0.99, 0.95, 0.2)
    assert (config.vf_loss_coeff, config.entropy_coeff, config.grad_clip) == (0.5, 0.0, 0.5)
    assert (config.use_kl_loss, config.vf_clip_param) == (False, float("inf"))
    network = Options().model_dump(include={"embedding", "hidden", "feed_forward", "attention_heads"})
    assert config.model_config.items() >= network.items()
    assert config.enable_rl_module_and_learner
    assert config.enable_env_runner_and_connector_v2
    config.validate()
