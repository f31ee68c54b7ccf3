"""The three parameters that an engine adds to its kernels: fitted to measured runs, and to all but some of them."""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, fields

import numpy as np
from numpy.typing import NDArray

from raysearch.fidelity.calibration.deployments import MeasuredMachine, ServingRun
from sim.arrays import Floats
from sim.config.catalog import cells_of
from sim.prices.calibration import Calibration
from sim.prices.engine import BARE, EngineTimes, times_of
from sim.prices.roofline import PRICED_BY_MEDIANS
from sim.serving.phases import Pace, PacedSteps
from sim.simulate import evaluate, steady_state

FOLDS = 5
"""Parts that a cross-validation deals shapes into."""


@dataclass(frozen=True, slots=True)
class Steps:
    """Steady states as arrays, priced before any engine's own time: what that is fitted on.

    Attributes:
        pace: How often steps carry prompts, [runs] each.
        decode_s, mixed_s: [runs] seconds of a step without and with prompts; NaN where medians price a part of it.
        running: [runs] requests that run at once.
        kernels: [runs, 2] factors between which kernels and collectives put their own time in 90 % of cases.
    """

    pace: Pace
    decode_s: Floats
    mixed_s: Floats
    running: Floats
    kernels: Floats

    @property
    def priced(self) -> NDArray[np.bool_]:
        """[runs] whether measured kernels price all of the run."""
        return np.isfinite(self.decode_s)

    def __getitem__(self, rows: NDArray[np.int64]) -> Steps:
        pace = Pace(**{field.name: getattr(self.pace, field.name)[rows] for field in fields(Pace)})
        return Steps(pace, self.decode_s[rows], self.mixed_s[rows], self.running[rows], self.kernels[rows])

    def tpot_s(self, times: EngineTimes) -> Floats:
        """[runs] seconds per output token under an engine."""
        return self._under(times).tpot_s

    def tpot_of_each_s(self, times: Sequence[EngineTimes]) -> Floats:
        """[runs] the same, each under an engine of its own."""
        return self._of_each(times, Steps.tpot_s)

    def prompt_share_of_each(self, times: Sequence[EngineTimes]) -> Floats:
        """[runs] share of the time per output token that other requests' prompts take, each under its engine."""
        return self._of_each(times, lambda steps, each: steps._under(each).prompt_share)

    def ttft_of_each_s(self, times: Sequence[EngineTimes]) -> Floats:
        """[runs] seconds to the first token, each under an engine of its own."""
        return self._of_each(times, lambda steps, each: steps._under(each).ttft_s)

    def _of_each(self, times: Sequence[EngineTimes], figure: Callable[[Steps, EngineTimes], Floats]) -> Floats:
        """[runs] a figure, of all runs of equal times at once."""
        rows: dict[EngineTimes, list[int]] = {}
        for row, each in enumerate(times):
            rows.setdefault(each, []).append(row)
        found = np.empty(len(times))
        for each, at in rows.items():
            found[at] = figure(self[np.array(at)], each)
        return found

    def _under(self, times: EngineTimes) -> PacedSteps:
        return PacedSteps(self.pace, times, self.decode_s, self.mixed_s)


def steps_of(runs: Sequence[ServingRun], machine: MeasuredMachine) -> Steps:
    """The steps of each run, by the function that prices a searched strategy."""
    found: list[tuple[float, ...]] = []
    paces: list[tuple[float, ...]] = []
    for run in runs:
        workload = run.workload(machine)
        state = steady_state(workload, run.strategy)
        evaluation = evaluate(workload, run.strategy)
        known = math.nan if any(PRICED_BY_MEDIANS in each for each in evaluation.extrapolated) else 1.0
        steps = state.decode_s * known, state.mixed_s * known, state.batching.in_flight
        found.append((*steps, *evaluation.kernel_interval))
        paces.append(tuple(float(getattr(state.batching.pace, field.name)) for field in fields(Pace)))
    decode_s, mixed_s, running, low, high = np.array(found, dtype=float).reshape(-1, 5).T
    pace = Pace(*np.array(paces, dtype=float).reshape(-1, len(fields(Pace))).T)
    return Steps(pace, decode_s, mixed_s, running, np.column_stack([low, high]))


