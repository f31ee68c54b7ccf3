"""Formats beside each other: the published ones, each with the best that its own question has."""

from __future__ import annotations

from dataclasses import replace

import pytest

import raysearch as rs
from raysearch.base.errors import InputError
from sim.config.files import CatalogError

pytestmark = pytest.mark.usefixtures("every_best_alone")


def test_any_weights_are_those_published_and_the_answer_has_the_fastest() -> None:
    coarse = {"batches": "powers_of_two", "chunk_tokens": 8192}
    few = rs.question(model="qwen3_32b", isl=1000, osl=100, gpus=2, tpot_ms=30, engine="vllm", **coarse)
    asked = replace(few, weights="any")
    found = rs.recommend(asked, top=1, only="aggregated")
    pairs = [(each.question.weights, each.question.kv_cache) for each in found.formats]
    assert sorted(pairs) == [(weights, cache) for weights in ("bf16", "fp8_block") for cache in ("bf16", "fp8")]
    rates = [each.answer.tokens_per_s for each in found.formats]
    assert rates == sorted(rates, reverse=True)
    assert (found.question.weights, found.question.kv_cache) == pairs[0] == ("fp8_block", "fp8")
    assert found.answer.options[0].fleet.tokens_per_s == pytest.approx(rates[0])
    alone = rs.recommend(replace(asked, weights="bf16", kv_cache="fp8"), top=1, only="aggregated")
    (bf16,) = (each for each in found.formats if (each.question.weights, each.question.kv_cache) == ("bf16", "fp8"))
    assert bf16.answer.tokens_per_s == pytest.approx(alone.answer.options[0].fleet.tokens_per_s)
    assert [each["weights"] for each in found.to_dict()["formats"]] == [weights for weights, _ in pairs]
    assert "Published formats" in str(found)
    named = rs.recommend(replace(asked, kv_cache="bf16"), top=1, only="aggregated")
    assert {each.question.kv_cache for each in named.formats} == {"bf16"}


def test_formats_are_compared_without_a_load_and_by_recommend_alone() -> None:
    asked = rs.question(model="qwen3_32b", isl=1000, osl=100, gpus=2, tpot_ms=30, weights="any")
    with pytest.raises(InputError, match="leave out requests_per_s="):
        rs.recommend(asked, requests_per_s=1.0)
    with pytest.raises(CatalogError, match="weights"):
        rs.evaluate(asked, layout="tp2", batch=8)
