"""A search's environment for RLlib and Tune: `LearnToShardConfig().environment(SearchEnvironment, env_config={...})`.

It brings what a run of `raysearch search` has: rows, answers kept on disk, timeout, failure policy, workers and what
each of them takes. `LearnToShard` steps it with several calls under way. Importing this also tells RLlib of
`raysearch/Strategy-v0`, for its own algorithms, which step one call after the other.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any

import numpy as np
from gymnasium import Env
from gymnasium.spaces import Box
from gymnasium.vector import VectorEnv
from numpy.typing import NDArray
from ray.tune.registry import register_env

from envs.recording import CallGate, saved_rows
from envs.registration import ENV_ID, make_env, make_vector_env
from envs.rows import ROWS_FILE, RowWriter
from envs.saved_state import SavedState
from envs.space import Action
from envs.strategy_env import StrategyEnv
from raysearch.base.errors import InputError
from raysearch.processes.deadline import Patience
from raysearch.runs.in_flight import CallsInFlight, recorded_order
from raysearch.runs.records import RunSpec
from raysearch.searchers.interface import Outcome
from raysearch.simulators.opening import open_simulator, searched_space
from sim.near_names import did_you_mean
from sim.strategy import Strategy

_OWN = {"folder", "elites"}
_SPEC = {field.name for field in fields(RunSpec)} - {"searcher", "options"}
_PATIENCE = {field.name for field in fields(Patience)}


class SearchEnvironment:
    """See `raysearch.searchers.interface.Environment`; calls are actions of `action_space`, each choice a head.

    Args:
        named: RLlib's `env_config`: fields of `RunSpec` but searcher and options, those of `Patience`, `elites`, the
            rows of the observation, and `folder`, where the rows of calls go: it may hold those of a search that is
            resumed.

    Raises:
        InputError, CatalogError: A field is unknown, or the search cannot be made.
    """

    def __init__(self, named: Mapping[str, Any]) -> None:
        for name in named:
            if name not in (known := _SPEC | _PATIENCE | _OWN):
                raise InputError(f"unknown key {name!r} of a search's environment: {did_you_mean(name, sorted(known))}")
        elites, folder = named.get("elites", 3), named["folder"]
        spec = RunSpec(searcher="random", **{name: value for name, value in named.items() if name in _SPEC})
        self._patience = Patience(**{name: value for name, value in named.items() if name in _PATIENCE})
        self._spec, self._elites, self._folder = spec, elites, Path(folder)
        workload = spec.load()
        self._space = searched_space(workload, spec.simulator, spec.searcher)
        self.action_space = self._space.factored.actions
        self.observation_space = Box(-1.0, 1.0, (elites, len(self._space.sizes)), np.float32)
        forgiving = spec.on_failure == "infeasible"
        self._simulator = open_simulator(
            spec.simulator, workload, self._patience, workers=spec.workers, forgiving=forgiving
        )
        self._env = StrategyEnv(
            workload, evaluate=self._simulator, elites=elites, space=self._space, retries=self._patience.retries
        )
        self._folder.mkdir(parents=True, exist_ok=True)
        self._order = recorded_order(self._folder) if spec.workers else []
        self._begin(RowWriter.resume(self._folder / ROWS_FILE, 0))

    def _begin(self, rows: RowWriter) -> None:
        self._gate = CallGate(self._env, self._spec.budget, rows, run_id=self._folder.name)
        self._calls = CallsInFlight(
            self._gate, self._simulator, self._space, most=self._spec.in_flight, order=self._order[rows.lines :]
        )

    @property
    def observation(self) -> NDArray[np.float32]:
        """Elite history, [T, A]."""
        return self._calls.observation

    @property
    def best_strategy(self) -> Strategy | None:
        """The first strategy that reached the best throughput; None while nothing feasible was found."""
        return self._gate.best_strategy

    @property
    def under_way(self) -> int:
        """Calls that were begun and not taken in."""
        return self._calls.under_way

    @property
    def may_begin(self) -> bool:
        """Whether a further call may be begun."""
        return self._calls.may_begin

    def decode(self, action: Action) -> Action:
        """What a call of an action [A] of `action_space` is begun with."""
        return self._space.factored.decode(action)

    def begin(self, action: Action) -> None:
        """Begins a call."""
        self._calls.begin(action)

    def take(self) -> tuple[Action, Outcome]:
        """Takes in the call that is answered first."""
        return self._calls.take()

    def get_state(self) -> SavedState:
        """How far it is; the rows themselves stay in its folder."""
        return {"gate": self._gate.get_state(), "calls": self._calls.get_state()}

    def set_state(self, state: SavedState) -> None:
        """Goes back to a snapshot.

        Raises:
            ValueError: The folder does not hold the rows that it was made after.
        """
        self._gate.close()
        made = state["gate"]["calls"]
        self._begin(RowWriter.resume(self._folder / ROWS_FILE, made, saved_rows(state["gate"])))
        self._gate.set_state(state["gate"])
        self._calls.set_state(state["calls"], self._env.observation)

    def close(self) -> None:
        """Lets go of rows and workers."""
        self._gate.close()
        self._simulator.close()


def create(context: Any) -> Env | VectorEnv:
    """`raysearch/Strategy-v0` by RLlib's `env_config`, the arguments of `make_env`; many with `num_envs`."""
    arguments = dict(context)
    return make_vector_env(**arguments) if "num_envs" in arguments else make_env(**arguments)


register_env(ENV_ID, create)
