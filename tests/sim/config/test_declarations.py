"""Choices that a workload file declares by naming a function."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from sim.config import declarations
from sim.config.catalog import load_workload
from sim.config.files import CatalogError, configs_root
from sim.layers.choices import withdraw_choice
from sim.layers.declared import declared_choices
from sim.ops.layers import MOE_LAYER
from sim.optimum.spaces import extended_space
from sim.simulate import evaluate
from sim.strategy import Strategy

NORM = MOE_LAYER.op("ffn_norm")
MODULE = """
from sim.layers.choices import declare_choice
from sim.ops.layers import MOE_LAYER

def stripes():
    declare_choice(MOE_LAYER.op("ffn_norm"), MOE_LAYER, "striped tokens", "SS(0,2) -> SS(0,2)")

def wrong():
    declare_choice(MOE_LAYER.op("ffn_norm"), MOE_LAYER, "by columns", "S(1) -> S(1)")
"""
NAME = "gpt_moe_1_2t_16k"


@pytest.fixture
def named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A workload file beside a module; takes out again what was declared."""
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "own_choices.py").write_text(MODULE)
    text = (configs_root() / "workloads" / f"{NAME}.toml").read_text()
    file = tmp_path / "mine.toml"
    file.write_text('declared_choices = "own_choices:stripes"\nspace = "extended"\n' + text)
    yield file
    for choice in list(declared_choices(NORM.key).values()):
        withdraw_choice(NORM, choice.name)
    declarations.declare.cache_clear()
    declarations._ran.clear()


def test_the_workload_that_names_a_function_has_its_choices_and_no_other_workload(named: Path) -> None:
    mine, other = load_workload(named), load_workload(NAME, space="extended")
    (number,) = declared_choices(NORM.key)
    assert number in extended_space(mine).choices["ffn_norm"]
    assert number not in extended_space(other).choices["ffn_norm"]
    assert mine.config_hash != other.config_hash
    dims = [0, 1, 1, 0, 0, number, 2, 0, 1, 1, 0, 0]
    assert evaluate(mine, Strategy(2, 1, 1, 8, tuple(dims))).ops[5].placement_out == "SS(0,2)"


def test_it_declares_once_in_a_process(named: Path) -> None:
    assert load_workload(named).config_hash == load_workload(named).config_hash
    assert len(declared_choices(NORM.key)) == 1


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("own_choices", "expected 'module:function', got 'own_choices'"),
        ("own_choice:stripes", "cannot import own_choice: ModuleNotFoundError"),
        ("own_choices:stripe", "has no function 'stripe'; did you mean 'stripes'"),
        ("own_choices:wrong", "own_choices:wrong failed: WrongRule"),
    ],
)
def test_what_cannot_be_declared_is_refused(named: Path, name: str, message: str) -> None:
    named.write_text(named.read_text().replace("own_choices:stripes", name))
    with pytest.raises(CatalogError, match=message):
        load_workload(named)


def test_a_second_function_is_refused_since_numbers_follow_from_the_order(named: Path) -> None:
    load_workload(named)
    named.write_text(named.read_text().replace("own_choices:stripes", "own_choices:wrong"))
    with pytest.raises(CatalogError, match="let one function declare them all"):
        load_workload(named)
