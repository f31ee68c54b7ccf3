"""Wall time of our PPO searchers beside Stable-Baselines3's PPO doing the same search on the same environment.

    python benchmarks/ppo_against_sb3.py                  # 3 rounds of 4000 calls
    python benchmarks/ppo_against_sb3.py --budget 400 --rounds 1 --json

`ppo_paper` and Stable-Baselines3's have the paper's network (linear embedding, one encoder block of width 256, mean
pooling, MLPs of 256) and the paper's setting (rollouts of 2, 2 gradient steps, learning rate 1e-3 on a cosine); `ppo`
is this project's preset. All have one torch thread and build their networks within the measured time. Ours restart
their agents as well, Stable-Baselines3's does not. The searches alternate, so that a machine that slows down slows all.
Both libraries are warmed up by short searches first: imports are not measured.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import time
from functools import partial
from typing import Any

import gymnasium
import torch
from stable_baselines3 import PPO
from stable_baselines3.common.torch_layers import BaseFeaturesExtractor
from torch import Tensor, nn

from envs.strategy_env import StrategyEnv
from raysearch.registry import make_searcher
from raysearch.searcher import Outcome
from sim.catalog import load_workload
from sim.types import Workload

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


def run_ours(name: str, workload: Workload, budget: int, seed: int) -> float:
    """Makes `budget` calls with one of our searchers; returns the best tokens/s/GPU."""
    env = StrategyEnv(workload)
    searcher = make_searcher(name, env.space, seed=seed, budget=budget)
    observation, _ = env.reset()
    for _ in range(budget):
        action = searcher.ask(observation)
        assert action is not None
        observation, reward, _, _, info = env.step(action)
        searcher.tell(action, Outcome.of(observation, reward, info))
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


SEARCHES = {"ppo_paper": partial(run_ours, "ppo_paper"), "ppo": partial(run_ours, "ppo"), "sb3": run_sb3}


def measure(workload: Workload, budget: int, rounds: int) -> list[dict[str, float]]:
    """Alternates all; one record a round: each one's seconds, best tokens/s/GPU, and seconds over sb3's."""
    torch.set_num_threads(1)
    records = []
    for search in SEARCHES.values():
        search(workload, WARM_UP_CALLS, 0)
    for seed in range(rounds):
        record: dict[str, float] = {"seed": seed}
        for name, search in SEARCHES.items():
            started = time.perf_counter()
            record[f"{name}_best"] = search(workload, budget, seed)
            record[f"{name}_wall_s"] = time.perf_counter() - started
        for name in SEARCHES:
            record[f"{name}_ratio"] = record[f"{name}_wall_s"] / record["sb3_wall_s"]
        records.append(record)
    return records


def main() -> None:
    """Reads the command line, measures and prints."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workload", default="gpt_moe_1_2t_16k", help="a name in configs/workloads or a path")
    parser.add_argument("--budget", type=int, default=4000, help="calls of each search (default: 4000)")
    parser.add_argument("--rounds", type=int, default=3, help="searches of each kind (default: 3)")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    arguments = parser.parse_args()
    if min(arguments.budget, arguments.rounds) < 1:
        parser.error(f"expected --budget and --rounds >= 1, got {arguments.budget} and {arguments.rounds}")
    records = measure(load_workload(arguments.workload), arguments.budget, arguments.rounds)
    ratios = {name: statistics.median(record[f"{name}_ratio"] for record in records) for name in SEARCHES}
    if arguments.json:
        report = {"workload": arguments.workload, "budget": arguments.budget, "ratios": ratios, "rounds": records}
        print(json.dumps(report))
        return
    for record in records:
        figures = (f"{name} {record[f'{name}_wall_s']:.1f} s (best {record[f'{name}_best']:.2f})" for name in SEARCHES)
        print(f"round {record['seed'] + 1}: {', '.join(figures)}")
    shares = ", ".join(f"{name} {ratio:.2f}" for name, ratio in ratios.items() if name != "sb3")
    print(f"median share of sb3's wall time: {shares}")


if __name__ == "__main__":
    main()
