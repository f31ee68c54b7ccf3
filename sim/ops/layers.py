"""The fused ops of a transformer's layer, one entry each, and those that somebody registers.

A layer that is attention alone, or a feed-forward network alone, has the ops of that part, and leaves the residual
stream behind its one residual add. Whoever registers an op states all of it in one place: a gate behind attention, in
`docs/concepts/placements.md`, shows it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import lru_cache
from typing import NamedTuple

from sim.layers.model import LayerGroup, Model
from sim.layers.ops import FusedOp, Layer, Megatron, Storage, layer_from
from sim.near_names import did_you_mean
from sim.ops.sizes import FEATURES, ROUTING_ENTRY_BYTES
from sim.ops.token_mixers import attention_work
from sim.ops.work import (
    activation_work,
    combine_work,
    contracts_in_two,
    cuts_a_latent,
    dispatch_work,
    ffn1_work,
    ffn2_work,
    into_attention_work,
    norm_work,
    out_of_attention_work,
    residual_add_work,
    router_work,
)
from sim.sharding.operations import OPERATIONS, activation_operation
from sim.sharding.placement import Shard
from sim.sharding.rule_check import prove
from sim.sharding.rules import SOURCES, Operation, RuleSource, add_rules, einsum_operation, label_rule, rules_of
from sim.strategy import NONE

_COLUMNS, _ROWS, _TOKENS = Megatron(1, 1), Megatron(0, 0), Megatron(NONE, 0)
"""Megatron-LM's choices: column-parallel then row-parallel GEMMs with all between them, and on every GPU what sequence
parallelism shards over tokens.

