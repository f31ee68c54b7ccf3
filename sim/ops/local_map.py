"""Opaque ops: code of one's own on each rank's pieces; only the placements around it are known, and its price.

What `local_map` of PyTorch and `shard_map` of JAX are in a model, such an op is in a strategy: nobody looks inside,
where pieces may lie as no placement says, as the running sums of ring attention do. Its placements are declared, not
proved, and a function of one's own prices it; otherwise it is an op like all others, with a choice in every space.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import NoReturn

from sim.layers.model import LayerGroup
from sim.layers.ops import PLAIN, FusedOp, Megatron, OpWork, Side, Storage
from sim.ops.layers import everywhere, register_op
from sim.ops.rank import Rank, Work
from sim.sharding.placement import PlacementError
from sim.sharding.rules import Operation, Rule, RuleSource, parse_rule
from sim.strategy import NONE

UNSHARDED = Megatron(NONE, NONE)
"""What heuristics do with an op that they do not know."""


def local_map(
    name: str,
    equation: str,
    placements: Mapping[str, str],
    work: OpWork,
    *,
    inputs: tuple[str, ...],
    output: str,
    side: Side,
    storage: Storage = PLAIN,
    megatron: Megatron = UNSHARDED,
    where: Callable[[LayerGroup], bool] = everywhere,
) -> FusedOp:
    """Registers an opaque op: see `sim.ops.layers.register_op` for where it stands in a layer.

    Args:
        name: Of the op.
        equation: Letters of the dims of its inputs and of its output, as an einsum's: "ta->ta".
        placements: By the letter that choice 0 and that choice 1 shard: placements of inputs and output, believed.
        work: From a `sim.ops.rank.Rank`, the op and the letter that is sharded ("" for none) to its `Work`: kernels,
            collectives inside, bytes.
        inputs: Tensors that it reads.
        output: Tensor that it leaves to whoever read the first.
        side: Mesh on which it lies.
        storage: Of the output, where its columns are none that layers know.
        megatron: Its choices under Megatron-LM's heuristics; by default it is not sharded.
        where: Layers that have it; by default all that leave its inputs.

    Returns:
        The op; `sim.ops.layers.withdraw_op` takes it out again.

    Raises:
        ValueError: Placements are not of two letters or do not fit the equation, or `register_op` refuses the op.
    """
    if len(placements) != 2:
        raise ValueError(f"{name}: expected placements for two letters, choices 0 and 1, got {', '.join(placements)}")
    operands, arrow, result = equation.partition("->")
    tensors = (*operands.split(","), result)
    if not arrow or not all(tensors):
        raise ValueError(f"{name}: expected an equation such as 'ta->ta', got {equation!r}")
    rules = [_rule(name, letter, text, tensors) for letter, text in placements.items()]
    first, second = placements
    op = FusedOp(
        name,
        f"local_map:{name}",
        side,
        (first, second),
        inputs,
        output,
        result,
        Operation(f"local_map:{name}", equation, _unknown, free="", opaque=True),
        _checked(name, work),
        megatron,
        storage=storage,
    )
    source: RuleSource = lambda operation, in_play: rules  # noqa: E731 whatever is in play
    register_op(op, (source,), where)
    return op


def _rule(name: str, letter: str, text: str, tensors: Sequence[str]) -> Rule:
    """The rule of a letter; tensors are the letters of each input and of the output. Raises: ValueError."""
    if letter not in set("".join(tensors)):
        raise ValueError(f"{name}: no tensor has the dim {letter!r}: they are {', '.join(tensors)}")
    try:
        found = parse_rule(text)
    except PlacementError as error:
        raise ValueError(f"{name}: {error}") from None
    if len(found.inputs) != len(tensors) - 1:
        raise ValueError(f"{name}: {text!r} places {len(found.inputs)} inputs, the equation has {len(tensors) - 1}")
    for placement, letters in zip((*found.inputs, found.output), tensors, strict=True):
        if max(placement.dims, default=0) >= len(letters):
            raise ValueError(f"{name}: {placement} in {text!r} shards a dim that {letters} has not")
    return Rule(found.inputs, found.output, letter)


def _checked(name: str, work: OpWork) -> OpWork:
    """The same function, which then says whose answer is no price."""

    def priced(rank: Rank, op: FusedOp, label: str) -> Work:
        found = work(rank, op, label)
        if not isinstance(found, Work):
            raise TypeError(f"{name}: expected Work from its function, got {found!r}")
        for kernel in found.kernels:
            if not all(0.0 <= amount < math.inf for amount in (kernel.flops, kernel.traffic_bytes)):
                raise ValueError(
                    f"{name}: expected operations and bytes of 0 or more from its function, got {kernel.flops} and "
                    f"{kernel.traffic_bytes}"
                )
        return found

    return priced


def _unknown(*_: object) -> NoReturn:
    raise ValueError("an opaque op is not executed here")
