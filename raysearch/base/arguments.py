"""Arguments of the Python interface, compared with what its functions say that they take."""

from __future__ import annotations

import builtins
import functools
import inspect
import math
import sys
from collections.abc import Callable, Mapping
from typing import Any, ParamSpec, TypeVar, get_type_hints

from pydantic import TypeAdapter, ValidationError

from envs.strategy_env import brief
from raysearch.base.errors import InputError

NumberBounds = Mapping[str, tuple[float, float]]
_SIMULATED: NumberBounds = {"requests": (10, 10_000_000), "cv": (0.05, 20.0), "percentile": (0.0, 100.0)}
BOUNDS: Mapping[str, NumberBounds] = {
    "place": {
        "rate": (0.001, 1000.0),
        "cv": (0.05, 20.0),
        "requests": (100, 1_000_000),
        "seeds": (1, 10_000),
        "gpus": (1, 256),
    },
    "replay": {
        **_SIMULATED,
        "seeds": (1, 1000),
        "spread": (0.01, 1.0),
        "cached": (0.0, 1.0),
        "replicas": (1, 1000),
        "alternative": (0, math.inf),
        "concurrency": (1, math.inf),
    },
    "recommend": {
        **_SIMULATED,
        "top": (1, math.inf),
        "price": (0.0, math.inf),
        "replays": (0, 10_000),
        "concurrency": (1, math.inf),
    },
    "pools": {
        "requests": (10, 10_000_000),
        "kv_hidden": (0.0, 1.0),
        "host_gb": (0.0, math.inf),
        "host_gb_per_s": (1e-3, math.inf),
    },
    "optimum": {"replays": (1, 1_000_000)},
    "export": {"replicas": (1, math.inf), "alternative": (0, math.inf), "longest_request": (1, math.inf)},
    "search": {
        "budget": (1, math.inf),
        "seed": (0, math.inf),
        "workers": (0, 10_000),
        "timeout_s": (0, 2_592_000.0),
        "retries": (0, 1000),
        "cpus_per_worker": (0, 10_000),
        "gpus_per_worker": (0, 10_000),
    },
    "study": {"cpus": (1, 10_000), "workers": (0, 10_000)},
}
"""Least and most of numbers, by function and parameter: those of its command, as a test compares."""

P = ParamSpec("P")
T = TypeVar("T")


def typed(function: Callable[P, T]) -> Callable[P, T]:
    """The same function, which refuses in one line an argument of another type or out of its `BOUNDS`.

    Types that only a type checker imports are not compared; what takes them says itself what it takes.
    """
    signature, bounds = inspect.signature(function), BOUNDS.get(function.__name__, {})

    @functools.wraps(function)
    def called(*args: P.args, **kwargs: P.kwargs) -> T:
        given = signature.bind(*args, **kwargs)  # or Python says itself which is missing, or unknown
        for name, value in given.arguments.items():
            try:
                _adapters(function)[name].validate_python(value, strict=True)
            except ValidationError:
                kind = signature.parameters[name].annotation
                raise InputError(
                    f"{function.__name__}({name}=...): expected {kind}, got {brief(repr(value))} "
                    f"of type {type(value).__name__}; see help(raysearch.{function.__name__})"
                ) from None
            least, most = bounds.get(name, (-math.inf, math.inf))
            if name in bounds and value is not None and not least <= value <= most:
                words = f"from {least:,} to {most:,}" if most < math.inf else f"of at least {least:,}"
                raise InputError(f"{function.__name__}({name}=...): expected a number {words}, got {value!r}")
        return function(*args, **kwargs)

    return called


class _Unknown(dict[str, Any]):
    """Takes every name that is not imported for any type."""

    def __missing__(self, name: str) -> Any:
        return Any


@functools.cache
def _adapters(function: Callable[..., Any]) -> dict[str, TypeAdapter[Any]]:
    names = _Unknown(vars(builtins), **vars(sys.modules[function.__module__]))
    hints = get_type_hints(function, globalns={}, localns=names)
    return {name: TypeAdapter(hint) for name, hint in hints.items() if name != "return"}
