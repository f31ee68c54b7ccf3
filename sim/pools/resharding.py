"""One pool that changes its strategy between phases, as Seesaw does: prompts for a while, then answers, and again.

A cycle computes the prompts of so many waves of requests and puts their KV cache into the hosts' memory; moves every
weight to where decoding wants it; decodes wave after wave, all requests of a wave from their first to their last
token; and moves the weights back. The longer the cycle, the less the moves weigh and the longer everybody waits.

Caches leave behind the prompts that are computed meanwhile and come back behind the wave that decodes; the first wave
waits for its own. Weights are redistributed between the GPUs by the fastest route of collectives on the mesh that both
layouts are cut from (`sim.step.mesh_moves`). Source: Seesaw (arXiv 2503.06433), sections 4 and 5.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

import numpy as np

from sim.ops.layers import layer_ops
from sim.pools.candidates import Replica
from sim.pools.matching import RATE_ROUNDING, Limits
from sim.prices.collectives import collective_price, lossless
from sim.prices.mesh import group
from sim.serving.phases import DECODE
from sim.sharding.placement import REPLICATE, Placement, Shard
from sim.simulate import evaluate, steady_state
from sim.step.layer import group_sums
from sim.step.mesh_moves import Axis, mesh_collectives
from sim.strategy import NONE, Strategy
from sim.workload import Workload


@dataclass(frozen=True, slots=True)
class Host:
    """The memory of the hosts, per GPU.

    Attributes:
        bytes: That caches may fill. [published] a DGX H100 has 2 TB for 8 GPUs; [assumed] four fifths are free.
        bytes_per_s: Of a GPU's link, in each direction. [assumed] 50 of the 63 GB/s of PCIe 5.0 x16.
    """

    bytes: float = 200e9
    bytes_per_s: float = 50e9


@dataclass(frozen=True, slots=True)
class Resharded:
    """Replicas of one pool that re-shards.

    Attributes:
        prefill, decode: The replica in each phase, on the same GPUs.
        replicas: How many.
        waves: Waves of requests that one cycle decodes.
        cycle_requests: Requests of a cycle of one replica.
        cycle_s: Its length.
        switch_s: Moving the weights, there and back.
        requests_per_s: Of all replicas.
        tpot_s: Mean from the first to the last token, with all waiting in between, per token.
        ttft_s: Mean time to the first token: half of the time that no prompts are computed, and the prompt's step.
    """

    prefill: Replica
    decode: Replica
    replicas: int
    waves: int
    cycle_requests: int
    cycle_s: float
    switch_s: float
    requests_per_s: float
    tpot_s: float
    ttft_s: float

    @property
    def gpus(self) -> int:
        """Of all replicas."""
        return self.replicas * self.prefill.gpus


def best_resharded(
    workload: Workload,
    prefills: Sequence[Replica],
    decodes: Sequence[Replica],
    limits: Limits,
    *,
    output_tokens: float,
    cache_bytes: float,
    host: Host,
) -> Resharded | None:
    """The exact best pair of strategies and length of the cycle; None if none keeps the limits.

    Args:
        workload: Model and hardware.
        prefills: Replicas that compute prompts.
        decodes: Replicas that decode, with room for a wave's longest context.
        limits: To be kept.
        output_tokens: Of a request.
        cache_bytes: KV cache of a request's prompt.
        host: Where caches wait.
    """
    best: Resharded | None = None
    for bound, left, right in _promising(prefills, decodes, limits, output_tokens, cache_bytes, host):
        if best is not None and bound <= _worth(best, limits) * (1 + 1e-12):
            break
        each = longest_cycle(workload, left, right, limits, output_tokens, cache_bytes, host)
        if each and (best is None or _worth(each, limits) > _worth(best, limits)):
            best = each
    return best


def _worth(each: Resharded, limits: Limits) -> float:
    """Requests a second, or minus the GPUs that a load takes."""
    return each.requests_per_s if limits.requests_per_s is None else -float(each.gpus)


def _promising(
    prefills: Sequence[Replica],
    decodes: Sequence[Replica],
    limits: Limits,
    output_tokens: float,
    cache_bytes: float,
    host: Host,
) -> list[tuple[float, Replica, Replica]]:
    """(bound of the worth, prefill, decode) of pairs on equally many GPUs that could do if moves took no time."""
    found: list[tuple[float, Replica, Replica]] = []
    for gpus in sorted({each.gpus for each in prefills} & {each.gpus for each in decodes}):
        if gpus > limits.gpus:
            break
        left, right = ([each for each in side if each.gpus == gpus] for side in (prefills, decodes))
        wave = np.array([_wave(each) for each in right], dtype=float)
        answers_s = output_tokens * np.array([each.latency_s for each in right])
        carried_s = cache_bytes / (gpus * host.bytes_per_s)
        prompt_s = np.maximum(np.array([1 / each.requests_per_s for each in left]), carried_s)[:, None]
        rate = 1 / (prompt_s + np.maximum(answers_s / wave, carried_s))
        first_s = (answers_s + wave * carried_s) / 2 + 1.5 * np.array([each.latency_s for each in left])[:, None]
        token_s = (answers_s + wave * carried_s + wave * prompt_s / 2) / output_tokens
        fits = (first_s <= limits.ttft_s * (1 + RATE_ROUNDING)) & (token_s <= limits.tpot_s * (1 + RATE_ROUNDING))
        fits &= wave * cache_bytes <= host.bytes * gpus
        if limits.requests_per_s is None:
            bound = rate * (limits.gpus // gpus)
        else:
            bound = -gpus * np.ceil(limits.requests_per_s / rate * (1 - 1e-12))
            fits &= -bound <= limits.gpus
        found += [(float(bound[at]), left[at[0]], right[at[1]]) for at in map(tuple, np.argwhere(fits).tolist())]
    return sorted(found, key=lambda each: -each[0])


def _wave(decode: Replica) -> int:
    """Requests that a replica decodes at once, over all microbatches."""
    return decode.evaluation.strategy.batch * decode.evaluation.strategy.pp


def longest_cycle(
    workload: Workload,
    prefill: Replica,
    decode: Replica,
    limits: Limits,
    output_tokens: float,
    cache_bytes: float,
    host: Host,
) -> Resharded | None:
    """The cycle of most waves that keeps the limits, which is the best: each further one spreads the moves wider.

    Every time in it grows by the same for each further wave, so that its length follows from the limits.
    """
    strategy = decode.evaluation.strategy
    wave = _wave(decode)
    carried_s = cache_bytes / (prefill.gpus * host.bytes_per_s)
    prompts_s = wave * max(1 / prefill.requests_per_s, carried_s)
    first_load_s, answers_s = wave * carried_s, output_tokens * decode.latency_s
    later_s = max(answers_s, first_load_s)
    there_s, back_s = (
        weights_moved_s(workload, *ends)
        for ends in (
            (prefill.evaluation.strategy, strategy),
            (strategy, prefill.evaluation.strategy),
        )
    )
    fixed_s = there_s + back_s + first_load_s + answers_s - later_s
    between_s = there_s + first_load_s + answers_s  # of a request of the first wave, all prompts done
    slack_ttft_s = 2 * (limits.ttft_s * (1 + RATE_ROUNDING) - 1.5 * prefill.latency_s) - fixed_s
    slack_tpot_s = 2 * (limits.tpot_s * (1 + RATE_ROUNDING) * output_tokens - between_s) + later_s
    room = host.bytes * prefill.gpus / (wave * cache_bytes)
    waves = min(slack_ttft_s / later_s, slack_tpot_s / (prompts_s + later_s), room, _MOST_WAVES)
    if waves < 1:
        return None
    count = math.floor(waves)
    cycle_s = count * (prompts_s + later_s) + fixed_s
    rate = count * wave / cycle_s
    load = limits.requests_per_s
    replicas = limits.gpus // prefill.gpus if load is None else math.ceil(load / rate * (1 - 1e-12))
    if replicas * prefill.gpus > limits.gpus:
        return None
    return Resharded(
        prefill,
        decode,
        replicas,
        count,
        count * wave,
        cycle_s,
        there_s + back_s,
        replicas * rate if load is None else load,
        (between_s + (count * prompts_s + (count - 1) * later_s) / 2) / output_tokens,
        (count * later_s + fixed_s) / 2 + 1.5 * prefill.latency_s,
    )


_MOST_WAVES = 10**6


# --- weights ------------------------------------------------------------------------------------


@lru_cache(maxsize=4096)
def weights_moved_s(workload: Workload, source: Strategy, target: Strategy) -> float:
    """Seconds to move all weights of a replica from one strategy's layout to another's; 0 where both are alike.

    Weights are cut by layers over the stages and by width within them, experts also one from another; attention's are
    copied over its data-parallel ranks. What a choice of ops keeps whole beside that is not distinguished.
    """
    experts, others = _weight_bytes(workload)
    layers = max(1, math.lcm(source.pp, target.pp))
    return sum(
        _moved_s(workload, _cuts(source, kind), _cuts(target, kind), layers, size)
        for kind, size in (("experts", experts), ("others", others))
        if size
    )


@lru_cache(maxsize=64)
def _weight_bytes(workload: Workload) -> tuple[float, float]:
    """(of experts, of everything else) all of the model's weights."""
    alone = Strategy(1, 1, 1, 1, tuple(NONE for _ in layer_ops(workload.model).ops))
    lone = replace(workload, phase=DECODE.name, engine=None)
    decode_bytes = evaluate(lone, alone).memory_bytes.weights
    if not workload.model.is_moe:
        return 0.0, decode_bytes
    costs = steady_state(lone, alone).steps[0].costs
    named = [
        [(op.name, cost.weight_bytes) for op, cost in zip(group.layer.costs, each, strict=True)]
        for group, each in zip(group_sums(lone), costs, strict=True)
    ]
    share = [sum(size for name, size in each if name in ("ffn1", "ffn2")) for each in named]
    whole = [sum(size for _, size in each) for each in named]
    return decode_bytes * sum(share) / sum(whole), decode_bytes * (1 - sum(share) / sum(whole))


