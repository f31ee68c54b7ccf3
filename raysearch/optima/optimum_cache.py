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

from raysearch.base.file_io import as_strategy, read_record, strategy_dict, write_record
from sim.json_object import JsonFields, JsonObject
from sim.simulate import evaluate
from sim.strategy import Strategy
from sim.strategy_checks import check_strategy
from sim.workload import Workload

CACHE_VARIABLE = "RAYSEARCH_CACHE_DIR"

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class CachedOptimum:
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


def find_cached_optimum(
    workload: Workload,
    progress: Callable[[int, int], None] | None = None,
    *,
    fresh: bool = False,
    best: Strategy | None = None,
) -> CachedOptimum:
    """The exact optimum of a workload and what lies around it: from the disk cache, or found now and kept there.

    Args:
        workload: Its configuration and the simulator's source decide whether a cached figure still holds.
        progress: Called with (done, total) while the space is searched.
        fresh: Whether to search again and replace what the cache holds.
        best: The optimum, if it is known.
    """
    path = cache_dir() / f"{workload.config_hash}-{simulator_digest()}.json"
    if fields := None if fresh else read_kept(path, _KeptYardstick, workload):
        return CachedOptimum(**fields)
    found = _search(workload, progress, best)
    keep_optimum(path, asdict(found), found.strategy)
    return found


def keep_optimum(path: Path, fields: JsonFields, best: Strategy | None) -> None:
    """Writes an optimum for `read_kept`, where that can be done."""
    try:
        write_record(path, {**fields, "strategy": strategy_dict(best) if best else None})
    except OSError as error:
        note_unkept(path.parent, error.strerror)


def cache_dir() -> Path:
    """Where optima are kept: $RAYSEARCH_CACHE_DIR, or the user's cache folder."""
    chosen = os.environ.get(CACHE_VARIABLE)
    if chosen:
        return Path(chosen)
    from platformdirs import user_cache_path

    return user_cache_path("raysearch") / "optimum"


def _search(workload: Workload, progress: Callable[[int, int], None] | None, best: Strategy | None) -> CachedOptimum:
    from sim.optimum.landscape import find_optimum

    started = time.perf_counter()
    found = find_optimum(workload, progress, evaluate(workload, best) if best else None)
    return CachedOptimum(
        tokens_per_s_per_gpu=found.evaluation.tokens_per_s_per_gpu if found.evaluation else None,
        strategy=found.evaluation.strategy if found.evaluation else None,
        space_size=found.space_size,
        feasible_count=found.feasible_count,
        feasible_share=found.feasible_share,
        quantiles={str(share): value for share, value in found.quantiles.items()},
        wall_s=time.perf_counter() - started,
    )


class KeptBest(BaseModel):
    """What every optimum on disk has."""

    tokens_per_s_per_gpu: float | None
    strategy: JsonObject | None
    space_size: int
    wall_s: float


class _KeptYardstick(KeptBest):
    feasible_count: int
    feasible_share: float
    quantiles: dict[str, float]


def read_kept(path: Path, schema: type[KeptBest], workload: Workload) -> JsonObject | None:
    """The fields of an optimum on disk, whose strategy is evaluated once more; None if it is not there, or not ours."""
    try:
        fields = read_record(path, schema)
        best = as_strategy(fields["strategy"]) if fields["strategy"] else None
        if best:
            check_strategy(workload, best)
        figure, now = fields["tokens_per_s_per_gpu"], evaluate(workload, best).tokens_per_s_per_gpu if best else None
        same = figure is now if figure is None or now is None else math.isclose(figure, now, rel_tol=1e-9)
        return {**fields, "strategy": best} if same else None
    except (OSError, ValueError, TypeError, LookupError, ArithmeticError):
        return None


@cache  # one note, however many optima
def note_unkept(folder: Path, reason: str) -> None:
    """Says that optima cannot be kept there."""
    _log.warning(
        "note: optima cannot be kept in %s (%s), so each is searched again; set %s to a folder that you may write to",
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
