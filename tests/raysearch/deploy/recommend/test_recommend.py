"""Recommendations: exact, whole in JSON, filled and sized right, and helpful where nothing is feasible."""

from __future__ import annotations

import csv
import json
import math
import re
import resource
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

import raysearch as rs
from raysearch.base.errors import InputError
from raysearch.base.file_io import as_strategy, read_record
from raysearch.cli.app import app
from raysearch.deploy.recommend.alternatives import alternatives, reason
from raysearch.deploy.recommend.demand import Demand
from raysearch.deploy.recommend.fleet import best_first, fleet_of, stay_of
from raysearch.deploy.recommend.recommendation import Recommendation, recommended
from raysearch.runs.records import Record
from sim.config.catalog import load_hardware
from sim.config.question import Question
from sim.engines.engine_registry import engine_rules
from sim.optimum.exact_search import find_best
from sim.optimum.spaces import space_of
from sim.simulate import evaluate
from tests.conftest import bests_alone
from tests.processes import LONGEST_S
from tests.questions import question_about

RUNNER = CliRunner()
OF_LLAMA = ("--model", "llama_3_1_8b", "--isl", "1000", "--osl", "200", "--tpot-ms", "12")
ASKED = (*OF_LLAMA, "--gpus", "4", "--chunk-tokens", "8192", "--set", "top=3", "--set", "only=aggregated")
"""Replicas of one kind whose prompts are whole: a single strategy."""


EVEN = ("--set", "confidence=0.5")
"""Latencies count as predicted: what is tested does not rest on their errors."""
COARSE = ("--set", "batches=powers_of_two")
"""What is tested does not rest on the batches in between."""
FEW = ("--set", "requests=100", *COARSE)
"""Of a replay under a load: its percentiles are coarse, and what is tested does not rest on them."""


def ask(*words: str, code: int = 0) -> dict[str, Any]:
    shown = RUNNER.invoke(app, ["recommend", *ASKED, *words, "--json"], catch_exceptions=False)
    assert shown.exit_code == code, shown.output
    return json.loads(shown.stdout)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("recommended")


@pytest.fixture(scope="module")
def answer(folder: Path) -> dict[str, Any]:
    return ask("--out", str(folder), "--set", "price=2.5", "--ttft-ms", "500", *EVEN)


def test_the_best_is_the_exact_best_of_the_engine(answer: dict[str, Any]) -> None:
    workload = Question(**answer["question"]).load()
    assert workload.config_hash == answer["config_hash"]
    found = find_best(space_of(workload)).evaluation
    assert found is not None
    best = answer["best"]
    # Replicas of any degrees fill four GPUs, so the best per GPU is the best in all.
    assert best["tokens_per_s_per_gpu"] == pytest.approx(found.tokens_per_s_per_gpu, rel=1e-12)
    again = evaluate(workload, as_strategy(best["strategy"]))
    assert again.feasible
    assert (best["tpot_s"], best["ttft_s"]) == (again.tpot_s, again.ttft_s)
    assert not engine_rules("vllm").refusals(workload, again.strategy)


def test_every_figure_has_its_interval_around_it(answer: dict[str, Any]) -> None:
    for option in (answer["best"], *answer["alternatives"]):
        for name in ("tpot_s", "ttft_s", "tokens_per_s_per_gpu", "tokens_per_s_per_user"):
            low, high = option["intervals"][name]
            assert low < option[name] < high
        assert option["tokens_per_s_per_user"] == pytest.approx(1 / option["tpot_s"])


def test_replicas_fill_the_gpus_and_alternatives_differ_and_follow_in_worth(answer: dict[str, Any]) -> None:
    options = [answer["best"], *answer["alternatives"]]
    assert len(options) == 3
    for option in options:
        assert option["gpus"] == option["replicas"] * option["gpus_per_replica"]
        assert option["gpus"] + option["left_over"] == 4
        assert option["tokens_per_s"] == pytest.approx(option["gpus"] * option["tokens_per_s_per_gpu"])
        assert option["requests_per_s"] == pytest.approx(option["tokens_per_s"] / 200)
        millions_an_hour = option["tokens_per_s"] * 3600 / 1e6
        assert option["price_per_hour"] == pytest.approx(2.5 * option["gpus"])
        assert option["price_per_million_tokens"] == pytest.approx(option["price_per_hour"] / millions_an_hour)
        assert option["reason"]
    rates = [option["tokens_per_s"] for option in options]
    assert rates == sorted(rates, reverse=True)
    assert len({json.dumps(option["strategy"]) for option in options}) == len(options)


