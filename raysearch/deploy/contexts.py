"""How long the requests of a model may be, as its makers published it, and what to say of longer ones.

Figures of longer requests are as good as those of shorter ones; but engines do not start for them unless positions are
stretched, which only a model's makers can say how.
"""

from __future__ import annotations

import os
from pathlib import Path

from raysearch.base.errors import InputError
from sim.config.files import CatalogError, config_path, read_json
from sim.config.question import Question
from sim.layers.model import Model
from sim.workload import Workload

_KEY = "max_position_embeddings"
_STRETCH = 4
"""Times its context to which a model is recommended, as Qwen's model cards stretch theirs by YaRN. [assumed] of others
"""


def longest_context(model: Model, config: Path | None = None) -> int | None:
    """Tokens of the longest request, prompt and answer; None where they are not known.

    Args:
        model: Whose file may say it.
        config: A config.json or the folder of it, which has the last word; another path says nothing.

    >>> from sim.config.catalog import load_model
    >>> longest_context(load_model("llama_2_70b"))
    4096
    """
    path = config / "config.json" if config is not None and os.path.isdir(config) else config
    if path is None or path.suffix != ".json" or not os.path.isfile(path):
        return model.published.context_tokens
    try:
        read = read_json(path)
    except CatalogError:  # weights can be served all the same
        return None
    parts = [part for part in (read, read.get("text_config")) if isinstance(part, dict)]
    return next((part[_KEY] for part in parts if isinstance(part.get(_KEY), int)), None)


def check_reach(question: Question, workload: Workload) -> None:
    """Refuses requests that are too long even for positions that are stretched.

    Raises:
        InputError: They are.
    """
    for text in context_warnings(question, workload):
        path = config_path("models", str(question.model))
        if workload.prompt_tokens + workload.output_tokens > _STRETCH * (longest_context(workload.model, path) or 0):
            raise InputError(f"{text}, and stretched positions reach {_STRETCH} times as far: shorten --isl or --osl")


def context_warnings(question: Question | None, workload: Workload) -> list[str]:
    """Warnings about requests that are longer than the model of a question takes; none of a workload by name."""
    if question is None or question.model is None:
        return []
    longest = workload.prompt_tokens + workload.output_tokens
    return too_long(longest, workload.model, config_path("models", question.model))


def too_long(tokens: int, model: Model, config: Path | None = None) -> list[str]:
    """Warnings about requests of so many tokens; none where the model takes them.

    >>> from sim.config.catalog import load_model
    >>> too_long(5000, load_model("llama_2_70b"))
    ['requests of 5,000 tokens: llama_2_70b takes 4,096 (max_position_embeddings), engines refuse more by default']
    """
    longest = longest_context(model, config)
    if longest is None or tokens <= longest:
        return []
    takes = f"{model.name} takes {longest:,} ({_KEY})"
    return [f"requests of {tokens:,} tokens: {takes}, engines refuse more by default"]
