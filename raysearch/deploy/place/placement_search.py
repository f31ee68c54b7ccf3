"""The placement that keeps most requests in time: the best of all where they are few, else AlpaServe's search and more.

Where they are few, those come first that may have most requests in time by their groups' steady states, and the search
ends where no other may be among the best (`Trials.bound`).

Where not all placements can be tried: groups of one shape, then of the best shapes together (all ways to cut the GPUs,
where those are few); on each, models are placed greedily, the one with most late requests on the group that works
least, as long as there is room, and the best placement on the way counts (AlpaServe, algorithms 1, its fast variant,
and 2). Then single changes to the best of them, until none helps: a model more, less or elsewhere on one group. That
is a heuristic: tests compare it with all placements of small cases.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from raysearch.deploy.place.attainment import Trial, Trials
from raysearch.deploy.place.fleet_traffic import FleetRequests
from raysearch.deploy.place.model_placement import Cluster, ModelPlacement, Placed, all_placements, partitions
from raysearch.deploy.place.service import GroupShape

MOST_PLACEMENTS = 400
"""Placements up to which all are tried. [assumed] Some seconds' work, as are the numbers below."""
_MOST_PARTITIONS = 12
"""Partitions up to which each is filled."""
_MIXED = 3
"""Shapes of the best partitions of one shape, which are then mixed two by two."""
_MENDED = 2
"""Placements that are changed bit by bit."""
_MOST_CHANGES = 80
"""Placements that such changes may try."""
_FINALISTS = 6
"""Placements that are compared once more, on arrivals that the search has not seen."""

_Score = tuple[float, float]
"""Share of the requests in time; minus the mean time to the first token."""
PlacementProgress = Callable[[str, int, int], None]
"""Called with what is done, and how far: (what, done, total)."""


@dataclass(frozen=True, slots=True)
class Allowed:
    """Which placements are searched.

    Attributes:
        name: As people call them.
        shapes: Of groups.
        most_models: Of a group.
    """

    name: str
    shapes: tuple[GroupShape, ...]
    most_models: int

    def has(self, placement: ModelPlacement) -> bool:
        """Whether it is one of them."""
        return all(each.shape in self.shapes and len(each.models) <= self.most_models for each in placement)


def shared(cluster: Cluster) -> Allowed:
    """Every placement: groups of any shape, shared by as many models as have room."""
    return Allowed("shared", cluster.shapes, len(cluster.tenants))


def dedicated(cluster: Cluster) -> Allowed:
    """Groups of one model each, sharded or not."""
    return Allowed("dedicated", cluster.shapes, 1)


def replicated(cluster: Cluster) -> Allowed:
    """Groups shared by any models, but none sharded over more GPUs than one of its models needs.

    Source: AlpaServe's baseline "selective replication".
    """
    least: dict[int, int] = {}
    for model, shape in cluster.services:
        least[model] = min(least.get(model, shape.gpus), shape.gpus)
    shapes = tuple(shape for shape in cluster.shapes if shape.gpus in least.values())
    return Allowed("replicated", shapes, len(cluster.tenants))


@dataclass(frozen=True, slots=True)
class Found:
    """The best placement of those that were allowed.

    Attributes:
        placement: It.
        exact: Whether none has more requests of the search's arrivals in time.
        tried: How many were simulated, to the end or until they were too late to be among the best.
    """

    placement: ModelPlacement
    exact: bool
    tried: int


def best_placements(
    cluster: Cluster,
    traffic: Sequence[FleetRequests],
    final: Sequence[FleetRequests],
    allowed: Sequence[Allowed],
    most_tried: int = MOST_PLACEMENTS,
    progress: PlacementProgress = lambda _what, _done, _total: None,
) -> list[Found]:
    """Searches the placements that keep most requests in time; of equals those with the soonest first tokens.

    Args:
        cluster: GPUs and models.
        traffic: The arrivals to go by.
        final: Arrivals on which the best few are compared once more, or none: the best of many that were tried on the
            same arrivals is partly luck.
        allowed: Each is searched for itself, and takes in what was tried before and it allows too.
        most_tried: Placements up to which all are tried.
        progress: Called with what is being done.
    """
    search = _Search(cluster, traffic, final)
    return [search.best_of(each, most_tried, progress) for each in allowed]