def test_an_alternative_has_what_all_before_it_lack_and_is_the_best_that_has_it() -> None:
    stated = {"isl": 8000, "osl": 1000, "tpot_ms": 50.0, "phase": "serve", "engine": "vllm", "kv_cache": "fp8"}
    workload = question_about("qwen3_235b_a22b", gpus=16, **stated, batches="powers_of_two").load()
    demand, known = Demand(workload, 16, top=9, confidence=0.5), {}
    (best,) = best_first(demand, 1, known)
    options = [best, *alternatives(demand, best, known)]
    for at, each in enumerate(options[1:], 1):
        assert each.feasible
        assert best.tokens_per_s_per_gpu >= each.tokens_per_s_per_gpu >= 0.5 * best.tokens_per_s_per_gpu
        for before in options[:at]:
            assert (
                each.gpus < before.gpus
                or each.strategy.ep == 1 < before.strategy.ep
                or each.strategy.pp == 1 < before.strategy.pp
                or each.tpot_s < 0.97 * before.tpot_s
                or each.ttft_s < 0.97 * before.ttft_s
                or each.memory_bytes.total < 0.9 * before.memory_bytes.total
            )
    alone = [each for each in options if reason(demand, each, best).startswith("no expert parallelism")]
    without = replace(workload, degrees=replace(workload.degrees, ep=(1,)))
    assert best.strategy.ep > 1
    assert alone[0] == find_best(space_of(without)).evaluation


def test_degrees_that_are_left_out_are_in_nothing_that_is_answered() -> None:
    asked = rs.question(
        model="qwen3_32b", hardware="l40s", isl=1000, osl=200, gpus=2, batches="powers_of_two", tpot_ms=0
    )
    with bests_alone():
        anyhow = rs.recommend(asked, only="aggregated", top=1)
    answer = rs.recommend(asked, only="aggregated", top=2, without="pp").answer
    assert anyhow.strategy
    assert anyhow.strategy.pp > 1
    found = [each.evaluation for each in (*answer.options, *answer.front, *answer.variations, *answer.beside.values())]
    assert {each.strategy.pp for each in found if each} == {1}
    assert 0 < answer.tokens_per_s < anyhow.answer.tokens_per_s


def test_an_alternative_of_smaller_replicas_is_the_exact_best_of_so_many_gpus() -> None:
    stated = {"isl": 4000, "osl": 500, "tpot_ms": 20.0, "phase": "serve", "engine": "sglang"}
    workload = question_about("qwen3_32b", gpus=7, **stated, batches="any").load()
    demand, known = Demand(workload, 7, confidence=0.5), {}
    (best,) = best_first(demand, 1, known)
    assert best.gpus == 2
    singles = [each for each in alternatives(demand, best, known) if each.gpus == 1]
    single = question_about("qwen3_32b", gpus=1, **stated, batches="any").load()
    found = find_best(space_of(single)).evaluation
    assert found is not None
    assert singles[0].strategy == found.strategy
    assert reason(demand, singles[0], best).startswith("replicas of 1 GPU, not 2; ")


def test_the_binding_limit_is_what_one_more_request_breaks(answer: dict[str, Any]) -> None:
    assert answer["best"]["binding_limit"].startswith("TPOT: batch ")
    assert re.search(r"the limit is 12\.0+ ms", answer["best"]["binding_limit"])


def test_other_spaces_lie_beside_and_hold_the_engines(answer: dict[str, Any]) -> None:
    extended = answer["beside"]["extended"]
    assert extended["engine_reaches"] <= 1 + 1e-12
    share = answer["best"]["tokens_per_s_per_gpu"] / extended["tokens_per_s_per_gpu"]  # both fill all GPUs
    assert extended["engine_reaches"] == pytest.approx(share)
    assert set(answer["beside"]) == {"paper", "extended"}


