"""Runs the Python that a workload file names to declare choices of ops: see `sim.layers.choices.declare_choice`."""

from __future__ import annotations

import hashlib
import inspect
from collections.abc import Callable
from functools import cache
from typing import Any

from sim.config.code import import_module
from sim.config.files import CatalogError
from sim.layers.declared import declared_by
from sim.near_names import did_you_mean

_ran: list[str] = []
"""The one function that declared choices in this process, if any did: numbers follow from the order of declaring."""


class NotImported(CatalogError):
    """A record's workload declares choices by code, which records never run."""

    def __init__(self, name: str) -> None:
        super().__init__(
            f"its workload has choices of ops that {name} declares, and code is run only where you name it, "
            "or a file that names it, on the command line"
        )


@cache
def declare(name: str) -> str:
    """Has "module:function" declare its choices, once in a process.

    Modules are also found in the working directory.

    Returns:
        Digest of the module's source, since what it declares decides what a strategy costs.

    Raises:
        CatalogError: It cannot be imported or called, it fails, or another one has declared choices here.
    """
    if _ran:
        raise CatalogError(
            f"declared_choices: {_ran[0]} has declared choices in this process already, and {name} would give the same "
            "numbers to others; let one function declare them all"
        )
    function = _imported(name)
    try:
        with declared_by(name):
            function()
    except Exception as error:
        raise CatalogError(f"declared_choices: {name} failed: {type(error).__name__}: {error}") from error
    _ran.append(name)
    return hashlib.sha256(inspect.getsource(inspect.getmodule(function) or function).encode()).hexdigest()[:16]


def _imported(name: str) -> Callable[[], Any]:
    module_name, colon, attribute = name.partition(":")
    if not (colon and attribute):
        raise CatalogError(f"declared_choices: expected 'module:function', got {name!r}")
    try:
        module = import_module(module_name)
    except Exception as error:
        raise CatalogError(
            f"declared_choices: cannot import {module_name}: {type(error).__name__}: {error}; it must be installed, "
            "on PYTHONPATH, or in the working directory"
        ) from error
    function = getattr(module, attribute, None)
    if not inspect.isfunction(function):
        known = [key for key, value in vars(module).items() if inspect.isfunction(value) and not key.startswith("_")]
        raise CatalogError(
            f"declared_choices: {module_name} has no function {attribute!r}; {did_you_mean(attribute, known)}"
        )
    return function
