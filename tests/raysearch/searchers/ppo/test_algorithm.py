"""The algorithm as RLlib's users have it: env runners, learners, evaluation, checkpoints."""

import os
import signal
from collections import deque

import numpy as np
import pytest
import ray
from ray.tune.registry import _global_registry

from envs.registration import ENV_ID, make_env
from raysearch.processes.connection import connected
from raysearch.searchers.interface import Outcome
from raysearch.searchers.ppo.algorithm import LearnToShard, LearnToShardConfig
from raysearch.searchers.ppo.copy_algorithm import CopyConfig
from raysearch.searchers.ppo.env_runner import Brief
from raysearch.searchers.ppo.ppo_options import Options

BUDGET = 45
WORKLOAD = {"workload": "gpt_moe_1_2t_16k"}


@pytest.fixture(scope="module")
def local_ray(tmp_path_factory):
    with pytest.MonkeyPatch.context() as patch, connected(cpus=9):
        patch.setattr("ray.tune.trainable.trainable.DEFAULT_STORAGE_PATH", str(tmp_path_factory.mktemp("results")))
        yield


@pytest.fixture
def algorithm(toy, local_ray):
    """Builds an algorithm on the toy search, and stops it afterwards."""
    built = []

    def build(make=toy.config, **env_runners):
        config = make(budget=BUDGET, seed=3).environment(env=toy.Env).env_runners(**env_runners)
        config.calls_per_training_step = 7
        built.append(config.build_algo())
        return built[-1]

    yield build
    for each in built:
        each.stop()


def weights(algorithm) -> list[np.ndarray]:
    return list(algorithm.learner_group.get_state()["learner"]["rl_module"]["default_policy"].values())


def lifetime(result) -> int:
    return result["env_runners"]["num_env_steps_sampled_lifetime"]


def same(some, others) -> bool:
    return all(np.array_equal(one, other) for one, other in zip(some, others, strict=True))


def finish(algorithm) -> list[dict]:
    results = [algorithm.train()]
    while not results[-1]["done"]:
        results.append(algorithm.train())
    return results


@pytest.mark.slow
@pytest.mark.parametrize("preset", ["paper", "ours"])
def test_rllibs_way_and_the_lean_one_make_the_same_calls_bit_by_bit(toy, algorithm, preset):
    make, search = {"paper": (toy.config, toy.search), "ours": (toy.copy_config, toy.copy_search)}[preset]
    lean = search(budget=BUDGET, seed=3).advance(BUDGET)
    standard = algorithm(make)
    results = finish(standard)
    env = standard.env_runner.env.unwrapped.envs[0].unwrapped
    assert env.actions == lean.env.actions
    assert same(weights(standard), lean.weights)
    assert same(standard.get_module().get_state().values(), weights(standard))
    assert (standard.calls, standard.best) == (BUDGET, lean.agent.best)
    assert results[-1]["num_env_steps_sampled_lifetime"] == BUDGET


@pytest.mark.slow
def test_a_lean_algorithm_trains_in_its_own_environment_and_is_restored(toy, local_ray, tmp_path):
    config = toy.config(budget=BUDGET, seed=3).environment(env=toy.Env)
    config.lean = True
    lean = config.build_algo()
    results = [lean.train(), lean.train()]
    lean.save_to_path(tmp_path)
    results += finish(lean)
    restored = LearnToShard.from_checkpoint(tmp_path)
    again = [(each["training_iteration"], lifetime(each), each["best"]) for each in finish(restored)]
    assert again == [(each["training_iteration"], lifetime(each), each["best"]) for each in results[2:]]
    assert lean.get_module() is lean.actor.module
    assert lean._lean.env.actions == toy.search(budget=BUDGET, seed=3).advance(BUDGET).env.actions
    assert results[-1]["num_env_steps_sampled_lifetime"] == BUDGET
    assert not os.listdir(ray.tune.trainable.trainable.DEFAULT_STORAGE_PATH) or lean.logdir is None
    lean.stop()
    restored.stop()


@pytest.mark.slow
@pytest.mark.parametrize("preset", ["paper", "ours"])
def test_callbacks_see_the_best_so_far_of_the_search(toy, algorithm, preset):
    make, bests = {"paper": toy.config, "ours": toy.copy_config}[preset], []

    def heard(*, episode, **_):
        bests.append(episode.get_infos(-1)["best"])

    standard = algorithm(lambda **asked: make(**asked).callbacks(on_episode_step=heard))
    finish(standard)
    assert len(bests) == BUDGET
    assert bests == sorted(bests)
    assert bests[-1] == standard.best


@pytest.mark.slow
def test_each_chunk_ends_a_report_with_its_number_and_its_best(algorithm):
    results = finish(algorithm())
    ends = [(result["chunk"], result["calls"]) for result in results if result["chunk_done"]]
    assert ends == [(1, 10), (2, 20), (3, 30), (4, 40), (5, BUDGET)]
    assert max(result["chunk_best"] for result in results) == results[-1]["best"] > 0