def test_more_of_anything_never_costs(answer: dict[str, Any]) -> None:
    gains = {each["change"]: each["gain"] for each in answer["sensitivity"]}
    assert len(gains) == 6
    assert all(gain >= -1e-12 for change, gain in gains.items() if change.startswith(("10 %", "a T")))
    assert gains["10 % more HBM bandwidth"] > 0.01  # decoding streams weights and cache
    assert gains["a TPOT 10 % longer"] > 0  # the TPOT binds


def test_the_front_falls_and_no_point_beats_another(answer: dict[str, Any], folder: Path) -> None:
    users = [row["tokens_per_s_per_user"] for row in answer["pareto"]]
    values = [row["tokens_per_s_per_gpu"] for row in answer["pareto"]]
    assert len(users) > 3
    assert users == sorted(users)
    assert values == sorted(values, reverse=True)
    with (folder / "pareto.csv").open() as lines:
        assert [float(row["tokens_per_s_per_user"]) for row in csv.DictReader(lines)] == users
    assert (folder / "pareto.png").read_bytes().startswith(b"\x89PNG")


def test_a_recommendation_is_exported_as_it_stands(answer: dict[str, Any], folder: Path) -> None:
    kept = folder / "recommendation.json"
    assert read_record(kept, Record) == answer
    altered = folder / "altered.json"
    altered.write_text(kept.read_text().replace('"tp": ', '"tp": 1', 1))
    with pytest.raises(InputError, match="altered since it was written"):
        read_record(altered, Record)
    altered.unlink()
    shown = RUNNER.invoke(app, ["export", str(folder), "--to", "vllm"], catch_exceptions=False)
    assert shown.stdout.startswith("vllm serve meta-llama/Llama-3.1-8B-Instruct")
    assert f"--tensor-parallel-size {answer['best']['strategy']['tp']}" in shown.stdout
    assert shown.stdout.strip() in (folder / "best" / "start.sh").read_text()
    second = RUNNER.invoke(app, ["export", str(folder), "--alternative", "1", "--json"], catch_exceptions=False)
    assert json.loads(second.stdout)["strategy"] == answer["alternatives"][0]["strategy"]


@pytest.mark.usefixtures("best_alone", "breaking_load_unsought")
@pytest.mark.parametrize("load", [("--requests-per-s", "6"), ("--concurrency", "40")])
def test_a_load_takes_the_fewest_gpus(answer: dict[str, Any], load: tuple[str, str]) -> None:
    sized = ask(*load, "--ttft-ms", "500", *FEW)
    for option in (sized["best"], *sized["alternatives"]):
        carried = option["requests_per_s"] if load[0] == "--requests-per-s" else option["requests_at_once"]
        assert carried >= float(load[1]) * (1 - 1e-9)
        assert option["gpus"] >= sized["best"]["gpus"]
        least = option["load"]["in_steady_state"] if option.get("load") else option["replicas"]
        assert carried * (least - 1) / option["replicas"] < float(load[1])
        assert least <= option["replicas"]
    if load[0] == "--requests-per-s":  # no strategy does more per GPU than the exact best
        each = answer["best"]["tokens_per_s_per_gpu"] / 200
        best = sized["best"]
        assert best["gpus"] >= math.ceil(6 / each)
        low, high = best["intervals"]["tokens_per_s_per_gpu"]  # what surely carries it
        assert low < best["tokens_per_s_per_gpu"] < high
        assert best["gpus_at_low_end"] * low >= 6 * 200 > (best["gpus_at_low_end"] - best["gpus_per_replica"]) * low
    assert "gpus_at_low_end" not in answer["best"]


