"""The longest requests that models take, against the published files where these are installed."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

from raysearch.contexts import longest_context, too_long

PUBLISHED = {
    "deepseek_v3": "deepseek-ai--DeepSeek-V3",
    "glm_5": "zai-org--GLM-5",
    "gpt_oss_120b": "openai--gpt-oss-120b",
    "kimi_k2_5": "moonshotai--Kimi-K2.5",
    "llama_3_1_405b": "meta-llama--Meta-Llama-3.1-405B",
    "llama_3_1_70b": "meta-llama--Meta-Llama-3.1-70B",
    "llama_3_1_8b": "meta-llama--Meta-Llama-3.1-8B",
    "llama_4_maverick": "meta-llama--Llama-4-Maverick-17B-128E-Instruct",
    "llama_4_scout": "meta-llama--Llama-4-Scout-17B-16E-Instruct",
    "minimax_m2_5": "MiniMaxAI--MiniMax-M2.5",
    "mixtral_8x22b": "mistralai--Mixtral-8x22B-v0.1",
    "mixtral_8x7b": "mistralai--Mixtral-8x7B-v0.1",
    "qwen3_235b_a22b": "Qwen--Qwen3-235B-A22B",
    "qwen3_32b": "Qwen--Qwen3-32B",
    "qwen3_5_397b_a17b": "Qwen--Qwen3.5-397B-A17B",
}


@pytest.mark.parametrize("model", PUBLISHED)
def test_the_longest_context_is_that_of_the_published_file(model: str) -> None:
    found = importlib.util.find_spec("aiconfigurator_core")
    if found is None or found.origin is None:
        pytest.skip("aiconfigurator-core, whose package data the files are, is not installed")
    config = Path(found.origin).parent / "model_configs" / f"{PUBLISHED[model]}_config.json"
    assert longest_context(model) == longest_context(model, config)


def test_a_request_is_too_long_from_one_token_more_on() -> None:
    assert too_long(4096, "llama_2_70b") == []
    (told,) = too_long(4097, "llama_2_70b")
    assert "takes 4,096" in told