class _Search:
    """Placements tried so far."""

    def __init__(self, cluster: Cluster, traffic: Sequence[FleetRequests], final: Sequence[FleetRequests]) -> None:
        self.cluster = cluster
        self._traffic, self._final_traffic = ([Trials(cluster, each) for each in some] for some in (traffic, final))
        self._scores: dict[ModelPlacement, tuple[float, float]] = {}
        self._below: dict[ModelPlacement, _Score] = {}  # scores that placements without one do not exceed
        self._finals: dict[ModelPlacement, tuple[float, float]] = {}

    def best_of(self, allowed: Allowed, most_tried: int, progress: PlacementProgress) -> Found:
        every = list(
            itertools.islice(all_placements(self.cluster, allowed.shapes, allowed.most_models), most_tried + 1)
        )
        exact, before = len(every) <= most_tried, len(self._scores) + len(self._below)
        if exact:
            self._try(allowed, every, progress)
        else:
            self.fill(allowed, progress)
            for placement in self._ranked(allowed)[:_MENDED]:
                self.mend(allowed, placement, progress)
        return Found(self._final(self._ranked(allowed)), exact, len(self._scores) + len(self._below) - before)

    def _ranked(self, allowed: Allowed) -> list[ModelPlacement]:
        """The best that are allowed, the best first: no other is as good as the last of the finalists."""
        last = self._least_finalist(allowed)  # that others may only raise
        for placement in [each for each, below in self._below.items() if below > last and allowed.has(each)]:
            self.score(placement)
        inside = [placement for placement in self._scores if allowed.has(placement)]
        return sorted(inside, key=lambda each: self._scores[each], reverse=True)

    def _least_finalist(self, allowed: Allowed) -> _Score:
        """The last that would be compared once more; the worst there is as long as there are fewer."""
        scores = sorted((score for each, score in self._scores.items() if allowed.has(each)), reverse=True)
        return scores[_FINALISTS - 1] if len(scores) >= _FINALISTS else (0.0, -math.inf)

    def _try(self, allowed: Allowed, every: Sequence[ModelPlacement], progress: PlacementProgress) -> None:
        """Scores all that may be finalists; of those that leave other GPUs idle, but serve alike, one."""
        distinct: dict[ModelPlacement, ModelPlacement] = {}
        for each in every:
            distinct.setdefault(tuple(placed for placed in each if placed.models), each)
        bounds = {each: self._bound(each) for each in distinct.values()}
        ordered = sorted(bounds, key=lambda each: bounds[each], reverse=True)
        for done, placement in enumerate(ordered):
            least = self._least_finalist(allowed)
            if bounds[placement] < least:
                break
            if placement not in self._scores and self._below.get(placement, bounds[placement]) >= least:
                self._scored(placement, least)
            progress(allowed.name, done + 1, len(ordered))

    def _final(self, ranked: Sequence[ModelPlacement]) -> ModelPlacement:
        if not self._final_traffic:
            return ranked[0]
        for placement in ranked[:_FINALISTS]:
            if placement not in self._finals:
                self._finals[placement] = _score([_whole(each, placement) for each in self._final_traffic])
        return max(ranked[:_FINALISTS], key=lambda each: self._finals[each])

    def _bound(self, placement: ModelPlacement) -> _Score:
        """What its score does not exceed."""
        shares, firsts = np.transpose([each.bound(placement) for each in self._traffic])
        return float(np.mean(shares)), float(firsts.max())

    def score(self, placement: ModelPlacement) -> _Score:
        """Of a placement, whatever it is."""
        if placement not in self._scores:
            self._scored(placement, (0.0, -math.inf))
        return self._scores[placement]

    def _beats(self, changed: ModelPlacement, placement: ModelPlacement, allowed: Allowed) -> bool:
        """Whether a placement is better than a scored one; given up once it can neither be that nor a finalist."""
        scored = self._scored(changed, min(self._scores[placement], self._least_finalist(allowed)))
        return scored and self._scores[changed] > self._scores[placement]

    def _scored(self, placement: ModelPlacement, least: _Score) -> bool:
        """Scores a placement, unless its share in time is below that of a score."""
        late_shares = len(self._traffic) * (1 - least[0])
        trials: list[Trial] = []
        for each in self._traffic:
            trial = each.of(placement, math.floor(late_shares * each.requests * (1 + 1e-9)))
            if trial is None:
                self._below[placement] = least[0], -math.inf
                return False
            late_shares -= 1 - trial.attained
            trials.append(trial)
        self._scores[placement] = _score(trials)
        self._below.pop(placement, None)
        return True

    def fill(self, allowed: Allowed, progress: PlacementProgress) -> None:
        """Fills partitions greedily: all of them, or those of one shape and of the best shapes two by two."""
        gpus, shapes = self.cluster.gpus, allowed.shapes
        ways = list(itertools.islice(partitions(gpus, shapes), _MOST_PARTITIONS + 1))
        if len(ways) <= _MOST_PARTITIONS:
            self._fill(allowed, ways, progress)
            return
        single = [way for shape in shapes for way in partitions(gpus, (shape,)) if way]
        scores = self._fill(allowed, single, progress)
        ranked = sorted(range(len(single)), key=lambda at: scores[at], reverse=True)
        good = sorted({single[at][0] for at in ranked[:_MIXED]}, key=lambda each: (each.gpus, each))
        mixed = [way for pair in itertools.combinations(good, 2) for way in partitions(gpus, pair)]
        self._fill(allowed, [way for way in mixed if len(set(way)) == 2][:_MOST_PARTITIONS], progress)

    def _fill(
        self, allowed: Allowed, ways: Sequence[tuple[GroupShape, ...]], progress: PlacementProgress
    ) -> list[tuple[float, float]]:
        scores: list[tuple[float, float]] = []
        for done, way in enumerate(ways):
            scores.append(self._greedy(allowed, way))
            progress(allowed.name, done + 1, len(ways))
        return scores

    def _greedy(self, allowed: Allowed, way: tuple[GroupShape, ...]) -> tuple[float, float]:
        """Places one model after the other, going by the first arrivals alone; the best of the way is scored."""
        placement: ModelPlacement | None = tuple(Placed(shape, ()) for shape in sorted(way))
        best, best_score = placement, (-1.0, 0.0)
        while placement is not None:
            trial = _whole(self._traffic[0], placement)
            if _score([trial]) > best_score:
                best, best_score = placement, _score([trial])
            placement = self._one_more(allowed, placement, trial)
        return self.score(best)

    def _one_more(self, allowed: Allowed, placement: ModelPlacement, trial: Trial) -> ModelPlacement | None:
        """The model with most late requests on the group that works least, of those that can be."""
        for model in np.argsort(-trial.late, kind="stable").tolist():
            if not trial.late[model]:
                return None
            for at in sorted(range(len(placement)), key=lambda at: (trial.busy[at], len(placement[at].models))):
                if (models := self._with(allowed, placement[at], model)) is not None:
                    return _changed(placement, {at: models})
        return None

    def _with(self, allowed: Allowed, placed: Placed, model: int) -> tuple[int, ...] | None:
        """The models of a group with one more, if it has room."""
        models = tuple(sorted((*placed.models, model)))
        fits = model not in placed.models and len(models) <= allowed.most_models
        return models if fits and self.cluster.has_room(placed.shape, models) else None

    def mend(self, allowed: Allowed, placement: ModelPlacement, progress: PlacementProgress) -> None:
        """Changes one thing after the other, as long as one helps."""
        left, better = _MOST_CHANGES, True
        while better:
            better = False
            for changed in self._changes(allowed, placement):
                if changed in self._scores or changed in self._below:
                    continue
                if left == 0:
                    return
                left -= 1
                progress(f"{allowed.name}, changed", _MOST_CHANGES - left, _MOST_CHANGES)
                if self._beats(changed, placement, allowed):
                    placement, better = changed, True
                    break

    def _changes(self, allowed: Allowed, placement: ModelPlacement) -> Iterator[ModelPlacement]:
        """A model more, one less, one for another, or one from a group to another; groups alike count once."""
        distinct = [at for at, placed in enumerate(placement) if placed not in placement[:at]]
        models = range(len(self.cluster.tenants))
        for at in distinct:
            for model in models:
                if (more := self._with(allowed, placement[at], model)) is not None:
                    yield _changed(placement, {at: more})
        for at in distinct:
            for model in placement[at].models:
                less = tuple(each for each in placement[at].models if each != model)
                yield _changed(placement, {at: less})
                for other in distinct:
                    if other != at and (more := self._with(allowed, placement[other], model)) is not None:
                        yield _changed(placement, {at: less, other: more})
                for new in models:
                    swapped = self._with(allowed, Placed(placement[at].shape, less), new)
                    if swapped is not None and new != model:
                        yield _changed(placement, {at: swapped})


def _whole(trials: Trials, placement: ModelPlacement) -> Trial:
    trial = trials.of(placement)
    assert trial is not None
    return trial


def _score(trials: Sequence[Trial]) -> _Score:
    served = [trial for trial in trials if not math.isnan(trial.ttft_s[0])]
    ttft_s = float(np.mean([trial.ttft_s[0] for trial in served])) if served else math.inf
    return float(np.mean([trial.attained for trial in trials])), -ttft_s


def _changed(placement: ModelPlacement, models: dict[int, tuple[int, ...]]) -> ModelPlacement:
    return tuple(sorted(Placed(each.shape, models.get(at, each.models)) for at, each in enumerate(placement)))
