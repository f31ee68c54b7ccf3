"""Seconds of a collective: by fitted curves inside a node, by a latency model across nodes.

No public measurement of NCCL spans nodes, so there its published latency model stands, never below the fitted curve
of the same collective inside one node; without a calibration the model prices the inside too. It is a lower envelope
of lines: a library picks the fastest of its algorithms and protocols, each of which costs a fixed latency plus a time
per byte. Their minimum is positive, continuous, concave and monotone in the message size by construction, so a search
finds no hole in it.

Sources: NCCL's tuning model for latencies and steps of ring and tree; measured medians for
bandwidths (see the hardware file). Hierarchical: reduce-scatter inside the node, the collective
across nodes on 1/per_node of the data per NIC, all-gather inside the node. Nodes of one rack meet over the rack's
links in place of the network, where a machine has such. In a mesh without a switch, a group uses the links between
its members alone (`CollectiveModel.links_used`): its bytes take as long as those of a larger tensor over a switch.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from typing import Any, NamedTuple

import numpy as np

from sim.arrays import Floats, Lanes, by_distinct, in_lanes, larger, numbered
from sim.prices.calibration import DISPATCH_EACH
from sim.prices.curves import MEMOISED, DeepepMode
from sim.prices.hardware import CollectiveModel, Hardware, PointToPoint, Protocol
from sim.prices.mesh import MeshGroup
from sim.prices.priced import EXACT, UNSURE, Interval, PricedKernel, error_interval, mean_error, wider
from sim.prices.roofline import Kernel, kernel_time
from sim.prices.torus import best_torus_time_s
from sim.sharding.redistribute import sent_share


@dataclass(frozen=True, slots=True)
class Collective:
    """One communication of one GPU.

    Attributes:
        kind: "all_gather", "reduce_scatter", "all_reduce", "all_to_all" or "send_recv".
        axis: Mesh axis it runs over.
        degree: GPUs taking part.
        tensor: What is moved.
        bytes_per_device: Bytes each GPU sends.
        time_s: How long it takes, less what overlaps with other work.
        error: Mean relative error to expect of that.
        interval: Factors on `time_s` between which the true time lies in 90 % of cases.
        extrapolated: What about it no measurement covers, or "".
        algorithm: Which one, as far as known; see `PricedKernel`.
        parts: In how many parts it is sent, each beside the work on another one.
    """

    kind: str
    axis: str
    degree: int
    tensor: str
    bytes_per_device: float
    time_s: float
    error: float = 0.0
    interval: Interval = EXACT
    extrapolated: str = ""
    algorithm: str = ""
    parts: int = 1


class Line(NamedTuple):
    """One way to run a collective: `latency_s + message_bytes * seconds_per_byte`."""

    latency_s: float
    seconds_per_byte: float
    algorithm: str


Envelope = tuple[Line, ...]
NVLS = "nvls"
"""NVLink SHARP, as `Line.algorithm` calls it."""


def fastest_algorithm(model: CollectiveModel, kind: str, group: MeshGroup, tensor_bytes: float) -> tuple[float, str]:
    """Seconds of a collective over a tp group by the fastest algorithm, and its name; 0 where none is needed.

    Args:
        model: Of links and library.
        kind: "all_gather", "reduce_scatter", "all_reduce" or "all_to_all".
        group: The GPUs taking part.
        tensor_bytes: V, the bytes of the whole tensor in the group.
    """
    if model.torus and group.nodes == 1:
        return best_torus_time_s(model.torus, kind, group.degree, tensor_bytes), "rings of a torus"
    if isinstance(group.degree, Lanes):
        which, groups = numbered(*group)
        latency_s, seconds_per_byte, algorithm = _envelopes(model, kind, groups)
        of_lines_s = latency_s.take(which, axis=1) + tensor_bytes * seconds_per_byte.take(which, axis=1)
        return of_lines_s.min(axis=0).view(Lanes), algorithm
    lines = _envelope(model, kind, group)
    if isinstance(tensor_bytes, Lanes):
        return larger(*[-line.latency_s - tensor_bytes * line.seconds_per_byte for line in lines]) * -1, ""
    return min(
        [(line.latency_s + tensor_bytes * line.seconds_per_byte, line.algorithm) for line in lines], default=(0.0, "")
    )


def in_lanes_s(price_s: Callable[..., Any], members: MeshGroup, *sizes: Any) -> Any:
    """Seconds of what is sent in lanes, whose groups or sizes may differ.

    Args:
        price_s: Seconds, from a group and sizes.
        members: The groups.
        sizes: Each of them a number, or one per lane.
    """

    def of_columns(*columns: Any) -> Any:
        return price_s(MeshGroup(*columns[:3]), *columns[3:])

    return in_lanes(of_columns, *members, *sizes)


def collectives_price(
    hardware: Hardware, kind: str, groups: MeshGroup, tensor_bytes: Any, axis: str, activation_each: float
) -> PricedKernel:
    """`collective_price` in lanes: seconds alone."""

    def price_s(group: MeshGroup, size: Any) -> Any:
        return collective_price.__wrapped__(hardware, kind, group, size, axis, activation_each).time_s

    return PricedKernel(in_lanes_s(price_s, groups, tensor_bytes), *UNSURE)


def expert_all_to_alls(hardware: Hardware, side: str, groups: MeshGroup, *shape: Any) -> PricedKernel:
    """`expert_all_to_all` in lanes: seconds alone."""

    def price_s(group: MeshGroup, *sizes: Any) -> Any:
        return expert_all_to_all.__wrapped__(hardware, side, group, *sizes).time_s

    return PricedKernel(in_lanes_s(price_s, groups, *shape), *UNSURE)


IN_FP8 = DISPATCH_EACH / 2
"""Bytes of an activation in fp8 with its scales over those in 16 bits."""


@lru_cache(maxsize=MEMOISED)
def collective_price(
    hardware: Hardware, kind: str, group: MeshGroup, tensor_bytes: float, axis: str = "tp", activation_each: float = 0.0
) -> PricedKernel:
    """Exposed seconds of a collective over a group, by the curves where there are any.

    Args:
        hardware: Whose links and library.
        kind: "all_gather", "reduce_scatter", "all_reduce" or "all_to_all".
        group: The GPUs taking part.
        tensor_bytes: V, the bytes of the whole tensor in the group.
        axis: What warnings call it.
        activation_each: Bytes per element of an activation, which may travel in fp8; 0 for what must not.
    """
    plain = _uncompressed(hardware, kind, group, tensor_bytes, axis)
    if hardware.merge_collectives and kind == "all_reduce":
        return min(plain, _in_two_calls(hardware, group, tensor_bytes, axis))
    if not hardware.fp8_gather or kind != "all_gather" or activation_each != 2:
        return plain
    return min(plain, _gather_in_fp8(hardware, group, tensor_bytes, axis))  # by time


def _in_two_calls(hardware: Hardware, group: MeshGroup, tensor_bytes: float, axis: str) -> PricedKernel:
    """An all-reduce as a reduce-scatter, and a gather of what it leaves."""
    scatter, gather = (
        _uncompressed(hardware, kind, group, tensor_bytes, axis) for kind in ("reduce_scatter", "all_gather")
    )
    return scatter._replace(
        time_s=scatter.time_s + gather.time_s,
        error=max(scatter.error, gather.error),
        interval=wider(scatter.interval, gather.interval),
        extrapolated=scatter.extrapolated or gather.extrapolated,
        algorithm=f"reduce-scatter ({scatter.algorithm}) and all-gather",
    )


def _gather_in_fp8(hardware: Hardware, group: MeshGroup, tensor_bytes: float, axis: str) -> PricedKernel:
    """An all-gather in fp8, with a kernel before it that quantises a GPU's shard and one behind it that restores all.

    [assumed] neither is part of a neighbour's launch; the scales are one of 32 bits for each 128 elements, as DeepEP's.
    """
    sent = _uncompressed(hardware, "all_gather", group, tensor_bytes * IN_FP8, axis)
    both_s = 0.0
    for whole_bytes in (tensor_bytes / group.degree, tensor_bytes):
        converts = Kernel("elementwise", "bf16", "bf16", whole_bytes, whole_bytes * (1 + IN_FP8))
        of = kernel_time.__wrapped__ if isinstance(whole_bytes, Lanes) else kernel_time
        both_s += of(hardware, converts).total_s
    priced = hardware.errors.extrapolating(sent.time_s + both_s, "all-gathers in fp8")
    return priced._replace(algorithm=f"{sent.algorithm}, in fp8", sent=IN_FP8)


@lru_cache(maxsize=32)
def lossless(hardware: Hardware) -> Hardware:
    """The same hardware where nothing travels in fp8 that is not stored so; itself where that is so."""
    return replace(hardware, fp8_gather=False) if hardware.fp8_gather else hardware


def carried(
    kind: str, axis: str, degree: int, tensor: str, bytes_per_device: float, priced: PricedKernel
) -> Collective:
    """A priced collective; of the bytes it sends those that travel."""
    time_s, error, interval, extrapolated, algorithm, sent = priced
    return Collective(
        kind, axis, degree, tensor, bytes_per_device * sent, time_s, error, interval, extrapolated, algorithm
    )


def _uncompressed(hardware: Hardware, kind: str, group: MeshGroup, tensor_bytes: float, axis: str) -> PricedKernel:
    exposed, one_node = 1 - hardware.communication_overlap, bool(group.nodes == 1)
    time_s, algorithm = fastest_algorithm(hardware.collectives, kind, group, tensor_bytes)
    if hardware.collectives.torus and one_node:
        return at_link_peak(hardware, time_s * exposed)._replace(algorithm=algorithm)
    curves = hardware.curves
    inside = min(group.degree, hardware.node_gpus)
    as_switched = tensor_bytes / hardware.collectives.links_used(inside)
    fitted = curves.collective(kind, inside, as_switched) if curves else None
    modelled = kind == "all_reduce" and hardware.collectives.algorithm not in ("", "ring")
    if fitted is not None and one_node and not (modelled and (algorithm != NVLS or time_s > fitted.time_s)):
        return fitted._replace(time_s=fitted.time_s * exposed)
    where = f"{kind.replace('_', '-')} over {axis} across {_across(group)}" if not one_node else ""
    if modelled and not where:
        where = f"all-reduce by the latency model of {algorithm}"
    if fitted is None:
        return hardware.errors.by_medians(time_s * exposed, where)._replace(algorithm=algorithm)
    return hardware.errors.extrapolating(larger(time_s, fitted.time_s) * exposed, where)._replace(algorithm=algorithm)


def at_link_peak(hardware: Hardware, time_s: float) -> PricedKernel:
    """Seconds of a collective on a torus, of which none was measured: as sure as a kernel of another machine."""
    interval = (
        hardware.curves.carried_over.interval if hardware.curves else error_interval(hardware.errors.uncalibrated)
    )
    return PricedKernel(time_s, mean_error(interval), interval, "collectives at the peak of a torus' links")


@lru_cache(maxsize=MEMOISED)
def expert_all_to_all(
    hardware: Hardware,
    side: str,
    group: MeshGroup,
    tokens: float,
    columns: float,
    each: float,
    experts: int,
    topk: int,
    mode: DeepepMode = "auto",
) -> PricedKernel:
    """Exposed seconds of an expert dispatch or combine.

    Args:
        hardware: Whose links and library.
        side: "dispatch" or "combine".
        group: The ep group.
        tokens: Tokens of this GPU, each copied to `topk` experts.
        columns: Hidden columns sent of each.
        each: Bytes per element.
        experts: Experts of the layer.
        topk: Experts that a token visits.
        mode: Which kernels, where they were measured.
    """
    exposed = 1 - hardware.communication_overlap
    model = hardware.collectives
    if hardware.curves and not group.racked and not model.torus:
        as_switched = columns / (model.links_used(group.per_node) if group.nodes == 1 else 1.0)
        fitted = hardware.curves.expert_all_to_all(
            side, tokens, as_switched, each, experts, topk, group.per_node, group.nodes, mode
        )
        if fitted is not None:
            return fitted._replace(time_s=fitted.time_s * exposed)
    sent_bytes = tokens * topk * columns * each * (group.degree - 1) / group.degree
    time_s = expert_all_to_all_time_s(model, side, group, sent_bytes)
    if model.torus and group.nodes == 1:
        return at_link_peak(hardware, time_s * exposed)
    return hardware.errors.by_medians(time_s * exposed)


@lru_cache(maxsize=MEMOISED)
def stage_send_s(hardware: Hardware, pair: MeshGroup, sent_bytes: float) -> float:
    """Seconds to hand `sent_bytes` from a GPU of one pipeline stage to one of the next; see `mesh.stage_pair`."""
    model, same_node = hardware.collectives, pair.nodes == 1
    if pair.racked and model.rack:
        latency_s = model.send_recv.intra_latency_s + model.rack.hop_s
        return latency_s + sent_bytes / model.rack.bandwidth_bytes_per_s
    if model.torus and same_node:
        return model.torus.hop_s + sent_bytes / model.torus.link_bandwidth_bytes_per_s
    if same_node:
        sent_bytes /= model.links_used(2)
    fitted = hardware.curves.send_recv(same_node=same_node, sent_bytes=sent_bytes) if hardware.curves else None
    if fitted is not None:
        return fitted.time_s
    return send_recv_time_s(model.send_recv, same_node=same_node, sent_bytes=sent_bytes)


def _across(group: MeshGroup) -> str:
    return "the nodes of a rack" if group.racked else "nodes"


def expert_all_to_all_time_s(model: CollectiveModel, side: str, group: MeshGroup, sent_bytes: float) -> float:
    """Seconds of an expert dispatch or combine in which each GPU sends `sent_bytes` to the others, without curves.

    The slower of the NVLink part and the network's or the rack's part, plus the kernel's latency. Latencies are
    measured at 1, 2, 4, ... nodes, linear in between and beyond in log2(nodes).
    """
    if group.degree == 1:
        return 0.0
    kernel = model.dispatch if side == "dispatch" else model.combine
    others, inter_bytes_per_s = group.degree - 1, kernel.inter_bandwidth_bytes_per_s
    if group.racked and model.rack:
        inter_bytes_per_s = model.rack.bandwidth_bytes_per_s
    intra_bytes_per_s = kernel.intra_bandwidth_bytes_per_s * model.links_used(group.per_node)
    intra_s = sent_bytes * (group.per_node - 1) / others / intra_bytes_per_s
    inter_s = sent_bytes * (group.degree - group.per_node) / others / inter_bytes_per_s
    if model.torus and group.nodes == 1:
        tensor_bytes = sent_bytes / sent_share("all_to_all", group.degree)
        intra_s = best_torus_time_s(model.torus, "all_to_all", group.degree, tensor_bytes)
    return _latency_at_nodes(kernel.latency_s, group.nodes) + larger(intra_s, inter_s)


def send_recv_time_s(link: PointToPoint, *, same_node: bool, sent_bytes: float) -> float:
    """Seconds of a message of `sent_bytes` over a link, without curves."""
    if same_node:
        return link.intra_latency_s + sent_bytes / link.intra_bandwidth_bytes_per_s
    return link.inter_latency_s + sent_bytes / link.inter_bandwidth_bytes_per_s


def _latency_at_nodes(latency_s: tuple[float, ...], nodes: int) -> float:
    if isinstance(nodes, Lanes):
        return by_distinct(partial(_latency_at_nodes, latency_s), nodes)
    position = math.log2(nodes)
    last = len(latency_s) - 1
    if last == 0:
        return latency_s[0]
    left = min(int(position), last - 1)
    slope = latency_s[left + 1] - latency_s[left]
    return latency_s[left] + slope * (position - left)


@lru_cache(maxsize=1024)
def _envelopes(
    model: CollectiveModel, kind: str, groups: tuple[tuple[int, int, bool], ...]
) -> tuple[Floats, Floats, str]:
    """Latencies and seconds per byte of the lines of some groups, `[lines, groups]`, and the algorithm of them all."""
    each = [_envelope(model, kind, MeshGroup(*group)) or (Line(0.0, 0.0, ""),) for group in groups]
    most = max(map(len, each))
    padded = [[*lines, *[lines[0]] * (most - len(lines))] for lines in each]
    names = {line.algorithm for lines in each for line in lines}
    of_lines = np.array([[line[:2] for line in lines] for lines in padded], dtype=float).transpose(2, 1, 0).copy()
    return of_lines[0], of_lines[1], names.pop() if len(names) == 1 else ""


@lru_cache(maxsize=4096)
def _envelope(model: CollectiveModel, kind: str, group: MeshGroup) -> Envelope:
    if group.degree == 1:
        return ()
    if kind == "all_to_all":
        return (_all_to_all_line(model, group),)
    lines = [line for protocol in model.protocols for line in _nccl_lines(model, protocol, kind, group)]
    if kind == "all_reduce" and model.algorithm == NVLS and model.nvls_latency_s is not None and group.nodes == 1:
        simple = model.protocols[-1]
        per_byte_s = sent_share(kind, group.degree) / _bandwidth_bytes_per_s(model, simple, kind, group)
        lines.append(Line(model.nvls_latency_s, per_byte_s, NVLS))
    if kind == "all_reduce" and model.custom_all_reduce and group.nodes == 1:
        custom, share = model.custom_all_reduce, sent_share(kind, group.degree)
        bandwidth = custom.bandwidth_bytes_per_s * model.links_used(group.degree)
        lines.append(Line(custom.one_shot_latency_s, (group.degree - 1) / bandwidth, "one-shot"))
        lines.append(Line(custom.two_shot_latency_s, share / bandwidth, "two-shot"))
    asked = [line for line in lines if kind == "all_reduce" and line.algorithm == model.algorithm]
    return tuple(asked or lines)  # what cannot run there leaves it to the fastest of the others


def _nccl_lines(model: CollectiveModel, protocol: Protocol, kind: str, group: MeshGroup) -> list[Line]:
    lines = [_ring_line(model, protocol, kind, group)]
    if kind == "all_reduce" and (group.nodes > 1 or model.algorithm == "tree"):
        lines.append(_tree_line(model, protocol, group))
    if group.tier == "hierarchical" and group.degree == group.nodes * group.per_node:
        lines.append(_hierarchical_line(model, protocol, kind, group))
    return lines


def _bandwidth_bytes_per_s(model: CollectiveModel, protocol: Protocol, kind: str, group: MeshGroup) -> float:
    reduce = kind == "all_reduce"
    nvlink = model.all_reduce_bandwidth_bytes_per_s if reduce else model.gather_bandwidth_bytes_per_s
    nvlink *= model.links_used(group.per_node)
    if group.nodes == 1:
        return nvlink * protocol.bandwidth_share
    # Every GPU of the node drives its own share of the NICs, or of the rack's links.
    each = model.rack.bandwidth_bytes_per_s if group.racked and model.rack else model.nic_bandwidth_bytes_per_s
    network = group.per_node * each
    return (network if group.per_node == 1 else min(nvlink, network)) * protocol.bandwidth_share


def _ring_line(model: CollectiveModel, protocol: Protocol, kind: str, group: MeshGroup) -> Line:
    passes = 2 if kind == "all_reduce" else 1
    steps, inter_steps = passes * (group.degree - 1), passes * (group.nodes - 1)
    intra_step_s, inter_step_s = protocol.ring_intra_step_s, protocol.ring_inter_step_s
    if group.racked and model.rack:
        inter_step_s = intra_step_s + model.rack.hop_s
    elif group.nodes > 1:
        intra_step_s = max(intra_step_s, model.net_overhead_s)
    latency_s = protocol.ring_base_s + (steps - inter_steps) * intra_step_s + inter_steps * inter_step_s
    per_byte_s = sent_share(kind, group.degree) / _bandwidth_bytes_per_s(model, protocol, kind, group)
    return Line(latency_s, per_byte_s, "ring")


def _tree_line(model: CollectiveModel, protocol: Protocol, group: MeshGroup) -> Line:
    up_s = (group.degree / group.nodes - 1) * protocol.tree_intra_step_s
    racked = group.racked and model.rack
    inter_step_s = protocol.tree_intra_step_s + racked.hop_s if racked else protocol.tree_inter_step_s
    up_s += math.log2(group.nodes) * inter_step_s
    bandwidth = _bandwidth_bytes_per_s(model, protocol, "all_reduce", group)
    return Line(protocol.tree_base_s + 2 * up_s, sent_share("all_reduce", group.degree) / bandwidth, "tree")


def _hierarchical_line(model: CollectiveModel, protocol: Protocol, kind: str, group: MeshGroup) -> Line:
    inside, across = MeshGroup(group.per_node, group.per_node), MeshGroup(group.nodes, 1, group.racked)
    inner_kinds = ("reduce_scatter", "all_gather") if kind == "all_reduce" else (kind,)
    inner = [_ring_line(model, protocol, inner_kind, inside) for inner_kind in inner_kinds]
    outer = _ring_line(model, protocol, kind, across)
    return Line(
        outer.latency_s + sum(line.latency_s for line in inner),
        outer.seconds_per_byte / group.per_node + sum(line.seconds_per_byte for line in inner),
        "hierarchical",
    )


def _all_to_all_line(model: CollectiveModel, group: MeshGroup) -> Line:
    link, share = model.all_to_all, sent_share("all_to_all", group.degree)
    intra_bytes_per_s = link.intra_bandwidth_bytes_per_s * model.links_used(group.per_node)
    if group.nodes == 1:
        return Line(link.intra_latency_s, share / intra_bytes_per_s, "pairwise")
    latency_s, inter_bytes_per_s = link.inter_latency_s, link.inter_bandwidth_bytes_per_s
    if group.racked and model.rack:
        latency_s, inter_bytes_per_s = link.intra_latency_s + model.rack.hop_s, model.rack.bandwidth_bytes_per_s
    remote = share * (group.degree - group.per_node) / (group.degree - 1)
    seconds_per_byte = max(remote / inter_bytes_per_s, (share - remote) / intra_bytes_per_s)
    # A rank exchanges with every peer in turn: we let the latency grow with the nodes they sit on. [assumed]
    return Line(latency_s * group.nodes / 2, seconds_per_byte, "pairwise")
