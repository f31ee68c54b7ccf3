"""Named strategy spaces of a workload, and the exact best of each, cached on disk beside the optima.

>>> list(COMPARED)
['megatron', 'megatron-sp', 'paper', 'joint', '+context', '+degrees', '+tokens', '+gathered', 'extended']
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from functools import partial

from raysearch.optima.certificate_files import CountProgress
from raysearch.optima.optimum_cache import (
    KeptBest,
    cache_dir,
    keep_optimum,
    read_kept,
    simulator_digest,
)
from sim.engines.engine_registry import SHIPPED, engine_rules
from sim.optimum.spaces import (
    EXTENSIONS,
    Space,
    engine_space,
    extended_space,
    generated_space,
    heuristic_space,
    joint_space,
    paper_space,
    two_dimensional_space,
)
from sim.strategy import FIRST_DECLARED, GRID, Strategy
from sim.workload import TWO_DIMENSIONAL, ServingTables, Workload


def _widened(extension: str, workload: Workload) -> Space:
    return extended_space(workload, [extension])


SPACES: Mapping[str, Callable[[Workload], Space]] = {
    "megatron": partial(heuristic_space, sequence_parallel=False),
    "megatron-sp": partial(heuristic_space, sequence_parallel=True),
    "paper": paper_space,
    "joint": joint_space,
    **{f"+{extension}": partial(_widened, extension) for extension in EXTENSIONS},
    "extended": extended_space,
    "generated": generated_space,
    TWO_DIMENSIONAL: two_dimensional_space,
}
"""Heuristics at all degrees, the paper's space, the joint one, that with each extension alone, with all of them, and
with choices of embedding and LM head besides; and the joint one with ops that shard two dims."""
COMPARED = tuple(name for name in SPACES if name not in ("generated", TWO_DIMENSIONAL))
"""Those that are compared by default."""


@dataclass(frozen=True)
class SpaceBest:
    """The best strategy of a space.

    Attributes:
        tokens_per_s_per_gpu: Its throughput, or None if nothing is feasible.
        space_size: Strategies in the space.
        opened: Of the tuples of degrees and batch, how many were added up; bounds ruled out the others.
        tuples: How many there are.
        wall_s: How long it took when it was found.
    """

    tokens_per_s_per_gpu: float | None
    strategy: Strategy | None
    space_size: int
    opened: int
    tuples: int
    wall_s: float


class _KeptSpaceBest(KeptBest):
    opened: int
    tuples: int


def named_space(workload: Workload, name: str) -> Space:
    """A space of `SPACES`, or what an engine of that name can run.

    Raises:
        UnknownEngine: It is neither.
    """
    return SPACES[name](workload) if name in SPACES else engine_space(workload, engine_rules(name))


def best_of_space(
    workload: Workload, name: str, progress: CountProgress | None = None, *, fresh: bool = False
) -> SpaceBest:
    """The exact best of a space, see `named_space`: from the disk cache, or found now and kept there.

    With declared choices, or an engine that is not shipped, it is computed again: no file's name tells functions apart.
    """
    space = named_space(workload, name)
    foreign = space.engine is not None and space.engine.name not in SHIPPED
    if foreign or any(FIRST_DECLARED <= choice < min(GRID) for table in space.choices.values() for choice in table):
        return _search(space, progress)
    path = cache_dir() / f"{workload.config_hash}-{name.lstrip('+')}-{simulator_digest()}.json"
    if fields := None if fresh else read_kept(path, _KeptSpaceBest, workload):
        return SpaceBest(**fields)
    found = _search(space, progress)
    keep_optimum(path, asdict(found), found.strategy)
    return found


def optimum_value(workload: Workload, progress: CountProgress | None = None) -> float | None:
    """f* of the space that the workload's searches have, in tokens/s/GPU; None if nothing is feasible.

    In phase traffic it is the bound, the best steady state.
    """
    if workload.serving != ServingTables():
        from sim.optimum.spaces import space_of
        from sim.replay.goodput_search import goodput_bound

        return goodput_bound(space_of(workload)) or None
    return best_of_space(workload, workload.space, progress).tokens_per_s_per_gpu


def _search(space: Space, progress: CountProgress | None) -> SpaceBest:
    from sim.optimum.exact_search import find_best

    started = time.perf_counter()
    found = find_best(space, progress)
    best = found.evaluation
    return SpaceBest(
        tokens_per_s_per_gpu=best.tokens_per_s_per_gpu if best else None,
        strategy=best.strategy if best else None,
        space_size=found.space_size,
        opened=found.opened,
        tuples=found.tuples,
        wall_s=time.perf_counter() - started,
    )
