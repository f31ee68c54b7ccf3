"""The space that the rules generate: its numbers, its subsets, and its exact optimum with choices at both ends."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest

from sim.batched import evaluate_many
from sim.canonical import canonical
from sim.config.catalog import load_workload
from sim.layers.ops import choices_by_rule
from sim.ops.layers import DENSE_LAYER, MOE_LAYER
from sim.ops.vocabulary import VOCABULARY_LAYERS, vocabulary_ops
from sim.optimum.exact_search import find_best
from sim.optimum.spaces import Space, extended_space, generated_space, joint_space, paper_space
from sim.simulate import evaluate
from sim.strategy import ENGINES_VOCABULARY, NONE, VOCABULARY_OPS, Strategy
from sim.strategy_checks import StrategyError, check_strategy
from sim.workload import DegreeTables, Speculation, Workload


def test_rules_number_the_choices_as_they_were_numbered_by_hand() -> None:
    for layer in (MOE_LAYER, DENSE_LAYER):
        for op in layer.ops:
            by_hand = (0, 1, 2, 3, 4, 5) if op.name in ("qkv_proj", "o_proj", "ffn1", "ffn2") else (0, 1, 2)
            assert choices_by_rule(op) == by_hand, op.name
    labels = {op.name: [op.label(choice) for choice in choices_by_rule(op)] for op in VOCABULARY_LAYERS.ops}
    assert labels == {
        "embedding": ["v", "d", "", "t"],
        "lm_head": ["d", "v", "", "t", "t", ""],
        "sampling": ["t", "v", ""],
    }


@pytest.mark.parametrize("name", ["gpt_moe_1_2t_16k", "llama_3_1_405b_8k"])
def test_the_other_spaces_are_subsets_of_the_generated_one(name: str) -> None:
    workload = load_workload(name)
    whole = generated_space(workload)
    for smaller in (paper_space(workload), joint_space(workload), extended_space(workload)):
        assert not smaller.vocabulary
        assert all(set(table) <= set(whole.choices[op]) for op, table in smaller.choices.items())
        drawn = smaller.sample(np.random.default_rng(0))
        assert not whole.outside(drawn)
    assert whole.size == extended_space(workload).size * 4 * 6 * 3
    assert whole.outside(replace(drawn, vocabulary=(0, 6, 1))) == ["lm_head is 6, not one of 0, 1, 2, 3, 4, 5"]
    assert extended_space(workload).outside(replace(drawn, vocabulary=(1, 1, 1))) == ["embedding is 1, not one of 0"]


def small(workload: Workload, name: str) -> Workload:
    degrees = DegreeTables((1, 4), (1, 2) if workload.model.is_moe else (1,), (1, 2), (16,))
    return replace(workload, degrees=degrees, name=name, max_gpus=8)


@pytest.mark.parametrize("named", [paper_space, joint_space, extended_space])
@pytest.mark.parametrize("which", ["toy_dense", "toy_moe"])
def test_a_named_space_is_what_its_tables_leave_of_the_generated_one_to_the_bit(
    which: str, named: Callable[[Workload], Space], request: pytest.FixtureRequest
) -> None:
    workload = small(request.getfixturevalue(which), which)
    space = named(workload)
    ends = {name: (choice,) for name, choice in zip(VOCABULARY_OPS, ENGINES_VOCABULARY, strict=True)}
    cut = replace(generated_space(workload), cp=space.cp, dp=space.dp, choices=space.choices, vocabulary=ends)
    assert (cut.size, cut.distinct_size) == (space.size, space.distinct_size)
    one, other = np.random.default_rng(3), np.random.default_rng(3)
    for _ in range(8):
        mine, its = space.sample(one), cut.sample(other)
        assert replace(its, vocabulary=()) == mine
        assert replace(evaluate(workload, its), strategy=mine) == evaluate(workload, mine)
    best, same = find_best(space), find_best(cut)
    assert same.swept_tokens_per_s_per_gpu == best.swept_tokens_per_s_per_gpu > 0
    assert same.evaluation == best.evaluation


@pytest.mark.parametrize(
    ("which", "tight"),
    [
        ("toy_dense", True),
        ("toy_dense", "with a draft model"),
        pytest.param("toy_moe", False, marks=pytest.mark.slow),
        pytest.param("toy_moe", "with a draft model", marks=pytest.mark.slow),
    ],
)
def test_the_optimum_with_choices_at_both_ends_is_that_of_brute_force(
    which: str, tight: bool | str, request: pytest.FixtureRequest
) -> None:
    workload = small(request.getfixturevalue(which), which)
    if tight:  # a large vocabulary, whose place in the memory decides
        model = replace(workload.model, vocab=300_000)
        workload = replace(workload, model=model, hardware=replace(workload.hardware, hbm_bytes=60e6))
    if isinstance(tight, str):  # whose vocabulary lies as the model's
        draft = Speculation(2, (0.8, 0.6), replace(workload.model, name="draft"))
        workload = replace(workload, speculation=draft, hardware=replace(workload.hardware, hbm_bytes=90e6))
    few = {name: ((NONE, 0) if name == "combine" else (NONE,)) for name in joint_space(workload).choices}
    space = replace(generated_space(workload), choices=few, cp=(1,), dp=(1, 2))
    strategies = {
        canonical(Strategy(tp, ep, pp, batch, dims, cp, dp, ends))
        for tp, cp, dp, ep, pp, batch in itertools.product(
            space.tp, space.cp, space.dp, space.ep, space.pp, space.batch
        )
        for dims in itertools.product(*few.values())
        for ends in itertools.product(*space.vocabulary.values())
    }
    every = evaluate_many(workload, list(strategies))
    found = find_best(space).evaluation
    assert found is not None
    assert found.tokens_per_s_per_gpu == every.tokens_per_s_per_gpu[every.feasible].max()
    engines = find_best(replace(space, vocabulary={})).evaluation
    assert engines is None or found.tokens_per_s_per_gpu >= engines.tokens_per_s_per_gpu


def test_the_ends_as_engines_lay_them_are_what_nothing_stands_for(moe: Workload) -> None:
    strategy = Strategy(8, 16, 2, 512, (NONE,) * 12)
    spelled = replace(strategy, vocabulary=ENGINES_VOCABULARY)
    assert canonical(spelled) == strategy
    assert replace(evaluate(moe, spelled), strategy=strategy) == evaluate(moe, strategy)
    alone = replace(strategy, tp=1, vocabulary=(3, 4, 0))
    assert replace(evaluate(moe, alone), strategy=strategy) == replace(
        evaluate(moe, canonical(alone)), strategy=strategy
    )


def test_a_choice_that_an_end_has_not_is_refused(moe: Workload) -> None:
    with pytest.raises(StrategyError, match="choice of embedding must be one of 0, 1, 2, 3, got 4"):
        check_strategy(moe, Strategy(8, 16, 2, 512, (NONE,) * 12, vocabulary=(4, 1, 1)))
    with pytest.raises(StrategyError, match="expected 3 vocabulary choices"):
        check_strategy(moe, Strategy(8, 16, 2, 512, (NONE,) * 12, vocabulary=(0, 1)))
    assert len(vocabulary_ops()) == 3
