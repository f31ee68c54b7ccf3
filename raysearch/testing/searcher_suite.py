"""What every searcher must do. A searcher's tests inherit `SearcherSuite` and name it."""

from __future__ import annotations

import contextlib
import math
import random
import tempfile
from collections.abc import Callable, Iterator
from concurrent.futures import Executor, ProcessPoolExecutor
from dataclasses import dataclass, field
from functools import cache
from multiprocessing import get_context
from pathlib import Path
from typing import ClassVar

import numpy as np
import pytest

from envs import ROWS_FILE, CallGate, RowWriter, StrategyEnv, StrategySpace, read_rows
from raysearch.runs.checkpoint import pack, unpack
from raysearch.runs.in_flight import CallsInFlight
from raysearch.searchers.interface import Searcher
from raysearch.searchers.registry import make_searcher
from raysearch.simulators.opening import searched_space
from raysearch.simulators.protocol import InProcess
from raysearch.testing.landscapes import DENSE, MOE, barren, hilly, tiny_workload
from sim.config.catalog import load_workload
from sim.evaluation import Evaluation
from sim.json_object import JsonFields
from sim.simulate import evaluate
from sim.strategy import Strategy
from sim.workload import Workload

Landscape = Callable[[Workload, Strategy], Evaluation]
FRESH_PROCESS_S = 600.0
"""[assumed] Until a run that another process ends is taken for hung: imports take a minute where all cores are busy."""


@dataclass(frozen=True)
class ConformanceSetting:
    """Everything that fixes a run, picklable."""

    name: str
    budget: int
    workload: Workload
    simulator: Landscape = hilly
    seed: int = 0
    options: JsonFields = field(default_factory=dict)


class _Noted(CallsInFlight):
    """Calls one by one, whose actions are noted as they are begun."""

    def __init__(self, gate: CallGate, simulator: InProcess, space: StrategySpace) -> None:
        super().__init__(gate, simulator, space, most=1)
        self.actions: list[np.ndarray] = []

    def begin(self, action: np.ndarray) -> None:
        self.actions.append(action)
        super().begin(action)


class ConformanceRun:
    """A searcher, a gate and the environment between them, as the project's own runs have it."""

    def __init__(self, setting: ConformanceSetting, folder: Path, *, resumed_calls: int | None = None) -> None:
        folder.mkdir(exist_ok=True)
        path = folder / ROWS_FILE
        self.folder = folder
        self.rows = RowWriter(path) if resumed_calls is None else RowWriter.resume(path, resumed_calls)
        self.space = searched_space(setting.workload, None, setting.name)
        simulator = InProcess(setting.simulator)
        env = StrategyEnv(setting.workload, evaluate=simulator, space=self.space)
        self.gate = CallGate(env, setting.budget, self.rows, run_id="r")
        self.searcher: Searcher = make_searcher(
            setting.name, self.space, seed=setting.seed, budget=setting.budget, **setting.options
        )
        self.environment = _Noted(self.gate, simulator, self.space)

    @property
    def actions(self) -> list[np.ndarray]:
        return self.environment.actions

    @property
    def observation(self) -> np.ndarray:
        return self.environment.observation

    def call(self) -> bool:
        made = self.gate.calls
        self.searcher.step(self.environment, 1)
        return self.gate.calls > made

    def advance(self, calls: int | None = None) -> ConformanceRun:
        for _ in range(self.gate.calls_left if calls is None else calls):
            if not self.call():
                break
        return self

    def state(self) -> bytes:
        state = {"gate": self.gate.get_state(), "searcher": self.searcher.get_state()}
        return pack({**state, "calls": self.environment.get_state(), "observation": self.observation})

    def restore(self, state: bytes) -> None:
        kept = unpack(state)
        self.gate.set_state(kept["gate"])
        self.environment.set_state(kept["calls"], kept["observation"])
        self.searcher.set_state(kept["searcher"])

    def close(self) -> None:
        self.searcher.close()
        self.rows.close()


def resumed(setting: ConformanceSetting, folder: Path, calls: int, state: bytes) -> ConformanceRun:
    """A run that continues from a state after so many calls."""
    run = ConformanceRun(setting, folder, resumed_calls=calls)
    run.restore(state)
    return run


