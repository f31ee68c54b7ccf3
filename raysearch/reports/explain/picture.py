"""What a picture of a layer shows, whatever it is drawn with."""

from __future__ import annotations

from dataclasses import asdict, dataclass

from sim.evaluation import Evaluation, OpBreakdown, Violation
from sim.json_object import JsonObject
from sim.layers.choices import rule
from sim.layers.ops import FusedOp, Layer, gathers_weight
from sim.ops.layers import layer_of
from sim.prices.collectives import Collective
from sim.sharding.grid import GridShard
from sim.sharding.layout import format_named
from sim.sharding.placement import parse_placement
from sim.strategy import Strategy
from sim.workload import Workload


@dataclass(frozen=True, slots=True)
class ShownTensor:
    """A tensor as it lies on the axes that its op shares it over: tp, or those of attention's or the experts' group.

    Attributes:
        name: Of the tensor.
        named: In the notation of named axes: "qkv[t, q_tp]".
        placement: As a text, the same on each of the axes: "S(1)".
        dims: How many dims it has.
    """

    name: str
    named: str
    placement: str
    dims: int


@dataclass(frozen=True, slots=True)
class Edge:
    """A tensor on its way to one op.

    Attributes:
        produced: As its producer left it.
        arrives: As the op reads it.
        collectives: Between the two.
        main: Whether the op just above left it; others pass by some ops.
        producer: Index of the op that left it, -1 where it comes from the layer above.
    """

    produced: ShownTensor
    arrives: ShownTensor
    collectives: tuple[Collective, ...]
    main: bool
    producer: int


@dataclass(frozen=True, slots=True)
class Node:
    """One fused op.

    Attributes:
        edges: Its inputs, the one from the op above first.
        weight: How its weight lies, if it has one.
        inside: Collectives that are part of the op.
        output: What it leaves.
    """

    name: str
    choice: int
    label: str
    edges: tuple[Edge, ...]
    weight: ShownTensor | None
    inside: tuple[Collective, ...]
    output: ShownTensor
    bound: str
    kernel_time_s: float
    time_s: float


@dataclass(frozen=True, slots=True)
class Picture:
    """One layer under one strategy.

    Attributes:
        group: Name of the layers that it is one of.
        layers: How many the model has of them, and
        model_layers: in all.
        layer_s: Of this layer, as `communication_s`.
        expected_error: Relative error to expect of its figures.
        extrapolated: What of them no measurement covers.
    """

    title: str
    group: str
    layers: int
    model_layers: int
    nodes: tuple[Node, ...]
    feasible: bool
    tokens_per_s_per_gpu: float
    tpot_s: float
    layer_s: float
    communication_s: float
    violations: tuple[Violation, ...]
    expected_error: float
    extrapolated: tuple[str, ...]


def pictures_of(title: str, workload: Workload, evaluation: Evaluation) -> tuple[Picture, ...]:
    """The pictures of an evaluated strategy: one for each group of the model's layers."""
    return tuple(_picture(title, workload, evaluation, index) for index in range(len(workload.model.groups)))


def _picture(title: str, workload: Workload, evaluation: Evaluation, index: int) -> Picture:
    model, group = workload.model, workload.model.groups[index]
    layer, ops = layer_of(group), evaluation.group_ops(group.name)
    axes = _Axes(evaluation.strategy, one_mesh=model.is_moe and not group.is_moe)
    left = {
        op.output: shown_tensor(
            op.output, layer.tensor(op.output).letters, breakdown.placement_out, axes.left(op, breakdown)
        )
        for op, breakdown in zip(layer.ops, ops, strict=True)
    }
    return Picture(
        title=title,
        group=group.name,
        layers=group.count,
        model_layers=model.layers,
        nodes=tuple(_node(layer, op, breakdown, left, axes) for op, breakdown in zip(layer.ops, ops, strict=True)),
        feasible=evaluation.feasible,
        tokens_per_s_per_gpu=evaluation.tokens_per_s_per_gpu,
        tpot_s=evaluation.tpot_s,
        layer_s=evaluation.stage.group_layer_s[index],
        communication_s=sum(op.communication_time_s for op in ops),
        violations=evaluation.violations,
        expected_error=evaluation.expected_error,
        extrapolated=evaluation.extrapolated,
    )


