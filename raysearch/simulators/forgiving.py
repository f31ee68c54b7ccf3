"""A black box whose failures are infeasible calls: where a strategy that crashes an engine is an answer, too."""

from __future__ import annotations

from contextlib import suppress

from envs.strategy_env import checked, failure_text
from raysearch.base.errors import InputError
from raysearch.simulators.measurement import failed_evaluation
from raysearch.simulators.protocol import Simulator
from sim.evaluation import Evaluation
from sim.strategy import Strategy
from sim.workload import Workload


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
        """What the black box says otherwise when it is asked anew."""
        return self._source.asked_twice(workload)

    def close(self) -> None:
        """Closes the black box."""
        self._source.close()
