"""Operator pipelines: a batch in k parts, the communication of one part behind an operator's work on the next.

A matrix product hides the move of its input or of its result: gather and product, product and reduce-scatter
(asynchronous tensor parallelism), the tokens' way to the experts and the experts' first product, the second product and
the way back. Attention over a shared context hides its own exchange (Helix HOP-B). A part is the same operator with a
k-th of the batch, so that it reads all its weights again; the best k is the least of all, and 1 where none gains.

Of two stages, one on the multiprocessors and one on the links, k parts take one part of each, and k - 1 times the
longer one; while both are at work, each is slowed down by what they share. A product hides one move alone: of its
result where that is the parts of a sum or is sent to other ranks, else of its input. What is hidden is stated where a
layer is a sum, as the time by which communication still lengthens it.

Sources: Wang et al., "Overlap Communication with Dependent Computation via Decomposition" (ASPLOS 2023); "Helix
Parallelism" (arXiv 2507.07120), section 2.2; PyTorch's asynchronous tensor parallelism.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import NamedTuple

from sim.layers.choices import rule
from sim.layers.ops import FusedOp, Tensor, crossing_tensors
from sim.ops.rank import OpCost, Rank
from sim.prices.collectives import Collective
from sim.sharding.placement import PARTIAL
from sim.step.costs import OpParts, costs_the_difference, move_s, moved, moves, op_cost, op_parts, rank_of
from sim.step.two_batch_overlap import LEFT_TO_EXPERTS

CONTENTION = 1 / LEFT_TO_EXPERTS
"""[assumed] How much longer work and communication take while both are at it: as where DeepEP's kernels have their
share of the multiprocessors. NCCL's channels take about as many; engines that copy take none, but bandwidth."""


class WorkAndSending(NamedTuple):
    """Seconds of an operator's work, and of the communication that it may hide."""

    work_s: float
    sent_s: float


class Pipeline(NamedTuple):
    """The best number of parts, and by how much communication then lengthens the work."""

    late_s: float
    parts: int


def pipelined_s(whole: WorkAndSending, part: WorkAndSending, parts: int) -> float:
    """Seconds of work and communication in so many parts; never below all of either.

    >>> pipelined_s(WorkAndSending(8.0, 8.0), WorkAndSending(2.0, 2.0), 4) == 2.0 + 3 * 2.0 * CONTENTION + 2.0
    True
    """
    if parts == 1:
        return whole.work_s + whole.sent_s
    side_by_side_s = max(part) + (CONTENTION - 1) * min(part)
    in_turn_s = part.work_s + (parts - 1) * side_by_side_s + part.sent_s
    return max(in_turn_s, whole.work_s + part.sent_s, whole.sent_s)


def exchanges_apart(rank: Rank, op: FusedOp) -> bool:
    """Whether the tokens' way to their experts or back stands with the tensor that it brings, not with the op."""
    workload = rank.workload
    if rank.ep == 1 or workload.expert_exchange != "all_to_all" or workload.two_batch_overlap:
        return False
    if op.kind == "dispatch":
        tensor = rank.layer.tensor(op.output)
        return len(tensor.consumers) == 1 and _is_product(rank.layer.op(tensor.consumers[0]))
    return op.kind == "combine" and _is_product(rank.layer.op(rank.layer.tensor(op.inputs[0]).producer))


# --- addends ------------------------------------------------------------------------------------------


def pipelined_cost(rank: Rank, op: FusedOp, choice: int, cost: OpCost) -> OpCost:
    """The cost of an op with what is left of its own communication."""
    if exchanges_apart(rank, op):
        return cost._replace(collective_s=0.0)
    if not _hides_its_own(rank, op, cost):
        return cost
    return cost._replace(collective_s=_own(rank, op, choice).late_s)


def pipelined_parts(rank: Rank, op: FusedOp, choice: int, parts: OpParts) -> OpParts:
    """What is behind that."""
    sent = parts.work.collectives
    if exchanges_apart(rank, op):
        sent = ()
    elif _hides_its_own(rank, op, op_cost(rank, op, choice)):
        sent = _left(sent, _own(rank, op, choice))
    return parts._replace(work=parts.work._replace(collectives=sent))


def pipelined_moves_s(rank: Rank, tensor: Tensor, choices: tuple[int, ...]) -> tuple[float, ...]:
    """Seconds of a tensor's moves within a group, to each op that reads it, with what is left of them."""
    if len(tensor.consumers) > 1 or tensor in crossing_tensors(rank.layer):
        return tuple([move_s(rank, move) for move in moves(rank.layer, tensor, choices)])
    return (_moved(rank, tensor, choices).late_s,)


def pipelined_moves(rank: Rank, tensor: Tensor, choices: tuple[int, ...]) -> tuple[tuple[Collective, ...], ...]:
    """What is behind that."""
    found = tuple(moved(rank, move) for move in moves(rank.layer, tensor, choices))
    if len(tensor.consumers) > 1 or tensor in crossing_tensors(rank.layer):
        return found
    sent = [op_parts(rank, op, choice).work.collectives for op, choice in _exchanges(rank, tensor, choices)]
    return (_left((*sum(sent, ()), *found[0]), _moved(rank, tensor, choices)),)


