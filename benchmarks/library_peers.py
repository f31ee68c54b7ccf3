"""Bayesian optimisers of other people's libraries, as searchers beside which `first_calls.py` puts the prior.

Each is asked for a strategy and gets its merit: log tokens/s/GPU, and of an infeasible one a value below all feasible
ones by its excess; a library that handles limits gets the excess as well. All have their libraries' defaults, none was
tuned. `pip install smac botorch 'google-vizier[jax]'`; Optuna's comes with `pip install -e '.[search]'`.
"""

from __future__ import annotations

from typing import Any, ClassVar, final

import numpy as np
from numpy.typing import NDArray

from envs.saved_state import SavedState
from envs.space import Action, StrategySpace
from raysearch.searchers.interface import NoOptions, Outcome, Searcher
from raysearch.searchers.merit import merit
from raysearch.searchers.optuna_samplers import _OptunaSearcher

_FIRST = 10
"""Calls at random before a model is fitted, as Optuna's and SMAC's defaults have it."""


class _Peer(Searcher):
    """Runs once, from its first call to its last."""

    def get_state(self) -> SavedState:
        """None: a benchmark is not resumed."""
        raise NotImplementedError

    def set_state(self, state: SavedState) -> None:
        """See `get_state`."""
        raise NotImplementedError


@final
class OptunaGP(_OptunaSearcher):
    """Optuna's GPSampler: Matern 5/2 with a length per parameter, log expected improvement, constrained.

    Source: https://optuna.readthedocs.io, `optuna.samplers.GPSampler`.
    """

    name: ClassVar[str] = "optuna_gp"
    _knows_limits: ClassVar[bool] = True

    def _sampler(self, seed: int) -> Any:
        from optuna.samplers import GPSampler

        return GPSampler(seed=seed, deterministic_objective=True, n_startup_trials=_FIRST)

    def _encoding(self) -> dict[str, Any]:
        from optuna.distributions import CategoricalDistribution, IntDistribution

        return {
            each.name: IntDistribution(0, len(each.values) - 1)
            if each.ordered
            else CategoricalDistribution(range(len(each.values)))
            for each in self.space.coordinates
        }

    def _decoded(self, params: dict[str, Any]) -> Action:
        return np.array([params[name] for name in self.space.names], np.int64)

    def _encoded(self, action: Action) -> dict[str, Any]:
        return dict(zip(self.space.names, action.tolist(), strict=True))

    def get_state(self) -> SavedState:
        """None: a benchmark is not resumed."""
        raise NotImplementedError

    def set_state(self, state: SavedState) -> None:
        """See `get_state`."""
        raise NotImplementedError


@final
class Smac(_Peer):
    """SMAC3: random forest and expected improvement with local search, its facade for hyper-parameters.

    Source: Lindauer et al., "SMAC3: A Versatile Bayesian Optimization Package", 2022.
    """

    name: ClassVar[str] = "smac"

    def __init__(self, space: StrategySpace, *, seed: int, budget: int, options: Any) -> None:
        super().__init__(space, seed=seed, budget=budget, options=options)
        import tempfile
        from pathlib import Path

        from ConfigSpace import Categorical, ConfigurationSpace, Integer
        from smac import HyperparameterOptimizationFacade as Facade
        from smac import Scenario

        self._space = ConfigurationSpace(seed=seed)
        for each in space.coordinates:
            last = len(each.values) - 1
            if last:
                known = Integer(each.name, (0, last)) if each.ordered else Categorical(each.name, list(range(last + 1)))
                self._space.add(known)
        self._folder = tempfile.TemporaryDirectory()
        scenario = Scenario(
            self._space, n_trials=budget + 1, seed=seed, deterministic=True, output_directory=Path(self._folder.name)
        )
        design = Facade.get_initial_design(scenario, n_configs=_FIRST)
        self._smac = Facade(
            scenario, lambda config, seed: 0.0, initial_design=design, overwrite=True, logging_level=False
        )
        self._asked: dict[bytes, Any] = {}

    def ask(self, observation: NDArray[np.float32]) -> Action:
        """The next trial."""
        trial = self._smac.ask()
        chosen = dict(trial.config)
        action = np.array([int(chosen.get(name, 0)) for name in self.space.names], np.int64)
        self._asked[action.tobytes()] = trial
        return action

    def tell(self, action: Action, outcome: Outcome) -> None:
        """Its cost, which is to be small."""
        from ConfigSpace import Configuration
        from smac.runhistory import TrialInfo, TrialValue

        trial = self._asked.pop(action.tobytes(), None)
        if trial is None:
            indices = zip(self.space.names, action.tolist(), strict=True)
            values = {name: index for name, index in indices if name in self._space}
            trial = TrialInfo(Configuration(self._space, values=values), seed=0)
        self._smac.tell(trial, TrialValue(cost=-merit(outcome)))


