"""A search that is begun with given strategies."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from envs import StrategyEnv, StrategySpace
from raysearch.answers.starts import start_strategies
from raysearch.base.errors import InputError
from raysearch.base.file_io import as_strategy, strategy_dict
from raysearch.optima.named_spaces import best_of_space
from raysearch.searchers.interface import Outcome
from raysearch.searchers.registry import OptionsError, make_searcher
from raysearch.searchers.rule_of_thumb import rule_of_thumb
from sim.config.catalog import load_workload
from sim.config.question import Question
from sim.simulate import evaluate

NAME = "mixtral_8x22b_8k"
MIXTRAL = load_workload(NAME)
SPACE = StrategySpace(MIXTRAL)
LIGHT = ("random", "annealing", "mcmc", "coordinate", "genetic", "ant_colony", "prior", "optuna_tpe")


def calls_of(searcher, calls: int) -> list[tuple[np.ndarray, float]]:
    env = StrategyEnv(MIXTRAL)
    observation, _ = env.reset()
    made = []
    for _ in range(calls):
        action = searcher.ask(observation)
        observation, reward, _, _, info = env.step(action)
        searcher.tell(action, Outcome.of(observation, reward, info))
        made.append((action, info["raw"]))
    return made


@pytest.mark.parametrize("name", [*LIGHT, pytest.param("nevergrad", marks=pytest.mark.slow)])
def test_given_strategies_are_called_first_and_the_search_goes_on(name: str) -> None:
    given = rule_of_thumb(SPACE, 3)
    searcher = make_searcher(name, SPACE, seed=0, budget=8, start=[strategy_dict(each) for each in given])
    made = calls_of(searcher, 8)
    assert [SPACE.decode(action) for action, _ in made[:3]] == given
    again = make_searcher(name, SPACE, seed=0, budget=8, start=[strategy_dict(each) for each in given])
    calls_of(again, 2)
    resumed = make_searcher(name, SPACE, seed=0, budget=8, start=[strategy_dict(each) for each in given])
    resumed.set_state(again.get_state())
    action = resumed.ask(np.zeros((3, len(SPACE.sizes)), np.float32))
    assert action is not None
    assert SPACE.decode(action) == given[2]


def test_a_climb_begins_at_the_best_that_was_given() -> None:
    given = rule_of_thumb(SPACE, 12)
    raw = [each.tokens_per_s_per_gpu * each.feasible for each in (evaluate(MIXTRAL, one) for one in given)]
    best = given[int(np.argmax(raw))]
    assert best not in (given[0], given[-1])
    searcher = make_searcher("coordinate", SPACE, seed=0, budget=13, start=[strategy_dict(each) for each in given])
    last, _ = calls_of(searcher, 13)[-1]
    assert (last != SPACE.encode(best)).sum() == 1


def test_the_rule_of_thumb_finds_something_feasible_on_most_models() -> None:
    for name in ("gpt_moe_1_2t_16k", "qwen3_235b_a22b_16k", "llama_3_1_405b_8k", NAME):
        workload = load_workload(name)
        tried = [evaluate(workload, each) for each in rule_of_thumb(StrategySpace(workload))]
        assert len(tried) <= 20
        assert any(each.feasible for each in tried)
        assert all(each.strategy.tp <= 8 for each in tried)


@pytest.mark.slow
def test_the_optimum_is_one_strategy_and_a_file_of_it_is_the_same(tmp_path: Path) -> None:
    question = Question(workload=NAME)
    found = start_strategies("optimum", question, SPACE)
    assert [as_strategy(each) for each in found] == [best_of_space(MIXTRAL, MIXTRAL.space).strategy]
    path = tmp_path / "best.json"
    for written in ({"strategy": found[0]}, {"strategy": found[0], "best": 3.5}):  # of a search, with its figure
        path.write_text(json.dumps(written))
        assert start_strategies(str(path), question, SPACE) == found


def test_the_optimum_begins_a_search_in_an_engine_s_space_and_with_prompts_too() -> None:
    question = Question(model="mixtral_8x7b", isl=1000, osl=500, gpus=8)
    workload = question.load()
    (found,) = start_strategies("optimum", question, StrategySpace(workload))
    assert as_strategy(found) == best_of_space(workload, "vllm").strategy


@pytest.mark.parametrize("start", ["ruler", "/nowhere/at/all"])
def test_a_start_that_is_none_is_one_error(start: str) -> None:
    with pytest.raises(InputError, match="expected rule, optimum, or a folder or file that is there"):
        start_strategies(start, Question(workload=NAME), SPACE)


def test_a_strategy_outside_the_space_is_one_error(tmp_path: Path) -> None:
    outside = {**strategy_dict(rule_of_thumb(SPACE, 1)[0]), "ep": 3}
    with pytest.raises(OptionsError, match="ep is 3"):
        make_searcher("genetic", SPACE, seed=0, budget=1, start=[outside])
    path = tmp_path / "outside.json"
    path.write_text(json.dumps({"strategy": outside}))
    with pytest.raises(InputError, match=r"no strategy there is of the space that is searched.*ep is 3"):
        start_strategies(str(path), Question(workload=NAME), SPACE)
