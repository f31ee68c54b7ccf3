"""Checks a strategy where it enters from outside: a command line, a file, a caller's code."""

from __future__ import annotations

from sim.ops import op_names
from sim.types import CHOICES, Strategy, Workload

LARGEST = 10**9
"""Beyond any cluster or batch; keeps products of degrees within the range of floats."""


class StrategyError(ValueError):
    """A strategy that means nothing, as opposed to one that is merely infeasible."""


def check_strategy(workload: Workload, strategy: Strategy) -> None:
    """Accepts a strategy that `sim.simulate.evaluate` can price.

    Raises:
        StrategyError: A degree or the batch is no integer or below 1, or `dims` has the wrong
            length or a value that is none of 0, 1, 2.
    """
    for name in ("tp", "ep", "pp", "batch"):
        value = getattr(strategy, name)
        if type(value) is not int or not 1 <= value <= LARGEST:
            raise StrategyError(f"{name} must be an integer from 1 to {LARGEST:,}, got {value!r}")
    names = op_names(workload.model)
    if len(strategy.dims) != len(names):
        raise StrategyError(
            f"expected {len(names)} dims for {workload.model.name}, got {len(strategy.dims)}; "
            f"one of 0, 1, 2 for each of {', '.join(names)}"
        )
    for name, choice in zip(names, strategy.dims, strict=True):
        if type(choice) is not int or choice not in CHOICES:
            raise StrategyError(f"the dim of {name} must be 0 (dim 0), 1 (dim 1) or 2 (none), got {choice!r}")
