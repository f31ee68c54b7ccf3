"""Rows of the busiest rank: as drawing popularities finds them, growing with what should make them grow."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sim.prices.routing import _packed_load, busiest_load, drawn_experts


def drawn_load(tokens: int, topk: int, experts: int, ep: int, exponent: float) -> float:
    """Geometric mean over 400 draws of popularities."""
    rng, power = np.random.default_rng(0), 1 - exponent
    span = max(0.8 * tokens, 200)
    popularity = ((span**power - 1) * rng.random((400, experts)) + 1) ** (1 / power)
    rows = np.minimum(popularity / popularity.sum(axis=1, keepdims=True) * tokens * topk, tokens)
    busiest = rows.reshape(400, ep, experts // ep).sum(axis=2).max(axis=1)
    return float(np.exp(np.log(busiest).mean()) / (tokens * topk / ep))


@pytest.mark.parametrize("exponent", [1.01, 1.2])
@pytest.mark.parametrize(
    ("tokens", "topk", "experts", "ep"),
    [(1024, 8, 256, 8), (16384, 8, 256, 8), (16384, 8, 256, 64), (8192, 8, 128, 16), (8192, 22, 512, 32)],
)
def test_the_busiest_rank_gets_what_drawing_popularities_gives_it(
    tokens: int, topk: int, experts: int, ep: int, exponent: float
) -> None:
    drawn = drawn_load(tokens, topk, experts, ep, exponent)
    assert busiest_load(tokens, topk, experts, ep, exponent) == pytest.approx(drawn, rel=0.15)


@settings(derandomize=True, deadline=None)
@given(
    st.floats(1, 1e6),
    st.sampled_from([1, 2, 8]),
    st.sampled_from([8, 16, 64, 256]),
    st.sampled_from([1, 2, 4, 8]),
    st.sampled_from([1.0 + 1e-9, 1.3, 7.0]),
)
def test_more_tokens_never_give_a_rank_fewer_rows(
    tokens: float, topk: int, experts: int, ep: int, factor: float
) -> None:
    few, more = (drawn_experts(n, topk, experts, ep, skewed=True) for n in (tokens, tokens * factor))
    even = drawn_experts(tokens, topk, experts, ep, skewed=False)
    assert more[0] >= few[0] * (1 - 1e-12)
    assert more[1] >= few[1] * (1 - 1e-12)
    assert even[1] * (1 - 1e-12) <= few[1] <= tokens * few[2] * (1 + 1e-12)  # an expert never gets a token twice
    assert 0 < few[0] <= few[2]
    whole = drawn_experts(tokens, topk, experts, ep, skewed=True, all_choices=True)  # of the tokens that visit it
    assert few[1] <= whole[1] <= tokens * topk * (1 + 1e-12)
    assert whole == few if ep == 1 else whole[0] == few[0]


def test_a_rank_that_holds_all_experts_gets_all_rows_whatever_the_routing() -> None:
    assert busiest_load(4096, 8, 128, 1) == 1.0
    assert drawn_experts(64, 8, 128, 1, skewed=True)[1] == drawn_experts(64, 8, 128, 1, skewed=False)[1] == 512


@pytest.mark.parametrize(("experts", "topk", "ep"), [(256, 8, 32), (128, 8, 16), (8, 2, 4)])
def test_copies_of_experts_even_out_the_ranks(experts: int, topk: int, ep: int) -> None:
    loads = [busiest_load(4096, topk, experts, ep, redundant=copies) for copies in (0, ep, 2 * ep, 4 * ep)]
    assert loads[0] == busiest_load(4096, topk, experts, ep)
    assert all(1 <= load < loads[0] for load in loads[1:])
    assert loads[-1] < 1.2


def test_the_heaviest_copies_go_to_the_emptiest_ranks() -> None:
    """Popularities 1 to 8 of eight experts, two copies and five ranks of two places, packed by hand."""
    drawn = [((1000**-0.1 - 1) * (at + 0.5) / 8 + 1) ** -10 for at in range(8)]
    *others, second, first = (min(each, sum(drawn) / 2) for each in drawn)
    kept = sorted(
        [*others, second, first / 3, first / 3, first / 3]
        if first / 2 > second
        else [*others, second / 2, second / 2, first / 2, first / 2],
        reverse=True,
    )
    ranks = [kept[at] + kept[9 - at] for at in range(5)]  # ten of them: the heaviest five, then the lightest first
    assert _packed_load(1000, 8, 2, 5, 2, 1.1) == pytest.approx(max(ranks) * 5 / sum(kept), rel=1e-9)


@pytest.mark.parametrize("copies", [0, 1, 8, 64])
@pytest.mark.parametrize(("experts", "topk", "ep"), [(256, 8, 32), (256, 8, 2), (8, 2, 2), (16, 1, 16), (512, 10, 128)])
def test_more_tokens_never_give_the_busiest_rank_fewer_rows(copies: int, experts: int, topk: int, ep: int) -> None:
    tokens = np.exp(np.arange(0, np.log(1e8), 0.06))
    rows = np.array([n * busiest_load(n, topk, experts, ep, redundant=copies) for n in tokens.tolist()])
    assert (rows[1:] >= rows[:-1] * (1 - 1e-12)).all()
