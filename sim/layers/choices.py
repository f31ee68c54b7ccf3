"""Which placements a fused op takes and leaves under a strategy's choice.

The rules are those of the open registry in `sim.sharding.rules`; here one of them is picked per choice. Whoever has
another proved way to run an op declares it, and it becomes a choice that is priced, searched and solved like any other.

>>> from sim.ops.layers import MOE_LAYER
>>> op = MOE_LAYER.op("ffn_norm")
>>> choice = declare_choice(op, MOE_LAYER, "striped tokens", "SS(0,2) -> SS(0,2)")
>>> choice in op.choices, rule(op, MOE_LAYER, choice).output
(True, StridedShard(dim=0, stripes=2))
>>> withdraw_choice(op, "striped tokens")
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache
from typing import Literal

from sim.layers.declared import DeclaredChoice, DeclaredWork, declared_choices, keep_choice, next_number, withdraw
from sim.layers.ops import FusedOp, Layer, Tensor, gathers_weight
from sim.sharding.grid import USUAL_RANKS, GridShard, grid_of
from sim.sharding.placement import PARTIAL, REPLICATE, Placement, PlacementError, Shard
from sim.sharding.rule_check import prove
from sim.sharding.rules import Operation, Rule, RunOp, label_rule, parse_rule, rules_of
from sim.strategy import FIRST_DECLARED, GRID, NONE, inner_ranks_of

ShardedDim = Literal["rows", "columns", "neither"] | GridShard
"""What a GPU holds a share of: rows or columns of a matrix, or of both over two sub-axes."""


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


@lru_cache(maxsize=1024)
def rule(op: FusedOp, layer: Layer, choice: int) -> OpRule:
    """The rule behind a strategy's choice for an op: it shards a label, or replicates."""
    if choice in GRID:
        outer, inner = op.label(choice)
        picked = grid_rule(op.operation, outer, inner, inner_ranks_of(choice))
        return _op_rule(op, picked, passes_partial=False)
    if choice >= FIRST_DECLARED:
        declared = declared_choices(op.key)[choice]
        return _op_rule(op, declared.rule, passes_partial=declared.sums_late)
    operation = op.operation
    whole = (REPLICATE,) * len(operation.operands)
    label = op.label(choice)
    picked = label_rule(operation, label) if label else Rule(whole, REPLICATE)
    if gathers_weight(choice):
        picked = _gathering(operation, picked)
    late = choice == NONE and Rule((PARTIAL, *whole[1:]), REPLICATE) in rules_of(operation, ())
    return _op_rule(op, picked, passes_partial=late)


def grid_rule(operation: Operation, outer: str, inner: str, ranks: int = USUAL_RANKS) -> Rule:
    """The rule that shards one letter over the outer sub-axis and another over the inner one: one rule after the other.

    Of the pieces that the first leaves the second is right again. Communication inside is each one's own, on its
    sub-axis; then the rule cannot be executed as it is.

    Raises:
        PlacementError: They shard a dim in common, or in no plain chunks.
    """
    first, second = (label_rule(operation, letter) for letter in (outer, inner))
    inputs = tuple(grid_of(*each, ranks) for each in zip(first.inputs, second.inputs, strict=True))
    return Rule(inputs, grid_of(first.output, second.output, ranks))


@lru_cache(maxsize=256)
def has_grid(op: FusedOp) -> bool:
    """Whether an op can shard both its letters at once: one is tokens or hidden, and no dim is sharded twice."""
    try:
        grid_rule(op.operation, *op.labels)
    except PlacementError:
        return False
    return bool(set(op.labels) & set("tcd"))


def _op_rule(op: FusedOp, picked: Rule, *, passes_partial: bool) -> OpRule:
    weight = picked.inputs[-1] if op.weighted else None
    return OpRule(picked.inputs[: len(op.inputs)], weight, picked.output, passes_partial)


def _gathering(operation: Operation, picked: Rule) -> Rule:
    """The registered rule that does the same with a weight that is gathered at use: its columns are sharded at rest."""
    inputs = (*picked.inputs[:-1], Shard(len(operation.operands[-1]) - 1))
    return next(rule for rule in rules_of(operation, (Shard(0),)) if rule.run and rule.inputs == inputs)


