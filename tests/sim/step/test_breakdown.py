"""An evaluation explains itself when it is read, and never says anything else for that."""

from __future__ import annotations

import copy
import dataclasses
import pickle
import subprocess
import sys

import numpy as np
import pytest

from sim.config.catalog import load_workload
from sim.evaluation import Evaluation, Explanation
from sim.ops.layers import op_names
from sim.serving.phases import batching
from sim.simulate import evaluate
from sim.step.breakdown import explain
from sim.strategy import Strategy
from sim.workload import Workload

MOE = "gpt_moe_1_2t_16k"
DENSE = "llama_3_1_405b_8k"


def random_strategies(workload: Workload, count: int, seed: int = 0) -> list[Strategy]:
    rng, degrees, ops = np.random.default_rng(seed), workload.degrees, len(op_names(workload.model))
    tables = (degrees.tp, degrees.ep, degrees.pp, degrees.batch)
    return [
        Strategy(*(int(rng.choice(table)) for table in tables), tuple(rng.integers(3, size=ops).tolist()))
        for _ in range(count)
    ]


@pytest.mark.parametrize("name", [MOE, DENSE])
def test_the_ops_add_up_to_the_layer_that_a_search_is_shown(name: str) -> None:
    workload = load_workload(name)
    for strategy in random_strategies(workload, 20):
        evaluation = evaluate(workload, strategy)
        assert sum(op.time_s for op in evaluation.ops) == evaluation.stage.layer_s
        explanation = Explanation(*(getattr(evaluation, name) for name in Explanation._fields))
        loads = batching(workload, strategy.batch, strategy.attention_dp).loads
        assert explanation == explain(workload, strategy, loads, evaluation.tpot_s, evaluation.ttft_s, 0.0)


@pytest.mark.slow
def test_what_was_evaluated_before_changes_nothing() -> None:
    """Strategies share costs; a fresh process that meets them in the opposite order finds the same."""
    drawn = [(name, each) for name in (MOE, DENSE) for each in random_strategies(load_workload(name), 20)]
    printed = [repr(evaluate(load_workload(name), strategy)) for name, strategy in drawn]
    lines = [
        "from sim.config.catalog import load_workload",
        "from sim.simulate import evaluate",
        "from sim.strategy import ReplicaSet, Strategy",
        f"for name, strategy in reversed({drawn!r}): print(repr(evaluate(load_workload(name), strategy)))",
    ]
    fresh = subprocess.run([sys.executable, "-c", "\n".join(lines)], capture_output=True, text=True, check=True)
    assert fresh.stdout.splitlines() == printed[::-1]


def evaluation_and_calls(explanation: Explanation) -> tuple[Evaluation, list[int]]:
    calls: list[int] = []

    def explained() -> Explanation:
        calls.append(1)
        return explanation

    workload = load_workload(MOE)
    return evaluate(workload, random_strategies(workload, 1)[0]).explained_by(explained), calls


def test_an_explanation_is_worked_out_once_and_only_when_it_is_read() -> None:
    evaluation, calls = evaluation_and_calls(Explanation((), 0.25, ("context",)))
    assert evaluation.tpot_s > 0
    assert isinstance(evaluation.feasible, bool)
    assert not calls
    assert (evaluation.extrapolated, evaluation.expected_error, evaluation.ops) == (("context",), 0.25, ())
    assert calls == [1]


def test_an_evaluation_is_a_value_whether_or_not_it_was_read() -> None:
    workload = load_workload(MOE)
    strategy = random_strategies(workload, 1)[0]
    read = evaluate(workload, strategy)
    assert read.ops
    for unread in (
        evaluate(workload, strategy),
        pickle.loads(pickle.dumps(evaluate(workload, strategy))),
        copy.deepcopy(evaluate(workload, strategy)),
        dataclasses.replace(evaluate(workload, strategy)),
    ):
        assert unread == read
        assert repr(unread) == repr(read)
        assert dataclasses.asdict(unread) == dataclasses.asdict(read)
    other, _ = evaluation_and_calls(Explanation((), 0.25, ()))
    assert other != read
    with pytest.raises(dataclasses.FrozenInstanceError):
        read.ops = ()  # type: ignore[misc]
    with pytest.raises(AttributeError, match="no attribute 'bound'"):
        _ = read.bound  # type: ignore[attr-defined]
