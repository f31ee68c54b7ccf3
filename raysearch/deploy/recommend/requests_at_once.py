"""The fewest GPUs on which so many requests are in flight together."""

from __future__ import annotations

import itertools
import math
from bisect import bisect_left
from collections.abc import Iterator
from dataclasses import replace
from functools import partial

from raysearch.deploy.recommend.demand import Demand
from sim.evaluation import Evaluation
from sim.optimum.exact_search import Known, find_bests
from sim.optimum.spaces import Space, space_of


def fewest_gpus(demand: Demand, known: Known, most: float = math.inf) -> Evaluation | None:
    """The strategy that has a demand's requests at once on the fewest GPUs, exactly; of equal ones the fastest.

    Replicas share the requests evenly: on so many of them a pipeline of so many stages has one batch, and the exact
    search finds whether any strategy keeps the limits with it. What a batch breaks, larger ones break too, so that of
    each size of a replica the fewest are found by halving.

    Args:
        demand: What was asked.
        known: As of `sim.optimum.exact_search.find_best`.
        most: GPUs of all replicas, where it may not be all at hand.
    """
    space, replicas = space_of(demand.workload), dict[int, int]()
    fewest = math.floor(min(demand.gpus, most))
    for size in _sizes(space, min(demand.workload.max_gpus, demand.largest_replica)):
        enough = partial(_have_room, demand, space, known, size)
        if fewest >= size and enough(fewest // size):
            replicas[size] = 1 + bisect_left(range(1, fewest // size), True, key=enough)
            fewest = size * replicas[size]
    fastest: tuple[Evaluation, ...] = ()
    for size in (size for size, count in replicas.items() if size * count == fewest):
        for each in _spaces(demand, space, size, replicas[size]):
            reached = fastest[0].tokens_per_s_per_gpu if fastest else 0.0
            found = find_bests(each, 1, partial(_rate_of, size), known=known, reached=reached)
            fastest = max(fastest, found, key=lambda bests: bests[0].tokens_per_s_per_gpu if bests else 0.0)
    return fastest[0] if fastest else None


def _have_room(demand: Demand, space: Space, known: Known, size: int, replicas: int) -> bool:
    """Whether any strategy on so many GPUs keeps the limits in so many replicas."""
    spaces = _spaces(demand, space, size, replicas)
    return any(find_bests(each, 1, lambda _, gpus: float(gpus == size), known=known) for each in spaces)


def _rate_of(size: int, tokens_per_s_per_gpu: float, gpus: int) -> float:
    """What replicas of one size are worth; nothing of another."""
    return tokens_per_s_per_gpu if gpus == size else 0.0


def _sizes(space: Space, most: float) -> list[int]:
    """GPUs that a replica may have."""
    tables = space.tp, space.cp, space.dp or space.ep, space.pp
    return sorted({size for size in map(math.prod, itertools.product(*tables)) if size <= most})


def _spaces(demand: Demand, space: Space, size: int, replicas: int) -> Iterator[Space]:
    """What pipelines of each depth may be on so many GPUs, with the batch that they have in so many replicas."""
    for pp in space.pp:
        at = bisect_left(space.batch, math.ceil((demand.concurrency or 1) / (replicas * pp)))
        if size % pp == 0 and at < len(space.batch):
            tp, cp, dp = (
                tuple(each for each in table if size // pp % each == 0) for table in (space.tp, space.cp, space.dp)
            )
            yield replace(space, tp=tp, cp=cp, dp=dp, pp=(pp,), batch=(space.batch[at],))
