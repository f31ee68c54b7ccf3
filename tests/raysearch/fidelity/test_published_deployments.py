"""The deployments of others in configs/published, and the benchmark that sets our optimum beside them."""

from __future__ import annotations

import importlib.util
import tomllib
from pathlib import Path
from types import ModuleType

import pytest

from sim.config.files import config_path, configs_root

CHECKOUT = Path(__file__).parents[3]
ENTRIES = sorted((configs_root() / "published").glob("*.toml"))


@pytest.fixture(scope="module")
def benchmark() -> ModuleType:
    spec = importlib.util.spec_from_file_location("published", CHECKOUT / "benchmarks" / "published.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("path", ENTRIES, ids=lambda path: path.stem)
def test_an_entry_names_its_source_and_what_ships(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    entry = tomllib.loads(text)
    assert "[published] github.com/" in text
    assert entry["name"] == path.stem
    assert config_path("models", entry["model"]).is_file()
    assert config_path("hardware", entry["hardware"]).is_file()
    for layout in entry["layouts"]:
        assert layout["gpus"] % layout["ep"] == 0
        assert layout["concurrency"] == sorted(set(layout["concurrency"]))


def test_our_optimum_is_never_slower_than_what_is_among_its_choices(benchmark: ModuleType) -> None:
    path = next(path for path in ENTRIES if path.stem == "gptoss_h100_vllm_1k1k")
    found = list(benchmark.rows(path))
    assert len(found) == 6
    assert all(row.gain >= 1 for row in found)
    assert all(row.gain == 1 for row in found if row.theirs == row.ours)


def test_every_published_point_has_a_row() -> None:
    entries = [tomllib.loads(path.read_text()) for path in ENTRIES]
    points = [entry["entry"] for entry in entries for layout in entry["layouts"] for _ in layout["concurrency"]]
    lines = (CHECKOUT / "docs" / "evidence" / "published.csv").read_text(encoding="utf-8").splitlines()[1:]
    assert [line.partition(",")[0] for line in lines] == points


def test_layouts_have_the_names_that_people_know(benchmark: ModuleType) -> None:
    names = [benchmark.name(*shape) for shape in ((8, 1, 1, 1), (8, 1, 8, 1), (1, 8, 8, 1), (4, 1, 1, 2), (1, 1, 1, 1))]
    assert names == ["TP8", "TEP8", "DEP8", "TP4 PP2", "TP1"]
