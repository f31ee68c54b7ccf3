"""Objects that users name, "module:attribute" or the entry point of an installed package: imported when loaded."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping
from functools import cache
from importlib.metadata import EntryPoint, entry_points
from types import MappingProxyType
from typing import Any

from raysearch.base.errors import InputError
from raysearch.base.foreign import foreign
from sim.config.code import import_module
from sim.near_names import did_you_mean

_log = logging.getLogger(__name__)


def load_named(
    what: str,
    name: str,
    group: str,
    form: str,
    others: Iterable[str] = (),
    unknown: type[InputError] = InputError,
) -> Any:
    """The object of a name that a user gave.

    Args:
        what: It is expected to be: "simulator", "searcher".
        name: "module:attribute", whose module is also found in the working directory, or an entry point's name.
        group: In which packages declare such entry points.
        form: Of one's own code: "module:function", "module:Class".
        others: Further names that would have been good, for the message.
        unknown: What is raised for a name that nobody has.

    Raises:
        InputError: There is no such name, module or attribute, or it cannot be imported.
    """
    declared = declared_points(group)
    if ":" not in name and name not in declared:
        hint = did_you_mean(name, [*declared, *others])
        raise unknown(f"unknown {what} {name!r}: {hint} (or give {form} of your own)")
    if len(rivals := _declaring(group, name)) > 1:
        raise unknown(f"{what} {name!r}: packages declare it as {' and as '.join(rivals)}; give the one that you mean")
    point = EntryPoint(name, name, group) if ":" in name else declared[name]
    module, _, attribute = point.value.partition(":")
    with foreign(f"{what} {name!r}: cannot import {module}", InputError):
        found: Any = import_module(module)
        for part in attribute.split("."):
            if not hasattr(found, part):
                hint = did_you_mean(part, [key for key in vars(found) if not key.startswith("_")])
                raise InputError(f"{what} {name!r}: {found.__name__} has no {part!r}; {hint}")
            found = getattr(found, part)
        return found


@cache
def declared_points(group: str) -> Mapping[str, EntryPoint]:
    """The entry points that installed packages declare in a group, by name; looked for once, none is imported."""
    return MappingProxyType({point.name: point for point in entry_points(group=group)})


def _declaring(group: str, name: str) -> list[str]:
    """What installed packages declare by a name, which is one thing unless they disagree."""
    return sorted({point.value for point in entry_points(group=group, name=name)})


@cache
def note_if_declared(what: str, name: str, group: str) -> None:
    """Says once that a name is ours where an installed package declares it, too."""
    for value in _declaring(group, name):
        _log.warning("note: %s %r is raysearch's own; that of a package, %s, needs another name", what, name, value)
