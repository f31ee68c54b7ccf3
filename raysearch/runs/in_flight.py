"""The environment that every searcher steps: a run's gate, with several calls under way at a time.

Calls are begun in the order in which the searcher decides them, and taken in as their answers arrive. Each row says
which decision it answers (`asked`), so that a run can be made again in the order of its rows.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from envs.chain import DamagedRows
from envs.recording import CallGate
from envs.rows import read_rows
from envs.saved_state import SavedState
from envs.space import Action, StrategySpace
from raysearch.base.errors import InputError
from raysearch.searchers.interface import Outcome
from raysearch.simulators.protocol import Simulator
from sim.strategy import Strategy


class _Begun(NamedTuple):
    """A call under way.

    Attributes:
        number: Of the decision, from 1.
        action: What was decided, [A].
        strategy: What that stands for.
    """

    number: int
    action: Action
    strategy: Strategy


class CallsInFlight:
    """Begins calls and takes them in; see `raysearch.searchers.interface.Environment`.

    Args:
        gate: What the calls go through.
        simulator: What evaluates behind it.
        space: Of the actions.
        most: Calls that may be under way at a time.
        order: Decisions in the order in which they were answered before, for as long as it lasts; then any order.
        taken: Called after each call.

    Attributes:
        exhausted: Whether the searcher has nothing left to propose.
        observation: What the gate shows, [T, A].
    """

    def __init__(
        self,
        gate: CallGate,
        simulator: Simulator,
        space: StrategySpace,
        *,
        most: int,
        order: Iterable[int] = (),
        taken: Callable[[], None] = lambda: None,
    ) -> None:
        self._gate, self._simulator, self._space, self._most = gate, simulator, space, most
        self._order, self._note = deque(order), taken
        self._under_way: list[_Begun] = []
        self._decided = gate.calls
        self.exhausted = False
        self.observation: NDArray[np.float32] = gate.reset()[0]

    @property
    def under_way(self) -> int:
        """Calls that were begun and not taken in."""
        return len(self._under_way)

    @property
    def may_begin(self) -> bool:
        """Whether a further call may be begun."""
        return not self.exhausted and len(self._under_way) < min(self._most, self._gate.calls_left)

    def begin(self, action: Action) -> None:
        """Begins a call of an action [A]."""
        self._decided += 1
        self._begin(_Begun(self._decided, action, self._space.decode(action)))

    def _begin(self, call: _Begun) -> None:
        self._under_way.append(call)
        self._simulator.begin(call.strategy)

    def take(self) -> tuple[Action, Outcome]:
        """Takes in the call whose answer arrives first, or whose turn it was before: its action and what came of it.

        Raises:
            SimulatorFailure: The black box failed on it for good. It stays under way, for a run that continues.
            InputError: The recorded order is of another run.
        """
        call = self._next()
        observation, reward, _, _, info = self._gate.step(call.action, call.number)
        self._under_way.remove(call)
        if self._order:
            self._order.popleft()
        self.observation = observation
        self._note()
        return call.action, Outcome.of(observation, reward, info)

    def _next(self) -> _Begun:
        while not self._order:
            strategy = self._simulator.take()
            for call in self._under_way:
                if call.strategy == strategy:
                    return call  # else it was begun before the run started again
        call = next((call for call in self._under_way if call.number == self._order[0]), None)
        if call is None:
            raise InputError(
                f"expected rows of this very run, got an answer to decision {self._order[0]}, "
                f"which it has not made after {self._gate.calls} calls"
            )
        self._simulator.take(call.strategy)
        return call

    def get_state(self) -> SavedState:
        """Beside the gate's: the calls under way."""
        under_way = [[call.number, call.action] for call in self._under_way]
        return {"decided": self._decided, "under_way": under_way, "exhausted": self.exhausted}

    def set_state(self, state: SavedState, observation: NDArray[np.float32]) -> None:
        """Continues from a snapshot, for which the gate shows `observation`; what was under way is begun again."""
        self._decided, self.exhausted = int(state["decided"]), bool(state["exhausted"])
        self.observation = observation
        for number, action in state["under_way"]:
            self._begin(_Begun(int(number), action, self._space.decode(action)))


def recorded_order(run_dir: Path, after: int = 0) -> list[int]:
    """The decisions that the rows of a run answer, behind the first `after`; none where there are no whole rows."""
    try:
        return read_rows(run_dir, ["asked"])["asked"].tolist()[after:]
    except (FileNotFoundError, DamagedRows):
        return []
