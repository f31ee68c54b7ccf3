"""Fitted microseconds of kernels and collectives, from a file of coefficients.

Every time is the larger of its fitted curve and the speed of light. Tables are built when first asked for; what a
search calls is pure Python. Series are named family/engine or library/dtype; `raysearch calibrate` writes the file.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from typing import Any

import numpy as np

from sim.arrays import Floats, dot, exp_of, larger, log_of, smaller
from sim.json_object import JsonFields
from sim.prices import grid_terms, mixer_terms, terms
from sim.prices.dtypes import BYTES
from sim.prices.machine import Machine, machine_of
from sim.prices.routing import EXPONENT, drawn_experts
from sim.prices.tables import Table, interpolate, made_monotone, vertices

FORMAT = 2
"""Version of the coefficients file."""
_MOST_SERIES = 1024
"""Tables that are kept; a file holds some ninety series."""
WIDEST_GROUP = 32
"""Query heads per KV head up to which an engine's usual decode attention runs; beyond, a slower one is measured."""
FEW_EXPERTS = 8
"""Local experts of a GPU up to which its share of skewed routing is random enough to have an interval of its own."""
DISPATCH_EACH, COMBINE_EACH = 1.03, 2.0
"""Bytes per element of a DeepEP message: fp8 with its scales, and bf16. [published] DeepEP's defaults."""


class MissingSeries(LookupError):
    """A calibration was asked for a series that it does not hold."""


class _Series(dict[str, Mapping[str, Any]]):
    """Records by name; asking for one that is not there says so in the calibration's words."""

    def __missing__(self, name: str) -> JsonFields:
        raise MissingSeries(f"the calibration has no series {name!r}")


