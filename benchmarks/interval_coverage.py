"""How often the bootstrap interval of an interquartile mean holds the true value, against seeds per workload.

Run: python benchmarks/interval_coverage.py
"""

from __future__ import annotations

import numpy as np

from raysearch.reports.statistics import estimate, interquartile_mean

STUDIES, WORKLOADS = 600, 6


def main() -> None:
    """Prints one line per number of seeds; scores are beta-distributed, with other parameters on each workload."""
    rng = np.random.default_rng(1)
    shapes = list(zip(rng.uniform(8, 40, WORKLOADS), rng.uniform(0.5, 3, WORKLOADS), strict=True))
    truth = float(interquartile_mean(*(rng.beta(a, b, size=200_000) for a, b in shapes)))
    print("seeds  held  mean width")
    for seeds in (2, 3, 5, 10, 20):
        kept, widths = 0, 0.0
        for _ in range(STUDIES):
            runs = [rng.beta(a, b, size=seeds) for a, b in shapes]
            figure = estimate(runs, interquartile_mean, rng=rng, resamples=1000)
            low, high = float(figure.low), float(figure.high)  # pyright: ignore[reportArgumentType]
            kept += low <= truth <= high
            widths += high - low
        print(f"{seeds:5}  {kept / STUDIES:4.0%}  {widths / STUDIES:.4f}")


if __name__ == "__main__":
    main()