@pytest.mark.slow
@pytest.mark.parametrize("iterations", [1, 4])
def test_restored_algorithm_goes_on_bit_identically(toy, algorithm, tmp_path, iterations):
    unbroken, saved = algorithm(num_envs_per_env_runner=2), algorithm(num_envs_per_env_runner=2)
    finish(unbroken)
    for _ in range(iterations):
        saved.train()
    saved.save_to_path(tmp_path)
    restored = LearnToShard.from_checkpoint(tmp_path)
    finish(restored)
    assert same(weights(restored), weights(unbroken))
    assert (restored.best, restored.calls) == (unbroken.best, BUDGET)
    restored.stop()


@pytest.mark.slow
@pytest.mark.parametrize("preset", ["paper", "ours"])
def test_evaluation_plays_on_and_leaves_no_trace(toy, algorithm, preset):
    make = {"paper": toy.config, "ours": toy.copy_config}[preset]
    evaluated, other = algorithm(make), algorithm(make)
    for _ in range(3):
        evaluated.train()
        figures = evaluated.evaluate()["env_runners"]
        other.train()
    assert figures["num_env_steps_sampled"] == 10
    finish(evaluated)
    finish(other)
    assert same(weights(evaluated), weights(other))
    assert evaluated.calls == BUDGET


def test_the_environment_is_found_where_a_second_ray_of_the_process_has_an_empty_registry(local_ray, monkeypatch):
    monkeypatch.setattr(_global_registry, "contains", lambda *names: False)
    config = LearnToShardConfig().environment(ENV_ID, env_config=WORKLOAD)
    config.search(budget=5, seed=1, options=Options(embedding=16, hidden=16, feed_forward=16))
    algorithm = config.build_algo()
    algorithm.stop()


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*is deprecated:DeprecationWarning")  # Ray Data of its own settings
@pytest.mark.parametrize("preset", ["paper", "ours"])
def test_neither_runners_nor_a_killed_one_nor_a_remote_learner_change_what_is_found(toy, local_ray, preset):
    make = {"paper": toy.config, "ours": toy.copy_config}[preset]

    def search(runners: int, envs: int, learners: int) -> tuple:
        config = make(budget=26, seed=1, rollout_calls=4).environment(ENV_ID, env_config=WORKLOAD)
        config.env_runners(num_env_runners=runners, num_envs_per_env_runner=envs).learners(num_learners=learners)
        config.calls_per_training_step = 8
        algorithm = config.build_algo()
        algorithm.train()
        if runners:
            (pid,) = algorithm.env_runner_group.foreach_env_runner(
                lambda runner: os.getpid(), local_env_runner=False, remote_worker_ids=[2]
            )
            os.kill(pid, signal.SIGKILL)
        result = finish(algorithm)[-1]
        found = algorithm.best, result["num_env_steps_sampled_lifetime"], weights(algorithm)
        algorithm.stop()
        return found

    here, there = search(0, 2, 0), search(2, 1, 1)
    assert here[0] == there[0]
    assert here[1] == 26
    assert same(here[2], there[2])


@pytest.mark.cluster  # eight processes
def test_eight_runners_find_what_eight_environments_of_one_process_find(algorithm):
    runners, one = algorithm(num_env_runners=8), algorithm(num_envs_per_env_runner=8)
    finish(runners)
    finish(one)
    assert (runners.best, runners.calls) == (one.best, BUDGET)
    assert same(weights(runners), weights(one))


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*is deprecated:DeprecationWarning")
def test_asynchronous_runners_make_each_call_once_though_one_is_killed_and_the_search_is_resumed(
    toy, algorithm, tmp_path
):
    def asynchronous(**arguments):
        config = toy.copy_config(**arguments)
        return config.search(**arguments, options=config.preset, asynchronous=True)

    def check():
        assert first.calls == BUDGET
        assert first.search_state()["portions"] == {"issued": BUDGET, "due": []}
        assert first.best == max(first._search.chunk_bests) > 0
        assert first.actor.memory.get_state()["numbers"].tolist() == list(range(BUDGET))

    first = algorithm(asynchronous, num_env_runners=2)
    first.train()
    (pid,) = first.env_runner_group.foreach_env_runner(
        lambda runner: os.getpid(), local_env_runner=False, remote_worker_ids=[2]
    )
    os.kill(pid, signal.SIGKILL)
    first.train()
    first.save_to_path(tmp_path)
    finish(first)
    check()
    first.restore_from_path(tmp_path)
    assert first.calls < BUDGET
    finish(first)
    check()


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*is deprecated:DeprecationWarning")
def test_calls_decided_ahead_are_a_lean_agents_asked_ahead_though_resumed_or_made_by_runners_that_die(
    toy, algorithm, tmp_path
):
    lean, asked = toy.copy_search(budget=BUDGET, seed=3), deque()
    for number in range(BUDGET):
        while len(asked) < 3 and number + len(asked) < BUDGET:
            asked.append(lean.agent.ask(lean.observation))
        observation, reward, _, _, info = lean.env.step(asked.popleft())
        lean.agent.tell(Outcome.of(observation, reward, info))

    def ahead(**arguments):
        config = toy.copy_config(**arguments)
        return config.search(**arguments, options=config.preset, ahead=3)

    def check(found):
        (*_, result) = finish(found)
        assert [tuple(action) for action in found.actor.memory.actions] == lean.env.actions
        assert same(weights(found), lean.weights)
        assert (found.calls, found.best) == (BUDGET, lean.agent.best)
        return result

    here, there = algorithm(ahead), algorithm(ahead, num_env_runners=2)
    here.train()
    here.save_to_path(tmp_path)
    assert check(here)["num_env_steps_sampled_lifetime"] == BUDGET
    here.restore_from_path(tmp_path)
    assert here.calls == 7
    check(here)
    there.train()
    (pid,) = there.env_runner_group.foreach_env_runner(
        lambda runner: os.getpid(), local_env_runner=False, remote_worker_ids=[2]
    )
    os.kill(pid, signal.SIGKILL)
    check(there)