class Calibration:
    """Coefficients of one accelerator. Prices raise `MissingSeries` where it lacks what they need.

    Attributes:
        name: Name of the file, for people.
        data: The file's content.
        digest: Of that content.
        machine: The machine that is priced.
        measured: The machine whose rows were fitted, which is another after `scaled_to`.
        rest: Another for what this one lacks, or None; see `completed_by`.
        cached_bytes: What a kernel finds in the L2 cache, so that memory need not stream it: nothing, in a step.
        cached: The machine with as much of an L2 cache.
    """

    def __init__(self, name: str, data: JsonFields, digest: str = "", rest: Calibration | None = None) -> None:
        self.name = name
        self.data = data
        self.digest = digest
        self.rest = rest
        self.series: Mapping[str, JsonFields] = _Series(data["series"])
        self.machine = machine_of(data)
        self.measured = machine_of(data.get("measured", data))
        self.cached_bytes = 0.0
        self.cached = self.machine._replace(l2_mb=0.0)
        self.table = lru_cache(maxsize=_MOST_SERIES)(self._build_table)
        self._vertices = lru_cache(maxsize=_MOST_SERIES)(self._grid_vertices)

    def scaled_to(self, header: Mapping[str, Mapping[str, float]]) -> Calibration:
        """The same efficiencies on another machine: each term of a kernel moves with the rate that it counts in.

        So what streams takes as much less as the memory is faster, what multiplies as the tensor cores are, and a
        launch stays a launch. [assumed] kernels as well tuned for the other machine as for the measured one.
        Scaling what was scaled is scaling what was measured: by way of a third machine nothing else comes out.

        Args:
            header: That machine: `speed_of_light` and `machine` of a calibration file.
        """
        measured = self.data.get("measured", {part: self.data[part] for part in header})
        data = {**self.data, **header, "scaled_from": self.name, "measured": measured}
        digest = hashlib.sha256(f"{self.digest} {json.dumps(header, sort_keys=True)}".encode()).hexdigest()[:16]
        return Calibration(self.name, data, digest, self.rest and self.rest.scaled_to(header))

    def as_benchmarked(self) -> Calibration:
        """The same for the launches of a benchmark, which find in the L2 cache what the launch before left there.

        No kernel of a step is priced below the time in which memory streams its operands; a measured row may take less.
        """
        found = Calibration(self.name, self.data, self.digest, self.rest)
        found.cached_bytes, found.cached = self.machine.l2_mb * 1e6, self.machine
        return found

    def completed_by(self, rest: Calibration) -> Calibration:
        """The same with another calibration of the machine for what it lacks: kernels, messages, serving runs.

        Args:
            rest: Efficiencies carried over to this machine, as `scaled_to` makes them.
        """
        data = self.data
        if not data.get("serving", {}).get("engines"):
            data = {**data, "serving": rest.data.get("serving", {})}
        digest = hashlib.sha256(f"{self.digest} {rest.digest}".encode()).hexdigest()[:16]
        return Calibration(self.name, data, digest, rest)

    @property
    def carries_serving(self) -> bool:
        """Whether serving runs of another machine stand behind its engines' times and their intervals."""
        beside = self.rest is not None and self.data.get("serving") == self.rest.data.get("serving")
        return "scaled_from" in self.data or beside

    def __reduce__(self) -> tuple[object, ...]:
        return Calibration, (self.name, self.data, self.digest, self.rest)

    # --- kernels ---------------------------------------------------------------------------------

    def gemm_us(self, engine: str, dtype: str, m: float, n: float, k: float, kernel: str = "") -> float:
        """C[m, n] = A[m, k] B[k, n] with weights and arithmetic in `dtype`, by one of the engine's kernels if named."""
        series = f"gemm/{engine}/{dtype}/{kernel}" if kernel else f"gemm/{engine}/{dtype}"
        fitted = exp_of(self.table(series)(log_of(m), log_of(n), log_of(k)))
        each = BYTES[dtype]
        flop_us = 2 * m * n * k / self.machine.flop_per_us[dtype]
        streamed = each * (m * k + n * k) + 2 * m * n - self.cached_bytes
        return larger(fitted, flop_us, streamed / self.machine.hbm_bytes_per_us)

    def attention_decode_us(
        self,
        engine: str,
        kv_dtype: str,
        sequences: float,
        kv_len: float,
        heads: float,
        kv_heads: float,
        head_dim: float,
        *,
        multi_head: bool | None = None,
        windowed: bool = False,
    ) -> float:
        """One new token per sequence over `kv_len` cached ones; heads are those of one GPU.

        Args:
            engine: Whose kernel.
            kv_dtype: Format of the KV cache.
            sequences: Sequences on the GPU.
            kv_len: Cached tokens.
            heads: Query heads.
            kv_heads: KV heads.
            head_dim: Width of a head.
            multi_head: Whether the model has a KV head per query head, which selects another kernel. Sharding
                heads must not change it, or time would step; None decides by the heads given.
            windowed: Whether `kv_len` is what a sliding window lets it see, which has kernels of its own.
        """
        streams, group = sequences * kv_heads, heads / kv_heads
        if multi_head is None:
            multi_head = group == 1
        prefix = f"attention_decode/{engine}/{kv_dtype}/"
        point = (log_of(streams), log_of(kv_len), log_of(group), log_of(head_dim))
        if multi_head:
            fitted = self.table(self.windowed(prefix + "mha", windowed))(*point)
        else:
            series = self.windowed(prefix + "gqa", windowed)
            fitted = self.table(series)(*point[:2], log_of(smaller(group, WIDEST_GROUP)), point[3])
            if group > WIDEST_GROUP:
                wide = self.windowed(prefix + "wide", windowed)
                in_proportion = fitted + log_of(group / WIDEST_GROUP)
                fitted = larger(fitted, self.table(wide)(*point)) if wide in self.series else in_proportion
        streamed = 2 * streams * kv_len * head_dim * BYTES[kv_dtype] - self.cached_bytes
        byte_us = streamed / self.machine.hbm_bytes_per_us
        flop_us = 4 * sequences * heads * head_dim * kv_len / self.machine.flop_per_us["bf16"]
        return larger(exp_of(fitted), byte_us, flop_us)

    def attention_prefill_us(
        self,
        engine: str,
        dtype: str,
        kv_dtype: str,
        sequences: float,
        tokens: float,
        heads: float,
        kv_heads: float,
        head_dim: float,
        windowed: bool = False,
    ) -> float:
        """Causal attention over the new tokens of each sequence, arithmetic in `dtype`.

        A sliding window is as many shorter sequences as see as many pairs; its kernels are of their own (`windowed`).
        """
        series = self.windowed(f"attention_prefill/{engine}/{dtype}/{kv_dtype}", windowed)
        flop_us = 2 * sequences * heads * head_dim * tokens * tokens / self.machine.flop_per_us[dtype]
        if "grid" in self.series[series]:
            point = (log_of(sequences * heads), log_of(tokens), log_of(heads / kv_heads), log_of(head_dim))
            return larger(exp_of(self.table(series)(*point)), flop_us)
        phi = terms.attention_prefill(self.machine, sequences, tokens, heads, kv_heads, head_dim, dtype)
        return larger(self._sum(series, phi), flop_us)

    def windowed(self, series: str, windowed: bool) -> str:
        """The series of an attention under a sliding window, where one was measured, or that of the whole context."""
        name = f"{series}/window"
        return name if windowed and name in self.series else series

    def mla_decode_us(self, kv_dtype: str, sequences: float, kv_len: float, heads: float, engine: str = "") -> float:
        """Multi-head latent attention (512 + 64 cached per token), of an engine or of all."""
        series = "/".join(filter(None, ("mla_decode", engine, kv_dtype)))
        byte_us = (sequences * kv_len * 576 * BYTES[kv_dtype] - self.cached_bytes) / self.machine.hbm_bytes_per_us
        flop_us = 2 * sequences * heads * kv_len * 1088 / self.machine.flop_per_us["bf16"]
        if "grid" in self.series[series]:
            return larger(
                exp_of(self.table(series)(log_of(sequences), log_of(kv_len), log_of(heads))), byte_us, flop_us
            )
        point = np.log(np.array([[sequences, kv_len, heads]], dtype=float))
        return larger(self._sum(series, grid_phi(series, self.machine)(point)[0].tolist()), byte_us, flop_us)

    def sparse_attention_us(self, series: str, sizes: Sequence[float]) -> float:
        """Sparse attention between its projections; sizes as `mixer_terms.sparse_attention` takes them."""
        return self._sum(series, mixer_terms.sparse_attention(self.cached, *sizes))

    def convolution_us(self, series: str, sequences: float, tokens: float, width: float) -> float:
        """The short convolution in front of a state."""
        return self._sum(series, mixer_terms.convolution(self.cached, sequences, tokens, width))

    def state_scan_us(self, series: str, sizes: Sequence[float]) -> float:
        """The way through a state of constant size; sizes as `mixer_terms.state_scan` takes them."""
        return self._sum(series, mixer_terms.state_scan(self.cached, *sizes))

    # --- the MoE layer -----------------------------------------------------------------------------

    def moe_routing_us(self, series: str, tokens: float, experts: float, topk: float) -> float:
        """Top-k and the sort by expert."""
        return self._piece(series, "routing", terms.routing(tokens, experts, topk))

    def moe_permute_us(self, series: str, tokens: float, rows: float, hidden: float) -> float:
        """Copies of tokens into their experts' order, or their weighted sum on the way back."""
        byte_us = (tokens + rows) * hidden * 1 / self.machine.hbm_bytes_per_us
        return larger(self._piece(series, "permute", terms.permute(self.machine, tokens, rows, hidden)), byte_us)

    def moe_activation_us(self, series: str, rows: float, width: float) -> float:
        """The activation on rows of `width` (after gating)."""
        phi = terms.expert_activation(self.machine, rows, width)
        return larger(self._piece(series, "activation", phi), rows * width / self.machine.hbm_bytes_per_us)

    def grouped_gemm_us(
        self,
        series: str,
        rows: float,
        active: float,
        local: float,
        inner: float,
        columns: float,
        dtype: str,
        *,
        skewed: bool = False,
    ) -> float:
        """Rows of all local experts through their [inner, columns] weights."""
        phi = terms.grouped_gemm(self.machine, rows, active, local, inner, columns, dtype, skewed=skewed)
        phi += terms.past_cache(self.cached, phi[0])
        light_us = self._grouped_light_us(rows, active, inner * columns, dtype)
        return larger(self._piece(series, "grouped_gemm", phi), light_us)

    def moe_layer_us(
        self,
        series: str,
        tokens: float,
        hidden: float,
        width: float,
        topk: float,
        experts: float,
        ep: float,
        *,
        skewed: bool,
        exponent: float = EXPONENT,
        all_choices: bool = False,
        dtype: str | None = None,
    ) -> float:
        """A whole layer on one rank as it was measured: tokens of the whole ep group, `width` after sharding.

        See `sim.prices.routing.drawn_experts` for skewed routing and ranks that multiply all choices.
        Another `dtype` than the series was measured in moves its bytes and FLOPs at the same efficiency.
        """
        dtype = dtype or series.rpartition("/")[2]
        active, rows, local = drawn_experts(
            tokens, topk, experts, ep, skewed=skewed, exponent=exponent, all_choices=all_choices
        )
        gate = 1 if is_plain(series) else 2
        light_us = self._grouped_light_us(rows, smaller(active, local), (gate + 1) * hidden * width, dtype)
        priced = f"{series.rpartition('/')[0]}/{dtype}"
        shape = (tokens, hidden, width, topk, experts, ep)
        phi = moe_layer_terms(self.cached, priced, *shape, skewed=skewed, exponent=exponent, all_choices=all_choices)
        return larger(self._sum(series, phi), light_us)

    def _grouped_light_us(self, rows: float, active: float, area: float, dtype: str) -> float:
        flop_us = 2 * rows * area / self.machine.flop_per_us[dtype]
        return larger(flop_us, (active * area * BYTES[dtype] - self.cached_bytes) / self.machine.hbm_bytes_per_us)

    # --- messages ----------------------------------------------------------------------------------

    def collective_us(self, series: str, kind: str, degree: float, message_bytes: float) -> float:
        """A collective inside a node; the message is the largest buffer of a rank (nccl-tests' convention)."""
        share = (2 if kind == "all_reduce" else 1) * (degree - 1) / degree
        fitted = exp_of(self.table(series)(log_of(larger(message_bytes, 1.0)), log_of(degree)))
        return larger(fitted, message_bytes * share / self.machine.nvlink_bytes_per_us)

    def expert_all_to_all_us(
        self,
        side: str,
        tokens: float,
        width_bytes: float,
        experts: float,
        topk: float,
        nodes: float,
        *,
        mode: str = "low_latency",
        sms: int = 0,
    ) -> float:
        """DeepEP's "dispatch" or "combine" over `nodes` nodes; more nodes never take less."""
        low_latency = mode == "low_latency"
        prefix = f"moe_alltoall_deepep/{mode}/{side}/{sms}/"
        inside, across = self._links_slower()
        phi = terms.expert_all_to_all_terms(
            self.machine, tokens, width_bytes * inside, experts, topk, 1.0, low_latency=low_latency
        )
        time_us = self._sum(prefix + "intra", phi) if nodes == 1 or prefix + "intra" in self.series else 0.0
        if nodes > 1:
            phi = terms.expert_all_to_all_terms(
                self.machine, tokens, width_bytes * across, experts, topk, nodes, low_latency=low_latency
            )
            time_us = larger(time_us, self._sum(prefix + "inter", phi))
        return larger(
            time_us, self.expert_all_to_all_light_us(tokens, width_bytes, topk, nodes, low_latency=low_latency)
        )

    def expert_all_to_all_light_us(
        self, tokens: float, width_bytes: float, topk: float, nodes: float, *, low_latency: bool
    ) -> float:
        """Bytes that leave the GPU over its NVLink, and those that leave the node over its network port."""
        ranks = self.machine.host_gpus * nodes
        inside = tokens * width_bytes * (topk if low_latency else ranks * (1 - (1 - 1 / ranks) ** topk))
        # Normal mode sends one copy per node and spreads it over NVLink; low latency sends one per expert.
        across = tokens * width_bytes * (topk if low_latency else nodes * (1 - (1 - 1 / nodes) ** topk))
        if nodes == 1:
            return inside * (ranks - 1) / ranks / self.machine.nvlink_bytes_per_us
        return across * (nodes - 1) / nodes / self.machine.network_bytes_per_us

    def send_recv_us(self, tier: str, message_bytes: float) -> float:
        """Point to point, "intra" or "inter" node; crossing nodes never takes less."""
        light_us = message_bytes / (
            self.machine.nvlink_bytes_per_us if tier == "intra" else self.machine.network_bytes_per_us
        )
        slower = self._links_slower()[0 if tier == "intra" else 1]
        time_us = larger(self._sum(f"send_recv/{tier}", terms.send_recv(message_bytes * slower)), light_us)
        if tier == "inter" and "send_recv/intra" in self.series:
            return larger(time_us, self.send_recv_us("intra", message_bytes))
        return time_us

    def _links_slower(self) -> tuple[float, float]:
        """How many times slower links inside and between nodes are than where messages were measured.

        Terms of messages count bytes: so many more of them take as long.
        """
        mine, its = self.machine, self.measured
        return its.nvlink_bytes_per_us / mine.nvlink_bytes_per_us, its.network_bytes_per_us / mine.network_bytes_per_us

    # --- coefficients ------------------------------------------------------------------------------

    def _sum(self, series: str, phi: list[float]) -> float:
        return dot(self.series[series]["terms"], phi)

    def _piece(self, series: str, piece: str, phi: list[float]) -> float:
        coefficients = self.series[series]["terms"]
        start, stop = _PIECES[piece]
        return coefficients[0] + dot(coefficients[start:stop], phi)

    def _grid_vertices(self, grid: str) -> tuple[list[Floats], Floats]:
        axes = [np.log(np.array(axis, dtype=float)) for axis in self.data["grids"][grid]["axes"]]
        return axes, vertices(axes)

    def _build_table(self, series: str) -> Table:
        """The monotone table of a series, from its terms and its correction (and its parent's)."""
        record = self.series[series]
        parent = self.series[record["parent"]] if "parent" in record else record
        grid = self.data["grids"][record["grid"]]
        axes, points = self._vertices(record["grid"])
        phi = grid_phi(series, self.machine)(points)
        heights = np.log(phi @ np.array(parent["terms"])) + self._correction(grid, points, parent["g_percent"])
        if parent is not record:
            heights = heights + self._correction(grid, points, record["g_percent"])
        heights = made_monotone(heights, [len(axis) for axis in axes], grid["monotone"])
        if "floor_us" in parent:
            heights = np.maximum(heights, math.log(parent["floor_us"]))
        return Table([axis.tolist() for axis in axes], heights.tolist(), grid["slopes"])

    def _correction(self, grid: JsonFields, points: Floats, g_percent: list[int]) -> Floats:
        correction, start = np.zeros(len(points)), 0
        for part in grid["parts"]:
            axes = [np.log(np.array(axis, dtype=float)) for axis in part["axes"]]
            size = math.prod(len(axis) for axis in axes)
            values = np.array(g_percent[start : start + size]) / 100
            correction += interpolate(points @ np.array(part["combine"], dtype=float).T, axes, values)
            start += size
        return correction