@pytest.mark.parametrize(("engine", "counts_all"), [("vllm", True), ("sglang", False)])
def test_every_second_of_a_request_shows_in_one_figure_by_little_s_law(engine: str, counts_all: bool) -> None:
    stated = {"isl": 1000, "osl": 200, "tpot_ms": 12.0, "phase": "serve", "engine": engine, "gpus": 4}
    demand = Demand(question_about("llama_3_1_8b", **stated, batches="any").load(), 4)
    best = best_first(demand, 1)[0]
    fleet = fleet_of(demand, best)
    stay = stay_of(demand, best, fleet)
    assert stay is not None
    assert stay.request_s * (fleet.requests_per_s or 0) == pytest.approx(fleet.requests_at_once)
    # Half a step is in the time to the first token that no request waits for which comes as another ends.
    whole = pytest.approx(stay.request_s, abs=best.tpot_s)
    assert stay.ttft_at_once_s + 199 * best.tpot_s == whole
    assert best.ttft_s + 199 * stay.tpot_one_by_one_s == whole
    assert (best.ttft_s + 199 * best.tpot_s == whole) == counts_all


@pytest.mark.usefixtures("best_alone")
def test_prompts_wait_for_each_other_where_the_engine_can(raysearch: Callable[..., Any], tmp_path: Path) -> None:
    words = ("--set", "prompt_wait_steps=30", *COARSE)
    answer = ask("--engine", "sglang", "--out", str(tmp_path), *words)
    assert answer["question"]["prompt_wait_steps"] == 30
    kept = json.loads((tmp_path / "recommendation.json").read_text())["question"]
    assert Question(**kept).load().prompt_wait_steps == 30  # as its export reads it
    refused = raysearch("recommend", *ASKED, *words)
    assert refused.returncode == 2
    assert "vLLM 0.33.0: the engine does not delay prompts across attention groups" in refused.stderr


FP8 = ("--weights", "fp8", "--kv-cache", "fp8")


def llama(gpus: int, *words: str, model: str = "llama_3_1_8b", code: int = 0) -> dict[str, Any]:
    """An answer of another demand than `ASKED`."""
    stated = ("--model", model, "--gpus", str(gpus), "--isl", "1000", "--osl", "100", *FP8)
    shown = RUNNER.invoke(app, ["recommend", *stated, *words, "--json"], catch_exceptions=False)
    assert shown.exit_code == code, shown.output
    return json.loads(shown.stdout)


@pytest.mark.parametrize("wrong", [("--requests-per-s", "0"), ("--requests-per-s", "-3"), ("--set", "price=-2")])
def test_figures_that_mean_nothing_are_refused(raysearch: Callable[..., Any], wrong: tuple[str, str]) -> None:
    refused = raysearch("recommend", *ASKED, *wrong)
    assert refused.returncode == 2
    named = f"{wrong[0]} price" if wrong[0] == "--set" else wrong[0]
    assert refused.stderr.startswith(f"error: {named}: expected a number")


@pytest.mark.usefixtures("best_alone")
@pytest.mark.parametrize("load", [("--requests-per-s", "100000"), ("--concurrency", "90000")])
def test_a_load_that_the_gpus_cannot_carry_says_how_many_could(load: tuple[str, str]) -> None:
    miss = llama(1, *load, "--tpot-ms", "8", *COARSE, code=3)["nearest_miss"]
    if load[0] == "--requests-per-s":
        assert miss["gpus_needed"] == math.ceil(100_000 * 100 / miss["tokens_per_s_per_gpu"])  # replicas of one GPU
    assert miss["gpus_needed"] > 4
    assert miss["would_fit"] == [f"{miss['gpus_needed']:,} GPUs"]
    assert not miss["violations"]


@pytest.mark.usefixtures("best_alone")
def test_a_load_of_prompts_is_counted_in_prompts() -> None:
    answer = llama(16, "--phase", "prefill", "--ttft-ms", "300", "--requests-per-s", "100", "--set", "price=2", *COARSE)
    best = answer["best"]
    assert best["requests_per_s"] >= 100
    assert best["requests_per_s"] * (best["replicas"] - 1) / best["replicas"] < 100
    # What is paid for is the load, not what the replicas could do besides.
    assert best["price_per_million_tokens"] == pytest.approx(2 * best["gpus"] / (100 * 1000 * 3600) * 1e6)


