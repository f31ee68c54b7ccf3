"""What every part of the preset `ppo` is worth: the preset against itself with one thing changed, on paired seeds.

    python benchmarks/ablations.py --out results/ablations                 # runs what is missing, then prints the table
    python benchmarks/ablations.py --out results/ablations --seeds 4 --only preset no_restart

A run is kept in --out as soon as it is done, so the command can be stopped and given again. Workloads are those that
the preset was tuned on. Differences are variant minus preset in f/f*, positive where the variant is better: the mean
over all pairs of runs, and its 95 % bootstrap interval (BCa, scipy).
"""

from __future__ import annotations

import argparse
import functools
import hashlib
import json
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import ablated_parts as parts
import numpy as np
import torch
from gymnasium.spaces import Box
from scipy.stats import bootstrap

import raysearch.searchers.ppo
from envs.strategy_env import StrategyEnv
from raysearch.base.file_io import write_json
from raysearch.optima.named_spaces import optimum_value
from raysearch.searchers.interface import Outcome
from raysearch.searchers.ppo.algorithm import CopyConfig
from raysearch.searchers.registry import check_options
from raysearch.testing.stepping import Stepped
from sim.config.catalog import load_workload
from sim.workload import Workload

WORKLOADS = (
    "qwen3_235b_a22b_16k",
    "mixtral_8x22b_8k",
    "llama_3_1_405b_8k",
    "gpt_moe_1_8t_24k_slo30",
    "gpt_moe_1_8t_48k_slo80",
    "gpt_moe_1_8t_16k_nccl",
    "mixtral_8x22b_16k_slo20",
    "mixtral_8x22b_48k_slo40",
    "mixtral_8x7b_32k_slo15",
)
POINTS = (10, 25, 50, 100, 250, 500, 1000, 2000, 4000)
NEVER = 10**9
REPORTED = range(10, 30)
"""Seeds of the studies that report."""


def identity(outcome: Outcome) -> Outcome:
    """All of it."""
    return outcome


def excess_alone(outcome: Outcome) -> Outcome:
    """By how much limits are missed, but not how fast it would be."""
    return replace(outcome, simulated=0.0)


def nothing(outcome: Outcome) -> Outcome:
    """That it is infeasible."""
    return replace(outcome, simulated=0.0, excess=1.0)


@dataclass(frozen=True)
class Variant:
    """The preset with something changed.

    Attributes:
        says: What is changed, for the table.
        options: Over the preset's.
        config: Made of other parts.
        reported: What of an infeasible call reaches the searcher.
    """

    says: str
    options: Mapping[str, Any] = field(default_factory=dict)
    config: type[CopyConfig] = CopyConfig
    reported: Callable[[Outcome], Outcome] = identity


VARIANTS = {
    "preset": Variant("the preset"),
    "no_update": Variant("the policy is never updated", {"learning_rate": 1e-12}),
    "no_learning": Variant("neither updates nor critic", {"learning_rate": 1e-12, "candidates": 1}),
    "no_copy": Variant("no copying at the start", {"copy_choice": 0.0, "copy_degree": 0.0, "degree_step": 0.0}),
    "absolute_batch": Variant("batch by itself", config=parts.config_with(module_class=parts.AbsoluteBatch)),
    "soft_attention": Variant("one soft mix of the elites", config=parts.config_with(module_class=parts.SoftAttention)),
    "no_step": Variant("degrees copied without order", {"copy_degree": 3.0, "degree_step": 0.0}),
    "random_heads": Variant("random last layer", config=parts.config_with(module_class=parts.RandomHeads)),
    "scaled_inputs": Variant("scaled indices as inputs", config=parts.config_with(module_class=parts.ScaledInputs)),
    "autoregressive": Variant(
        "autoregressive heads",
        config=parts.config_with(module_class=parts.Autoregressive),
    ),
    "one_elite": Variant("T = 1", {"elites": 1}),
    "two_elites": Variant("T = 2", {"elites": 2}),
    "six_elites": Variant("T = 6", {"elites": 6}),
    "distinct_elites": Variant("elites differ in degrees", config=parts.config_with(module_class=parts.DistinctElites)),
    "ungraded": Variant("infeasible calls all alike", reported=nothing),
    "excess_alone": Variant("infeasible calls below feasible ones, by excess", reported=excess_alone),
    "repeats": Variant("may call a strategy again", config=parts.config_with(module_class=parts.Repeating)),
    "no_critic": Variant("no critic", {"candidates": 1}),
    "behaviour_correction": Variant("calls weighed by policy over behaviour", {"behaviour_correction": True}),
    "eight_candidates": Variant("critic picks one of 8", {"candidates": 8}),
    "no_optimism": Variant("critic without optimism", {"critic_optimism": 0.0}),
    "short_rollouts": Variant("rollouts of 8", {"rollout_calls": 8}),
    "long_rollouts": Variant("rollouts of 32", {"rollout_calls": 32}),
    "standard_advantages": Variant(
        "standardised advantages", config=parts.config_with(learner_class=parts.StandardAdvantages)
    ),
    "top_advantages": Variant(
        "only the best eighth counts", config=parts.config_with(learner_class=parts.TopAdvantages)
    ),
    "self_imitation": Variant("self-imitation of elites", config=parts.config_with(learner_class=parts.SelfImitation)),
    "no_restart": Variant("no restarts", {"patience": NEVER}),
    "patience_100": Variant("restarts after 100 calls", {"patience": 100}),
    "patience_400": Variant("restarts after 400 calls", {"patience": 400}),
    "fast_learning": Variant("learning rate 1e-3", {"learning_rate": 1e-3}),
}