def test_a_runners_environment_ends_with_its_share_and_leaves_evaluations_out_of_its_info():
    env = Brief(make_env(**WORKLOAD), share=2, timeout_s=60.0)
    for _ in range(2):
        env.reset()
        steps = [env.step(env.action_space.sample()) for _ in range(2)]
        assert [truncated for _, _, _, truncated, _ in steps] == [False, True]
        assert steps[0][-1].keys() == {"raw", "feasible", "excess", "simulated", "best"}


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


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda config: config.search(budget=9, asynchronous=True), "asynchronous needs num_env_runners"),
        (
            lambda config: config.search(budget=9, asynchronous=True).env_runners(
                num_env_runners=1, num_envs_per_env_runner=2
            ),
            "a budget that 2 environments share, got 9",
        ),
        (lambda config: config.search(budget=9, ahead=2), "ahead needs an actor that remembers all calls"),
        (lambda config: config.learners(num_learners=2), "expected num_learners 0 or 1, got 2"),
        (lambda config: setattr(config.env_runners(num_env_runners=1), "lean", True), "lean needs num_env_runners=0"),
        (
            lambda config: config.search(budget=3).env_runners(num_envs_per_env_runner=4),
            "each of 4 environments, got 3",
        ),
    ],
)
def test_what_a_search_cannot_do_is_refused_before_it_is_built(change, message):
    config = LearnToShardConfig()
    change(config)
    with pytest.raises(ValueError, match=message):
        config.validate()


@pytest.mark.slow
@pytest.mark.parametrize("fragment", ["auto", 2])
def test_environments_that_share_a_search_call_no_strategy_twice(toy, algorithm, fragment):
    shared = algorithm(toy.copy_config, num_envs_per_env_runner=4, rollout_fragment_length=fragment)
    finish(shared)
    actions = [action for env in shared.env_runner.env.unwrapped.envs for action in env.unwrapped.actions]
    assert len(actions) == BUDGET
    if fragment == "auto":  # with longer fragments, an environment does not know what the others did a step ago
        assert len(set(actions)) == BUDGET


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"num_env_runners": 3}, "expected ahead >= 3, a call for each env runner, got 2"),
        ({"num_envs_per_env_runner": 2}, "ahead needs lean=False, asynchronous=False and num_envs_per_env_runner=1"),
    ],
)
def test_calls_are_decided_ahead_for_all_runners_or_not_at_all(arguments, message):
    config = CopyConfig().search(budget=20, ahead=2).env_runners(**arguments)
    with pytest.raises(ValueError, match=message):
        config.validate()


def test_environments_hear_of_each_other_after_each_step_if_their_actors_listen(toy):
    paper, ours = toy.config(budget=64, rollout_calls=8), toy.copy_config(budget=64, rollout_calls=8)
    for config, calls in ((paper, 8), (ours, 4)):
        assert config.env_runners(num_env_runners=0, num_envs_per_env_runner=1).fragment_calls == 8
        assert config.env_runners(num_env_runners=2, num_envs_per_env_runner=2).fragment_calls == calls
    assert ours.env_runners(rollout_fragment_length=2).fragment_calls == 8


def test_rounds_give_each_environment_as_many_calls():
    config = LearnToShardConfig().search(budget=100, options=Options(rollout_calls=10))
    assert [config.env_runners(num_env_runners=n).round_calls for n in (0, 1, 2, 4, 8)] == [10, 10, 10, 12, 16]
