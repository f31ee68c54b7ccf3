"""The longest requests that models take, against the published files where these are installed."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import pytest

import raysearch as rs
from raysearch.base.errors import InputError
from raysearch.deploy.contexts import longest_context, too_long
from raysearch.deploy.export.models import draft_repository, repository, stored_format
from sim.config.catalog import load_model
from sim.config.files import CatalogError, configs_root
from tests.questions import question_about

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
    published = load_model(model)
    assert longest_context(published) == longest_context(published, config)


@pytest.mark.usefixtures("best_alone")
def test_every_answer_warns_of_requests_that_the_model_does_not_take() -> None:
    asked = rs.question(model="llama_2_70b", gpus=2, isl=5000, osl=200, batches="powers_of_two", chunk_tokens=8192)
    for found in (rs.evaluate(asked, tp=2, batch=1), rs.optimum(asked), rs.recommend(asked, top=1, only="aggregated")):
        assert "requests of 5,200 tokens: llama_2_70b takes 4,096" in found.to_dict()["warnings"][0]
        assert "requests of 5,200 tokens" in str(found)


@pytest.mark.usefixtures("best_alone")
def test_a_recommendation_says_first_that_requests_are_too_long_and_none_is_beyond_four_contexts() -> None:
    few: dict[str, Any] = {
        "osl": 384,
        "batches": "powers_of_two",
        "engine": "vllm",
        "phase": "serve",
        "chunk_tokens": 8192,
    }
    reach = 4 * 40960 - 384
    for gpus in (1, 2):
        found = rs.recommend(rs.question(model="qwen3_32b", isl=reach, gpus=gpus, **few), top=1, only="aggregated")
        assert found.feasible == (gpus > 1)
        assert str(found).startswith("Warning: requests of 163,840 tokens: qwen3_32b takes 40,960")
    with pytest.raises(InputError, match=r"requests of 163,841 tokens: .* takes 40,960 .*shorten"):
        rs.recommend(rs.question(model="qwen3_32b", isl=reach + 1, **few))


def test_a_request_is_too_long_from_one_token_more_on() -> None:
    model = load_model("llama_2_70b")
    assert too_long(4096, model) == []
    (warning,) = too_long(4097, model)
    assert "takes 4,096" in warning


NEW = """name = "mine"
layers = 4
hidden = 512
ffn_hidden = 1024
heads = 8
kv_heads = 8
head_dim = 64
vocab = 1000
experts = 1
experts_per_token = 1
gated = true
"""


def test_a_new_model_is_one_file(tmp_path: Path) -> None:
    known = NEW + 'context_tokens = 2_048\n[repositories]\nbf16 = "me/mine"\nfp8 = "me/mine-fp8"\n'
    found = []
    for name, text in (("plain", NEW), ("known", known)):
        (tmp_path / f"{name}.toml").write_text(text)
        asked = question_about(str(tmp_path / f"{name}.toml"), isl=2000, osl=49, weights="fp8", phase="serve")
        found.append(asked.load())
    plain, workload = found
    assert plain.config_hash == workload.config_hash  # no figure depends on what makers say besides
    assert plain.model == workload.model
    assert longest_context(plain.model) is None
    assert "mine takes 2,048" in too_long(2049, workload.model)[0]
    assert (repository(plain), repository(workload)) == ("mine", "me/mine-fp8")
    assert stored_format(workload.model, "me/mine") == "bf16"
    assert draft_repository(workload.model) == "me/mine"


@pytest.mark.parametrize("line", ["context_tokens = 0", '[repositories]\nbf17 = "a/b"', '[repositories]\nbf16 = "-x"'])
def test_facts_that_cannot_be_are_one_message(tmp_path: Path, line: str) -> None:
    (tmp_path / "mine.toml").write_text(f"{NEW}{line}\n")
    with pytest.raises(CatalogError, match=line.split("\n")[-1].partition(" ")[0]):
        load_model(tmp_path / "mine.toml")


def test_every_shipped_model_that_is_published_says_where_and_how_long() -> None:
    for path in (configs_root() / "models").glob("*.toml"):
        published = load_model(path.stem).published
        assert path.stem.startswith("gpt_moe") == (not published.repositories) == (published.context_tokens is None)
