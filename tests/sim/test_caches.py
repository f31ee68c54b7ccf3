"""What a long process keeps: caches whose keys come from workloads and strategies are bounded."""

from __future__ import annotations

import functools
import gc
import importlib
import pkgutil
from collections.abc import Iterator
from typing import Any

import sim
from sim.prices.curves import Curves

MOST_ENTRIES = 1 << 15
"""Of prices, the smallest that are kept, some 500 bytes each."""
_FOREVER = {"sim.config", "sim.engines"}
"""Packages that keep what is shipped or installed, of which there is no more than that."""


def caches() -> Iterator[Any]:
    for module in pkgutil.walk_packages(sim.__path__, "sim."):
        importlib.import_module(module.name)
    gc.unfreeze()  # what was imported for the tests, else passed by
    known = gc.get_objects()
    gc.freeze()
    for each in known:
        if type(each) is functools._lru_cache_wrapper and (each.__module__ or "").startswith("sim."):
            yield each


def test_every_cache_of_the_simulator_is_bounded() -> None:
    found = list(caches())
    assert len(found) > 30
    for each in found:
        bound = each.cache_info().maxsize
        if bound is None:  # by the few names of a calibration's series, as long as the curves live
            kept = ".".join(each.__module__.split(".")[:2]) in _FOREVER
            assert kept or each.__qualname__.startswith(Curves.__name__), f"{each.__module__}.{each.__qualname__}"
        else:
            assert bound <= MOST_ENTRIES, f"{each.__module__}.{each.__qualname__} keeps {bound}"