def test_with_gpus_left_over_like_is_compared_with_like() -> None:
    answer = llama(7, "--tpot-ms", "24", *EVEN, *COARSE, "--set", "only=aggregated", model="llama_3_1_70b")
    options = [answer["best"], *answer["alternatives"]]
    assert options[0]["left_over"] > 0
    for each in options[1:]:
        assert each["tokens_per_s"] <= options[0]["tokens_per_s"]
        if each["gpus"] != options[0]["gpus"]:
            fewer = 1 - each["tokens_per_s"] / options[0]["tokens_per_s"]
            assert f"{fewer:.1%} fewer tokens/s in all, {each['left_over']} GPU" in each["reason"]
    best = options[0]["tokens_per_s"]
    for other in answer["beside"].values():
        filled = other["tokens_per_s_per_gpu"] * (7 // other["gpus_per_replica"]) * other["gpus_per_replica"]
        assert other["engine_reaches"] == pytest.approx(best / filled)
    gains = {each["change"]: each for each in answer["sensitivity"]}
    for change in ("10 % more HBM", "10 % more HBM bandwidth", "a TPOT 10 % longer"):
        each = gains[change]
        assert each["gain"] >= -1e-12  # more of a thing never costs
        assert each["gain"] == pytest.approx(each["tokens_per_s_per_gpu"] * each["gpus"] / best - 1)


@pytest.mark.usefixtures("breaking_load_unsought")
def test_under_a_load_gains_are_fewer_gpus_and_a_batch_may_be_bound_by_nothing() -> None:
    answer = llama(1, "--phase", "decode", "--requests-per-s", "7", "--tpot-ms", "8", *EVEN, *FEW)
    assert answer["best"]["gpus"] == 1
    assert all(each["gain"] == 0 for each in answer["sensitivity"] if each["change"].startswith("10 %"))
    assert answer["best"]["binding_limit"].startswith("none: batch ")
    assert answer["best"]["binding_limit"].endswith("but the load takes as many GPUs with it")


@pytest.mark.usefixtures("best_alone")
def test_more_memory_is_what_the_engine_s_share_of_it_needs_and_only_called_enough_if_it_is(
    tmp_path: Path,
) -> None:
    words = ("--weights", "bf16", "--kv-cache", "bf16", "--osl", "64")
    miss = llama(1, *words, "--tpot-ms", "60", model="llama_3_1_70b", code=3)["nearest_miss"]
    needs = next(text for text in miss["would_fit"] if text.endswith("GB more memory on each GPU"))
    hardware = load_hardware("h100_sxm")
    workload = question_about(
        "llama_3_1_70b",
        phase="serve",
        isl=1000,
        osl=64,
        engine="vllm",
        weights="bf16",
        kv_cache="bf16",
        gpus=1,
        batches="any",
    ).load()
    for more, fits in ((float(needs.split()[0]), True), (float(needs.split()[0]) - 0.3, False)):
        larger = replace(workload, hardware=replace(workload.hardware, hbm_bytes=hardware.hbm_bytes + more * 1e9))
        assert (find_best(space_of(larger)).evaluation is not None) == fits
    # A TPOT that no memory would meet: memory alone is not said to suffice.
    miss = llama(1, *words, "--tpot-ms", "20", model="llama_3_1_70b", code=3)["nearest_miss"]
    assert not [text for text in miss["would_fit"] if text.endswith("memory on each GPU") and " and " not in text]
    assert [text for text in miss["would_fit"] if " and " in text]


@pytest.mark.usefixtures("best_alone")
def test_figures_on_both_sides_of_a_limit_look_different() -> None:
    miss = llama(4, "--tpot-ms", "0.01", "--set", "only=aggregated", code=3)["nearest_miss"]
    assert "the limit is 0.01 ms" in miss["violations"][0]["message"]


def test_what_is_to_be_compared_with_is_looked_for_first(raysearch: Callable[..., Any], monkeypatch: Any) -> None:
    monkeypatch.setattr("raysearch.answers.recommended.recommended", None)
    monkeypatch.setitem(sys.modules, "aisimulate", None)
    refused = raysearch("recommend", *ASKED, "--set", "compare_with=aisimulate")
    assert refused.returncode == 2
    assert refused.stderr.startswith("error: the black box 'aisimulate' needs AISimulate: pip install -e")


@pytest.mark.usefixtures("best_alone")
def test_where_nothing_is_feasible_the_nearest_miss_and_what_would_fit_are_reported() -> None:
    missed = ask("--tpot-ms", "0.5", *EVEN, *COARSE, code=3)
    assert missed["best"] is None
    assert missed["alternatives"] == []
    miss = missed["nearest_miss"]
    assert [violation["kind"] for violation in miss["violations"]] == ["tpot"]
    assert miss["would_fit"][0] == f"a TPOT of {math.ceil(miss['tpot_s'] * 1e4) / 10:.1f} ms"
    words = ASKED[:-2]
    shown = RUNNER.invoke(app, ["recommend", *words, *COARSE, "--tpot-ms", "0.5"], catch_exceptions=False)
    assert shown.exit_code == 3
    assert "Nearest miss" in shown.stdout
    assert "It would fit with a TPOT of" in shown.stdout


@pytest.mark.usefixtures("best_alone")
def test_a_folder_holds_what_starts_the_last_answer_and_nothing_of_those_before(tmp_path: Path) -> None:
    words = ("--tpot-ms", "8", "--out", str(tmp_path), *COARSE)
    llama(1, *words, "--engine", "trtllm", "--phase", "decode")
    assert (tmp_path / "best" / "config.yaml").exists()
    (tmp_path / "mine.txt").touch()
    (tmp_path / "alternative9").mkdir()
    llama(1, *words, "--engine", "sglang", "--phase", "decode")
    assert {each.name for each in (tmp_path / "best").iterdir()} == {"start.sh"}
    assert not (tmp_path / "alternative9").exists()
    llama(1, "--tpot-ms", "0.01", "--out", str(tmp_path), *COARSE, code=3)
    assert {each.name for each in tmp_path.iterdir()} == {"mine.txt", "recommendation.json", "pareto.csv"}


@pytest.mark.usefixtures("best_alone")
def test_where_not_all_of_an_answer_can_be_written_nothing_is(tmp_path: Path) -> None:
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, limits[1]))  # as a disk that gets full
    try:
        with pytest.raises(OSError, match=r"recommendation\.json"):
            llama(1, "--tpot-ms", "8", "--out", str(tmp_path / "out"), *COARSE)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert not list(tmp_path.iterdir())


