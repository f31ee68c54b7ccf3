"""A calibration as one inference engine uses it: which series prices a kernel or a collective, and how sure it is.

Whatever the calibration lacks is None here, and the hardware file's medians stand in.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple

from sim.prices.calibration import COMBINE_EACH, DISPATCH_EACH, NODE_GPUS, WIDEST_GROUP, Calibration, is_plain
from sim.prices.dtypes import Dtype


class Gemm(NamedTuple):
    """C[rows, columns] = A[rows, inner] B[inner, columns]."""

    rows: float
    inner: float
    columns: float


class GroupedGemm(NamedTuple):
    """Rows of all experts of a GPU through the [inner, columns] weights of the `active` among its `local` ones."""

    rows: float
    inner: float
    columns: float
    active: float
    local: float
    gated: bool


class DecodeAttention(NamedTuple):
    """One new token per sequence; heads are those of one GPU. `multi_head`: the model shares no KV heads."""

    sequences: float
    kv_len: float
    heads: float
    kv_heads: float
    head_dim: float
    multi_head: bool


class Routing(NamedTuple):
    """Top-k over the router's logits; `dtype` of here and below is the format of the experts' weights."""

    tokens: float
    experts: float
    topk: float
    dtype: Dtype
    gated: bool


class Permute(NamedTuple):
    """Tokens into the order of their experts, or back."""

    tokens: float
    rows: float
    hidden: float
    dtype: Dtype
    gated: bool


class ExpertActivation(NamedTuple):
    """The activation between the grouped GEMMs; `width` is its output's."""

    rows: float
    width: float
    dtype: Dtype
    gated: bool


Shape = Gemm | GroupedGemm | DecodeAttention | Routing | Permute | ExpertActivation


class Priced(NamedTuple):
    """Seconds of a kernel or collective.

    Attributes:
        time_s: How long it takes.
        error: Cross-validated relative error of the curve.
        extrapolated: What about it no measurement covers, or "".
    """

    time_s: float
    error: float
    extrapolated: str = ""


_DTYPE_STAND_INS: dict[str, tuple[str, ...]] = {
    "bf16": ("bf16",),
    "fp8": ("fp8", "fp8_block"),
    "fp8_block": ("fp8_block", "fp8"),
}
_EAGER = {("vllm", "fp8_block"): "sglang"}
"""GEMMs timed with the host's launch overhead, which a CUDA graph hides: another engine's curve stands in. [assumed]"""
REMEMBERED = 1 << 16
"""Prices of a kind that are kept: strategies share most, as degrees and batches come from short tables."""
_CUSTOM_ALL_REDUCE = {"trtllm": "trtllm_custom", "vllm": "vllm_custom_graph", "sglang": "sglang_custom_graph"}
_KINDS = {"all_to_all": "alltoall"}
_FAMILIES = {
    "gemm": "GEMM",
    "attention_decode": "attention",
    "moe": "experts",
    "collectives": "collective inside a node",
    "moe_alltoall_deepep": "expert all-to-all",
    "send_recv": "send and receive",
}
_SIZES = {
    "m": "rows",
    "n": "columns",
    "k": "inner width",
    "batch_size": "sequences",
    "kv_len": "context",
    "num_heads": "heads",
    "num_kv_heads": "KV heads",
    "head_dim": "head width",
    "area": "weights per expert",
    "local": "experts per GPU",
    "hidden": "hidden size",
    "num_experts": "number of experts",
    "num_nodes": "number of nodes",
    "tokens_per_rank": "tokens per GPU",
    "topk": "experts per token",
    "message_bytes": "message size",
}
"""Columns of the measured tables, in words."""
_WIDE = f"attention of more than {WIDEST_GROUP} query heads per KV head"
"""Another kernel, up to 15 times slower in TensorRT-LLM; no row says where between 32 and 48 heads it takes over."""


