"""Strategies that mean nothing are refused with one clear line; infeasible ones pass."""

from __future__ import annotations

import dataclasses
import tracemalloc
from typing import Any

import pytest

from sim.engines.engine_registry import in_space
from sim.layouts import layout_of
from sim.ops.heuristics import megatron_dims
from sim.simulate import evaluate
from sim.strategy import Strategy
from sim.strategy_checks import LARGEST, MOST_STAGE_GPUS, StrategyError, check_strategy
from sim.workload import Workload

DIMS = (2, 1, 1, 0, 2, 2, 2, 2, 1, 1, 0, 2)


@pytest.mark.parametrize("name", ["tp", "ep", "pp", "batch"])
@pytest.mark.parametrize("value", [0, -1, 2.0, 1.5, "8", None, True, 10**400])
def test_a_degree_or_batch_that_is_no_positive_integer_is_refused(moe: Workload, name: str, value: Any) -> None:
    strategy = dataclasses.replace(Strategy(8, 16, 2, 512, DIMS), **{name: value})
    most = "1,000,000,000" if name == "batch" else "1,048,576"
    with pytest.raises(StrategyError, match=rf"^{name}: expected a whole number from 1 to {most}, got {value!r}$"):
        check_strategy(moe, strategy)


@pytest.mark.parametrize("dims", [DIMS[:-1], (*DIMS, 0), ()])
def test_a_wrong_number_of_dims_names_the_ops(moe: Workload, dims: tuple[int, ...]) -> None:
    with pytest.raises(StrategyError, match=rf"expected 12 dims for gpt_moe_1_2t, got {len(dims)}.*qkv_proj"):
        check_strategy(moe, Strategy(1, 1, 1, 1, dims))


def test_a_dense_model_takes_ten_dims(dense: Workload) -> None:
    check_strategy(dense, Strategy(8, 1, 2, 64, megatron_dims(dense.model)))
    with pytest.raises(StrategyError, match="expected 10 dims for llama_3_1_405b, got 12"):
        check_strategy(dense, Strategy(8, 1, 2, 64, DIMS))


@pytest.mark.parametrize("value", [-1, 6, "1", None])
def test_a_choice_that_an_op_lacks_names_it(moe: Workload, value: Any) -> None:
    dims = (*DIMS[:3], value, *DIMS[4:])
    with pytest.raises(StrategyError, match=f"dim of o_proj must be 0 .* got {value!r}"):
        check_strategy(moe, Strategy(1, 1, 1, 1, dims))


@pytest.mark.parametrize("value", [1.0, True])
def test_a_choice_that_only_compares_equal_to_an_integer_is_refused(moe: Workload, value: Any) -> None:
    with pytest.raises(StrategyError, match="dim of o_proj"):
        check_strategy(moe, Strategy(1, 1, 1, 1, (*DIMS[:3], value, *DIMS[4:])))


@pytest.mark.parametrize(
    "strategy",
    [
        Strategy(3, 5, 7, 11, DIMS),  # divides nothing
        Strategy(1024, 512, 4096, 1, DIMS),  # fits no budget
        Strategy(1, 1, 1, 10**9, DIMS),  # fits no memory
    ],
)
def test_what_merely_does_not_divide_or_fit_passes(moe: Workload, strategy: Strategy) -> None:
    check_strategy(moe, strategy)


@pytest.mark.parametrize("space", ["joint", "extended", "vllm"])
@pytest.mark.parametrize("degrees", [(4, 10**6, 25 * 10**4), (999_983, 3, 1), (2, 999_983, 499_979), (1, 10**6, 10**6)])
@pytest.mark.parametrize("dim", [0, 1])
def test_the_largest_degrees_are_priced_in_little_memory(
    moe: Workload, degrees: tuple[int, int, int], dim: int, space: str
) -> None:
    tp, ep, dp = degrees
    strategy = Strategy(tp, ep, MOST_STAGE_GPUS, LARGEST, (dim,) * 12, dp=dp)
    check_strategy(moe, strategy)
    tracemalloc.start()
    try:
        assert not evaluate(in_space(moe, space), strategy).feasible
        assert tracemalloc.get_traced_memory()[1] < 300 * 10**6
    finally:
        tracemalloc.stop()


def test_a_stage_of_more_gpus_than_any_cluster_is_refused(moe: Workload) -> None:
    with pytest.raises(StrategyError, match=r"at most 1,048,576 GPUs of a stage, got tp \* dp \* cp = 2,097,152$"):
        check_strategy(moe, Strategy(2, 1, 1, 1, (0,) * 12, dp=MOST_STAGE_GPUS))
    assert layout_of(Strategy(1, LARGEST, 1, 256, (), dp=LARGEST)) == f"DEP{LARGEST}"