@lru_cache(maxsize=1024)
def kept_tensors(op: FusedOp, layer: Layer, choice: int) -> tuple[tuple[Tensor, ShardedDim], ...]:
    """The tensors that an op leaves and reads under a choice, its output first, and the dim that tp shards of each."""
    op_rule = rule(op, layer, choice)
    tensors = [layer.tensor(name) for name in (op.output, *op.inputs)]
    placements = (op_rule.output, *op_rule.inputs)
    return tuple((tensor, sharded_dim(tensor, shard)) for tensor, shard in zip(tensors, placements, strict=True))


def sharded_dim(tensor: Tensor, placement: Placement) -> ShardedDim:
    """Which dim of [rows, columns] a placement shards; the last dim is the columns, any other a part of the rows."""
    if isinstance(placement, GridShard):
        return placement
    if placement.holds != "shard":
        return "neither"
    return "columns" if placement.dims == (len(tensor.letters) - 1,) else "rows"


# --- declared choices -----------------------------------------------------------------------------------


def declare_choice(
    op: FusedOp,
    layer: Layer,
    name: str,
    rule: Rule | str,
    *,
    sums_late: RunOp | None = None,
    work: DeclaredWork | None = None,
) -> int:
    """Offers a further way to run an op, once its rule is proved; the extended space has it from now on.

    Args:
        op: The op, of every layer that has it.
        layer: One of those.
        name: As people call it.
        rule: Placements of the op's inputs, its weight or cache and its output; a text if nothing communicates inside.
        sums_late: Where the first input may arrive as the parts of a sum: what all ranks do with them instead. It is
            charged with the collective that turns parts into the rule's output, on the op's result.
        work: Kernels, collectives inside and bytes, from a `sim.ops.rank.Rank` and the op. Without it, the op costs
            what it does when the rule's letter is sharded in plain chunks.

    Returns:
        The number that stands for it in `Strategy.dims`.

    Raises:
        WrongRule: Numbers refute the rule; the message has them.
        ValueError: The name is taken, or strategies cannot price such a rule; `PlacementError` is one.
    """
    operation, number = op.operation, next_number(op.key, name)
    proposed = parse_rule(rule) if isinstance(rule, str) else rule
    prove(operation, proposed)
    for placement in (*proposed.inputs, proposed.output):
        _check_shares(placement)
    if parts := [str(placement) for placement in proposed.inputs if placement.holds == "part"]:
        raise ValueError(f"{name}: an input under {parts[0]} must be there whole too; replicate it and give sums_late")
    if sums_late and len(layer.tensor(op.inputs[0]).consumers) > 1:
        raise ValueError(f"{name}: others read {op.inputs[0]} too, which must be summed for them; leave out sums_late")
    if sums_late:
        prove(operation, Rule((PARTIAL, *proposed.inputs[1:]), proposed.output, run=sums_late))
    labels = _labels(operation, proposed)
    plain = len(labels) < 2 and labels <= {*op.labels, *(op.label(choice) for choice in op.choices)}
    if work is None and (proposed.run or not plain):
        why = "has communication inside" if proposed.run else f"shards {' and '.join(sorted(labels))}"
        raise ValueError(f"{name}: {proposed} {why}, which has no price of its own here; give work=")
    label = next(iter(labels)) if labels and plain else ""
    keep_choice(op.key, DeclaredChoice(number, name, label, proposed, sums_late is not None, work))
    return number


def withdraw_choice(op: FusedOp, name: str) -> None:
    """Takes a declared choice out again, as a test does with its own.

    Raises:
        ValueError: The op has none of that name.
    """
    withdraw(op.key, name)


def _check_shares(placement: Placement) -> None:
    """Memory and redistributions count equal shares: over any ranks, none with more than its share of an even dim."""
    if placement.holds != "shard":
        return
    if len(placement.dims) != 1 or placement.ranks is not None:
        raise ValueError(
            f"{placement} is for one number of ranks or several dims; strategies shard one, over any degree"
        )
    for degree in (2, 3, 4, 5):
        even = math.lcm(*range(1, 11))  # into up to ten stripes or sections, too
        if placement.on(0).local_shape((degree * even,), degree) != (even,):
            raise ValueError(f"{placement} gives a rank more than its share; strategies are priced by equal ones")


def _labels(operation: Operation, rule: Rule) -> set[str]:
    """Letters that a rule shards."""
    letters = (*operation.operands, operation.result)
    placements = (*rule.inputs, rule.output)
    return {text[dim] for text, placement in zip(letters, placements, strict=True) for dim in placement.dims}