@pytest.mark.slow
def test_a_folder_is_written_though_nobody_reads_what_is_printed(
    start: Callable[..., subprocess.Popen[str]], tmp_path: Path
) -> None:
    words = ("--model", "llama_3_1_8b", "--gpus", "1", "--isl", "1000", "--osl", "100", "--tpot-ms", "8")
    process = start("recommend", *words, "--phase", "decode", "--out", tmp_path)
    assert process.stdout is not None
    process.stdout.close()
    assert process.wait(timeout=LONGEST_S) == 0
    assert json.loads((tmp_path / "recommendation.json").read_text())["sensitivity"]
    assert (tmp_path / "best" / "start.sh").is_file()


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--tpot-ms", "nan"), "--tpot-ms: expected at least 0, got 'nan'"),
        (("--weights", "anyx"), "--weights: unknown format 'anyx': did you mean 'any'?"),
        (
            ("--phase", "decode", "--chunk-tokens", "512"),
            "--chunk-tokens is of phase 'serve'",
        ),
    ],
)
def test_what_is_wrong_is_reported_in_the_words_that_were_typed(
    raysearch: Callable[..., Any], words: tuple[str, ...], message: str
) -> None:
    refused = raysearch("recommend", *ASKED, *words)
    assert refused.returncode == 2
    assert refused.stderr.startswith(f"error: {message}")


@pytest.mark.usefixtures("best_alone")
def test_what_a_recommendation_rests_on_is_stated_beside_its_interval() -> None:
    words = ("--model", "llama_3_1_8b", "--gpus", "1", "--isl", "1000", "--osl", "100", "--hardware", "mi300x", *FP8)
    shown = RUNNER.invoke(app, ["recommend", *words, "--tpot-ms", "8", *EVEN, *COARSE], catch_exceptions=False)
    assert "Extrapolated: efficiencies carried over from h100_sxm" in shown.stdout
    assert "Near its limit: TPOT leaves" in shown.stdout


