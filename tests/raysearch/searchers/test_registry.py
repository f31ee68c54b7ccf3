import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from typer.testing import CliRunner

from envs import StrategySpace
from raysearch.base.errors import InputError
from raysearch.base.named_code import declared_points, note_if_declared
from raysearch.cli.app import app
from raysearch.searchers import registry
from raysearch.searchers.registry import (
    OptionsError,
    UnknownName,
    check_options,
    make_searcher,
    register,
    searcher_class,
    searcher_names,
    searcher_summary,
)
from raysearch.simulators.opening import searched_space
from raysearch.testing.landscapes import tiny_workload
from sim.config.files import list_names

SPACE = StrategySpace(tiny_workload())


def test_the_shipped_searchers_are_known_by_their_names() -> None:
    baselines = ("random", "random_walk", "annealing", "coordinate", "megatron", "megatron_sp")
    peers = ("annealing_tuned", "mcmc", "genetic", "ant_colony", "optuna_tpe", "optuna_cmaes", "nevergrad")
    names = (*baselines, *peers, "sb3_ppo", "ppo_paper")
    assert {*names} <= {*searcher_names()}


def test_every_searcher_has_a_one_line_summary_and_a_preset() -> None:
    for name in searcher_names():
        assert searcher_summary(name)
        assert "\n" not in searcher_summary(name)
        assert name in list_names("searchers")


SLOW = ("nevergrad", "sb3_ppo")
"""To import."""


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=[pytest.mark.slow] * (name in SLOW)) for name in searcher_names() if name != "ppo_paper"],
)
def test_the_class_behind_a_name_bears_it(name: str) -> None:
    assert searcher_class(name).name == name
    space = searched_space(tiny_workload(), None, name)
    assert isinstance(make_searcher(name, space, seed=0, budget=1), searcher_class(name))


@pytest.mark.parametrize(
    ("name", "extra", "module", "title"),
    [
        ("sb3_ppo", "sb3", "stable_baselines3", "Stable-Baselines3"),
        ("nevergrad", "nevergrad", "nevergrad", "Nevergrad"),
        ("genetic", "pymoo", "pymoo", "pymoo"),
    ],
)
def test_a_missing_extra_is_one_message_that_says_what_to_install(
    name: str, extra: str, module: str, title: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert searcher_summary(name).endswith(f"needs the extra {extra}")
    check_options(name, {})
    monkeypatch.setitem(sys.modules, module, None)  # as where it is not installed
    with pytest.raises(InputError, match=rf"'{name}' needs {title}: pip install -e '\.\[{extra}\]' in the checkout"):
        check_options(name, {})


def test_a_study_of_a_searcher_whose_extra_is_missing_ends_before_its_first_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "pymoo", None)
    text = 'name = "a"\nworkloads = ["gpt_moe_1_2t_16k"]\nsearchers = ["random", "genetic"]\nseeds = [0]\nbudget = 5\n'
    (tmp_path / "study.toml").write_text(text)
    with pytest.raises(InputError, match="'genetic' needs pymoo"):
        CliRunner().invoke(
            app, ["study", str(tmp_path / "study.toml"), "--out", str(tmp_path / "out")], catch_exceptions=False
        )
    assert not (tmp_path / "out").exists()


def test_the_preset_holds_unless_an_option_is_given() -> None:
    assert check_options("annealing", {}).model_dump() == {"initial_temperature": 100.0}
    assert check_options("annealing", {"initial_temperature": 3}).model_dump() == {"initial_temperature": 3.0}


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("annealing", {"inital_temperature": 3}, "inital_temperature: unknown key; did you mean 'initial_temperature'"),
        ("annealing", {"initial_temperature": -1}, "initial_temperature: .*greater than 0, got -1"),
        ("annealing", {"initial_temperature": float("nan")}, "initial_temperature: .*, got nan"),
        ("annealing", {"initial_temperature": float("inf")}, "initial_temperature: .*finite number, got inf"),
        ("annealing", {"initial_temperature": "hot"}, "initial_temperature: .* number.*, got 'hot'"),
        ("random", {"temperature": 3}, "searcher 'random': temperature: unknown key"),
        ("ppo_paper", {"learning_rate": float("inf")}, "learning_rate: .*finite number, got inf"),
    ],
)
def test_a_wrong_option_is_one_clear_error(name: str, options: dict, message: str) -> None:
    with pytest.raises(OptionsError, match=message) as error:
        make_searcher(name, SPACE, seed=0, budget=10, **options)
    assert "\n" not in str(error.value)


def test_an_unknown_name_is_answered_with_the_closest() -> None:
    for refused in (searcher_summary, searcher_class):
        with pytest.raises(UnknownName, match="unknown searcher 'anealing': did you mean 'annealing'"):
            refused("anealing")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [({"seed": -1, "budget": 1}, "seed of at least 0, got -1"), ({"seed": 0, "budget": 0}, "at least 1 call, got 0")],
)
def test_a_seed_or_budget_out_of_range_is_refused(arguments: dict[str, int], message: str) -> None:
    with pytest.raises(InputError, match=message):
        make_searcher("random", SPACE, **arguments)


def test_a_name_is_registered_once() -> None:
    with pytest.raises(ValueError, match=r"'random' is registered already, as raysearch\.searchers\.random:Random"):
        register("random", "again", "elsewhere:Searcher")
    with pytest.raises(ValueError, match=r"expected 'package\.module:Class', got 'elsewhere'"):
        register("another", "wrong", "elsewhere")
    assert "another" not in searcher_names()


