"""How long the requests of a model may be, as its makers published it, and what to say of longer ones.

Figures of longer requests are as good as those of shorter ones; but engines do not start for them unless positions are
stretched, which only a model's makers can say how.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from sim.config.files import CatalogError, read_json

_LONGEST: Mapping[str, int] = {
    "deepseek_v3": 163_840,
    "glm_5": 202_752,
    "gpt_oss_120b": 131_072,
    "kimi_k2_5": 262_144,
    "llama_2_70b": 4_096,
    "llama_3_1_405b": 131_072,
    "llama_3_1_70b": 131_072,
    "llama_3_1_8b": 131_072,
    "llama_4_maverick": 1_048_576,
    "llama_4_scout": 10_485_760,
    "minimax_m2_5": 196_608,
    "mistral_7b": 32_768,
    "mixtral_8x22b": 65_536,
    "mixtral_8x7b": 32_768,
    "qwen3_235b_a22b": 40_960,
    "qwen3_32b": 40_960,
    "qwen3_5_397b_a17b": 262_144,
}
"""max_position_embeddings of the config.json in the models' repositories. [published] checked against AIConfigurator's
copies (0.12.0, 2026-11-22); of Llama 2 arXiv 2307.09288, section 2.2; [assumed] of Mistral 7B v0.3, as v0.2's."""
_KEY = "max_position_embeddings"


def longest_context(model: str, config: Path | None = None) -> int | None:
    """Tokens of the longest request, prompt and answer; None where they are not known.

    Args:
        model: Name of the model.
        config: Its config.json or the folder of it, which has the last word; another path says nothing.

    >>> longest_context("llama_2_70b")
    4096
    """
    path = config / "config.json" if config is not None and config.is_dir() else config
    if path is None or path.suffix != ".json" or not path.is_file():
        return _LONGEST.get(model)
    try:
        read = read_json(path)
    except CatalogError:  # weights can be served all the same
        return None
    parts = [part for part in (read, read.get("text_config")) if isinstance(part, dict)]
    return next((part[_KEY] for part in parts if isinstance(part.get(_KEY), int)), None)


def too_long(tokens: int, model: str, config: Path | None = None) -> list[str]:
    """What to say of requests of so many tokens; nothing where the model takes them.

    >>> too_long(5000, "llama_2_70b")
    ['requests of 5,000 tokens: llama_2_70b takes 4,096 (max_position_embeddings), engines refuse more unless told how']
    """
    longest = longest_context(model, config)
    if longest is None or tokens <= longest:
        return []
    takes = f"{model} takes {longest:,} ({_KEY})"
    return [f"requests of {tokens:,} tokens: {takes}, engines refuse more unless told how"]
