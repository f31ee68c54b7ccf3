"""Simulators and spaces for tests, beside those of `raysearch.testing.landscapes`."""

from __future__ import annotations

from collections.abc import Sequence

from envs.actions import Actions
from raysearch.testing.landscapes import TOO_BIG, evaluation
from sim.evaluation import Evaluation
from sim.optimum.spaces import Coordinate
from sim.strategy import Strategy
from sim.workload import Workload


def by_batch(raw: dict[int, float]):
    """A simulator that knows a throughput per batch; other batches are infeasible."""

    def evaluate(workload: Workload, strategy: Strategy) -> Evaluation:
        if strategy.batch in raw:
            return evaluation(strategy, raw[strategy.batch])
        return evaluation(strategy, 1e9, TOO_BIG)

    return evaluate


def toy_actions(sizes: Sequence[int]) -> Actions:
    """tp, ep, pp and batch with an order, then choices without one; no degree is 1, so that every choice matters."""
    names = ("tp", "ep", "pp", "batch", *(f"op{place}" for place in range(4, len(sizes))))
    return Actions(
        [
            Coordinate(name, tuple(range(2, 2 + size)) if place < 4 else tuple(range(size)), ordered=place < 4)
            for place, (name, size) in enumerate(zip(names, sizes, strict=False))
        ]
    )
