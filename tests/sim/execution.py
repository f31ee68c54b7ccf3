"""A layer run on as many GPUs as a strategy has, each with its own numbers: what the simulator prices, executed.

GPUs are numbered as both meshes number them, and hold numpy arrays. Between two ops they do what `explain` says, no
more: where it charges nothing, a GPU slices what it holds; where it charges a collective, they send messages around a
ring, which are counted. So the result is right only if the plan is, and the bytes are those that were sent.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from sim.evaluation import OpBreakdown
from sim.layers.choices import rule
from sim.layers.ops import FusedOp, Tensor, gathers_weight
from sim.ops.rank import Rank
from sim.ops.sizes import element_bytes
from sim.prices.collectives import Collective
from sim.sharding.kinds import LogSumExp
from sim.sharding.operations import HEAD, OPERATIONS, QUERIES, cached_attention, softmax
from sim.sharding.placement import PARTIAL, REPLICATE, Array, Placement, Shard
from sim.sharding.redistribute import collective_between
from sim.step.attention_expert_meshes import Sides
from sim.step.mesh_moves import Axis, axes_of, fastest_route

Pieces = list[Array]
"""What each GPU holds, or each of a group."""
WEIGHT_BYTES = 2.0
"""Of an element of a weight that is gathered: bf16."""


# --- messages -----------------------------------------------------------------------------------------


@dataclass
class Wires:
    """Counts the bytes that GPUs send to each other."""

    log: list[tuple[str, int, float]] = field(default_factory=list)

    def all_gather(self, pieces: Pieces, each: float) -> list[Pieces]:
        """What all have, on every GPU: around a ring, each passes on what it got last."""
        n = len(pieces)
        sent, has = [0.0] * n, [{rank: piece} for rank, piece in enumerate(pieces)]
        for step in range(n - 1):
            for rank in range(n):
                piece = has[rank][(rank - step) % n]
                has[(rank + 1) % n][(rank - step) % n] = piece
                sent[rank] += piece.size * each
        self._note("all_gather", sent)
        return [[mine[rank] for rank in range(n)] for mine in has]

    def reduce_scatter(self, chunks: Sequence[Pieces], each: float) -> Pieces:
        """The sum of every GPU's i-th chunk on the i-th: partial sums travel around a ring."""
        sent = self._reduced(chunks := [list(mine) for mine in chunks], each)
        self._note("reduce_scatter", sent)
        return [mine[rank] for rank, mine in enumerate(chunks)]

    def all_reduce(self, parts: Pieces, each: float) -> Pieces:
        """The sum on every GPU: a reduce-scatter of flat chunks, and an all-gather of them."""
        n, shape = len(parts), parts[0].shape
        chunks = [np.array_split(part.ravel(), n) for part in parts]
        sent = self._reduced(chunks, each)
        apart = Wires()
        gathered = apart.all_gather([mine[rank] for rank, mine in enumerate(chunks)], each)
        self._note("all_reduce", [one + apart.log[-1][2] for one in sent] if n > 1 else sent)
        return [np.concatenate(mine).reshape(shape) for mine in gathered]

    def all_to_all(self, outgoing: Sequence[Pieces], each: float | Sequence[float]) -> list[Pieces]:
        """From every GPU's messages to each, every GPU's from each; `each` may be an element's bytes by last column."""
        sent = [
            sum(_bytes(message, each) for other, message in enumerate(mine) if other != rank)
            for rank, mine in enumerate(outgoing)
        ]
        self._note("all_to_all", sent)
        return [[theirs[rank] for theirs in outgoing] for rank in range(len(outgoing))]

    def _reduced(self, chunks: Sequence[Pieces], each: float) -> list[float]:
        n = len(chunks)
        sent = [0.0] * n
        for step in range(n - 1):
            messages = [chunks[rank][(rank - step - 1) % n] for rank in range(n)]
            for rank, message in enumerate(messages):
                to = (rank + 1) % n
                chunks[to][(rank - step - 1) % n] = chunks[to][(rank - step - 1) % n] + message
                sent[rank] += message.size * each
        return sent

    def _note(self, kind: str, sent: Sequence[float]) -> None:
        if len(sent) > 1:
            self.log.append((kind, len(sent), max(sent)))


def _bytes(message: Array, each: float | Sequence[float]) -> float:
    if not isinstance(each, Sequence):
        return message.size * each
    return math.prod(message.shape[:-1]) * sum(each)