def stating_their_batch(runs: Sequence[ServingRun]) -> NDArray[np.bool_]:
    """[runs] whether a run says how many requests could run at once."""
    return np.array([run.states_its_batch for run in runs], dtype=bool)


def fitted_to(runs: Sequence[ServingRun]) -> NDArray[np.bool_]:
    """[runs] whether engines' times are fitted to a run: it states its batch, and its times can be explained."""
    return stating_their_batch(runs) & ~np.array([run.scored_alone for run in runs], dtype=bool)


def engine_times(calibration: Calibration, run: ServingRun) -> EngineTimes:
    """The fitted times of a run's engine, of another version or of any; the bare machine's if none was fitted."""
    engines = calibration.data.get("serving", {}).get("engines", {})
    related = [record for known, record in engines.items() if known.partition("<")[0] == run.backend]
    pooled = {name: record for name, record in engines.items() if "of" in record}
    record = pooled.get(run.generation) or engines.get(run.engine)
    record = record or (related[0] if related else next(iter(engines.values()), None))
    if record is None:
        return BARE
    cells = cells_of(run.model, run.weights, drafts=run.speculation is not None)
    return times_of(record, cells, run.model.layers)


def held_out_times(
    runs: Sequence[ServingRun], steps: Steps, measured_s: Floats, groups: Sequence[Hashable], folds: int = FOLDS
) -> list[EngineTimes]:
    """[runs] the engine of each, fitted without the groups of runs that share its fold.

    Args:
        runs: Deployments.
        steps: Their steps.
        measured_s: [runs] seconds per output token.
        groups: [runs] what must not lie on both sides of a fold.
        folds: Parts that each engine's groups are dealt into; more than there are hold out one group at a time.
    """
    names, labels = np.array([run.engine for run in runs]), np.array([str(group) for group in groups])
    stating, times = fitted_to(runs) & steps.priced, [BARE] * len(runs)
    for name in sorted(set(names)):
        own = np.flatnonzero((names == name) & steps.priced)
        known = np.unique(labels[own])
        dealt = np.random.default_rng(0).permutation(len(known)) % folds
        fold = dict(zip(known, dealt, strict=True))
        for held_out in range(min(folds, len(known))):
            out = np.isin(labels, [label for label in known if fold[label] == held_out])
            train = np.flatnonzero((names == name) & stating & ~out)
            if not len(train):  # an engine seen with these groups alone: as any other
                train = np.flatnonzero(stating & ~out)
            fitted = fit_engine(steps[train], measured_s[train])
            for row in np.flatnonzero(out & (names == name)):
                times[row] = fitted
    return times


def shapes_of(runs: Sequence[ServingRun]) -> list[tuple[str, int, int]]:
    """[runs] what a cross-validation by shape holds out together: model, prompt and output length."""
    return [(run.model.name, run.prompt_tokens, run.output_tokens) for run in runs]


_CUT = 1.0
"""Largest |log error| that moves the fit: a run whose stated concurrency is not what ran must not bend the rest."""
_UNITS = (1e-3, 1e-5, 1.0)
"""Seconds or share that count as one in the fit, in the order of an engine's parameters."""
_PRIORS = (3e-3, 3e-4, 1e-2)
"""Weights that pull prefill_share to one and the others to zero, where rows do not say."""
_STARTS = ((0.5, 0.2, 0.95), (2.0, 1.0, 0.6), (0.1, 0.1, 0.9))


def fit_engine(steps: Steps, measured_s: Floats) -> EngineTimes:
    """The engine whose time per output token is nearest to the measured one, in mean absolute log error."""
    from scipy.optimize import minimize

    if not len(measured_s):
        return BARE

    def times(parameters: Floats) -> EngineTimes:
        step_s, sequence_s, share = (float(value) for value in np.abs(parameters) * _UNITS)
        return EngineTimes(step_s, sequence_s, min(1.0, share))

    def loss(parameters: Floats) -> float:
        error = np.minimum(np.abs(np.log(steps.tpot_s(times(parameters)) / measured_s)), _CUT).mean()
        return float(error + np.dot(_PRIORS, np.abs(np.abs(parameters) - (0, 0, 1))))

    options = {"maxiter": 3000, "maxfev": 3000}
    found = [minimize(loss, start, method="Nelder-Mead", options=options) for start in _STARTS]
    return times(min(found, key=lambda result: result.fun).x)