def search(variant: Variant, workload: Workload, seed: int, budget: int) -> list[float]:
    """Best tokens/s/GPU after each of `POINTS` that the budget reaches."""
    env = StrategyEnv(workload)
    shown = Box(-1.0, 1.0, (1, len(env.space.sizes)), np.float32)
    config = variant.config().environment(observation_space=shown, action_space=env.space.factored.actions)
    options: Any = check_options("ppo", variant.options)
    search: Any = config.search(budget=budget, seed=seed, options=options).build_algo()
    stepped = Stepped(env, lambda outcome: outcome if outcome.feasible else variant.reported(outcome))
    best = []
    for call in range(1, budget + 1):
        search.make_calls(stepped, env.space.factored.decode, 1)
        if call in POINTS:
            best.append(env.best)
    return best


@functools.cache
def sources() -> bytes:
    """The code of the agent, so that no run of another one is taken for one of this."""
    parts = sorted(Path(raysearch.searchers.ppo.__file__).parent.glob("*.py"))
    return b"".join(path.read_bytes() for path in [*parts, Path(__file__).with_name("ablated_parts.py")])


def run(folder: Path, name: str, workload_name: str, seed: int, budget: int) -> list[float]:
    """f/f* at `POINTS` of one run, made now or before."""
    variant = VARIANTS[name]
    options = check_options("ppo", variant.options).model_dump()
    key = hashlib.sha256(json.dumps([options, budget], sort_keys=True).encode() + sources()).hexdigest()[:8]
    path = folder / f"{name}-{workload_name}-s{seed}-{key}.json"
    if not path.is_file():
        workload = load_workload(workload_name)
        optimum = optimum_value(workload)
        assert optimum is not None
        started = time.process_time()
        scores = [best / optimum for best in search(variant, workload, seed, budget)]
        write_json(path, {"scores": scores, "cpu_s": time.process_time() - started})
    return json.loads(path.read_text())["scores"]


def tuning_seeds(count: int) -> list[int]:
    """0 and up, without those that are for reporting."""
    return [seed for seed in range(count + len(REPORTED)) if seed not in REPORTED][:count]


def interval(differences: np.ndarray) -> str:
    """Mean and 95 % interval of `[runs]`, as a table cell."""
    mean = differences.mean()
    if np.ptp(differences) == 0:
        return f"{mean:+.3f}"
    rng = np.random.default_rng(0)
    low, high = bootstrap((differences,), np.mean, n_resamples=9999, rng=rng).confidence_interval
    return f"{mean:+.3f} [{low:+.3f}, {high:+.3f}]"


def table(scores: Mapping[str, np.ndarray], budget: int) -> str:
    """Markdown: the preset's means, then every variant's differences; `scores` are `[runs, points]`."""
    points = [point for point in POINTS if point <= budget]
    lines = ["| change | " + " | ".join(map(str, points)) + " | worst |", "|---" * (len(points) + 2) + "|"]
    preset = scores["preset"]
    for name, own in scores.items():
        cells = [f"{mean:.3f}" for mean in own.mean(0)] if name == "preset" else map(interval, (own - preset).T)
        lines.append(f"| {VARIANTS[name].says} | {' | '.join(cells)} | {own[:, -1].min():.3f} |")
    return "\n".join(lines)


def main() -> None:
    """Reads the command line, makes the runs that are missing, and prints the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="where runs are kept")
    parser.add_argument(
        "--seeds", type=int, default=8, help="runs per workload, seeds 0 to 9 and from 30 on (default: 8)"
    )
    parser.add_argument("--budget", type=int, default=4000, help="calls of each run (default: 4000)")
    parser.add_argument("--only", nargs="+", choices=VARIANTS, default=list(VARIANTS), metavar="VARIANT")
    arguments = parser.parse_args()
    if arguments.seeds < 1 or arguments.budget < POINTS[0]:
        parser.error(f"expected --seeds >= 1 and --budget >= {POINTS[0]}")
    torch.set_num_threads(1)
    scores = {}
    for name in dict.fromkeys(["preset", *arguments.only]):
        rows = [
            run(arguments.out, name, workload, seed, arguments.budget)
            for workload in WORKLOADS
            for seed in tuning_seeds(arguments.seeds)
        ]
        scores[name] = np.array(rows)
        print(f"{name}: {scores[name].mean(0).round(3).tolist()}", flush=True)
    print(table(scores, arguments.budget))


if __name__ == "__main__":
    main()
