"""How far a black box departs from what was expected, learned from its answers: a Gaussian process on the residuals.

Strategies err together: by a factor of the whole machine, by what their time is made of, and the more the nearer they
lie. How much in all is not known before, so it is chosen with every answer: the likeliest of a grid of scales.

Source: Rasmussen and Williams, "Gaussian Processes for Machine Learning" (2006), sections 2.2 and 5.4.
"""

from __future__ import annotations

import itertools
import math
from typing import NamedTuple, final

import numpy as np
from scipy.linalg import solve_triangular

from raysearch.searchers.prior.network import ResidualKernel
from raysearch.searchers.prior.strategy_features import CHOICE_PLACES, OP_CHOICES, SHARES, Reals

_MACHINE_SCALES = (0.3, 1.0, 3.0, 10.0)
"""[assumed] Of errors that all strategies share: from a black box that is the simulator to one twice as slow."""
_OWN_SCALES = (0.25, 0.5, 1.0, 2.5, 6.0)
"""[assumed] Of errors that go with degrees and choices."""
_NOISES = (1e-3, 0.02, 0.06)
"""[assumed] Standard deviations of the log of an answer asked for twice: a simulator's, and two of measurements."""
_LOG_WIDTH = 1.5
"""[assumed] Nats by which a scale is unlikely whose log is one off."""
_REFIT = 1.15
"""Growth of the answers after which scales are chosen anew."""


class Scales(NamedTuple):
    """What multiplies the kernel, and the answers' noise."""

    machine: float = 1.0
    own: float = 1.0
    noise: float = _NOISES[0]


def covariance(kernel: ResidualKernel, scales: Scales, one: Reals, other: Reals) -> Reals:
    """Covariances `[n, m]` of the residuals of strategies, from the network's inputs `[n, F]` and `[m, F]`."""
    parts = covariance_parts(kernel, one, other)
    return scales.machine**2 * parts[0] + scales.own**2 * parts[1]


def covariance_parts(kernel: ResidualKernel, one: Reals, other: Reals) -> tuple[Reals, Reals]:
    """What all strategies share, and what near ones do, `[n, m]` each."""
    alike = np.exp(one[:, SHARES].astype(np.float64)) @ np.exp(other[:, SHARES].astype(np.float64)).T
    apart = _squared(one[:, CHOICE_PLACES], other[:, CHOICE_PLACES]) / (2 * kernel.length**2)
    # Choices are shares of layers: half the squared distance is the number of ops that differ, where all layers agree.
    differ = _squared(one[:, OP_CHOICES], other[:, OP_CHOICES]) / 2
    near = np.exp(-apart)
    shared = kernel.shared + kernel.terms * alike
    return shared, near * (kernel.degrees + kernel.choices * np.exp(-differ / kernel.ops)) + kernel.own * (
        apart + differ < 1e-9
    )


def _squared(one: Reals, other: Reals) -> Reals:
    one, other = one.astype(np.float64), other.astype(np.float64)
    norms = (one**2).sum(1)[:, None] + (other**2).sum(1)[None]
    return np.maximum(norms - 2 * one @ other.T, 0.0)


def log_evidence(matrix: Reals, residuals: Reals) -> float:
    """Log density of residuals `[n]` under a covariance `[n, n]`."""
    lower = np.linalg.cholesky(matrix)
    whitened = solve_triangular(lower, residuals, lower=True)
    return float(-whitened @ whitened / 2 - np.log(np.diag(lower)).sum() - len(residuals) * math.log(2 * math.pi) / 2)


@final
class ResidualProcess:
    """What is known of the residuals of one figure.

    Args:
        kernel: How they go together.

    Attributes:
        scales: As chosen last.
        fitted: Answers that they were chosen by.
    """

    def __init__(self, kernel: ResidualKernel) -> None:
        self._kernel = kernel
        self.inputs: Reals = np.zeros((0, 0), np.float32)
        self.values: Reals = np.zeros(0)
        self.scales = Scales()
        self.fitted = 0
        self._lower: Reals = np.zeros((0, 0))
        self._whitened: Reals = np.zeros(0)

    def learn(self, inputs: Reals, values: Reals) -> None:
        """Takes all answers anew: the network's inputs `[n, F]` and residuals `[n]`."""
        self.inputs, self.values = inputs, values
        count = len(values)
        if not count:
            return
        parts = covariance_parts(self._kernel, inputs, inputs)
        if count <= 12 or count >= _REFIT * self.fitted:
            self.scales, self.fitted = self._likeliest(parts), count
        self._lower = np.linalg.cholesky(self._matrix(parts, self.scales))
        self._whitened = solve_triangular(self._lower, values, lower=True)

    def believe(self, inputs: Reals) -> None:
        """Takes what is expected of calls in flight `[n, F]` for their answers, so that others look elsewhere."""
        expected, _ = self.expected(inputs)
        self.inputs, self.values = np.concatenate([self.inputs, inputs]), np.concatenate([self.values, expected])
        parts = covariance_parts(self._kernel, self.inputs, self.inputs)
        self._lower = np.linalg.cholesky(self._matrix(parts, self.scales))
        self._whitened = solve_triangular(self._lower, self.values, lower=True)

    def _matrix(self, parts: tuple[Reals, Reals], scales: Scales) -> Reals:
        noise = (scales.noise**2 + 1e-9) * np.eye(len(parts[0]))
        return scales.machine**2 * parts[0] + scales.own**2 * parts[1] + noise

    def _likeliest(self, parts: tuple[Reals, Reals]) -> Scales:
        def worth(scales: Scales) -> float:
            unlikely = math.log(scales.machine) ** 2 + math.log(scales.own) ** 2
            unlikely += 0.5 * math.log(scales.noise / _NOISES[0])
            return log_evidence(self._matrix(parts, scales), self.values) - unlikely / _LOG_WIDTH

        grid = itertools.starmap(Scales, itertools.product(_MACHINE_SCALES, _OWN_SCALES, _NOISES))
        return max(grid, key=worth)

    def expected(self, inputs: Reals) -> tuple[Reals, Reals]:
        """Mean and standard deviation `[n]` of the residuals of strategies, without the answers' noise."""
        kernel, scales = self._kernel, self.scales
        ends = np.exp(2 * inputs[:, SHARES].astype(np.float64)).sum(1)
        prior = scales.machine**2 * (kernel.shared + kernel.terms * ends)
        prior = prior + scales.own**2 * (kernel.degrees + kernel.choices + kernel.own)
        if not len(self.values):
            return np.zeros(len(inputs)), np.sqrt(prior)
        across = covariance(kernel, scales, self.inputs, inputs)
        gain = solve_triangular(self._lower, across, lower=True)
        left = np.maximum(prior - (gain**2).sum(0), 1e-8)
        return gain.T @ self._whitened, np.sqrt(left)
