"""Arguments of the Python interface, compared with what its functions say that they take."""

from __future__ import annotations

import builtins
import functools
import inspect
import sys
from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar, get_type_hints

from pydantic import TypeAdapter, ValidationError

from envs.strategy_env import brief
from raysearch.base.errors import InputError

P = ParamSpec("P")
T = TypeVar("T")


def typed(function: Callable[P, T]) -> Callable[P, T]:
    """The same function, which refuses an argument of another type than its parameter's annotation, in one line.

    Types that only a type checker imports are not compared; what takes them says itself what it takes.
    """
    signature = inspect.signature(function)

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
