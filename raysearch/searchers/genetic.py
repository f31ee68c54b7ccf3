"""A genetic algorithm."""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, final

import numpy as np
from numpy.typing import NDArray
from pydantic import BaseModel, Field

from envs.saved_state import SavedState
from envs.space import Action, StrategySpace
from raysearch.searchers.interface import NoOptions, Outcome, Searcher

if TYPE_CHECKING:
    from pymoo.core.population import Population

_BROODS = 20
"""How often pymoo breeds again before it finds that no child does anything new; it would try 100 times. [assumed]"""


class GeneticOptions(NoOptions):
    """Settings of `genetic`.

    Attributes:
        population: Strategies that survive.
        offspring: Calls of a generation; 1 is a steady state.
        mutations: Coordinates of a child that get a uniform value, on average.
        crossover: Probability that a child is mixed of two parents, coordinate by coordinate, and no copy of one.
    """

    population: Annotated[int, Field(ge=2)]
    offspring: Annotated[int, Field(ge=1)]
    mutations: Annotated[float, Field(gt=0)]
    crossover: Annotated[float, Field(ge=0, le=1)]


@final
class GeneticSearcher(Searcher):
    """pymoo's genetic algorithm: tournament, uniform crossover, uniform mutation, the fittest of old and new survive.

    The excess of an infeasible call is its constraint violation: pymoo prefers any feasible strategy to it, and of two
    infeasible ones the one that is less so. Children that do what one in the population does are not called again,
    unless pymoo finds no other.

    Source: Blank and Deb, "pymoo: Multi-Objective Optimization in Python", 2020; constraints: Deb, 2000.
    """

    name: ClassVar[str] = "genetic"
    Options: ClassVar[type[BaseModel]] = GeneticOptions

    def __init__(self, space: StrategySpace, *, seed: int, budget: int, options: GeneticOptions) -> None:
        super().__init__(space, seed=seed, budget=budget, options=options)
        self._algorithm = self._make(int(self.rng.integers(2**32)))
        self._children: list[Action] = []  # not asked for yet
        self._evaluated: list[tuple[Action, float, float]] = []

    def _make(self, seed: int) -> Any:  # a GA, whose attributes pymoo types as perhaps None
        from pymoo.algorithms.soo.nonconvex.ga import GA
        from pymoo.core.duplicate import DefaultDuplicateElimination
        from pymoo.core.problem import Problem
        from pymoo.core.termination import NoTermination
        from pymoo.core.variable import Integer
        from pymoo.operators.crossover.ux import UniformCrossover
        from pymoo.operators.mutation.rm import ChoiceRandomMutation
        from pymoo.operators.sampling.rnd import IntegerRandomSampling

        actions = self.space.factored.actions
        most = actions.nvec - 1
        names = [coordinate.name for coordinate in actions.coordinates]
        variables = {name: Integer(bounds=(0, int(bound))) for name, bound in zip(names, most, strict=True)}
        problem = Problem(vars=variables, n_obj=1, n_ieq_constr=1, xl=np.zeros_like(most), xu=most, vtype=int)
        operators: dict[str, Any] = {  # GA's own types allow its defaults only
            "crossover": UniformCrossover(prob=self.options.crossover),
            "eliminate_duplicates": DefaultDuplicateElimination(func=lambda people: actions.folded(people.get("X"))),
            "mutation": ChoiceRandomMutation(prob_var=min(self.options.mutations / len(most), 1.0)),
        }
        algorithm = GA(
            pop_size=self.options.population,
            n_offsprings=self.options.offspring,
            sampling=IntegerRandomSampling(),
            **operators,
            seed=seed,
        )
        algorithm.mating.n_max_iterations = _BROODS
        return algorithm.setup(problem, termination=NoTermination())

    def ask(self, observation: NDArray[np.float32]) -> Action:
        """The next child; a uniform action if pymoo finds none that is new."""
        if not self._children:
            self._children = self._breed()
        return self._children.pop() if self._children else self.space.sample(self.rng)

    def _breed(self) -> list[Action]:
        children = self._algorithm.ask()
        if children is None:
            return []
        return [self.space.factored.decode(child.X.astype(np.int64)) for child in reversed(children)]

    def tell(self, action: Action, outcome: Outcome) -> None:
        """Notes the call; the last of a generation lets the fittest survive."""
        self._evaluated.append((self.space.factored.encode(action), -outcome.raw, outcome.excess))
        started = self._algorithm.is_initialized
        if len(self._evaluated) == (self.options.offspring if started else self.options.population):
            self._survive()

    def _survive(self) -> None:
        actions, costs, excesses = zip(*self._evaluated, strict=True)
        self._algorithm.tell(infills=_population(np.stack(actions), np.array(costs), np.array(excesses)))
        self._evaluated = []

    def get_state(self) -> SavedState:
        """The generators, the population and the unfinished generation."""
        algorithm = self._algorithm
        survivors = algorithm.pop.get("X", "F", "G") if algorithm.is_initialized else None
        return {
            "rng": self.rng.bit_generator.state,
            "pymoo": copy.deepcopy(algorithm.random_state.bit_generator.state),
            "survivors": copy.deepcopy(survivors),
            "generation": copy.deepcopy((self._children, self._evaluated)),
        }

    def set_state(self, state: SavedState) -> None:
        """Puts the population back; of pymoo's algorithm nothing else decides what it does next."""
        self.rng.bit_generator.state = state["rng"]
        self._algorithm = self._make(seed=0)
        if state["survivors"] is not None:
            choices, costs, excesses = state["survivors"]
            self._algorithm.ask()
            self._algorithm.tell(infills=_population(choices, costs[:, 0], excesses[:, 0]))
        self._algorithm.random_state.bit_generator.state = state["pymoo"]
        self._children, self._evaluated = copy.deepcopy(state["generation"])


def _population(actions: NDArray[Any], costs: NDArray[np.float64], excesses: NDArray[np.float64]) -> Population:
    """Evaluated individuals: actions `[n, A]`, minus tokens/s/GPU `[n]`, excesses `[n]`."""
    from pymoo.core.population import Population

    individuals = Population.new(X=actions, F=costs[:, None], G=excesses[:, None])
    for individual in individuals:
        individual.evaluated |= {"F", "G"}
    return individuals
