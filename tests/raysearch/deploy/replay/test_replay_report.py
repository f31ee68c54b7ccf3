"""Deployments under traffic: what the report, the command and Python say."""

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import raysearch as rs
from raysearch.answers.replayed import ReplayResult
from raysearch.base.errors import InputError
from raysearch.deploy.replay.deployed_fleets import AggregatedFleet, DisaggregatedFleet
from raysearch.deploy.replay.replay_report import ReplayReport, ReplaySetup, holds, replayed_traffic
from raysearch.deploy.replay.replay_text import percentile_text, rate_text
from raysearch.deploy.replay.sent_traffic import SentTraffic
from sim.optimum.spaces import space_of
from sim.pools.matching import Matched
from sim.replay.goodput import step_factor
from sim.replay.requests import Lengths
from sim.strategy import Strategy
from tests.conftest import Command

QUESTION: dict[str, Any] = {"model": "llama_3_1_8b", "isl": 1000, "osl": 100, "tpot_ms": 12, "ttft_ms": 150}
FREE = rs.question(**QUESTION | {"tpot_ms": 0, "ttft_ms": 0})
"""The same without limits: nothing is looked for."""
ASKED = ["--model", "llama_3_1_8b", "--isl", "1000", "--osl", "100", "--tpot-ms", "12", "--ttft-ms", "150"]
FEW: dict[str, Any] = {"requests": 150, "seeds": 2}
"""Of a run; percentiles are coarse, and what is tested does not rest on them."""


def _found(confidence: float | None = None, **options: Any) -> ReplayResult:
    return rs.replay(rs.question(**QUESTION, confidence=confidence), tp=1, batch=32, **(FEW | options))


@pytest.fixture(scope="module")
def busy() -> ReplayReport:
    """Of a load that some of the requests keep the limits under."""
    return _found(requests_per_s=14).report


@pytest.fixture(scope="module")
def light() -> ReplayResult:
    """Of a load that all of the requests keep the limits under."""
    return _found(requests_per_s=4)


def test_little_load_holds_and_too_much_does_not(light: ReplayResult) -> None:
    heavy = _found(requests_per_s=200)
    assert light.feasible
    assert light.probability == 1
    assert not heavy.feasible
    assert heavy.probability == 0
    assert light.report.breaks_at_per_s is not None
    assert light.report.breaks_at_per_s == heavy.report.breaks_at_per_s  # whichever is known already
    assert light.report.breaks_at_per_s < light.report.bound_per_s


def test_the_search_for_the_breaking_load_ends_at_a_bound_that_attention_groups_in_step_do_not_exceed() -> None:
    workload = rs.question(model="qwen3_235b_a22b", isl=4000, osl=200, gpus=16).load()
    dims = space_of(workload).parts()[0].only_dims
    one, groups = (
        AggregatedFleet.of(workload, strategy, 2)
        for strategy in (Strategy(8, 8, 1, 32, dims, 1, 1), Strategy(1, 16, 1, 64, dims))
    )
    assert one.most_per_s(4000, 200) == pytest.approx(one.bound_per_s(4000, 200))
    assert groups.most_per_s(4000, 200) > 1.2 * groups.bound_per_s(4000, 200)


@pytest.mark.usefixtures("breaking_load_unsought")
def test_the_limits_hold_below_the_load_at_which_they_break_and_not_above(light: ReplayResult) -> None:
    breaks_at = light.report.breaks_at_per_s
    assert breaks_at is not None
    below, above = (_found(requests_per_s=share * breaks_at) for share in (0.98, 1.06))
    assert (above.probability or 0) < light.report.setup.confidence <= (below.probability or 0)
    assert below.feasible
    assert not above.feasible
    assert above.to_dict()["held_as_predicted"] == 1
    assert "not met with probability 0.9: they hold in" in " ".join(str(above).split())
    assert _found(requests_per_s=1.06 * breaks_at, confidence=0.5).feasible


