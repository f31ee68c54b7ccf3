"""Attention over a context that several GPUs share: every one attends to its part, and the parts are merged.

A GPU's part of the result is a softmax over its own keys: outputs and, per query, the logarithm of the sum of
exponentials that they were divided by. The GPUs of a cp group exchange these all to all, so that each merges an
equal share of the heads (or of the requests, where those are sharded). Source: "Helix Parallelism" (arXiv
2507.07120), section 2.1; the merge is that of FlashDecoding. `sim.sharding.operations` proves the rule.
"""

from __future__ import annotations

import math
from typing import NamedTuple

from sim.ops.rank import Rank
from sim.prices.collectives import Collective
from sim.prices.mesh import group
from sim.prices.roofline import Kernel

LOG_SUM_BYTES = 4
"""The logarithm of a sum of exponentials is kept in fp32."""


class Merge(NamedTuple):
    """What follows the attention kernel where the context is sharded.

    Attributes:
        kernel: Weighs and adds the parts of this GPU's share.
        collectives: The exchange, and the gather of a result that every GPU needs whole.
        buffer_bytes: Parts sent and received.
    """

    kernel: Kernel
    collectives: tuple[Collective, ...]
    buffer_bytes: float


def merge_partials(rank: Rank, queries: float, width: int, *, whole: bool) -> Merge:
    """The merge of `queries` (requests times heads) of which every GPU of a cp group has a part.

    Args:
        rank: The busiest GPU.
        queries: Parts on each GPU: one output of `width` and one logarithm each.
        width: Columns of an output: a head's value, or the latent before it is projected up.
        whole: Whether every GPU needs the result of all its group's queries rather than a share.
    """
    dtype = rank.workload.precisions.activations
    mine = math.ceil(queries / rank.cp)
    part_bytes = queries * (width * rank.activation_each + LOG_SUM_BYTES)
    result_bytes = queries * width * rank.activation_each
    traffic = part_bytes + mine * width * rank.activation_each
    kernel = Kernel("elementwise", dtype, dtype, 2.0 * queries * width, traffic)
    members = group(1, rank.cp, *rank.workload.hardware.tiers)
    exchange = rank.collective("all_to_all", "cp", members, "attention parts", rank.cp * part_bytes)
    gather = rank.collective("all_gather", "cp", members, "attn_out", result_bytes) if whole else ()
    return Merge(kernel, (*exchange, *gather), 2.0 * part_bytes)
