"""`raysearch complete` as people and programs ask it."""

import itertools
import json

import pytest

from sim.config.catalog import load_workload
from sim.ops.dims import dims_of
from sim.simulate import evaluate
from sim.strategy import Strategy

DEGREES = ("--tp", "8", "--ep", "16", "--pp", "2", "--batch", "512")
PARTLY = "?,1,1,0,?,2,2,2,1,1,0,?"


def test_both_completions_stand_side_by_side(raysearch) -> None:
    ran = raysearch("complete", "-w", "gpt_moe_1_2t_16k", *DEGREES)
    assert ran.returncode == 0, ran.stderr
    for text in ("forward from qkv_proj", "By propagation: 196.88", "Best completion:", "of the best completion."):
        assert text in ran.stdout


def test_the_best_completion_is_the_best_of_all_that_there_are(raysearch) -> None:
    """Brute force over the 27 completions of three open ops; propagation's is one of them."""
    found = json.loads(raysearch("complete", "-w", "gpt_moe_1_2t_16k", *DEGREES, "--dims", PARTLY, "--json").stdout)
    workload = load_workload("gpt_moe_1_2t_16k")
    parts = PARTLY.split(",")
    values: dict[tuple[int, ...], float] = {}
    for open_choices in itertools.product((0, 1, 2), repeat=parts.count("?")):
        rest = iter(open_choices)
        dims = tuple(next(rest) if part == "?" else int(part) for part in parts)
        evaluation = evaluate(workload, Strategy(8, 16, 2, 512, dims))
        values[dims] = evaluation.tokens_per_s_per_gpu if evaluation.feasible else 0.0
    assert found["best"]["tokens_per_s_per_gpu"] == max(values.values())
    assert found["propagation"]["tokens_per_s_per_gpu"] == values[tuple(row["propagated"] for row in found["ops"])]
    assert found["share_of_best"] <= 1.0


def test_the_help_has_brackets_around_the_dims_of_a_tensor(raysearch) -> None:
    """rich takes what stands in brackets for a style."""
    assert raysearch("complete", "--help").stdout.count("qkv[t,q_tp]") == 2


def test_tensors_may_be_given_by_name(raysearch) -> None:
    arguments = ("complete", "-w", "mixtral_8x22b_8k", "--tp", "2", "--ep", "4", "--batch", "64", "--json")
    found = json.loads(raysearch(*arguments, "--dims", "qkv[t,q_tp] ffn_mid[e,c,f_tp] routing[t,k]").stdout)
    workload = load_workload("mixtral_8x22b_8k")
    by_name = dict(zip([dim.name for dim in dims_of(workload)], found["given"], strict=True))
    assert {name: choice for name, choice in by_name.items() if choice is not None} == {
        "qkv_proj": 1,
        "ffn1": 1,
        "router": 2,
    }


def test_the_ends_lie_as_a_layout_says_and_its_dims_leave_nothing_open(raysearch) -> None:
    layout = "attention TP8 DP16, experts TP8 EP16, PP2, batch 512, vocabulary 3,1,1"
    ran = raysearch("complete", "-w", "gpt_moe_1_2t_16k", "--layout", layout, "--json")
    assert ran.returncode == 0, ran.stderr
    workload, found = load_workload("gpt_moe_1_2t_16k"), json.loads(ran.stdout)
    for each in (found["propagation"], found["best"]):
        assert each["strategy"]["vocabulary"] == [3, 1, 1]
        strategy = Strategy(8, 16, 2, 512, tuple(each["strategy"]["dims"]), vocabulary=(3, 1, 1))
        assert each["tokens_per_s_per_gpu"] == evaluate(workload, strategy).tokens_per_s_per_gpu
    whole = raysearch("complete", "-w", "gpt_moe_1_2t_16k", "--layout", f"{layout}, dims {','.join('2' * 12)}")
    assert whole.returncode == 2
    assert "nothing is left to complete" in whole.stderr


def test_where_the_given_choices_cannot_be_run_it_ends_with_3(raysearch) -> None:
    ran = raysearch("complete", "-w", "gpt_moe_1_2t_16k", "--tp", "1", "--ep", "1", "--batch", "512")
    assert ran.returncode == 3
    assert "Best completion: nothing feasible" in ran.stdout


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (("--dims", "?,1"), "expected 12 numbers or '?'"),
        (("--dims", "?,9,?,0,?,?,?,?,1,?,0,?"), "qkv_proj is 9; in the space 'joint' it is one of 0, 1, 2"),
        (("--dims", "qkv[t,z_tp]"), "no op leaves a tensor qkv[t,z_tp]"),
        (("--dims", "qkv[t,q_ep]"), "the mesh has tp"),
        (("--dims", "qkv[t,q_tp] and"), "expected tensors such as qkv[t,q_tp], got 'and'"),
        (("--ep", "4"), "expected --tp or --layout with the other degrees"),
    ],
)
def test_a_mistake_is_one_error(raysearch, arguments: tuple[str, ...], expected: str) -> None:
    ran = raysearch("complete", "-w", "gpt_moe_1_2t_16k", *arguments)
    assert ran.returncode == 2
    assert expected in ran.stderr
