"""Tunes the searchers that others' methods stand behind, each with the same effort, on workloads kept for tuning.

    python benchmarks/tune_peers.py          # every peer: 12 configurations, 3 finalists, 6 workloads
    python benchmarks/tune_peers.py --peer genetic --out tuning.jsonl

Every configuration is run with the first seed, and the best three with two more. A configuration's score is f/f*
averaged over workloads, seeds and four points of the run (a tenth, a quarter, a half and all of its calls): good early
counts, too. Finished runs in --out are not run again. docs/evidence/peers.md has the figures.
"""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from envs.strategy_env import StrategyEnv
from raysearch.optima.named_spaces import optimum_value
from raysearch.searchers.interface import Outcome
from raysearch.searchers.registry import check_options, make_searcher
from sim.config.catalog import load_workload
from sim.workload import Workload

WORKLOADS = (
    "qwen3_235b_a22b_16k",
    "mixtral_8x22b_8k",
    "llama_3_1_405b_8k",
    "gpt_moe_1_8t_24k_slo30",
    "gpt_moe_1_8t_48k_slo80",
    "gpt_moe_1_8t_16k_nccl",
)
SEEDS = (100, 101, 102)
FINALISTS = 3
CALLS = {"annealing_tuned": 4000}
"""Of each run: all that a study has where the cooling is spread over the budget; `OTHER_CALLS` elsewhere."""
OTHER_CALLS = 1000
POINTS = (0.1, 0.25, 0.5, 1.0)