def redistribute(
    wires: Wires, kind: str | None, pieces: Pieces, source: Placement, target: Placement, each: float
) -> Pieces:
    """One collective of a group, or the slice that everyone cuts out of its own."""
    n = len(pieces)
    if kind == "all_gather":
        wholes = [source.assemble(mine) for mine in wires.all_gather(pieces, each)]
        return [target.split(whole, n)[rank] for rank, whole in enumerate(wholes)]
    if kind == "all_reduce":
        return wires.all_reduce(pieces, each)
    if kind == "reduce_scatter":
        return wires.reduce_scatter([target.split(piece, n) for piece in pieces], each)
    if kind == "all_to_all":
        return _exchanged(wires, pieces, source, target, each)
    assert source in (REPLICATE, target), f"nothing is charged, but {source} is not {target}"
    return pieces if source == target else [target.split(piece, n)[rank] for rank, piece in enumerate(pieces)]


def _exchanged(wires: Wires, pieces: Pieces, source: Placement, target: Placement, each: float) -> Pieces:
    n, ((before,), (after,)) = len(pieces), (source.dims, target.dims)
    if before != after:
        got = wires.all_to_all([target.split(piece, n) for piece in pieces], each)
        return [source.assemble(mine) for mine in got]
    size = sum(piece.shape[before] for piece in pieces)
    has, wants = source.own(size, n), target.own(size, n)
    outgoing = [
        [np.compress(np.isin(mine, theirs), piece, before) for theirs in wants]
        for mine, piece in zip(has, pieces, strict=True)
    ]
    got = wires.all_to_all(outgoing, each)
    order = [np.argsort(np.concatenate([mine[np.isin(mine, theirs)] for mine in has])) for theirs in wants]
    return [np.take(np.concatenate(mine, before), at, before) for mine, at in zip(got, order, strict=True)]


# --- the layer ----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Numbers:
    """A layer's weights by op, its cache `[tokens, kv heads, context, 2 * HEAD]` and its stream `[tokens, hidden]`."""

    weights: Mapping[str, Array]
    cache: Array
    stream: Array


