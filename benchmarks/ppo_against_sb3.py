"""Wall time of our PPO searcher beside Stable-Baselines3's PPO doing the same search on the same environment.

    python benchmarks/ppo_against_sb3.py                  # 3 pairs of 4000 calls
    python benchmarks/ppo_against_sb3.py --budget 400 --pairs 1 --json

Both have the paper's network (linear embedding, one encoder block of width 256, mean pooling, MLPs of 256) and the
paper's setting (rollouts of 2, 2 gradient steps, learning rate 1e-3 on a cosine), one torch thread, and build their
networks within the measured time. Ours restarts its agent as well (early exit and chunks), Stable-Baselines3's does
not. The searches alternate, so that a machine that slows down slows both. Both libraries are warmed up by a short
search first: imports are not measured.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import time
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


def run_ours(workload: Workload, budget: int, seed: int) -> float:
    """Makes `budget` calls with `ppo_paper`; returns the best tokens/s/GPU."""
    env = StrategyEnv(workload)
    searcher = make_searcher("ppo_paper", env.space, seed=seed, budget=budget)
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


def measure(workload: Workload, budget: int, pairs: int) -> list[dict[str, float]]:
    """Alternates both; one record a pair: seconds, best tokens/s/GPU, and the ratio of the seconds."""
    torch.set_num_threads(1)
    records = []
    for searcher in (run_ours, run_sb3):
        searcher(workload, WARM_UP_CALLS, 0)
    for seed in range(pairs):
        record: dict[str, float] = {"seed": seed}
        for name, searcher in (("ours", run_ours), ("sb3", run_sb3)):
            started = time.perf_counter()
            record[f"{name}_best"] = searcher(workload, budget, seed)
            record[f"{name}_wall_s"] = time.perf_counter() - started
        record["ratio"] = record["ours_wall_s"] / record["sb3_wall_s"]
        records.append(record)
    return records


def main() -> None:
    """Reads the command line, measures and prints."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workload", default="gpt_moe_1_2t_16k", help="a name in configs/workloads or a path")
    parser.add_argument("--budget", type=int, default=4000, help="calls of each search (default: 4000)")
    parser.add_argument("--pairs", type=int, default=3, help="searches of each kind (default: 3)")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    arguments = parser.parse_args()
    if min(arguments.budget, arguments.pairs) < 1:
        parser.error(f"expected --budget and --pairs >= 1, got {arguments.budget} and {arguments.pairs}")
    records = measure(load_workload(arguments.workload), arguments.budget, arguments.pairs)
    ratio = statistics.median(record["ratio"] for record in records)
    if arguments.json:
        report = {"workload": arguments.workload, "budget": arguments.budget, "ratio": ratio, "pairs": records}
        print(json.dumps(report))
        return
    for record in records:
        print(
            f"pair {record['seed'] + 1}: ours {record['ours_wall_s']:.1f} s, sb3 {record['sb3_wall_s']:.1f} s, "
            f"ratio {record['ratio']:.2f} (best {record['ours_best']:.2f} and {record['sb3_best']:.2f} tokens/s/GPU)"
        )
    print(f"median ratio {ratio:.2f}: below 1, ours is faster")


if __name__ == "__main__":
    main()
