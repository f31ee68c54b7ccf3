"""What each op of a layer reads, gives and leaves on its side's mesh, for frameworks that shard by module.

>>> from sim.config.catalog import load_model
>>> from sim.ops.heuristics import megatron_dims
>>> from sim.ops.layers import op_names
>>> model = load_model("llama_3_1_70b")
>>> cut = Sharded(model, dict(zip(op_names(model), megatron_dims(model), strict=True)), tp=8)
>>> for path, op in layer_plan(cut).items():
...     print(f"{path}: {op.gives[1]} to {op.leaves[1]}")
qkv_proj: S(1) to S(1)
attention: S(1) to S(1)
o_proj: P(sum) to R
ffn1: S(1) to S(1)
activation: S(1) to S(1)
ffn2: P(sum) to R
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import NamedTuple

from raysearch.base.errors import InputError
from raysearch.deploy.layers.sharded_layer import Hop, Sharded, array_dim, runs_latents, weight_shapes
from sim.layers.ops import FusedOp, Side, Tensor
from sim.sharding.placement import PARTIAL, REPLICATE, Placement, Shard

Lay = tuple[Placement, ...]
"""Over the axes of a side's mesh: groups with rows of their own, then the group; between them, copies of the rows."""
WHOLE: Lay = (Shard(0), REPLICATE)
"""Rows are dealt out over the first axis, tokens as well as experts."""


class LayHop(NamedTuple):
    """One move on the way from one side's mesh to the other's.

    Attributes:
        shape: Of the mesh on which it is one axis that changes.
        source, target: On that.
    """

    shape: tuple[int, ...]
    source: Lay
    target: Lay


@dataclass(frozen=True)
class OpPlan:
    """Placements of one module, over the axes of its mesh.

    Attributes:
        reads: Of each input.
        gives: Of the result that these lead to.
        leaves: What it is moved to for those that read it.
        weight: Of its weight, if it has one.
        local: Whether it runs on a rank's pieces, since DTensor has no rule that does.
        shape: Of the mesh on which it runs; None for (ep, tp), where both sides have that.
        hops: How the result is moved where that takes more than one mesh.
        leaves_shape: Of the mesh on which it is left.
    """

    reads: tuple[Lay, ...]
    gives: Lay
    leaves: Lay
    weight: Lay | None = None
    local: bool = False
    shape: tuple[int, ...] | None = None
    hops: tuple[LayHop, ...] = ()
    leaves_shape: tuple[int, ...] | None = None

    @property
    def acts_over_groups(self) -> bool:
        """Whether the module shards or moves anything but tokens that are each rank's own, over all but the group."""
        deals_weight = self.weight is not None and set(self.weight[:-1]) != {REPLICATE}
        rows = {each[:-1] for each in self._lays}
        return deals_weight or rows != {(Shard(0), *[REPLICATE] * (len(self.gives) - 2))}

    @property
    def acts_within_a_group(self) -> bool:
        """The same over the group."""
        return bool(self.hops) or {each[-1] for each in (*self._lays, self.weight or WHOLE)} != {REPLICATE}

    @property
    def _lays(self) -> tuple[Lay, ...]:
        return (*self.reads, self.gives, *(() if self.hops else (self.leaves,)))


def layer_plan(sharded: Sharded) -> dict[str, OpPlan]:
    """By path of a module, those that shard or move something; `examples.layers.torch_layer` has the modules.

    Raises:
        InputError: Two ops read the residual stream in two shards on the other side's mesh.
    """
    found: dict[str, OpPlan] = {}
    for op in sharded.layer.ops:
        shape = side_shape(sharded, op.side)
        for path, plan in _op_plans(sharded, op).items():
            if plan.acts_within_a_group or (sharded.ep > 1 and plan.acts_over_groups):
                found[path] = replace(plan, shape=shape)
    return found


def side_shape(sharded: Sharded, side: Side) -> tuple[int, ...] | None:
    """Ranks per axis of a side's mesh; None where both have the one of ep and tp."""
    if not sharded.extended:
        return None
    if side == "attention":
        return sharded.attention_dp, sharded.tp
    if sharded.copies > 1:
        return sharded.attention_dp, sharded.copies, sharded.moe_tp
    return sharded.ep, sharded.moe_tp


def stream_lay(sharded: Sharded) -> Lay:
    """Of the residual stream between layers, [tokens, hidden], on attention's mesh."""
    left = _left(sharded, sharded.layer.op("combine"))
    return left.leaves if left.hops or not sharded.extended else WHOLE


def cache_lay(sharded: Sharded) -> Lay:
    """Of what attention has cached, [sequences, context, ...]."""
    return Shard(0), sharded.cache_placement