class Cluster:
    """All GPUs of a pipeline stage, running one layer under a strategy.

    Attributes:
        sent: Per op the collectives that ran, (kind, GPUs, bytes of the busiest), in order.
    """

    def __init__(self, sides: Sides, gpus: int, choices: Mapping[str, int], explained: Mapping[str, OpBreakdown]):
        self.sides, self.gpus, self.choices, self.explained = sides, gpus, choices, explained
        self.layer = sides.experts.layer
        self.sent: dict[str, list[tuple[str, int, float]]] = {op.name: [] for op in self.layer.ops}
        self._inputs: dict[tuple[str, str], Pieces] = {}

    def run(self, numbers: Numbers) -> tuple[Pieces, Placement]:
        """What every GPU holds of the stream after the layer, and how it lies."""
        stream = self.layer.stream
        left = self._rule(stream.producer).output
        whole_groups = self._groups_of(self.sides.leaves)
        rows = np.split(numbers.stream, len(whole_groups) // self.sides.leaves.copies)
        pieces: Pieces = [np.empty(0)] * self.gpus
        for index, group in enumerate(whole_groups):
            parts = left.split(rows[index // self.sides.leaves.copies], len(group))
            self._put(pieces, group, parts)
        self._hand_on(stream, pieces)
        for op in self.layer.ops:
            pieces = self._run(op, numbers)
            if op.output != stream.name:
                self._hand_on(self.layer.tensor(op.output), pieces)
        return pieces, left

    # --- between ops

    def _hand_on(self, tensor: Tensor, pieces: Pieces) -> None:
        """Gives each consumer what it reads, by the collectives charged to it and by slices of what GPUs hold."""
        source = self._rule(tensor.producer).output
        fetched = {source: pieces} if self.sides.within_a_group(tensor) else {}
        consumers = sorted(tensor.consumers, key=lambda name: not self._charged(name, tensor))  # those who fetch first
        for name in consumers:
            op = self.layer.op(name)
            target = self._rule(name).inputs[op.inputs.index(tensor.name)]
            if self.sides.rank_by_op[name].tp == 1 and not self.sides.within_a_group(tensor):
                target = REPLICATE  # a group of one GPU takes the whole
            late = source == PARTIAL and self._rule(name).passes_partial and op.inputs[0] == tensor.name
            if late and not self._charged(name, tensor):
                self._inputs[name, tensor.name] = pieces
                continue
            if target not in fetched:
                fetched[target] = self._fetch(tensor, name, pieces, source, target, fetched.get(REPLICATE))
            self._inputs[name, tensor.name] = fetched[target]

    def _charged(self, consumer: str, tensor: Tensor) -> list[Collective]:
        return [each for each in self.explained[consumer].collectives if each.tensor == tensor.name]

    def _fetch(
        self, tensor: Tensor, name: str, pieces: Pieces, source: Placement, target: Placement, whole: Pieces | None
    ) -> Pieces:
        takes = self.sides.rank_by_op[name]
        if whole is not None:
            return self._by_group(
                takes, lambda group: redistribute(Wires(), None, _of(whole, group), REPLICATE, target, 0)
            )
        each = element_bytes(takes.workload, tensor)
        if self.sides.within_a_group(tensor):
            charged = self._charged(name, tensor)
            kind = charged[0].kind if charged else (collective_between(source, target) if takes.tp == 1 else None)
            return self._on_groups(
                name,
                self._groups_of(takes),
                lambda wires, group: redistribute(wires, kind, _of(pieces, group), source, target, each),
            )
        leaves = self.sides.rank_by_op[tensor.producer]
        if tensor.name == "qkv":
            axes = axes_of(tp=takes.head_tp, cp=takes.cp)
            layouts = (source, REPLICATE if source.dims == (1,) else source), (target, REPLICATE)
            rows = takes.sizes.tokens
        else:
            larger, smaller = sorted((leaves, takes), key=lambda rank: (-rank.tp, rank.axis == "moe_tp"))
            outer = "dp" if larger.axis == "moe_tp" else "moe_ep"
            axes = Axis(outer, larger.tp // smaller.tp, smaller.tp), Axis(smaller.axis, smaller.tp, 1)
            layouts = _layout(leaves, larger, source), _layout(takes, larger, target)
            rows = larger.sizes.tokens
        columns = takes.sizes.columns[tensor.letters[-1]]
        return self._along(name, pieces, axes, *layouts, (math.ceil(rows), columns), each, takes)

    def _along(
        self,
        name: str,
        pieces: Pieces,
        axes: tuple[Axis, ...],
        source: tuple[Placement, ...],
        target: tuple[Placement, ...],
        shape: tuple[int, int],
        each: float,
        rank: Rank,
    ) -> Pieces:
        """Along the fastest route on a mesh of several axes, step by step."""
        wide, steps = fastest_route(rank.workload.hardware, axes, source, target, shape, each)
        mesh = np.arange(self.gpus).reshape(-1, *(axis.degree for axis in wide))
        for step in steps:
            moved = range(step.axis + 1, step.axis + step.span + 1)
            rest = [index for index in range(mesh.ndim) if index not in moved]
            degree = math.prod(mesh.shape[index] for index in moved)
            groups = mesh.transpose(*rest, *moved).reshape(-1, degree).tolist()
            pieces = self._on_groups(
                name,
                groups,
                lambda wires, group, step=step, pieces=pieces: redistribute(
                    wires, step.collective, _of(pieces, group), step.source, step.target, each
                ),
            )
        return pieces

    # --- groups

    def _groups_of(self, rank: Rank) -> list[list[int]]:
        """The GPUs that share their tokens, neighbours."""
        return np.arange(self.gpus).reshape(-1, rank.tp).tolist()

    def _across(self, rank: Rank, degree: int, stride: int) -> list[list[int]]:
        """Groups of GPUs that lie a stride apart."""
        return np.arange(self.gpus).reshape(-1, degree, stride).transpose(0, 2, 1).reshape(-1, degree).tolist()

    def _by_group(self, rank: Rank, act: Callable[[list[int]], Pieces]) -> Pieces:
        found: Pieces = [np.empty(0)] * self.gpus
        for group in self._groups_of(rank):
            self._put(found, group, act(group))
        return found

    def _on_groups(self, name: str, groups: list[list[int]], act: Callable[[Wires, list[int]], Pieces]) -> Pieces:
        """What all groups do at once; the busiest GPU of all is that of the op's bytes."""
        found: Pieces = [np.empty(0)] * self.gpus
        logs = list[list[tuple[str, int, float]]]()
        for group in groups:
            wires = Wires()
            self._put(found, group, act(wires, group))
            logs.append(wires.log)
        for same in zip(*logs, strict=True):
            ((kind, degree),) = {each[:2] for each in same}
            self.sent[name].append((kind, degree, max(each[2] for each in same)))
        return found

    def _put(self, found: Pieces, group: list[int], pieces: Sequence[Array]) -> None:
        for rank, piece in zip(group, pieces, strict=True):
            found[rank] = piece

    def _rule(self, name: str):
        return rule(self.layer.op(name), self.layer, self.choices[name])

    # --- ops

    def _run(self, op: FusedOp, numbers: Numbers) -> Pieces:
        rank, label = self.sides.rank_by_op[op.name], op.label(self.choices[op.name])
        inputs = [self._inputs[op.name, name] for name in op.inputs]
        act_bytes = rank.activation_each
        if op.kind == "einsum":
            weights = self._weights(op, rank, numbers)
            return [np.einsum(op.operation.equation, x, w) for x, w in zip(inputs[0], weights, strict=True)]
        if op.kind == "norm":
            return self._norm(op, rank, inputs[0], label)
        if op.kind == "attention":
            return self._attention(op, rank, inputs[0], numbers.cache, label)
        if op.kind == "residual_add":
            return [x + y for x, y in zip(*inputs, strict=True)]
        if op.kind == "router":
            weights = self._weights(op, rank, numbers)
            logits = [x @ w for x, w in zip(inputs[0], weights, strict=True)]
            if label == "e":
                logits = self._on_groups(
                    op.name,
                    self._groups_of(rank),
                    lambda wires, group: redistribute(
                        wires, "all_gather", _of(logits, group), Shard(1), REPLICATE, act_bytes
                    ),
                )
            return [softmax(each) for each in logits]  # every token visits every expert
        if op.kind == "activation":
            fused = [x.reshape(*x.shape[:-1], -1, 2) for x in inputs[0]]
            return [OPERATIONS["activation"].compute(x) for x in fused]
        if op.kind == "dispatch":
            return self._dispatch(op, rank, *inputs)
        assert op.kind == "combine"
        return self._combine(op, rank, *inputs)

    def _weights(self, op: FusedOp, rank: Rank, numbers: Numbers) -> Pieces:
        """Of each GPU: of its experts, a piece over its group, which is gathered where the choice says so."""
        whole, placement = numbers.weights[op.name], self._rule(op.name).weight
        assert placement is not None
        found: Pieces = [np.empty(0)] * self.gpus
        for index, group in enumerate(self._groups_of(rank)):
            mine = np.split(whole, rank.ep)[index] if whole.ndim == 3 else whole
            if op.name == "qkv_proj" and placement == Shard(1) and not gathers_weight(self.choices[op.name]):
                parts = [piece for piece in placement.split(mine, rank.head_tp) for _ in range(rank.cp)]
            else:
                parts = placement.split(mine, len(group))
            self._put(found, group, parts)
        if not gathers_weight(self.choices[op.name]) or rank.tp == 1:
            return found
        return self._on_groups(
            op.name,
            self._groups_of(rank),
            lambda wires, group: redistribute(
                wires, "all_gather", _of(found, group), placement, REPLICATE, WEIGHT_BYTES
            ),
        )

    def _norm(self, op: FusedOp, rank: Rank, inputs: Pieces, label: str) -> Pieces:
        squares = [np.square(x).sum(-1, keepdims=True) for x in inputs]
        if label == "d":
            squares = self._on_groups(
                op.name, self._groups_of(rank), lambda wires, group: wires.all_reduce(_of(squares, group), 4.0)
            )
        size = rank.sizes.columns["d"]
        return [x / np.sqrt(s / size + 1e-6) for x, s in zip(inputs, squares, strict=True)]

    def _attention(self, op: FusedOp, rank: Rank, inputs: Pieces, cache: Array, label: str) -> Pieces:
        shard = {"t": Shard(0), "h": Shard(1)}.get(label, REPLICATE)
        qkv = [x.reshape(len(x), -1, (QUERIES + 2) * HEAD) for x in inputs]
        caches: Pieces = [np.empty(0)] * self.gpus
        for rows, group in zip(np.split(cache, rank.ep), self._groups_of(rank), strict=True):
            parts = [Shard(2).split(part, rank.cp) for part in shard.split(rows, rank.head_tp)]
            self._put(caches, group, [piece for part in parts for piece in part])
        if rank.cp == 1:
            return [_flat(OPERATIONS["attention"].compute(x, c)) for x, c in zip(qkv, caches, strict=True)]
        new = QUERIES * HEAD
        parts = [
            cached_attention(x[..., :new], c if at % rank.cp else np.concatenate([c, x[:, :, None, new:]], 2))
            for at, (x, c) in enumerate(zip(qkv, caches, strict=True))
        ]
        each = [rank.activation_each] * HEAD + [4.0]
        share = shard if label else Shard(1)
        found = self._on_groups(
            op.name,
            self._across(rank, rank.cp, 1),
            lambda wires, group: [
                _flat(LogSumExp().assemble(mine)[..., :-1])
                for mine in wires.all_to_all([share.split(part, rank.cp) for part in _of(parts, group)], each)
            ],
        )
        if label:
            return found
        return self._on_groups(
            op.name,
            self._across(rank, rank.cp, 1),
            lambda wires, group: redistribute(
                wires, "all_gather", _of(found, group), Shard(1), REPLICATE, rank.activation_each
            ),
        )

    def _dispatch(self, op: FusedOp, rank: Rank, tokens: Pieces, gates: Pieces) -> Pieces:
        """`[own experts, copies, hidden]`: the copies of all groups' tokens, first those of the first GPU's share."""
        each = element_bytes(rank.workload, self.layer.tensor(op.output))
        copies = [OPERATIONS["dispatch"].compute(x, g) for x, g in zip(tokens, gates, strict=True)]
        return self._on_groups(
            op.name,
            self._across(rank, rank.ep, rank.tp),
            lambda wires, group: [
                self._in_order(np.stack(mine), rank)
                for mine in wires.all_to_all([np.split(copies[gpu], rank.ep) for gpu in group], each)
            ],
        )

    def _in_order(self, got: Array, rank: Rank) -> Array:
        """From `[sender, expert, token, hidden]`: rows of the same share of every sender's tokens lie together."""
        senders, experts, rows, columns = got.shape
        whole = rows == rank.sizes.tokens
        shares = got.reshape(senders, experts, rank.tp if whole else 1, -1, columns)
        return shares.transpose(1, 2, 0, 3, 4).reshape(experts, -1, columns)

    def _back(self, results: Array, rank: Rank, rows: int) -> list[Array]:
        """To each sender its rows: `_in_order` undone."""
        experts, copies, columns = results.shape
        shares = rank.tp if rows == rank.sizes.tokens else 1
        apart = results.reshape(experts, shares, rank.ep, copies // rank.ep // shares, columns)
        return [part.reshape(experts, -1, columns) for part in apart.transpose(2, 0, 1, 3, 4)]

    def _combine(self, op: FusedOp, rank: Rank, results: Pieces, residual: Pieces, gates: Pieces) -> Pieces:
        back = self._on_groups(
            op.name,
            self._across(rank, rank.ep, rank.tp),
            lambda wires, group: [
                np.concatenate(mine)
                for mine in wires.all_to_all(
                    [self._back(results[gpu], rank, len(gates[gpu])) for gpu in group], rank.activation_each
                )
            ],
        )
        weighted = [np.einsum("etd,te->td", x, g) for x, g in zip(back, gates, strict=True)]
        if self._arrives_in_parts(op):
            weighted = self._on_groups(
                op.name,
                self._groups_of(rank),
                lambda wires, group: wires.all_reduce(_of(weighted, group), rank.activation_each),
            )
        return [x + y for x, y in zip(weighted, residual, strict=True)]

    def _arrives_in_parts(self, op: FusedOp) -> bool:
        source = self._rule(self.layer.tensor(op.inputs[0]).producer).output
        return source == PARTIAL and self._rule(op.name).passes_partial


def _of(pieces: Pieces, group: list[int]) -> Pieces:
    return [pieces[gpu] for gpu in group]


def _flat(heads: Array) -> Array:
    return heads.reshape(len(heads), -1)


def _layout(rank: Rank, larger: Rank, placement: Placement) -> tuple[Placement, Placement]:
    """Over the mesh of two groups: a smaller one has tokens of its own."""
    return (placement, placement) if rank.tp == larger.tp else (Shard(0), placement)


# --- without a strategy -------------------------------------------------------------------------------


def unsharded(numbers: Numbers, moe: bool) -> Array:
    """The stream after the layer on one GPU that has everything."""
    w, norm = numbers.weights, OPERATIONS["norm"].compute
    qkv = norm(numbers.stream) @ w["qkv_proj"]
    heads = OPERATIONS["attention"].compute(qkv.reshape(len(qkv), -1, (QUERIES + 2) * HEAD), numbers.cache)
    middle = _flat(heads) @ w["o_proj"] + numbers.stream
    x = norm(middle)
    if not moe:
        return _network(x, w["ffn1"], w["ffn2"]) + middle
    gates = softmax(x @ w["router"])
    experts = zip(gates.T, w["ffn1"], w["ffn2"], strict=True)
    return sum(gate[:, None] * _network(x, first, second) for gate, first, second in experts) + middle


def _network(x: Array, first: Array, second: Array) -> Array:
    fused = x @ first
    return OPERATIONS["activation"].compute(fused.reshape(len(fused), -1, 2)) @ second