def test_a_searcher_of_the_users_own_needs_no_preset(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry, "_ENTRIES", dict(registry._ENTRIES))
    register("mine", "the same by another name", "raysearch.searchers.random:RandomSearcher")
    assert make_searcher("mine", SPACE, seed=0, budget=1).sweep_calls(SPACE) is None


MINE = """
from typing import ClassVar
import numpy as np
from raysearch.searchers.random import RandomSearcher
from raysearch.searchers.interface import Searcher


class Mine(RandomSearcher):
    name: ClassVar[str] = "mine"

class Half(Searcher):
    name: ClassVar[str] = "half"
    def ask(self, observation): ...

class Nameless(RandomSearcher):
    name = None

class Other(RandomSearcher):
    name: ClassVar[str] = "other"
    def __init__(self, space): ...

class Optioned(RandomSearcher):
    Options = dict

number = 3
"""


@pytest.fixture
def mine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """A module of a user's own, which an installed package declares as well."""
    (tmp_path / "searcher_of_ours.py").write_text(MINE)
    package = tmp_path / "ours-1.0.dist-info"
    package.mkdir()
    (package / "METADATA").write_text("Metadata-Version: 2.1\nName: ours\nVersion: 1.0\n")
    (package / "entry_points.txt").write_text(
        "[raysearch.searchers]\nours = searcher_of_ours:Mine\nrandom_walk = searcher_of_ours:Mine\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    declared_points.cache_clear()
    note_if_declared.cache_clear()
    yield "searcher_of_ours"
    declared_points.cache_clear()
    sys.modules.pop("searcher_of_ours", None)


def test_a_class_is_named_by_its_module_or_by_the_entry_point_of_a_package(mine: str) -> None:
    for name in (f"{mine}:Mine", "ours"):
        assert make_searcher(name, SPACE, seed=0, budget=1).name == "mine"
    listed = json.loads(CliRunner().invoke(app, ["list", "--json"], catch_exceptions=False).stdout)
    assert listed["plugins"]["searcher"] == dict.fromkeys(("ours", "random_walk"), "searcher_of_ours:Mine, ours")
    with pytest.raises(UnknownName, match=r"unknown searcher 'our': did you mean 'ours'\? \(or give module:Class"):
        searcher_class("our")


def test_a_package_s_searcher_of_a_shipped_name_is_not_used_which_is_stated_once(
    mine: str, caplog: pytest.LogCaptureFixture
) -> None:
    assert {searcher_class("random_walk").name for _ in range(2)} == {"random_walk"}
    assert caplog.messages == [
        "note: searcher 'random_walk' is raysearch's own; that of a package, searcher_of_ours:Mine, needs another name"
    ]


def test_a_name_that_two_packages_declare_is_refused(mine: str, tmp_path: Path) -> None:
    other = tmp_path / "theirs-1.0.dist-info"
    other.mkdir()
    (other / "METADATA").write_text("Metadata-Version: 2.1\nName: theirs\nVersion: 1.0\n")
    (other / "entry_points.txt").write_text("[raysearch.searchers]\nours = searcher_of_ours:Half\n")
    with pytest.raises(UnknownName, match="declare it as searcher_of_ours:Half and as searcher_of_ours:Mine; give the"):
        searcher_class("ours")


@pytest.mark.parametrize(
    ("attribute", "message"),
    [
        ("Mne", "has no 'Mne'; did you mean 'Mine'"),
        ("number", r"expected a class derived from raysearch\.searchers\.interface\.Searcher, got 3"),
        ("Half", "Half must define get_state, set_state, tell"),
        ("Nameless", "Nameless must define a text `name`"),
        ("Other", r"Other is made with \(space, \*, seed, budget, options\), which it does not take"),
        ("Optioned", r"Optioned\.Options must be a class derived from raysearch\.searchers\.interface\.NoOptions"),
    ],
)
def test_what_is_no_searcher_is_one_clear_error(mine: str, attribute: str, message: str) -> None:
    with pytest.raises(InputError, match=rf"^searcher '{mine}:{attribute}': .*{message}[^\n]*$"):
        check_options(f"{mine}:{attribute}", {})


def test_a_module_that_cannot_be_imported_is_one_clear_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "exits_at_once.py").write_text("raise SystemExit(3)\n")
    monkeypatch.syspath_prepend(tmp_path)
    for name in ("exits_at_once:Mine", "nowhere_at_all:Mine"):
        with pytest.raises(InputError, match=rf"^searcher '{name}': cannot import [^\n]*$"):
            searcher_class(name)


@pytest.mark.slow
def test_naming_searchers_imports_none_of_them_and_validating_options_neither_torch_nor_rllib() -> None:
    program = """if True:
        import sys
        from raysearch.searchers.registry import check_options, searcher_names, searcher_summary
        [searcher_summary(name) for name in searcher_names()]
        heavy = {"torch", "ray", "raysearch.searchers.annealing", "raysearch.searchers.ppo"} & set(sys.modules)
        assert not heavy, heavy
        check_options("ppo_paper", {})
        assert not {"torch", "ray"} & set(sys.modules)
    """
    subprocess.run([sys.executable, "-c", program], check=True, cwd=Path(__file__).parents[3])
