"""What measurements say of the rest: truths that are known, truths drawn from what is believed, noise, limits."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest

from raysearch.deploy.live.belief import ERROR_CORRELATION, Belief, belief_of
from raysearch.deploy.live.decide import Decider, Measured
from raysearch.deploy.live.deployment_candidates import TERMS, Candidates, candidates_of
from raysearch.deploy.live.session import Settings, tune
from raysearch.simulators.measurement import Measurement
from sim.optimum.exact_search import best_of_degrees, find_best
from sim.optimum.spaces import heuristic_space
from sim.simulate import evaluate
from tests.questions import question_about


@pytest.fixture(scope="module")
def candidates() -> Candidates:
    return on_gpus(4, tpot_ms=30.0)


def on_gpus(gpus: int, tpot_ms: float) -> Candidates:
    asked = {"phase": "serve", "isl": 4000, "osl": 500, "engine": "vllm", "tpot_ms": tpot_ms, "gpus": gpus}
    return candidates_of(heuristic_space(question_about("qwen3_32b", **asked).load(), sequence_parallel=False))


def truthful(candidates: Candidates, errors: np.ndarray, noise: float = 0.0, seed: int = 0):
    """A machine that takes exp(errors) times as long as the simulator says, give or take noise."""
    rng = np.random.default_rng(seed)

    def measure(index: int) -> Measurement:
        blur = errors[index] + noise * rng.standard_normal()
        evaluation = candidates.evaluations[index]
        return Measurement(evaluation.tokens_per_s_per_gpu * math.exp(-blur), evaluation.tpot_s * math.exp(blur))

    return measure


def values(candidates: Candidates, errors: np.ndarray) -> np.ndarray:
    """[n] tokens/s/GPU of that machine, 0 where the SLO is missed."""
    in_time = np.exp(candidates.log_tpot + errors) <= candidates.workload.tpot_limit_s
    return np.where(in_time, np.exp(candidates.log_rate - errors), 0.0)


def test_the_first_candidate_is_the_exact_optimum_and_shares_of_its_time_add_up(candidates: Candidates) -> None:
    space = heuristic_space(candidates.workload, sequence_parallel=False)
    assert candidates.evaluations[0].tokens_per_s_per_gpu == pytest.approx(find_best(space).swept_tokens_per_s_per_gpu)
    assert candidates.shares.shape == (len(candidates), len(TERMS))
    assert (candidates.shares >= 0).all()
    assert candidates.shares.sum(axis=1) == pytest.approx(np.ones(len(candidates)))


def test_the_best_of_each_tuple_of_degrees_is_found_whatever_the_slo() -> None:
    question = question_about("mixtral_8x7b", phase="decode", isl=1024, osl=256, gpus=2)
    space = heuristic_space(question.load(), sequence_parallel=True)
    found = best_of_degrees(space)
    brute = [evaluate(space.workload, strategy) for strategy in found]
    assert {violation.kind for each in brute for violation in each.violations} <= {"tpot"}
    assert len({(s.tp, s.ep, s.pp, s.batch) for s in found}) == len(found)
    assert len(best_of_degrees(replace(space, workload=replace(space.workload, tpot_slo_s=1e-9)))) == len(found)


def test_a_machine_that_is_the_simulator_is_known_after_few_measurements(candidates: Candidates) -> None:
    nothing, seen = np.zeros(len(candidates)), []
    *_, last = tune(candidates, Settings(noise=0.002), truthful(candidates, nothing), seen, 50)
    assert seen[0].candidate == 0
    assert values(candidates, nothing)[last.decision.incumbent] >= 0.98 * values(candidates, nothing).max()
    assert last.decision.confidence >= 0.9
    assert len(seen) <= 8
    assert last.decision.scale < 1


def test_a_machine_that_is_slower_throughout_is_no_harder(candidates: Candidates) -> None:
    slower = np.full(len(candidates), -0.2)
    free = replace(candidates, workload=replace(candidates.workload, tpot_slo_s=math.inf))
    seen: list[Measured] = []
    *_, last = tune(free, Settings(noise=0.002), truthful(free, slower), seen, 50)
    assert values(free, slower)[last.decision.incumbent] >= 0.98 * values(free, slower).max()
    assert len(seen) <= 10


def test_the_stated_confidence_is_kept_on_truths_drawn_from_the_belief(candidates: Candidates) -> None:
    few, noise = Candidates(candidates.workload, candidates.evaluations[:12]), 0.005
    rng = np.random.default_rng(7)
    nobody = np.array([], dtype=np.int64)
    truths = belief_of(few, ERROR_CORRELATION, noise=noise).samples(nobody, np.array([]), 25, rng)
    right, counts = [], []
    for seed, errors in enumerate(truths):
        seen: list[Measured] = []
        *_, last = tune(few, Settings(noise=noise, seed=seed), truthful(few, errors, noise, seed), seen, 40)
        true = values(few, errors)
        known = last.decision.incumbent is not None and true[last.decision.incumbent] >= 0.98 * true.max()
        right.append(known if true.max() else last.decision.incumbent is None)
        counts.append(len(seen))
    # 25 draws of a share of 0.9 lie above 0.74 with probability 0.99.
    assert np.mean(right) > 0.74
    assert np.mean(counts) < len(few)


def surprising(candidates: Candidates, kind: int, factor: float, rng: np.random.Generator) -> np.ndarray:
    """[n] errors of up to a factor of 3 that no interval has, beside those that are usual."""
    usual = Belief(candidates.stated_sd, _alike(candidates), ERROR_CORRELATION, 0.01)
    (errors, *_) = usual.samples(np.array([], int), np.array([]), 15, rng)
    batch, shares = np.array([each.batch for each in candidates.strategies]), candidates.shares
    axis = candidates.places[:, rng.choice([at for at in range(5) if np.ptp(candidates.places[:, at])])]
    term = shares[:, rng.choice(np.flatnonzero(shares.max(axis=0) > 0.1))]
    surprise = (
        lambda: np.full(len(candidates), factor),
        lambda: factor * (batch >= rng.choice(sorted(set(batch))[1:])),
        lambda: factor * (axis == rng.choice(axis)),
        lambda: np.log1p((math.exp(factor) - 1) * term),
        lambda: factor * np.log2(batch) / np.log2(batch).max(),
        lambda: rng.uniform(-abs(factor), abs(factor), len(candidates)),
    )[kind]()
    return np.clip(errors + surprise, -math.log(3), math.log(3))


def _alike(candidates: Candidates) -> np.ndarray:
    return ERROR_CORRELATION.correlation(candidates.shares, candidates.places)


@pytest.mark.slow
def test_the_stated_confidence_is_kept_on_machines_whose_errors_are_outside_the_belief(candidates: Candidates) -> None:
    rng, noise, right = np.random.default_rng(5), 0.005, []
    for seed in range(48):
        errors = surprising(candidates, seed % 6, rng.uniform(-math.log(3), math.log(3)), rng)
        seen: list[Measured] = []
        *_, last = tune(
            candidates, Settings(noise=noise, seed=seed), truthful(candidates, errors, noise, seed), seen, 50
        )
        true, found = values(candidates, errors), last.decision.incumbent
        if last.decision.confidence >= 0.9:
            right.append(found is not None and true[found] >= 0.98 * true.max())
    assert len(right) > 36
    assert np.mean(right) >= 0.9


@pytest.mark.parametrize("faster", [1.8, 2.8])
def test_what_the_simulator_thinks_too_slow_is_found_where_the_machine_is_faster(faster: float) -> None:
    strict = on_gpus(8, tpot_ms=20.0)
    many = np.array([each.batch >= 128 for each in strict.strategies])
    errors = np.where(many, -math.log(faster), 0.0)
    true, seen = values(strict, errors), list[Measured]()
    best = int(true.argmax())
    assert many[best]
    assert strict.evaluations[best].violations  # by the simulator
    *_, last = tune(strict, Settings(), truthful(strict, errors), seen, 50)
    found = last.decision.incumbent
    assert found is not None
    assert true[found] >= 0.98 * true[best]
    assert last.decision.confidence >= 0.9
    assert len(seen) < len(strict) / 2


def test_a_surprise_is_learned_from_what_is_measured(candidates: Candidates) -> None:
    belief = belief_of(candidates, noise=0.01)
    many = np.array([each.batch >= 64 for each in candidates.strategies])
    rows = np.array([*np.flatnonzero(many)[:2], *np.flatnonzero(~many)[:3]])
    weights, means, _ = belief.given(rows, np.where(many[rows], -0.6, 0.0))
    expected = weights @ means
    unseen = np.setdiff1d(np.arange(len(candidates)), rows)
    assert expected[unseen][many[unseen]].mean() < -0.3
    assert abs(expected[unseen][~many[unseen]].mean()) < 0.15
    assert belief.log_evidence(rows, np.zeros(5)) > belief.log_evidence(rows, np.full(5, 2.0))


def test_more_confidence_takes_more_measurements(candidates: Candidates) -> None:
    errors = belief_of(candidates, noise=0.01).samples(np.array([], int), np.array([]), 20, np.random.default_rng(3))[0]
    counts = []
    for confidence in (0.6, 0.9, 0.99):
        seen: list[Measured] = []
        list(tune(candidates, Settings(confidence=confidence), truthful(candidates, errors), seen, 60))
        counts.append(len(seen))
    assert counts == sorted(counts)


def test_what_ran_out_of_memory_rules_out_more_requests_of_the_same_degrees(candidates: Candidates) -> None:
    decider = Decider(candidates, within=0.02, noise=0.01)
    first = candidates.strategies[0]
    seen = [Measured(0, Measurement(unsupported="out of memory"))]
    for number in range(12):
        decision = decider.decide(seen, np.random.default_rng(number))
        assert decision.following is not None
        strategy = candidates.strategies[decision.following]
        same = (strategy.tp, strategy.ep, strategy.pp) == (first.tp, first.ep, first.pp)
        assert not (same and strategy.batch >= first.batch)
        seen.append(Measured(decision.following, truthful(candidates, np.zeros(len(candidates)))(decision.following)))


def test_a_measured_miss_of_the_slo_is_not_recommended(candidates: Candidates) -> None:
    late = Measurement(candidates.evaluations[0].tokens_per_s_per_gpu, candidates.workload.tpot_limit_s * 1.001)
    decision = Decider(candidates, within=0.02, noise=0.01).decide([Measured(0, late)], np.random.default_rng(0))
    assert decision.incumbent is None
    assert decision.following != 0


def test_a_measurement_tells_most_of_the_strategies_like_it(candidates: Candidates) -> None:
    _, _, before = belief_of(candidates, noise=0.01).given(np.array([], int), np.array([]))
    weights, means, after = belief_of(candidates, noise=0.01).given(np.array([0]), np.array([0.2]))
    spread = np.sqrt(np.diag(after[0]) / np.diag(before[0]))
    assert spread[0] == spread.min()
    apart = ((candidates.places - candidates.places[0]) ** 2).sum(axis=1)
    assert spread[apart == apart.max()].mean() > spread[(apart > 0) & (apart <= 1)].mean()
    assert (weights @ means)[0] == pytest.approx(0.2, abs=0.01)
    assert (weights @ means > 0).all()


def test_four_measurements_of_a_strategy_say_what_their_mean_with_half_the_noise_says(candidates: Candidates) -> None:
    four = belief_of(candidates, noise=0.04).given(np.array([3, 3, 3, 3]), np.array([0.1, 0.2, 0.0, 0.1]))
    mean = belief_of(candidates, noise=0.02).given(np.array([3]), np.array([0.1]))
    for one, other in zip(four, mean, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-9, atol=1e-12)


def test_ten_thousand_measurements_are_gone_on_from_as_fast_as_one(candidates: Candidates) -> None:
    seen = [Measured(0, truthful(candidates, np.zeros(len(candidates)))(0))] * 10_000
    decision = Decider(candidates, within=0.02, noise=0.01).decide(seen, np.random.default_rng(0))
    assert decision.incumbent == 0