def _left(sent: tuple[Collective, ...], found: Pipeline) -> tuple[Collective, ...]:
    """Collectives with their share of the time that is left of them."""
    sent_s = sum([each.time_s for each in sent])
    share = found.late_s / sent_s if sent_s else 0.0
    return tuple(replace(each, time_s=each.time_s * share, parts=found.parts) for each in sent)


def _hides_its_own(rank: Rank, op: FusedOp, cost: OpCost) -> bool:
    """Whether communication inside an op follows its work and is of other requests than the work of the next part."""
    return op.kind == "attention" and rank.cp > 1 and cost.collective_s > 0.0 and not rank.load.prompts


def _own(rank: Rank, op: FusedOp, choice: int) -> Pipeline:
    def stages(part: Rank) -> WorkAndSending:
        cost = op_cost(part, op, choice)
        return WorkAndSending(cost.kernel_s, cost.collective_s)

    return _best(rank, stages)


def _moved(rank: Rank, tensor: Tensor, choices: tuple[int, ...]) -> Pipeline:
    """A tensor's move to its one reader, and the tokens' exchange before or behind it, beside the product at an end."""
    layer = rank.layer
    (move,), exchanges = moves(layer, tensor, choices), _exchanges(rank, tensor, choices)
    product = _beside(rank, tensor, choices)

    def stages(part: Rank) -> WorkAndSending:
        sent_s = sum([op_cost(part, *each).collective_s for each in exchanges]) + move_s(part, move)
        return WorkAndSending(op_cost(part, *product).kernel_s if product else 0.0, sent_s)

    if product is None or (move is None and not exchanges):
        return Pipeline(stages(rank).sent_s, 1)
    if rank.load.or_more and move is not None and costs_the_difference(rank, move):
        return Pipeline(0.0, 1)  # of more tokens it may be less
    return _best(rank, stages)


def _exchanges(rank: Rank, tensor: Tensor, choices: tuple[int, ...]) -> list[tuple[FusedOp, int]]:
    """The ops at a tensor's ends whose exchange stands with it, and their choices."""
    ops = [(rank.layer.op(name), choice) for name, choice in zip(tensor.ops, choices, strict=True)]
    kinds = ("dispatch", "combine")  # which leaves it, and which reads it
    return [
        each for each, kind in zip(ops, kinds, strict=True) if each[0].kind == kind and exchanges_apart(rank, each[0])
    ]


def _beside(rank: Rank, tensor: Tensor, choices: tuple[int, ...]) -> tuple[FusedOp, int] | None:
    """The product that hides a tensor's move: the one that leaves it, or the one that reads it."""
    layer = rank.layer
    left, read = [(layer.op(name), choice) for name, choice in zip(tensor.ops, choices, strict=True)]
    if _is_product(left[0]) and _sends_its_result(rank, *left):
        return left
    return read if _is_product(read[0]) and not _sends_its_result(rank, *read) else None


def _sends_its_result(rank: Rank, op: FusedOp, choice: int) -> bool:
    """Whether a product's result must be moved, whatever reads it."""
    layer = rank.layer
    readers = [layer.op(name) for name in layer.tensor(op.output).consumers]
    sent = any(reader.kind == "combine" and exchanges_apart(rank, reader) for reader in readers)
    return sent or rule(op, layer, choice).output == PARTIAL


def _is_product(op: FusedOp) -> bool:
    return op.kind == "einsum" and op.weighted


# --- parts --------------------------------------------------------------------------------------------


def _best(rank: Rank, stages: Callable[[Rank], WorkAndSending]) -> Pipeline:
    """The best number of parts, every one tried; of a load that stands for larger ones what all of them leave at least.

    In k parts the last of the communication or the first is never hidden, and of a larger load or in fewer parts it is
    no shorter.
    """
    most = rank.workload.overlap_parts
    if rank.load.or_more:
        return Pipeline(stages(_part(rank, most)).sent_s, most)
    whole = stages(rank)
    best = Pipeline(whole.sent_s, 1)
    for parts in range(2, most + 1 if whole.sent_s else 0):
        part = _part(rank, parts)
        if part.sizes.tokens < rank.tp:  # nothing to share out
            break
        late_s = pipelined_s(whole, stages(part), parts) - whole.work_s
        if late_s < best.late_s:
            best = Pipeline(late_s, parts)
    return best


def _part(rank: Rank, parts: int) -> Rank:
    """The same GPU with one part of the batch."""
    return rank_of(
        rank.workload,
        rank.load.part(parts),
        rank.tp,
        rank.ep,
        cp=rank.cp,
        copies=rank.copies,
        axis=rank.axis,
        experts_axis=rank.experts_axis,
        layer_group=rank.layer_group,
    )
