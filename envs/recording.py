"""The one gate every call goes through: it charges the budget and writes one row per call."""

from __future__ import annotations

from typing import Annotated, Any, final

import gymnasium as gym
import numpy as np
from pydantic import BaseModel, Field

from envs.calls import CallRow
from envs.chain import Seal
from envs.rows import RowWriter
from envs.saved_state import SavedState
from envs.space import ActionLike
from envs.strategy_env import Observation, StrategyEnv
from sim.evaluation import Evaluation
from sim.strategy import Strategy


class BudgetExhausted(RuntimeError):
    """A call was asked for after the last one of the budget; nothing was evaluated."""


@final
class CallGate(gym.Wrapper[Observation, ActionLike, Observation, ActionLike]):
    """Lets exactly `budget` calls through and records each: valid, invalid or repeated.

    A call that raises (a failing simulator, an action outside the space) is neither charged nor written.
    `reset` clears what the environment shows, never what was counted.

    Example:
        >>> import pathlib, tempfile
        >>> from sim.config.catalog import load_workload
        >>> rows = RowWriter(pathlib.Path(tempfile.mkdtemp()) / "rows.jsonl")
        >>> gate = CallGate(StrategyEnv(load_workload("gpt_moe_1_2t_16k")), budget=4000, rows=rows, run_id="mine")
        >>> _ = gate.step(gate.env.action_space.sample())
        >>> gate.calls, gate.calls_left
        (1, 3999)
        >>> gate.close()

    Args:
        env: What the calls go to.
        budget: Most calls, >= 1.
        rows: Where each call's row goes; closed with the gate.
        run_id: First column of every row.

    Attributes:
        calls: Calls made so far, each with its row.
        feasible_calls: Those that broke no limit.
        best_raw: Best feasible tokens/s/GPU, 0.0 if there is none.

    Raises:
        ValueError: The budget is below 1.
    """

    def __init__(self, env: StrategyEnv, budget: int, rows: RowWriter, run_id: str) -> None:
        super().__init__(env)
        if budget < 1:
            raise ValueError(f"expected a budget of at least 1 call, got {budget}")
        self.budget = budget
        self.calls = 0
        self.feasible_calls = 0
        self.best_raw = 0.0
        self._strategy_env = env
        self._rows = rows
        self._run_id = run_id
        self._seen: set[int] = set()
        self._best: Strategy | None = None
        self._best_evaluation: Evaluation | None = None

    @property
    def calls_left(self) -> int:
        """Calls that the budget still allows."""
        return self.budget - self.calls

    @property
    def unique_calls(self) -> int:
        """Calls of strategies that the run had not called before."""
        return len(self._seen)

    @property
    def best_strategy(self) -> Strategy | None:
        """The first strategy that reached `best_raw`; None while nothing feasible was found."""
        return self._best

    @property
    def best_evaluation(self) -> Evaluation | None:
        """What the simulator returned for `best_strategy`."""
        if self._best_evaluation is None and self._best is not None:
            # After a resume. The strategy was charged when it was called, and evaluate is pure.
            self._best_evaluation = self._strategy_env.evaluate(self._best)
        return self._best_evaluation

    @property
    def digest(self) -> str:
        """Hash chained over all rows: equal if and only if two runs made the same calls with the same results.

        The prefix keeps tables from reading an all-digit hash as a number.
        """
        return f"sha256-{self._rows.digest}"

    def step(
        self, action: ActionLike, asked: int | None = None
    ) -> tuple[Observation, float, bool, bool, dict[str, Any]]:
        """Makes one call. On return its row is in the operating system's hands: killing this process keeps it.

        Args:
            action: What is called.
            asked: Number of its proposal, from 1, where others are under way; by default that of the call.

        Raises:
            BudgetExhausted: No calls are left.
            SimulatorFailure: See `StrategyEnv.step`.
        """
        if self.calls >= self.budget:
            raise BudgetExhausted(f"run {self._run_id!r} has spent its budget of {self.budget} calls")
        observation, reward, terminated, truncated, info = self._strategy_env.step(action)
        self._record(info["evaluation"], float(reward), asked or self.calls + 1)
        self._seen.add(self._strategy_env.space.key(action))
        return observation, reward, terminated, truncated, info

    def _record(self, evaluation: Evaluation, reward: float, asked: int) -> None:
        raw = float(evaluation.tokens_per_s_per_gpu)
        improved = evaluation.feasible and (self._best is None or raw > self.best_raw)
        row = CallRow.of(
            evaluation,
            run_id=self._run_id,
            call=self.calls + 1,
            asked=asked,
            reward=reward,
            best_so_far=raw if improved else self.best_raw,
        )
        self._rows.write(row)
        # Counted once the row is out, so that a full disk never leaves a call without its row.
        self.calls += 1
        self.feasible_calls += evaluation.feasible
        if improved:
            self.best_raw, self._best, self._best_evaluation = raw, evaluation.strategy, evaluation

    def get_state(self) -> SavedState:
        """JSON-able snapshot of the gate and of the environment behind it."""
        best = None if self._best is None else self._strategy_env.space.encode(self._best).tolist()
        return {
            "calls": self.calls,
            "feasible_calls": self.feasible_calls,
            "seen": sorted(self._seen),
            "best_raw": self.best_raw,
            "best_action": best,
            "digest": self.digest,
            "rows": self._rows.seal()._asdict(),
            "env": self._strategy_env.get_state(),
        }

    def set_state(self, state: SavedState) -> None:
        """Goes back to a snapshot. The rows are resumed apart, by `RowWriter.resume` and `saved_rows`.

        Raises:
            ValueError: The snapshot is none, or has spent more than this gate's budget.
        """
        saved = _State.model_validate(state)
        if saved.calls > self.budget:
            raise ValueError(f"the saved run made {saved.calls} calls, more than the budget of {self.budget}")
        space = self._strategy_env.space
        self._strategy_env.set_state(saved.env.model_dump())
        self.calls = saved.calls
        self.feasible_calls = saved.feasible_calls
        self.best_raw = saved.best_raw
        self._seen = set(saved.seen)
        self._best = None if saved.best_action is None else space.decode(np.array(saved.best_action))
        self._best_evaluation = None

    def close(self) -> None:
        """Closes the rows and the environment."""
        self._rows.close()
        super().close()


class _Env(BaseModel):
    elites: list[tuple[float, list[int]]]
    calls: int


class _State(BaseModel):
    """A gate's snapshot; `rows` is for `saved_rows`."""

    calls: int
    feasible_calls: int
    seen: list[int]
    best_raw: Annotated[float, Field(ge=0, allow_inf_nan=False)]
    best_action: list[int] | None
    env: _Env


def saved_rows(state: SavedState) -> Seal | None:
    """The seal of the rows that belong to a gate's state; None of versions that kept none.

    Raises:
        TypeError, KeyError: It is the state of no gate.
    """
    if "rows" not in state:
        return None
    seal = Seal(**state["rows"])
    if [type(each) for each in seal] != [int, int, str, str] or seal.lines != state["calls"]:
        raise TypeError("expected the seal of its calls")
    return seal
