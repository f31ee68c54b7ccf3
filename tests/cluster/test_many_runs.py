"""That what a study costs its driver grows with the number of runs and no faster."""

from __future__ import annotations

from typing import Any

from ray import tune
from ray.tune.impl.placeholder import create_resolvers_map, inject_placeholders
from ray.tune.search.variant_generator import generate_variants

from raysearch.studies.tuning import Grid

RUNS = 50


class Counted(str):
    """A run's name that counts how often any of its kind is copied."""

    copies = 0

    def __deepcopy__(self, memo: dict[int, Any]) -> Counted:
        Counted.copies += 1
        return self


def copies_for(grid: dict[str, Any]) -> int:
    """What Ray Tune copies, from the search space to the configuration of each run."""
    Counted.copies = 0
    space = inject_placeholders({"run": grid}, create_resolvers_map())
    made = [spec["config"]["run"]["run_id"] for _, spec in generate_variants({"config": space})]
    assert made == [str(number) for number in range(RUNS)]
    return Counted.copies


def test_ray_tune_copies_a_run_of_a_study_once() -> None:
    runs = [{"run_id": Counted(number)} for number in range(RUNS)]
    assert copies_for(tune.grid_search(list(runs))) > RUNS**2  # why it has to be kept from doing so
    assert copies_for(Grid(grid_search=runs)) == RUNS
