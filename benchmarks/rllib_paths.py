"""What RLlib's way costs beside the lean one, and how much faster a slow black box is searched with env runners.

    python benchmarks/rllib_paths.py                    # both paths on our simulator, both presets
    python benchmarks/rllib_paths.py --runners 1 4 8    # 50 ms a call, seconds per call and speed-up over the first
    python benchmarks/rllib_paths.py --runners 1 4 8 --ahead 1    # the algorithm decides, runners + 1 calls ahead
    python benchmarks/rllib_paths.py --runners 1 4 8 --paper      # the same with the paper's preset
    python benchmarks/rllib_paths.py --runners 8 --spread 1 --all     # calls of unequal length, waiting and not
    python benchmarks/rllib_paths.py --quality 1 2 4 8 --seeds 10     # best over f* against the runners that share it

Both paths make the same calls bit by bit. Start-up is not counted. A slow call sleeps, so that it needs no core. With
--spread s it sleeps 50 ms times a log-normal factor of mean 1 and deviation s of the logarithm, the same for a strategy
each time. What a search with N runners of one environment finds depends on the number of environments alone, so that
--quality has them in this process. Both take --fragment, the steps after which environments hear of each other.
"""

from __future__ import annotations

import argparse
import functools
import math
import os
import time
import zlib
from typing import Any

import numpy as np
from ray.tune.registry import register_env
from scipy.stats import bootstrap

from envs.registration import ENV_ID
from envs.strategy_env import StrategyEnv
from raysearch.optima.optimum_cache import find_cached_optimum
from raysearch.searchers.ppo.algorithm import LearnToShardConfig
from raysearch.searchers.ppo.copy_algorithm import CopyConfig
from raysearch.searchers.ppo.copy_options import CopyOptions
from raysearch.searchers.ppo.ppo_options import Options
from sim import simulate
from sim.config.catalog import load_workload
from sim.evaluation import Evaluation
from sim.strategy import Strategy
from sim.workload import Workload

WORKLOAD = "gpt_moe_1_2t_16k"
QUALITY_WORKLOADS = ("gpt_moe_1_8t_24k_slo30", "qwen3_235b_a22b_16k")
"""Of those that the preset was tuned on."""
POINTS = (256, 512, 1000)
"""Calls; whole rounds of 16, with up to 16 environments."""
CALL_S = 0.05
SPREAD = "RAYSEARCH_BENCHMARK_SPREAD"
"""Environment variable: env runners are processes of their own."""


def slow(workload: Workload, strategy: Strategy) -> Evaluation:
    """Our simulator, as slow as a measurement of a real engine's kernels."""
    spread = float(os.environ.get(SPREAD, "0"))
    normal = np.random.default_rng(zlib.crc32(repr(strategy).encode())).normal()
    time.sleep(CALL_S * math.exp(spread * normal - spread**2 / 2))
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


def show_runners(
    counts: list[int], budget: int, rollout: int, ways: list[str], fragment: int | str, ahead: int, paper: bool
) -> None:
    """Prints seconds per call on the slow black box."""
    alone = 0.0
    for runners in counts:
        for way in ways:
            asked: Any = {
                "budget": budget,
                "asynchronous": way == "not waiting",
                "ahead": runners + ahead if way == "decided ahead" else 0,
            }
            if paper:
                config = LearnToShardConfig().search(options=Options(rollout_calls=rollout), **asked)
            else:
                config = CopyConfig().search(options=CopyOptions(rollout_calls=rollout), **asked)
            config.environment("slow").env_runners(num_env_runners=runners, rollout_fragment_length=fragment)
            spent = seconds_per_call(config)
            alone = alone or spent
            times = alone / spent
            print(f"{runners} env runners, {way}: {1e3 * spent:.1f} ms a call, {times:.2f} times as fast", flush=True)


