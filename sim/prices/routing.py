"""Which experts tokens visit: all alike, or some more than others, and what the busiest GPU gets of it."""

from __future__ import annotations

from functools import lru_cache
from heapq import heapify, heapreplace
from math import exp, log, log2, sqrt
from statistics import NormalDist

EXPONENT = 1.1
"""Of the power law that experts' popularity follows where routing is skewed. [assumed] measured were 1.01 and 1.2."""
_LEAST_SPAN = 200.0
"""Most over least popularity of an expert where few tokens were routed. [published] AIConfigurator's collector."""
_EVEN_TOKENS = _LEAST_SPAN / 0.8
"""Tokens up to which that is so."""
_PER_OCTAVE = 4
"""Numbers of tokens per octave at which loads with copies are worked out. [assumed] others err by 0.8 % at most"""


def drawn_experts(
    tokens: float, topk: float, experts: float, ep: float, *, skewed: bool, exponent: float = EXPONENT
) -> tuple[float, float, float]:
    """(active experts, rows, local experts) of one rank of `ep`.

    Args:
        tokens: Tokens of the whole ep group.
        topk: Experts that a token visits.
        experts: Experts of the layer.
        ep: Ranks that share them.
        skewed: False: even routing, in which there are as many active experts as rows, up to all. True: the busiest
            rank under popularities drawn from a power law, with experts found at random.
        exponent: Of that power law.
    """
    local, rows = experts / ep, tokens * topk / ep
    if not skewed:
        return min(local, rows), rows, local
    rows *= busiest_load(tokens, topk, experts, ep, exponent)
    return min(local * (1 - exp(-rows / local)), rows), rows, local


def busiest_load(
    tokens: float, topk: float, experts: float, ep: float, exponent: float = EXPONENT, redundant: int = 0
) -> float:
    """Rows of the busiest of `ep` ranks over the mean, where experts' popularity follows a power law.

    An expert never gets a token twice. Copies of the most popular experts share their rows; experts and copies are
    found at random, which an engine that also packs them by load does better. [assumed]

    More tokens are never fewer rows of the busiest rank: which expert a copy goes to changes by leaps, so with copies
    the rows are a line, in logarithms, between some numbers of tokens, and never fall from one to the next.

    >>> busiest_load(4096, 8, 256, 1), round(busiest_load(4096, 8, 256, 8), 2), round(busiest_load(4096, 8, 256, 64), 2)
    (1.0, 1.46, 4.55)
    """
    if ep <= 1:
        return 1.0
    if not redundant:
        return _load(tokens, topk, experts, ep, exponent, 0)
    octaves = _PER_OCTAVE * log2(max(tokens / _EVEN_TOKENS, 1.0))
    left = int(octaves)
    rows = [_log_rows(at, topk, experts, ep, exponent, redundant) for at in (left, left + 1)]
    return exp(rows[0] + (octaves - left) * (rows[1] - rows[0])) / max(tokens, _EVEN_TOKENS)


@lru_cache(maxsize=4096)
def _log_rows(at: int, topk: float, experts: float, ep: float, exponent: float, redundant: int) -> float:
    """Logarithm of the tokens times the busiest rank's load, at one of the numbers of tokens that are worked out."""
    tokens = _EVEN_TOKENS * 2 ** (at / _PER_OCTAVE)
    own = log(tokens * _load(tokens, topk, experts, ep, exponent, redundant))
    return max(own, _log_rows(at - 1, topk, experts, ep, exponent, redundant)) if at else own


def _load(tokens: float, topk: float, experts: float, ep: float, exponent: float, redundant: int) -> float:
    span, local = max(0.8 * tokens, _LEAST_SPAN), experts / ep
    if redundant:  # as if so many more experts were on a rank as make its rows as even
        local /= _spread_left(span, int(experts), redundant, exponent)
    return max(1.0, min(_largest_share(span, local, ep, exponent), experts / topk))


@lru_cache(maxsize=4096)
def _spread_left(span: float, experts: int, copies: int, exponent: float) -> float:
    """Variance of the rows of a rank with some copies over that without, in (0, 1].

    As in EPLB (DeepSeek-AI, `replicate_experts`), every copy goes to the expert with most rows for each copy of it; one
    that would make ranks less even is left idle. Popularities are the quantiles of the power law.
    """
    power = 1 - exponent
    popular = [((span**power - 1) * (at + 0.5) / experts + 1) ** (1 / power) for at in range(experts)]
    held = [(-each, 1) for each in popular]  # minus the rows of a copy, and copies
    heapify(held)
    squares, total, slots = sum([each * each for each in popular]), sum(popular), experts
    first = least = squares / total**2 - 1 / slots
    for _ in range(copies):
        rows, count = held[0]
        heapreplace(held, (rows * count / (count + 1), count + 1))
        squares -= rows * rows * count / (count + 1)
        slots += 1
        least = min(least, squares / total**2 - 1 / slots)
    return max(least / first, 1e-6)


@lru_cache(maxsize=4096)
def _largest_share(span: float, local: float, ranks: float, exponent: float) -> float:
    """Expected largest of `ranks` sums of `local` popularities between 1 and `span`, over the mean of all.

    A sum is taken for gamma distributed with the mean and variance of its parts, and its quantile by Wilson and
    Hilferty (1931) at the plotting position of the largest (Blom, 1958).
    """
    moment = [(span ** (power + 1 - exponent) - 1) / (power + 1 - exponent) for power in (0, 1, 2)]
    shape = local / (moment[2] * moment[0] / moment[1] ** 2 - 1)
    deviate = NormalDist().inv_cdf((ranks - 0.375) / (ranks + 0.25))
    largest = max(0.0, 1 - 1 / (9 * shape) + deviate / (3 * sqrt(shape))) ** 3
    return largest * ranks / (ranks - 1 + largest)
