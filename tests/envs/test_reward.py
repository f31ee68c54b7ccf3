import math

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from envs import ImprovementReward

throughputs = st.floats(1e-3, 1e6)


def test_equation_1_by_hand() -> None:
    reward = ImprovementReward(alpha=2.0, beta=3.0, penalty=50.0)
    assert reward(80.0, 40.0, feasible=True) == (2.0 * 80 + 3.0 * (80 - 40)) / 80
    assert reward(60.0, 80.0, feasible=True) == (2.0 * 60 + 3.0 * (60 - 80)) / 80
    assert reward(80.0, 80.0, feasible=True) == 2.0
    assert reward(40.0, 0.0, feasible=True) == 2.0 + 3.0
    assert reward(1e9, 80.0, feasible=False) == -50.0


@given(raw=throughputs, best=throughputs, scale=st.sampled_from([2.0**-10, 2.0**10]))
def test_the_unit_of_throughput_does_not_matter(raw: float, best: float, scale: float) -> None:
    reward = ImprovementReward()
    assert reward(raw * scale, best * scale, True) == reward(raw, best, True)


@given(raw=throughputs, best=st.just(0.0) | throughputs, alpha=st.floats(0.1, 10), beta=st.floats(0.1, 10))
def test_a_feasible_reward_lies_between_minus_beta_and_alpha_plus_beta(
    raw: float, best: float, alpha: float, beta: float
) -> None:
    value = ImprovementReward(alpha=alpha, beta=beta, penalty=20.0)(raw, best, True)
    assert -beta <= value <= (alpha + beta) * (1 + 1e-12)


@given(lower=throughputs, higher=throughputs, best=throughputs)
def test_more_throughput_earns_more(lower: float, higher: float, best: float) -> None:
    assume(higher > lower * 1.001)
    reward = ImprovementReward()
    assert reward(higher, best, True) > reward(lower, best, True)


@given(raw=throughputs, best=throughputs)
def test_an_infeasible_call_earns_less_than_any_feasible_one(raw: float, best: float) -> None:
    reward = ImprovementReward()
    assert reward(0.0, best, False) < reward(raw, best, True)


def test_a_throughput_of_zero_before_any_other_is_neither_good_nor_an_error() -> None:
    assert ImprovementReward()(0.0, 0.0, True) == 0.0


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"alpha": 0.0}, "alpha > 0"),
        ({"beta": -1.0}, "beta > 0"),
        ({"penalty": 1.0}, "penalty > beta"),
        ({"penalty": math.nan}, "finite"),
        ({"alpha": math.inf}, "finite"),
    ],
)
def test_weights_that_make_no_sense_are_refused(arguments: dict[str, float], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        ImprovementReward(**arguments)
