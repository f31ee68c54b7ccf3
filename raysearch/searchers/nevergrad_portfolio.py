"""Nevergrad's optimisers for discrete spaces."""

from __future__ import annotations

from itertools import groupby, islice
from typing import TYPE_CHECKING, Any, ClassVar, Literal, final

import numpy as np
from numpy.typing import NDArray
from pydantic import BaseModel

from envs.space import Action, StrategySpace
from raysearch.history import History, rebuilt
from raysearch.merit import merit
from raysearch.searcher import NoOptions, Outcome, Searcher

if TYPE_CHECKING:
    from nevergrad.optimization.base import Optimizer
    from nevergrad.parametrization.core import Parameter

_DEGREES = 4  # leading coordinates: tp, ep, pp and batch


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

    It is told minus the merit: an infeasible call loses more than any feasible one, graded by its excess.

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

    def _parametrization(self) -> Any:
        from nevergrad import p

        sizes = self.space.sizes
        if self.options.degrees == "integer":
            degrees = [
                p.Scalar(init=size // 2, lower=0, upper=max(size - 1, 1)).set_integer_casting()
                for size in sizes[:_DEGREES]
            ]
        else:
            degrees = [p.TransitionChoice(range(size)) for size in sizes[:_DEGREES]]
        choice = p.TransitionChoice if self.options.choices == "transition" else p.Choice
        # One parameter for many equal choices, because Nevergrad takes its time for every parameter.
        choices = [choice(range(size), repetitions=count if count > 1 else None) for size, count in self._runs]
        return p.Tuple(*degrees, *choices)

    @property
    def _runs(self) -> list[tuple[int, int]]:
        """Number of values of the choices, and how many choices in a row have as many."""
        return [(size, len(list(run))) for size, run in groupby(self.space.sizes[_DEGREES:])]

    def ask(self, observation: NDArray[np.float32]) -> Action:
        """The action that Nevergrad's next candidate stands for."""
        candidate = self._optimizer.ask()
        action = np.hstack(candidate.value).astype(np.int64)
        action = np.minimum(action, self.space.nvec - 1)  # an integer has two values at least
        self._asked.append((action.tobytes(), candidate))
        self._history.asked(action)
        return action

    def tell(self, action: Action, outcome: Outcome) -> None:
        """Tells what the candidate gave."""
        self._optimizer.tell(self._candidate(action), -merit(outcome))
        self._history.told(action, outcome)

    def _candidate(self, action: Action) -> Parameter:
        for position, (asked, candidate) in enumerate(self._asked):
            if asked == action.tobytes():
                del self._asked[position]
                return candidate
        values = iter(action.tolist())
        degrees = list(islice(values, _DEGREES))
        choices = [tuple(islice(values, count)) if count > 1 else next(values) for _, count in self._runs]
        return self._optimizer.parametrization.spawn_child(new_value=(*degrees, *choices))

    def get_state(self) -> dict[str, Any]:
        """What it was asked and told: the library's own state is a pickle, of megabytes."""
        return self._history.get_state()

    def set_state(self, state: dict[str, Any]) -> None:
        """Asks and tells a new optimiser the same again."""
        vars(self).update(vars(rebuilt(self, state)))
