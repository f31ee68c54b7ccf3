"""How far a black box departs from what was expected, learned from its answers: a Gaussian process on the residuals.

Strategies err together: by a factor of the whole machine, by one for each term of their time, and the more the nearer
they lie; so do the factors of the terms, as links are slower by more at some sizes than at others. How much in all is
not known before, so it is weighed with every answer, over a grid of scales.

The log of a time is not linear in the logs of its terms' factors: links that are ten times slower hide in a strategy
that hardly sends and are all of one that does. So it is linearised where the answers say the factors are, not at 1.

Source: Rasmussen and Williams, "Gaussian Processes for Machine Learning" (2006), sections 2.2 and 5.4; the iterated
linearisation: Bell and Cathey, "The Iterated Kalman Filter Update as a Gauss-Newton Method" (1993).
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from typing import NamedTuple, final

import numpy as np
from scipy.linalg import solve_triangular

from raysearch.searchers.prior.network import ResidualKernel
from raysearch.searchers.prior.strategy_features import (
    CHOICE_PLACES,
    FEATURE_TERMS,
    LEAST_LOG_SHARE,
    OP_CHOICES,
    SHARES,
    Reals,
)

_MACHINE_SCALES = (0.1, 0.3, 1.0, 3.0, 10.0)
"""[assumed] Of errors that all strategies share: from a black box that is the simulator to one twice as slow."""
_OWN_SCALES = (0.3, 1.0, 2.5, 6.0)
"""[assumed] Of errors that go with degrees and choices."""
NOISES = (1e-3, 0.02, 0.06)
"""[assumed] Standard deviations of the log of an answer asked for twice: a simulator's, and two of measurements."""
_VARIES = 0.2
"""Of the variance of a term's factor, the part that similar strategies alone share: kernels and messages of other sizes
are slower by other factors. [fitted] on 15 random machines kept from training: the log density of an answer after two
others, as likely of each, is 1.09 (without it 0.28), after five 1.67 (1.71)."""
_LOG_WIDTH = 1.5
"""[assumed] Nats by which a scale is unlikely whose log is one off."""
_LINEARISED, _LONGEST_STEP = 6, 1.0
"""Rounds in which the factors of a machine's terms are found, and nats by which they move in one. [assumed]"""
_REFIT = 1.15
"""Growth of the answers after which scales are weighed again."""
_BELIEVED, _LEAST = 6, 0.03
"""Combinations of scales that are believed at once, and the least probability of one. [assumed]"""


class Scales(NamedTuple):
    """What multiplies the kernel, and the answers' noise."""

    machine: float = 1.0
    own: float = 1.0
    noise: float = NOISES[0]


def covariance_parts(kernel: ResidualKernel, one: Reals, other: Reals) -> tuple[Reals, Reals]:
    """What all strategies share, and what near ones do, `[n, m]` each."""
    alike = np.exp(one[:, SHARES].astype(np.float64)) @ np.exp(other[:, SHARES].astype(np.float64)).T
    apart = _squared(one[:, CHOICE_PLACES], other[:, CHOICE_PLACES]) / (2 * kernel.length**2)
    # Choices are shares of layers: half the squared distance is the number of ops that differ, where all layers agree.
    differ = _squared(one[:, OP_CHOICES], other[:, OP_CHOICES]) / 2
    near, same = np.exp(-apart), np.exp(-differ / kernel.ops)
    shared = kernel.shared + kernel.terms * alike * (1 - _VARIES * (1 - near * same))
    return shared, near * (kernel.degrees + kernel.choices * same) + kernel.own * (apart + differ < 1e-9)


def reproportioned(inputs: Reals, factors: Reals) -> tuple[Reals, Reals]:
    """Strategies as they are on a machine whose terms take longer.

    Args:
        inputs: Of the network, `[n, F]`.
        factors: Logs of how many times as long each of `FEATURE_TERMS` takes, `[FACTOR_COUNT]`.

    Returns:
        The inputs with `SHARES` of that machine; and the log of the step's time over the expected one, less what is
        linear in `factors` with those shares, `[n]`.
    """
    terms = inputs[:, SHARES].astype(np.float64) + factors
    step = np.logaddexp.reduce(terms, axis=1)
    found, shares = inputs.copy(), terms - step[:, None]
    found[:, SHARES] = np.maximum(shares, LEAST_LOG_SHARE)
    return found, step - np.exp(shares) @ factors


