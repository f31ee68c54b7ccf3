import math
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from envs import StrategySpace
from raysearch.testing.landscapes import DENSE, MOE, tiny_workload
from sim.config.catalog import load_workload
from sim.layers.choices import declare_choice, withdraw_choice
from sim.ops.layers import MOE_LAYER, op_names
from sim.strategy import Strategy

WORKLOADS = {name: load_workload(name) for name in (MOE, DENSE)}
SPACES = {name: StrategySpace(workload) for name, workload in WORKLOADS.items()}


def actions_of(space: StrategySpace) -> st.SearchStrategy[np.ndarray]:
    return st.tuples(*(st.integers(0, size - 1) for size in space.sizes)).map(np.array)


@pytest.mark.parametrize("name", SPACES)
def test_coordinates_are_the_degrees_then_the_fused_ops(name: str) -> None:
    space = SPACES[name]
    assert space.names == ("tp", "ep", "pp", "batch", *op_names(WORKLOADS[name].model))
    assert space.nvec.dtype == np.int64
    assert tuple(space.nvec) == space.sizes
    assert set(space.sizes[4:]) == {3}


def test_a_dense_model_has_ten_choices_and_a_mixture_of_experts_twelve() -> None:
    assert len(SPACES[DENSE].sizes) == 4 + 10
    assert len(SPACES[MOE].sizes) == 4 + 12


def test_size_is_the_exact_number_of_strategies() -> None:
    assert SPACES[MOE].size == 8 * 5 * 10 * 13 * 3**12
    assert StrategySpace(tiny_workload()).size == 2 * 2 * 3**10


def test_size_does_not_overflow() -> None:
    huge = replace(WORKLOADS[MOE], degrees=replace(WORKLOADS[MOE].degrees, batch=tuple(range(1, 10**6))))
    huge = replace(huge, degrees=replace(huge.degrees, pp=tuple(range(1, 10**5)), ep=tuple(range(1, 10**5))))
    space = StrategySpace(huge)
    assert space.size == math.prod(space.sizes) > 2**63
    assert space.rank(space.nvec - 1) == space.size - 1


@given(action=actions_of(SPACES[MOE]))
def test_decode_then_encode_is_the_identity(action: np.ndarray) -> None:
    space = SPACES[MOE]
    encoded = space.encode(space.decode(action))
    assert encoded.dtype == np.int64
    np.testing.assert_array_equal(encoded, action)


@given(action=actions_of(SPACES[DENSE]))
def test_decode_reads_the_tables(action: np.ndarray) -> None:
    degrees = WORKLOADS[DENSE].degrees
    strategy = SPACES[DENSE].decode(action)
    assert strategy.tp == degrees.tp[action[0]]
    assert strategy.ep == degrees.ep[action[1]]
    assert strategy.pp == degrees.pp[action[2]]
    assert strategy.batch == degrees.batch[action[3]]
    assert strategy.dims == tuple(action[4:])


@given(first=actions_of(SPACES[MOE]), second=actions_of(SPACES[MOE]))
def test_only_equal_actions_share_a_rank(first: np.ndarray, second: np.ndarray) -> None:
    space = SPACES[MOE]
    assert 0 <= space.rank(first) < space.size
    assert (space.rank(first) == space.rank(second)) == np.array_equal(first, second)


@given(action=actions_of(SPACES[MOE]), seed=st.integers(0, 2**32))
def test_a_neighbour_differs_in_exactly_one_coordinate_and_stays_in_the_space(action: np.ndarray, seed: int) -> None:
    space = SPACES[MOE]
    before = action.copy()
    neighbour = space.neighbour(action, np.random.default_rng(seed))
    assert np.count_nonzero(neighbour != action) == 1
    space.decode(neighbour)
    np.testing.assert_array_equal(action, before)


def test_neighbours_reach_every_other_value_of_every_coordinate_and_skip_those_with_one_value() -> None:
    space, rng = StrategySpace(tiny_workload()), np.random.default_rng(0)
    origin = np.zeros(14, np.int64)
    reached = {tuple(space.neighbour(origin, rng)) for _ in range(1000)}
    assert len(reached) == 1 + 1 + 2 * 10


def test_samples_cover_every_value_and_follow_the_rng() -> None:
    space = SPACES[MOE]
    rng = np.random.default_rng(0)
    samples = np.array([space.sample(rng) for _ in range(500)])
    assert [len(set(column)) for column in samples.T] == list(space.sizes)
    np.testing.assert_array_equal(samples[0], space.sample(np.random.default_rng(0)))


def test_gymnasium_sees_the_same_space() -> None:
    space = SPACES[MOE]
    np.testing.assert_array_equal(space.action_space.nvec, space.nvec)
    assert space.action_space.contains(space.sample(np.random.default_rng(0)))


