"""The search as a gymnasium environment: one step evaluates one strategy."""

from __future__ import annotations

import contextlib
import functools
import math
from collections.abc import Callable
from typing import Any, NamedTuple, Self, final

import gymnasium as gym
import numpy as np
from gymnasium.spaces import Box
from numpy.typing import NDArray

from envs.archive import AddStatus, EliteArchive
from envs.reward import ImprovementReward
from envs.saved_state import SavedState
from envs.space import ActionLike, StrategySpace
from sim.evaluation import Evaluation
from sim.replay.goodput import evaluate_in_phase
from sim.strategy import Strategy
from sim.workload import Workload

Observation = NDArray[np.float32]
Evaluate = Callable[[Workload, Strategy], Evaluation]
Reward = Callable[[float, float, bool], float]

_PAPER_REWARD = ImprovementReward()
_PADDING = -1.0  # apart from every scaled index, which lies in [0, 1]
LONGEST_TEXT = 500
"""[assumed] Characters of a foreign message that are shown and kept: enough for what went wrong and where."""
_CUT_NOTE = 50
"""Room for the note that a text was cut, so that one that was is not cut again."""
_CACHED_CALLS = 1024  # [assumed] enough for a searcher that dwells on a few strategies; some 20 MB


class SimulatorFailure(RuntimeError):
    """The simulator raised, or returned something that is no measurement. Never a low reward.

    Attributes:
        strategy: What it was asked to evaluate.
        reason: What it did.
    """

    def __init__(self, strategy: Strategy, reason: str) -> None:
        super().__init__(strategy, reason)  # both, so that the error survives pickling
        self.strategy = strategy
        self.reason = reason

    def __str__(self) -> str:
        return f"the simulator failed on {self.strategy}: {self.reason}"


class CallFigures(NamedTuple):
    """What a search looks at of an evaluation.

    Attributes:
        simulated: Tokens/s/GPU, infeasible or not.
        feasible: Whether no limit is broken.
        excess: By how much limits are missed, see `Evaluation.excess`.
    """

    simulated: float
    feasible: bool
    excess: float

    @classmethod
    def of(cls, evaluation: Evaluation) -> Self:
        """Those of one."""
        return cls(float(evaluation.tokens_per_s_per_gpu), evaluation.feasible, evaluation.excess)