def _squared(one: Reals, other: Reals) -> Reals:
    one, other = one.astype(np.float64), other.astype(np.float64)
    norms = (one**2).sum(1)[:, None] + (other**2).sum(1)[None]
    return np.maximum(norms - 2 * one @ other.T, 0.0)


def log_evidence(matrix: Reals, residuals: Reals) -> float:
    """Log density of residuals `[n]` under a covariance `[n, n]`."""
    lower = np.linalg.cholesky(matrix)
    whitened = solve_triangular(lower, residuals, lower=True)
    return float(-whitened @ whitened / 2 - np.log(np.diag(lower)).sum() - len(residuals) * math.log(2 * math.pi) / 2)


class _Hypothesis(NamedTuple):
    """Scales, how likely they are, and what follows of the answers under them.

    Attributes:
        weight: Probability, all hypotheses together 1.
        scales: See `Scales`.
        lower: Of the answers' covariance, `[n, n]`.
        whitened: The answers in its terms, `[n]`.
    """

    weight: float
    scales: Scales
    lower: Reals
    whitened: Reals


def log_marginal(kernel: ResidualKernel, inputs: Reals, residuals: Reals) -> float:
    """Log density of the residuals `[n]` of a workload whose scales are unknown, as in a search before its answers."""
    parts = covariance_parts(kernel, inputs, inputs)
    least = list(_scales(NOISES[:1]))
    logs = [log_evidence(_matrix(parts, each), residuals) - _unlikely(each) for each in least]
    total = np.logaddexp.reduce([-_unlikely(each) for each in least])
    return float(np.logaddexp.reduce(logs) - total)