def test_cached_prompts_carry_more_than_the_steady_state_that_computes_them_all() -> None:
    report = _found(requests_per_s=4, cached=0.95, seeds=1).report
    assert report.breaks_at_per_s is not None
    assert report.breaks_at_per_s > 1.2 * report.setup.fleet.most_per_s(*report.setup.sent.mean_tokens)


def test_slower_steps_hold_no_better(busy: ReplayReport) -> None:
    report = busy
    (evaluation,) = report.setup.fleet.evaluations
    slower = [step_factor(evaluation, each) for each in report.sure]
    assert slower == sorted(slower)
    assert slower[0] < 1 < slower[-1]
    interval = [bound / evaluation.tpot_s for bound in evaluation.tpot_interval_s]
    assert [slower[0], slower[-1]] == pytest.approx(interval)  # middles of the outermost of ten parts: 5 and 95 %
    setup, seeds = report.setup, range(report.setup.seeds)
    each = [sum([holds(setup, setup.fleet.at(sure), seed) for seed in seeds]) for sure in report.sure]
    assert list(report.kept) == each  # which is told from fewer replays


@pytest.mark.usefixtures("breaking_load_unsought")
def test_goodput_is_what_is_in_time_of_what_is_served() -> None:
    for run in _found(requests_per_s=30).report.runs:
        assert run.goodput_per_s == pytest.approx(run.served_per_s * run.in_time)
        assert 0 <= run.in_time < 1


def test_percentiles_are_those_of_the_requests_after_the_warm_up(busy: ReplayReport) -> None:
    first = busy.first
    counted = first.sent_s >= 0.1 * first.sent_s[-1]
    expected = np.percentile(first.latency_s[counted], 90)
    assert busy.runs[0].seconds["latency_s"]["p90"] == pytest.approx(expected)
    assert busy.runs[0].seconds["ttft_s"]["mean"] == pytest.approx(first.ttft_s[counted].mean())


def test_without_limits_there_is_no_verdict() -> None:
    asked = rs.question(model="llama_3_1_8b", isl=500, osl=50, tpot_ms=0, ttft_ms=0)
    found = rs.replay(asked, tp=1, batch=8, requests_per_s=1, **FEW)
    assert found.probability is None
    assert found.report.breaks_at_per_s is None
    assert found.feasible


def test_twice_the_replicas_carry_about_twice_the_load() -> None:
    one, two = (_found(requests_per_s=8, replicas=count, seeds=1).report for count in (1, 2))
    assert two.gpus == 2 * one.gpus
    assert one.breaks_at_per_s is not None
    assert two.breaks_at_per_s is not None
    # One router over two serves somewhat better than two queues.
    assert 1.9 * one.breaks_at_per_s < two.breaks_at_per_s < 2.6 * one.breaks_at_per_s


def test_clients_at_once_wait_for_each_other_s_prompts() -> None:
    asked = rs.question(model="llama_3_1_8b", isl=2000, osl=100)
    few, many = (
        rs.replay(asked, tp=1, batch=64, concurrency=clients, requests=100, seeds=1).report for clients in (4, 64)
    )
    mean = [report.seconds_of("ttft_s", "mean").value for report in (few, many)]
    assert mean[1] > 2 * mean[0]
    assert few.breaks_at_per_s is None


def test_concurrent_requests_are_those_of_all_replicas() -> None:
    asked = rs.question(model="llama_3_1_8b", isl=1000, osl=100)
    one, two = (
        rs.replay(asked, tp=1, batch=8, concurrency=8 * count, replicas=count, requests=100 * count, seeds=1).report
        for count in (1, 2)
    )
    served = [report.figure_of(lambda run: run.served_per_s).value for report in (one, two)]
    assert served[1] == pytest.approx(2 * served[0], rel=0.05)
    assert two.seconds_of("tpot_s", "mean").value == pytest.approx(one.seconds_of("tpot_s", "mean").value, rel=0.05)


