"""Search for parallelism strategies of distributed LLM inference: searchers, runs, studies, command line."""

__version__ = "0.1.0"