@final
class BoTorch(_Peer):
    """BoTorch: a Gaussian process with a length per input, log expected improvement over drawn and mutated candidates.

    Source: Balandat et al., "BoTorch", 2020; Ament et al., "Unexpected Improvements to Expected Improvement", 2023.
    """

    name: ClassVar[str] = "botorch"

    def __init__(self, space: StrategySpace, *, seed: int, budget: int, options: Any) -> None:
        super().__init__(space, seed=seed, budget=budget, options=options)
        self._sizes = np.array(space.sizes)
        self._ordered = np.array([each.ordered for each in space.coordinates])
        self._told: list[Action] = []
        self._merits: list[float] = []

    def _inputs(self, actions: Action) -> Any:
        """Ordered coordinates in [0, 1], the others one-hot."""
        import torch

        parts = [(actions / np.maximum(self._sizes - 1, 1))[:, self._ordered]]
        for place in np.flatnonzero(~self._ordered):
            parts.append(np.eye(self._sizes[place])[actions[:, place]])
        return torch.from_numpy(np.concatenate(parts, axis=1))

    def ask(self, observation: NDArray[np.float32]) -> Action:
        """Of 1,500 candidates the one with the largest expected improvement."""
        if len(self._told) < _FIRST:
            return self.space.sample(self.rng)
        import torch
        from botorch.acquisition import LogExpectedImprovement
        from botorch.fit import fit_gpytorch_mll
        from botorch.models import SingleTaskGP
        from botorch.models.transforms import Standardize
        from gpytorch.mlls import ExactMarginalLogLikelihood

        torch.manual_seed(int(self.rng.integers(2**31)))
        values = torch.tensor(self._merits, dtype=torch.float64)[:, None]
        model = SingleTaskGP(self._inputs(np.array(self._told)), values, outcome_transform=Standardize(1))
        fit_gpytorch_mll(
            ExactMarginalLogLikelihood(model.likelihood, model), optimizer_kwargs={"options": {"maxiter": 50}}
        )
        best = [self._told[row] for row in np.argsort(self._merits)[-10:]]
        mutated = np.array(best)[self.rng.integers(len(best), size=1000)]
        change = self.rng.random(mutated.shape) < 2 / mutated.shape[1]
        mutated = np.where(change, self.rng.integers(self._sizes, size=mutated.shape), mutated)
        drawn = np.concatenate([mutated, [self.space.sample(self.rng) for _ in range(500)]])
        known = {each.tobytes() for each in self._told}
        drawn = np.array([each for each in drawn if each.tobytes() not in known])
        with torch.no_grad():
            worth = LogExpectedImprovement(model, values.max())(self._inputs(drawn)[:, None])
        return drawn[int(worth.argmax())]

    def tell(self, action: Action, outcome: Outcome) -> None:
        """Notes the answer."""
        self._told.append(action)
        self._merits.append(merit(outcome))


@final
class Vizier(_Peer):
    """Google Vizier's GP-UCB-PE.

    Source: Song et al., "The Vizier Gaussian Process Bandit Algorithm", 2024.
    """

    name: ClassVar[str] = "vizier"

    def __init__(self, space: StrategySpace, *, seed: int, budget: int, options: Any) -> None:
        super().__init__(space, seed=seed, budget=budget, options=options)
        from jax.random import PRNGKey
        from vizier import pyvizier
        from vizier.algorithms.designers import VizierGPUCBPEBandit
        from vizier.pyvizier.converters.padding import PaddingSchedule, PaddingType

        problem = pyvizier.ProblemStatement()
        for each in space.coordinates:
            last = len(each.values) - 1
            if last and each.ordered:
                problem.search_space.root.add_int_param(each.name, 0, last)
            elif last:
                problem.search_space.root.add_categorical_param(each.name, [str(index) for index in range(last + 1)])
        problem.metric_information.append(
            pyvizier.MetricInformation("merit", goal=pyvizier.ObjectiveMetricGoal.MAXIMIZE)
        )
        padded = PaddingSchedule(num_trials=PaddingType.MULTIPLES_OF_10)  # or JAX compiles at every call
        self._designer = VizierGPUCBPEBandit(problem, rng=PRNGKey(seed), padding_schedule=padded)
        self._vizier, self._count = pyvizier, 0

    def ask(self, observation: NDArray[np.float32]) -> Action:
        """One suggestion."""
        (suggestion,) = self._designer.suggest(1)
        chosen = suggestion.parameters.as_dict()
        return np.array([int(chosen.get(name, 0)) for name in self.space.names], np.int64)

    def tell(self, action: Action, outcome: Outcome) -> None:
        """A completed trial."""
        from vizier.algorithms import ActiveTrials, CompletedTrials

        self._count += 1
        parameters = {
            each.name: index if each.ordered else str(index)
            for each, index in zip(self.space.coordinates, action.tolist(), strict=True)
            if len(each.values) > 1
        }
        trial = self._vizier.Trial(id=self._count, parameters=parameters)
        trial.complete(self._vizier.Measurement({"merit": merit(outcome)}))
        self._designer.update(CompletedTrials([trial]), ActiveTrials())


PEERS: dict[str, type[Searcher]] = {each.name: each for each in (OptunaGP, Smac, BoTorch, Vizier)}


def make_peer(name: str, space: StrategySpace, seed: int, budget: int) -> Searcher:
    """One of `PEERS` at its first call."""
    return PEERS[name](space, seed=seed, budget=budget, options=NoOptions())
