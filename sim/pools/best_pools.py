"""The exact best of other ways to lay prompts and answers on GPUs than two pools (`sim.pools.best_pair`).

one: continuous batching, whose decode steps carry prompts too, whole or in chunks of any of `CHUNKS`.
resharded: one pool whose strategy changes between the phases: see `sim.pools.resharding`.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from sim.evaluation import Evaluation
from sim.optimum.exact_search import find_bests
from sim.optimum.spaces import space_of
from sim.pools.candidates import replicas
from sim.pools.handover import request_cache_bytes
from sim.pools.matching import Limits, as_predicted
from sim.pools.resharding import Host, Resharded, best_resharded
from sim.pools.traffic import Traffic, requests_per_s, workload_of
from sim.serving.phases import DECODE, PREFILL, SERVE
from sim.simulate import evaluate
from sim.workload import Workload

CHUNKS: tuple[int | None, ...] = (None, 8192, 2048, 512)
"""Most prompt tokens of a step that one pool may choose, None for whole prompts. [published] 512 and 2048 were
vLLM's defaults and 8192 is (0.33.0, engine/arg_utils.py)."""


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
    kept = 1 - workload.margin
    limited = replace(workload, tpot_slo_s=limits.tpot_s / kept, ttft_slo_s=limits.ttft_s / kept, max_gpus=limits.gpus)
    served = workload_of(traffic, limited, SERVE.name)
    found: list[OnePool] = []
    reached = 0.0
    for each in chunked(served, chunks):

        def score(tokens_per_s_per_gpu: float, gpus: int, each: Workload = each) -> float:
            return _worth(requests_per_s(traffic, each, tokens_per_s_per_gpu * gpus), gpus, limits)

        for best in find_bests(space_of(each), 1, score, reached=reached):
            reached = max(reached, score(best.tokens_per_s_per_gpu, best.gpus))
            found.append(_one_pool(best, each, traffic, limits))
    if limits.requests_per_s is not None:
        return min(found, key=lambda each: (each.gpus, each.ttft_s), default=None)
    return max(found, key=lambda each: (each.requests_per_s, -each.gpus), default=None)


def chunked(workload: Workload, chunks: Sequence[int | None] = CHUNKS) -> Iterator[Workload]:
    """The workload with each of some chunks that are shorter than its prompts; as it is where it has one already."""
    if workload.chunk_tokens is not None:
        yield workload
        return
    for chunk in chunks:
        if chunk is None or chunk < workload.prompt_tokens:
            yield replace(workload, chunk_tokens=chunk)


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


def best_in_turns(workload: Workload, traffic: Traffic, limits: Limits, host: Host) -> Resharded | None:
    """The exact best pool that re-shards between prompts and answers; None if none keeps the limits.

    Args:
        workload: Model, hardware, engine, degrees and space; each of its batches is priced, so that they should be few.
        traffic: What is sent.
        limits: To be kept.
        host: Where caches wait.
    """
    anyhow = replace(workload, tpot_slo_s=math.inf, ttft_slo_s=math.inf, max_gpus=limits.gpus)
    decoding = workload_of(traffic, anyhow, DECODE.name)
    longest = replace(decoding, context_tokens=traffic.context_tokens + math.ceil(traffic.output_tokens / 2))
    decodes = replicas(decoding, traffic)
    return best_resharded(
        workload,
        replicas(workload_of(traffic, anyhow, PREFILL.name), traffic),
        [each for each in decodes if evaluate(longest, each.evaluation.strategy).feasible],
        as_predicted(workload, limits),
        output_tokens=traffic.output_tokens,
        cache_bytes=request_cache_bytes(workload, traffic.typical_prompt_tokens),
        host=host,
    )
