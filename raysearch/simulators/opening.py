"""Where a run's evaluations come from: this process, or workers with a cache on disk in front of them."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path

from envs.space import StrategySpace
from envs.strategy_env import checked, failure_text
from raysearch.base.errors import InputError
from raysearch.optima.optimum_cache import cache_dir
from raysearch.processes.deadline import Patience as Patience
from raysearch.searchers.registry import searcher_class
from raysearch.simulators.measurement import failed_evaluation
from raysearch.simulators.protocol import InProcess, Simulator
from sim.evaluation import Evaluation
from sim.ops.heuristics import megatron_dims
from sim.optimum.spaces import space_of
from sim.replay.goodput import evaluate_in_phase
from sim.strategy import Strategy
from sim.workload import Workload


def open_simulator(
    simulator: str | None, workload: Workload, patience: Patience, *, workers: int, forgiving: bool = False
) -> Simulator:
    """What evaluates strategies of a workload; with workers, Ray must be connected.

    Args:
        simulator: Name of a plugged-in black box; None for our own.
        workload: What the strategies are for.
        patience: How long to wait for a worker.
        workers: Processes that evaluate; 0 is this one.
        forgiving: Whether a strategy on which a plugged-in simulator fails for good is an infeasible one.

    Raises:
        InputError: There is no such simulator, or it was given no worker.
    """
    check_workers(simulator, workers)
    if workers == 0:
        return InProcess(evaluate_in_phase, patience.timeout_s)
    from raysearch.simulators.cache import AnswerCache
    from raysearch.simulators.plugin import load_plugin
    from raysearch.simulators.workers import Workers

    kept = None
    if simulator is not None:
        kept = AnswerCache(answers_dir() / f"{load_plugin(simulator).fingerprint}.sqlite", workload)
    opened = Workers(simulator, workload, workers=workers, patience=patience, kept=kept)
    return Forgiving(opened, patience.retries) if forgiving else opened


class Forgiving:
    """Answers that a strategy is infeasible where the black box fails on it for good.

    What is not a strategy's fault, such as a package that is missing, still stops the run.

    Args:
        source: The black box.
        retries: How often a failing call is tried again before.
    """

    def __init__(self, source: Simulator, retries: int) -> None:
        self._source = source
        self._retries = retries

    def begin(self, strategy: Strategy) -> None:
        """Passes on what will be asked for."""
        self._source.begin(strategy)

    def take(self, strategy: Strategy | None = None) -> Strategy:
        """What the black box takes."""
        return self._source.take(strategy)

    def __call__(self, workload: Workload, strategy: Strategy) -> Evaluation:
        """The evaluation of a strategy, or one whose only violation is "failed" and says why."""
        for _ in range(self._retries):
            with suppress(Exception):
                return checked(self._source(workload, strategy), strategy)
        try:
            return checked(self._source(workload, strategy), strategy)
        except InputError:
            raise
        except Exception as error:
            return failed_evaluation(workload, strategy, failure_text(error))

    def asked_twice(self, workload: Workload) -> list[str]:
        """What the black box says otherwise when it is asked again."""
        return self._source.asked_twice(workload)

    def close(self) -> None:
        """Closes the black box."""
        self._source.close()


def check_workers(simulator: str | None, workers: int) -> None:
    """Refuses to evaluate a plugged-in simulator where the searcher runs. Raises: InputError."""
    if simulator is not None and workers == 0:
        raise InputError(f"simulator {simulator!r} may hang or die, so it needs workers: expected >= 1, got 0")


def declared_noise(simulator: str | None) -> float:
    """Standard deviation of the log of a black box's answers, as it declares; 0 of a pure one and of our own."""
    if simulator is None:
        return 0.0
    from raysearch.simulators.plugin import load_plugin

    return load_plugin(simulator).noise


def answers_dir() -> Path:
    """Where answers of plugged-in simulators are kept, beside the optima."""
    return cache_dir() / "answers"


def searched_space(workload: Workload, simulator: str | None, searcher: str) -> StrategySpace:
    """The space in which a searcher searches a workload: the workload's, but a heuristic has degrees alone.

    A simulator that knows degrees only is asked with Megatron-LM's dims throughout.

    Raises:
        InputError: There is no such simulator, or it would not know what the extended space asks for.
        UnknownName: There is no such searcher.
    """
    own_dims = searcher_class(searcher).own_dims(workload.model)
    if simulator is None:
        return StrategySpace(workload, fixed_dims=own_dims)
    from raysearch.simulators.plugin import load_plugin

    plugin = load_plugin(simulator)
    if not space_of(workload).one_mesh:
        raise InputError(
            f"simulator {simulator!r} knows the paper's strategies only, but {workload.name} searches the space "
            f"{workload.space!r}; leave out its `space`, or the simulator"
        )
    return StrategySpace(workload, fixed_dims=megatron_dims(workload.model) if plugin.degrees_only else own_dims)