@cache
def _elsewhere() -> Executor:
    """A fresh process, where none of the searchers of this one was made."""
    return ProcessPoolExecutor(max_workers=1, mp_context=get_context("spawn"))


def finish_elsewhere(setting: ConformanceSetting, folder: Path, calls: int, state: bytes) -> str:
    """Finishes a saved run; the digest of all its calls. Runs in a process where this searcher never was."""
    with contextlib.closing(resumed(setting, folder, calls, state)) as run:
        return run.advance().gate.digest


class UndisturbedRun:
    """The run that a setting makes when nothing happens to it, and what was noted on the way, for several tests.

    Attributes:
        run: At its end.
        kept: Calls, state and digest of the whole run at `SHARES` of the budget.
        metrics: The searcher's, before any call and after some.
        given: Arrays that the searcher was given or gave, each with a copy as it was then.
        half: After half of the calls: their number, the states of gate and environment, the observation.
        half_state: The searcher's state then, as it gave it.
        packed: The same, packed then.
    """

    SHARES: ClassVar = (0.0, 0.01, 0.3, 0.5, 1.0)

    def __init__(self, setting: ConformanceSetting, folder: Path) -> None:
        self.run = run = ConformanceRun(setting, folder)
        self.kept: list[tuple[float, int, bytes, str]] = []
        self.metrics: list[dict[str, float]] = []
        self.given: list[tuple[np.ndarray, np.ndarray]] = []
        for share in self.SHARES:
            self._advance(round(share * setting.budget) - run.gate.calls)
            self.kept.append((share, run.gate.calls, run.state(), run.gate.digest))
            self.metrics.append(run.searcher.metrics())
            if share == 0.5:
                self.half = (run.gate.calls, run.gate.get_state(), run.environment.get_state(), run.observation)
                self.half_state = run.searcher.get_state()
                self.packed = pack(self.half_state)

    def _advance(self, calls: int) -> None:
        for _ in range(calls):
            observation = self.run.observation
            self.given.append((observation, observation.copy()))
            if not self.run.call():
                break
            self.given.append((self.run.actions[-1], self.run.actions[-1].copy()))


