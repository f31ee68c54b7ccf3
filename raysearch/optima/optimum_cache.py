"""The exact optimum of a workload as the reference line of every score, kept on disk once it is found."""

from __future__ import annotations

import hashlib
import logging
import math
import os
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path

from pydantic import BaseModel

from raysearch.base.file_io import as_strategy, read_record, write_record
from sim.simulate import evaluate
from sim.strategy import Strategy
from sim.workload import Workload

CACHE_VARIABLE = "RAYSEARCH_CACHE_DIR"

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Yardstick:
    """The best of a workload's whole space and how its landscape lies.

    Attributes:
        tokens_per_s_per_gpu: f*, or None if no strategy is feasible.
        strategy: One that reaches f*, or None.
        space_size: Strategies in the space.
        feasible_count: How many of them break no limit.
        feasible_share: The same as a share of the space, in [0, 1].
        quantiles: Tokens/s/GPU at shares of the feasible strategies, by share as text.
        wall_s: How long the search over the whole space took when it was made.
    """

    tokens_per_s_per_gpu: float | None
    strategy: Strategy | None
    space_size: int
    feasible_count: int
    feasible_share: float
    quantiles: Mapping[str, float]
    wall_s: float


def find_yardstick(
    workload: Workload, progress: Callable[[int, int], None] | None = None, *, fresh: bool = False
) -> Yardstick:
    """The exact optimum of a workload: from the disk cache, or found now and kept there.

    Args:
        workload: Its configuration and the simulator's source decide whether a cached figure still holds.
        progress: Called with (done, total) while the space is searched.
        fresh: Whether to search again and replace what the cache holds.
    """
    path = cache_dir() / f"{workload.config_hash}-{simulator_digest()}.json"
    kept = None if fresh else _read(path, workload)
    if kept is None:
        kept = _search(workload, progress)
        try:
            write_record(path, asdict(kept))
        except OSError as error:
            note_unkept(path.parent, error.strerror)
    return kept


def cache_dir() -> Path:
    """Where optima are kept: $RAYSEARCH_CACHE_DIR, or the user's cache folder."""
    chosen = os.environ.get(CACHE_VARIABLE)
    if chosen:
        return Path(chosen)
    from platformdirs import user_cache_path

    return user_cache_path("raysearch") / "optimum"


def _search(workload: Workload, progress: Callable[[int, int], None] | None) -> Yardstick:
    from sim.optimum.landscape import find_optimum

    started = time.perf_counter()
    found = find_optimum(workload, progress)
    best = found.evaluation
    return Yardstick(
        tokens_per_s_per_gpu=best.tokens_per_s_per_gpu if best else None,
        strategy=best.strategy if best else None,
        space_size=found.space_size,
        feasible_count=found.feasible_count,
        feasible_share=found.feasible_share,
        quantiles={str(share): value for share, value in found.quantiles.items()},
        wall_s=time.perf_counter() - started,
    )


class _Kept(BaseModel):
    """The fields of a `Yardstick` on disk."""

    tokens_per_s_per_gpu: float | None
    strategy: Strategy | None
    space_size: int
    feasible_count: int
    feasible_share: float
    quantiles: dict[str, float]
    wall_s: float


def _read(path: Path, workload: Workload) -> Yardstick | None:
    try:
        fields = read_record(path, _Kept)
        best = as_strategy(fields.pop("strategy")) if fields["strategy"] else fields.pop("strategy")
        figure = fields["tokens_per_s_per_gpu"]
        if best and not math.isclose(evaluate(workload, best).tokens_per_s_per_gpu, figure, rel_tol=1e-9):
            return None
        return Yardstick(strategy=best, **fields)
    except (OSError, ValueError, TypeError):
        return None  # absent, damaged or not ours: it is found and written anew


@cache  # one note, however many optima
def note_unkept(folder: Path, reason: str) -> None:
    """Says that optima cannot be kept there."""
    _log.warning(
        "note: optima cannot be kept in %s (%s), so each is found anew; set %s to a folder that you may write to",
        folder,
        reason,
        CACHE_VARIABLE,
    )


@cache
def simulator_digest() -> str:
    """A text that changes whenever a line of the simulator does, so that no stale optimum survives."""
    import sim

    digest = hashlib.sha256()
    root = Path(sim.__path__[0])
    for path in sorted(root.rglob("*.py")):
        digest.update(path.relative_to(root).as_posix().encode() + b"\0" + path.read_bytes())
    return digest.hexdigest()[:16]
