"""The one strategy that stands for all that do the same: where every group has one GPU, each choice is none.

Strategies with the same canonical form have the same figures, to the bit: on a group of one GPU no tensor is cut, so an
op costs what it does whole whatever its choice, and nothing moves. The reverse is not claimed: strategies of different
forms may have equal figures (a degree spelled out as dp = ep, choices that a side of one GPU makes alike).

With tp = 1 all 3^12 dims of the joint space are one strategy. Counting them as many inflates a space, the share of
strategies that a search calls for the first time, and the search itself. Where attention's side or the experts' alone
has groups of one GPU, its choices change no figure either, but which ops are its own is the model's to say.
"""

from __future__ import annotations

from dataclasses import replace

from sim.strategy import ENGINES_VOCABULARY, FIRST_DECLARED, NONE, Strategy


def dims_matter(strategy: Strategy) -> bool:
    """Whether another choice for an op is another strategy; a declared one may run another kernel, and always is.

    >>> dims_matter(Strategy(1, 16, 2, 64, (0, 1))), dims_matter(Strategy(1, 16, 2, 64, (0, 1), cp=2, dp=8))
    (False, True)
    """
    return strategy.tp * strategy.cp > 1 or strategy.moe_tp > 1 or max(strategy.dims, default=0) >= FIRST_DECLARED


def canonical(strategy: Strategy) -> Strategy:
    """The strategy that does the same, with the choice none for every op if that changes nothing.

    >>> canonical(Strategy(1, 16, 2, 64, (0, 1, 1, 0))).dims
    (2, 2, 2, 2)
    """
    if dims_matter(strategy):
        return replace(strategy, vocabulary=()) if strategy.vocabulary == ENGINES_VOCABULARY else strategy
    return replace(strategy, dims=(NONE,) * len(strategy.dims), vocabulary=())