def _op_plans(sharded: Sharded, op: FusedOp) -> dict[str, OpPlan]:
    """Modules of an op: a norm of columns sums a statistic, a router also picks, experts' outputs are weighed first."""
    own, layer = sharded.rule(op.name), sharded.layer
    reads = tuple(
        _lay(sharded, op.side, layer.tensor(name), placement)
        for name, placement in zip(op.inputs, own.inputs, strict=True)
    )
    output = layer.tensor(op.output)
    left = _left(sharded, op)
    plan = OpPlan(reads, _lay(sharded, op.side, output, own.output), left.leaves, _weight(sharded, op))
    crossing = replace(plan, hops=left.hops, leaves_shape=left.shape)
    if op.kind == "attention":
        if runs_latents(sharded.group.attention):
            own = WHOLE if sharded.label("attention") == "h" else reads[0]
            weight = (REPLICATE, sharded.latent_placement("kv_b_proj"))
            return {op.name: replace(plan, reads=(*reads, own, cache_lay(sharded)), weight=weight, local=True)}
        return {op.name: replace(plan, reads=(*reads, cache_lay(sharded), cache_lay(sharded)), local=True)}
    if op.name == "qkv_proj" and runs_latents(sharded.group.attention):
        return {"q_b_proj" if "q_b_proj" in weight_shapes(sharded.model) else "q_proj": plan}
    if op.kind == "norm" and sharded.label(op.name) == "d":
        rows = plan.reads[0][:-1]
        statistic = OpPlan(plan.reads, (*rows, PARTIAL), (*rows, REPLICATE), local=True)
        return {
            f"{op.name}.statistic": statistic,
            f"{op.name}.scale": replace(plan, reads=(*plan.reads, statistic.leaves)),
        }
    if op.kind == "activation":
        return {op.name: replace(plan, local=sharded.group.feed_forward.gated)}
    if op.kind == "router":
        logits = (*plan.gives[:-1], Shard(1)) if sharded.label(op.name) == "e" else plan.gives
        gate = replace(plan, gives=logits, leaves=plan.gives)
        leaves = _to_all(sharded, plan.leaves)
        return {op.name: gate, "pick": OpPlan((plan.gives,), plan.gives, leaves, local=True)}
    if op.kind == "dispatch":
        x, routing = plan.reads
        if sharded.exchange == "all_gather":
            gives = (*[REPLICATE] * len(plan.gives[:-1]), plan.gives[-1])
            reads = (_to_all(sharded, x), _to_all(sharded, routing))
            return {op.name: replace(plan, reads=reads, gives=gives, local=True)}
        return {op.name: replace(plan, gives=(Shard(1), plan.gives[1]), local=True)}
    if op.kind == "combine" and len(op.inputs) == 3:
        return _combined(sharded, op, crossing)
    return {op.name: crossing}


def _combined(sharded: Sharded, op: FusedOp, plan: OpPlan) -> dict[str, OpPlan]:
    """Each token's weights of experts, the sum of its experts' outputs by them, and the residual connection."""
    copies, stream, routing = plan.reads
    late, shared = sharded.sums_late, bool(sharded.group.feed_forward.shared_ffn_hidden)
    gathered = sharded.exchange == "all_gather"
    routing = _to_all(sharded, routing) if gathered else routing
    weights = (*routing[:-1], Shard(1) if routing[-1] == Shard(0) else routing[-1])
    by_expert = (*copies[:-1], weights[-1]) if gathered else (REPLICATE, weights[-1])
    if not gathered:
        weights = by_expert
    shares = OpPlan((routing,), weights, by_expert, local=True)
    over_tp = PARTIAL if late else copies[-1]
    sums = PARTIAL if late else plan.gives[-1]
    gives = (*[PARTIAL] * len(copies[:-1]), sums) if gathered else (Shard(0), sums)
    stored = (*copies[:-1], over_tp) if gathered else (Shard(1), over_tp)
    parts = (Shard(0), *gives[1:]) if shared else gives
    hops, shape = (), None
    if gathered and sharded.copies > 1 and late:  # one all-reduce over all that have the same tokens
        dp, ranks = sharded.attention_dp, sharded.copies * sharded.moe_tp
        hops, shape = (LayHop((dp, ranks), (parts[0], PARTIAL), WHOLE),), side_shape(sharded, "experts")
    found = {"shares": shares}
    if shared:
        found |= _shared(sharded, parts)
        found["weigh"] = OpPlan((stored, by_expert), gives, parts, local=True)
        found["with_shared"] = OpPlan((parts, parts), parts, plan.gives, local=True, hops=hops, leaves_shape=shape)
    else:
        found["weigh"] = OpPlan((stored, by_expert), gives, plan.gives, local=True, hops=hops, leaves_shape=shape)
    return found | {op.name: replace(plan, reads=(plan.gives, stream))}


