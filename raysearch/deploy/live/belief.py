"""What is believed of the simulator's errors on a machine: before any measurement, and after some.

The log of measured over predicted time of strategy i is `e_i = sd_i * scale * z_i`, z ~ N(0, C). `sd_i` is what the
simulator's own 90 % interval says; C is a correlation: one part that all strategies share, one that those share whose
time is made of the same terms (each term errs by a factor of its own, which counts by its share of the time), and one
of those that lie near each other. `scale` is unknown too: a machine may be more, or less, like the simulator than
others were. So a measurement informs about its strategy, about those like it, and about how far to trust the
simulator here.

A machine may also surprise: all times are off, those from some batch on, those of one degree, those of one term, or
each strategy's for itself, by factors that no interval has. Each surprise is a component of a mixture beside the one
without any; measurements raise and lower its weight. So a few strategies that came out as predicted do not vouch for a
batch that nobody measured.

Source: Gaussian-process regression, Rasmussen and Williams (2006), section 2.2; scale and surprise are summed over.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
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
SURPRISED = 0.7
"""[assumed] Probability that a machine surprises; each of a kind is as likely."""
OF_ONE_DEGREE = 4.0
"""Times as likely as any other kind of surprise is one of a single degree. [fitted] to 80 simulated machines on which
one degree alone was off: where 0.9 was stated, 90 % of tunings were right; with 1 it was 83 %."""
SURPRISE_SD = 0.6
"""[assumed] Standard deviation of the log of a surprise: a factor of up to 3 either way, all as likely, has 0.63."""
_LEAST_WEIGHT = 1e-3
"""Of a component below which nothing is drawn from it: four of 4,000."""
_COUNTS = 0.1
"""[assumed] Share of a time from which a term can surprise."""
_SCALES = 15
"""Points of the grid over `scale`, from -2.5 to +2.5 standard deviations."""


class Belief:
    """Errors of [n] strategies given what was measured of some.

    Args:
        sd: [n] of the log error, by the simulator.
        correlation: [n, n].
        error_correlation: Its `scale` and `scale_sd` count here.
        noise: Standard deviation of the log of a measurement about what it measures.
        surprises: Kinds of surprise, each a list of [n, k] by how much k factors that err apart count for a strategy.
        odds: How likely each kind is beside the others; all alike if none are given.
    """

    def __init__(
        self,
        sd: Floats,
        correlation: Floats,
        error_correlation: ErrorCorrelation,
        noise: float,
        surprises: Sequence[Sequence[Floats]] = (),
        odds: Sequence[float] = (),
    ) -> None:
        self._noise = max(noise, 1e-4)  # also keeps the arithmetic sound
        self._prior = correlation * np.outer(sd, sd)
        steps = np.linspace(-2.5, 2.5, _SCALES)
        self._scales = error_correlation.scale * np.exp(error_correlation.scale_sd * steps)
        kinds = [(kind, each) for kind, each in zip(surprises, odds or [1.0] * len(surprises), strict=True) if kind]
        self._surprises = [SURPRISE_SD * factors for kind, _ in kinds for factors in kind]
        of_all = sum(each for _, each in kinds)
        none = 1 - SURPRISED if kinds else 1.0
        apart = [none, *(SURPRISED * each / of_all / len(kind) for kind, each in kinds for _ in kind)]
        each = np.log(apart)[:, None] - (steps**2)[None, :] / 2
        self._log_weight = (each - np.logaddexp.reduce(each, axis=None)).ravel()

    def log_evidence(self, rows: Ints, errors: Floats) -> float:
        """Log density of measured log errors, over scale and surprise."""
        each_once = np.ones(len(rows))
        return float(np.logaddexp.reduce(self._log_weight + self._log_density(rows, errors, each_once)))

    def _log_density(self, rows: Ints, errors: Floats, times: Floats) -> Floats:
        """[components] log density of the errors, of each surprise at each scale; each is the mean of so many."""
        seen = self._seen(rows, times)
        lower = np.linalg.cholesky(seen)
        whitened = np.linalg.solve(lower, np.broadcast_to(errors[:, None], (*lower.shape[:-1], 1)))
        spread = np.log(np.diagonal(lower, axis1=1, axis2=2)).sum(axis=1)
        return -(whitened**2).sum(axis=(1, 2)) / 2 - spread - len(rows) * math.log(2 * math.pi) / 2

    def _seen(self, rows: Ints, times: Floats) -> Floats:
        """[components, m, m] covariance of what was measured, noise included."""
        shared = self._scales[:, None, None] ** 2 * self._prior[np.ix_(rows, rows)]
        apart = [np.zeros((len(rows), len(rows))), *(each[rows] @ each[rows].T for each in self._surprises)]
        found = np.array(apart)[:, None] + shared[None] + np.diag(self._noise**2 / times)
        return found.reshape(len(self._log_weight), len(rows), len(rows))

    def weights(self, rows: Ints, errors: Floats) -> Floats:
        """[components] probability of each surprise at each scale given measured errors."""
        return self._weights(*_means(rows, errors))

    def _weights(self, rows: Ints, errors: Floats, times: Floats) -> Floats:
        log = self._log_weight + self._log_density(rows, errors, times)
        return np.exp(log - np.logaddexp.reduce(log))

    def mean_scale(self, rows: Ints, errors: Floats) -> float:
        """Geometric mean of the scale given measured errors."""
        of_scale = self.weights(rows, errors).reshape(-1, _SCALES).sum(axis=0)
        return float(np.exp(of_scale @ np.log(self._scales)))

    def given(self, rows: Ints, errors: Floats) -> tuple[Floats, Floats, Floats]:
        """(weights [kept], means [kept, n], covariances [kept, n, n]) of the errors given measured ones, by component.

        Args:
            rows: [m] strategies that were measured, one twice if it was measured twice.
            errors: [m] log of measured over predicted.
        """
        rows, errors, times = _means(rows, errors)
        weights, seen = self._weights(rows, errors, times), self._seen(rows, times)
        kept = np.flatnonzero(weights > _LEAST_WEIGHT)
        means, covariances = [], []
        for component in kept:
            surprise, scale = divmod(int(component), _SCALES)
            prior = self._scales[scale] ** 2 * self._prior
            if surprise:
                factors = self._surprises[surprise - 1]
                prior = prior + factors @ factors.T
            across = prior[:, rows]
            gain = np.linalg.solve(seen[component], across.T).T
            means.append(gain @ errors)
            covariances.append(prior - gain @ across.T)
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


def _means(rows: Ints, errors: Floats) -> tuple[Ints, Floats, Floats]:
    """(strategies as they first came, the mean error of each, how often each was measured): all that measurements say.

    So a choice takes no longer, and no more memory, after a thousand measurements of a few strategies than after one.
    """
    _, first, places, times = np.unique(rows, return_index=True, return_inverse=True, return_counts=True)
    order = np.argsort(first)
    means = np.bincount(places, weights=errors, minlength=len(times)) / times
    return rows[first[order]], means[order], times[order].astype(float)


def belief_of(
    candidates: Candidates, error_correlation: ErrorCorrelation = ERROR_CORRELATION, *, noise: float
) -> Belief:
    """What is believed of some candidates' times before any is measured."""
    correlation = error_correlation.correlation(candidates.shares, candidates.places)
    odds = (1.0, 1.0, 1.0, OF_ONE_DEGREE, 1.0)
    return Belief(candidates.stated_sd, correlation, error_correlation, noise, surprises_of(candidates), odds)


def surprises_of(candidates: Candidates) -> list[list[Floats]]:
    """Kinds of surprise: everything, each strategy for itself, from some batch on, of one degree, of one term."""
    count, places, shares = len(candidates), candidates.places, candidates.shares
    degrees, requests = places[:, :-1], np.array([each.batch for each in candidates.strategies])
    batches = [requests >= least for least in sorted(set(requests.tolist()))[1:]]
    alone = [axis == value for axis in degrees.T for value in sorted(set(axis.tolist())) if len(set(axis.tolist())) > 1]
    terms = [share[:, None] for share in shares.T if share.max() > _COUNTS]
    return [
        [np.ones((count, 1))],
        [np.eye(count)],
        [each[:, None].astype(float) for each in batches],
        [each[:, None].astype(float) for each in alone],
        terms,
    ]