class Curves:
    """The curves of one engine.

    Attributes:
        calibration: Where they come from.
        engine: "trtllm", "vllm" or "sglang".
        all_reduce: Whose all-reduce runs inside a node: an engine's own, or "nccl".
        uncalibrated: Relative error of a series that was never cross-validated.
    """

    def __init__(
        self,
        calibration: Calibration,
        engine: str,
        all_reduce: str,
        uncalibrated: float = 0.35,  # [assumed] as for what is priced by medians
    ) -> None:
        self.calibration = calibration
        self.engine = engine
        self.all_reduce = all_reduce
        self.uncalibrated = uncalibrated
        self._series_of = lru_cache(maxsize=None)(self._find)
        self._judgement = lru_cache(maxsize=None)(self._find_judgement)

    def __reduce__(self) -> tuple[object, ...]:
        return Curves, (self.calibration, self.engine, self.all_reduce, self.uncalibrated)

    # --- kernels ---------------------------------------------------------------------------------

    def kernel(self, shape: Shape, math_dtype: Dtype, stream_dtype: Dtype) -> Priced | None:
        """Seconds of a kernel, or None if the calibration knows nothing like it."""
        if isinstance(shape, Gemm):
            return self._gemm(shape, math_dtype)
        if isinstance(shape, DecodeAttention):
            return self._decode(shape, stream_dtype)
        return self._expert_kernel(shape, math_dtype if isinstance(shape, GroupedGemm) else shape.dtype)

    def _gemm(self, shape: Gemm, dtype: str) -> Priced | None:
        series = self._series_of("gemm", dtype, gated=True)
        if series is None:
            return None
        _, engine, priced_as = series.split("/")
        time_us = self.calibration.gemm_us(engine, priced_as, shape.rows, shape.columns, shape.inner)
        return self._priced(series, time_us, (shape.rows, shape.columns, shape.inner), dtype)

    def _decode(self, shape: DecodeAttention, dtype: str) -> Priced | None:
        sequences, kv_len, heads, kv_heads, head_dim, multi_head = shape
        series = self._series_of("attention_decode", dtype, gated=not multi_head)
        if series is None:
            return None
        _, engine, priced_as, _ = series.split("/")
        time_us = self.calibration.attention_decode_us(
            engine, priced_as, sequences, kv_len, heads, kv_heads, head_dim, multi_head=multi_head
        )
        sizes = (sequences, kv_len, heads, kv_heads, head_dim)
        if multi_head or heads <= WIDEST_GROUP * kv_heads:
            return self._priced(series, time_us, sizes, dtype)
        wide = self._priced(f"attention_decode/{engine}/{priced_as}/wide", time_us, sizes, dtype)
        return wide._replace(extrapolated=wide.extrapolated or _WIDE)

    def _expert_kernel(self, shape: GroupedGemm | Routing | Permute | ExpertActivation, dtype: str) -> Priced | None:
        series = self._series_of("moe", dtype, gated=shape.gated)
        if series is None:
            return None
        curves, sizes = self.calibration, ()
        match shape:
            case GroupedGemm(rows, inner, columns, active, local):
                sizes = (rows, inner * columns, local)
                priced_as = series.rpartition("/")[2]
                time_us = curves.grouped_gemm_us(series, rows, active, local, inner, columns, priced_as)
            case Routing(tokens, experts, topk):
                time_us = curves.moe_routing_us(series, tokens, experts, topk)
            case Permute(tokens, rows, hidden):
                time_us = curves.moe_permute_us(series, tokens, rows, hidden)
            case ExpertActivation(rows, width):
                time_us = curves.moe_activation_us(series, rows, width)
        return self._priced(series, time_us, sizes, dtype)

    # --- messages ----------------------------------------------------------------------------------

    def collective(self, kind: str, degree: int, tensor_bytes: float) -> Priced | None:
        """A collective inside a node on a tensor of `tensor_bytes` over the group, or None."""
        name = _KINDS.get(kind, kind)
        message_bytes = tensor_bytes / degree if kind == "all_to_all" else tensor_bytes
        series = f"collectives/{name}/nccl"
        if kind == "all_reduce" and self.all_reduce != "nccl":
            series = f"collectives/{name}/{_CUSTOM_ALL_REDUCE[self.all_reduce]}"
        if series not in self.calibration.series:
            return None
        time_us = self.calibration.collective_us(series, name, degree, message_bytes)
        return self._priced(series, time_us, (message_bytes, degree), "")

    def expert_all_to_all(
        self, side: str, tokens: float, columns: float, each: int, experts: int, topk: int, per_node: int, nodes: int
    ) -> Priced | None:
        """DeepEP's low-latency dispatch or combine, or None.

        Args:
            side: "dispatch" or "combine".
            tokens: Tokens of one rank.
            columns: Hidden columns sent of each.
            each: Bytes per element; fp8 brings its scales along.
            experts: Experts of the layer.
            topk: Experts that a token visits.
            per_node: Ranks of the group on a node; within one node the copies that stay on a rank cost nothing.
            nodes: Nodes of the group.
        """
        series = f"moe_alltoall_deepep/low_latency/{side}/0/{'intra' if nodes == 1 else 'inter'}"
        if series not in self.calibration.series:
            return None
        width_bytes = columns * {1: DISPATCH_EACH, 2: COMBINE_EACH}[each]
        sent = tokens
        if nodes == 1:
            sent *= (per_node - 1) / per_node * NODE_GPUS / (NODE_GPUS - 1)
        time_us = self.calibration.expert_all_to_all_us(side, sent, width_bytes, experts, topk, nodes)
        return self._priced(series, time_us, (tokens, columns, topk, experts, nodes), "")

    def send_recv(self, *, same_node: bool, sent_bytes: float) -> Priced | None:
        """Point to point between stages, or None."""
        tier = "intra" if same_node else "inter"
        if f"send_recv/{tier}" not in self.calibration.series:
            return None
        time_us = self.calibration.send_recv_us(tier, sent_bytes)
        return self._priced(f"send_recv/{tier}", time_us, (sent_bytes,), "")

    # --- series ------------------------------------------------------------------------------------

    def _find(self, family: str, dtype: str, *, gated: bool) -> str | None:
        """The best fitted series of the engine, or the nearest stand-in, or None."""
        for priced_as in _DTYPE_STAND_INS[dtype]:
            if series := self._candidates(family, priced_as, gated):
                return max(series, key=lambda name: (self.calibration.series[name].get("rows", 0), name))
        return None

    def _candidates(self, family: str, dtype: str, gated: bool) -> Sequence[str]:
        known = self.calibration.series
        if family == "gemm":
            name = f"gemm/{_EAGER.get((self.engine, dtype), self.engine)}/{dtype}"
            return [name] if name in known else []
        if family == "attention_decode":
            prefix = f"attention_decode/{self.engine}/{dtype}/"
            needed = [prefix + "gqa", prefix + "wide"] if gated else [prefix + "mha"]
            return needed[:1] if all(name in known for name in needed) else []
        own = [n for n in known if n.startswith(f"moe/{self.engine}/") and n.endswith(f"/{dtype}")]
        alike = [name for name in own if is_plain(name) != gated]
        return alike or own

    def _find_judgement(self, series: str, dtype: str) -> tuple[float, tuple[tuple[float, float], ...], str]:
        """(error, measured range per size, what stands in for what) of a series that prices `dtype`."""
        record = self.calibration.series[series]
        stand_in = f"{dtype} priced as {series}" if dtype and dtype not in series.split("/") else ""
        ranges = tuple((low, high) for low, high in record.get("range", {}).values())
        error = record.get("mape")
        return self.uncalibrated if error is None else float(error), ranges, stand_in

    def _priced(self, series: str, time_us: float, sizes: tuple[float, ...], dtype: str) -> Priced:
        """Attaches the error of a series and says which of its sizes lie outside what was measured."""
        error, ranges, stand_in = self._judgement(series, dtype)
        for index, ((low, high), size) in enumerate(zip(ranges, sizes)):  # noqa: B905 fewer sizes than columns are fine
            if not low <= size <= high:
                name = list(self.calibration.series[series]["range"])[index]
                what = f"{_FAMILIES[series.split('/')[0]]} beyond measured {_SIZES.get(name, name)}"
                return Priced(time_us * 1e-6, error, what)
        return Priced(time_us * 1e-6, error, stand_in)