def grid_phi(series: str, machine: Machine) -> Callable[[Floats], Floats]:
    """The terms of a table series as a function of [points, axes] log sizes."""
    family, first, *rest = series.split("/")

    def phi(points: Floats) -> Floats:
        sizes = [np.exp(column) for column in points.T]
        if family == "gemm":
            m, n, k = sizes
            return grid_terms.gemm_s(machine, m, n, k, rest[0])
        if family == "attention_decode":
            streams, kv_len, group, head_dim = sizes
            return grid_terms.attention_decode_s(machine, streams, kv_len, group, head_dim, rest[0])
        if family == "attention_prefill":
            queries, tokens, group, head_dim = sizes
            return grid_terms.attention_prefill_s(machine, queries, tokens, group, head_dim, rest[0])
        if family == "mla_decode":
            sequences, kv_len, heads = sizes
            return grid_terms.latent_decode_s(machine, sequences, kv_len, heads, [first, *rest][-1])
        message_bytes, degree = sizes
        return grid_terms.collective(machine, message_bytes, degree, first)

    return phi


_PIECES = {"routing": (1, 5), "permute": (5, 7), "activation": (7, 8), "grouped_gemm": (8, 29)}
"""Where each piece's coefficients lie in a MoE series; the first is the launch that all pieces share."""