def found_by(workload: str, environments: int, seed: int, fragment: int | str = "auto") -> list[float]:
    """Best over f* of one search after each of `POINTS`, of which the last is its budget; and its share of repeats."""
    optimum = find_cached_optimum(load_workload(workload)).tokens_per_s_per_gpu
    assert optimum is not None
    config: Any = (
        CopyConfig().search(budget=POINTS[-1], seed=seed).environment(ENV_ID, env_config={"workload": workload})
    )
    config.env_runners(num_envs_per_env_runner=environments, rollout_fragment_length=fragment)
    config.calls_per_training_step = config.round_calls
    algorithm: Any = config.build_algo()
    best = {}
    while algorithm.calls < POINTS[-1]:
        algorithm.train()
        best[algorithm.calls] = algorithm.best
    repeats = 1 - len(np.unique(algorithm.actor.memory.actions, axis=0)) / POINTS[-1]
    algorithm.stop()
    return [*(best[point] / optimum for point in POINTS), repeats]


def interval(figures: np.ndarray, sign: str = "") -> str:
    """Mean and 95 % bootstrap interval of `[runs]`."""
    low, high = figures.min(), figures.max()
    if low < high:
        low, high = bootstrap((figures,), np.mean, rng=np.random.default_rng(0)).confidence_interval
    return f"{figures.mean():{sign}.3f} [{low:{sign}.3f}, {high:{sign}.3f}]"


def show_quality(counts: list[int], seeds: int, fragment: int | str) -> None:
    """Prints best over f* by the number of environments, and what each differs by from the first, seed by seed."""
    first = None
    for count in counts:
        rows = np.array([found_by(name, count, seed, fragment) for name in QUALITY_WORKLOADS for seed in range(seeds)])
        found, repeats = rows[:, :-1], rows[:, -1].mean()
        first = found if first is None else first
        told = [interval(column) for column in found.T]
        differs = [interval(column, "+") for column in (found - first).T]
        print(
            f"{count} at once, {len(rows)} searches, {repeats:.1%} repeats, after {POINTS} calls: {told}; "
            f"less the first: {differs}",
            flush=True,
        )


def main() -> None:
    """Reads the command line, measures and prints."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--budget", type=int, default=400, help="calls of each search (default: 400)")
    parser.add_argument("--runners", type=int, nargs="+", help="env runners to time on a slow black box")
    parser.add_argument("--rollout", type=int, default=64, help="calls of a round with runners (default: 64)")
    parser.add_argument("--spread", type=float, default=0.0, help="how unequal slow calls are (default: 0)")
    parser.add_argument("--fragment", type=int, help="steps of a request (default: RLlib's auto)")
    parser.add_argument("--asynchronous", action="store_true", help="runners do not wait for each other")
    parser.add_argument("--ahead", type=int, help="the algorithm decides, so many more calls ahead than runners")
    parser.add_argument("--paper", action="store_true", help="the paper's preset, ppo_paper, in place of ppo")
    parser.add_argument("--all", action="store_true", help="waiting, not waiting, decided ahead")
    parser.add_argument(
        "--quality", type=int, nargs="+", help="environments that share a search, to compare best finds"
    )
    parser.add_argument("--seeds", type=int, default=10, help="of --quality (default: 10)")
    arguments = parser.parse_args()
    fragment = arguments.fragment or "auto"
    os.environ.setdefault("RAY_AUTH_MODE", "disabled")
    os.environ.setdefault("RAY_worker_niceness", "0")  # else whatever else runs on the machine comes first
    os.environ[SPREAD] = str(arguments.spread)
    import ray

    cpus = max(arguments.runners or [0]) + 2
    ray.init(address="local", num_cpus=cpus, include_dashboard=False, log_to_driver=False)
    register_env("own", functools.partial(create, evaluate=simulate.evaluate))
    register_env("slow", functools.partial(create, evaluate=slow))
    if arguments.quality:
        show_quality(arguments.quality, arguments.seeds, fragment)
        return
    if arguments.runners:
        way = "not waiting" if arguments.asynchronous else "decided ahead" if arguments.ahead else "waiting"
        ways = ["waiting", "not waiting", "decided ahead"] if arguments.all else [way]
        ahead, paper = arguments.ahead or 1, arguments.paper
        show_runners(arguments.runners, arguments.budget, arguments.rollout, ways, fragment, ahead, paper)
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
