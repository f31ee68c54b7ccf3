"""What RLlib's way costs beside the lean one, and how much faster a slow black box is searched with env runners.

    python benchmarks/rllib_paths.py                    # both paths on our simulator, both presets
    python benchmarks/rllib_paths.py --runners 1 4 8    # 50 ms a call, seconds per call and speed-up over the first

Both paths make the same calls bit by bit. Start-up is not counted. A slow call sleeps, so that it needs no core.
"""

from __future__ import annotations

import argparse
import functools
import os
import time
from typing import Any

from ray.tune.registry import register_env

from envs.strategy_env import StrategyEnv
from raysearch.ppo.algorithm import LearnToShardConfig
from raysearch.ppo.copy_algorithm import CopyConfig
from raysearch.ppo.copy_options import CopyOptions
from sim import simulate
from sim.config.catalog import load_workload
from sim.evaluation import Evaluation
from sim.strategy import Strategy
from sim.workload import Workload

WORKLOAD = "gpt_moe_1_2t_16k"
CALL_S = 0.05


def slow(workload: Workload, strategy: Strategy) -> Evaluation:
    """Our simulator, as slow as a measurement of a real engine's kernels."""
    time.sleep(CALL_S)
    return simulate.evaluate(workload, strategy)


def create(context: Any, evaluate: Any) -> StrategyEnv:
    """An environment that evaluates with `evaluate`."""
    return StrategyEnv(load_workload(WORKLOAD), evaluate=evaluate)


def seconds_per_call(config: LearnToShardConfig) -> float:
    """Of a search after its first round, in which processes and caches warm up."""
    config.calls_per_training_step = config.round_calls
    algorithm: Any = config.build_algo()
    algorithm.train()
    config_calls, started = algorithm.calls, time.perf_counter()
    while not algorithm.train()["done"]:
        pass
    seconds = (time.perf_counter() - started) / (algorithm.calls - config_calls)
    algorithm.stop()
    return seconds


def main() -> None:
    """Reads the command line, measures and prints."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--budget", type=int, default=400, help="calls of each search (default: 400)")
    parser.add_argument("--runners", type=int, nargs="+", help="env runners to time on a slow black box")
    parser.add_argument("--rollout", type=int, default=64, help="calls of a round with runners (default: 64)")
    arguments = parser.parse_args()
    os.environ.setdefault("RAY_AUTH_MODE", "disabled")
    import ray

    ray.init(num_cpus=max(arguments.runners or [0]) + 2, include_dashboard=False, log_to_driver=False)
    register_env("own", functools.partial(create, evaluate=simulate.evaluate))
    register_env("slow", functools.partial(create, evaluate=slow))
    if arguments.runners:
        alone = 0.0
        for runners in arguments.runners:
            options = CopyOptions(rollout_calls=arguments.rollout)
            config = CopyConfig().search(budget=arguments.budget, options=options).environment("slow")
            spent = seconds_per_call(config.env_runners(num_env_runners=runners))
            alone = alone or spent
            print(f"{runners} env runners: {1e3 * spent:.1f} ms a call, {alone / spent:.2f} times as fast", flush=True)
        return
    for name, preset in (("ppo_paper", LearnToShardConfig), ("ppo", CopyConfig)):
        taken = {}
        for lean in (True, False):
            config = preset().search(budget=arguments.budget).environment("own")
            config.lean = lean
            taken[lean] = seconds_per_call(config)
        print(
            f"{name}: lean {1e3 * taken[True]:.2f} ms a call, RLlib's way {1e3 * taken[False]:.2f}, "
            f"{taken[False] / taken[True]:.1f} times as long",
            flush=True,
        )


if __name__ == "__main__":
    main()
