"""Optuna's samplers as searchers: the tree-structured Parzen estimator and CMA-ES."""

from __future__ import annotations

import abc
import math
import warnings
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal, final

import numpy as np
from numpy.typing import NDArray
from pydantic import BaseModel, Field

from envs.actions import is_long
from envs.saved_state import SavedState
from envs.space import Action, StrategySpace
from raysearch.searchers.history import History, rebuilt
from raysearch.searchers.interface import NoOptions, Outcome, Searcher
from raysearch.searchers.machine_state import checked_mersenne
from raysearch.searchers.merit import merit
from sim.optimum.spaces import Coordinate

if TYPE_CHECKING:
    from optuna import Study, Trial
    from optuna.distributions import BaseDistribution, IntDistribution
    from optuna.samplers import BaseSampler

_LIMITS = "limits"
"""Optuna's name of the one constraint: the excess."""


class _OptunaSearcher(Searcher):
    """Asks an Optuna study in memory for trials and tells it their outcomes.

    The value of a trial is the call's merit: an infeasible one is worth less than any feasible one, graded by its
    excess. A sampler that knows limits gets the excess as well. The outcome of an action that was not asked for becomes
    a trial of its own.
    """

    _knows_limits: ClassVar[bool] = False

    def __init__(self, space: StrategySpace, *, seed: int, budget: int, options: Any) -> None:
        super().__init__(space, seed=seed, budget=budget, options=options)
        import optuna

        optuna.logging.set_verbosity(optuna.logging.WARNING)  # it would report every new study
        self._distributions = self._encoding()
        self._begin()

    def _begin(self) -> None:
        """A study without trials."""
        import optuna

        with warnings.catch_warnings():
            # Some settings are experimental, others on their way out; pyproject.toml names the versions that have them.
            warnings.simplefilter("ignore", optuna.exceptions.ExperimentalWarning)
            warnings.simplefilter("ignore", FutureWarning)
            sampler = self._sampler(int(self.rng.integers(2**32)))
        self._study: Study = optuna.create_study(direction="maximize", sampler=sampler)
        self._asked: list[tuple[bytes, Trial]] = []

    @abc.abstractmethod
    def _sampler(self, seed: int) -> BaseSampler:
        """The sampler that the options describe."""

    @abc.abstractmethod
    def _encoding(self) -> dict[str, BaseDistribution]:
        """Optuna's parameters, which stand for an action."""

    def _decoded(self, params: dict[str, float]) -> Action:
        """The action [A] that parameters stand for."""
        lowest = [_lowest(coordinate) for coordinate in self.space.coordinates]
        return np.array([params[name] for name in self.space.names], dtype=np.int64) - lowest

    def _encoded(self, action: Action) -> dict[str, float]:
        """Parameters that stand for an action [A]."""
        return {c.name: index + _lowest(c) for c, index in zip(self.space.coordinates, action.tolist(), strict=True)}

    def ask(self, observation: NDArray[np.float32]) -> Action:
        """The action of a new trial."""
        trial = self._study.ask(self._distributions)
        action = self._decoded(trial.params)
        self._asked.append((action.tobytes(), trial))
        return action

    def tell(self, action: Action, outcome: Outcome) -> None:
        """Completes the action's trial."""
        trial = self._trial_of(action)
        if self._knows_limits:
            trial.set_constraint(_LIMITS, outcome.excess)
        self._study.tell(trial, merit(outcome))

    def _trial_of(self, action: Action) -> Trial:
        for position, (asked, trial) in enumerate(self._asked):
            if asked == action.tobytes():
                del self._asked[position]
                return trial
        self._study.enqueue_trial(self._encoded(action))
        return self._study.ask(self._distributions)


class TPEOptions(NoOptions):
    """Settings of `optuna_tpe`; see `optuna.samplers.TPESampler`.

    Attributes:
        startup_calls: Uniform samples before the estimator is used.
        candidates: Drawn per call; the one with the largest expected improvement is called.
        good_share: Share of the calls that count as good ...
        good_most: ... but at most so many.
        prior_weight: Weight of the uniform prior in the densities of good and other calls.
        group: Whether parameters are grouped by the trials in which they occur; here all occur in all.
        degrees: Whether Optuna is shown the degrees' order.
    """

    startup_calls: Annotated[int, Field(ge=1)]
    candidates: Annotated[int, Field(ge=1)]
    good_share: Annotated[float, Field(gt=0, le=1)]
    good_most: Annotated[int, Field(ge=1)]
    prior_weight: Annotated[float, Field(gt=0)]
    group: bool
    degrees: Literal["ordered", "categorical"]


