"""Rows with separate prefill and decode workers: who decodes at once, and who waits."""

from __future__ import annotations

from typing import Any

import pandas as pd
import pytest

from raysearch.fidelity.calibration.deployments import Skipped
from raysearch.fidelity.calibration.disaggregated_recipes import PoolPair, pair_of
from raysearch.fidelity.calibration.serving_pool import decode_workers
from raysearch.fidelity.validation.disaggregated import closed_loop, predict_pair
from sim.config.catalog import load_calibrated, load_machine

ROW: dict[str, Any] = {
    "id": "x",
    "source": "db-dump/2026",
    "backend": "trtllm",
    "backend_version": "1.0",
    "model_path": "deepseek-ai/DeepSeek-V3",
    "mode": "disagg",
    "isl": 8192,
    "osl": 1024,
    "gemm_quant_mode": "fp8_block",
    "concurrency": 30,
    "prefill_num_workers": 1,
    "prefill_batch_size": 1,
    "prefill_tp_size": 1,
    "prefill_attention_dp_size": 16,
    "prefill_moe_tp_size": 1,
    "decode_num_workers": 3,
    "decode_batch_size": 10,
    "decode_tp_size": 16,
    "decode_attention_dp_size": 1,
    "decode_moe_tp_size": 1,
}


def pair(**changes: Any) -> PoolPair:
    found = pair_of(ROW | changes)
    assert isinstance(found, PoolPair)
    return found


def test_decode_workers_with_fewer_places_than_requests_make_the_others_wait() -> None:
    # 3 of 6 requests decode, 10 s each: one ends every 10/3 s, so a request takes 6 * 10/3 s, half of it before.
    assert closed_loop(6, 3, 100.0, 0.1, lambda _: 10.0) == (3, pytest.approx(10.0))


def test_slow_prefill_workers_leave_places_empty_and_hold_the_queue() -> None:
    running, first_s = closed_loop(64, 64, 2.0, 0.5, lambda running: 10.0 + running / 10)
    assert running == pytest.approx(2.0 * (10.0 + running / 10), rel=1e-6)  # Little's law
    assert first_s == pytest.approx(64 / 2.0 - (10.0 + running / 10), rel=1e-6)


def test_without_a_bottleneck_nobody_queues_and_all_requests_are_somewhere() -> None:
    running, first_s = closed_loop(10, 100, 1000.0, 1.0, lambda _: 4.0)
    assert first_s == pytest.approx(1.0)
    assert running == pytest.approx(10 * 4.0 / 5.0)


def test_published_recipes_say_how_many_places_there_are() -> None:
    stated = pair()
    assert (stated.open_requests, stated.places, stated.decodes) == (30, 24, 3)
    assert stated.decode.reread[-1] == "24 requests decode at once by its published recipe, not 30"
    assert pair(source="own run").places == 30


def test_a_row_without_batches_is_read_from_what_its_clients_send() -> None:
    found = pair(source="own run", decode_batch_size="", prefill_batch_size="")
    assert (found.places, found.decode.strategy.batch, found.prefill.strategy.batch) == (30, 10, 16)
    assert isinstance(pair_of(ROW | {"decode_batch_size": "", "concurrency": ""}), Skipped)
    assert isinstance(pair_of(ROW | {"decode_pp_size": 2}), Skipped)


def test_a_decode_worker_runs_those_that_are_past_their_first_token() -> None:
    own = ROW | {"source": "own run", "silicon_tpot_ms": 10.0, "silicon_ttft_ms": 10_240.0}  # half of a request's time
    late, unknown = own | {"silicon_ttft_ms": 1e6}, own | {"silicon_ttft_ms": float("nan")}
    runs, tpot_s = decode_workers(pd.DataFrame([own, late, unknown]))
    assert [run.strategy.batch for run in runs] == [5, 1]
    assert [(run.phase, run.generation) for run in runs] == [("decode", "trtllm")] * 2
    assert tpot_s.tolist() == [0.01, 0.01]


def test_more_places_raise_the_time_per_token_and_shorten_the_queue() -> None:
    calibration = load_calibrated("h100_sxm", None)
    machine = load_machine("h100_sxm", calibration)
    few, many = (predict_pair(pair(source=source, isl=1024), calibration, machine) for source in ("db-dump", "own run"))
    assert not isinstance(few, Skipped)
    assert not isinstance(many, Skipped)
    assert few.tpot_s < many.tpot_s
    assert few.ttft_s > many.ttft_s
    assert few.light_s < few.tpot_s
