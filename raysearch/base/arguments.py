"""Arguments of the Python interface, compared with what its functions say that they take."""

from __future__ import annotations

import builtins
import functools
import inspect
import math
import re
import sys
import textwrap
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ParamSpec, TypeVar, get_type_hints

from pydantic import TypeAdapter, ValidationError

from envs.strategy_env import brief
from raysearch.base.errors import InputError, RunFailed
from sim.config.files import CatalogError
from sim.config.question import QUESTION_FIELDS, as_arguments, option_names, plain
from sim.near_names import did_you_mean
from sim.strategy_checks import StrategyError

NumberBounds = Mapping[str, tuple[float, float]]
_SIMULATED: NumberBounds = {"requests": (10, 10_000_000), "cv": (0.05, 20.0), "percentile": (0.001, 100.0)}
BOUNDS: Mapping[str, NumberBounds] = {
    "place": {
        **_SIMULATED,
        "rate": (0.001, 1000.0),
        "requests": (100, 1_000_000),
        "seeds": (1, 10_000),
        "gpus": (1, 256),
    },
    "replay": {
        **_SIMULATED,
        "seeds": (1, 1000),
        "spread": (0.01, 1.0),
        "length_cv": (0.0, 10.0),
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
        **_SIMULATED,
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

_ARGUMENTS: dict[str, Mapping[str, inspect.Parameter]] = {}
"""By name, those of every function of the interface."""

P = ParamSpec("P")
T = TypeVar("T")


def in_python(function: Callable[P, T], name: str = "") -> Callable[P, T]:
    """The same function, which refuses in one line arguments that it has not, and names them as Python does.

    What it calls serves the commands too, whose options its messages name.

    Args:
        function: One of the interface.
        name: What it is called there, if not by its own name.
    """
    signature = inspect.signature(function)
    names = option_names(*signature.parameters)
    _ARGUMENTS[name or function.__name__] = signature.parameters

    @functools.wraps(function, updated=())
    def called(*args: P.args, **kwargs: P.kwargs) -> T:
        try:
            signature.bind(*args, **kwargs)
        except TypeError:
            raise InputError(_misfit(name or function.__name__, signature, args, kwargs)) from None
        try:
            return function(*args, **kwargs)
        except (InputError, CatalogError, StrategyError, RunFailed) as error:
            error.args = (as_arguments(str(error), names), *error.args[1:])
            raise

    shown: Any = called
    shown.__signature__ = _readable(signature)
    if inspect.isclass(function):
        shown.__signature__ = shown.__signature__.replace(return_annotation=_Kind(function.__name__))
    if name:
        shown.__name__, shown.__qualname__ = name, name
    return called


def question_help() -> str:
    """What the arguments of a question mean, for `help`: their own texts, whose options are named as arguments."""
    names = option_names()
    lines = [
        textwrap.fill(
            as_arguments(f"{name}: {about.help} Default: {about.usual}.", names),
            width=116,
            initial_indent="    ",
            subsequent_indent="        ",
            break_on_hyphens=False,
        )
        for name, about in QUESTION_FIELDS.items()
    ]
    return "\n".join(("Args:", *lines))


class _Kind:
    """A type in a signature that people read: its words, without quotes or what `Annotated` has beside it."""

    def __init__(self, kind: object) -> None:
        self.words = kind if isinstance(kind, str) else inspect.formatannotation(kind)
        if found := re.fullmatch(r"Annotated\[(.+?), About\(.*\)\]", self.words, re.DOTALL):
            self.words = found[1]

    def __repr__(self) -> str:
        return self.words


def _readable(signature: inspect.Signature) -> inspect.Signature:
    parameters = [each.replace(annotation=_Kind(each.annotation)) for each in signature.parameters.values()]
    return signature.replace(parameters=parameters, return_annotation=_Kind(signature.return_annotation))


def _misfit(function: str, signature: inspect.Signature, args: Sequence[object], kwargs: Mapping[str, object]) -> str:
    """Why arguments are not those of a function."""
    parameters = signature.parameters
    unnamed = [name for name, each in parameters.items() if each.kind is not each.KEYWORD_ONLY]
    for name in kwargs:
        if name not in parameters:
            return f"{function}({name}=...): there is no such argument: {_near(name, parameters)}"
        if name in unnamed[: len(args)]:
            return f"{function}({name}=...): given twice, by its place and by its name"
    if len(args) > len(unnamed):
        expected = f"only {' and '.join(unnamed)} without a name" if unnamed else "every argument by its name"
        return f"{function}(...): expected {expected}, got {brief(repr(args[len(unnamed)]))} too"
    missing = next(
        name
        for place, (name, each) in enumerate(parameters.items())
        if each.default is each.empty and name not in kwargs and place >= len(args)
    )
    return f"{function}({missing}=...): expected {parameters[missing].annotation}, got nothing"


def _near(name: str, parameters: Mapping[str, object]) -> str:
    """What takes an argument that a function has not, the question first; where nothing does, the nearest of its."""
    of = [f"rs.{each}" for each, arguments in _ARGUMENTS.items() if name in arguments]
    if not of:
        return did_you_mean(name, parameters)
    if "rs.question" in of:
        return f"{name} is of rs.question(...)"
    return f"{name} is of {' and '.join(filter(None, (', '.join(of[:-1]), of[-1])))}"


def _in_words(annotation: str) -> str:
    """A type as a message names it: the values where these are few.

    >>> _in_words("Literal['a', 'b', 'c'] | None"), _in_words("int | None")
    ("'a', 'b' or 'c'", 'int | None')
    """
    found = re.fullmatch(r"Literal\[(.*)\](?: \| None)?", annotation)
    return re.sub(r", (?=[^,]*$)", " or ", found[1]) if found else annotation


def typed(function: Callable[P, T]) -> Callable[P, T]:
    """The same function `in_python`, which refuses an argument of another type or out of its `BOUNDS`, too.

    Types that only a type checker imports are not compared; what takes them says itself what it takes.
    """
    signature, bounds = inspect.signature(function), BOUNDS.get(function.__name__, {})

    @in_python
    @functools.wraps(function)
    def called(*args: P.args, **kwargs: P.kwargs) -> T:
        given = signature.bind(*args, **kwargs)
        given.arguments.update({name: plain(value) for name, value in given.arguments.items()})
        for name, value in given.arguments.items():
            try:
                _adapters(function)[name].validate_python(value, strict=True)
            except ValidationError:
                kind = _in_words(signature.parameters[name].annotation)
                raise InputError(
                    f"{function.__name__}({name}=...): expected {kind}, got {brief(repr(value))} "
                    f"of type {type(value).__name__}; see help(raysearch.{function.__name__})"
                ) from None
            least, most = bounds.get(name, (-math.inf, math.inf))
            if name in bounds and value is not None and not least <= value <= most:
                words = f"from {least:,} to {most:,}" if most < math.inf else f"of at least {least:,}"
                raise InputError(f"{function.__name__}({name}=...): expected a number {words}, got {value!r}")
        return function(*given.args, **given.kwargs)

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