@final
class OptunaTPESearcher(_OptunaSearcher):
    """Tree-structured Parzen estimator, multivariate: one joint density of the good calls, one of the others.

    Optuna ranks infeasible calls behind all feasible ones, the nearest to feasible first.

    Source: Bergstra et al., "Algorithms for Hyper-Parameter Optimization", 2011; Akiba et al., "Optuna", 2019.
    """

    name: ClassVar[str] = "optuna_tpe"
    Options: ClassVar[type[BaseModel]] = TPEOptions
    _knows_limits: ClassVar[bool] = True

    def _sampler(self, seed: int) -> BaseSampler:
        from optuna.samplers import TPESampler

        return TPESampler(
            n_startup_trials=self.options.startup_calls,
            n_ei_candidates=self.options.candidates,
            gamma=lambda calls: min(math.ceil(self.options.good_share * calls), self.options.good_most),
            prior_weight=self.options.prior_weight,
            multivariate=True,
            group=self.options.group,
            constant_liar=False,  # slows every call down, and serves only those in flight
            seed=seed,
        )

    def _encoding(self) -> dict[str, BaseDistribution]:
        from optuna.distributions import CategoricalDistribution

        in_order = self.options.degrees == "ordered"
        return {
            each.name: _integer(each)
            if is_long(each) or (each.ordered and in_order)
            else CategoricalDistribution(range(len(each.values)))
            for each in self.space.coordinates
        }

    def get_state(self) -> SavedState:
        """The trials by number, and the sampler's generators: a call of its own takes too long to be made again."""
        trials = self._study.get_trials(deepcopy=False)
        finished = [trial.state.is_finished() for trial in trials]
        return {
            "actions": np.array([self._decoded(trial.params) for trial in trials]).reshape(-1, len(self.space.sizes)),
            "told": np.array(finished, bool),
            "merits": np.array([trial.value if done else 0.0 for trial, done in zip(trials, finished, strict=True)]),
            "excesses": np.array([trial.constraints.get(_LIMITS, 0.0) for trial in trials]),
            "generators": [generator.get_state(legacy=False) for generator in self._generators()],
        }

    def set_state(self, state: SavedState) -> None:
        """Puts the trials back, and then the generators."""
        from optuna.trial import Trial, TrialState, create_trial

        self._begin()
        events = zip(*(state[name].tolist() for name in ("actions", "told", "merits", "excesses")), strict=True)
        for number, (values, finished, worth, excess) in enumerate(events):
            action = np.array(values)
            self._study.add_trial(
                create_trial(
                    state=TrialState.COMPLETE if finished else TrialState.RUNNING,
                    params=self._encoded(action),
                    distributions=self._distributions,
                    value=worth if finished else None,
                    constraints={_LIMITS: excess} if finished else None,
                )
            )
            if not finished:
                self._asked.append((action.tobytes(), Trial(self._study, number)))
        for generator, kept in zip(self._generators(), state["generators"], strict=True):
            generator.set_state(checked_mersenne(kept))

    def _generators(self) -> list[np.random.RandomState]:
        sampler: Any = self._study.sampler
        return [sampler._rng.rng, sampler._random_sampler._rng.rng]


class CmaEsOptions(NoOptions):
    """Settings of `optuna_cmaes`; see `optuna.samplers.CmaEsSampler`.

    Attributes:
        population: Calls of a generation.
        choices: What a choice is to CMA-ES, which knows numbers only: "ordinal", one integer, or "one_hot", a
            number per value, of which the largest is chosen.
        margin: Whether integers keep a least probability of changing (CMA-ES with margin).
        restart_after: Calls without an improvement after which it restarts; 0: never.
        growth: Factor on the population at every restart.
    """

    population: Annotated[int, Field(ge=2)]
    choices: Literal["ordinal", "one_hot"]
    margin: bool
    restart_after: Annotated[int, Field(ge=0)]
    growth: Annotated[float, Field(ge=1)]


