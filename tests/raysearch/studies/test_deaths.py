"""Deaths of a run's process, counted by Tune's own trials: those without a new row are few, the others are free."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from ray.tune.experiment import Trial

from envs.rows import ROWS_FILE
from raysearch.studies.deaths import MOST_IDLE_RESTARTS, Deaths


@pytest.fixture
def write(tmp_path: Path) -> Callable[[int], None]:
    """Writes so many rows, or cuts what there are to so many."""

    def writing(rows: int) -> None:
        (tmp_path / ROWS_FILE).write_text("{}\n" * rows)

    return writing


@pytest.fixture
def trial(tmp_path: Path) -> Trial:
    config = {"run": {"folder": str(tmp_path)}}
    return Trial("tests", stub=True, config=config, max_failures=MOST_IDLE_RESTARTS)


@pytest.fixture
def deaths(trial: Trial) -> Deaths:
    (deaths := Deaths()).began(trial)
    return deaths


def dies(trial: Trial, deaths: Deaths) -> bool:
    """Whether it is started again."""
    trial.run_metadata.num_failures += 1
    if again := trial.should_recover():
        deaths.recovered(trial)
        deaths.began(trial)
    return again


def restarts(trial: Trial, deaths: Deaths) -> int:
    """Until Tune gives up; at most 20."""
    return next((made for made in range(20) if not dies(trial, deaths)), 20)


def test_a_run_that_never_writes_a_row_is_given_up(trial: Trial, write: Callable[[int], None]) -> None:
    write(7)  # by an earlier command: nothing that it did
    (deaths := Deaths()).began(trial)
    assert restarts(trial, deaths) == MOST_IDLE_RESTARTS


def test_a_run_whose_process_dies_before_it_starts_is_given_up(trial: Trial) -> None:
    assert restarts(trial, Deaths()) == MOST_IDLE_RESTARTS


@pytest.mark.parametrize("reports", [False, True])
def test_a_run_that_writes_a_row_before_each_death_goes_on_and_has_all_restarts_then(
    trial: Trial, deaths: Deaths, write: Callable[[int], None], reports: bool
) -> None:
    for rows in range(1, 11):
        write(rows)
        if reports:
            deaths.reported(trial)
        assert dies(trial, deaths)
    assert restarts(trial, deaths) == MOST_IDLE_RESTARTS - 1  # the last death after a row was followed by one, too


def test_a_run_that_dies_in_the_same_stretch_again_and_again_is_given_up(
    trial: Trial, deaths: Deaths, write: Callable[[int], None]
) -> None:
    made = 0
    for _ in range(20):
        write(5)  # it goes on before its last rows, which no checkpoint knows of
        deaths.reported(trial)
        if not dies(trial, deaths):
            break
        made += 1
        write(2)
    assert made == MOST_IDLE_RESTARTS
