"""A small question: Llama 3.1 8B under vLLM on up to eight GPUs, few batches."""

from __future__ import annotations

from dataclasses import dataclass, replace

import pytest

from sim.pools.candidates import Replica, replicas
from sim.pools.handover import request_cache_bytes
from sim.pools.traffic import Traffic, TrafficKind, workload_of
from sim.simulate import evaluate
from sim.workload import Workload
from tests.questions import question_about

TRAFFIC = Traffic.of([TrafficKind(4000, 200)])


@pytest.fixture(scope="package")
def served() -> Workload:
    """Every strategy that vLLM runs on up to eight GPUs, with batches of 1, 8 and 64."""
    question = question_about("llama_3_1_8b", engine="vllm", isl=4000, osl=200, phase="serve", gpus=8)
    workload = replace(question, space="vllm").load()
    return replace(workload, degrees=replace(workload.degrees, pp=(1, 2), batch=(1, 8, 64)))


@dataclass(frozen=True)
class BothPools:
    """Replicas of a prefill and of a decode pool; `waves` have room for a batch's longest contexts."""

    workload: Workload
    prefills: tuple[Replica, ...]
    decodes: tuple[Replica, ...]
    waves: tuple[Replica, ...]
    cache_bytes: float


@pytest.fixture(scope="package")
def both(served: Workload) -> BothPools:
    """All replicas of its two pools."""
    prefills, decodes = (replicas(workload_of(TRAFFIC, served, phase), TRAFFIC) for phase in ("prefill", "decode"))
    longest = replace(workload_of(TRAFFIC, served, "decode"), context_tokens=4200)
    waves = tuple(each for each in decodes if evaluate(longest, each.evaluation.strategy).feasible)
    return BothPools(served, prefills, decodes, waves, request_cache_bytes(served, 4000))
