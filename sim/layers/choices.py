"""Which placements a fused op takes and leaves under a strategy's choice.

The rules are those of the open registry in `sim.sharding.rules`; here one of them is picked per choice.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Literal

from sim.layers.ops import DENSE_LAYER, MOE_LAYER, FusedOp, Layer, Tensor, gathers_weight
from sim.sharding.operations import OPERATIONS, activation_operation
from sim.sharding.placement import PARTIAL, REPLICATE, Placement, Shard
from sim.sharding.rules import Operation, Rule, einsum_operation, label_rule, rules_of
from sim.strategy import NONE

Side = Literal["rows", "columns", "neither"]


@dataclass(frozen=True, slots=True)
class OpRule:
    """Placements over the tp axis under which a fused op is right.

    Attributes:
        inputs: One per input tensor of the op.
        weight: Of its weight at rest, if it has one.
        output: Of the tensor it leaves.
        passes_partial: Whether the first input may arrive as unreduced parts because the op is
            linear in it; the sum is then taken on the op's own, smaller result.
    """

    inputs: tuple[Placement, ...]
    weight: Placement | None
    output: Placement
    passes_partial: bool = False


def operation_of(op: FusedOp, layer: Layer) -> Operation:
    """The operation that a fused op is, with its numbers and its rules."""
    if op.kind == "einsum":
        assert op.equation is not None
        return einsum_operation(op.equation)
    if op.kind == "activation":
        return activation_operation(layer.tensor(op.output).letters)
    return OPERATIONS["add" if op.kind == "residual_add" else op.kind]


@lru_cache(maxsize=1024)
def rule(op: FusedOp, layer: Layer, choice: int) -> OpRule:
    """The rule behind a strategy's choice for an op: it shards a label, or replicates."""
    operation = operation_of(op, layer)
    whole = (REPLICATE,) * len(operation.operands)
    label = op.label(choice)
    picked = label_rule(operation, label) if label else Rule(whole, REPLICATE)
    if gathers_weight(choice):
        picked = _gathering(operation, picked)
    return OpRule(
        inputs=picked.inputs[: len(op.inputs)],
        weight=picked.inputs[len(op.inputs)] if op.equation else None,
        output=picked.output,
        passes_partial=choice == NONE and Rule((PARTIAL, *whole[1:]), REPLICATE) in rules_of(operation, ()),
    )


def _gathering(operation: Operation, picked: Rule) -> Rule:
    """The registered rule that does the same with a weight that is gathered at use: its columns are cut at rest."""
    inputs = (*picked.inputs[:-1], Shard(len(operation.operands[-1]) - 1))
    return next(rule for rule in rules_of(operation, (Shard(0),)) if rule.run and rule.inputs == inputs)


@lru_cache(maxsize=1024)
def held(op: FusedOp, layer: Layer, choice: int) -> tuple[tuple[Tensor, Side], ...]:
    """The tensors that an op leaves and reads under a choice, its output first, and the side that tp cuts of each."""
    op_rule = rule(op, layer, choice)
    tensors = [layer.tensor(name) for name in (op.output, *op.inputs)]
    placements = (op_rule.output, *op_rule.inputs)
    return tuple((tensor, side(tensor, cut)) for tensor, cut in zip(tensors, placements, strict=True))


def side(tensor: Tensor, placement: Placement) -> Side:
    """Which side of [rows, columns] a placement cuts; the last dim is the columns, any other a part of the rows."""
    if not isinstance(placement, Shard):
        return "neither"
    return "columns" if placement.dim == len(tensor.letters) - 1 else "rows"


def all_operations() -> dict[str, Operation]:
    """Every registered operation and every einsum of the two layers, by name."""
    einsums = {
        f"{name}_{op.name}" if "ffn" in op.name else op.name: operation_of(op, layer)
        for name, layer in (("dense", DENSE_LAYER), ("moe", MOE_LAYER))
        for op in layer.ops
        if op.kind == "einsum"
    }
    return OPERATIONS | {"moe_activation": activation_operation("ecf")} | einsums
