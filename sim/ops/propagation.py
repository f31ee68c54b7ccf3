"""A strategy that is partly given, completed as a compiler does: shardings spread from op to op along the tensors.

An op that nobody decided about takes the sharding in which a tensor reaches it, or leaves the one that a reader wants,
so that nothing is moved. Ops without a weight come first, in both directions, until nothing changes; then those with
one. A tensor that lies whole, or as parts of a sum, says nothing. Where two neighbours want different things the
earlier one has its way, and the conflict is named. What nothing reaches is not sharded.

Source: GSPMD (Xu et al., 2021), section 3.5: propagation in priorities, forward and backward, until a fixed point.

>>> from sim.config.catalog import load_workload
>>> from sim.ops.heuristics import megatron_dims
>>> workload = load_workload("gpt_moe_1_2t_16k")
>>> found = propagated(workload, megatron_weights(workload))
>>> found.dims == megatron_dims(workload.model), found.origins[2]
(True, 'forward from qkv_proj')
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from sim.layers.choices import OpRule, rule
from sim.layers.ops import Layer
from sim.ops.dims import Dim, dims_of
from sim.ops.layers import layer_of
from sim.sharding.placement import Placement
from sim.strategy import NONE
from sim.workload import Workload

PartialDims = tuple[int | None, ...]
"""One choice per entry of `Strategy.dims`; None where it is to be found."""
GIVEN, UNREACHED = "given", "nothing reaches it"


@dataclass(frozen=True, slots=True)
class Propagated:
    """A completed strategy's dims.

    Attributes:
        dims: One choice per entry.
        origins: Where each comes from: `GIVEN`, "forward from OP", "backward from OP" or `UNREACHED`.
        conflicts: What neighbours wanted that did not get it, one text each.
    """

    dims: tuple[int, ...]
    origins: tuple[str, ...]
    conflicts: tuple[str, ...]


class _Edge(NamedTuple):
    """A tensor between the ops of two entries; the reader has it as its input of this number."""

    producer: int
    consumer: int
    slot: int
    layer: Layer


class _Wish(NamedTuple):
    """Choices of an op that leave a tensor where it lies, and who asks for them."""

    choices: tuple[int, ...]
    origin: str


def megatron_weights(workload: Workload) -> PartialDims:
    """Megatron-LM's choices for the GEMMs alone: into and out of attention and of the feed-forward network."""
    return tuple(dim.op.megatron.plain if dim.op.kind == "einsum" else None for dim in dims_of(workload))


def propagated(workload: Workload, given: PartialDims, allowed: Sequence[tuple[int, ...]] | None = None) -> Propagated:
    """The dims that shardings spread to from those given.

    Args:
        workload: Whose layers these are.
        given: What is decided.
        allowed: Choices that each other entry may have; those that every space has by default.
    """
    entries = dims_of(workload)
    edges = list(_edges(workload, entries))
    tables = allowed or [tuple(choice for choice in dim.choices if choice <= NONE) for dim in entries]
    dims, origins, conflicts = list(given), [GIVEN] * len(given), list[str]()

    def spread(places: Sequence[int], *, backward: bool) -> bool:
        changed = False
        for place in reversed(places) if backward else places:
            if dims[place] is not None:
                continue
            before, after = (_wish(place, entries, edges, dims, tables, side) for side in ("forward", "backward"))
            wish = (after or before) if backward else (before or after)
            if wish is None:
                continue
            if before and after:
                both = tuple(choice for choice in before.choices if choice in after.choices)
                if not both:
                    name = entries[place].name
                    conflicts.append(f"{name}: {before.origin} and {after.origin} want different shardings")
                wish = before._replace(choices=both or before.choices)
            dims[place], origins[place], changed = wish.choices[0], wish.origin, True
        return changed

    light = [place for place, dim in enumerate(entries) if not dim.op.weighted]
    every = range(len(entries))
    while _spread_all(spread, light) or spread(every, backward=False) or spread(every, backward=True):
        pass
    for place in every:
        if dims[place] is None:
            dims[place], origins[place] = NONE, UNREACHED
    return Propagated(tuple(choice for choice in dims if choice is not None), tuple(origins), tuple(conflicts))


def _spread_all(spread: Callable[..., bool], places: Sequence[int]) -> bool:
    changed = False
    while spread(places, backward=False) or spread(places, backward=True):
        changed = True
    return changed


def _edges(workload: Workload, entries: Sequence[Dim]) -> Iterator[_Edge]:
    for index, group in enumerate(workload.model.groups):
        layer = layer_of(group)
        place = {dim.op.name: at for at, dim in enumerate(entries) if index in dim.groups}
        for tensor in layer.tensors:
            for name in tensor.consumers:
                at = layer.op(name).inputs.index(tensor.name)
                yield _Edge(place[tensor.producer], place[name], at, layer)


def _wish(
    place: int,
    entries: Sequence[Dim],
    edges: Sequence[_Edge],
    dims: Sequence[int | None],
    tables: Sequence[tuple[int, ...]],
    direction: str,
) -> _Wish | None:
    """What the first decided neighbour on one side asks for that the op can do; None where none asks for anything."""
    for edge in edges:
        mine, other = (edge.consumer, edge.producer) if direction == "forward" else (edge.producer, edge.consumer)
        choice = dims[other]
        if mine != place or choice is None or mine == other:
            continue
        lies = _end(edge, _rule_of(edge, entries, other, choice), reads=direction == "backward")
        if lies.holds != "shard":
            continue
        fits = tuple(
            own
            for own in tables[mine]
            if _end(edge, _rule_of(edge, entries, mine, own), reads=direction == "forward") == lies
        )
        if fits:
            return _Wish(fits, f"{direction} from {entries[other].name}")
    return None


def _rule_of(edge: _Edge, entries: Sequence[Dim], place: int, choice: int) -> OpRule:
    return rule(edge.layer.op(entries[place].op.name), edge.layer, choice)


def _end(edge: _Edge, op_rule: OpRule, *, reads: bool) -> Placement:
    """Where the tensor lies at one end of an edge: as its reader wants it, or as its producer leaves it."""
    return op_rule.inputs[edge.slot] if reads else op_rule.output
