"""Wall time of our PPO searchers beside Stable-Baselines3's PPO and Optuna's TPE, on the same environment.

    python benchmarks/ppo_wall_time.py                  # 3 rounds of 4000 calls, some ten minutes
    python benchmarks/ppo_wall_time.py --budget 400 --rounds 1 --searchers ppo sb3_ppo --json

`sb3` is Stable-Baselines3 driving the environment in its own loop, as its users would have it; `sb3_ppo` is the
searcher made of its parts. They and `ppo_paper` have the paper's network (linear embedding, one encoder block of width
256, mean pooling, MLPs of 256) and the paper's setting (rollouts of 2, 2 gradient steps, learning rate 1e-3 on a
cosine); `ppo` is this project's preset. All have one torch thread and build their networks within the measured time.
The searchers restart their agents, `sb3` does not. The searches alternate, so that a machine that slows down slows
all, and each is warmed up by a short search first: imports are not measured.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import gymnasium
import torch
from stable_baselines3 import PPO
from stable_baselines3.common.torch_layers import BaseFeaturesExtractor
from torch import Tensor, nn

from envs.strategy_env import StrategyEnv
from raysearch.searchers.registry import make_searcher
from raysearch.testing.stepping import Stepped
from sim.config.catalog import load_workload
from sim.workload import Workload

Search = Callable[[Workload, int, int], float]

WARM_UP_CALLS = 20


class EliteExtractor(BaseFeaturesExtractor):
    """The paper's network up to the pooled features, as a user of Stable-Baselines3 would write it."""

    def __init__(self, observation_space: gymnasium.Space, width: int = 256) -> None:
        super().__init__(observation_space, width)
        assert observation_space.shape is not None
        self.embedding = nn.Linear(observation_space.shape[-1], width)
        self.encoder = nn.TransformerEncoderLayer(width, 4, dim_feedforward=width, dropout=0.0, batch_first=True)

    def forward(self, observations: Tensor) -> Tensor:
        """`[N, T, A]` to `[N, width]`."""
        return self.encoder(self.embedding(observations)).mean(1)


class WithoutInfo(gymnasium.Wrapper):
    """Hides the info, which Stable-Baselines3 would copy deeply at every step."""

    def step(self, action: Any) -> tuple[Any, Any, bool, bool, dict[str, Any]]:
        """One call."""
        observation, reward, terminated, truncated, _ = self.env.step(action)
        return observation, reward, terminated, truncated, {}


def run_searcher(name: str, workload: Workload, budget: int, seed: int) -> float:
    """Makes `budget` calls with a searcher; returns the best tokens/s/GPU."""
    env = StrategyEnv(workload)
    searcher = make_searcher(name, env.space, seed=seed, budget=budget)
    stepped = Stepped(env)
    for _ in range(budget):
        stepped.advance(searcher)
    return env.best


def run_sb3(workload: Workload, budget: int, seed: int) -> float:
    """Makes `budget` calls, rounded up to even, with Stable-Baselines3; returns the best tokens/s/GPU."""
    env = StrategyEnv(workload)
    agent = PPO(
        "MlpPolicy",
        WithoutInfo(env),
        learning_rate=lambda left: 1e-3 * 0.5 * (1 - math.cos(math.pi * left)),
        n_steps=2,
        batch_size=2,
        n_epochs=2,
        policy_kwargs={"features_extractor_class": EliteExtractor, "net_arch": [256]},
        seed=seed,
        device="cpu",
    )
    agent.learn(budget)
    return env.best


OURS = ("ppo", "ppo_paper")
SEARCHES = {name: partial(run_searcher, name) for name in (*OURS, "sb3_ppo", "optuna_tpe")} | {"sb3": run_sb3}


def measure(names: Sequence[str], workload: Workload, budget: int, rounds: int) -> list[dict[str, dict[str, float]]]:
    """Alternates the searches; one record a round: each one's seconds and best tokens/s/GPU."""
    torch.set_num_threads(1)
    for name in names:
        SEARCHES[name](workload, WARM_UP_CALLS, 0)
    return [{name: timed(SEARCHES[name], workload, budget, seed) for name in names} for seed in range(rounds)]


def timed(
    search: Callable[[Workload, int, int], float], workload: Workload, budget: int, seed: int
) -> dict[str, float]:
    """One search's seconds and best tokens/s/GPU."""
    started = time.perf_counter()
    best = search(workload, budget, seed)
    return {"wall_s": time.perf_counter() - started, "best": best}


def ratios(records: Sequence[dict[str, dict[str, float]]]) -> dict[str, dict[str, float]]:
    """Of each of ours to each peer: the median over the rounds of their wall times' ratio."""
    peers = [name for name in records[0] if name not in OURS]
    return {
        name: {
            peer: statistics.median(record[name]["wall_s"] / record[peer]["wall_s"] for record in records)
            for peer in peers
        }
        for name in records[0]
        if name in OURS
    }


def main() -> None:
    """Reads the command line, measures and prints."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workload", default="gpt_moe_1_2t_16k", help="a name in configs/workloads or a path")
    parser.add_argument("--budget", type=int, default=4000, help="calls of each search (default: 4000)")
    parser.add_argument("--rounds", type=int, default=3, help="searches of each kind (default: 3)")
    parser.add_argument("--searchers", nargs="+", choices=SEARCHES, default=list(SEARCHES), help="default: all")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    arguments = parser.parse_args()
    if min(arguments.budget, arguments.rounds) < 1:
        parser.error(f"expected --budget and --rounds >= 1, got {arguments.budget} and {arguments.rounds}")
    names = list(dict.fromkeys(arguments.searchers))
    records = measure(names, load_workload(arguments.workload), arguments.budget, arguments.rounds)
    shares = ratios(records)
    if arguments.json:
        report = {"workload": arguments.workload, "budget": arguments.budget, "ratios": shares, "rounds": records}
        print(json.dumps(report))
        return
    for number, record in enumerate(records, 1):
        figures = (f"{name} {own['wall_s']:.1f} s (best {own['best']:.2f})" for name, own in record.items())
        print(f"round {number}: {', '.join(figures)}")
    for name, own in shares.items():
        print(f"{name}: median share of the wall time of {', '.join(f'{p} {r:.3f}' for p, r in own.items())}")


if __name__ == "__main__":
    main()
