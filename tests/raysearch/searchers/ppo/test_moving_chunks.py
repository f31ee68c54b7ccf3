"""The algorithm as Tune's own trainable, on hosts that die, and what TensorBoard shows of it."""

import logging
import time

import pytest
import ray
from ray import tune
from ray.tune.logger import TBXLoggerCallback

from raysearch.processes.ray_internals import without_what_nobody_asks
from raysearch.searchers.ppo.algorithm import LearnToShard

HOST = {"num_cpus": 1, "object_store_memory": 100 * 1024**2}
BUDGET, CHUNKS = 24, 4
MOVE_AFTER = BUDGET // 2
"""Calls after which the search waits on the host that it began on, and goes on anywhere else."""


@pytest.fixture
def cluster(tmp_path, monkeypatch):
    """A head without CPUs: whatever runs is on the hosts that are added."""
    from ray.cluster_utils import Cluster

    monkeypatch.setenv("HOME", str(tmp_path))  # where RLlib would keep results
    # A dead host refuses connections at once; one that is only busy has as long as ever to answer.
    watch = {"health_check_period_ms": 500, "health_check_failure_threshold": 3}
    needless = {"include_dashboard": False, "include_log_monitor": False, "no_monitor": True}
    head = {**HOST, "num_cpus": 0, **needless, "_system_config": watch}
    with without_what_nobody_asks():
        cluster = Cluster(initialize_head=True, head_node_args=head)
        ray.init(address=cluster.address, log_to_driver=False, logging_level=logging.ERROR)
        yield cluster
        ray.shutdown()
        cluster.shutdown()


class KillHost(tune.Callback):
    """Kills the only host as soon as the second chunk is saved, and gives the cluster another one."""

    def __init__(self, cluster):
        self.cluster, self.host = cluster, cluster.add_node(**HOST)
        self.results = []

    def __getstate__(self):
        return {}  # Tune keeps a copy of its settings, and asks this one

    def on_trial_result(self, iteration, trials, trial, result, **info):
        self.results.append(result)

    def on_checkpoint(self, iteration, trials, trial, checkpoint, **info):
        if self.host is not None and self.results[-1]["calls"] == MOVE_AFTER:
            self.host.all_processes["raylet"][0].process.kill()
            self.host = None
            self.cluster.add_node(**HOST)


@pytest.mark.slow
def test_a_search_whose_host_dies_goes_on_elsewhere_from_the_end_of_a_chunk(toy, cluster, tmp_path):
    begun_on = tmp_path / "node"

    class Bound(toy.Environment):  # defined here, so that hosts need not import it
        def __init__(self, context):
            super().__init__(context)
            self.node = ray.get_runtime_context().get_node_id()
            if not begun_on.exists():
                begun_on.write_text(self.node)

        def take(self):
            if len(self.env.actions) >= MOVE_AFTER and begun_on.read_text() == self.node:
                time.sleep(600)
            return super().take()

    config = toy.config(budget=BUDGET, seed=1, chunks=CHUNKS).environment(Bound)
    config.confidence_threshold = 1.1
    killer = KillHost(cluster)
    tuner = tune.Tuner(
        LearnToShard,
        param_space=config.copy(copy_frozen=False),
        run_config=tune.RunConfig(
            storage_path=str(tmp_path / "tune"),
            verbose=0,
            callbacks=[killer, TBXLoggerCallback()],
            failure_config=tune.FailureConfig(max_failures=1),
        ),
    )
    (result,) = tuner.fit()
    assert result.error is None
    straight = config.build_algo()
    undisturbed = [straight.train() for _ in range(CHUNKS)]
    straight.stop()

    def figures_of(results):
        return [{name: each[name] for name in ("chunk", "calls", "chunk_best", "best", "done")} for each in results]

    assert figures_of(killer.results) == figures_of(undisturbed)
    assert [each["calls"] for each in killer.results] == [6, 12, 18, 24]
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    logged = EventAccumulator(result.path).Reload()

    def curve(name):
        return [event.value for event in logged.Scalars(f"ray/tune/{name}")]

    assert curve("calls") == [6, 12, 18, 24]
    assert curve("best") == pytest.approx([each["best"] for each in killer.results])
    assert curve("env_runners/num_env_steps_sampled") == [6] * CHUNKS
    assert len(curve("learners/default_policy/policy_loss")) == CHUNKS
    pids = [each["pid"] for each in killer.results]
    assert pids[0] == pids[1] != pids[2] == pids[3]
