"""Search for parallelism strategies of distributed LLM inference: searchers, runs, studies, command line.

>>> import raysearch as rs
>>> rs.evaluate(rs.question(model="llama_3_1_8b", isl=1000, osl=100), tp=1, batch=8).feasible
True
"""

from typing import TYPE_CHECKING, Any

from raysearch.base.version import __version__

if TYPE_CHECKING:
    from raysearch.api import evaluate, question, recommend

__all__ = ["__version__", "evaluate", "question", "recommend"]


def __getattr__(name: str) -> Any:
    """The interface, imported when asked for: the command must listen to signals before it imports anything slow."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from raysearch import api

    return getattr(api, name)


def __dir__() -> list[str]:
    return sorted(__all__)
