"""Nevergrad's optimisers for discrete spaces."""

from __future__ import annotations

from itertools import islice
from typing import TYPE_CHECKING, Any, ClassVar, Literal, final

import numpy as np
from numpy.typing import NDArray
from pydantic import BaseModel

from envs.actions import is_long
from envs.saved_state import SavedState
from envs.space import Action, StrategySpace
from raysearch.searchers.history import History, rebuilt
from raysearch.searchers.interface import NoOptions, Outcome, Searcher
from raysearch.searchers.merit import merit
from sim.optimum.spaces import Coordinate

if TYPE_CHECKING:
    from nevergrad.optimization.base import Optimizer
    from nevergrad.parametrization.core import Parameter


class NevergradOptions(NoOptions):
    """Settings of `nevergrad`.

    Attributes:
        optimizer: Its name in Nevergrad's registry. NGOpt and NgIohTuned choose by the space and the budget.
        degrees: How Nevergrad is shown a degree: an integer, or a choice that steps to values nearby.
        choices: How it is shown a choice: one that steps, or drawn by the weights of its values.
    """

    optimizer: Literal[
        "NGOpt",
        "NgIohTuned",
        "PortfolioDiscreteOnePlusOne",
        "RecombiningPortfolioDiscreteOnePlusOne",
        "DiscreteLenglerOnePlusOne",
        "DoubleFastGADiscreteOnePlusOne",
        "LognormalDiscreteOnePlusOne",
        "TwoPointsDE",
        "DiscreteDE",
    ]
    degrees: Literal["integer", "transition"]
    choices: Literal["transition", "weights"]


@final
class NevergradSearcher(Searcher):
    """One of Nevergrad's optimisers for discrete spaces; an option says which.

    Its loss is minus the merit: an infeasible call loses more than any feasible one, graded by its excess.

    Source: Bennet et al., "Nevergrad: Black-Box Optimization Platform", 2021.
    """

    name: ClassVar[str] = "nevergrad"
    Options: ClassVar[type[BaseModel]] = NevergradOptions

    def __init__(self, space: StrategySpace, *, seed: int, budget: int, options: NevergradOptions) -> None:
        super().__init__(space, seed=seed, budget=budget, options=options)
        import nevergrad

        parametrization = self._parametrization()
        parametrization.random_state = np.random.RandomState(int(self.rng.integers(2**32)))
        self._optimizer: Optimizer = nevergrad.optimizers.registry[options.optimizer](parametrization, budget=budget)
        self._asked: list[tuple[bytes, Parameter]] = []
        self._history = History(len(space.sizes))
        self._lowest = np.array([int(is_long(each)) for each in space.coordinates])  # logarithms begin at 1

    def _parametrization(self) -> Any:
        from nevergrad import p

        choice = p.TransitionChoice if self.options.choices == "transition" else p.Choice
        # One parameter for many equal choices, because Nevergrad takes its time for every parameter.
        return p.Tuple(
            *(
                self._ordered(run[0])
                if run[0].ordered
                else choice(range(len(run[0].values)), repetitions=len(run) if len(run) > 1 else None)
                for run in self._runs
            )
        )

    def _ordered(self, coordinate: Coordinate) -> Any:
        from nevergrad import p

        size = len(coordinate.values)
        if is_long(coordinate):
            return p.Log(lower=1, upper=size).set_integer_casting()
        if self.options.degrees == "integer":
            return p.Scalar(init=size // 2, lower=0, upper=max(size - 1, 1)).set_integer_casting()
        return p.TransitionChoice(range(size))

    @property
    def _runs(self) -> list[list[Coordinate]]:
        """The coordinates, each by itself if it is ordered, and choices of as many values in a row together."""
        runs: list[list[Coordinate]] = []
        for each in self.space.coordinates:
            last = runs[-1][-1] if runs else None
            if last and not (last.ordered or each.ordered) and len(last.values) == len(each.values):
                runs[-1].append(each)
            else:
                runs.append([each])
        return runs

    def ask(self, observation: NDArray[np.float32]) -> Action:
        """The action that Nevergrad's next candidate stands for."""
        candidate = self._optimizer.ask()
        action = np.hstack(candidate.value).astype(np.int64) - self._lowest
        action = np.minimum(action, self.space.nvec - 1)  # an integer has two values at least
        self._asked.append((action.tobytes(), candidate))
        self._history.add_proposal(action)
        return action

    def tell(self, action: Action, outcome: Outcome) -> None:
        """Tells what the candidate gave."""
        self._optimizer.tell(self._candidate(action), -merit(outcome))
        self._history.add_outcome(action, outcome)

    def _candidate(self, action: Action) -> Parameter:
        for position, (asked, candidate) in enumerate(self._asked):
            if asked == action.tobytes():
                del self._asked[position]
                return candidate
        values = iter((action + self._lowest).tolist())
        grouped = [tuple(islice(values, len(run))) if len(run) > 1 else next(values) for run in self._runs]
        return self._optimizer.parametrization.spawn_child(new_value=tuple(grouped))

    def get_state(self) -> SavedState:
        """Its asks and tells: the library's own state is a pickle, of megabytes."""
        return self._history.get_state()

    def set_state(self, state: SavedState) -> None:
        """Repeats the asks and tells on a new optimiser."""
        vars(self).update(vars(rebuilt(self, state)))
