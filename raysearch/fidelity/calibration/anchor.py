"""An engine's times of a model after a few measured runs of it.

Each part of the time per token (kernels, steps with prompts, the engine's own time of a step and of a sequence) errs by
a factor of its own, and all by one more: logarithms with normal priors. A run tells of the parts that make up its time,
by their shares, and less of those under another release or format, or with other drafts.

Source: Bayesian linear regression as a Gaussian process, Rasmussen and Williams (2006), sections 2.1 and 2.2.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np

from raysearch.fidelity.calibration.engines import Steps
from sim.arrays import Floats
from sim.prices.engine import EngineTimes


class Served(NamedTuple):
    """What a model's times differ by: the engine's release, the weights' format and what drafts, "" where unknown."""

    engine: str
    weights: str
    drafts: str


_ALL = 0.03
_PARTS = np.array([0.1, 0.3, 0.21, 0.165])
_APART = np.array([1.9, 0.64, 0.4])
_NOISE = 0.062
_LARGEST = 1.4
_ROUNDS = 6
"""Spread of the logarithms: of what all parts share, and of kernels, prompts, steps and sequences; by what power of e
correlation falls where release, format or drafts differ; spread of one run; the largest that counts in full.
[fitted: least mean error after five random runs of each engine and model of seven machines, none of which the times had
seen; with the machine left out of these constants, too, it is 0.1 points more at most on H100, H200 and B200,
4 on B300]"""


def shares_of(steps: Steps, times: EngineTimes) -> Floats:
    """[runs, 4] which shares of the time per token kernels, prompts, steps and sequences take."""
    pace = steps.pace
    total_s = steps.tpot_s(times) * pace.gained
    kernels_s = (1 - pace.seen(times)) * pace.kernels_s(times, steps.decode_s)
    step_s = times.step_s * pace.stages
    own_s = pace.engine_s(times)
    parts = np.array([kernels_s, total_s - kernels_s - own_s, step_s * np.ones_like(own_s), own_s - step_s])
    return (parts / total_s).T


class Factors(NamedTuple):
    """By what the parts of a time per token are multiplied."""

    kernels: float
    prompts: float
    step: float
    sequence: float


class Anchor:
    """What measured runs of a model tell of its times: by how much to multiply their parts, served in any way.

    Args:
        served: [runs] how they were served.
        steps: [runs] priced.
        times: Those that are to be corrected, of each way in which runs were served.
        measured_s: [runs] seconds per output token.
    """

    def __init__(
        self, served: Sequence[Served], steps: Steps, times: Mapping[Served, EngineTimes], measured_s: Floats
    ) -> None:
        self._served = served
        rows = {each: np.flatnonzero([own == each for own in served]) for each in times}
        alike = np.array([self._alike(each) for each in served])
        self._told = np.zeros((len(served), len(_PARTS)))
        for _ in range(_ROUNDS):
            shares, logs = np.empty((len(served), len(_PARTS))), np.empty(len(served))
            for each, at in rows.items():
                now = self.times(each, times[each])
                shares[at] = shares_of(steps[at], now)
                off = np.log(measured_s[at] / steps[at].tpot_s(now))
                logs[at] = np.clip(off + shares[at] @ np.log(self.factors(each)), -_LARGEST, _LARGEST)
            seen = alike * (_ALL**2 + (shares * _PARTS**2) @ shares.T)
            weight = np.linalg.solve(seen + _NOISE**2 * np.eye(len(served)), logs)
            self._told = weight[:, None] * (_ALL**2 + _PARTS**2 * shares)

    def _alike(self, served: Served) -> Floats:
        """[runs] correlation with something served so."""
        differ = np.array([[a != b for a, b in zip(each, served, strict=True)] for each in self._served], dtype=float)
        return np.exp(-differ.reshape(-1, len(_APART)) @ _APART)

    def factors(self, served: Served) -> Factors:
        """By what the parts of something served so are multiplied."""
        return Factors(*np.exp(self._alike(served) @ self._told).tolist())

    def times(self, served: Served, times: EngineTimes) -> EngineTimes:
        """An engine's times, so multiplied. Prompts never shorten a step: where they seem to, less of them shows."""
        factors = self.factors(served)
        prompt_factor = times.prompt_factor * factors.prompts / factors.kernels
        return EngineTimes(
            times.step_s * factors.step,
            times.sequence_s * factors.sequence,
            times.prefill_share * min(1.0, prompt_factor),
            times.kernel_factor * factors.kernels,
            max(1.0, prompt_factor),
        )
