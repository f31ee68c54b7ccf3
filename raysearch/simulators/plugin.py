"""Finds a black box by name: "module:function", or an entry point that a package declares."""

from __future__ import annotations

import hashlib
import inspect
from collections.abc import Callable
from importlib.metadata import PackageNotFoundError, packages_distributions, version
from pathlib import Path
from typing import Any

from envs.strategy_env import Evaluate
from raysearch.base.errors import InputError
from raysearch.base.foreign import foreign
from raysearch.base.named_code import load_named
from raysearch.simulators.measurement import as_evaluation
from sim.evaluation import Evaluation
from sim.replay.goodput import evaluate_in_phase
from sim.strategy import Strategy
from sim.workload import Workload

SIMULATORS_GROUP = "raysearch.simulators"
"""Group in which a package's pyproject.toml declares simulators."""
OWN = "raysearch"
"""Name of the simulator of this package."""
MOST_NOISE = 1.0
"""[assumed] Beyond it an answer tells next to nothing."""


class Plugin:
    """A black box and what is known about it.

    A black box is any callable from `(sim.workload.Workload, sim.strategy.Strategy)` to a
    `raysearch.simulators.measurement.Measurement`. It must be pure: equal strategies give equal answers, unless it says
    how noisy it is. It may carry four attributes: `degrees_only`, True if the dims make no difference to it; `noise`,
    the standard deviation of the log of an answer; `fingerprint`, a text that changes when its answers do (its
    database's version, say), without which its module's source stands for it; and `packages`, names of installed
    packages whose versions its answers depend on, beside the one that it comes from.

    Attributes:
        name: As the user gave it.
        degrees_only: Whether only tp, ep, pp and batch are searched.
        noise: See above; 0 if it is pure.
    """

    def __init__(self, name: str, function: Callable[[Workload, Strategy], Any]) -> None:
        self.name = name
        self._function = function
        with foreign(f"simulator {name!r}: cannot find out what it is", InputError):
            self.degrees_only = bool(getattr(function, "degrees_only", False))
            self.noise = float(getattr(function, "noise", 0.0))
        if not 0 <= self.noise <= MOST_NOISE:
            raise InputError(
                f"simulator {name!r}: expected noise from 0 to {MOST_NOISE}, the standard deviation of the log of an "
                f"answer (0.05 for 5 %), got {self.noise!r}"
            )

    def __call__(self, workload: Workload, strategy: Strategy) -> Evaluation:
        """Asks the black box. Raises whatever it raises, and ValueError for an answer that is none."""
        return as_evaluation(workload, strategy, self._function(workload, strategy))

    @property
    def fingerprint(self) -> str:
        """Digest that decides whether answers kept on disk are valid. Raises: InputError, if it has no such texts."""
        with foreign(f"simulator {self.name!r}: cannot find out its fingerprint or packages", InputError):
            own = getattr(self._function, "fingerprint", None)
            text = str(own) if own is not None else _source(self._function)
            packages = {*_package_of(self._function), *getattr(self._function, "packages", ())}
            versions = [f"{package} {_version_of(package)}" for package in sorted(packages)]
        return hashlib.sha256("\0".join([self.name, text, *versions]).encode()).hexdigest()[:16]


def load_simulator(name: str | None) -> Evaluate:
    """The black box of that name, imported now; None stands for our own.

    Raises:
        InputError: There is none, it cannot be imported, or it is not callable with two arguments.
    """
    return evaluate_in_phase if name in (None, OWN) else load_plugin(name)


def load_plugin(name: str) -> Plugin:
    """A plugged-in black box by "module:function" or by the name of an entry point.

    Modules are also found in the working directory. Raises: InputError, see `load_simulator`.
    """
    return Plugin(name, load_function(name))


def load_function(name: str) -> Callable[[Workload, Strategy], Any]:
    """The function of that name, imported now. Raises: InputError, see `load_simulator`."""
    function = load_named("simulator", name, SIMULATORS_GROUP, "module:function", (OWN,))
    with foreign(f"simulator {name!r}: cannot find out what it is", InputError):
        if not callable(function):
            raise InputError(f"simulator {name!r} is {function!r}: expected a function of a workload and a strategy")
        try:
            inspect.signature(function).bind(None, None)
        except TypeError as error:
            raise InputError(
                f"simulator {name!r}: expected to call it with (workload, strategy), but its signature is "
                f"{inspect.signature(function)}: {error}"
            ) from error
        except Exception:  # no signature: written in C, or it cannot be asked for; the first call shows
            pass
        return function


def _package_of(function: Any) -> list[str]:
    """The installed package that a black box comes from; none of a module that lies in a folder."""
    module = getattr(inspect.unwrap(function), "__module__", None) or type(function).__module__
    return packages_distributions().get(module.partition(".")[0], [])


def _version_of(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "not installed"


def _source(function: Any) -> str:
    try:
        return Path(inspect.getfile(inspect.unwrap(function))).read_text(encoding="utf-8")
    except (TypeError, OSError, UnicodeDecodeError):
        return repr(type(function))
