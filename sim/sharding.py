"""Which placements an op takes and leaves when one of its labels is sharded over the tp axis.

A rule is an equality: op(pieces of the inputs) = pieces of op(inputs). Einsum ops derive theirs
from the letters; every other kind registers its own.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache

from sim.ops import FusedOp, Layer
from sim.placement import PARTIAL, REPLICATE, Placement, Shard
from sim.types import NONE


@dataclass(frozen=True, slots=True)
class Rule:
    """Placements over one mesh axis under which an op is right.

    Attributes:
        inputs: One per input tensor of the op.
        weight: Of its weight, if it has one.
        output: Of the tensor it leaves.
        passes_partial: Whether the first input may arrive as unreduced parts because the op is
            linear in it; the sum is then taken on the op's own, smaller result.
    """

    inputs: tuple[Placement, ...]
    weight: Placement | None
    output: Placement
    passes_partial: bool = False


RuleFunction = Callable[[FusedOp, Layer, str], Rule]
_RULES: dict[str, RuleFunction] = {}


def register_rule(kind: str) -> Callable[[RuleFunction], RuleFunction]:
    """Registers the rule of an op kind: a function of the op, its layer and the sharded label.

    Raises:
        ValueError: The kind has a rule already.
    """

    def register(function: RuleFunction) -> RuleFunction:
        if kind in _RULES:
            raise ValueError(f"op kind {kind!r} has a sharding rule already: {_RULES[kind].__name__}")
        _RULES[kind] = function
        return function

    return register


def einsum_rule(equation: str, label: str) -> tuple[tuple[Placement, ...], Placement]:
    """Placements of an einsum's operands and result when `label` is sharded wherever it occurs.

    A label that the einsum sums over leaves the result as unreduced parts. Together with
    replicating everything and passing one partial operand through, this is all that is right.

    >>> [str(p) for p in einsum_rule("td,dq->tq", "d")[0]], str(einsum_rule("td,dq->tq", "d")[1])
    (['S(1)', 'S(0)'], 'P(sum)')
    """
    operands, result = equation.split("->")
    inputs = tuple(_shard(letters, label) for letters in operands.split(","))
    return inputs, _shard(result, label) if label in result else PARTIAL


@lru_cache(maxsize=1024)
def rule(op: FusedOp, layer: Layer, choice: int) -> Rule:
    """The rule behind a strategy's choice for an op: 0 or 1 shards a label, 2 replicates."""
    if choice == NONE:
        weight = REPLICATE if op.equation else None
        return Rule((REPLICATE,) * len(op.inputs), weight, REPLICATE, passes_partial=op.kind == "combine")
    return _RULES[op.kind](op, layer, op.labels[choice])


def _shard(letters: str, label: str) -> Placement:
    return Shard(letters.index(label)) if label in letters else REPLICATE


def _letters(op: FusedOp, layer: Layer) -> tuple[list[str], str]:
    return [layer.tensor(name).letters for name in op.inputs], layer.tensor(op.output).letters


@register_rule("einsum")
def _einsum(op: FusedOp, layer: Layer, label: str) -> Rule:
    assert op.equation is not None
    (activation, weight), output = einsum_rule(op.equation, label)
    return Rule((activation,), weight, output)


def _pointwise(op: FusedOp, layer: Layer, label: str) -> Rule:
    inputs, output = _letters(op, layer)
    return Rule(tuple(_shard(letters, label) for letters in inputs), None, _shard(output, label))


register_rule("residual_add")(_pointwise)
register_rule("activation")(_pointwise)
# A norm sharded over hidden is pointwise once the statistic is reduced, which `sim.costs` charges.
register_rule("norm")(_pointwise)


@register_rule("attention")
def _attention(op: FusedOp, layer: Layer, label: str) -> Rule:
    placement = Shard(0) if label == "t" else Shard(1)  # requests, or heads of q, k, v and output alike
    return Rule((placement,), None, placement)


@register_rule("router")
def _router(op: FusedOp, layer: Layer, label: str) -> Rule:
    if label == "t":
        return Rule((Shard(0),), REPLICATE, Shard(0))
    # Logits sharded over experts are gathered inside the op: top-k needs all of them.
    return Rule((REPLICATE,), Shard(1), REPLICATE)


@register_rule("dispatch")
def _dispatch(op: FusedOp, layer: Layer, label: str) -> Rule:
    if label == "t":
        return Rule((Shard(0), Shard(0)), None, Shard(1))  # [e, c, d]: each rank's tokens, copied to experts
    return Rule((Shard(1), REPLICATE), None, Shard(2))


@register_rule("combine")
def _combine(op: FusedOp, layer: Layer, label: str) -> Rule:
    # Sharded, the all-to-all carries only this rank's share, so parts are reduced before it.
    if label == "t":
        return Rule((Shard(1), Shard(0), Shard(0)), None, Shard(0))
    return Rule((Shard(2), Shard(1), REPLICATE), None, Shard(1))
