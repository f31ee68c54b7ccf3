"""The best goodput of a space by branch and bound: strategies in the order of their steady states, until none can win.

The exact search gives the strategy of a space with the best steady state. It is replayed, and what is left of the space
is cut into spaces without it, one per coordinate: of those before it the strategy's own values, of this one all others.
Each is solved exactly in turn, so that strategies come best bound first without being listed. Once no space left has a
steady state above the best goodput so far, that is the optimum; before, the two are certified to be no further apart.

Source: Lawler, "A Procedure for Computing the K Best Solutions", Management Science 18, 1972: the partition.
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace

from sim.canonical import dims_matter
from sim.optimum.exact_search import Known, find_best
from sim.optimum.spaces import Space
from sim.replay.goodput import Goodput, goodput
from sim.strategy import ENGINES_VOCABULARY, VOCABULARY_OPS, Strategy


@dataclass(frozen=True, slots=True)
class BestGoodput:
    """What is known of a space.

    Attributes:
        best: The best that was replayed; None where none was feasible.
        bound: Tokens/s/GPU that no strategy of the space exceeds.
        replayed: Strategies whose goodput was worked out.
    """

    best: Goodput | None
    bound: float
    replayed: int

    @property
    def tokens_per_s_per_gpu(self) -> float:
        """Of the best; 0 where none was feasible."""
        return self.best.evaluation.tokens_per_s_per_gpu if self.best else 0.0

    @property
    def gap(self) -> float:
        """By which share of the bound the optimum may be better, at most; 0 where it is proven."""
        return 1 - self.tokens_per_s_per_gpu / self.bound if self.bound else 0.0

    @property
    def proven(self) -> bool:
        """Whether no strategy of the space is better, or any feasible."""
        return self.tokens_per_s_per_gpu >= self.bound


def best_goodput(
    space: Space, replays: int | None = None, progress: Callable[[BestGoodput], None] = lambda _: None
) -> BestGoodput:
    """Searches a space; see the module.

    Args:
        space: Of a workload in phase traffic.
        replays: Strategies to work out at most; None: until the optimum is proven.
        progress: Called after each with what is known by then.
    """
    known: Known = {}
    turn = itertools.count()
    left: list[tuple[float, int, Space, Strategy]] = []

    def add(part: Space) -> None:
        steady = find_best(part, known=known).evaluation
        if steady and steady.tokens_per_s_per_gpu > found.tokens_per_s_per_gpu:
            heapq.heappush(left, (-steady.tokens_per_s_per_gpu, next(turn), part, steady.strategy))

    found = BestGoodput(None, 0.0, 0)
    add(space)
    while left and -left[0][0] > found.tokens_per_s_per_gpu and found.replayed != replays:
        _, _, part, strategy = heapq.heappop(left)
        each = goodput(space.workload, strategy)
        better = not each.violations and each.evaluation.tokens_per_s_per_gpu > found.tokens_per_s_per_gpu
        found = BestGoodput(each if better else found.best, 0.0, found.replayed + 1)
        for rest in _without(part, strategy):
            add(rest)
        found = replace(found, bound=_bound(found, left))
        progress(found)
    return replace(found, bound=_bound(found, left))


def _bound(found: BestGoodput, left: list[tuple[float, int, Space, Strategy]]) -> float:
    return max(found.tokens_per_s_per_gpu, -left[0][0] if left else 0.0)


def _without(space: Space, strategy: Strategy) -> Iterator[Space]:
    """Spaces that have every other strategy of a space, each one once; those that do the same are left out."""
    degrees = {
        "tp": strategy.tp,
        "ep": strategy.ep,
        "pp": strategy.pp,
        "batch": strategy.batch,
        "cp": strategy.cp,
        "dp": strategy.attention_dp,
    }
    for name, value in degrees.items():
        table: tuple[int, ...] = getattr(space, name)
        if not table:  # dp is ep
            continue
        if others := tuple(each for each in table if each != value):
            yield replace(space, **{name: others})
        space = replace(space, **{name: (value,)})
    if not dims_matter(strategy):
        return
    ends = dict(zip(VOCABULARY_OPS, strategy.vocabulary or ENGINES_VOCABULARY, strict=True))
    own = dict(zip(space.choices, strategy.dims, strict=True))
    for field, chosen in (("choices", own), ("vocabulary", ends)):
        tables: Mapping[str, tuple[int, ...]] = getattr(space, field)
        for name, table in tables.items():
            tables = {**tables, name: (chosen[name],)}
            if others := tuple(each for each in table if each != chosen[name]):
                yield replace(space, **{field: {**tables, name: others}})
        space = replace(space, **{field: tables})
