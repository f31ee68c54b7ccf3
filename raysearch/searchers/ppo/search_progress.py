"""The account of a search's calls: how many, by which agent, and the best of them."""

from __future__ import annotations

from typing import final

from envs.saved_state import SavedState
from raysearch.searchers.interface import Outcome


@final
class Progress:
    """Of one search: `count` takes a call, `begin_agent` begins the next agent.

    Args:
        budget: Calls of the search.

    Attributes:
        calls: Made since the search began, by all agents.
        restarts: Agents that came before the present one.
        born: Calls before the present one's first.
        best: Best feasible throughput that was seen, 0.0 while there is none.
        chunk_bests: The same of each agent's calls.
    """

    def __init__(self, budget: int) -> None:
        self._budget = budget
        self.calls = self.restarts = self.born = 0
        self.best = 0.0
        self.chunk_bests = [0.0]
        self._chunk_of_last_call = 1

    @property
    def calls_left(self) -> int:
        """Calls until the budget is spent."""
        return self._budget - self.calls

    @property
    def chunk(self) -> int:
        """Number of the present agent, from 1."""
        return self.restarts + 1

    def begin_agent(self) -> None:
        """Ends the present agent; the best stays."""
        self.restarts += 1
        self.born = self.calls
        self.chunk_bests.append(0.0)

    def count(self, outcome: Outcome) -> None:
        """Counts a call."""
        self.calls += 1
        self._chunk_of_last_call = self.chunk
        raw = float(outcome.raw) if outcome.feasible else 0.0
        self.best = max(self.best, raw)
        self.chunk_bests[-1] = max(self.chunk_bests[-1], raw)

    def chunk_figures(self) -> dict[str, float]:
        """Of the agent that made the last call: its number, its best, and whether it has ended."""
        chunk = self._chunk_of_last_call
        ended = self.chunk > chunk or self.calls_left == 0
        return {"chunk": float(chunk), "chunk_best": self.chunk_bests[chunk - 1], "chunk_done": float(ended)}

    def get_state(self) -> SavedState:
        """What `set_state` needs: plain values."""
        return {
            "calls": self.calls,
            "restarts": self.restarts,
            "born": self.born,
            "best": self.best,
            "chunk_bests": list(self.chunk_bests),
            "chunk_of_last_call": self._chunk_of_last_call,
        }

    def set_state(self, state: SavedState) -> None:
        """Goes back to where `get_state` was called."""
        self.calls, self.restarts, self.born = state["calls"], state["restarts"], state["born"]
        self.best, self.chunk_bests = state["best"], list(state["chunk_bests"])
        self._chunk_of_last_call = state["chunk_of_last_call"]
