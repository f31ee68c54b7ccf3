"""That what a study costs its driver grows with the number of runs and no faster."""

from __future__ import annotations

from typing import Any

from ray import tune
from ray.tune.search.variant_generator import generate_variants

from raysearch.tuning import Grid

copies = 0


class Counted(dict[str, Any]):
    """A run's configuration that counts how often it is copied."""

    def __deepcopy__(self, memo: dict[int, Any]) -> Counted:
        global copies
        copies += 1
        return Counted(self)


def test_ray_tune_copies_every_run_of_a_study_only_for_itself() -> None:
    runs = [Counted(run_id=str(number)) for number in range(50)]
    grid = tune.grid_search(Grid(runs))
    made = [spec["config"]["run"]["run_id"] for _, spec in generate_variants({"config": {"run": grid}})]
    assert made == [str(number) for number in range(50)]
    assert copies <= 3 * len(runs)  # a plain list makes more than 2500
