"""What the policy earns, and what of it: on black boxes drawn as in pre-training that nothing was trained or chosen on.

    python benchmarks/policy_ablations.py --out tables.jsonl --tables 64
    python benchmarks/policy_ablations.py --out tables.jsonl --tables 0     # the table alone

Each is a workload with some 400 strategies, all evaluated, so that searches of it cost no simulator. Searches expect
what the carried simulator does; the policy is the one that ships, decides one or five calls, and in some reads nothing
of the workload or of the calls so far. All others are decided by expected improvement. Finished tables are not made
again.
"""

from __future__ import annotations

import argparse
import json
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

import numpy as np
from first_calls import UNREAD, policy_without

from raysearch.pretraining.policy_training import Chooser, by_improvement, by_policy
from raysearch.pretraining.pretraining_file import PretrainingFile
from raysearch.pretraining.search_episodes import Searches
from raysearch.pretraining.search_tables import made_table, table_workload
from raysearch.searchers.prior.network import SHIPPED_PRIOR
from raysearch.searchers.prior.policy import SHIPPED_POLICY, read_policy
from sim.arrays import Floats
from sim.config.files import config_path, read_config

POINTS = (1, 2, 3, 5, 10)
IMPROVEMENT = "expected improvement"


def choosers() -> Iterator[tuple[str, Chooser, int]]:
    """Names, who decides the first calls, and how many."""
    yield IMPROVEMENT, by_improvement, 0
    policy = by_policy(read_policy(SHIPPED_POLICY))
    yield "the policy, 1 call", policy, 1
    yield "the policy, 5 calls", policy, 5
    for option, layer in UNREAD.items():
        yield f"the policy, 5 calls, {option}", by_policy(read_policy(policy_without(layer))), 5


def curves(pretraining: PretrainingFile, index: int) -> Iterator[tuple[str, list[float]]]:
    """f/f* after each of `POINTS`, by who decides; nothing where no strategy is feasible."""
    table = made_table(pretraining, SHIPPED_PRIOR, index)
    if not table.raw.any():
        return
    searches = Searches(pretraining, SHIPPED_PRIOR, [table])
    for name, choose, decides in choosers():
        rng = np.random.default_rng(index)
        search = searches.begin(0, rng, noise=0.0)
        best: list[float] = []
        for call in range(max(POINTS)):
            search.call((choose if call < decides else by_improvement)(search, rng))
            best.append(search.best)
        yield name, [best[after - 1] for after in POINTS]


def main() -> None:
    """Makes what is missing, then prints means and the differences to expected improvement, with 95 % intervals."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--out", type=Path, default=Path("tables.jsonl"))
    parser.add_argument("--tables", type=int, default=64)
    asked = parser.parse_args()
    pretraining = read_config(config_path("pretraining", "default"), PretrainingFile)
    lines = asked.out.read_text().splitlines() if asked.out.is_file() else []
    done = {json.loads(line)["index"] for line in lines}
    first = pretraining.policy.tables  # the policy was trained on those before
    for index in range(first, first + asked.tables):
        if index not in done:
            own = table_workload(pretraining, index).hardware.curves
            measured = own is not None and own.calibration.machine == own.calibration.measured
            found = {"index": index, "measured": measured, "curves": dict(curves(pretraining, index))}
            with asked.out.open("a") as file:
                file.write(json.dumps(found) + "\n")
    print_table([json.loads(line) for line in asked.out.read_text().splitlines()])


def print_table(found: list[dict[str, object]]) -> None:
    """A row per machine known or not and who decides."""
    by: dict[tuple[object, str], list[list[float]]] = defaultdict(list)
    for table in found:
        of_table = table["curves"]
        assert isinstance(of_table, dict)
        for name, curve in of_table.items():
            by[table["measured"], name].append(curve)
    rng = np.random.default_rng(0)
    print(f"| machine | first calls by | tables | {' | '.join(map(str, POINTS))} |")
    print("|---|---|---|" + "---|" * len(POINTS))
    for (measured, name), rows in by.items():
        each, without = np.array(rows), np.array(by[measured, IMPROVEMENT])
        cells = [f"{mean:.3f}{_interval(row, rng)}" for mean, row in zip(each.mean(0), (each - without).T, strict=True)]
        print(f"| {'measured' if measured else 'not'} | {name} | {len(each)} | {' | '.join(cells)} |")


def _interval(differences: Floats, rng: np.random.Generator) -> str:
    """Of the mean difference, by bootstrap over tables."""
    if not differences.any():
        return ""
    drawn = differences[rng.integers(len(differences), size=(4000, len(differences)))].mean(1)
    low, high = np.quantile(drawn, (0.025, 0.975))
    return f" ({differences.mean():+.3f} [{low:+.3f}, {high:+.3f}])"


if __name__ == "__main__":
    main()
