"""Code that users name: a function "module:function" of theirs, which is found, identified by its source, and imported.

It is imported only where the user named it, on the command line or in a file named there: `Origin.USER`. What was read
from a record, the folder of somebody else perhaps, names code and has it run by nobody: `Origin.RECORD`. A record keeps
the digest of the source instead, which `source_digests` finds without running anything.
"""

from __future__ import annotations

import hashlib
import importlib
import sys
from enum import Enum
from importlib.machinery import (
    EXTENSION_SUFFIXES,
    SOURCE_SUFFIXES,
    ExtensionFileLoader,
    FileFinder,
    SourceFileLoader,
)
from itertools import accumulate
from pathlib import Path
from types import ModuleType

from sim.config.reading import Unreadable, read_bytes

_LONGEST_SOURCE_BYTES = 16 * 1024**2
"""[assumed] Far longer than any module."""


class Origin(Enum):
    """Who named something: a user, on the command line or in a file named there (and so on), or a record."""

    USER = "user"
    RECORD = "record"


def import_module(name: str) -> ModuleType:
    """The module of a user's code, also found in the working directory. Raises whatever it raises."""
    here = str(Path.cwd())
    if here not in sys.path:  # an installed command does not look there by itself
        sys.path.append(here)
    return importlib.import_module(name)


NO_SOURCE = "none"
"""In place of a digest where a module has no file."""


_LOADERS = ((ExtensionFileLoader, EXTENSION_SUFFIXES), (SourceFileLoader, SOURCE_SUFFIXES))


def source_digests(*names: str | None) -> dict[str, str]:
    """The digest of the module's file of each "module:function", found but not run; what is none such is left out.

    >>> list(source_digests("json:loads", "an_entry_point", None))
    ['json:loads']
    """
    return {name: _source_digest(name) for name in names if name and ":" in name}


def _source_digest(name: str) -> str:
    path = _source_of(name.partition(":")[0])
    try:
        return hashlib.sha256(read_bytes(path, _LONGEST_SOURCE_BYTES)).hexdigest()[:16] if path else NO_SOURCE
    except (OSError, Unreadable):
        return NO_SOURCE


def _source_of(module: str) -> Path | None:
    """The file that importing a module would run last: of a package its `__init__.py`."""
    first, *rest = accumulate(module.split("."), "{}.{}".format)
    finds = (finder.find_spec(first, path) for path in (None, [str(Path.cwd())]) for finder in sys.meta_path)
    spec = next((found for found in finds if found), None)
    folders = list(spec.submodule_search_locations or ()) if spec else []
    for name in rest:  # not by Python's own search, which asks a namespace package's parent that was never imported
        specs = [found for folder in folders if (found := FileFinder(folder, *_LOADERS).find_spec(name))]
        spec = next((found for found in specs if found.loader), None)
        folders = [folder for found in ([spec] if spec else specs) for folder in found.submodule_search_locations or ()]
    return Path(spec.origin) if spec and spec.origin and spec.has_location else None
