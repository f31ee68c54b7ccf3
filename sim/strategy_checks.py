"""Checks a strategy where it enters from outside: a command line, a file, a caller's code."""

from __future__ import annotations

from sim.layers.declared import declared_choices
from sim.ops.dims import dims_of
from sim.ops.vocabulary import vocabulary_ops
from sim.strategy import VOCABULARY_OPS, Strategy
from sim.workload import Workload

LARGEST = 10**9
"""[assumed] Beyond any batch; keeps products of degrees within the range of floats."""
MOST_STAGE_GPUS = 1 << 20
"""[assumed] Of a stage, and in any one degree: beyond any cluster, and as many as shipped spaces draw. What ranks hold
unevenly is counted rank by rank."""


class StrategyError(ValueError):
    """A strategy that means nothing, as opposed to one that is merely infeasible."""


def check_strategy(workload: Workload, strategy: Strategy) -> None:
    """Accepts a strategy that `sim.simulate.evaluate` can price.

    Raises:
        StrategyError: A degree or the batch is no integer, below 1 or beyond any cluster, or `dims`
            has the wrong length or a value that its op does not have, or `vocabulary` has.
    """
    degrees = {name: getattr(strategy, name) for name in ("tp", "ep", "pp", "cp")}
    if strategy.dp is not None:
        degrees["dp"] = strategy.dp
    for name, value in (*degrees.items(), ("batch", strategy.batch)):
        most = LARGEST if name == "batch" else MOST_STAGE_GPUS
        if type(value) is not int or not 1 <= value <= most:
            raise StrategyError(f"{name}: expected a whole number from 1 to {most:,}, got {value!r}")
    if strategy.stage_gpus > MOST_STAGE_GPUS:
        raise StrategyError(
            f"expected at most {MOST_STAGE_GPUS:,} GPUs of a stage, got tp * dp * cp = {strategy.stage_gpus:,}"
        )
    dims = dims_of(workload)
    if len(strategy.dims) != len(dims):
        raise StrategyError(
            f"expected {len(dims)} dims for {workload.model.name}, got {len(strategy.dims)}; "
            f"one of 0, 1, 2 for each of {', '.join(dim.name for dim in dims)}"
        )
    for dim, choice in zip(dims, strategy.dims, strict=True):
        if type(choice) is not int or choice not in dim.choices:
            op = dim.op
            more = ", in the extended space 3 (tokens), 4 or 5 (tokens or none, weights gathered at use)"
            declared = [f"{each.number} ({each.name})" for each in declared_choices(op.key).values()]
            raise StrategyError(
                f"the dim of {dim.name} must be 0 (dim 0), 1 (dim 1) or 2 (none){more if op.kind == 'einsum' else ''}"
                f"{', or ' + ', '.join(declared) + ', as declared' if declared else ''}, got {choice!r}"
            )
    if strategy.vocabulary:
        _check_vocabulary(strategy.vocabulary)


def _check_vocabulary(choices: tuple[int, ...]) -> None:
    ops = vocabulary_ops()
    if len(choices) != len(ops):
        raise StrategyError(
            f"expected {len(ops)} vocabulary choices, {', '.join(VOCABULARY_OPS)}, or none, got {len(choices)}"
        )
    for op, choice in zip(ops, choices, strict=True):
        if type(choice) is not int or choice not in op.choices:
            known = ", ".join(map(str, op.choices))
            raise StrategyError(f"the choice of {op.name} must be one of {known}, got {choice!r}")