@final
class StrategyEnv(gym.Env[Observation, ActionLike]):
    """Evaluates strategies and shows the elites found so far. An episode ends with its budget, if it has one.

    Action: MultiDiscrete [A], see `StrategySpace`. Observation: Box [T, A] float32, row i the i-th best distinct
    feasible action, each index divided by the largest of its table; rows not yet filled are -1.

    Example:
        >>> from sim.config.catalog import load_workload
        >>> env = StrategyEnv(load_workload("gpt_moe_1_2t_16k"))
        >>> observation, reward, _, _, info = env.step(env.space.nvec - 1)
        >>> reward, info["feasible"], info["best"]
        (-10.0, False, 0.0)

    Args:
        workload: What the strategies are for.
        evaluate: Any pure black box from (workload, strategy) to an `Evaluation`; repeats may come from a cache.
        elites: Rows of the observation, T.
        reward: From (raw, best before the call, feasible) to the reward.
        retries: How often a failing evaluation is tried again before `SimulatorFailure`.
        space: What actions choose from; by default all strategies of the workload.
        budget: Calls of an episode, the last of which truncates it; None: an episode has no end.
        factored: Whether actions, and with them observations, write long coordinates in digits: see
            `envs.actions.Factored`. A policy with a head per coordinate would have one of thousands of batches.
    """

    def __init__(
        self,
        workload: Workload,
        *,
        evaluate: Evaluate = evaluate_in_phase,
        elites: int = 3,
        reward: Reward = _PAPER_REWARD,
        retries: int = 0,
        space: StrategySpace | None = None,
        budget: int | None = None,
        factored: bool = False,
    ) -> None:
        if retries < 0:
            raise ValueError(f"expected retries >= 0, got {retries}")
        if budget is not None and budget < 1:
            raise ValueError(f"expected a budget of at least 1 call, got {budget}")
        self.space = space or StrategySpace(workload)
        self.archive = EliteArchive(elites)
        self._factored = self.space.factored if factored else None
        self.action_space = self._actions = self._factored.actions if self._factored else self.space.action_space
        self.observation_space = Box(_PADDING, 1.0, (elites, len(self._actions.sizes)), np.float32)
        self._reward = reward
        self._retries = retries
        self._simulate = functools.partial(evaluate, workload)
        self._cached = functools.lru_cache(maxsize=_CACHED_CALLS)(self._evaluate)
        self.budget = budget
        self.calls = 0
        self._index_scale = np.maximum(np.array(self._actions.sizes) - 1, 1)
        self._observation = self._observe()

    @property
    def best(self) -> float:
        """Best tokens/s/GPU so far, 0.0 while nothing feasible was found."""
        elite = self.archive.best
        return elite.raw if elite else 0.0

    @property
    def observation(self) -> Observation:
        """The elites as the next action may see them, [T, A], a new array."""
        return self._observation.copy()

    def plain(self, actions: ActionLike) -> ActionLike:
        """The actions `[..., A]` of `space` that actions of this environment stand for.

        Raises:
            ValueError: One of them, if they are factored, is not in the action space.
        """
        if self._factored is None:
            return actions
        sizes = np.array(self._actions.sizes)
        if actions.shape[-1:] != sizes.shape or ((actions < 0) | (actions >= sizes)).any():
            raise ValueError(f"expected actions below {sizes.tolist()}, got {actions.tolist()}")
        return self._factored.decode(actions)

    def evaluate(self, strategy: Strategy) -> Evaluation:
        """What the simulator says about a strategy, checked, without a trace in the environment.

        Raises:
            SimulatorFailure: It raised, or returned no finite measurement, once more than `retries` times.
        """
        return self._cached(strategy)

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[Observation, dict[str, Any]]:
        """Forgets every elite and the best so far."""
        super().reset(seed=seed, options=options)
        self.archive.clear()
        self.calls = 0
        self._observation = self._observe()
        return self.observation, {}

    def step(self, action: ActionLike) -> tuple[Observation, float, bool, bool, dict[str, Any]]:
        """Evaluates one strategy.

        Returns:
            Observation after the call, reward, False, whether the budget is spent, and info: `evaluation`, `raw`
            (tokens/s/GPU, 0.0 if infeasible), `feasible`, `excess` (by how much limits are missed, see
            `Evaluation.excess`), `simulated` (tokens/s/GPU, infeasible or not) and `best` (best raw, this call
            included).

        Raises:
            SimulatorFailure: See `evaluate`; nothing changed.
            ValueError: The action is not in the space.
        """
        evaluation = self.evaluate(self.space.decode(self.plain(action)))
        observation, reward, terminated, truncated, info = self.take(action, CallFigures.of(evaluation))
        return observation, reward, terminated, truncated, {"evaluation": evaluation, **info}

    def take(self, action: ActionLike, figures: CallFigures) -> tuple[Observation, float, bool, bool, dict[str, Any]]:
        """The step of an action `[A]` that somebody else has evaluated: what `step` returns, but for `evaluation`."""
        self.calls += 1
        feasible = figures.feasible
        raw = figures.simulated if feasible else 0.0
        reward = self._reward(raw, self.best, feasible)
        if feasible and self.archive.add(raw, tuple(self._actions.folded(action).tolist())) is AddStatus.ADDED:
            self._observation = self._observe()
        info = {
            "raw": raw,
            "feasible": feasible,
            "excess": figures.excess,
            "simulated": figures.simulated,
            "best": self.best,
        }
        return self.observation, reward, False, self.calls == self.budget, info

    def get_state(self) -> SavedState:
        """JSON-able snapshot of everything that later calls depend on."""
        return {"elites": self.archive.get_state(), "calls": self.calls}

    def set_state(self, state: SavedState) -> None:
        """Goes back to a snapshot of an environment with the same arguments."""
        self.archive.set_state(state["elites"])
        self.calls = state["calls"]
        self._observation = self._observe()

    def _observe(self) -> Observation:
        observation = np.full(self.observation_space.shape or (), _PADDING, np.float32)
        for row, elite in zip(observation, self.archive.entries, strict=False):
            row[:] = np.asarray(elite.action) / self._index_scale
        return observation

    def _evaluate(self, strategy: Strategy) -> Evaluation:
        for _ in range(self._retries):
            with contextlib.suppress(Exception):
                return checked(self._simulate(strategy), strategy)
        try:
            return checked(self._simulate(strategy), strategy)
        except Exception as error:
            raise SimulatorFailure(strategy, failure_text(error)) from error


class SimulatorError(RuntimeError):
    """What a simulator raised in another process, in words: "ZeroDivisionError: division by zero"."""


def failure_text(error: BaseException) -> str:
    """What went wrong, in one line that is no longer than anyone reads: a foreign simulator may say megabytes."""
    return brief(str(error) if isinstance(error, SimulatorError) else f"{type(error).__name__}: {error}")


def brief(text: str) -> str:
    """The text in one line, cut after some `LONGEST_TEXT` characters.

    >>> brief("one\\n  two"), len(brief("x" * 10**7))
    ('one two', 528)
    >>> (cut := brief("x" * 10**7)) == brief(cut)
    True
    >>> brief("\x1b[31mred")  # what a terminal would obey
    '\\\\x1b[31mred'
    """
    words = " ".join(text[: 2 * LONGEST_TEXT].split())
    line = "".join(each if each.isprintable() else repr(each)[1:-1] for each in words)
    if len(line) <= LONGEST_TEXT + _CUT_NOTE and len(text) <= 2 * LONGEST_TEXT:
        return line
    return f"{line[:LONGEST_TEXT]} ... ({len(text):,} characters)"


def checked(evaluation: Evaluation, strategy: Strategy) -> Evaluation:
    """The evaluation, if it is one of that strategy. Raises: ValueError, for what a foreign simulator may get wrong."""
    if not isinstance(evaluation, Evaluation):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise ValueError(f"expected a sim.evaluation.Evaluation, got {evaluation!r}")
    if evaluation.strategy != strategy:
        raise ValueError(f"expected the evaluation of that strategy, got one of {evaluation.strategy}")
    figures = {
        "tokens_per_s_per_gpu": evaluation.tokens_per_s_per_gpu,
        "tpot_s": evaluation.tpot_s,
        "memory_bytes": evaluation.memory_bytes.total,
    }
    for name, value in figures.items():
        if not (math.isfinite(value) and value >= 0):
            raise ValueError(f"expected a finite {name} >= 0, got {value}")
    if evaluation.gpus < 1:
        raise ValueError(f"expected gpus >= 1, got {evaluation.gpus}")
    return evaluation
