"""Answers on one question rest on one model: `recommend`, `pools`, `place` and `replay` say the same of it."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import raysearch as rs
from raysearch.answers.compared_pools import PoolsResult
from raysearch.answers.recommended import RecommendationResult
from raysearch.answers.replayed import deployed_in
from raysearch.deploy.replay.deployed_fleets import AggregatedFleet
from raysearch.deploy.replay.step_errors import STEP_ERRORS
from sim.pools.best_pools import OnePool
from sim.pools.matching import Matched
from tests.conftest import unsought_breaking_load

pytestmark = pytest.mark.usefixtures("every_best_alone")
ASKED = rs.question(
    model="llama_3_1_8b", isl=2000, osl=100, tpot_ms=15, ttft_ms=300, engine="vllm", gpus=4, batches="powers_of_two"
)
LOAD = 10.0
FEW = 40
"""Requests of a replay."""


@pytest.fixture(scope="module")
def both() -> tuple[RecommendationResult, PoolsResult]:
    recommended = rs.recommend(ASKED, requests_per_s=LOAD, top=2, requests=FEW)
    with unsought_breaking_load():
        return recommended, rs.pools(ASKED, requests_per_s=LOAD, requests=FEW)


@pytest.fixture(scope="module")
def trace(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Prompts of 1,024 and 3,072 tokens in turn, whose first half they share."""
    path = tmp_path_factory.mktemp("trace") / "mine.jsonl"
    rows = [
        {
            "timestamp": 100 * at,
            "input_length": (1024, 3072)[at % 2],
            "output_length": 100,
            "hash_ids": [*range((1, 3)[at % 2]), *(1000 * at + block for block in range((1, 3)[at % 2]))],
        }
        for at in range(FEW)
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


@pytest.mark.parametrize(
    "load",
    [
        {},
        pytest.param({"cv": 3.0, "percentile": 90.0}, marks=pytest.mark.slow),
        pytest.param({"trace": True}, marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_recommend_and_pools_size_both_forms_alike_under_a_load(
    load: dict[str, Any], both: tuple[RecommendationResult, PoolsResult], trace: Path
) -> None:
    if load:
        asked = replace(ASKED, isl=None, osl=None) if "trace" in load else ASKED
        sent = {"trace": trace} if "trace" in load else {"requests_per_s": LOAD, **load}
        both = rs.recommend(asked, top=2, requests=FEW, **sent), rs.pools(asked, requests=FEW, **sent)
    answer, point = both[0].answer, both[1].points[0]
    one, apart = point.ways["aggregated"], point.ways["disaggregated"]
    assert isinstance(one, OnePool)
    assert isinstance(apart, Matched) or load  # bursts are more than pools on so few GPUs keep the limits under
    assert one.gpus == answer.options[0].fleet.gpus
    assert one.evaluation.strategy == answer.options[0].evaluation.strategy
    assert apart == (answer.pair.matched if answer.pair else None)
    assert point.winner == answer.winner


def test_replay_says_of_the_winner_what_recommend_rests_on(
    both: tuple[RecommendationResult, PoolsResult], tmp_path: Path
) -> None:
    answer = both[0].answer
    both[0].write(tmp_path)
    winner = answer.options[0].load if answer.winner == "aggregated" else answer.pair and answer.pair.load
    assert winner is not None
    assert winner.report is not None
    again = rs.replay(path=tmp_path, requests_per_s=LOAD, requests=FEW)
    assert again.report.runs == winner.report.runs
    assert again.probability == winner.report.probability
    assert again.feasible
    assert again.report.breaks_at_per_s == winner.report.breaks_at_per_s
    assert again.report.gpus == winner.report.gpus


def test_no_pool_holds_on_fewer_gpus_than_the_steady_state_takes(
    both: tuple[RecommendationResult, PoolsResult],
) -> None:
    load, answer = both[0].answer.options[0].load, both[0].answer
    assert load is not None
    assert load.in_steady_state <= load.replicas
    assert answer.pair is not None
    assert answer.pair.load is not None
    assert answer.pair.load.in_steady_state <= answer.pair.matched.gpus


_FLEET = """
name = "mine"
hardware = "h100_sxm"
gpus = {gpus}
[[models]]
model = "llama_3_1_8b"
{traffic}
tpot_ms = 15
ttft_ms = 300
"""
_AT_RANDOM = "requests_per_s = {rate}\nisl = 2000\nosl = 100"


def _placed(folder: Path, gpus: int, traffic: str, **options: Any) -> rs.PlacementResult:
    path = folder / "fleet.toml"
    path.write_text(_FLEET.format(gpus=gpus, traffic=traffic))
    return rs.place(path, **options)


@pytest.mark.parametrize("by_trace", [False, True])
def test_place_answers_as_many_in_time_as_replay_says_of_the_same_replica(
    by_trace: bool, trace: Path, tmp_path: Path
) -> None:
    """Where few are late: `place` refuses those who would be."""
    traffic = f'requests_per_s = 3.0\ntrace = "{trace}"' if by_trace else _AT_RANDOM.format(rate=3.0)
    plan = _placed(tmp_path, 1, traffic, requests=100, seeds=1).plan
    ((group,),) = [plan.best.found.placement]
    service = plan.best.cluster.services[0, group.shape]
    (sent,) = plan.traffic.draw(plan.fleet.cluster)
    assert {*sent.requests.prompt_tokens.tolist()} == ({1024, 3072} if by_trace else {2000})
    replayed = AggregatedFleet(service.deployed, 1).replayed(sent.requests, None)
    assert (replayed.hit_share > 0.1) == by_trace
    counted = sent.times_s >= 0.1 * sent.horizon_s
    in_time = (replayed.ttft_s <= 0.3) & (replayed.tpot_s <= 0.015)
    assert 0.9 < in_time[counted].mean() == plan.best.attained.value
    assert plan.best.trials[0].ttft_s[0] == pytest.approx(replayed.ttft_s[counted].mean())


@pytest.mark.parametrize("percentile", [90.0, 99.0])
def test_place_holds_the_percentile_where_replay_does_with_steps_of_each_length(
    percentile: float, tmp_path: Path
) -> None:
    plan = _placed(tmp_path, 1, _AT_RANDOM.format(rate=8.0), requests=100, seeds=2, percentile=percentile).plan
    option, runs = plan.best, plan.traffic.draw(plan.fleet.cluster)
    ((group,),) = [option.found.placement]
    fleet = AggregatedFleet(option.cluster.services[0, group.shape].deployed, 1)
    kept = np.zeros((len(STEP_ERRORS), 2))
    for turn, seed in np.ndindex(kept.shape):
        sent = runs[seed]
        replayed = fleet.at(STEP_ERRORS[turn]).replayed(sent.requests, None)
        counted = sent.times_s >= 0.1 * sent.horizon_s
        latencies_s = replayed.ttft_s[counted], replayed.tpot_s[counted]
        first_s, token_s = (float(np.percentile(each, percentile)) for each in latencies_s)
        kept[turn, seed] = first_s <= 0.3 and token_s <= 0.015
    assert list(option.kept) == kept.sum(1).tolist()
    assert 0 < option.probability == kept.sum() / kept.size < 1


def test_place_holds_on_the_gpus_that_recommend_and_pools_name_and_not_on_fewer(
    both: tuple[RecommendationResult, PoolsResult], tmp_path: Path
) -> None:
    one = both[1].points[0].ways["aggregated"]
    assert isinstance(one, OnePool)
    assert one.gpus == both[0].answer.options[0].fleet.gpus > 1
    enough, fewer = (
        _placed(tmp_path, gpus, _AT_RANDOM.format(rate=LOAD), requests=100, seeds=2).plan.best
        for gpus in (one.gpus, one.gpus - 1)
    )
    assert enough.probability >= 0.9 > fewer.probability


@pytest.mark.usefixtures("breaking_load_unsought")
def test_a_mix_of_lengths_is_replayed_and_what_holds_is_what_replay_says(tmp_path: Path) -> None:
    asked = replace(ASKED, isl=None, osl=None, chunk_tokens=4096)
    mix = [(500, 50, 3.0), (4000, 200, 1.0)]
    found = rs.pools(asked, mix=mix, requests_per_s=25.0, requests=FEW)
    point = found.points[0]
    report = point.replays["aggregated"]
    assert {*report.first.requests.prompt_tokens.tolist()} == {500, 4000}
    assert report.probability == pytest.approx(0.9, abs=0.11)
    one = point.ways["aggregated"]
    assert isinstance(one, OnePool)
    assert one.gpus > 1
    fewer = rs.pools(replace(asked, gpus=one.gpus - 1), mix=mix, requests_per_s=25.0, requests=FEW)
    assert fewer.points[0].ways["aggregated"] is None
    found.write(tmp_path)
    assert "--max-model-len 4200" in " ".join(rs.export(tmp_path, "vllm").command.split())


@pytest.mark.usefixtures("breaking_load_unsought")
@pytest.mark.parametrize("only", ["aggregated", "disaggregated"])
@pytest.mark.parametrize("engine", ["vllm", "sglang", "trtllm"])
def test_exported_caps_are_those_that_were_replayed(engine: str, only: Any, tmp_path: Path) -> None:
    asked = replace(ASKED, engine=engine, tpot_ms=30, ttft_ms=600, chunk_tokens=512)
    load = {"requests_per_s": 6.0, "requests": 20} if engine == "vllm" else {}
    found = rs.recommend(asked, **load, top=1, only=only)
    found.write(tmp_path)
    fleet = deployed_in(tmp_path, None, 0).fleet(None, "least_loaded")
    pools = [fleet.deployed] if isinstance(fleet, AggregatedFleet) else [fleet.pools.prefill, fleet.pools.decode]
    command = str(rs.export(tmp_path, engine))
    running = re.findall(r"--max-num-seqs (\d+)|--max-running-requests (\d+)|^max_batch_size: (\d+)", command, re.M)
    assert [int("".join(each)) for each in running] == [each.scheduler.max_sequences for each in pools]
    capped = [each for each in pools if engine != "sglang" or each.prices.workload.phase != "decode"]
    tokens = re.findall(r"--max-num-batched-tokens (\d+)|--max-prefill-tokens (\d+)|max_num_tokens: (\d+)", command)
    assert [int("".join(each)) for each in tokens] == [each.scheduler.policy.step_tokens for each in capped]
