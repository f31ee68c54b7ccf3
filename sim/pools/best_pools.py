"""The exact best of each way to lay prompts and answers on GPUs: one pool, two, or one that re-shards.

one: continuous batching, whose decode steps carry prompts too, whole or in chunks of any of `CHUNKS`.
apart: a prefill pool and a decode pool, each with a strategy of its own, and the KV cache sent between them.
resharded: one pool whose strategy changes between the phases: see `sim.pools.resharding`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from sim.evaluation import Evaluation
from sim.optimum.exact_search import find_bests
from sim.optimum.spaces import space_of
from sim.pools.candidates import Replica, replicas
from sim.pools.handover import Link, request_cache_bytes
from sim.pools.matching import Limits, Matched, best_match
from sim.pools.resharding import Host, Resharded, best_resharded
from sim.pools.traffic import Traffic, requests_per_s, workload_of
from sim.serving.confidence import slower
from sim.simulate import evaluate
from sim.workload import Workload

CHUNKS: tuple[int | None, ...] = (None, 8192, 2048, 512)
"""Most prompt tokens of a step that one pool may choose, None for whole prompts. [published] 512 and 2048 were
vLLM's defaults and 8192 is (0.33.0, engine/arg_utils.py)."""
OnMessage = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class OnePool:
    """Replicas of one strategy under continuous batching.

    Attributes:
        evaluation: Of a replica.
        workload: What it serves: its phase, lengths and chunks.
        replicas: How many.
        requests_per_s: Of all.
    """

    evaluation: Evaluation
    workload: Workload
    replicas: int
    requests_per_s: float

    @property
    def gpus(self) -> int:
        """Of all replicas."""
        return self.replicas * self.evaluation.gpus

    @property
    def tpot_s(self) -> float:
        """Mean time per output token."""
        return self.evaluation.tpot_s

    @property
    def ttft_s(self) -> float:
        """Mean time to the first token."""
        return self.evaluation.ttft_s


def best_one_pool(
    workload: Workload, traffic: Traffic, limits: Limits, chunks: Sequence[int | None] = CHUNKS
) -> OnePool | None:
    """The exact best single pool over all strategies and batches of the workload's space; None if none is feasible.

    Args:
        workload: Model, hardware, engine, degrees and space.
        traffic: What is sent.
        limits: To be kept.
        chunks: Of which it takes the best.
    """
    limited = replace(workload, tpot_slo_s=limits.tpot_s, ttft_slo_s=limits.ttft_s, max_gpus=limits.gpus)
    served = workload_of(traffic, limited, "serve")
    found: list[OnePool] = []
    for chunk in chunks:
        if chunk is not None and chunk >= served.prompt_tokens:
            continue
        each = replace(served, chunk_tokens=chunk)

        def score(tokens_per_s_per_gpu: float, gpus: int, each: Workload = each) -> float:
            return _worth(requests_per_s(traffic, each, tokens_per_s_per_gpu * gpus), gpus, limits)

        bests = find_bests(space_of(each), 1, score)
        found += [_one_pool(best, each, traffic, limits) for best in bests]
    if limits.requests_per_s is not None:
        return min(found, key=lambda each: (each.gpus, each.ttft_s), default=None)
    return max(found, key=lambda each: (each.requests_per_s, -each.gpus), default=None)


def _one_pool(best: Evaluation, workload: Workload, traffic: Traffic, limits: Limits) -> OnePool:
    rate = requests_per_s(traffic, workload, best.tokens_per_s_per_gpu * best.gpus)
    if limits.requests_per_s is None:
        count = limits.gpus // best.gpus
        return OnePool(best, workload, count, count * rate)
    return OnePool(best, workload, copies_for(limits.requests_per_s, rate), limits.requests_per_s)


def copies_for(load_per_s: float, rate_per_s: float) -> int:
    """Fewest replicas that carry a load, at least one; rounding of rates costs none."""
    return max(1, math.ceil(load_per_s / rate_per_s * (1 - 1e-12)))


