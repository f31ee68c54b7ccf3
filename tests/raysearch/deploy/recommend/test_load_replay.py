"""Replicas for a load that comes at random: the fewest whose replay holds, never fewer than the steady state's."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import raysearch as rs
from raysearch.answers.recommended import RecommendationResult
from raysearch.base.errors import InputError
from raysearch.deploy.recommend.fleet import EVERY, best_first, largest_batch
from raysearch.deploy.recommend.load_replay import load_setup
from raysearch.deploy.replay.deployed_fleets import AggregatedFleet
from raysearch.deploy.replay.replay_report import kept_limits

pytestmark = pytest.mark.usefixtures("every_best_alone")
ASKED = rs.question(model="llama_3_1_8b", isl=1000, osl=200, tpot_ms=10, ttft_ms=150, gpus=8, batches="powers_of_two")
WHOLE = replace(ASKED, chunk_tokens=1024)
"""Prompts in one piece: no other chunks are replayed."""
LOAD = 30.0
FEW = 100
"""Requests of a replay: enough for a queue to build up, and a tenth of the time."""
ONE_KIND: dict[str, Any] = {"top": 1, "requests": FEW, "only": "aggregated"}
"""Replicas of one kind alone: how pools are replayed is compared in tests/raysearch/deploy/test_agreement.py."""


@pytest.fixture(scope="module")
def found() -> RecommendationResult:
    return rs.recommend(ASKED, requests_per_s=LOAD, **ONE_KIND)


def test_one_replica_fewer_does_not_hold_and_these_do(found: RecommendationResult) -> None:
    best, demand = found.answer.options[0], found.answer.demand
    assert best.load is not None
    usual = AggregatedFleet.of(demand.workload, best.evaluation.strategy)

    def reaches(replicas: int, confidence: float) -> bool:
        return kept_limits(load_setup(demand, replace(usual, replicas=replicas))).reaches(confidence)

    assert reaches(best.load.replicas, 0.9)
    if best.load.replicas > best.load.in_steady_state:
        assert not reaches(best.load.replicas - 1, 0.9)
    assert reaches(best.load.at_even_odds, 0.5)
    assert best.load.in_steady_state <= best.load.at_even_odds <= best.load.replicas
    assert best.fleet.replicas == best.load.replicas


def test_the_best_takes_the_fewest_gpus_and_says_how_sure_it_is(found: RecommendationResult) -> None:
    best, *others = found.answer.options
    assert best.load is not None
    assert best.load.report is not None
    assert all(other.fleet.gpus >= best.fleet.gpus for other in others if other.load)
    assert (best.load.report.probability or 0) >= 0.9
    assert (best.load.report.breaks_at_per_s or 0) > LOAD
    kept = json.loads(json.dumps(found.to_dict()))["best"]["load"]
    assert kept["replicas"] == best.load.replicas
    assert kept["replay"]["probability"] == best.load.report.probability


def test_it_is_what_replay_says_of_the_same_deployment(found: RecommendationResult) -> None:
    best = found.answer.options[0]
    assert best.load is not None
    assert best.load.report is not None
    strategy = best.evaluation.strategy
    asked = {"tp": strategy.tp, "batch": strategy.batch, "replicas": best.load.replicas, "requests": FEW}
    again = rs.replay(ASKED, requests_per_s=LOAD, **asked).report
    assert again.runs == best.load.report.runs
    assert again.breaks_at_per_s == best.load.report.breaks_at_per_s


@pytest.mark.usefixtures("breaking_load_unsought")
def test_even_odds_and_smoother_arrivals_take_no_more_gpus(found: RecommendationResult) -> None:
    gpus = found.answer.options[0].fleet.gpus
    calmer = rs.recommend(replace(WHOLE, confidence=0.5), requests_per_s=LOAD, cv=0.1, **ONE_KIND)
    assert calmer.answer.options[0].fleet.gpus <= gpus


@pytest.mark.usefixtures("breaking_load_unsought")
def test_too_few_gpus_for_the_load_are_not_feasible() -> None:
    one = replace(WHOLE, gpus=1, tpot_ms=15)
    steady = rs.recommend(one, requests_per_s=1.0, **ONE_KIND)
    assert steady.feasible
    most = steady.answer.options[0].load
    assert most is not None
    assert most.report is not None
    crowded = rs.recommend(one, requests_per_s=0.99 * most.report.bound_per_s, **ONE_KIND)
    assert not crowded.feasible
    assert "no number of replicas on 1 GPU meets" in str(crowded)


@pytest.mark.usefixtures("breaking_load_unsought")
def test_a_billion_gpus_are_not_replayed_one_by_one() -> None:
    fifty = ONE_KIND | {"requests": 50}
    few = rs.recommend(replace(WHOLE, gpus=10**9), requests_per_s=LOAD, **fifty)
    load = few.answer.options[0].load
    assert load is not None
    assert load.replicas <= 100
    with pytest.raises(InputError, match=r"takes .* replicas or more, and a replay of 50 requests is of at most 100"):
        rs.recommend(replace(WHOLE, gpus=10**9), requests_per_s=1e6, **fifty)
    with pytest.raises(InputError, match="cannot be replayed: needs 999999 GPUs, the budget is 8"):
        rs.replay(ASKED, tp=1, batch=8, dp=999_999, requests_per_s=1.0)


def test_no_strategy_of_any_degrees_holds_on_fewer_gpus(found: RecommendationResult) -> None:
    answer, best = found.answer, found.answer.options[0]
    demand, fewer = answer.demand, best.fleet.gpus - 1
    assert answer.proof is not None
    assert answer.proof.least_gpus == best.fleet.gpus
    tried = 0
    for each in best_first(replace(demand.unloaded, confidence=0.5), EVERY):  # of all degrees
        roomy = largest_batch(demand, each) or each
        if each.gpus <= fewer and each.strategy.pp == 1:
            fleet = AggregatedFleet.of(demand.workload, roomy.strategy, fewer // each.gpus)
            assert not kept_limits(load_setup(demand, fleet)).reaches(0.9)
            tried += 1
    assert tried


@pytest.mark.usefixtures("breaking_load_unsought")
def test_where_replays_end_first_the_answer_says_what_they_leave_open() -> None:
    cut = rs.recommend(WHOLE, requests_per_s=LOAD, replays=0, **ONE_KIND).answer
    assert cut.proof is not None
    assert cut.proof.replayed == 0
    assert cut.proof.least_gpus <= cut.options[0].fleet.gpus
    assert (cut.proof.open == 0) == (cut.proof.least_gpus == cut.options[0].fleet.gpus)


def _recorded(path: Path, shared_blocks: int) -> Path:
    """A trace of so many prompts of 1,024 tokens, 20 a second, of which all begin with the same blocks."""
    common = list(range(shared_blocks))
    rows = (
        {
            "timestamp": 50 * at,
            "input_length": 1024,
            "output_length": 200,
            "hash_ids": [*common, *(1000 + 2 * at + block for block in range(2 - shared_blocks))],
        }
        for at in range(FEW)
    )
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def test_a_trace_is_the_load_and_what_its_prompts_share_spares_gpus(tmp_path: Path) -> None:
    asked = replace(WHOLE, isl=None, osl=None, gpus=2)
    alike, unlike = (_recorded(tmp_path / f"{shared}.jsonl", shared) for shared in (1, 0))
    found = rs.recommend(asked, trace=alike, **ONE_KIND)
    best, demand = found.answer.options[0], found.answer.demand
    assert (demand.workload.prompt_tokens, demand.workload.output_tokens) == (1024, 200)
    assert demand.requests_per_s == pytest.approx(20.0)
    assert best.load is not None
    assert best.load.report is not None
    assert best.load.report.runs[0].hit_share == pytest.approx(0.5, abs=0.01)
    assert "as in the trace" in str(found)
    found.write(tmp_path / "answer")
    again, cold = (rs.replay(path=tmp_path / "answer", trace=each, requests=FEW).report for each in (alike, unlike))
    assert again.runs == best.load.report.runs
    assert (cold.breaks_at_per_s or 0) < (again.breaks_at_per_s or 0)
    assert "--max-model-len 1224" in " ".join(rs.export(tmp_path / "answer", "vllm").command.split())
    with pytest.raises(InputError, match="leave concurrency= out"):
        rs.recommend(asked, trace=alike, concurrency=8, **ONE_KIND)


@pytest.mark.slow
@pytest.mark.usefixtures("breaking_load_unsought")
def test_where_chunks_take_fewer_gpus_they_win_and_exported_caps_are_those_that_were_replayed(tmp_path: Path) -> None:
    asked = rs.question(
        model="llama_3_1_8b", isl=16000, osl=100, tpot_ms=30, ttft_ms=4000, gpus=8, batches="powers_of_two"
    )
    limited = {"requests_per_s": 5.4, **ONE_KIND, "requests": 150}
    found = rs.recommend(asked, **limited)
    chunk, answer = found.answer.demand.workload.chunk_tokens, found.answer
    assert answer.proof is not None
    fewest = dict(answer.proof.chunks)
    whole = fewest.pop(None)
    assert whole is not None
    assert chunk is not None
    assert fewest[chunk] == answer.options[0].fleet.gpus == answer.proof.least_gpus < whole
    assert f"whole prompts {whole}; " in str(found)
    found.write(tmp_path)
    again = rs.replay(path=tmp_path, requests_per_s=5.4, requests=150).report
    assert answer.options[0].load is not None
    assert answer.options[0].load.report is not None
    assert again.runs == answer.options[0].load.report.runs
    assert isinstance(again.setup.fleet, AggregatedFleet)
    cap = again.setup.fleet.deployed.scheduler.policy.step_tokens
    assert f"--max-num-batched-tokens {cap}" in rs.export(tmp_path, "vllm").command
    for each in (
        rs.recommend(asked, **limited | {"replays": 0}),
        rs.recommend(replace(asked, chunk_tokens=2048), **limited),
    ):
        assert each.answer.options[0].fleet.gpus >= answer.options[0].fleet.gpus
