"""Ways to serve, compared: how experts are reached, redundant experts, drafts."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from dataclasses import replace

import pytest

from raysearch.base.file_io import degrees_text
from raysearch.deploy.recommend.demand import Demand
from raysearch.deploy.recommend.fleet import Searched, best_first, fleet_of
from raysearch.deploy.recommend.forms_compared import ServingForm, compared_forms, compares_forms, forms_table, untried
from raysearch.deploy.recommend.recommendation import begun
from raysearch.deploy.recommend.recommendation_text import begun_lines
from sim.config.question import Question
from tests.questions import question_about

pytestmark = pytest.mark.usefixtures("every_best_alone")
ASKED = question_about(
    "deepseek_v3", "h200_sxm", phase="serve", engine="vllm", isl=1000, osl=500, gpus=8, tpot_ms=30, ttft_ms=2000
)


def asked(question: Question) -> Demand:
    workload = question.load()
    workload = replace(workload, degrees=replace(workload.degrees, tp=(1, 2, 8), ep=(1, 8), pp=(1,), batch=(32,)))
    return Demand(workload, workload.max_gpus, question, only="aggregated")


BEGUN_BESIDE: list[bool] = []
"""Of each form that is not the usual one, whether it was to be worked out in a process of its own."""


@pytest.fixture(scope="module")
def forms() -> list[ServingForm]:
    """As processes of their own work them out."""

    def pickled(work: Callable[[], object], *, parallel: bool) -> Callable[[], object]:
        BEGUN_BESIDE.append(parallel)
        content = pickle.dumps(work())
        return lambda: pickle.loads(content)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("raysearch.deploy.recommend.forms_compared.begun_beside", pickled)
        return compared_forms(ASKED, asked, lambda _: None, Searched(), parallel=True)


def test_each_form_has_what_its_own_question_is_answered_with(forms: list[ServingForm]) -> None:
    assert len(forms) == 6  # as it starts, redundant experts, drafts: one group has nobody to send tokens to
    usual = next(each for each in forms if not each.changes)
    chunk = usual.answer.demand.workload.chunk_tokens
    for each in forms[:1]:
        demand = asked(replace(ASKED, **each.changes)).under(chunk_tokens=chunk)
        (own,) = best_first(demand, 1)
        assert each.tokens_per_s == pytest.approx(fleet_of(demand, own).tokens_per_s)


def test_one_copy_of_an_expert_per_gpu_is_tried_beside_the_published_number(forms: list[ServingForm]) -> None:
    served = {
        each.changes.get("redundant_experts", 0): each for each in forms if set(each.changes) <= {"redundant_experts"}
    }
    ranks = max(served[0].expert_ranks, served[32].expert_ranks)
    assert sorted(served) == [0, ranks, 32]
    assert served[ranks].tokens_per_s > served[32].tokens_per_s  # which read four copies a GPU


def test_drafts_win_where_a_user_is_to_be_fast_and_say_how_sure_that_is(forms: list[ServingForm]) -> None:
    best, usual = forms[0], next(each for each in forms if not each.changes)
    assert best.changes["draft_tokens"] >= 1
    assert best.tokens_per_s > 1.01 * usual.tokens_per_s
    low, high = best.to_dict(8)["acceptance_interval"]
    assert low < best.tokens_per_s / 8 < high
    assert usual.share == 0
    table = forms_table(forms, 8)
    assert table.row_count == len(forms)
    assert "draft models" in str(table.caption)


def test_what_a_question_names_stays_and_forms_are_compared_for_checkpoints_that_draft_with_a_load_or_without(
    forms: list[ServingForm],
) -> None:
    fixed = replace(ASKED, draft_tokens=1, redundant_experts=0, expert_exchange="all_gather")
    (loaded,) = compared_forms(fixed, lambda each: replace(asked(each), requests_per_s=4.0), lambda _: None, Searched())
    assert loaded.changes == {}
    (alone,) = (each for each in forms if each.changes == {"draft_tokens": 1})
    assert loaded.tokens_per_s == alone.tokens_per_s  # what the GPUs serve without it
    assert compares_forms(replace(asked(ASKED), requests_per_s=4.0))
    assert compares_forms(replace(asked(ASKED), concurrency=64))
    assert not compares_forms(asked(replace(ASKED, model="qwen3_32b")))
    assert not compares_forms(asked(ASKED), "usual")


def test_requests_at_once_are_taken_by_the_form_of_the_fewest_gpus_and_of_equal_ones_the_fastest() -> None:
    fixed = replace(ASKED, redundant_experts=0, expert_exchange="all_gather", gpus=16)
    found = compared_forms(fixed, lambda each: replace(asked(each), concurrency=48), lambda _: None, Searched())
    first, *others = found
    assert first.changes["draft_tokens"] >= 1
    assert all(each.rank <= first.rank for each in others)
    assert not found[-1].answer.options or found[-1].answer.options[0].fleet.requests_at_once >= 48
    assert first.answer.options[0].fleet.requests_at_once >= 48
    assert first.to_dict(16)["gpus"] == first.answer.options[0].fleet.gpus == -first.rank[0]
    table = forms_table(found, 16)
    assert [column.header for column in table.columns][1:3] == ["GPUs", "tok/s/GPU"]


def test_forms_that_are_worked_out_beside_others_are_the_same(forms: list[ServingForm]) -> None:
    assert BEGUN_BESIDE == [True] * 3 + [False] * 5  # drafts of the usual form alone
    alone = compared_forms(
        replace(ASKED, redundant_experts=0, expert_exchange="all_gather"), asked, lambda _: None, Searched()
    )
    beside = [each.to_dict(8) for each in forms if not each.changes.keys() - {"draft_tokens"}]
    assert [each.to_dict(8) for each in alone] == beside


def test_a_public_eagle_3_head_is_tried_where_that_is_asked_for() -> None:
    headed = replace(ASKED, model="qwen3_32b", gpus=2)
    assert compares_forms(asked(headed), "eagle3")
    assert "RedHatAI/Qwen3-32B-speculator.eagle3; --set forms=eagle3" in untried(asked(headed))
    assert not untried(asked(replace(headed, draft_tokens=2)))
    assert not untried(asked(ASKED))
    found = compared_forms(headed, asked, lambda _: None, Searched())
    drafts = [each for each in found if each.changes]
    assert drafts[0] is found[0]
    assert all("of EAGLE-3" in each.name and each.share == 0.11 for each in drafts)
    assert not compares_forms(asked(replace(headed, model="llama_3_1_70b")), "eagle3")


def test_what_is_soon_found_is_among_all_that_is_compared_and_takes_no_time_of_it(forms: list[ServingForm]) -> None:
    searched = Searched()
    soon = begun(asked(ASKED), searched)
    usual = next(each for each in forms if not each.changes)
    assert 0 < soon.tokens_per_s <= usual.tokens_per_s
    (line,) = begun_lines(soon)
    assert degrees_text(soon.options[0].evaluation.strategy) in line
    assert f"{soon.tokens_per_s / 8:,.1f} tokens/s per available GPU" in line
    (worked,) = searched.of(soon.demand.workload).values()
    before = len(worked.starts)
    begun(asked(ASKED), searched)
    assert len(worked.starts) == before > 0
    assert not list(begun_lines(begun(asked(replace(ASKED, tpot_ms=0.1)), Searched())))


def test_a_form_of_experts_is_in_use_where_experts_are_whole_on_some_gpu(forms: list[ServingForm]) -> None:
    assert all(each.in_use for each in forms)
    usual = next(each for each in forms if not each.changes)
    option = usual.answer.options[0]
    shared = replace(option, evaluation=replace(option.evaluation, strategy=replace(option.evaluation.strategy, ep=1)))
    without = replace(usual, answer=replace(usual.answer, options=(shared,), pair=None))
    assert without.in_use
    assert not replace(without, changes={"expert_exchange": "all_to_all"}).in_use
    assert not replace(without, changes={"redundant_experts": 32, "draft_tokens": 1}).in_use
    assert replace(without, changes={"draft_tokens": 1}).in_use