def _worth(rate_per_s: float, gpus: int, limits: Limits) -> float:
    """Requests a second of all replicas, or of each GPU that the load takes: never falls with a replica's rate."""
    if rate_per_s <= 0 or gpus > limits.gpus:
        return 0.0
    if limits.requests_per_s is None:
        return rate_per_s * (limits.gpus // gpus)
    taken = gpus * copies_for(limits.requests_per_s, rate_per_s)
    return limits.requests_per_s / taken if taken <= limits.gpus else 0.0


@dataclass(frozen=True, slots=True)
class Pools:
    """What replicas of a prefill pool and of a decode pool can do; whatever limits they are to keep.

    Attributes:
        workload: Model, hardware, engine, degrees and space.
        traffic: What is sent.
        prefills, decodes: Replicas.
        waves: Of the decode replicas those that have room where all of a batch reach their longest context at once.
        near, far: Links between pools inside a node and across nodes.
    """

    workload: Workload
    traffic: Traffic
    prefills: tuple[Replica, ...]
    decodes: tuple[Replica, ...]
    waves: tuple[Replica, ...]
    near: Link
    far: Link

    def best(self, limits: Limits) -> Matched | None:
        """The exact best two pools over all pairs of replicas and their numbers; None if none keeps the limits."""
        node = self.workload.hardware.node_gpus
        return best_match(self.prefills, self.decodes, self._as_predicted(limits), self.near, self.far, node)

    def best_resharded(self, limits: Limits, host: Host) -> Resharded | None:
        """The exact best pool that re-shards between prompts and answers; None if none keeps the limits."""
        return best_resharded(
            self.workload,
            self.prefills,
            self.waves,
            self._as_predicted(limits),
            output_tokens=self.traffic.output_tokens,
            cache_bytes=self.far.cache_bytes,
            host=host,
        )

    def _as_predicted(self, limits: Limits) -> Limits:
        """The limits that predictions must keep for measured runs to keep these with the workload's confidence."""
        limited = replace(self.workload, tpot_slo_s=limits.tpot_s, ttft_slo_s=limits.ttft_s, margin=0.0)
        factors = slower(limited)  # no pool has steps of both kinds
        return replace(limits, tpot_s=factors.tpot_limit_s, ttft_s=factors.ttft_limit_s)


def separate_pools(
    workload: Workload,
    traffic: Traffic,
    *,
    hidden: float = 0.0,
    free_transfer: bool = False,
    progress: OnMessage = lambda _: None,
) -> Pools:
    """Prices all replicas of both pools once, for any limits.

    Args:
        workload: Model, hardware, engine, degrees and space; a replica has at most its budget of GPUs.
        traffic: What is sent.
        hidden: Share of the cache's transfer that hides behind the prompt's computing.
        free_transfer: Whether the transfer costs nothing at all.
        progress: Called with what is being worked out.
    """
    anyhow = replace(workload, tpot_slo_s=math.inf, ttft_slo_s=math.inf)
    progress("prefill pools")
    prefills = replicas(workload_of(traffic, anyhow, "prefill"), traffic)
    progress("decode pools")
    decodes = replicas(workload_of(traffic, anyhow, "decode"), traffic)
    longest = replace(
        workload_of(traffic, anyhow, "decode"),
        context_tokens=traffic.context_tokens + math.ceil(traffic.output_tokens / 2),
    )
    waves = tuple(each for each in decodes if evaluate(longest, each.evaluation.strategy).feasible)
    cache_bytes = request_cache_bytes(workload, traffic.typical_prompt_tokens)
    near, far = (
        Link(workload, same_node=same_node, cache_bytes=cache_bytes, hidden=hidden, free=free_transfer)
        for same_node in (True, False)
    )
    return Pools(workload, traffic, prefills, decodes, waves, near, far)