def test_a_burst_of_requests_has_no_rate(tmp_path: Path) -> None:
    trace = tmp_path / "burst.csv"
    trace.write_text("Timestamp,Request tokens,Response tokens\n" + "5,300,20\n" * 50)
    asked = rs.question(model="llama_3_1_8b", isl=500, osl=50, ttft_ms=1)
    found = rs.replay(asked, tp=1, batch=8, trace=trace, seeds=1)
    assert found.to_dict()["requests_per_s"] is None
    assert found.report.breaks_at_per_s is None
    assert "all at once" in str(found)
    with pytest.raises(InputError, match="all come at once"):
        rs.replay(asked, tp=1, batch=8, trace=trace, requests_per_s=2, seeds=1)


def test_a_cached_prefix_shortens_the_time_to_the_first_token(tmp_path: Path) -> None:
    rows = [
        {"timestamp": 200 * each, "input_length": 2048, "output_length": 20, "hash_ids": [1, 2, 3, 100 + each]}
        for each in range(40)
    ]
    trace = tmp_path / "trace.jsonl"
    trace.write_text("\n".join(json.dumps(row) for row in rows))
    cached = rs.replay(rs.question(**QUESTION), tp=1, batch=32, trace=trace, seeds=1).report
    others = [row | {"hash_ids": [100 * row["hash_ids"][-1] + each for each in range(4)]} for row in rows]
    trace.write_text("\n".join(json.dumps(row) for row in others))
    plain = rs.replay(rs.question(**QUESTION), tp=1, batch=32, trace=trace, seeds=1).report
    assert cached.runs[0].hit_share == pytest.approx(39 * 3 / (40 * 4))
    assert plain.runs[0].hit_share == 0
    assert cached.seconds_of("ttft_s", "p50").value < 0.5 * plain.seconds_of("ttft_s", "p50").value


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({}, "expected the traffic"),
        ({"requests_per_s": 1, "concurrency": 2}, "give neither a rate nor a trace"),
        ({"requests_per_s": -1}, "above 0"),
        ({"requests_per_s": 1, "router": "random"}, "expected least_loaded"),
        ({"trace": "nowhere.csv"}, "No such file"),
        ({"trace": ""}, "expected the path of a local file, got ''"),
        ({"trace": "s3://bucket/x.csv"}, "expected the path of a local file"),
    ],
)
def test_what_cannot_be_sent_is_one_clear_error(options: dict[str, Any], expected: str) -> None:
    with pytest.raises(InputError, match=expected):
        _found(**options)


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"cached": 0.5}, "cached=0.5: a trace's hashes say what is cached: leave it out"),
        ({"cv": 3.0}, "cv=3: only for requests that come at random"),
        ({"spread": 0.5}, "spread=0.5: a trace has lengths of its own: leave it out"),
        ({"length_cv": 0.5}, "length_cv=0.5: a trace has lengths of its own: leave it out"),
        ({"seeds": 5}, "seeds=5: every run of a trace is the same: leave it out"),
        ({"trace": None, "concurrency": 8, "cv": 3.0}, "cv=3: only for requests that come at random"),
        ({"trace": None, "requests_per_s": 2, "spread": 0.5, "length_cv": 1.0}, "give length_cv= or spread=, not both"),
    ],
)
def test_options_that_contradict_the_traffic_are_refused(options: dict[str, Any], expected: str, trace: Path) -> None:
    with pytest.raises(InputError) as error:
        rs.replay(rs.question(**QUESTION), tp=1, batch=32, **{"trace": trace, **options})
    assert expected in str(error.value)


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    """Twenty requests in two seconds, on average of 600 tokens in and 30 out."""
    path = tmp_path / "trace.csv"
    rows = "".join(f"{at / 10},{400 + 400 * (at % 2)},{20 + 20 * (at % 2)}\n" for at in range(20))
    path.write_text(f"Timestamp,Request tokens,Response tokens\n{rows}")
    return path