# Twelve each. The first is the library's default, or what its source proposes; the last four lie around the best of
# the first eight.
CONFIGURATIONS: dict[str, tuple[dict[str, Any], ...]] = {
    "annealing_tuned": tuple(
        {"initial_temperature": hot, "final_temperature": cold, "chains": chains, "gap": gap}
        for hot, cold, chains, gap in (
            (1.0, 0.0, 1, 1.0),
            (0.3, 0.0, 1, 1.0),
            (0.3, 0.0, 4, 1.0),
            (0.3, 0.0, 4, 3.0),
            (0.3, 0.1, 1, 1.0),
            (0.3, 0.0, 1, 0.3),
            (0.1, 0.0, 4, 1.0),
            (1.0, 0.0, 4, 1.0),
            (0.2, 0.1, 1, 1.0),
            (0.3, 0.1, 1, 2.0),
            (0.3, 0.1, 2, 1.0),
            (0.3, 0.05, 2, 1.0),
        )
    ),
    "mcmc": tuple(
        {"beta": beta, "gap": gap, "patience": patience}
        for beta, gap, patience in (
            (3.0, 0.0, 0),
            (3.0, 1.0, 0),
            (3.0, 3.0, 0),
            (5.0, 1.0, 0),
            (10.0, 0.3, 0),
            (10.0, 1.0, 0),
            (3.0, 1.0, 200),
            (5.0, 1.0, 200),
            (5.0, 2.0, 0),
            (4.0, 3.0, 0),
            (5.0, 3.0, 0),
            (7.0, 2.0, 0),
        )
    ),
    "genetic": tuple(
        {"population": population, "offspring": offspring, "mutations": mutations, "crossover": crossover}
        for population, offspring, mutations, crossover in (
            (100, 100, 1.0, 0.9),
            (50, 1, 1.5, 0.9),
            (20, 1, 1.5, 0.9),
            (100, 1, 1.5, 0.9),
            (50, 10, 1.5, 0.9),
            (50, 1, 3.0, 0.9),
            (20, 1, 3.0, 0.9),
            (50, 1, 1.5, 0.5),
            (10, 1, 3.0, 0.9),
            (20, 1, 5.0, 0.9),
            (20, 5, 3.0, 0.9),
            (30, 1, 3.0, 0.9),
        )
    ),
    "ant_colony": tuple(
        {"ants": ants, "evaporation": evaporation, "least_share": least, "elite_share": elite, "patience": patience}
        for ants, evaporation, least, elite, patience in (
            (10, 0.1, 0.05, 0.5, 50),
            (20, 0.1, 0.05, 0.5, 25),
            (10, 0.05, 0.05, 0.5, 50),
            (10, 0.2, 0.05, 0.5, 50),
            (10, 0.2, 0.15, 0.5, 50),
            (10, 0.1, 0.15, 0.5, 50),
            (10, 0.1, 0.05, 1.0, 50),
            (5, 0.1, 0.1, 0.5, 40),
            (10, 0.3, 0.15, 0.5, 50),
            (10, 0.2, 0.3, 0.5, 50),
            (10, 0.3, 0.3, 0.5, 50),
            (5, 0.2, 0.15, 0.5, 50),
        )
    ),
    "optuna_tpe": tuple(
        {
            "startup_calls": startup,
            "candidates": candidates,
            "good_share": share,
            "good_most": most,
            "prior_weight": prior,
            "degrees": degrees,
        }
        for startup, candidates, share, most, prior, degrees in (
            (10, 24, 0.1, 25, 1.0, "ordered"),
            (10, 24, 0.1, 25, 1.0, "categorical"),
            (50, 24, 0.1, 25, 1.0, "ordered"),
            (10, 96, 0.1, 25, 1.0, "ordered"),
            (10, 24, 0.1, 10, 1.0, "ordered"),
            (10, 24, 0.2, 50, 1.0, "ordered"),
            (10, 24, 0.1, 25, 0.3, "ordered"),
            (10, 24, 0.1, 10, 3.0, "ordered"),
            (10, 24, 0.2, 50, 0.3, "ordered"),
            (10, 96, 0.2, 50, 1.0, "ordered"),
            (10, 24, 0.3, 100, 1.0, "ordered"),
            (10, 48, 0.2, 50, 0.5, "ordered"),
        )
    ),
    "optuna_cmaes": tuple(
        {"population": population, "choices": choices, "margin": margin, "restart_after": restart}
        for population, choices, margin, restart in (
            (12, "ordinal", True, 0),
            (12, "ordinal", True, 250),
            (12, "ordinal", False, 250),
            (24, "ordinal", True, 250),
            (15, "one_hot", True, 0),
            (15, "one_hot", True, 250),
            (15, "one_hot", False, 250),
            (30, "one_hot", True, 250),
            (24, "ordinal", False, 250),
            (8, "ordinal", False, 250),
            (16, "ordinal", False, 100),
            (24, "ordinal", True, 500),
        )
    ),
    "nevergrad": tuple(
        {"optimizer": optimizer, "degrees": degrees, "choices": choices}
        for optimizer, degrees, choices in (
            ("NGOpt", "transition", "transition"),
            ("NGOpt", "integer", "transition"),
            ("NgIohTuned", "transition", "transition"),
            ("NgIohTuned", "integer", "transition"),
            ("PortfolioDiscreteOnePlusOne", "transition", "transition"),
            ("PortfolioDiscreteOnePlusOne", "integer", "transition"),
            ("RecombiningPortfolioDiscreteOnePlusOne", "transition", "transition"),
            ("TwoPointsDE", "transition", "transition"),
            ("TwoPointsDE", "transition", "weights"),
            ("TwoPointsDE", "integer", "transition"),
            ("DiscreteDE", "transition", "transition"),
            ("LognormalDiscreteOnePlusOne", "transition", "transition"),
        )
    ),
}


def run(peer: str, options: dict[str, Any], workload: Workload, seed: int, calls: int) -> dict[str, Any]:
    """One run: f/f* at `POINTS` and the seconds it took."""
    optimum = optimum_value(workload)
    assert optimum
    env = StrategyEnv(workload)
    searcher = make_searcher(peer, env.space, seed=seed, budget=calls, **options)
    observation, _ = env.reset()
    best: list[float] = []
    started = time.perf_counter()
    for _ in range(calls):
        action = searcher.ask(observation)
        assert action is not None
        observation, reward, _, _, info = env.step(action)
        searcher.tell(action, Outcome.of(observation, reward, info))
        best.append(env.best / optimum)
    curve = [best[round(point * calls) - 1] for point in POINTS]
    return {"curve": curve, "wall_s": time.perf_counter() - started}