@final
class OptunaCmaEsSearcher(_OptunaSearcher):
    """Covariance matrix adaptation: a normal distribution over numbers that stand for the action.

    Optuna's sampler does not restart (its restarts moved out of the library), so this does: with a
    larger population, as in IPOP-CMA-ES, once a number of calls brought nothing better.

    Source: Hansen and Ostermeier, 2001; Hamano et al., "CMA-ES with Margin", 2022; Auger and Hansen, "A Restart
    CMA Evolution Strategy With Increasing Population Size", 2005.
    """

    name: ClassVar[str] = "optuna_cmaes"
    Options: ClassVar[type[BaseModel]] = CmaEsOptions

    _restarts = 0
    _best = -math.inf
    _stale = 0

    def __init__(self, space: StrategySpace, *, seed: int, budget: int, options: CmaEsOptions) -> None:
        super().__init__(space, seed=seed, budget=budget, options=options)
        self._history = History(len(space.sizes))

    def ask(self, observation: NDArray[np.float32]) -> Action:
        """The action of a new trial."""
        action = super().ask(observation)
        self._history.add_proposal(action)
        return action

    def tell(self, action: Action, outcome: Outcome) -> None:
        """Completes the action's trial, and restarts if the search stagnates."""
        super().tell(action, outcome)
        self._history.add_outcome(action, outcome)
        worth = merit(outcome)
        self._stale = 0 if worth > self._best else self._stale + 1
        self._best = max(self._best, worth)
        if self._stale == self.options.restart_after > 0:
            self._restarts, self._best, self._stale = self._restarts + 1, -math.inf, 0
            self._begin()

    def _sampler(self, seed: int) -> BaseSampler:
        from optuna.samplers import CmaEsSampler

        return CmaEsSampler(
            popsize=round(self.options.population * self.options.growth**self._restarts),
            with_margin=self.options.margin,
            warn_independent_sampling=False,  # the first call of a study is one
            seed=seed,
        )

    def _encoding(self) -> dict[str, BaseDistribution]:
        from optuna.distributions import FloatDistribution

        encoding: dict[str, BaseDistribution] = {}
        for each in self.space.coordinates:
            if self._is_number(each):
                encoding[each.name] = _integer(each)
            else:
                encoding |= {_part(each.name, index): FloatDistribution(0.0, 1.0) for index in range(len(each.values))}
        return encoding

    def _is_number(self, coordinate: Coordinate) -> bool:
        return coordinate.ordered or self.options.choices == "ordinal"

    def _decoded(self, params: dict[str, float]) -> Action:
        indices = [
            params[each.name] - _lowest(each)
            if self._is_number(each)
            else max(range(len(each.values)), key=lambda index, name=each.name: params[_part(name, index)])
            for each in self.space.coordinates
        ]
        return np.array(indices, dtype=np.int64)

    def _encoded(self, action: Action) -> dict[str, float]:
        encoded: dict[str, float] = {}
        for each, chosen in zip(self.space.coordinates, action.tolist(), strict=True):
            if self._is_number(each):
                encoded[each.name] = chosen + _lowest(each)
            else:
                encoded |= {_part(each.name, index): float(index == chosen) for index in range(len(each.values))}
        return encoded

    def metrics(self) -> dict[str, float]:
        """How often it restarted."""
        return {"restarts": float(self._restarts)}

    def get_state(self) -> SavedState:
        """Its asks and tells: the library's own state is a pickle."""
        return self._history.get_state()

    def set_state(self, state: SavedState) -> None:
        """Repeats the asks and tells on a new study."""
        vars(self).update(vars(rebuilt(self, state)))


def _part(name: str, index: int) -> str:
    return f"{name}={index}"


def _lowest(coordinate: Coordinate) -> int:
    """Optuna's number for the first value."""
    return 1 if is_long(coordinate) else 0


def _integer(coordinate: Coordinate) -> IntDistribution:
    """The places of ordered values; those of many on a logarithmic scale, as tables of few double."""
    from optuna.distributions import IntDistribution

    lowest = _lowest(coordinate)
    return IntDistribution(lowest, lowest + len(coordinate.values) - 1, log=is_long(coordinate))
