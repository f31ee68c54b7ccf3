"""The best goodput of a space by branch and bound: deployments in the order of their steady states, until none can win.

The exact search gives the strategy of a space with the best steady state. What is left of the space is cut into spaces
without it, one per coordinate: of those before it the strategy's own values, of this one all others. Each is solved
exactly in turn, so that strategies come best bound first without being listed. In one pool every number of replicas has
the strategy's own steady state as its bound, in two pools what the slower pool lets through; strategies still to come
are bounded by pools that match each other to the GPU. Each size of chunk has its own order. Once no steady state left
is above the best goodput so far, that is the optimum; before, the two are certified to be no further apart.

Source: Lawler, "A Procedure for Computing the K Best Solutions", Management Science 18, 1972: the partition.
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from sim.canonical import dims_matter
from sim.evaluation import Evaluation
from sim.optimum.exact_search import Known, find_best
from sim.optimum.spaces import Space
from sim.pools.traffic import requests_per_s
from sim.replay.goodput import Goodput, goodput, served_plan
from sim.replay.replica_sets import ServingSpace, equal_requests, in_chunks, of_pool, prefill_replicas
from sim.serving.phases import DECODE, PREFILL, phase_of
from sim.strategy import ENGINES_VOCABULARY, VOCABULARY_OPS, ReplicaSet, Strategy


@dataclass(frozen=True, slots=True)
class BestGoodput:
    """What is known of a space.

    Attributes:
        best: The best that was replayed; None where none was feasible.
        bound: Tokens/s/GPU that no strategy of the space exceeds.
        replayed: Deployments whose goodput was worked out.
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
        replays: Deployments to work out at most; None: until the optimum is proven.
        progress: Called after each with what is known by then.
    """
    turn = itertools.count()
    left: list[tuple[float, int, Strategy | _Ranked]] = []

    def add(bound: float, item: Strategy | _Ranked) -> None:
        if bound > found.tokens_per_s_per_gpu:
            heapq.heappush(left, (-bound, next(turn), item))

    found = BestGoodput(None, 0.0, 0)
    for ranked in _orders(space):
        add(ranked.bound(), ranked)
    while left and -left[0][0] > found.tokens_per_s_per_gpu and found.replayed != replays:
        _, _, item = heapq.heappop(left)
        if isinstance(item, _Ranked):
            for strategy in item.deployments():
                plan = served_plan(space.workload, strategy)
                add(0.0 if plan.violations else plan.bound, strategy)
            add((after := item.after()).bound(), after)
            continue
        each = goodput(space.workload, item)
        better = not each.violations and each.evaluation.tokens_per_s_per_gpu > found.tokens_per_s_per_gpu
        found = BestGoodput(each if better else found.best, 0.0, found.replayed + 1)
        found = replace(found, bound=_bound(found, left))
        progress(found)
    return replace(found, bound=_bound(found, left))


def goodput_bound(space: Space) -> float:
    """Tokens/s/GPU that no deployment of a space in phase traffic exceeds: its best steady state; 0 where none runs."""
    return max((ranked.bound() for ranked in _orders(space)), default=0.0)


def _bound(found: BestGoodput, left: Sequence[tuple[float, int, object]]) -> float:
    return max(found.tokens_per_s_per_gpu, -left[0][0] if left else 0.0)


class _InOrder:
    """The feasible strategies of a space, best steady state first, each worked out when it is asked for."""

    def __init__(self, space: Space) -> None:
        self._found: list[Evaluation] = []
        self._rest = _descending(space)

    def at(self, place: int) -> Evaluation | None:
        """The one at a place; None behind the last."""
        while len(self._found) <= place:
            following = next(self._rest, None)
            if following is None:
                return None
            self._found.append(following)
        return self._found[place]


def _descending(space: Space) -> Iterator[Evaluation]:
    known: Known = {}
    turn = itertools.count()
    left: list[tuple[float, int, Space, Evaluation]] = []

    def add(part: Space) -> None:
        if best := find_best(part, known=known).evaluation:
            heapq.heappush(left, (-best.tokens_per_s_per_gpu, next(turn), part, best))

    add(space)
    while left:
        _, _, part, best = heapq.heappop(left)
        yield best
        for rest in _without(part, best.strategy):
            add(rest)


@dataclass(frozen=True, slots=True)
class _Ranked:
    """A strategy of an order and all behind it, with the ways in which replicas may serve.

    Attributes:
        order: Of replicas that do both, or of decode replicas.
        place: In it.
        sets: Ways to serve.
        prefill_per_s: Requests per second of a GPU of the prefill pool; None where there is none.
    """

    order: _InOrder
    place: int
    sets: tuple[ReplicaSet, ...]
    prefill_per_s: float | None = None

    def bound(self) -> float:
        """Tokens/s/GPU that no deployment of the strategies from here on exceeds; 0 where there is none."""
        if (best := self.order.at(self.place)) is None:
            return 0.0
        if self.prefill_per_s is None:
            return best.tokens_per_s_per_gpu
        return 1 / (1 / best.tokens_per_s_per_gpu + 1 / self.prefill_per_s)

    def deployments(self) -> Iterator[Strategy]:
        """Of the first strategy, the largest first."""
        best = self.order.at(self.place)
        assert best is not None
        return (replace(best.strategy, served=each) for each in self.sets)

    def after(self) -> _Ranked:
        """All behind it."""
        return replace(self, place=self.place + 1)


def _orders(space: Space) -> Iterator[_Ranked]:
    """One per size of chunk, and one per prefill replica."""
    workload = space.workload
    tables, choices = workload.serving, ServingSpace(workload)
    replicas = tuple(sorted(tables.replicas, reverse=True))
    if 0 in choices.prefills:
        for chunk in tables.chunk_tokens:
            sets = tuple(ReplicaSet(count, chunk) for count in replicas)
            yield _Ranked(_InOrder(replace(space, workload=in_chunks(workload, chunk))), 0, sets)
    prefills = [count for count in choices.prefills if count]
    if not prefills:
        return
    order = _InOrder(replace(space, workload=of_pool(workload, DECODE.name)))
    pool = of_pool(workload, PREFILL.name)
    counted = phase_of(workload).counted_tokens(workload.prompt_tokens, workload.output_tokens)
    for each in prefill_replicas(workload):
        pairs = itertools.product(replicas, prefills)
        sets = tuple(ReplicaSet(count, 0, ahead, each.strategy) for count, ahead in pairs)
        rate = requests_per_s(equal_requests(workload), pool, each.tokens_per_s_per_gpu)
        yield _Ranked(order, 0, sets, rate * counted)


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
    vocabulary = dict(zip(VOCABULARY_OPS, strategy.vocabulary or ENGINES_VOCABULARY, strict=True))
    own = dict(zip(space.choices, strategy.dims, strict=True))
    for field, chosen in (("choices", own), ("vocabulary", vocabulary)):
        tables: Mapping[str, tuple[int, ...]] = getattr(space, field)
        for name, table in tables.items():
            tables = {**tables, name: (chosen[name],)}
            if others := tuple(each for each in table if each != chosen[name]):
                yield replace(space, **{field: {**tables, name: others}})
        space = replace(space, **{field: tables})
