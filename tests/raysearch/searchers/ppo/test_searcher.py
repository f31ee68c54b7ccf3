import pickle
import subprocess
import sys
from pathlib import Path
from tempfile import mkdtemp
from typing import ClassVar

import pytest

from envs.recording import CallGate
from envs.rows import ROWS_FILE, RowWriter
from envs.strategy_env import StrategyEnv
from raysearch.runs.in_flight import CallsInFlight
from raysearch.searchers.ppo.copy_options import CopyOptions
from raysearch.searchers.ppo.ppo_options import Options
from raysearch.searchers.registry import OptionsError, check_options, make_searcher
from raysearch.simulators.protocol import InProcess
from raysearch.testing import SearcherSuite
from sim.config.catalog import load_workload
from sim.config.files import config_path, read_config
from sim.simulate import evaluate


class RLlibSuite(SearcherSuite):
    @pytest.mark.slow  # a fresh process, which imports PyTorch and RLlib
    def test_a_run_resumed_here_or_in_a_fresh_process_equals_one_that_was_never_stopped(self, setting, undisturbed):
        super().test_a_run_resumed_here_or_in_a_fresh_process_equals_one_that_was_never_stopped(setting, undisturbed)


class TestConformance(RLlibSuite):
    searcher = "ppo_paper"
    budget = 41
    options: ClassVar = {"embedding": 32, "hidden": 32, "feed_forward": 32}


class TestOurPreset(RLlibSuite):
    searcher = "ppo"
    budget = 57  # three rollouts and a part, of which the first ends before a third of the calls


@pytest.fixture(scope="module")
def workload():
    return load_workload("gpt_moe_1_2t_16k")


def stepped(workload, folder: Path, budget: int, calls: int, name: str = "ppo_paper", seed: int = 0, **options):
    """A searcher after so many calls of its budget, and what it called."""
    simulator = InProcess(evaluate)
    env = StrategyEnv(workload, evaluate=simulator)
    gate = CallGate(env, budget, RowWriter(Path(mkdtemp(dir=folder)) / ROWS_FILE), run_id="r")
    environment = CallsInFlight(gate, simulator, env.space, most=1)
    searcher = make_searcher(name, env.space, seed=seed, budget=budget, **options)
    while gate.calls < calls:
        searcher.step(environment, calls - gate.calls)
    gate.close()
    return searcher, gate.digest


def test_preset_file_holds_the_defaults():
    assert read_config(config_path("searchers", "ppo_paper"), Options) == Options()


def test_our_preset_file_holds_our_defaults():
    assert read_config(config_path("searchers", "ppo"), CopyOptions) == CopyOptions()


def test_defaults_are_the_papers():
    options = Options()
    assert (options.rollout_calls, options.gradient_steps, options.learning_rate) == (2, 2, 1e-3)
    assert (options.confidence_threshold, options.chunks) == (0.95, 5)
    assert (options.embedding, options.hidden) == (256, 256)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"lr": 1.0}, "lr: unknown key"),
        ({"learning_rate": 0.0}, "learning_rate"),
        ({"confidence_threshold": 1.5}, "confidence_threshold"),
        ({"chunks": 0}, "chunks"),
        ({"attention_heads": 3}, "attention_heads must divide embedding: 256"),
    ],
)
def test_bad_options_are_refused(options, message):
    with pytest.raises(OptionsError, match=message):
        check_options("ppo_paper", options)


def test_four_of_five_chunks_end_with_a_restart(workload, tmp_path):
    assert stepped(workload, tmp_path, 50, 50)[0].metrics()["restarts"] == 4


def test_a_checkpoint_is_small(workload, tmp_path):
    assert len(pickle.dumps(stepped(workload, tmp_path, 10, 10)[0].get_state())) < 7_000_000


def test_a_checkpoint_of_ours_stays_small_over_a_whole_search(workload, tmp_path):
    state = stepped(workload, tmp_path, 40, 40, "ppo")[0].get_state()
    per_call = 2 * 16 + 8  # an int16 per coordinate and a merit
    assert len(pickle.dumps(state)) + 4000 * per_call < 1_500_000


def test_options_reach_the_network(workload, tmp_path):
    small, _ = stepped(workload, tmp_path, 4, 4, embedding=16, hidden=16, feed_forward=16)
    assert len(pickle.dumps(small.get_state())) < 100_000


@pytest.mark.slow
def test_a_search_starts_no_ray_cluster_and_prints_nothing():
    script = """
import pathlib, tempfile
from raysearch.runs.records import RunSpec
from raysearch.runs.run import SearchRun
run = SearchRun(RunSpec("gpt_moe_1_2t_16k", "ppo_paper", seed=0, budget=4), pathlib.Path(tempfile.mkdtemp()))
run.advance(4)
assert run.done
import ray
assert not ray.is_initialized()
"""
    root = Path(__file__).parents[4]
    done = subprocess.run([sys.executable, "-c", script], cwd=root, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


def test_actions_follow_the_seed_and_not_the_workload_alone(workload, tmp_path):
    first, again, other = (stepped(workload, tmp_path, 10, 1, seed=seed)[1] for seed in (0, 0, 1))
    assert first == again != other
