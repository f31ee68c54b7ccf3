"""Search for parallelism strategies of distributed LLM inference: searchers, runs, studies, command line.

>>> import raysearch as rs
>>> rs.evaluate(rs.question(model="llama_3_1_8b", isl=1000, osl=100), tp=1, batch=8).feasible
True
"""

import os
import resource
import sys
from importlib import import_module
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

_LARGEST_BYTECODE_BYTES = 1 << 24
"""[assumed] Several times that of the longest module."""
if 0 <= resource.getrlimit(resource.RLIMIT_FSIZE)[0] < _LARGEST_BYTECODE_BYTES:
    # CPython would cut off what it writes, without a word, and no later process could import it.
    sys.dont_write_bytecode = True
    os.environ["PYTHONDONTWRITEBYTECODE"] = "1"

from raysearch.base.version import __version__  # noqa: E402

if TYPE_CHECKING:
    from raysearch.api import (
        evaluate,
        export,
        optimum,
        place,
        pools,
        question,
        recommend,
        replay,
        report,
        search,
        study,
    )
    from raysearch.searchers.interface import NoOptions, Outcome, Searcher
    from raysearch.searchers.merit import merit

__all__ = [
    "NoOptions",
    "Outcome",
    "Searcher",
    "__version__",
    "evaluate",
    "export",
    "merit",
    "optimum",
    "place",
    "pools",
    "question",
    "recommend",
    "replay",
    "report",
    "search",
    "study",
]
_OF_SEARCHERS = {"NoOptions": "interface", "Outcome": "interface", "Searcher": "interface", "merit": "merit"}
"""What a searcher of one's own takes, by module of `raysearch.searchers`; `raysearch.api` has the rest."""


def __getattr__(name: str) -> Any:
    """The interface, imported when asked for: the command must listen to signals before it imports anything slow."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    module = f"raysearch.searchers.{_OF_SEARCHERS[name]}" if name in _OF_SEARCHERS else "raysearch.api"
    return getattr(import_module(module), name)


def __dir__() -> list[str]:
    return sorted(__all__)


def _check_neighbours() -> None:
    """Makes sure that `sim` and `envs` are those beside this package, whatever else the import path has.

    Raises:
        ImportError: A package of the same name comes first; the command ends with one line that says so.
    """
    for name in ("sim", "envs"):
        found, own = find_spec(name), os.path.join(os.path.dirname(__path__[0]), name, "__init__.py")
        if found is not None and os.path.realpath(found.origin or "") != os.path.realpath(own):
            text = (
                f"raysearch's own package {name!r} is hidden by {found.origin or 'a folder of that name'}, which comes "
                "first in the import path: rename that, or keep its folder out of the path (python -P leaves the "
                "working directory out)"
            )
            if sys.argv and os.path.basename(sys.argv[0]) in ("raysearch", "-m"):  # "-m" until its module runs
                print(f"error: {text}", file=sys.stderr)
                sys.exit(2)
            raise ImportError(text)


_check_neighbours()