class Tuning:
    """The runs of one peer, kept in a file of one JSON object a line."""

    def __init__(self, peer: str, calls: int, out: Path) -> None:
        self.peer, self.calls, self._out = peer, calls, out
        lines = out.read_text().splitlines() if out.exists() else []
        kept = [record for record in map(json.loads, lines) if (record["peer"], record["calls"]) == (peer, calls)]
        self._records = {_key(record): record for record in kept}

    def try_out(self, options: dict[str, Any], seeds: Sequence[int]) -> None:
        """Runs a configuration on all workloads, unless that has been done."""
        for workload, seed in itertools.product(WORKLOADS, seeds):
            record = {"peer": self.peer, "options": options, "workload": workload, "seed": seed, "calls": self.calls}
            if _key(record) not in self._records:
                record |= run(self.peer, options, load_workload(workload), seed, self.calls)
                self._records[_key(record)] = record
                with self._out.open("a") as file:
                    file.write(json.dumps(record) + "\n")

    def records(self, options: dict[str, Any], seeds: Sequence[int]) -> list[dict[str, Any]]:
        """The runs of a configuration with those seeds."""
        found = self._records.values()
        return [record for record in found if record["options"] == options and record["seed"] in seeds]

    def score(self, options: dict[str, Any], seeds: Sequence[int]) -> float:
        """f/f* of a configuration, averaged over all points, workloads and seeds."""
        return statistics.mean(itertools.chain(*(record["curve"] for record in self.records(options, seeds))))


def _key(record: dict[str, Any]) -> str:
    return json.dumps([record[name] for name in ("peer", "options", "workload", "seed", "calls")])


def tune(tuning: Tuning) -> None:
    """Tries every configuration with the first seed and the best ones with the others; prints both, the best first."""
    configurations = CONFIGURATIONS[tuning.peer]
    for options in configurations:
        check_options(tuning.peer, options)
    for options in configurations:
        tuning.try_out(options, SEEDS[:1])
    ranked = sorted(configurations, key=lambda options: tuning.score(options, SEEDS[:1]), reverse=True)
    print_table(tuning, ranked, SEEDS[:1])
    for options in ranked[:FINALISTS]:
        tuning.try_out(options, SEEDS)
    finalists = sorted(ranked[:FINALISTS], key=lambda options: tuning.score(options, SEEDS), reverse=True)
    print_table(tuning, finalists, SEEDS)


def print_table(tuning: Tuning, configurations: Sequence[dict[str, Any]], seeds: Sequence[int]) -> None:
    """One line per configuration, in the order given."""
    points = [f"{round(point * tuning.calls)}" for point in POINTS]
    print(f"\n| {tuning.peer}, seeds {list(seeds)} | " + " | ".join(points) + " | score | worst | wall s |")
    print("|---" * (len(points) + 4) + "|")
    for options in configurations:
        own = tuning.records(options, seeds)
        curve = [statistics.mean(record["curve"][point] for record in own) for point in range(len(POINTS))]
        figures = [*curve, tuning.score(options, seeds), min(record["curve"][-1] for record in own)]
        wall_s = statistics.mean(record["wall_s"] for record in own)
        text = ", ".join(f"{name} {value}" for name, value in options.items())
        print(f"| {text} | " + " | ".join(f"{value:.3f}" for value in figures) + f" | {wall_s:.1f} |", flush=True)


def main() -> None:
    """Reads the command line, tunes and prints."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--peer", action="append", choices=CONFIGURATIONS, help="may be repeated (default: all)")
    parser.add_argument("--calls", type=int, help="of a run (default: 1000, and 4000 of annealing_tuned)")
    parser.add_argument("--out", type=Path, default=Path("tuning.jsonl"), help="a line per run; read, then appended to")
    arguments = parser.parse_args()
    for peer in arguments.peer or CONFIGURATIONS:
        calls = arguments.calls or CALLS.get(peer, OTHER_CALLS)
        tune(Tuning(peer, calls, arguments.out))


if __name__ == "__main__":
    main()
