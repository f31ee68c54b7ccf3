"""The KV cache on its way: sizes and seconds by hand."""

from __future__ import annotations

from dataclasses import replace

import pytest

from sim.config.catalog import load_workload
from sim.pools.handover import Link, request_cache_bytes, sharers
from sim.strategy import Strategy
from sim.workload import Workload

HEADS, REQUESTS = 1, 0


def test_the_cache_of_a_request_is_the_models_own(toy_dense: Workload) -> None:
    # 4 layers of keys and values, 2 KV heads of 16, one byte each.
    assert request_cache_bytes(toy_dense, 100) == 4 * 2 * 2 * 16 * 100
    halves = replace(toy_dense, precisions=replace(toy_dense.precisions, kv_cache="bf16"))
    assert request_cache_bytes(halves, 100) == 2 * request_cache_bytes(toy_dense, 100)


def test_latent_attention_hands_over_its_latents() -> None:
    workload = load_workload("llama_3_1_405b_8k")
    from sim.config.catalog import load_model

    model = load_model("deepseek_v3")
    assert request_cache_bytes(replace(workload, model=model), 1000) == 61 * 1000 * (512 + 64)


def test_gpus_that_share_a_request_send_it_together(toy_dense: Workload) -> None:
    dims = [2] * 10
    dims[2] = HEADS
    assert sharers(toy_dense, Strategy(4, 1, 2, 8, tuple(dims))) == 8
    dims[2] = REQUESTS
    assert sharers(toy_dense, Strategy(4, 1, 2, 8, tuple(dims))) == 2


def test_a_transfer_takes_the_narrower_sides_share_of_the_bytes_over_the_links_bandwidth(toy_dense: Workload) -> None:
    far, near = (Link(toy_dense, same_node=same, cache_bytes=8e6) for same in (False, True))
    assert far.request_s(4, 2) == pytest.approx(7e-6 + 4e6 / 1e9)
    assert near.request_s(4, 8) == pytest.approx(0.5e-6 + 2e6 / 10e9)
    assert replace(far, hidden=0.75).request_s(4, 2) == pytest.approx((7e-6 + 4e6 / 1e9) / 4)
    assert replace(far, free=True).request_s(1, 1) == 0