def is_plain(series: str) -> bool:
    """Whether a MoE series was measured with an ungated activation."""
    return "nongated" in series


def moe_layer_terms(
    machine: Machine,
    series: str,
    tokens: float,
    hidden: float,
    width: float,
    topk: float,
    experts: float,
    ep: float,
    *,
    skewed: bool,
    exponent: float = EXPONENT,
    all_choices: bool = False,
) -> list[float]:
    """Terms of a measured layer: the sum over its pieces, which share their coefficients."""
    *_, dtype = series.split("/")
    active, rows, local = drawn_experts(
        tokens, topk, experts, ep, skewed=skewed, exponent=exponent, all_choices=all_choices
    )
    gate = 1 if is_plain(series) else 2
    first = terms.grouped_gemm(machine, rows, active, local, hidden, gate * width, dtype, skewed=skewed)
    second = terms.grouped_gemm(machine, rows, active, local, width, hidden, dtype, skewed=skewed)
    both = list(map(sum, zip(first, second, strict=True)))
    return [
        float(terms.LAUNCHES),
        *terms.routing(tokens, experts, topk),
        *(2 * term for term in terms.permute(machine, tokens, rows, hidden)),
        *terms.expert_activation(machine, rows, width),
        *both,
        *terms.past_cache(machine, both[0]),
    ]
