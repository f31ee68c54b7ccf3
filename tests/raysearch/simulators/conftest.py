"""A small Ray for the workers, and a cache of answers of the test's own."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from raysearch.optima.optimum_cache import CACHE_VARIABLE
from tests.raysearch.simulators.boxes import LOG


@pytest.fixture(scope="module")
def log(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the black boxes of a module note what they were asked."""
    return tmp_path_factory.mktemp("asked") / "log.txt"


@pytest.fixture(scope="module")  # a folder's would last to the end of all tests
def ray_of_nine(log: Path) -> Iterator[None]:
    """Of the modules that have workers: it takes longer to start than the others do in all."""
    from raysearch.processes.connection import connected

    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(LOG, str(log))  # before Ray starts: workers inherit it
        with connected(cpus=9):
            yield


@pytest.fixture(autouse=True)
def _own_answers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, log: Path) -> None:
    monkeypatch.setenv(CACHE_VARIABLE, str(tmp_path / "cache"))
    for path in (log, log.with_suffix(".first")):
        path.unlink(missing_ok=True)
