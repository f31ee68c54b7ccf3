"""Requests through a prefill and a decode pool: hand arithmetic, ports, queues as in theory, and the steady rate."""

from dataclasses import replace

import numpy as np
import pytest

import raysearch as rs
from sim.prices.engine import SchedulerPolicy
from sim.replay.arrivals import Stream, draw_arrivals
from sim.replay.replica import Deployed
from sim.replay.requests import Lengths, Requests
from sim.replay.scheduler import Scheduler
from sim.replay.step_prices import RankStep
from sim.replay.two_pools import Handover, TwoPools, through_pools

WAITS_S, SENDS_S = 0.004, 0.001


def _pool(phase: str, batch: int) -> Deployed:
    formats = {"weights": "fp8", "kv_cache": "fp8"}
    asked = rs.question(model="llama_3_1_8b", isl=1000, osl=100, engine="vllm", hardware="h100_sxm", gpus=16, **formats)
    found = rs.evaluate(replace(asked, phase=phase), tp=1, batch=batch)
    return Deployed.of(found.workload, found.strategy)


@pytest.fixture(scope="module")
def pools() -> TwoPools:
    handover = Handover(lambda _: WAITS_S, lambda _: SENDS_S, lambda _: SENDS_S)
    return TwoPools(_pool("prefill", 1), _pool("decode", 64), 1, 1, handover)


def _sent(times: list[float], answers: int = 4) -> Requests:
    count = len(times)
    return Requests(np.array(times), np.full(count, 1000), np.full(count, answers))


def _prompt_s(pools: TwoPools) -> float:
    prices = pools.prefill.prices
    return prices.step_s(RankStep(0, 0.0, 1000, 500_000)) + prices.engine_s(0)


def _decode_s(pools: TwoPools, sequences: int, context: float) -> float:
    prices = pools.decode.prices
    return prices.step_s(RankStep(sequences, sequences * context)) + prices.engine_s(sequences)


def test_a_lone_request_takes_its_prompt_the_way_over_and_a_step_a_token(pools: TwoPools) -> None:
    done = through_pools(pools, _sent([0.5]))
    steps = [_decode_s(pools, 1, 1000 + gained) for gained in range(4)]
    assert done.ttft_s[0] == pytest.approx(_prompt_s(pools) + WAITS_S + steps[0])
    assert done.latency_s[0] == pytest.approx(_prompt_s(pools) + WAITS_S + sum(steps))
    assert done.replicas == 2


def test_prompts_go_one_by_one_and_caches_share_the_ports(pools: TwoPools) -> None:
    slow = replace(pools, handover=Handover(lambda _: WAITS_S, lambda _: 1.0, lambda _: 0.0))
    done = through_pools(slow, _sent([0.0, 0.0, 0.0], answers=1))
    step_s = _decode_s(pools, 1, 1000)
    begins = [_prompt_s(pools) + each * 1.0 for each in range(3)]  # each cache keeps the sender's ports busy for 1 s
    assert done.first_s == pytest.approx([begin + WAITS_S + step_s for begin in begins])


def test_a_second_prefill_replica_sends_beside_the_first(pools: TwoPools) -> None:
    done = through_pools(replace(pools, prefills=2), _sent([0.0, 0.0], answers=1))
    both_s = _decode_s(pools, 2, 1000)
    assert done.first_s[0] == pytest.approx(_prompt_s(pools) + WAITS_S + _decode_s(pools, 1, 1000), rel=0.05)
    assert done.first_s[1] < _prompt_s(pools) + WAITS_S + SENDS_S + 2 * both_s


def test_prompts_wait_as_in_an_m_d_1_queue(pools: TwoPools) -> None:
    service_s, load = _prompt_s(pools), 0.6
    rate = load / service_s
    times_s = draw_arrivals([Stream(rate)], 6000 / rate, 0).times_s
    done = through_pools(pools, Requests.drawn(times_s, Lengths(1000), Lengths(1), 0))
    # DistServe (arXiv 2401.09670), section 3, then the way over and the first decode step.
    queue_s = service_s + rate * service_s**2 / (2 * (1 - load))
    after_s = WAITS_S + _decode_s(pools, 1, 1000)
    assert done.ttft_s.mean() == pytest.approx(queue_s + after_s, rel=0.03)


def test_every_request_is_answered_once_and_its_times_ascend(pools: TwoPools) -> None:
    times_s = draw_arrivals([Stream(30.0, cv=3.0)], 20.0, 1).times_s
    sent = Requests.drawn(times_s, Lengths(1000, cv=0.5), Lengths(50, cv=1.0), 0)
    runs = [through_pools(replace(pools, decodes=2), sent) for _ in range(2)]
    assert (runs[0].done_s == runs[1].done_s).all()
    assert (runs[0].sent_s < runs[0].first_s).all()
    assert (runs[0].first_s <= runs[0].done_s).all()


def test_clients_go_at_the_rate_of_the_slower_pool(pools: TwoPools) -> None:
    count = 32 * 20
    sent = Requests.drawn(np.zeros(count), Lengths(1000), Lengths(100, 0.5), 0)
    done = through_pools(pools, sent, clients=32)
    order = np.sort(done.done_s)[200:-200]
    prompts_rate = 1 / _prompt_s(pools)
    assert (len(order) - 1) / (order[-1] - order[0]) == pytest.approx(prompts_rate, rel=0.03)
    many = through_pools(replace(pools, prefills=8), sent, clients=32)
    order = np.sort(many.done_s)[200:-200]
    decode_rate = 32 / (_decode_s(pools, 32, 1040) * sent.output_tokens.mean())
    assert (len(order) - 1) / (order[-1] - order[0]) == pytest.approx(decode_rate, rel=0.2)
    assert (many.ttft_s.mean(), done.tpot_s.mean()) < (done.ttft_s.mean(), many.tpot_s.mean())


def test_a_client_s_next_request_is_decoded_beside_those_of_others(pools: TwoPools) -> None:
    requests = Requests(np.zeros(5), np.full(5, 1000), np.array([1000, 4, 4, 4, 4]))
    done = through_pools(replace(pools, prefills=2), requests, clients=2)
    assert (done.done_s[1:] < done.done_s[0]).all()
    assert done.ttft_s[2:] == pytest.approx(done.ttft_s[1], rel=0.2)  # whose prompt came with another


def test_who_lacks_room_in_the_decode_pool_is_computed_anew_there(pools: TwoPools) -> None:
    scheduler = Scheduler(SchedulerPolicy(block_tokens=1), 64, False)
    small = replace(pools, decode=replace(pools.decode, scheduler=scheduler, room_tokens=2250.0))
    done = through_pools(small, _sent([0.0, 0.0], answers=200))
    assert done.preempted == 1
    assert not np.isnan(done.done_s).any()


def test_a_client_whose_request_is_refused_by_either_pool_sends_the_next_one(pools: TwoPools) -> None:
    lengths = np.full(12, 1000)
    lengths[[0, 5]] = 10**7
    requests = Requests(np.zeros(12), lengths, np.full(12, 4))
    done = through_pools(pools, requests, clients=1)
    assert np.isnan(done.done_s).nonzero()[0].tolist() == [0, 5]
    small = replace(pools, decode=replace(pools.decode, room_tokens=500.0))
    assert np.isnan(through_pools(small, _sent([0.0] * 3), clients=1).done_s).all()
