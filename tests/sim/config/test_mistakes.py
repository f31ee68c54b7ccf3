"""Mistakes in files and values are reported in the project's words."""

import re
from typing import Any

import pytest
from pydantic import TypeAdapter, ValidationError

from sim.config.catalog import load_model, load_workload
from sim.config.fields import Count, Name, Positive, Switch
from sim.config.files import CatalogError
from sim.config.mistakes import expectation
from sim.config.question import Question, load_question
from sim.workload import Routing

OF_PYDANTIC = ("Input should", "String should", "Value error", "validation", "pattern")


@pytest.mark.parametrize(
    ("kind", "value", "words"),
    [
        (Count, 0, "expected at least 1, got 0"),
        (Count, 10**10, "expected at most 1000000000, got 10000000000"),
        (Count, "8", "expected a whole number, got '8'"),
        (Positive, "x", "expected a number, got 'x'"),
        (Switch, 1, "expected true or false, got 1"),
        (Name, "a b", "expected a name of letters, digits, '_', '.' and '-' that starts with none of the last two"),
        (Name, 3, "expected text, got 3"),
        (Name, "a" * 101, "expected text of at most 100 characters, got 'aaa"),
        (Routing, "skew", "expected 'balanced' or 'skewed', got 'skew': did you mean 'skewed'?"),
        (list[int], 3, "expected a list, got 3"),
    ],
)
def test_a_value_that_is_refused_is_named_with_what_was_expected(kind: Any, value: object, words: str) -> None:
    with pytest.raises(ValidationError) as refused:
        TypeAdapter(kind).validate_python(value)
    text = expectation(refused.value.errors()[0])
    assert text.startswith(words)
    assert not [each for each in OF_PYDANTIC if each in text]


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"tp_inner": 3}, "--set tp_inner: expected 2, 4, 8 or 16, got 3"),
        ({"stage_layers": "a,b"}, "--set stage_layers: expected numbers of layers separated by commas"),
        ({"kv_cache": "fp4"}, "--kv-cache: expected 'bf16' or 'fp8', got 'fp4': did you mean 'fp8'?"),
        ({"phase": "serv"}, "--phase: unknown phase 'serv': did you mean 'serve'?"),
        ({"space": "join"}, "--space: unknown space 'join': did you mean 'joint'?"),
        ({"tpot_ms": -3.0}, "--tpot-ms: expected at least 0, got -3.0"),
        ({"any_degrees": "tp"}, "--set any_degrees: expected pp, ep or pp,ep, got 'tp'"),
        ({"engine_version": "9.9"}, "--engine-version: unknown version '9.9' of vLLM: known: "),
        ({"hardware": "h10"}, "--hardware: unknown hardware 'h10': did you mean 'h100_sxm'?"),
        (
            {"draft_tokens": 2, "draft": "qwen3_3b"},
            "--set draft: expected 'mtp', 'eagle3', 'ngram' or a model: unknown m",
        ),
        ({"draft_tokens": 2, "draft": "ngram"}, "--acceptance is missing"),
        ({"redundant_experts": 8}, "--redundant-experts: qwen3_32b has no experts"),
        ({"two_batch_overlap": True}, "--set two_batch_overlap: qwen3_32b has no experts"),
        ({"deepep_mode": "normal"}, "--set deepep_mode: qwen3_32b has no experts"),
        ({"routing": "balanced"}, "--set routing: qwen3_32b has no experts"),
        (
            {"model": "mixtral_8x7b", "deepep_mode": "normal"},
            "--set deepep_mode: works with --expert-exchange=all_to_all only, and that is all_gather",
        ),
    ],
)
def test_a_question_is_refused_in_the_words_of_its_options(fields: dict[str, Any], words: str) -> None:
    with pytest.raises(CatalogError) as refused:
        load_question(Question(**{"model": "qwen3_32b", "isl": 100, "osl": 10, **fields}))
    assert str(refused.value).startswith(words)


def test_an_override_is_called_by_its_option_and_a_file_s_key_by_its_own_name(tmp_path: Any) -> None:
    with pytest.raises(CatalogError, match=r"^--set tp_inner: expected 2, 4, 8 or 16, got 3$"):
        load_question(Question(workload="mixtral_8x7b_32k_slo15", tp_inner=3))
    with pytest.raises(CatalogError, match=r"^tp_inner: expected 2, 4, 8 or 16, got 3$"):  # in Python
        Question(workload="mixtral_8x7b_32k_slo15", tp_inner=3).load()
    path = tmp_path / "mine.toml"
    path.write_text('name = "mine"\nmax_gpu = 64\n')
    for load in (lambda: load_workload(path), lambda: Question(workload=str(path)).load()):
        with pytest.raises(CatalogError, match=r"max_gpu: unknown key; did you mean 'max_gpus'\?"):
            load()


def test_a_model_is_found_by_the_beginning_of_its_name_and_by_its_repository() -> None:
    for given, hint in (
        ("qwen3_235b", "did you mean 'qwen3_235b_a22b'?"),
        ("Qwen/Qwen3-32B-FP8", "its name here is 'qwen3_32b'"),
        ("nobody/nothing", "known: "),
    ):
        with pytest.raises(CatalogError, match=re.escape(f"unknown model {given!r}: {hint}")):
            load_model(given)