def test_a_trace_has_lengths_for_a_question_without_and_is_replayed_once(
    trace: Path, tmp_path: Path, raysearch: Command
) -> None:
    found = rs.replay(rs.question(model="llama_3_1_8b"), tp=1, batch=32, trace=trace)
    assert (found.report.setup.workload.prompt_tokens, found.report.setup.workload.output_tokens) == (600, 30)
    assert len(found.report.runs) == 1
    assert "10.00 requests/s of a trace (20 requests in 1.9 s, " in " ".join(str(found).split())
    told = found.to_dict()["trace"]
    assert (told["requests_per_s"], told["isl"]["mean"], told["osl"]["most"]) == (pytest.approx(10), 600, 40)
    assert (told["cv"], found.to_dict()["cv"]) == (pytest.approx(0, abs=1e-9), None)
    asked = ("--model", "llama_3_1_8b", "--tp", "1", "--batch", "32", "--set", f"trace={trace}", "--json")
    done = raysearch("replay", *asked)
    assert json.loads(done.stdout) == json.loads(json.dumps(found.to_dict()))
    (tmp_path / "serve.sh").write_text("vllm serve meta-llama/Llama-3.1-8B-Instruct --max-num-seqs 32\n")
    served = rs.replay(path=tmp_path / "serve.sh", trace=trace).report.setup.workload
    assert (served.prompt_tokens, served.output_tokens) == (600, 30)


def test_lengths_may_be_log_normal() -> None:
    found = rs.replay(FREE, tp=1, batch=32, requests_per_s=4, length_cv=1.0, requests=150, seeds=1)
    sent = found.report.setup.sent.draw(0)
    for lengths, mean in ((sent.prompt_tokens, QUESTION["isl"]), (sent.output_tokens, QUESTION["osl"])):
        assert lengths.mean() == pytest.approx(mean, rel=0.2)
        assert lengths.std() == pytest.approx(mean, rel=0.5)


def test_the_command_says_what_python_does(raysearch: Command, light: ReplayResult, tmp_path: Path) -> None:
    few = ["--set", "requests=150", "--set", "seeds=2", "--requests-per-s", "4", "--tp", "1", "--batch", "32"]
    done = raysearch("replay", *ASKED, *few, "--json", "--out", str(tmp_path / "out"))
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == json.loads(json.dumps(light.to_dict()))
    assert (tmp_path / "out" / "replay.png").read_bytes().startswith(b"\x89PNG")
    assert "at the 99th percentile: met with probability 0.9: they hold in 20 of 20" in " ".join(str(light).split())
    assert "Limits met with probability 0.9 up to" in str(light)


@pytest.mark.usefixtures("best_alone", "breaking_load_unsought")
def test_a_recommendation_s_folder_says_what_is_deployed(tmp_path: Path) -> None:
    asked = rs.question(**QUESTION, gpus=2, weights="fp8", kv_cache="fp8", batches="powers_of_two")
    best = rs.recommend(asked, top=1, only="aggregated")
    best.write(tmp_path / "best")
    found = rs.replay(path=tmp_path / "best", requests_per_s=3, **FEW)
    assert best.strategy is not None
    fleet = found.report.setup.fleet
    assert isinstance(fleet, AggregatedFleet)
    assert fleet.strategy == best.strategy
    assert fleet.replicas == 2 // best.strategy.gpus


