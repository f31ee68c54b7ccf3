"""Certificates of the exact optimum: a true one is believed, and none that was altered."""

from __future__ import annotations

import dataclasses
import itertools

import numpy as np
import pytest

from sim.optimum import certificate as certificate_module
from sim.optimum.certificate import Certificate, certify
from sim.optimum.checker import Refused, check
from sim.optimum.exact_search import find_best
from sim.optimum.spaces import Space, extended_space
from sim.simulate import evaluate
from sim.workload import Workload
from tests.sim.optimum.test_exactness import CASES, cases, everything


@pytest.fixture(scope="module")
def space(toy_moe: Workload) -> Space:
    """Two meshes, two pipelines, nine batches; an SLO and a memory that keep some out."""
    choices = {name: table[:2] for name, table in extended_space(toy_moe).choices.items()}
    for name in ("ffn_norm", "router", "dispatch", "activation"):
        choices[name] = (2,)
    space = dataclasses.replace(extended_space(toy_moe), choices=choices, tp=(1, 2), cp=(1,), dp=(1, 4), ep=(2,))
    space = dataclasses.replace(space, pp=(1, 2), batch=tuple(range(24, 33)))
    every = everything(space)
    slo_s = float(sorted(every.tpot_s[every.feasible])[len(every) // 5])
    hardware = dataclasses.replace(
        toy_moe.hardware, hbm_bytes=float(sorted(every.memory_bytes[every.feasible])[len(every) // 2])
    )
    return dataclasses.replace(space, workload=dataclasses.replace(toy_moe, tpot_slo_s=slo_s, hardware=hardware))


@pytest.fixture(scope="module")
def certificate(space: Space) -> Certificate:
    found = find_best(space).evaluation
    assert found is not None
    return certify(space, found)


def altered(certificate: Certificate, at: int, **fields: object) -> Certificate:
    leaves = list(certificate.leaves)
    leaves[at] = leaves[at]._replace(**fields)
    return dataclasses.replace(certificate, leaves=tuple(leaves))


def test_what_is_proven_is_the_best_of_brute_force(space: Space, certificate: Certificate) -> None:
    every = everything(space)
    assert certificate.reached == pytest.approx(every.tokens_per_s_per_gpu[every.feasible].max(), rel=1e-12)
    assert check(space, certificate) < len(every) / 10
    assert any(leaf.low < leaf.high for leaf in certificate.leaves)
    assert any(any(leaf.multipliers) for leaf in certificate.leaves)


@pytest.mark.parametrize("factor", [1.001, 0.999])
def test_no_bound_may_be_altered(space: Space, certificate: Certificate, factor: float) -> None:
    for at, leaf in enumerate(certificate.leaves):
        with pytest.raises(Refused, match="the bound is"):
            check(space, altered(certificate, at, step_s=leaf.step_s * factor))


def test_no_leaf_may_be_left_out_cut_or_bent(space: Space, certificate: Certificate) -> None:
    for at, leaf in enumerate(certificate.leaves):
        rest = certificate.leaves[:at] + certificate.leaves[at + 1 :]
        with pytest.raises(Refused, match="no leaf has"):
            check(space, dataclasses.replace(certificate, leaves=rest))
        if leaf.low < leaf.high:
            with pytest.raises(Refused, match="no leaf has"):
                check(space, altered(certificate, at, high=leaf.high - 1))
        if any(leaf.multipliers):
            negative = leaf.multipliers._replace(tpot=-1.0)
            with pytest.raises(Refused, match="negative"):
                check(space, altered(certificate, at, multipliers=negative))


def test_a_proof_that_forgets_pipeline_degrees_is_refused(space: Space, monkeypatch: pytest.MonkeyPatch) -> None:
    best = find_best(space).evaluation
    monkeypatch.setattr(certificate_module, "_degrees", lambda space, mesh: (2,))
    forgetful = certify(space, best)
    with pytest.raises(Refused, match=r"no leaf has .* pp 1"):
        check(space, forgetful)


def test_no_leaf_may_lie_outside_the_space(space: Space, certificate: Certificate) -> None:
    batches, (tp, cp, dp, ep) = len(space.batch), certificate.leaves[0].mesh
    with pytest.raises(Refused, match="no part 0 of the space has tp, cp, dp, ep"):
        check(space, altered(certificate, 0, mesh=(tp, cp, dp, 3 * ep)))
    for at, leaf in enumerate(certificate.leaves):  # a place counted from the end would bound others than it covers
        for places in ({"low": leaf.low - batches}, {"high": leaf.high + batches}, {"high": leaf.low - 1}):
            with pytest.raises(Refused, match="are no places"):
                check(space, altered(certificate, at, **places))


def test_what_beats_the_largest_batch_is_not_proven_for_all_by_bounds_of_that_one(
    space: Space, certificate: Certificate
) -> None:
    every, last = everything(space), len(space.batch) - 1
    worse = every.feasible & (every.tokens_per_s_per_gpu < certificate.reached * (1 - 1e-6))
    value, at = max((every.tokens_per_s_per_gpu[at], at) for at in np.flatnonzero(worse).tolist())
    alone = certify(dataclasses.replace(space, batch=space.batch[-1:]), evaluate(space.workload, every.strategies[at]))
    forged = tuple(leaf._replace(low=-1, high=last) for leaf in alone.leaves)
    with pytest.raises(Refused, match="are no places"):
        check(space, Certificate(every.strategies[at], value, forged))


def test_nothing_but_the_best_is_proven(space: Space) -> None:
    space = dataclasses.replace(space, batch=space.batch[2:4])
    certificate, every = certify(space, find_best(space).evaluation), everything(space)
    worse = [
        (value, strategy)
        for strategy, value, feasible in zip(every.strategies, every.tokens_per_s_per_gpu, every.feasible, strict=True)
        if feasible and value < certificate.reached * (1 - 1e-6)
    ]
    _, second = max(worse, key=lambda each: each[0])
    with pytest.raises(Refused, match="reaches"):
        check(space, certify(space, evaluate(space.workload, second)))
    with pytest.raises(Refused, match="reaches"):
        check(space, certify(space, None))
    with pytest.raises(Refused, match="claimed to reach"):
        check(space, dataclasses.replace(certificate, reached=2 * certificate.reached))
    infeasible = next(
        strategy for strategy, feasible in zip(every.strategies, every.feasible, strict=True) if not feasible
    )
    with pytest.raises(Refused, match="infeasible"):
        check(space, dataclasses.replace(certificate, strategy=infeasible))
    outside = dataclasses.replace(second, batch=99)
    with pytest.raises(Refused, match="no strategy of the space"):
        check(space, dataclasses.replace(certificate, strategy=outside))


def test_a_leaf_of_a_space_is_no_leaf_of_a_larger_one(space: Space, certificate: Certificate) -> None:
    with pytest.raises(Refused, match="no leaf has"):
        check(dataclasses.replace(space, batch=(*space.batch, 64)), certificate)
    with pytest.raises(Refused, match="no part 7"):
        check(space, altered(certificate, 0, part=7))


def test_the_best_of_drawn_spaces_is_proven() -> None:
    for drawn, wanted in itertools.islice(cases(seed=1), 0, CASES, 8):
        best = find_best(drawn).evaluation
        proof = certify(drawn, best)
        check(drawn, proof)
        assert proof.reached == pytest.approx(wanted, rel=1e-12)
