"""One pool that re-shards: as brute force has it, its limits, and what moving weights costs."""

from __future__ import annotations

import itertools
import math
from dataclasses import replace

import pytest

from sim.pools.best_pools import best_in_turns
from sim.pools.candidates import Replica
from sim.pools.matching import Limits
from sim.pools.resharding import Host, Resharded, best_resharded, weights_moved_s
from sim.strategy import Strategy
from sim.workload import Workload
from tests.sim.pools.conftest import TRAFFIC, BothPools

HOST = Host()
DIMS = (2,) * 10


def in_turns(both: BothPools, limits: Limits, host: Host) -> Resharded | None:
    return best_in_turns(both.workload, TRAFFIC, limits, host)


def cycle(
    both: BothPools, left: Replica, right: Replica, waves: int, host: Host = HOST
) -> tuple[float, float, float, float]:
    """(requests/s, TPOT, TTFT, bytes on the hosts) of a replica's cycle, its times added up one by one."""
    strategy, cache = right.evaluation.strategy, both.cache_bytes
    wave = strategy.batch * strategy.pp
    load_s = wave * cache / (left.gpus * host.bytes_per_s)
    prompts_s = waves * max(wave / left.requests_per_s, load_s)
    there_s = weights_moved_s(both.workload, left.evaluation.strategy, strategy)
    back_s = weights_moved_s(both.workload, strategy, left.evaluation.strategy)
    answers_s = [200 * right.latency_s] + [max(200 * right.latency_s, load_s)] * (waves - 1)
    ends_s = list(itertools.accumulate(answers_s, initial=there_s + load_s))[1:]
    ends_s = [end + 200 * right.latency_s - each for end, each in zip(ends_s, answers_s, strict=True)]
    apart_s = there_s + load_s + sum(answers_s) + back_s
    tpot_s = (prompts_s / 2 + sum(ends_s) / waves) / 200
    return waves * wave / (prompts_s + apart_s), tpot_s, apart_s / 2 + 1.5 * left.latency_s, waves * wave * cache


@pytest.mark.parametrize("limits", [Limits(8), Limits(8, 0.1, 12.0), Limits(4, 0.05, 3.0)], ids=str)
def test_the_best_cycle_is_that_of_brute_force(both: BothPools, limits: Limits) -> None:
    host, best = Host(bytes=30e9), 0.0
    for left, right in itertools.product(both.prefills, both.waves):
        if left.gpus == right.gpus <= limits.gpus:
            for waves in range(1, 13):
                rate, tpot_s, ttft_s, kept = cycle(both, left, right, waves, host)
                if tpot_s <= limits.tpot_s and ttft_s <= limits.ttft_s and kept <= host.bytes * left.gpus:
                    best = max(best, rate * (limits.gpus // left.gpus))
    found = in_turns(both, limits, host)
    assert found is not None
    if found.waves <= 12:
        assert found.requests_per_s == pytest.approx(best, rel=1e-9)
    assert found.requests_per_s >= best * (1 - 1e-9)


def test_figures_of_a_cycle_are_its_times_added_up(both: BothPools) -> None:
    found = in_turns(both, Limits(8, 0.2, 20.0), HOST)
    assert isinstance(found, Resharded)
    rate, tpot_s, ttft_s, _ = cycle(both, found.prefill, found.decode, found.waves)
    assert found.requests_per_s == pytest.approx(rate * found.replicas)
    assert (found.tpot_s, found.ttft_s) == (pytest.approx(tpot_s), pytest.approx(ttft_s))
    assert found.cycle_requests == pytest.approx(found.requests_per_s / found.replicas * found.cycle_s)


def test_without_a_change_of_strategy_nothing_moves_and_the_phases_share_the_time(both: BothPools) -> None:
    endless = Host(bytes=math.inf, bytes_per_s=math.inf)
    left = next(each for each in both.prefills if each.gpus == 2 and each.evaluation.strategy.pp == 1)
    strategy = left.evaluation.strategy
    right = next(each for each in both.waves if replace(each.evaluation.strategy, batch=strategy.batch) == strategy)
    found = best_resharded(
        both.workload, [left], [right], Limits(2), output_tokens=200, cache_bytes=both.cache_bytes, host=endless
    )
    assert found is not None
    assert found.switch_s == 0
    assert found.requests_per_s == pytest.approx(1 / (1 / left.requests_per_s + 1 / right.requests_per_s))


def test_more_time_and_more_memory_on_the_hosts_never_hurt(both: BothPools) -> None:
    def rate(ttft_s: float, host_bytes: float) -> float:
        found = in_turns(both, Limits(4, 0.5, ttft_s), Host(bytes=host_bytes))
        return found.requests_per_s if found else 0.0

    rates = [[rate(ttft_s, room) for ttft_s in (0.5, 2.0, 40.0)] for room in (1e9, 400e9)]
    assert all(row == sorted(row) for row in rates)
    assert all(list(column) == sorted(column) for column in zip(*rates, strict=True))
    assert rates[0][0] < rates[-1][-1]


def test_moving_weights_costs_nothing_between_equal_layouts_and_more_where_more_moves(toy_dense: Workload) -> None:
    def seconds(source: tuple[int, int], target: tuple[int, int]) -> float:
        ends = [Strategy(tp, 1, pp, 1, DIMS) for tp, pp in (source, target)]
        return weights_moved_s(toy_dense, *ends)

    assert seconds((4, 2), (4, 2)) == 0
    assert seconds((4, 2), (2, 4)) > 0
    # All-to-all over 8: each GPU keeps an eighth of its eighth, and sends the rest at 40 GB/s.
    weights = 4 * (64 * 192 + 128 * 64 + 64 * 192 + 96 * 64) + 2 * 2 * 1000 * 64
    assert seconds((8, 1), (1, 8)) == pytest.approx(2e-6 + weights / 8 * 7 / 8 / 40e9, rel=0.5)