@final
class ResidualProcess:
    """What is known of the residuals of one figure.

    No one choice of scales is trusted: all that the answers make likely are believed, each as far as it is. So a black
    box that is as expected is not taken for another after a few odd answers.

    Args:
        kernel: How they go together.
        noises: Standard deviations of the log of an answer that may be.

    Attributes:
        weighed: Scales and their probabilities, the likeliest first.
        fitted: Answers that they were weighed by.
        factors: Likeliest logs of how many times as long each of `FEATURE_TERMS` takes as expected, `[FACTOR_COUNT]`.
    """

    def __init__(self, kernel: ResidualKernel, noises: Sequence[float] = NOISES) -> None:
        self._kernel, self._noises = kernel, noises
        self.inputs: Reals = np.zeros((0, 0), np.float32)
        self.values: Reals = np.zeros(0)
        self._there = self.inputs  # as they are on a machine of `factors`
        self.weighed = _normalised([(-_unlikely(scales), scales) for scales in _scales(noises)])
        self.fitted = 0
        self.factors: Reals = np.zeros(len(FEATURE_TERMS))
        self._hypotheses: list[_Hypothesis] = []

    @property
    def scales(self) -> Scales:
        """The likeliest."""
        return self.weighed[0][1]

    def learn(self, inputs: Reals, values: Reals) -> None:
        """Takes all answers again: the network's inputs `[n, F]` and residuals `[n]`."""
        count = len(values)
        if not count:
            return
        self.factors = np.zeros(len(FEATURE_TERMS))
        weighs = count <= 12 or count >= _REFIT * self.fitted
        for step in range(_LINEARISED):
            there, beyond = reproportioned(inputs, self.factors)
            parts = covariance_parts(self._kernel, there, there)
            if weighs and step in (0, _LINEARISED - 1):
                self.weighed, self.fitted = self._weighed(parts, values - beyond), count
            found = self._likeliest(there, values - beyond, parts)
            self.factors = self.factors + np.clip(found - self.factors, -_LONGEST_STEP, _LONGEST_STEP)
        self._take(inputs, values)

    def _likeliest(self, there: Reals, values: Reals, parts: tuple[Reals, Reals]) -> Reals:
        """Mean of `factors` under the likeliest scales, by what is linear in them."""
        lower = np.linalg.cholesky(_matrix(parts, self.scales))
        alone = solve_triangular(lower, solve_triangular(lower, values, lower=True), lower=True, trans=1)
        return self.scales.machine**2 * self._kernel.terms * (np.exp(there[:, SHARES].astype(np.float64)).T @ alone)

    def believe(self, inputs: Reals) -> None:
        """Takes what is expected of calls in flight `[n, F]` for their answers, so that others look elsewhere."""
        expected, _ = self.expected(inputs)
        self._take(np.concatenate([self.inputs, inputs]), np.concatenate([self.values, expected]))

    def _take(self, inputs: Reals, values: Reals) -> None:
        self.inputs, self.values, self._hypotheses = inputs, values, []
        self._there, beyond = reproportioned(inputs, self.factors)
        parts, values = covariance_parts(self._kernel, self._there, self._there), values - beyond
        for weight, scales in self.weighed:
            lower = np.linalg.cholesky(_matrix(parts, scales))
            self._hypotheses.append(_Hypothesis(weight, scales, lower, solve_triangular(lower, values, lower=True)))

    def _weighed(self, parts: tuple[Reals, Reals], values: Reals) -> list[tuple[float, Scales]]:
        return _normalised(
            [(log_evidence(_matrix(parts, each), values) - _unlikely(each), each) for each in _scales(self._noises)]
        )

    def under_each(self, inputs: Reals) -> list[tuple[float, Reals, Reals]]:
        """Of every hypothesis its probability, and mean and standard deviation `[n]` of the residuals of strategies."""
        kernel = self._kernel
        inputs, beyond = reproportioned(inputs, self.factors)
        ends = kernel.shared + kernel.terms * np.exp(2 * inputs[:, SHARES].astype(np.float64)).sum(1)
        alone = kernel.degrees + kernel.choices + kernel.own
        found: list[tuple[float, Reals, Reals]] = []
        if not self._hypotheses:
            for weight, scales in self.weighed:
                prior = scales.machine**2 * ends + scales.own**2 * alone
                found.append((weight, np.zeros(len(inputs)), np.sqrt(prior)))
            return found
        parts = covariance_parts(kernel, self._there, inputs)
        for weight, scales, lower, whitened in self._hypotheses:
            gain = solve_triangular(lower, scales.machine**2 * parts[0] + scales.own**2 * parts[1], lower=True)
            prior = scales.machine**2 * ends + scales.own**2 * alone
            left = np.maximum(prior - (gain**2).sum(0), 1e-8)
            found.append((weight, beyond + gain.T @ whitened, np.sqrt(left)))
        return found

    def expected(self, inputs: Reals) -> tuple[Reals, Reals]:
        """Mean and standard deviation `[n]` of the residuals of strategies, without the answers' noise."""
        each = self.under_each(inputs)
        mean: Reals = sum((weight * own for weight, own, _ in each), np.zeros(len(inputs)))
        square: Reals = sum((weight * (own**2 + sd**2) for weight, own, sd in each), np.zeros(len(inputs)))
        return mean, np.sqrt(np.maximum(square - mean**2, 1e-8))


def _scales(noises: Sequence[float]) -> Iterator[Scales]:
    return itertools.starmap(Scales, itertools.product(_MACHINE_SCALES, _OWN_SCALES, noises))


def _unlikely(scales: Scales) -> float:
    """Minus the log of the probability of scales before any answer, but for a constant."""
    apart = math.log(scales.machine) ** 2 + math.log(scales.own) ** 2
    return (apart + 0.5 * math.log(scales.noise / NOISES[0])) / _LOG_WIDTH


def _normalised(found: list[tuple[float, Scales]]) -> list[tuple[float, Scales]]:
    """Log probabilities as probabilities: of the likeliest scales, the likeliest first."""
    found = sorted(found, key=lambda each: -each[0])[:_BELIEVED]
    weights = np.exp(np.array([log for log, _ in found]) - found[0][0])
    weights /= weights.sum()
    return [(float(weight), each) for weight, (_, each) in zip(weights, found, strict=True) if weight > _LEAST]


def _matrix(parts: tuple[Reals, Reals], scales: Scales) -> Reals:
    noise = (scales.noise**2 + 1e-9) * np.eye(len(parts[0]))
    return scales.machine**2 * parts[0] + scales.own**2 * parts[1] + noise
