"""How many drafted tokens hold, where nobody says."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path

import pytest

from sim.config.catalog import CatalogError
from sim.config.files import config_path
from sim.config.question import Question
from sim.ops.heuristics import megatron_dims
from sim.serving.acceptance import accepted_drafts
from sim.simulate import evaluate
from sim.strategy import Strategy
from sim.workload import Speculation

ASKED = Question(model="deepseek_v3", hardware="h200_sxm", isl=1024, osl=1024, draft_tokens=3)


def gained(drafts: int, prompt: int, output: int) -> float:
    return Speculation(drafts, accepted_drafts(drafts, prompt, output)).tokens_per_step


@pytest.mark.parametrize(
    ("lengths", "drafts", "measured"),
    [
        ((1024, 1024), 1, 1.79),
        ((1024, 1024), 2, 2.17),
        ((1024, 1024), 3, 2.40),
        ((8192, 1024), 1, 1.83),
        ((8192, 1024), 2, 2.26),
        ((8192, 1024), 3, 2.56),
        ((1024, 8192), 1, 1.94),
        ((1024, 8192), 2, 2.50),
        ((1024, 8192), 3, 2.87),
    ],
)
def test_tokens_of_a_step_are_those_of_published_chunks(lengths: tuple[int, int], drafts: int, measured: float) -> None:
    """Of H200, B200 and H100, InferenceX: medians of mean gap between chunks, over their steps, over time per token."""
    assert gained(drafts, *lengths) == pytest.approx(measured, rel=0.02)


def test_longer_texts_hold_no_fewer_and_lengths_beyond_the_measured_change_nothing() -> None:
    assert gained(2, 2048, 2048) > gained(2, 1024, 1024)
    assert accepted_drafts(2, 10**6, 10**6) == accepted_drafts(2, 8192, 8192)
    assert accepted_drafts(2, 1, 1) == accepted_drafts(2, 1024, 1024)


def test_a_question_without_acceptance_has_the_measured_one_and_a_wider_interval() -> None:
    usual = ASKED.load()
    assert usual.speculation is not None
    shares = usual.speculation.accepted
    assert shares == accepted_drafts(3, 1024, 1024)
    stated = dataclasses.replace(ASKED, acceptance=",".join(map(repr, shares))).load()
    strategy = Strategy(8, 8, 1, 16, megatron_dims(usual.model), dp=1)
    wide, narrow = evaluate(usual, strategy), evaluate(stated, strategy)
    assert wide.tpot_s == narrow.tpot_s
    assert wide.tpot_interval_s[0] < narrow.tpot_interval_s[0] < narrow.tpot_interval_s[1] < wide.tpot_interval_s[1]


@pytest.mark.parametrize(("model", "spread"), [("deepseek_v3", 0.07), ("qwen3_32b", 0.11)])
def test_how_well_drafts_are_known_stands_in_the_model_s_file_not_in_its_name(
    model: str, spread: float, tmp_path: Path
) -> None:
    text = config_path("models", model).read_text(encoding="utf-8").replace(f'name = "{model}"', 'name = "mine"')
    for lines, known in ((text, spread), (re.sub("(?m)^measured_drafts.*$", "", text), 0.25)):
        (tmp_path / "mine.toml").write_text(lines, encoding="utf-8")
        asked = dataclasses.replace(ASKED, model=str(tmp_path / "mine.toml")).load()
        assert asked.speculation is not None
        assert asked.speculation.spread == known


def test_other_drafts_need_their_acceptance_from_the_user() -> None:
    with pytest.raises(CatalogError, match="acceptance= is missing"):
        dataclasses.replace(ASKED, draft="ngram").load()


def test_a_model_with_a_public_eagle_3_head_drafts_with_it_as_published_and_others_say_that_none_is_known() -> None:
    asked = Question(model="qwen3_32b", isl=1000, osl=200, gpus=2, draft_tokens=2)
    found = asked.load().speculation
    assert found is not None
    assert (found.drafter, found.spread) == ("eagle3", 0.11)
    assert 1.74 < found.tokens_per_step < 2.20  # of a step with two drafts, as published
    other = dataclasses.replace(asked, model="gpt_oss_120b").load().speculation
    assert other is not None
    assert other.spread > found.spread
    stated = dataclasses.replace(asked, draft="eagle3", acceptance="0.5").load().speculation
    assert stated is not None
    assert (stated.spread, stated.tokens_per_step) == (0.0, 1.75)
    with pytest.raises(CatalogError, match="no public EAGLE-3 head of llama_3_1_70b is known"):
        dataclasses.replace(asked, model="llama_3_1_70b", draft="eagle3").load()


def test_an_eagle_3_head_takes_less_time_than_the_model_that_it_drafts_for_and_more_than_nothing() -> None:
    asked = Question(model="qwen3_32b", isl=1000, osl=200, gpus=2, draft_tokens=2, engine="vllm")
    free = dataclasses.replace(asked, draft="ngram", acceptance="0.62")
    strategy = Strategy(2, 1, 1, 16, megatron_dims(asked.load().model))
    head, nothing = (evaluate(each.load(), strategy) for each in (asked, free))
    assert nothing.tpot_s < head.tpot_s < 1.25 * nothing.tpot_s
    assert 0.5e9 < head.memory_bytes.weights - nothing.memory_bytes.weights < 1e9  # a third of a layer's on each GPU
