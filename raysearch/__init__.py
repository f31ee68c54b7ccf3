"""Search for parallelism strategies of distributed LLM inference: searchers, runs, studies, command line."""


def __getattr__(name: str) -> str:
    """`__version__`, looked up when asked for: the command must listen to signals before it imports anything slow."""
    if name != "__version__":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib.metadata import PackageNotFoundError, version

    try:
        return version("raysearch")
    except PackageNotFoundError:  # a checkout that was never installed
        return "0.0.0+uninstalled"
