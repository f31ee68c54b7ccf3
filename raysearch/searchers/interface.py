"""The interface of searchers: they propose actions and learn from the outcomes."""

from __future__ import annotations

import abc
import zlib
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Protocol, Self

import numpy as np
from numpy.typing import NDArray
from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator

from envs.reward import ImprovementReward
from envs.saved_state import SavedState
from envs.space import Action, StrategySpace
from sim.json_object import JsonFields, JsonObject
from sim.layers.model import Model

LARGEST_OPTION = 10**6
"""[assumed] Of whole numbers: calls, passes, individuals. A thousand times what any preset has."""


class NoOptions(BaseModel):
    """Settings of a searcher that has none; the others derive theirs from it."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)

    @field_validator("*")
    @classmethod
    def _within_reason(cls, value: Any) -> Any:
        if isinstance(value, int) and value > LARGEST_OPTION:
            raise ValueError(f"expected at most {LARGEST_OPTION:,}: more would never fit into a run's memory or time")
        return value


class RewardOptions(NoOptions):
    """Settings of what the environment shows and pays a searcher that learns from its reward, with their defaults.

    Attributes:
        elites: T, the elites that are shown, 3 in the paper.
        alpha: Weight of the throughput (eq. 1), in units of the best so far: see `envs.reward.ImprovementReward`.
        beta: Weight of the improvement.
        penalty: What an infeasible call costs; above beta.
    """

    elites: Annotated[int, Field(ge=1, le=1000)] = 3
    alpha: Annotated[float, Field(gt=0)] = 1.0
    beta: Annotated[float, Field(gt=0)] = 1.0
    penalty: Annotated[float, Field(gt=0)] = 10.0

    @model_validator(mode="after")
    def _infeasible_calls_earn_least(self) -> Self:
        if self.penalty <= self.beta:
            raise ValueError(f"penalty must exceed beta: {self.penalty} does not exceed {self.beta}")
        return self

    @property
    def environment(self) -> JsonObject:
        """What they say to a `StrategyEnv`."""
        return {"elites": self.elites, "reward": ImprovementReward(self.alpha, self.beta, self.penalty)}


@dataclass(frozen=True, slots=True)
class Outcome:
    """What one call returned.

    Attributes:
        raw: Tokens/s/GPU, 0.0 if infeasible.
        feasible: Whether no limit is broken.
        reward: The environment's reward (eq. 1).
        best: Best raw so far, this call included.
        observation: Elite history after the call, [T, A] float32.
        excess: By how much limits are missed, in factors of e (`Evaluation.excess`); 0 if feasible.
        simulated: Tokens/s/GPU as simulated, of infeasible strategies too.
    """

    raw: float
    feasible: bool
    reward: float
    best: float
    observation: NDArray[np.float32]
    excess: float = 0.0
    simulated: float = 0.0

    @classmethod
    def of(cls, observation: NDArray[np.float32], reward: float, info: JsonFields) -> Outcome:
        """What one step of a `StrategyEnv` returned."""
        figures = (info["raw"], info["feasible"], float(reward), info["best"])
        return cls(*figures, observation, info["excess"], info["simulated"])


class Environment(Protocol):
    """What a searcher steps, several calls of which may be under way: a run's, which charges and records them.

    Attributes:
        observation: Elite history, [T, A] float32, as of the last call that was taken in.
        exhausted: Set by a searcher that has nothing left to propose.
    """

    observation: NDArray[np.float32]
    exhausted: bool

    @property
    def under_way(self) -> int:
        """Calls that were begun and not taken in."""
        ...

    @property
    def may_begin(self) -> bool:
        """Whether a further call may be begun: neither the budget nor the most that may be under way is reached."""
        ...

    def begin(self, action: Action) -> None:
        """Begins a call of an action [A]."""

    def take(self) -> tuple[Action, Outcome]:
        """Takes in a call, whichever is answered first: its action and what came of it."""
        ...


class Searcher(abc.ABC):
    """Proposes actions and learns from outcomes.

    The loop is `action = ask(observation)`, one call of the gated environment, `tell(action, outcome)`, see `step`.
    A searcher never sees the gate, so it cannot spend a call by itself. With workers `ask` is called several times
    before the first `tell`, and tells come in the order of the answers: `action` says which call an outcome belongs to,
    not the last proposal.

    Subclasses are final, keep this constructor, set `name` and, if they have settings, `Options`.

    Args:
        space: The actions to choose from.
        seed: >= 0. Equal seeds give bit-identical runs, in every process.
        budget: Calls the run will make, for schedules; the gate enforces it, not the searcher.
        options: An instance of the class's own `Options`.
    """

    name: ClassVar[str]
    Options: ClassVar[type[BaseModel]] = NoOptions
    usual_budget: ClassVar[int] = 4000
    """Calls of a search that is given no budget. [published] "Learning to Shard", section 4."""

    def __init__(self, space: StrategySpace, *, seed: int, budget: int, options: Any) -> None:
        self.space = space
        self.seed = seed
        self.budget = budget
        self.options = options
        # The name keeps searchers of one study from drawing the same numbers.
        self.rng = np.random.default_rng([seed, zlib.crc32(self.name.encode())])

    @abc.abstractmethod
    def ask(self, observation: NDArray[np.float32]) -> Action | None:
        """Action [A] to evaluate next, a new array; None when there is nothing left to propose."""

    @abc.abstractmethod
    def tell(self, action: Action, outcome: Outcome) -> None:
        """Learns what `action` [A] gave; changes neither argument."""

    def step(self, environment: Environment, calls: int) -> None:
        """Begins as many calls as may be under way, and takes in at least one and at most `calls`, if any are left."""
        while environment.may_begin:
            action = self.ask(environment.observation)
            if action is None:
                environment.exhausted = True
            else:
                environment.begin(action)
        if environment.under_way:
            self.tell(*environment.take())

    def begin_with(self, action: Action, outcome: Outcome) -> None:
        """Learns what a given action [A] gave, before the first of its own.

        One that wants its own environment, or steps it itself, sees the action there among the elites.
        """
        if not self.environment and type(self).step is Searcher.step:
            self.tell(action, outcome)

    @abc.abstractmethod
    def get_state(self) -> SavedState:
        """Snapshot, independent of what happens later; enough to go on bit-identically.

        Plain data and arrays of numbers only, see `raysearch.runs.checkpoint`: no file may run code when
        it is read.
        """

    @abc.abstractmethod
    def set_state(self, state: SavedState) -> None:
        """Continues from a snapshot that a searcher with the same constructor arguments gave."""

    @property
    def environment(self) -> JsonObject:
        """Arguments of the `StrategyEnv` that the searcher wants to see; the defaults for most."""
        return self.options.environment if isinstance(self.options, RewardOptions) else {}

    @classmethod
    def own_dims(cls, model: Model) -> tuple[int, ...] | None:
        """Dims of every strategy that it calls, for a heuristic that knows them; None for one that searches them.

        A heuristic is given a space of degrees alone, and its dims may lie outside the space that others search.
        """
        return None

    @classmethod
    def sweep_calls(cls, space: StrategySpace) -> int | None:
        """Calls after which `ask` returns None, for a searcher that sweeps; None for one that never runs out."""
        return None

    @property
    def chunk(self) -> int:
        """Number of the part of the run that the next tell belongs to, from 1: an agent that starts afresh, say."""
        return 1

    def chunk_figures(self) -> dict[str, float]:
        """Of the last call's chunk: number (`chunk`), best (`chunk_best`), end (`chunk_done`); if there are several."""
        return {}

    def metrics(self) -> dict[str, float]:
        """Scalars to log beside the common ones, such as a temperature."""
        return {}

    def close(self) -> None:  # noqa: B027 (most searchers need none, so this is a hook and not abstract)
        """Releases the searcher's resources."""