Source: Shoeybi et al., Megatron-LM (2019), section 3: one all-reduce after each pair of GEMMs; Korthikanti et al.
(2022), section 4.2.2: sequence parallelism splits each all-reduce into an all-gather and a reduce-scatter.
"""


def _gate_and_up(layers: LayerGroup) -> int:
    assert layers.feed_forward
    return layers.feed_forward.in_width


_GATE_AND_UP = Storage(_gate_and_up)
"""Gate and up lie side by side and are sharded alike, so f is one letter of doubled width."""
# fmt: off
# name, kind, side, labels of choices 0 and 1, inputs, output and its letters; operation, work, Megatron-LM's choices
_ATTENTION = (
    FusedOp(
        "attn_norm", "norm", "attention", ("t", "d"), ("residual_in",), "attn_in", "td",
        OPERATIONS["norm"], norm_work, _TOKENS
    ),
    FusedOp(
        "qkv_proj", "einsum", "attention", ("d", "q"), ("attn_in",), "qkv", "tq",
        einsum_operation("td,dq->tq"), into_attention_work, _COLUMNS, weighted=True, unsupported=contracts_in_two
    ),
    FusedOp(
        "attention", "attention", "attention", ("t", "h"), ("qkv",), "attn_out", "ta",
        OPERATIONS["attention"], attention_work, _COLUMNS
    ),
    FusedOp(
        "o_proj", "einsum", "attention", ("a", "d"), ("attn_out",), "attn_projected", "td",
        einsum_operation("ta,ad->td"), out_of_attention_work, _ROWS, weighted=True
    ),
    FusedOp(
        "attn_residual", "residual_add", "attention", ("t", "d"), ("attn_projected", "residual_in"), "residual_mid",
        "td", OPERATIONS["add"], residual_add_work, _TOKENS
    ),
)
_FFN_NORM = (
    FusedOp(
        "ffn_norm", "norm", "experts", ("t", "d"), ("residual_mid",), "ffn_in", "td",
        OPERATIONS["norm"], norm_work, _TOKENS
    ),
)
_EXPERTS = (
    FusedOp(
        "router", "router", "experts", ("t", "e"), ("ffn_in",), "routing", "tk",
        OPERATIONS["router"], router_work, _TOKENS, weighted=True, storage=Storage(each_bytes=ROUTING_ENTRY_BYTES)
    ),
    FusedOp(
        "dispatch", "dispatch", "experts", ("t", "d"), ("ffn_in", "routing"), "expert_in", "ecd",
        OPERATIONS["dispatch"], dispatch_work, _TOKENS, storage=Storage(dispatched=True), unsupported=cuts_a_latent
    ),
    FusedOp(
        "ffn1", "einsum", "experts", ("d", "f"), ("expert_in",), "ffn_mid", "ecf",
        einsum_operation("ecd,edf->ecf"), ffn1_work, _COLUMNS, weighted=True, storage=_GATE_AND_UP
    ),
    FusedOp(
        "activation", "activation", "experts", ("c", "f"), ("ffn_mid",), "ffn_act", "ecf",
        activation_operation("ecf"), activation_work, _COLUMNS
    ),
    FusedOp(
        "ffn2", "einsum", "experts", ("f", "d"), ("ffn_act",), "expert_out", "ecd",
        einsum_operation("ecf,efd->ecd"), ffn2_work, _ROWS, weighted=True
    ),
    FusedOp(
        "combine", "combine", "experts", ("t", "d"), ("expert_out", "residual_mid", "routing"), "residual_in", "td",
        OPERATIONS["combine"], combine_work, _TOKENS, unsupported=cuts_a_latent
    ),
)
_DENSE_FFN = (
    FusedOp(
        "ffn1", "einsum", "experts", ("d", "f"), ("ffn_in",), "ffn_mid", "tf",
        einsum_operation("td,df->tf"), ffn1_work, _COLUMNS, weighted=True, storage=_GATE_AND_UP
    ),
    FusedOp(
        "activation", "activation", "experts", ("t", "f"), ("ffn_mid",), "ffn_act", "tf",
        activation_operation("tf"), activation_work, _COLUMNS
    ),
    FusedOp(
        "ffn2", "einsum", "experts", ("f", "d"), ("ffn_act",), "ffn_out", "td",
        einsum_operation("tf,fd->td"), ffn2_work, _ROWS, weighted=True
    ),
    FusedOp(
        "combine", "residual_add", "experts", ("t", "d"), ("ffn_out", "residual_mid"), "residual_in", "td",
        OPERATIONS["add"], residual_add_work, _TOKENS
    ),
)
# fmt: on


# --- layers -------------------------------------------------------------------------------------------


@lru_cache(maxsize=256)
def _layer(attention: tuple[FusedOp, ...], feed_forward: tuple[FusedOp, ...], more: tuple[FusedOp, ...] = ()) -> Layer:
    """The layer of the parts that there are, with those of some registered ops that belong there."""
    ops = (*attention, *feed_forward)
    for op in more:
        if set(op.inputs) <= {each.output for each in ops}:
            ops = _with(ops, op)
    return layer_from(ops if attention and feed_forward else [_alone(op) for op in ops])


def _with(ops: tuple[FusedOp, ...], op: FusedOp) -> tuple[FusedOp, ...]:
    """The ops with one more behind that which leaves its first input; whoever read that reads its output."""
    first = op.inputs[0]
    at = 1 + next(index for index, each in enumerate(ops) if each.output == first)
    behind = (
        replace(each, inputs=tuple(op.output if name == first else name for name in each.inputs)) for each in ops[at:]
    )
    return (*ops[:at], op, *behind)


def _alone(op: FusedOp) -> FusedOp:
    """An op of one part of a layer where nothing stands beside it: the part reads and leaves the residual stream."""

    def renamed(tensor: str) -> str:
        return "residual_in" if tensor == "residual_mid" else tensor

    return replace(op, inputs=tuple(map(renamed, op.inputs)), output=renamed(op.output))


_FFN, _MOE = _FFN_NORM + _DENSE_FFN, _FFN_NORM + _EXPERTS
MOE_LAYER, DENSE_LAYER = _layer(_ATTENTION, _MOE), _layer(_ATTENTION, _FFN)


def layer_of(group: LayerGroup) -> Layer:
    """The layer of a group: 12 fused ops for mixture-of-experts, 10 for dense; 5, 7 and 5 of a part alone."""
    found = _IN_USE.get(group)
    if found is None:
        feed_forward = () if group.feed_forward is None else _MOE if group.is_moe else _FFN
        more = tuple(each.op for each in _REGISTERED.values() if each.where(group))
        found = _IN_USE[group] = _layer(_ATTENTION if group.attention else (), feed_forward, more)
    return found


def layer_ops(model: Model) -> Layer:
    """The layer whose ops a strategy has choices for where groups share them: with all that any group has."""
    names = {name for group in model.groups for name in layer_of(group).op_by_name}
    more = tuple(each.op for name, each in _REGISTERED.items() if name in names)
    return _layer(_ATTENTION, _MOE if model.is_moe else _FFN, more)


def op_names(model: Model) -> tuple[str, ...]:
    """Names of the fused ops, in the order of `Strategy.dims` where groups share their choices."""
    return tuple(layer_ops(model).op_by_name)


def registered_ops(model: Model) -> tuple[str, ...]:
    """Those of them that somebody registered."""
    return tuple(name for name in op_names(model) if name in _REGISTERED)


def all_operations() -> dict[str, Operation]:
    """Every operation that can be executed, by name: those of `sim.sharding.operations`, einsums, registered ops'."""
    einsums = {
        f"{name}_{op.name}" if "ffn" in op.name else op.name: op.operation
        for name, layer in (("dense", DENSE_LAYER), ("moe", MOE_LAYER))
        for op in layer.ops
        if op.kind == "einsum"
    }
    registered = {name: each.op.operation for name, each in _REGISTERED.items() if not each.op.operation.opaque}
    return OPERATIONS | {"moe_activation": activation_operation("ecf")} | einsums | registered


