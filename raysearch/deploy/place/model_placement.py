"""Placements: which GPUs form groups, and which models each group serves."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from raysearch.deploy.place.service import GroupShape, Objective, Service
from sim.replay.arrivals import Stream
from sim.replay.goodput import step_factor
from sim.replay.replica import Deployed
from sim.replay.requests import Requests


@dataclass(frozen=True, slots=True, order=True)
class Placed:
    """A group and its models, by their numbers, ascending."""

    shape: GroupShape
    models: tuple[int, ...]


ModelPlacement = tuple[Placed, ...]
"""Groups in ascending order, so that equal placements are equal."""


@dataclass(frozen=True, slots=True, eq=False)
class Tenant:
    """A model with its requests.

    Attributes:
        name: As people call it.
        stream: Its arrivals.
        objective: What they ask for.
        recorded: A trace in place of requests that come at random, all equally long; it has their mean rate.
    """

    name: str
    stream: Stream
    objective: Objective
    recorded: Requests | None = None


@dataclass(frozen=True, slots=True, eq=False)
class Cluster:
    """GPUs, and the models that they are to serve.

    Attributes:
        gpus: At hand.
        tenants: The models.
        services: By (model, shape): those shapes alone on which the model has room.
    """

    gpus: int
    tenants: tuple[Tenant, ...]
    services: Mapping[tuple[int, GroupShape], Service]

    @property
    def shapes(self) -> tuple[GroupShape, ...]:
        """Groups that hold some model, the smallest first."""
        return tuple(sorted({shape for _, shape in self.services}, key=lambda each: (each.gpus, each)))

    @property
    def at_random(self) -> bool:
        """Whether requests of some model come at random."""
        return any(each.recorded is None for each in self.tenants)

    def has_room(self, shape: GroupShape, models: Sequence[int]) -> bool:
        """Whether models fit on one group, each with a request of its own in flight."""
        services = [self.services.get((model, shape)) for model in models]
        placed = [each for each in services if each is not None]
        return len(placed) == len(services) and all(
            self._share_bytes(placed, each) >= each.request_bytes for each in placed
        )

    @staticmethod
    def _share_bytes(services: Sequence[Service], of: Service) -> float:
        """Room for the KV cache of one of some models on a group: each engine has as much of what is left."""
        return (of.allowed_bytes - sum(each.fixed_bytes for each in services)) / len(services)

    def groups(self, placement: ModelPlacement) -> list[dict[int, Deployed]]:
        """The groups of a placement, as they are replayed: by the model's number, how it runs."""
        found: list[dict[int, Deployed]] = []
        for placed in placement:
            services = {model: self.services[model, placed.shape] for model in placed.models}
            everyone = list(services.values())
            found.append(
                {
                    model: each.sharing(self._share_bytes(everyone, each), self.tenants[model].objective)
                    for model, each in services.items()
                }
            )
        return found

    def work_s(self, model: int) -> float:
        """What a request of a model takes on a GPU at best: the router's weight."""
        return min(each.work_s * shape.gpus for (of, shape), each in self.services.items() if of == model)

    def at(self, rate: float = 1.0, cv: float | None = None) -> Cluster:
        """The same under so many times the load, or with all arrivals as bursty as given."""
        tenants = tuple(
            replace(each, stream=Stream(rate * each.stream.requests_per_s, each.stream.cv if cv is None else cv))
            for each in self.tenants
        )
        return replace(self, tenants=tenants)

    def with_steps_at(self, probabilities: Sequence[float]) -> list[Cluster]:
        """The same with steps as long as they are at most with each probability, given the step model's error."""
        priced = {each: each.evaluation for each in self.services.values()}  # models alike share theirs
        slower = [
            {each: each.slower(step_factor(found, sure)) for each, found in priced.items()} for sure in probabilities
        ]
        return [replace(self, services={on: of[each] for on, each in self.services.items()}) for of in slower]

    def slower(self, factor: float) -> Cluster:
        """The same where every step takes so many times as long as the step model says."""
        return replace(self, services={on: service.slower(factor) for on, service in self.services.items()})


def partitions(gpus: int, shapes: Sequence[GroupShape]) -> Iterator[tuple[GroupShape, ...]]:
    """All ways to cut GPUs into groups of the shapes; GPUs stay idle only where no shape fits what is left.

    >>> [[each.gpus for each in way] for way in partitions(3, (GroupShape(1, 1), GroupShape(2, 1)))]
    [[1, 1, 1], [1, 2]]
    """
    least = min((shape.gpus for shape in shapes), default=gpus + 1)

    def cut(left: int, start: int) -> Iterator[tuple[GroupShape, ...]]:
        if left < least:
            yield ()
            return
        for at in range(start, len(shapes)):
            if shapes[at].gpus <= left:
                for rest in cut(left - shapes[at].gpus, at):
                    yield (shapes[at], *rest)

    return cut(gpus, 0)


def model_sets(cluster: Cluster, shape: GroupShape, most: int) -> list[tuple[int, ...]]:
    """Sets of at most so many models that a group of the shape has room for, the empty one too."""
    models = range(len(cluster.tenants))
    sizes = range(min(most, len(cluster.tenants)) + 1)
    return [each for size in sizes for each in itertools.combinations(models, size) if cluster.has_room(shape, each)]


def all_placements(cluster: Cluster, shapes: Sequence[GroupShape], most: int) -> Iterator[ModelPlacement]:
    """Every placement on groups of the shapes, each group with at most so many models."""
    sets = {shape: model_sets(cluster, shape, most) for shape in shapes}

    def filled(way: Sequence[GroupShape], first: int) -> Iterator[tuple[Placed, ...]]:
        """Fills groups from left to right; one like its left neighbour takes no earlier set, so none comes twice."""
        if not way:
            yield ()
            return
        of_shape = sets[way[0]]
        for at in range(first, len(of_shape)):
            alike = len(way) > 1 and way[1] == way[0]
            for rest in filled(way[1:], at if alike else 0):
                yield (Placed(way[0], of_shape[at]), *rest)

    for way in partitions(cluster.gpus, shapes):
        for placement in filled(way, 0):
            yield tuple(sorted(placement))
