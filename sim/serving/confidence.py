"""What a confidence asks of latencies: that a measured run keeps the limits with that probability.

A limit holds where the quantile of the latency, by the interval of `sim.prices.trust`, does not exceed it. At even odds
that quantile is the prediction. The interval widens with the share of the time that prompts take, which is known of any
steps; what a strategy's own kernels add to it is known where all of them are looked at (`sim.step.breakdown`).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np

from sim.arrays import Flags, Floats
from sim.evaluation import quantile
from sim.prices.priced import EXACT, Interval
from sim.prices.trust import StepInterval
from sim.step.breakdown import interval_of
from sim.workload import EVEN_ODDS, Workload

ROUNDING = 1e-9
"""Relative excess of a latency over its SLO that is put down to the order in which seconds were added up."""


@dataclass(frozen=True, slots=True, eq=False)
class Slower:
    """By what factor latencies of measured runs are longer than predicted at most, with a workload's confidence.

    Kernels are taken to be as sure as usual.

    Attributes:
        workload: Whose confidence, machine, engine and model.
        least: Of the time per token where no prompts take any of it; with prompts it is no less.
        first: Of the time to the first token.
        guarded: Whether some limit asks for more than the prediction.
        growth: Most by which the factor's logarithm grows from no prompts to prompts alone, at the steepest place.
    """

    workload: Workload
    least: float = 1.0
    first: float = 1.0
    guarded: bool = False
    growth: float = 0.0

    @property
    def tpot_limit_s(self) -> float:
        """Predicted time per token beyond which no strategy keeps its limit with the confidence."""
        return self.workload.tpot_limit_s / self.least

    @property
    def ttft_limit_s(self) -> float:
        """Predicted time to the first token beyond which none does."""
        return self.workload.ttft_limit_s / self.first

    def token(self, prompt_share: float) -> float:
        """The factor of the time per token, of which prompts take a share."""
        return _factor(self.workload, interval_of(self.workload), prompt_share) if self.guarded else 1.0

    def surely_s(self, tpot_s: Floats, prompt_shares: Floats) -> Floats:
        """Seconds per token with the confidence `[n]`, to the last bit where they may break the limit, else `ABOUT`."""
        surely_s = tpot_s * self.tokens_about(prompt_shares)
        if (near := np.flatnonzero(surely_s > self.workload.tpot_limit_s * (1 - 2 * ABOUT))).size:
            surely_s[near] = tpot_s[near] * _factor(self.workload, interval_of(self.workload), prompt_shares[near])
        return surely_s

    def may_keep(self, tpot_s: float, prompt_share: float, seen: float) -> bool:
        """Whether any steps may keep the limit of the time per token that take no less than some.

        Steps without prompts that take longer lower the share of prompts, and so the factor. They lengthen the time by
        more than that where its share without prompts, `1 - seen`, is no less than the factor's growth: time times
        factor is then least where both kinds of step are.

        Args:
            tpot_s: Predicted, of the shortest steps.
            prompt_share: Of it.
            seen: See `sim.serving.phases.Pace.seen`; no more than of longer steps.
        """
        if tpot_s > self.tpot_limit_s * (1 + ROUNDING):
            return False
        if not self.guarded or self.growth > 1 - seen:
            return True
        surely_s = tpot_s * float(self.tokens_about(np.array(prompt_share)))
        return surely_s <= self.workload.tpot_limit_s * (1 + ROUNDING) * (1 + ABOUT)

    def tokens_about(self, prompt_shares: Floats) -> Floats:
        """The same of very many, at most `ABOUT` off."""
        return np.interp(prompt_shares, *_table(self.workload)) if self.guarded else np.ones_like(prompt_shares)


ABOUT = 1e-6
"""Relative error of `Slower.tokens_about`: the factor is nearly exponential in the share."""
_PLACES = 513


def _factor(workload: Workload, interval: StepInterval, prompt_share: Any, kernels: Interval = EXACT) -> Any:
    """Of a confidence above even odds."""
    return quantile(workload.confidence, 1.0, (1.0, interval.end(1, prompt_share, kernels)))


@lru_cache(maxsize=1024)
def _table(workload: Workload) -> tuple[Floats, Floats]:
    shares = np.linspace(0.0, 1.0, _PLACES)
    return shares, np.zeros_like(shares) + _factor(workload, interval_of(workload), shares)


@lru_cache(maxsize=1024)
def slower(workload: Workload) -> Slower:
    """The factors of a workload; all are 1 at even odds, and where no latency is limited."""
    guarded = workload.confidence > EVEN_ODDS and min(workload.tpot_slo_s, workload.ttft_slo_s) < math.inf
    if not guarded:
        return Slower(workload)
    least, first = (_factor(workload, interval_of(workload), share) for share in (0.0, 1.0))
    _, factors = _table(workload)
    growth = float(np.diff(np.log(factors)).max()) * (_PLACES - 1)
    return Slower(workload, least, first, guarded, growth)


def surely_kept(workload: Workload, tpot_s: Floats, ttft_s: Floats, prompt_shares: Floats, longest: float) -> Flags:
    """Whether limits hold beyond any rounding though a strategy's own kernels may be off by a factor in few cases.

    Args:
        workload: Whose limits and confidence.
        tpot_s: Predicted of each strategy, as the others `[n]`.
        ttft_s: Predicted.
        prompt_shares: Of the time per token.
        longest: The factor, of the one whose kernels may be off most.
    """
    interval, own = interval_of(workload), (1.0, longest * (1 + ROUNDING))
    first: Flags = ttft_s * _factor(workload, interval, 1.0, own) * (1 + ROUNDING) <= workload.ttft_limit_s
    for shares in (prompt_shares.max(), prompt_shares):  # as if all had the largest, which is often enough
        token: Flags = tpot_s * _factor(workload, interval, shares, own) * (1 + ROUNDING) <= workload.tpot_limit_s
        if token.all():
            break
    return token & first


def at_confidence_s(
    workload: Workload, token: tuple[float, Interval], first: tuple[float, Interval]
) -> tuple[float, float]:
    """What latencies do not exceed with the confidence, each predicted and with its interval in seconds."""
    return quantile(workload.confidence, *token), quantile(workload.confidence, *first)
