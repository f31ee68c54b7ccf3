"""Search for parallelism strategies of distributed LLM inference: searchers, runs, studies, command line."""

from importlib.metadata import PackageNotFoundError, version

try:
    __version__ = version("raysearch")
except PackageNotFoundError:  # a checkout that was never installed
    __version__ = "0.0.0+uninstalled"