class SearcherSuite:
    """What a searcher must do: inherit it in a test class and name the searcher.

    Attributes:
        searcher: Registered name, or "module:Class".
        budget: Calls of each run; enough for the searcher to show all it does.
        options: Other than its preset's.
        seeded: Whether another seed makes another run.

    >>> class TestMine(SearcherSuite):
    ...     searcher = "my_package.mine:Mine"
    """

    searcher: ClassVar[str]
    budget: ClassVar[int] = 80
    options: ClassVar[JsonFields] = {}
    seeded: ClassVar[bool] = True

    @pytest.fixture
    def setting(self) -> ConformanceSetting:
        return ConformanceSetting(self.searcher, self.budget, load_workload(MOE), options=self.options)

    @pytest.fixture(scope="class")
    @classmethod
    def undisturbed(cls, tmp_path_factory: pytest.TempPathFactory) -> Iterator[UndisturbedRun]:
        setting = ConformanceSetting(cls.searcher, cls.budget, load_workload(MOE), options=cls.options)
        whole = UndisturbedRun(setting, tmp_path_factory.mktemp("undisturbed"))
        with contextlib.closing(whole.run):
            yield whole

    @pytest.fixture
    def new_run(self, tmp_path: Path) -> Iterator[Callable[[ConformanceSetting], ConformanceRun]]:
        """Starts runs, each in a folder of its own, and closes them after the test."""
        with contextlib.ExitStack() as stack:

            def start(setting: ConformanceSetting) -> ConformanceRun:
                folder = Path(tempfile.mkdtemp(dir=tmp_path))
                return stack.enter_context(contextlib.closing(ConformanceRun(setting, folder)))

            yield start

    @pytest.mark.parametrize("place", ["moe", "dense", "tiny", "barren", "real"])
    def test_it_spends_exactly_the_budget_on_actions_of_the_space(
        self, new_run, undisturbed: UndisturbedRun, place: str
    ) -> None:
        workload, simulator, budget = {
            "moe": (load_workload(MOE), hilly, self.budget),
            "dense": (load_workload(DENSE), hilly, self.budget // 2),
            "tiny": (tiny_workload(), hilly, self.budget // 2),
            "barren": (load_workload(MOE), barren, self.budget // 2),
            "real": (load_workload(MOE), evaluate, self.budget // 2),
        }[place]
        setting = ConformanceSetting(self.searcher, budget, workload, simulator, options=self.options)
        run = undisturbed.run if place == "moe" else new_run(setting).advance()
        limit = run.searcher.sweep_calls(run.searcher.space)
        expected = budget if limit is None else min(budget, limit)
        assert run.gate.calls == len(run.actions) == len(read_rows(run.folder)) == expected
        for action in run.actions:
            assert action.dtype == np.int64
            run.space.decode(action)
        if place == "barren":
            assert run.gate.best_strategy is None
        assert not run.call()

    def test_equal_seeds_make_equal_runs_whatever_the_global_generators_do_and_becomes_of_actions_and_others_other_ones(
        self, new_run, setting: ConformanceSetting, undisturbed: UndisturbedRun
    ) -> None:
        random.seed(1)
        np.random.seed(1)  # noqa: NPY002
        careless = new_run(setting)
        while careless.call():
            careless.actions[-1][:] = 0  # which does not reach the searcher
        assert careless.gate.digest == undisturbed.run.gate.digest
        another = new_run(ConformanceSetting(**{**vars(setting), "seed": setting.seed + 1}))
        same = all(another.call() and np.array_equal(another.actions[-1], action) for action in undisturbed.run.actions)
        assert same != self.seeded

    def test_a_run_resumed_here_or_in_a_fresh_process_equals_one_that_was_never_stopped(
        self, setting: ConformanceSetting, undisturbed: UndisturbedRun
    ) -> None:
        whole = undisturbed.run
        begun, early, third, half, end = undisturbed.kept
        for (_, calls, state, _), (_, until, _, digest) in ((early, half), (begun, third)):
            with contextlib.closing(resumed(setting, whole.folder, calls, state)) as cut:
                assert cut.advance(until - calls).gate.digest == digest
        _, calls, state, _ = third  # of which the last one left all rows
        resume = _elsewhere().submit(finish_elsewhere, setting, whole.folder, calls, state)
        assert resume.result(timeout=FRESH_PROCESS_S) == whole.gate.digest
        _, calls, state, digest = end
        with contextlib.closing(resumed(setting, whole.folder, calls, state)) as cut:
            assert cut.advance().gate.digest == digest == whole.gate.digest
            assert cut.gate.get_state() == whole.gate.get_state()
            assert cut.searcher.metrics() == whole.searcher.metrics()

    def test_a_snapshot_does_not_change_while_the_run_goes_on_and_can_be_used_twice(
        self, new_run, setting: ConformanceSetting, undisturbed: UndisturbedRun
    ) -> None:
        assert pack(undisturbed.half_state) == undisturbed.packed
        calls, gate, environment, observation = undisturbed.half
        for _ in range(2):
            copied = new_run(setting)
            copied.gate.set_state(gate)
            copied.environment.set_state(environment, observation)
            copied.searcher.set_state(undisturbed.half_state)
            assert copied.gate.calls == calls
            np.testing.assert_array_equal(copied.advance().actions, undisturbed.run.actions[calls:])
            assert copied.searcher.metrics() == undisturbed.run.searcher.metrics()

    def test_it_leaves_alone_what_it_was_given_and_what_it_gave(self, undisturbed: UndisturbedRun) -> None:
        for array, copied in undisturbed.given:
            np.testing.assert_array_equal(array, copied)

    def test_its_metrics_are_numbers(self, undisturbed: UndisturbedRun) -> None:
        for metrics in undisturbed.metrics:
            for metric, value in metrics.items():
                assert isinstance(metric, str)
                assert math.isfinite(value)

    def test_a_budget_of_one_call_is_enough(self, new_run, setting: ConformanceSetting) -> None:
        assert new_run(ConformanceSetting(**{**vars(setting), "budget": 1})).advance().gate.calls == 1
