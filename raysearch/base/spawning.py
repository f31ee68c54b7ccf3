"""Processes of Python's own making look for modules where this one does, and not in the working directory first."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager

_SAFE_PATH = "PYTHONSAFEPATH"
"""[spec] Python's `-P` as a variable: of `python -c`, too, which is how `multiprocessing` starts processes."""


@contextmanager
def spawning() -> Iterator[None]:
    """For as long as `multiprocessing` or PyTorch starts processes: no `multiprocessing.py` that lies here is run."""
    before = os.environ.get(_SAFE_PATH)
    os.environ[_SAFE_PATH] = "1"
    try:
        yield
    finally:
        if before is None:
            del os.environ[_SAFE_PATH]
        else:
            os.environ[_SAFE_PATH] = before
