"""What is believed of the simulator's errors on a machine: before any measurement, and after some.

The log of measured over predicted time of strategy i is `e_i = sd_i * scale * z_i`, z ~ N(0, C). `sd_i` is what the
simulator's own 90 % interval says; C is a correlation: one part that all strategies share, one that those share whose
time is made of the same terms (each term errs by a factor of its own, which counts by its share of the time), and one
of those that lie near each other. `scale` is unknown too: a machine may be more, or less, like the simulator than
others were. So a measurement informs about its strategy, about those like it, and about how far to trust the
simulator here.

Source: Gaussian-process regression, Rasmussen and Williams (2006), section 2.2; the scale is summed over a grid.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from raysearch.deploy.live.deployment_candidates import Candidates
from sim.arrays import Floats, Ints


@dataclass(frozen=True, slots=True)
class ErrorCorrelation:
    """How alike errors of strategies of one deployment are. See `benchmarks/tune_live.py --fit`.

    Attributes:
        shared: Part of the variance that all strategies share.
        terms: Part that follows the terms of their time.
        near: Part that near strategies share; the rest of one is each strategy's own.
        length: Doublings of a degree or of the batch over which errors go apart.
        scale_sd: Standard deviation of the log of `scale`.
        scale: Its middle.
    """

    shared: float
    terms: float
    near: float
    length: float
    scale_sd: float
    scale: float

    def correlation(self, shares: Floats, places: Floats) -> Floats:
        """[n, n] correlations of strategies.

        Args:
            shares: [n, terms] of their time, adding up to one.
            places: [n, degrees] logarithms to base 2.
        """
        alike = shares @ shares.T
        norm = np.sqrt(np.diag(alike))
        apart = ((places[:, None, :] - places[None, :, :]) ** 2).sum(axis=2)
        near = np.exp(-apart / (2 * self.length**2))
        own = max(0.0, 1 - self.shared - self.terms - self.near)
        return self.shared + self.terms * alike / np.outer(norm, norm) + self.near * near + own * np.eye(len(shares))


ERROR_CORRELATION = ErrorCorrelation(shared=0.03, terms=0.31, near=0.63, length=2.2, scale_sd=0.44, scale=1.4)
"""[fitted] most likely on 54 deployments (391 measured serving runs of seven models under three engines), each engine's
own times taken without the model in question: `benchmarks/tune_live.py --fit`. What all share hardly shows because the
scale and the terms, which are shared too, say nearly the same."""
_SCALES = 15
"""Points of the grid over `scale`, from -2.5 to +2.5 standard deviations."""


class Belief:
    """Errors of [n] strategies given what was measured of some.

    Args:
        sd: [n] of the log error, by the simulator.
        correlation: [n, n].
        error_correlation: Its `scale` and `scale_sd` count here.
        noise: Standard deviation of the log of a measurement about what it measures.
    """

    def __init__(self, sd: Floats, correlation: Floats, error_correlation: ErrorCorrelation, noise: float) -> None:
        self._noise = max(noise, 1e-4)  # also keeps the arithmetic sound
        self._prior = correlation * np.outer(sd, sd)
        steps = np.linspace(-2.5, 2.5, _SCALES)
        self._scales = error_correlation.scale * np.exp(error_correlation.scale_sd * steps)
        self._log_weight = -(steps**2) / 2

    def log_evidence(self, rows: Ints, errors: Floats) -> float:
        """Log density of measured log errors, over the scale."""
        each = self._log_weight - np.logaddexp.reduce(self._log_weight) + self._log_density(rows, errors)
        return float(np.logaddexp.reduce(each))

    def _log_density(self, rows: Ints, errors: Floats) -> Floats:
        """[scales] log density of the errors at each scale."""
        found = np.zeros(_SCALES)
        for index, scale in enumerate(self._scales):
            lower = np.linalg.cholesky(self._seen(rows, scale))
            whitened = np.linalg.solve(lower, errors)
            found[index] = -whitened @ whitened / 2 - np.log(np.diag(lower)).sum()
        return found - len(rows) * math.log(2 * math.pi) / 2

    def _seen(self, rows: Ints, scale: float) -> Floats:
        return scale**2 * self._prior[np.ix_(rows, rows)] + self._noise**2 * np.eye(len(rows))

    def weights(self, rows: Ints, errors: Floats) -> Floats:
        """[scales] probability of each scale given measured errors."""
        log = self._log_weight + self._log_density(rows, errors)
        return np.exp(log - np.logaddexp.reduce(log))

    def mean_scale(self, rows: Ints, errors: Floats) -> float:
        """Geometric mean of the scale given measured errors."""
        return float(np.exp(self.weights(rows, errors) @ np.log(self._scales)))

    def given(self, rows: Ints, errors: Floats) -> tuple[Floats, Floats, Floats]:
        """(weights [scales], means [scales, n], covariances [scales, n, n]) of the errors given measured ones.

        Args:
            rows: [m] strategies that were measured, one twice if it was measured twice.
            errors: [m] log of measured over predicted.
        """
        weights = self.weights(rows, errors)
        kept = np.flatnonzero(weights > 1e-3)
        means, covariances = [], []
        for scale in self._scales[kept]:
            across = scale**2 * self._prior[:, rows]
            gain = np.linalg.solve(self._seen(rows, scale), across.T).T
            means.append(gain @ errors)
            covariances.append(scale**2 * self._prior - gain @ across.T)
        return weights[kept] / weights[kept].sum(), np.array(means), np.array(covariances)

    def samples(self, rows: Ints, errors: Floats, count: int, rng: np.random.Generator) -> Floats:
        """[about count, n] draws of the errors given measured ones."""
        weights, means, covariances = self.given(rows, errors)
        drawn: list[Floats] = []
        for weight, mean, covariance in zip(weights, means, covariances, strict=True):
            each = round(weight * count)
            root = np.linalg.cholesky(covariance + 1e-9 * np.eye(len(mean)))
            drawn.append(mean + rng.standard_normal((each, len(mean))) @ root.T)
        return np.concatenate(drawn)


def belief_of(
    candidates: Candidates, error_correlation: ErrorCorrelation = ERROR_CORRELATION, *, noise: float
) -> Belief:
    """What is believed of some candidates' times before any is measured."""
    correlation = error_correlation.correlation(candidates.shares, candidates.places)
    return Belief(candidates.stated_sd, correlation, error_correlation, noise)