@pytest.mark.usefixtures("best_alone")
def test_a_pool_of_prompts_has_an_interval_and_says_what_it_rests_on() -> None:
    words = ("--model", "llama_3_1_8b", "--gpus", "1", "--isl", "1000", "--osl", "100", "--phase", "prefill")
    shown = RUNNER.invoke(app, ["recommend", *words, "--ttft-ms", "100", *COARSE], catch_exceptions=False)
    assert re.search(r"tokens/s/GPU \[[\d,.]+, [\d,.]+\]", shown.stdout)
    assert "[assumed]: it covers the prompt's own steps" in shown.stdout
    assert "the client round trip is not included" in " ".join(shown.stdout.split())


def test_what_to_run_is_reported_before_what_stands_beside_it() -> None:
    asked = Question(model="llama_3_1_8b", isl=1000, osl=100, tpot_ms=20.0, gpus=2, batches="powers_of_two")
    demand = Demand(asked.load(), 2, asked, top=2, only="aggregated")
    order: list[str] = []
    early: list[Recommendation] = []

    def found(so_far: Recommendation) -> None:
        order.append("found")
        early.append(so_far)

    whole = recommended(demand, order.append, found)
    assert order[:2] == ["the engine's best", "found"]
    assert len(order) > 3
    assert early[0].options == whole.options[:1]
    assert len(whole.options) == 2
    assert not early[0].beside
    assert whole.beside


def test_the_answer_stands_in_the_terminal() -> None:
    words = ("recommend", *ASKED, "--tpot-ms", "10", *EVEN, *COARSE, "--engine", "sglang")
    shown = RUNNER.invoke(app, words, catch_exceptions=False)
    for text in (
        "SGLang 0.5.23: ",
        "tokens/s/GPU [",
        "Recommendation and alternatives",
        "Best of the extended space",
        "What if",
    ):
        assert text in shown.stdout
    # The best lies just within the SLO with some of the others' prompts, and beyond it with all.
    output = " ".join(shown.stdout.split())
    assert re.search(r"includes 52% of other requests' prompts.*ms per token, above the limit\)", output)


@pytest.mark.usefixtures("best_alone")
def test_both_forms_of_deployment_are_what_pools_says_and_the_better_one_leads(tmp_path: Path) -> None:
    asked = ("--model", "llama_3_1_70b", "--gpus", "8", "--isl", "8000", "--osl", "500", "--tpot-ms", "30", *COARSE)
    asked = (*asked, "--chunk-tokens", "8192")
    shown = RUNNER.invoke(app, ["recommend", *asked, "--out", str(tmp_path), "--json", "--set", "top=1"])
    answer = json.loads(shown.stdout)
    ways = json.loads(RUNNER.invoke(app, ["pools", *asked, "--json"]).stdout)["points"][0]["ways"]
    pair, single = answer["best"], answer["alternatives"][0]
    assert (answer["winner"], pair["form"], single["form"]) == ("disaggregated", "disaggregated", "aggregated")
    assert answer["disaggregated"] == pair
    assert pair["tokens_per_s"] > single["tokens_per_s"]
    for phase in ("prefill", "decode"):
        assert pair[phase] == ways["disaggregated"][phase]
    assert pair["tokens_per_s"] == pytest.approx(500 * ways["disaggregated"]["requests_per_s"])
    assert single["strategy"] == ways["aggregated"]["pool"]["strategy"]
    assert single["requests_per_s"] == pytest.approx(ways["aggregated"]["requests_per_s"])
    # Both go at one rate; measured runs may be slower, so that predictions stay below the limit.
    rates = [pair[phase]["replicas"] * pair[phase]["requests_per_s_of_each"] for phase in ("prefill", "decode")]
    assert pair["requests_per_s"] == pytest.approx(min(rates))
    assert pair["tpot_s"] < 0.029
    # The whole is as slow as the pool that is slowest where both are as slow as the ends of their intervals say.
    times = [("ttft_s", pair["prefill"]), ("tpot_s", pair["decode"])]
    ends = [
        min(
            500 * rate * pool[name] / pool["intervals"][name][end]
            for rate, (name, pool) in zip(rates, times, strict=True)
        )
        for end in (1, 0)
    ]
    assert pair["tokens_per_s_interval"] == pytest.approx(ends)
    assert ends[0] < pair["tokens_per_s"] < ends[1]
    assert pair["tpot_interval_s"] == pair["decode"]["intervals"]["tpot_s"]
    for number, roles in (("0", ["kv_producer", "kv_consumer"]), ("1", [])):
        text = RUNNER.invoke(app, ["export", str(tmp_path), "--to", "vllm", "--alternative", number]).stdout
        assert [role for role in ("kv_producer", "kv_consumer") if role in text] == roles
    scripts = [(tmp_path / "best" / phase / "start.sh").read_text() for phase in ("prefill", "decode")]
    assert len({tuple(re.findall(r"--max-model-len \d+", text)) for text in scripts}) == 1  # of whole requests, in both
    assert (tmp_path / "alternative1" / "start.sh").is_file()


