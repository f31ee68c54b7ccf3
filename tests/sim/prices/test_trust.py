"""The interval that an evaluation states: from serving runs, wider where these say less, and never without a reason."""

from __future__ import annotations

from dataclasses import replace

import pytest

from sim.config.catalog import load_calibration, load_hardware, load_workload
from sim.engines.engine_registry import engine_rules
from sim.evaluation import Evaluation
from sim.ops.heuristics import megatron_dims
from sim.prices.engine import Engine, EngineTimes
from sim.prices.hardware import ErrorModel, Hardware, ServingIntervals, Widths
from sim.prices.priced import EXACT, PricedKernel, error_interval, together
from sim.prices.trust import step_interval, trust_of
from sim.simulate import evaluate
from sim.strategy import Strategy
from sim.workload import Workload

NARROW, WIDE, BARE = (Widths((w, w, 0.0), (w, 2 * w, w)) for w in (0.1, 0.2, 0.3))
RUNS = ServingIntervals(
    NARROW, WIDE, BARE, (0.8, 1.25), {"vllm": frozenset({"known"})}, {"vllm": frozenset({"elsewhere"})}
)
ERRORS = ErrorModel(0.1, 0.35, 0.3, RUNS)


def stated(engine: str | None = "vllm", model: str = "known", kernels: tuple[float, float] = EXACT, share: float = 0.2):
    return step_interval(machine(ERRORS), engine, model, moe=False).stated(share, kernels)


def machine(errors: ErrorModel) -> Hardware:
    """One of its own efficiencies."""
    return replace(load_hardware("h100_sxm"), errors=errors, curves=None)


def test_what_efficiencies_of_another_machine_may_be_off_comes_on_top_whole() -> None:
    other = replace(load_hardware("h20_sxm"), errors=ERRORS)
    assert other.curves is not None
    carried = other.curves.carried_over.interval
    usual = together(
        RUNS.kernels, carried
    )  # kernels as sure as those of the runs, on the machine that they were measured on
    found = step_interval(other, "vllm", "known", moe=False).stated(0.2, usual)
    assert found.factors == pytest.approx(together(NARROW.at(0.2, moe=False), carried))
    assert found.because == "efficiencies and serving runs are those of h100_sxm, not of h20_sxm"


def test_a_measured_model_has_the_narrow_interval_and_others_a_wider_one_with_the_reason() -> None:
    known, unknown, bare = stated(), stated(model="new"), stated(engine=None)
    assert known.factors == pytest.approx(NARROW.at(0.2, moe=False))
    assert known.because == ""
    assert unknown.factors == pytest.approx(WIDE.at(0.2, moe=False))
    assert "no serving run of new under vllm" in unknown.because
    assert bare.factors == pytest.approx(BARE.at(0.2, moe=False))
    assert "elsewhere under vllm was measured on h100_sxm, so its engine times are those of its runs on others" in (
        stated(model="elsewhere").because
    )
    assert "no engine is named" in bare.because
    assert stated(engine="vllm<0.14").because == ""
    assert "under sglang" in stated(engine="sglang").because


def test_without_serving_runs_the_interval_is_wide_and_says_why() -> None:
    errors = replace(ERRORS, serving=0.35, runs=None)
    found = step_interval(machine(errors), "vllm", "known", moe=False).stated(0.2, EXACT)
    assert found.factors == pytest.approx(error_interval(0.35))
    assert "no serving run of this machine" in found.because


def test_kernels_less_sure_than_those_of_the_runs_widen_the_interval() -> None:
    plain, usual, unsure = stated(), stated(kernels=(0.8, 1.25)), stated(kernels=(0.5, 2.0))
    assert usual == plain
    assert unsure.factors[0] < plain.factors[0]
    assert unsure.factors[1] > plain.factors[1]


def test_the_kernels_interval_is_weighted_by_time() -> None:
    parts = [PricedKernel(3.0, 0.1, (0.9, 1.1)), PricedKernel(1.0, 0.3, (0.5, 1.5), "experts")]
    trust = trust_of(load_hardware("h100_sxm"), parts)
    assert trust.kernels == pytest.approx((0.8, 1.2))
    assert trust.extrapolated == ("experts (25% of a layer)",)


def served(engine: Engine | None, phase: str = "serve") -> tuple[Workload, Evaluation]:
    loaded = load_workload("qwen3_235b_a22b_16k")
    workload = replace(loaded, engine=engine, phase=phase, prompt_tokens=8000, output_tokens=1000)  # type: ignore[arg-type]
    return workload, evaluate(workload, Strategy(4, 1, 1, 32, megatron_dims(workload.model)))


def test_an_evaluation_states_seconds_around_its_own() -> None:
    record = load_calibration("h100_sxm").data["serving"]["engines"]["trtllm"]
    times = EngineTimes(*(record[name] for name in ("step_s", "sequence_s", "prefill_share")))
    _, known = served(Engine("trtllm", times, engine_rules("trtllm").memory))
    _, bare = served(None)
    for evaluation in (known, bare):
        low, high = evaluation.tpot_interval_s
        assert 0 < low < evaluation.tpot_s < high
    assert known.interval_because == ""
    assert bare.interval_because
    assert known.tpot_interval_s[1] / known.tpot_s < bare.tpot_interval_s[1] / bare.tpot_s
    _, prefill = served(None, "prefill")
    assert prefill.tpot_interval_s == (0.0, 0.0)
    for evaluation in (known, bare, prefill):  # steps that are all prompts err more than those that decode too
        low, high = (bound / evaluation.ttft_s for bound in evaluation.ttft_interval_s)
        assert 0 < low < 1 < high
        assert not evaluation.tpot_s or high >= evaluation.tpot_interval_s[1] / evaluation.tpot_s