def group_text(picture: Picture) -> str:
    """Which layers a picture is of."""
    return f"{picture.group}: {picture.layers} of {picture.model_layers} layers"


def picture_dict(picture: Picture) -> JsonObject:
    """A picture as it stands in JSON."""
    return asdict(picture)


@dataclass(frozen=True, slots=True)
class _Axes:
    """Names of the axes that tensors lie over.

    Attributes:
        one_mesh: Whether attention's mesh has all of the layer, as that of dense layers beside experts.
    """

    strategy: Strategy
    one_mesh: bool

    def group(self, op: FusedOp) -> tuple[str, ...]:
        """Those of the group that shares an op."""
        if not self.strategy.extended:
            return ("tp",)
        if op.side == "experts" and not self.one_mesh:
            return ("moe_tp",)
        return ("tp", "cp") if self.strategy.cp > 1 else ("tp",)

    def left(self, op: FusedOp, breakdown: OpBreakdown) -> tuple[str, ...]:
        """Those over which an op's output lies as its placement says: heads of queries are not cut over the context."""
        return ("tp",) if op.output == "qkv" and breakdown.placement_out == "S(1)" else self.group(op)


def _node(layer: Layer, op: FusedOp, breakdown: OpBreakdown, left: dict[str, ShownTensor], axes: _Axes) -> Node:
    edges = [_edge(layer, op, name, breakdown, left[name], axes) for name in op.inputs]
    weight = rule(op, layer, breakdown.choice).weight
    at_rest = axes.group(op) if gathers_weight(breakdown.choice) else axes.left(op, breakdown)
    return Node(
        name=op.name,
        choice=breakdown.choice,
        label=breakdown.label,
        edges=tuple(sorted(edges, key=lambda edge: not edge.main)),
        weight=shown_tensor("W", op.operation.operands[-1], str(weight), at_rest) if weight else None,
        inside=tuple(c for c in breakdown.collectives if not _moves_an_input(c, op)),
        output=left[op.output],
        bound=breakdown.bound,
        kernel_time_s=breakdown.kernel_time_s,
        time_s=breakdown.time_s,
    )


def _edge(layer: Layer, op: FusedOp, name: str, breakdown: OpBreakdown, left: ShownTensor, axes: _Axes) -> Edge:
    arriving = ("tp",) if name == "qkv" else axes.group(op)
    tensor, order = layer.tensor(name), list(layer.op_by_name)
    producer, consumer = order.index(tensor.producer), order.index(op.name)
    return Edge(
        produced=left,
        arrives=shown_tensor(name, tensor.letters, breakdown.placements_in[name], arriving),
        collectives=tuple(c for c in breakdown.collectives if c.tensor == name and _moves_an_input(c, op)),
        main=producer == (consumer - 1) % len(order),
        producer=producer if producer < consumer else -1,
    )


def _moves_an_input(collective: Collective, op: FusedOp) -> bool:
    return collective.tensor in op.inputs


def shown_tensor(name: str, letters: str, placement: str, axes: tuple[str, ...] = ("tp",)) -> ShownTensor:
    """A tensor under a placement over some axes, the same on each.

    >>> shown_tensor("qkv", "tq", "S(1)").named, shown_tensor("attn_out", "ta", "S(1)", ("tp", "cp")).named
    ('qkv[t, q_tp]', 'attn_out[t, a_{tp,cp}]')
    """
    parsed = parse_placement(placement)
    layout = (parsed,) * len(axes)
    if isinstance(parsed, GridShard):
        layout, axes = parsed.layout, (f"{axes[0]}1", f"{axes[0]}2")
    return ShownTensor(name, format_named(name, letters, layout, axes), placement, len(letters))