@pytest.mark.usefixtures("best_alone")
@pytest.mark.parametrize("only", ["aggregated", "disaggregated"])
def test_one_form_alone_is_answered_where_it_is_asked_for(only: str) -> None:
    asked = rs.question(model="llama_3_1_8b", gpus=2, isl=1000, osl=200, tpot_ms=12, batches="powers_of_two")
    found = rs.recommend(asked, top=1, only=only)
    assert found.winner == only
    assert bool(found.answer.options) == (only == "aggregated")
    assert only.title() in str(found) or only == "aggregated"


@pytest.mark.usefixtures("best_alone")
def test_a_second_answer_removes_the_first_one_s_commands_and_nothing_else(tmp_path: Path) -> None:
    asked = rs.question(model="llama_3_1_8b", gpus=2, isl=1000, osl=200, tpot_ms=12, batches="powers_of_two")
    found = rs.recommend(asked, top=1, only="aggregated")
    found.write(tmp_path)
    for name in ("alternative7/start.sh", "alternative8/prefill/start.sh", "alternative8/thesis.txt", "best/mine.sh"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).touch()
    found.write(tmp_path)
    left = {path.relative_to(tmp_path).as_posix() for path in tmp_path.rglob("*")}
    assert {name for name in left if name.startswith("alternative")} == {"alternative8", "alternative8/thesis.txt"}
    assert {"best/start.sh", "best/mine.sh", "recommendation.json"} <= left


@pytest.mark.usefixtures("best_alone", "breaking_load_unsought")
def test_pools_under_a_load_show_what_they_could_make_as_replicas_of_one_kind_do() -> None:
    stated = {"model": "llama_3_1_8b", "gpus": 2, "isl": 1000, "osl": 200, "tpot_ms": 12, "chunk_tokens": 1000}
    found = rs.recommend(
        rs.question(**stated, batches="powers_of_two"), requests_per_s=2, requests=60, top=1, only="disaggregated"
    )
    pair = found.answer.pair
    assert pair is not None
    assert pair.load is not None
    low, high = pair.tokens_per_s_interval
    assert max(low, 2 * 200) < pair.tokens_per_s < high
    rates = [count * replica.requests_per_s for replica, count in pair.pools.values()]
    assert pair.tokens_per_s == pytest.approx(200 * min(rates))
    assert f"[{low / 2:,.1f}, {high / 2:,.1f}]; {pair.tokens_per_s:,.0f} tokens/s in all" in str(found)


@pytest.mark.parametrize(
    ("command", "option"),
    [
        ("recommend", "--isl"),
        ("recommend", "--osl"),
        ("recommend", "--concurrency"),
        ("pools", "--isl"),
        ("pools", "--osl"),
    ],
)
def test_numbers_that_no_float_holds_are_refused_in_one_line(
    raysearch: Callable[..., Any], command: str, option: str
) -> None:
    words = {"--isl": "100", "--osl": "10", option: "9" * 400}
    refused = raysearch(
        command, "--model", "llama_3_1_8b", "--gpus", "2", *(word for each in words.items() for word in each)
    )
    assert refused.returncode == 2
    assert refused.stderr.startswith("error: ")
    assert "1,000,000,000" in refused.stderr or "1000000000" in refused.stderr
    assert "Traceback" not in refused.stderr
