"""A small question: Llama 3.1 8B under vLLM on up to eight GPUs, few batches."""

from __future__ import annotations

from dataclasses import replace

import pytest

from sim.pools.best_pools import Pools, separate_pools
from sim.pools.traffic import Traffic, TrafficKind
from sim.workload import Workload
from tests.questions import question_about

TRAFFIC = Traffic.of([TrafficKind(4000, 200)])


@pytest.fixture(scope="package")
def served() -> Workload:
    """Every strategy that vLLM runs on up to eight GPUs, with batches of 1, 8 and 64."""
    said = question_about("llama_3_1_8b", engine="vllm", isl=4000, osl=200, phase="serve", gpus=8)
    workload = replace(said, space="vllm").load()
    return replace(workload, degrees=replace(workload.degrees, pp=(1, 2), batch=(1, 8, 64)))


@pytest.fixture(scope="package")
def both(served: Workload) -> Pools:
    """Its two pools."""
    return separate_pools(served, TRAFFIC)
