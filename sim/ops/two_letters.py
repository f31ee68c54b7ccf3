"""A fused op that shards two of its letters over two sub-axes of the group, tp = a x b: what it does on one GPU.

Over a letter's sub-axis the op is that of a smaller model, or of fewer tokens: one letter is always tokens or hidden,
and the op of a part of them is sharded over the other letter as over a group of its own.
"""

from __future__ import annotations

import math
from dataclasses import replace
from functools import lru_cache

from sim.layers.ops import FusedOp
from sim.ops.rank import Rank, Work
from sim.prices.mesh import group
from sim.sharding.grid import sub_degrees
from sim.strategy import inner_ranks_of
from sim.workload import Workload

_TOKENS, _HIDDEN = "tc", "d"


def grid_letters(op: FusedOp, choice: int, tp: int) -> tuple[tuple[str, int], tuple[str, int]]:
    """The letter and the degree of the outer sub-axis, then of the inner one."""
    (outer, inner), (ranks, neighbours) = op.label(choice), sub_degrees(tp, inner_ranks_of(choice))
    return (outer, ranks), (inner, neighbours)


def grid_work(rank: Rank, op: FusedOp, choice: int) -> Work:
    """The work of an op under a choice of two letters."""
    if rank.tp == 1:
        return op.work(rank, op, "")
    outer, inner = grid_letters(op, choice, rank.tp)
    axes = (outer, f"{rank.axis} outer", inner[1]), (inner, f"{rank.axis} inner", 1)
    apart, own = sorted(axes, key=lambda axis: _order(axis[0][0]))
    (letter, parts), ((label, degree), name, stride) = apart[0], own
    sub = _sub_rank(rank, letter, parts, degree, name, stride)
    work: Work = op.work(sub, op, label if degree > 1 else "")
    return work


def _order(letter: str) -> int:
    """Which of two letters the op is divided by first: tokens, then hidden; others shard what is left."""
    return 0 if letter in _TOKENS else 1 if letter == _HIDDEN else 2


@lru_cache(maxsize=1024)
def _sub_rank(rank: Rank, letter: str, parts: int, degree: int, axis: str, stride: int) -> Rank:
    workload, load = rank.workload, rank.load
    if letter in _TOKENS:
        load = load.part(parts)
    else:
        workload = _narrower(workload, parts)
    sub = Rank(
        workload,
        load,
        degree,
        rank.ep,
        rank.layer,
        copies=rank.copies,
        axis=axis,
        experts_axis=rank.experts_axis,
        layer_group=rank.layer_group,
    )
    sub.group_gpus = rank.tp
    sub.tp_group = group(stride, degree, *workload.hardware.tiers)
    return sub


@lru_cache(maxsize=256)
def _narrower(workload: Workload, parts: int) -> Workload:
    return replace(workload, model=replace(workload.model, hidden=math.ceil(workload.model.hidden / parts)))