def _shared(sharded: Sharded, parts: Lay) -> dict[str, OpPlan]:
    """The experts that every token visits, cut over the axes on which `parts` are parts, whole on all others."""
    dispatch = sharded.layer.op("dispatch")
    read = _lay(sharded, "experts", sharded.layer.tensor(dispatch.inputs[0]), sharded.rule("dispatch").inputs[0])
    columns, rows = (
        tuple(Shard(dim) if each == PARTIAL else REPLICATE for each in parts) for dim in (0, 1)
    )  # as PyTorch has weights: [columns out, columns in]
    middle = tuple(Shard(1) if each == PARTIAL else own for each, own in zip(parts, read, strict=True))
    left = tuple(PARTIAL if each == PARTIAL else own for each, own in zip(parts, read, strict=True))
    return {
        "shared1": OpPlan((read,), middle, middle, columns, local=True),
        "shared_activation": OpPlan((middle,), middle, middle, local=True),
        "shared2": OpPlan((middle,), left, left, rows, local=True),
    }


def _to_all(sharded: Sharded, lay: Lay) -> Lay:
    """With the rows of all ranks whose tokens are others', where an exchange gathers them."""
    return (REPLICATE, *lay[1:]) if sharded.exchange == "all_gather" else lay


def _arrives(sharded: Sharded, op: FusedOp) -> Placement:
    """Of its first input over tp, when nobody else moves it: parts that the op may sum later stay parts."""
    source = sharded.rule(sharded.layer.tensor(op.inputs[0]).producer).output
    late = source == PARTIAL and sharded.rule(op.name).passes_partial
    return source if late else sharded.rule(op.name).inputs[0]


class _Left(NamedTuple):
    """How an op's result is left, on which mesh, and the way there."""

    leaves: Lay
    shape: tuple[int, ...] | None = None
    hops: tuple[LayHop, ...] = ()


def _left(sharded: Sharded, op: FusedOp) -> _Left:
    """Moved once for all consumers where one placement serves them: the whole tensor does, they slice their shards."""
    tensor, own = sharded.layer.tensor(op.output), sharded.rule(op.name).output
    targets = {_target(sharded, name, tensor) for name in tensor.consumers}
    target = REPLICATE if REPLICATE in targets else targets.pop() if len(targets) == 1 else None
    if not sharded.crosses(tensor):
        return _Left(_lay(sharded, op.side, tensor, target or own))
    if target is None:
        raise InputError(f"{' and '.join(tensor.consumers)} read {tensor.name} in two shards: give both one choice")
    side = sharded.layer.op(tensor.consumers[0]).side
    leaves = _lay(sharded, side, tensor, target)
    hops = tuple(_lay_hop(sharded, hop) for hop in sharded.hops[tensor.name, target] if hop.source != hop.target)
    if not hops and own == target == REPLICATE:
        return _Left(_lay(sharded, op.side, tensor, own))  # a plain tensor on either mesh
    stays = LayHop(side_shape(sharded, op.side) or (), *[_lay(sharded, op.side, tensor, own)] * 2)
    return _Left(leaves, side_shape(sharded, side), hops or (stays,))


def _lay_hop(sharded: Sharded, hop: Hop) -> LayHop:
    """On a mesh whose axes are those of the layer, but that the ones it moves over are one."""
    shape, source, target = list[int](), list[Placement](), list[Placement]()
    for axis, size in sharded.mesh.items():
        if axis in hop.axes[1:]:
            shape[-1] *= size
            continue
        moves = axis in hop.axes
        shape.append(size)
        source.append(hop.source if moves else hop.before[axis])
        target.append(hop.target if moves else hop.after[axis])
    return LayHop(tuple(shape), tuple(source), tuple(target))


def _target(sharded: Sharded, consumer: str, tensor: Tensor) -> Placement:
    op = sharded.layer.op(consumer)
    index = op.inputs.index(tensor.name)
    return _arrives(sharded, op) if index == 0 else sharded.rule(consumer).inputs[index]


def _lay(sharded: Sharded, side: Side, tensor: Tensor, placement: Placement) -> Lay:
    """A placement over a side's group of a tensor that is dealt out by rows, tokens or experts."""
    rows: Lay = (Shard(0),)
    if side == "experts" and sharded.copies > 1:
        rows = (Shard(0), Shard(0) if tensor.by_expert else REPLICATE)
    return (*rows, Shard(array_dim(tensor, placement.dims[0])) if placement.dims else placement)


def _weight(sharded: Sharded, op: FusedOp) -> Lay | None:
    """As PyTorch has it: a plain projection's weight is [columns out, columns in]."""
    if op.equation is None and op.kind != "norm":
        return None
    placement, output = sharded.weight_placement(op.name), sharded.layer.tensor(op.output)
    rows = _lay(sharded, op.side, output, REPLICATE)[:-1]
    if output.by_expert:
        return (*rows, placement)
    flips = op.kind != "norm" and bool(placement.dims)
    return (*[REPLICATE] * len(rows), Shard(1 - placement.dims[0]) if flips else placement)