@pytest.mark.usefixtures("breaking_load_unsought")
def test_two_pools_are_replayed_from_their_folder(tmp_path: Path) -> None:
    asked = rs.question(
        model="llama_3_1_70b", isl=8000, osl=200, tpot_ms=30, ttft_ms=2000, gpus=8, batches="powers_of_two"
    )
    best = rs.pools(asked)
    assert best.winner == "disaggregated"
    best.write(tmp_path)
    pair = best.points[0].ways["disaggregated"]
    assert isinstance(pair, Matched)
    found = rs.replay(path=tmp_path, requests_per_s=0.5 * pair.requests_per_s, requests=200, seeds=1)
    assert found.report.gpus == pair.gpus
    assert found.report.bound_per_s == pytest.approx(pair.requests_per_s, rel=0.3)
    run = found.report.runs[0]
    # The first token is later than alone; tokens come no later than in a full batch.
    assert run.seconds["ttft_s"]["p50"] > pair.prefill.latency_s + pair.transfer_s
    assert run.seconds["tpot_s"]["mean"] < pair.tpot_s * 1.02
    answer = found.to_dict()
    assert answer["prefill"]["replicas"] == pair.prefills
    assert "Prompts on" in str(found)
    with pytest.raises(InputError, match="two pools have replicas of their own"):
        rs.replay(path=tmp_path, requests_per_s=1, replicas=2)


@pytest.mark.usefixtures("breaking_load_unsought")
def test_limits_that_do_not_hold_end_with_3(raysearch: Command) -> None:
    few = ["--set", "requests=200", "--set", "seeds=1", "--tp", "1", "--batch", "4"]
    done = raysearch("replay", *ASKED, *few, "--requests-per-s", "100")
    assert done.returncode == 3
    assert "not met with probability 0.9" in done.stdout


def test_a_run_s_figures_are_finite(busy: ReplayReport) -> None:
    assert all(
        math.isfinite(value) for run in busy.runs for spread in run.seconds.values() for value in spread.values()
    )


@pytest.mark.usefixtures("breaking_load_unsought")
def test_the_percentile_of_the_limits_is_shown_in_words_and_figures() -> None:
    found = _found(requests_per_s=4, percentile=95, requests=50, seeds=1)
    assert list(found.report.runs[0].seconds["ttft_s"]) == ["mean", "p50", "p90", "p95", "p99"]
    assert "at the 95th percentile: met with probability 0.9" in str(found)
    named = ((1, "1st"), (2, "2nd"), (13, "13th"), (91, "91st"), (99.9, "99.9th"), (100, "100th"))
    assert [percentile_text(each) for each, _ in named] == [f"the {words} percentile" for _, words in named]
    assert (rate_text(0.0001), rate_text(1234.5)) == ("0.0001 requests/s", "1,234.50 requests/s")
    for only_of_a_load in ({"cv": 3.0}, {"percentile": 90.0}):
        with pytest.raises(InputError, match=r"give requests_per_s="):
            rs.recommend(rs.question(**QUESTION), **only_of_a_load)


def test_no_load_is_carried_above_the_steady_state_however_few_requests_are_replayed() -> None:
    loose = rs.question(**QUESTION | {"tpot_ms": 100, "ttft_ms": 5000})
    report = rs.replay(loose, tp=1, batch=32, requests_per_s=20, requests=50, seeds=1).report
    assert report.breaks_at_per_s == report.bound_per_s


