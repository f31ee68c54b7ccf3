"""What each op of a layer reads, gives and leaves on a mesh of the axes ep and tp, for frameworks that shard by module.

>>> from sim.config.catalog import load_model
>>> from sim.layers.heuristics import megatron_dims
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

from raysearch.deploy.layers.sharded_layer import Sharded, array_dim
from sim.layers.ops import FusedOp, Tensor
from sim.sharding.placement import PARTIAL, REPLICATE, Placement, Shard

Lay = tuple[Placement, Placement]
"""Over ep, over tp."""
WHOLE: Lay = (Shard(0), REPLICATE)
"""Rows are dealt out over ep, tokens as well as experts."""


@dataclass(frozen=True)
class OpPlan:
    """Placements of one module, over ep and tp.

    Attributes:
        reads: Of each input.
        gives: Of the result that these lead to.
        leaves: What it is moved to for those that read it.
        weight: Of its weight, if it has one.
        local: Whether it runs on a rank's pieces, since DTensor has no rule that does.
    """

    reads: tuple[Lay, ...]
    gives: Lay
    leaves: Lay
    weight: Lay | None = None
    local: bool = False

    @property
    def acts_over_ep(self) -> bool:
        """Whether the module shards or moves anything over ep but tokens that are each rank's own."""
        deals_weight = self.weight is not None and self.weight[0] != REPLICATE
        return deals_weight or {each[0] for each in self._lays} != {WHOLE[0]}

    @property
    def acts_over_tp(self) -> bool:
        """The same over tp."""
        return {each[1] for each in (*self._lays, self.weight or WHOLE)} != {REPLICATE}

    @property
    def _lays(self) -> tuple[Lay, ...]:
        return (*self.reads, self.gives, self.leaves)


def layer_plan(sharded: Sharded) -> dict[str, OpPlan]:
    """By path of a module, those that shard or move something; `examples.layers.torch_layer` has the modules."""
    found: dict[str, OpPlan] = {}
    for op in sharded.layer.ops:
        for path, plan in _op_plans(sharded, op).items():
            if plan.acts_over_tp or (sharded.ep > 1 and plan.acts_over_ep):
                found[path] = plan
    return found


def stream_lay(sharded: Sharded) -> Lay:
    """Of the residual stream between layers, [tokens, hidden]."""
    return _left(sharded, sharded.layer.op("combine"))


def cache_lay(sharded: Sharded) -> Lay:
    """Of keys and values, [sequences, context, kv heads, head dim]."""
    return Shard(0), {"t": Shard(0), "h": Shard(2)}.get(sharded.label("attention"), REPLICATE)


def _op_plans(sharded: Sharded, op: FusedOp) -> dict[str, OpPlan]:
    """Modules of an op: a norm of columns sums a statistic, a router also picks, experts' outputs are weighed first."""
    own, layer = sharded.rule(op.name), sharded.layer
    reads = tuple(_lay(layer.tensor(name), placement) for name, placement in zip(op.inputs, own.inputs, strict=True))
    output = layer.tensor(op.output)
    plan = OpPlan(reads, _lay(output, own.output), _left(sharded, op), _weight(sharded, op))
    if op.kind == "attention":
        return {op.name: replace(plan, reads=(*reads, cache_lay(sharded), cache_lay(sharded)), local=True)}
    if op.kind == "norm" and sharded.label(op.name) == "d":
        statistic = OpPlan(plan.reads, (Shard(0), PARTIAL), WHOLE, local=True)
        return {f"{op.name}.statistic": statistic, f"{op.name}.scale": replace(plan, reads=(*plan.reads, WHOLE))}
    if op.kind == "activation":
        return {op.name: replace(plan, local=sharded.group.feed_forward.gated)}
    if op.kind == "router":
        logits = (Shard(0), Shard(1)) if sharded.label(op.name) == "e" else plan.gives
        gate = replace(plan, gives=logits, leaves=plan.gives)
        return {op.name: gate, "pick": OpPlan((plan.gives,), plan.gives, plan.leaves, local=True)}
    if op.kind == "dispatch":
        return {op.name: replace(plan, gives=(Shard(1), plan.gives[1]), local=True)}
    if op.kind == "combine":
        copies, stream, routing = plan.reads
        over_tp = PARTIAL if _arrives(sharded, op) == PARTIAL else copies[1]
        gives = (Shard(0), PARTIAL if over_tp == PARTIAL else plan.gives[1])
        weigh = OpPlan(((Shard(1), over_tp), routing), gives, plan.gives, local=True)
        return {"weigh": weigh, op.name: OpPlan((plan.gives, stream), plan.gives, plan.leaves)}
    return {op.name: plan}


def _arrives(sharded: Sharded, op: FusedOp) -> Placement:
    """Of its first input over tp, when nobody else moves it: parts that the op may sum later stay parts."""
    source = sharded.rule(sharded.layer.tensor(op.inputs[0]).producer).output
    late = source == PARTIAL and sharded.rule(op.name).passes_partial
    return source if late else sharded.rule(op.name).inputs[0]


def _left(sharded: Sharded, op: FusedOp) -> Lay:
    """Moved once for all consumers where one placement serves them: the whole tensor does, they slice their shards."""
    tensor, own = sharded.layer.tensor(op.output), sharded.rule(op.name).output
    targets = {_target(sharded, name, tensor) for name in tensor.consumers}
    if REPLICATE in targets:
        return _lay(tensor, REPLICATE)
    return _lay(tensor, targets.pop() if len(targets) == 1 else own)


def _target(sharded: Sharded, consumer: str, tensor: Tensor) -> Placement:
    op = sharded.layer.op(consumer)
    index = op.inputs.index(tensor.name)
    return _arrives(sharded, op) if index == 0 else sharded.rule(consumer).inputs[index]


def _lay(tensor: Tensor, placement: Placement) -> Lay:
    """A placement over tp of a tensor that lies on ep by rows, tokens or experts."""
    return Shard(0), Shard(array_dim(tensor, placement.dims[0])) if placement.dims else placement


def _weight(sharded: Sharded, op: FusedOp) -> Lay | None:
    """As PyTorch has it: a plain projection's weight is [columns out, columns in]."""
    if op.equation is None and op.kind != "norm":
        return None
    placement = sharded.weight_placement(op.name)
    if sharded.layer.tensor(op.output).by_expert:
        return Shard(0), placement
    flips = op.kind != "norm" and bool(placement.dims)
    return REPLICATE, Shard(1 - placement.dims[0]) if flips else placement