Cut = tuple[int, int | None]
"""GPUs along a part of the mesh, and the dim of the weights that they cut: layers, experts, width; None for copies."""


def _cuts(strategy: Strategy, kind: str) -> tuple[Cut, ...]:
    """From the innermost part of the mesh outwards."""
    if kind == "experts":
        return ((strategy.moe_tp, 2), (strategy.ep, 1), (strategy.pp, 0))
    return ((strategy.tp * strategy.cp, 2), (strategy.attention_dp, None), (strategy.pp, 0))


def _moved_s(workload: Workload, source: Sequence[Cut], target: Sequence[Cut], layers: int, size: float) -> float:
    gpus = math.prod(degree for degree, _ in source)
    ends = [_boundaries(cuts) for cuts in (source, target)]
    marks = sorted(set(ends[0]) | set(ends[1]))
    if any(outer % inner for inner, outer in itertools.pairwise(marks)):
        # Cut by numbers that share no mesh: every GPU fetches its piece from the others.
        everybody = group(1, gpus, *workload.hardware.tiers)
        return collective_price(workload.hardware, "all_to_all", everybody, size).time_s
    axes: list[Axis] = []
    layouts: tuple[list[Placement], list[Placement]] = ([], [])
    for inner, outer in itertools.pairwise(marks):
        axes.append(Axis("gpus", outer // inner, inner))
        for layout, cuts in zip(layouts, (source, target), strict=True):
            dim = _cut_at(cuts, inner)
            layout.append(REPLICATE if dim is None else Shard(dim))
    before, after = (tuple(each[::-1]) for each in layouts)
    if before == after:
        return 0.0
    shape = (layers * gpus, gpus, gpus)  # every cut is even: what moves depends on shares alone
    element_bytes = size / math.prod(shape)
    hardware = lossless(workload.hardware)
    moved = mesh_collectives(hardware, tuple(axes[::-1]), before, after, shape, element_bytes, "weights")
    return sum(collective.time_s for collective in moved)


def _boundaries(cuts: Sequence[Cut]) -> tuple[int, ...]:
    marks = [1]
    for degree, _ in cuts:
        marks.append(marks[-1] * degree)
    return tuple(marks)


def _cut_at(cuts: Sequence[Cut], stride: int) -> int | None:
    """The dim that GPUs so far apart cut."""
    reach = 1
    for degree, dim in cuts:
        if reach <= stride < reach * degree:
            return dim
        reach *= degree
    raise AssertionError("a stride beyond the mesh")