def _traced(path: Path, prompts: list[int], *, shared: bool) -> ReplayResult:
    """A second of requests under lenient limits, whose prompts begin alike or have nothing in common."""
    rows: list[dict[str, Any]] = []
    for at, tokens in enumerate(prompts):
        own = [1000 * (at + 1) + block for block in range(-(-tokens // 512))]
        blocks = [0, *own[1:]] if shared else own
        at_ms = 1000 * at / len(prompts)
        rows.append({"timestamp": at_ms, "input_length": tokens, "output_length": 50, "hash_ids": blocks})
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    loose = rs.question(**QUESTION | {"isl": 1000, "tpot_ms": 1000, "ttft_ms": 60_000})
    return rs.replay(loose, tp=1, batch=16, trace=path, seeds=1)


@pytest.mark.parametrize("shared", [False, True])
def test_no_load_is_carried_above_what_is_served_when_all_requests_come_at_once(shared: bool, tmp_path: Path) -> None:
    found = _traced(tmp_path / "mine.jsonl", [1000] * 200, shared=shared)
    report = found.report
    requests = report.setup.sent.draw(0)
    flood = report.setup.fleet.replayed(replace(requests, arrival_s=np.zeros(len(requests))), None)
    assert report.breaks_at_per_s is not None
    assert (flood.hit_share > 0.4) == shared
    # A finite flood fills and empties its batch, so that it is served a little slower than a full one.
    assert 0.95 < report.breaks_at_per_s * flood.end_s / len(requests) < 1.3
    assert "up to at least" in str(found)
    assert report.load is not None
    assert 0.95 < (report.setup.sent.rate_per_s or 0) / report.load * flood.end_s / len(requests) < 1.3
    assert f"{report.load:.0%} of what they serve at most, prompts cached" in " ".join(str(found).split())


@pytest.mark.parametrize("row", [1, 50])
def test_a_request_that_never_fits_breaks_the_limits_whenever_it_is_sent(row: int, tmp_path: Path) -> None:
    prompts = [1000] * 100
    prompts[row] = 900_000
    found = _traced(tmp_path / "mine.jsonl", prompts, shared=False)
    assert not found.feasible
    assert (found.probability, found.report.breaks_at_per_s, found.to_dict()["refused"]) == (0, 0, 1)
    assert "1 request never fits in the KV cache" in " ".join(str(found).split())
    assert "met at no load, since requests are refused" in str(found)


@pytest.mark.parametrize("load", [4, 14, 40])
def test_requests_in_the_system_are_the_rate_served_times_their_time_in_it(load: float) -> None:
    found = rs.replay(FREE, tp=1, batch=32, requests_per_s=load, requests=400, seeds=1)
    (run,) = found.report.runs
    outcome = found.report.first
    latency_s = float(outcome.latency_s.mean())  # of all, as the mean number is
    assert run.in_system == pytest.approx(run.served_per_s * latency_s, rel=0.06)
    assert 0 <= run.waiting < run.in_system
    assert (run.waiting > 10) == (load == 40)
    assert found.report.load == pytest.approx(load / found.report.bound_per_s)
    assert "In the system: " in str(found)


def test_percentiles_of_one_definition_are_of_the_requests_after_the_warm_up(busy: ReplayReport) -> None:
    outcome, run = busy.first, busy.runs[0]
    warm_s = outcome.sent_s[outcome.sent_s >= 0.1 * outcome.sent_s[-1]][0]
    first_s = outcome.ttft_s[outcome.sent_s >= warm_s]
    counted = outcome.gap_at_s >= warm_s
    gaps_s = np.repeat(outcome.gap_s[counted], outcome.gap_counts[counted].astype(int))
    assert len(gaps_s) < outcome.gap_counts.sum()
    for percentile in (50, 90, 99):
        assert run.seconds["ttft_s"][f"p{percentile}"] == pytest.approx(np.percentile(first_s, percentile))
        assert run.seconds["itl_s"][f"p{percentile}"] == pytest.approx(np.percentile(gaps_s, percentile))


@pytest.mark.usefixtures("breaking_load_unsought")
@pytest.mark.parametrize("load", [5, 20, 60])
def test_a_replay_that_ends_once_it_is_late_for_sure_says_what_the_whole_one_does(load: float) -> None:
    asked = rs.question(**QUESTION, gpus=2)
    workload, strategy = asked.load(), rs.evaluate(asked, tp=1, batch=32).strategy
    pools = [(replace(workload, phase=phase), strategy, 1) for phase in ("prefill", "decode")]
    sent = SentTraffic(Lengths(1000), Lengths(100), 100, load)
    for fleet in (AggregatedFleet.of(workload, strategy, 2), DisaggregatedFleet.of(pools[0], pools[1])):
        setup = ReplaySetup(workload, fleet, sent, 99.0, 1)
        assert holds(setup, fleet) == replayed_traffic(setup).runs[0].holds
