"""What tests of readers share: how much is tried, what a refusal is, records of right digests and wrong values."""

from __future__ import annotations

import json
import os
import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save

from raysearch.base.errors import InputError, RunFailed
from raysearch.base.file_io import SEAL
from raysearch.reports.study_report import NotExplained, best_figures, read_report
from raysearch.studies.results import survey, verify
from raysearch.studies.study_status import read_status
from sim.config.files import CatalogError
from sim.strategy_checks import StrategyError
from tests.raysearch.forging import WRONG, instance, places, replaced, resealed

LONG = int(os.environ.get("RAYSEARCH_FUZZ", "0"))
"""Of the long form: `make fuzz N=10000` gives each reader a hundred thousand inputs."""
_RUN = 100
"""Inputs of a reader in the time of one that is a whole run or process."""


def inputs(usual: int = 16) -> int:
    """Inputs of a reader: so many in the default run."""
    return 10 * LONG or usual


def runs(usual: int) -> int:
    """The same where each input is a whole run, search for an optimum or process."""
    return inputs(usual * _RUN) // _RUN


INPUTS = inputs()
MOST_BYTES = 500 * 10**6
REFUSALS = (InputError, CatalogError, StrategyError, RunFailed)

SNIPPETS = [
    b"",
    b"\0",
    b"\xff\xfe",
    b"[" * 3000,
    b"{" * 3000,
    b"1e999",
    b"-1",
    b"NaN",
    b"9" * 5000,
    b"a." * 3000,
    b'"',
    b"\n",
]


def broken(content: bytes, rng: random.Random) -> bytes:
    """The content with a piece of it cut out, doubled, moved, flipped or replaced."""
    start = rng.randrange(len(content) + 1)
    end = min(len(content), start + rng.choice([0, 1, 1, 8, 64, 100_000]))
    piece = content[start:end]
    flipped = bytes(byte ^ (1 << rng.randrange(8)) for byte in piece)
    new = rng.choice([b"", piece * 2, flipped, rng.choice(SNIPPETS), rng.randbytes(len(piece))])
    return content[:start] + new + content[end:]


@contextmanager
def bounded_memory() -> Iterator[None]:
    """What is done takes at most `MOST_BYTES` at its peak beyond what the process, with its libraries, had before."""
    Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew: see proc(5)
    before = _memory_bytes("VmRSS")
    yield
    assert _memory_bytes("VmHWM") - before < MOST_BYTES


@pytest.fixture(autouse=True)
def within_memory() -> Iterator[None]:
    """Every test of a module that imports this keeps `bounded_memory`."""
    with bounded_memory():
        yield


def _memory_bytes(name: str) -> int:
    (line,) = [each for each in Path("/proc/self/status").read_text().splitlines() if each.startswith(f"{name}:")]
    return int(line.split()[1]) * 1024


def now_and_then(rng: random.Random) -> bool:
    """For what reads more than the file that was forged: ten times in the default run, each 500th in a long one."""
    return rng.random() < max(10 / INPUTS, 1 / 500)


def look_at(folder: Path) -> None:
    """All that reads results."""
    for look in (read_status, survey, verify, read_report):
        try:
            look(folder)
        except REFUSALS as refusal:
            assert "\n" not in str(refusal)  # noqa: PT017
    try:
        json.dumps(best_figures(folder, survey(folder).runs), allow_nan=False)
        json.dumps(survey(folder).runs, allow_nan=False)
    except (*REFUSALS, NotExplained):
        pass


def tried(read: Callable[[], object]) -> None:
    try:
        read()
    except REFUSALS as refusal:
        assert "\n" not in str(refusal)  # noqa: PT017


def forged(whole: dict[str, Any], schema: Any, rng: random.Random) -> Any:
    """A record with values replaced, or a new one of its schema; with a digest that is right, mostly."""
    if rng.random() < 0.3:
        made = instance(schema, rng)
    else:
        made = whole
        for _ in range(rng.choice([1, 1, 1, 2])):
            others = [at for at in places(made) if at != (SEAL,)]
            made = replaced(made, rng.choice(others), rng.choice(WRONG))
    try:
        return resealed(made) if isinstance(made, dict) and rng.random() < 0.95 else made
    except (ValueError, TypeError, OverflowError):
        return made


def forged_arrays(path: Path, header: Any, arrays: dict[str, Any], rng: random.Random) -> None:
    """Writes a prior or a policy, with a piece of the file broken now and then."""
    metadata = {"header": header if isinstance(header, str) else json.dumps(header)}
    path.write_bytes(save({name: np.asarray(array, np.float32) for name, array in arrays.items()}, metadata))
    if rng.random() < 0.3:
        path.write_bytes(broken(path.read_bytes(), rng))
