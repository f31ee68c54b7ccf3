"""Where the weights of the shipped models are: their repositories on Hugging Face."""

from __future__ import annotations

from sim.layers.model import Model
from sim.workload import Workload

_REPOSITORIES = {
    "deepseek_v3": "deepseek-ai/DeepSeek-V3",
    "gpt_oss_120b": "openai/gpt-oss-120b",
    "llama_2_70b": "meta-llama/Llama-2-70b-chat-hf",
    "llama_3_1_405b": "meta-llama/Llama-3.1-405B-Instruct",
    "llama_3_1_70b": "meta-llama/Llama-3.1-70B-Instruct",
    "llama_3_1_8b": "meta-llama/Llama-3.1-8B-Instruct",
    "llama_4_maverick": "meta-llama/Llama-4-Maverick-17B-128E-Instruct",
    "llama_4_scout": "meta-llama/Llama-4-Scout-17B-16E-Instruct",
    "minimax_m2_5": "MiniMaxAI/MiniMax-M2.5",
    "mistral_7b": "mistralai/Mistral-7B-Instruct-v0.3",
    "mixtral_8x22b": "mistralai/Mixtral-8x22B-Instruct-v0.1",
    "mixtral_8x7b": "mistralai/Mixtral-8x7B-Instruct-v0.1",
    "qwen3_235b_a22b": "Qwen/Qwen3-235B-A22B",
    "qwen3_32b": "Qwen/Qwen3-32B",
}
_BLOCK_FP8 = {"qwen3_235b_a22b": "Qwen/Qwen3-235B-A22B-FP8", "qwen3_32b": "Qwen/Qwen3-32B-FP8"}
"""Repositories of the same models with fp8_block weights, where the first one has others."""


def draft_repository(model: Model) -> str:
    """The repository of a draft model's weights, as published."""
    return _REPOSITORIES.get(model.name, model.name)


def repository(workload: Workload) -> str:
    """The repository of a workload's weights; of a model that is not shipped, its name, to be replaced by a path."""
    name = workload.model.name
    if workload.precisions.weights == "fp8_block" and name in _BLOCK_FP8:
        return _BLOCK_FP8[name]
    return _REPOSITORIES.get(name, name)


_ONLY_FP8 = ("deepseek_v3", "minimax_m2_5")
"""Models that are published in fp8_block alone."""


def quantised_at_start(workload: Workload) -> bool:
    """Whether the engine must quantise to fp8, as the repository's weights are in another format."""
    return workload.precisions.weights == "fp8" and workload.model.name not in _ONLY_FP8