def test_changing_nvec_leaves_the_space_alone() -> None:
    space = StrategySpace(tiny_workload())
    space.nvec[:] = 0
    assert tuple(space.nvec) == space.sizes


@pytest.mark.parametrize(
    ("action", "message"),
    [
        (np.zeros(13, np.int64), r"shape \(14,\), got shape \(13,\)"),
        (np.zeros(14), "integer action .* float64"),
        (np.array([1, *[0] * 13]), r"action\[0\] \(tp\) is 1, expected one of 0 to 0"),
        (np.array([0, 0, 0, -1, *[0] * 10]), r"action\[3\] \(batch\) is -1, expected one of 0 to 1"),
        (np.array([*[0] * 13, 3]), r"action\[13\] \(\w+\) is 3"),
    ],
)
def test_an_action_outside_the_space_is_refused_by_name(action: np.ndarray, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        StrategySpace(tiny_workload()).decode(action)


@pytest.mark.parametrize(
    ("strategy", "message"),
    [
        (Strategy(1, 1, 3, 1, (0,) * 10), r"pp is 3, but .* searches only \(1, 2\)"),
        (Strategy(1, 1, 1, 1, (0,) * 12), "expected 10 dims, got 12"),
        (Strategy(1, 1, 1, 1, (5,) * 10), r"attn_norm is 5, but .* searches only \(0, 1, 2\)"),
    ],
)
def test_a_strategy_outside_the_tables_is_refused_by_name(strategy: Strategy, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        StrategySpace(tiny_workload()).encode(strategy)


# --- the extended space -------------------------------------------------------------------------------

EXTENDED = StrategySpace(replace(WORKLOADS[MOE], space="extended"))


def test_the_extended_space_appends_attention_s_degrees_and_widens_gemms() -> None:
    assert EXTENDED.names == (*SPACES[MOE].names, "cp", "dp")
    sizes = dict(zip(EXTENDED.names, EXTENDED.sizes, strict=True))
    assert [name for name, size in sizes.items() if size == 6] == ["qkv_proj", "o_proj", "ffn1", "ffn2"]
    assert EXTENDED.size == 8 * 5 * 10 * 13 * 3**8 * 6**4 * 7 * 8


@given(action=actions_of(EXTENDED))
def test_extended_actions_decode_and_encode_back(action: np.ndarray) -> None:
    np.testing.assert_array_equal(EXTENDED.encode(EXTENDED.decode(action)), action)


@given(action=actions_of(SPACES[MOE]))
def test_every_strategy_of_the_paper_is_the_same_one_in_the_extended_space(action: np.ndarray) -> None:
    strategy = SPACES[MOE].decode(action)
    assert EXTENDED.decode(EXTENDED.encode(strategy)) == strategy


def test_the_paper_s_space_refuses_an_extended_strategy() -> None:
    strategy = replace(SPACES[MOE].decode(np.zeros(16, np.int64)), cp=2)
    with pytest.raises(ValueError, match="searches the space 'joint': cp is 1 and dp is ep"):
        SPACES[MOE].encode(strategy)


def test_a_declared_choice_is_an_action_of_the_extended_space() -> None:
    workload = replace(load_workload("gpt_moe_1_2t_16k"), space="extended")
    op = MOE_LAYER.op("ffn_norm")
    plain = StrategySpace(workload)
    choice = declare_choice(op, MOE_LAYER, "striped", "SS(0,2) -> SS(0,2)")
    try:
        space = StrategySpace(workload)
        assert space.size == plain.size // 3 * 4
        action = np.zeros(len(space.names), dtype=np.int64)
        action[space.names.index("ffn_norm")] = 3
        strategy = space.decode(action)
        assert strategy.dims[5] == choice
        np.testing.assert_array_equal(space.encode(strategy), action)
    finally:
        withdraw_choice(op, "striped")


def test_actions_together_stand_for_the_strategies_of_one_by_one():
    moe = WORKLOADS[MOE]
    extended = replace(moe, space="extended")
    for space in (StrategySpace(moe), StrategySpace(extended), StrategySpace(moe, fixed_dims=(1,) * 12)):
        rng = np.random.default_rng(4)
        actions = np.array([space.sample(rng) for _ in range(20)])
        assert list(space.strategies(actions)) == [space.decode(action) for action in actions]


def test_actions_together_are_checked():
    space = SPACES[MOE]
    actions = np.zeros((3, len(space.sizes)), np.int64)
    actions[1, 2] = space.sizes[2]
    with pytest.raises(ValueError, match=r"action\[2\] \(pp\)"):
        space.strategies(actions)
    with pytest.raises(ValueError, match=r"expected integer actions \[n, 16\], got shape \(16,\)"):
        space.strategies(actions[0])