# --- registered ops -----------------------------------------------------------------------------------


class _Registration(NamedTuple):
    op: FusedOp
    where: Callable[[LayerGroup], bool]
    rules: tuple[RuleSource, ...]


_REGISTERED: dict[str, _Registration] = {}
_IN_USE: dict[LayerGroup, Layer] = {}
"""Layers that were asked for. Costs and spaces are known of them by then, so they stay as they are."""


def everywhere(_group: LayerGroup) -> bool:
    """All layers that leave an op's inputs."""
    return True


def register_op(
    op: FusedOp, rules: Sequence[RuleSource] = (), where: Callable[[LayerGroup], bool] = everywhere
) -> None:
    """Adds a fused op to layers, behind the op that leaves its first input and in front of all that read it.

    Strategies of models with such layers have a choice more from now on, and all that works on ops has the op.

    Args:
        op: All that is known of it.
        rules: Of the operation's kind, where it is a new one. They are proved before anything is added, unless the
            operation is opaque.
        where: Which of the layers that leave its inputs have it.

    Raises:
        WrongRule: Numbers refute a rule; the message has them.
        ValueError: A name is taken, no layer leaves its inputs on its side, its output's columns are none that layers
            know, no rule shards one of its letters, or layers that should have it are in use without it.
    """
    ops = (*_ATTENTION, *_MOE, *_DENSE_FFN, *(each.op for each in _REGISTERED.values()))
    for name in (op.name, op.output):
        if any(name in (each.name, each.output) for each in ops):
            raise ValueError(f"there is an op or tensor {name!r} already: give yours another name")
    sides = {each.output: each.side for each in ops if not each.output.startswith("residual_")}
    for name in op.inputs:
        if sides.get(name) != op.side:
            known = ", ".join(tensor for tensor, side in sides.items() if side == op.side)
            raise ValueError(f"{op.name} reads {name!r}, on the side of {op.side} it can read {known}")
    if op.letters[-1] not in FEATURES and op.storage.columns is None:
        raise ValueError(
            f"{op.name} leaves {op.letters!r}, whose columns must be one of {', '.join(FEATURES)}, or say their storage"
        )
    if rules and op.operation.kind in SOURCES:
        raise ValueError(f"operations of kind {op.operation.kind!r} have rules already: leave yours out, or rename it")
    if rules:
        add_rules(op.operation.kind, *rules)
    try:
        for found in rules_of(op.operation, (Shard(0),)):
            if not op.operation.opaque:
                prove(op.operation, found)
        for label in op.labels:
            label_rule(op.operation, label)
        for group, layer in _IN_USE.items():
            if set(op.inputs) <= layer.tensor_by_name.keys() and where(group):
                raise ValueError(f"layers {group.name!r} are in use without {op.name!r}: register it before they are")
    except ValueError:
        if rules:
            del SOURCES[op.operation.kind]
        raise
    _REGISTERED[op.name] = _Registration(op, where, tuple(rules))


def withdraw_op(name: str) -> None:
    """Takes a registered op out again, as a test does with its own; workloads that had it are to be forgotten.

    Raises:
        ValueError: There is none of that name.
    """
    if name not in _REGISTERED:
        raise ValueError(f"no op {name!r} was registered: {did_you_mean(name, _REGISTERED)}")
    found = _REGISTERED.pop(name)
    if found.rules:
        del SOURCES[found.op.operation.kind]
    for group in [group for group, layer in _IN_USE.items() if name in layer.op_by_name]:
        del _IN_USE[group]
