"""Which experts tokens visit: all alike, or some more than others, and what the busiest GPU gets of it."""

from __future__ import annotations

from functools import lru_cache
from heapq import heapify, heappop, heapreplace
from math import ceil, exp, log, log2, sqrt
from statistics import NormalDist

EXPONENT = 1.1
"""Of the power law that experts' popularity follows where routing is skewed. [assumed] measured were 1.01 and 1.2."""
_LEAST_SPAN = 200.0
"""Most over least popularity of an expert where few tokens were routed. [published] AIConfigurator's collector."""
_EVEN_TOKENS = _LEAST_SPAN / 0.8
"""Tokens up to which that is so."""
_PER_OCTAVE = 4
"""Numbers of tokens per octave at which loads with copies are computed. [assumed] others err by 0.8 % at most"""


def drawn_experts(
    tokens: float,
    topk: float,
    experts: float,
    ep: float,
    *,
    skewed: bool,
    exponent: float = EXPONENT,
    all_choices: bool = False,
) -> tuple[float, float, float]:
    """(active experts, rows, local experts) of one rank of `ep`.

    >>> [round(drawn_experts(64, 8, 64, 16, skewed=False, all_choices=every)[1]) for every in (False, True)]
    [32, 256]

    Args:
        tokens: Tokens of the whole ep group.
        topk: Experts that a token visits.
        experts: Experts of the layer.
        ep: Ranks that share them.
        skewed: False: even routing, in which there are as many active experts as rows, up to all. True: the busiest
            rank under popularities drawn from a power law, with experts found at random.
        exponent: Of that power law.
        all_choices: Whether the rank multiplies all choices of the tokens that visit it, as some were measured, and not
            those of its own experts alone. Even routing deals a token's choices over as many ranks as can be.
    """
    local, rows = experts / ep, tokens * topk / ep
    if not skewed:
        return min(local, rows), min(tokens, rows) * topk if all_choices else rows, local
    rows *= busiest_load(tokens, topk, experts, ep, exponent)
    active = min(local * (1 - exp(-rows / local)), rows)
    if all_choices:
        missed = (1 - min(rows / (tokens * local), 1.0)) ** local  # share of tokens that visit none of its experts
        rows = max(rows, topk * tokens * (1 - missed))
    return active, rows, local


def busiest_load(
    tokens: float, topk: float, experts: float, ep: float, exponent: float = EXPONENT, redundant: int = 0
) -> float:
    """Rows of the busiest of `ep` ranks over the mean, where experts' popularity follows a power law.

    An expert never gets a token twice. Experts are found at random; with copies, these share the rows of the most
    popular ones, and all are packed by their loads, which are taken for known (EPLB). [published] DeepSeek-V3 decodes
    2.54 times as fast on 72 GPUs with it as without (LMSYS, 2025).

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
    """Logarithm of the tokens times the busiest rank's load, at one of the numbers of tokens that are computed."""
    tokens = _EVEN_TOKENS * 2 ** (at / _PER_OCTAVE)
    own = log(tokens * _load(tokens, topk, experts, ep, exponent, redundant))
    return max(own, _log_rows(at - 1, topk, experts, ep, exponent, redundant)) if at else own


def _load(tokens: float, topk: float, experts: float, ep: float, exponent: float, redundant: int) -> float:
    span = max(0.8 * tokens, _LEAST_SPAN)
    found = max(1.0, min(_largest_share(span, experts / ep, ep, exponent), experts / topk))
    if not redundant:
        return found
    drawn = 1 + _deviate(ep) / sqrt(tokens * topk / ep)  # a step's tokens are a sample of those that were counted
    return min(found, _packed_load(span, int(experts), redundant, int(ep), topk, exponent) * drawn)


@lru_cache(maxsize=4096)
def _packed_load(span: float, experts: int, copies: int, ranks: int, topk: float, exponent: float) -> float:
    """Rows of the busiest rank over the mean, where popularities are known, experts copied and packed by them.

    Every copy goes to the expert with most rows for each copy of it; then the one with most rows goes to the rank with
    fewest that has a place left. Popularities are the quantiles of the power law, at most those of an expert that every
    token visits.

    Source: EPLB (DeepSeek-AI), `replicate_experts` and `balanced_packing` over one group.
    """
    power = 1 - exponent
    popular = [((span**power - 1) * (at + 0.5) / experts + 1) ** (1 / power) for at in range(experts)]
    most = sum(popular) / topk
    heap = [(-min(each, most), 1) for each in popular]  # minus the rows of a copy, and copies
    heapify(heap)
    for _ in range(copies):
        rows, count = heap[0]
        heapreplace(heap, (rows * count / (count + 1), count + 1))
    places = ceil((experts + copies) / ranks)
    packed = [(0.0, 0)] * ranks  # rows and experts of the ranks that have a place left
    busiest = total = 0.0
    for rows in sorted(-rows for rows, count in heap for _ in range(count))[::-1]:
        load, taken = packed[0]
        load, taken = load + rows, taken + 1
        busiest, total = max(busiest, load), total + rows
        if taken < places:
            heapreplace(packed, (load, taken))
        else:
            heappop(packed)
    return busiest * ranks / total


def _deviate(ranks: float) -> float:
    """Standard deviations by which the largest of so many draws exceeds the mean (Blom, 1958)."""
    return NormalDist().inv_cdf((ranks - 0.375) / (ranks + 0.25))


@lru_cache(maxsize=4096)
def _largest_share(span: float, local: float, ranks: float, exponent: float) -> float:
    """Expected largest of `ranks` sums of `local` popularities between 1 and `span`, over the mean of all.

    A sum is taken for gamma distributed with the mean and variance of its parts, and its quantile by Wilson and
    Hilferty (1931) at the plotting position of the largest (Blom, 1958).
    """
    moment = [(span ** (power + 1 - exponent) - 1) / (power + 1 - exponent) for power in (0, 1, 2)]
    shape = local / (moment[2] * moment[0] / moment[1] ** 2 - 1)
    deviate = _deviate(ranks)
    largest = max(0.0, 1 - 1 / (9 * shape) + deviate / (3 * sqrt(shape))) ** 3
    return largest * ranks / (ranks - 1 + largest)
