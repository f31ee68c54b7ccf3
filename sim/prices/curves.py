"""A calibration as one inference engine uses it: which series prices a kernel or a collective, and how sure it is.

Whatever the calibration lacks is priced by what completes it, such as efficiencies carried over from another machine;
what that lacks too is None here, and the hardware file's medians are the fallback.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Literal, NamedTuple

from sim.arrays import Lanes, larger
from sim.prices.calibration import COMBINE_EACH, DISPATCH_EACH, FEW_EXPERTS, WIDEST_GROUP, Calibration, is_plain
from sim.prices.dtypes import BYTES, Dtype
from sim.prices.kernel_fallbacks import (
    AITER,
    EXPERT_KERNELS,
    SUMMED_AS,
    Source,
    all_reduce_libraries,
    leaning,
    newest_series,
    slower_by,
    sources,
)
from sim.prices.mixer_shapes import Convolution, SparseAttention, StateScan
from sim.prices.priced import UNSURE, Interval, PricedKernel, error_interval, mean_error, together, wider


class Gemm(NamedTuple):
    """C[rows, columns] = A[rows, inner] B[inner, columns]."""

    rows: float
    inner: float
    columns: float


class GroupedGemm(NamedTuple):
    """Rows of all experts of a GPU through the [inner, columns] weights of the `active` among its `local` ones.

    `skewed`: real prompts prefer some experts, so that the busiest GPU takes longer than under even routing.
    """

    rows: float
    inner: float
    columns: float
    active: float
    local: float
    gated: bool
    skewed: bool = False


class DecodeAttention(NamedTuple):
    """One new token per sequence; heads are those of one GPU.

    `multi_head`: the model shares no KV heads. `windowed`: `kv_len` is what a sliding window lets it see.
    """

    sequences: float
    kv_len: float
    heads: float
    kv_heads: float
    head_dim: float
    multi_head: bool
    windowed: bool = False


class PrefillAttention(NamedTuple):
    """Causal attention over the new tokens of each sequence; heads are those of one GPU.

    `windowed`: under a sliding window, as the chunks of `sim.prices.terms.window_as_chunks`.
    """

    sequences: float
    tokens: float
    heads: float
    kv_heads: float
    head_dim: float
    windowed: bool = False


class LatentDecode(NamedTuple):
    """One new token per sequence over DeepSeek's latents, 512 + 64 wide; every engine's kernel is priced alike."""

    sequences: float
    kv_len: float
    heads: float


class ExpertRouting(NamedTuple):
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


KernelShape = (
    Gemm
    | GroupedGemm
    | DecodeAttention
    | PrefillAttention
    | LatentDecode
    | SparseAttention
    | Convolution
    | StateScan
    | ExpertRouting
    | Permute
    | ExpertActivation
)


MEMOISED = 1 << 15
"""Prices of a kind that are kept: strategies share most, as degrees and batches come from short tables."""
_KINDS = {"all_to_all": "alltoall"}
DeepepMode = Literal["auto", "low_latency", "normal"]
"""DeepEP's kernels: those of low latency for few tokens and the others beyond (as SGLang's and vLLM's decoding and
prompts have them), or one kind always."""
LOW_LATENCY_TOKENS = 1024
"""Most tokens per rank that low-latency kernels take. [assumed] above what SGLang reserves buffers for."""
_NORMAL_SMS = 24
"""Streaming multiprocessors that DeepEP's normal kernels may use. [published] DeepEP's default."""
_FAMILIES = {
    "gemm": "GEMM",
    "attention_decode": "attention",
    "attention_prefill": "attention of prompts",
    "mla_decode": "latent attention",
    "moe": "experts",
    "collectives": "collective inside a node",
    "moe_alltoall_deepep": "expert all-to-all",
    "send_recv": "send and receive",
    "sparse_attention": "sparse attention",
    "state": "linear mixers",
}
_SIZES = {
    "m": "rows",
    "n": "columns",
    "k": "inner width",
    "batch_size": "sequences",
    "isl": "prompt length",
    "kv_len": "context",
    "step": "context",
    "seq_len": "prompt length",
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
_BY_ENGINE = ("gemm", "attention_decode", "attention_prefill", "moe", "sparse_attention", "state")
"""Families whose series are an engine's own."""
CARRIED_OVER: Interval = (0.8, 1.6)
"""Of efficiencies carried over from another machine, wider on the slow side: they are an ideal, for kernels as well
tuned for the new machine, and clocks and power limits differ. [assumed] for chips of one family"""
_WIDE = f"attention of more than {WIDEST_GROUP} query heads per KV head"
"""Another kernel, up to 15 times slower in TensorRT-LLM; no row says where between 32 and 48 heads it takes over."""


class CarriedOver(NamedTuple):
    """How sure efficiencies are that were measured on another machine.

    Attributes:
        interval: Factors on a time, on top of those of the kernel.
        bias: To which side they probably err, or "".
    """

    interval: Interval = CARRIED_OVER
    bias: str = ""


class Curves:
    """The curves of one engine.

    Attributes:
        calibration: Where they come from.
        engine: "trtllm", "vllm" or "sglang".
        all_reduce: Whose all-reduce runs inside a node: an engine's own, "nccl" or "fastest"; or one algorithm.
        uncalibrated: Relative error of a series that was never cross-validated.
        extrapolated: Least relative error beyond what was measured.
        carried_over: How sure they are on a machine that they were not measured on.
        rest: Curves of what completes the calibration, for what it lacks; or None.
    """

    def __init__(
        self,
        calibration: Calibration,
        engine: str,
        all_reduce: str,
        uncalibrated: float = 0.35,  # [assumed] as for what is priced by medians
        extrapolated: float = 0.30,  # [assumed]
        carried_over: CarriedOver = CarriedOver(),  # noqa: B008 immutable
    ) -> None:
        self.calibration = calibration
        self.engine = engine
        self.all_reduce = all_reduce
        self.uncalibrated = uncalibrated
        self.extrapolated = extrapolated
        self.carried_over = carried_over
        beside, errors = calibration.rest, (uncalibrated, extrapolated, carried_over)
        self.rest = None if beside is None else Curves(beside, engine, all_reduce, *errors)
        self._libraries = all_reduce_libraries(all_reduce)
        self._newest = newest_series(calibration.series, SUMMED_AS.get(all_reduce))
        self._series_of = lru_cache(maxsize=None)(self._find)
        self._trusted = lru_cache(maxsize=None)(self._find_trusted)

    def __reduce__(self) -> tuple[object, ...]:
        errors = (self.uncalibrated, self.extrapolated, self.carried_over)
        return Curves, (self.calibration, self.engine, self.all_reduce, *errors)

    def under(self, calibration: Calibration | None = None, engine: str = "", all_reduce: str = "") -> Curves:
        """The same errors with another calibration, or another engine's kernels."""
        chosen = (calibration or self.calibration, engine or self.engine, all_reduce or self.all_reduce)
        return Curves(*chosen, self.uncalibrated, self.extrapolated, self.carried_over)

    # --- kernels ---------------------------------------------------------------------------------

    def kernel(self, shape: KernelShape, math_dtype: Dtype, stream_dtype: Dtype) -> PricedKernel | None:
        """Seconds of a kernel, or None if the calibration knows nothing like it."""
        priced = self._own_kernel(shape, math_dtype, stream_dtype)
        return self.rest.kernel(shape, math_dtype, stream_dtype) if priced is None and self.rest else priced

    def _own_kernel(self, shape: KernelShape, math_dtype: Dtype, stream_dtype: Dtype) -> PricedKernel | None:
        if isinstance(shape, Gemm):
            return self._gemm(shape, math_dtype)
        if isinstance(shape, DecodeAttention):
            return self._decode(shape, stream_dtype)
        if isinstance(shape, PrefillAttention):
            return self._prefill(shape, math_dtype, stream_dtype)
        if isinstance(shape, LatentDecode):
            return self._latent(shape, stream_dtype)
        if isinstance(shape, SparseAttention):
            return self._sparse(shape, stream_dtype)
        if isinstance(shape, Convolution | StateScan):
            return self._state(shape)
        return self._expert_kernel(shape, math_dtype if isinstance(shape, GroupedGemm) else shape.dtype)

    def _gemm(self, shape: Gemm, dtype: str) -> PricedKernel | None:
        series = self._series_of("gemm", dtype)
        if series is None:
            return None
        _, engine, priced_as = series.split("/")
        time_us = self.calibration.gemm_us(engine, priced_as, shape.rows, shape.columns, shape.inner)
        return self._priced(series, time_us, (shape.rows, shape.columns, shape.inner), dtype)

    def _decode(self, shape: DecodeAttention, dtype: str) -> PricedKernel | None:
        sequences, kv_len, heads, kv_heads, head_dim, multi_head, windowed = shape
        series = self._series_of("attention_decode", dtype, "mha" if multi_head else "gqa")
        if series is None:
            return None
        _, engine, priced_as, _ = series.split("/")
        time_us = self.calibration.attention_decode_us(
            engine, priced_as, *shape[:5], multi_head=multi_head, windowed=windowed
        )
        series = self.calibration.windowed(series, windowed)
        sizes = (sequences, kv_len, heads, kv_heads, head_dim)
        if multi_head or heads <= WIDEST_GROUP * kv_heads:
            return self._priced(series, time_us, sizes, dtype)
        measured = self.calibration.windowed(f"attention_decode/{engine}/{priced_as}/wide", windowed)
        if measured in self.calibration.series:
            series = measured
        wide = self._priced(series, time_us, sizes, dtype)
        return wide if wide.extrapolated else self.beyond(wide, _WIDE)

    def _prefill(self, shape: PrefillAttention, math_dtype: Dtype, kv_dtype: Dtype) -> PricedKernel | None:
        series = self._series_of("attention_prefill", kv_dtype, math_dtype)
        if series is None:
            return None
        _, engine, arithmetic, priced_as = series.split("/")
        time_us = self.calibration.attention_prefill_us(engine, arithmetic, priced_as, *shape)
        series = self.calibration.windowed(series, shape.windowed)
        return self._priced(series, time_us, shape[:5], kv_dtype)

    def _latent(self, shape: LatentDecode, kv_dtype: Dtype) -> PricedKernel | None:
        series = self._series_of("mla_decode", kv_dtype)
        if series is None:
            return None
        engine = "".join(series.split("/")[1:-1])
        priced_as = series.rpartition("/")[2]
        return self._priced(series, self.calibration.mla_decode_us(priced_as, *shape, engine=engine), shape, kv_dtype)

    def _sparse(self, shape: SparseAttention, kv_dtype: Dtype) -> PricedKernel | None:
        series = self._of_any_engine("sparse_attention", shape.series, (kv_dtype, "fp8", "bf16"))
        if series is None:
            return None
        time_us = self.calibration.sparse_attention_us(series, shape[2:])
        sizes = (shape.sequences, shape.tokens, shape.cached, shape.heads)
        return self._priced(series, time_us, sizes, kv_dtype)

    def _state(self, shape: Convolution | StateScan) -> PricedKernel | None:
        phase, part = "context" if shape.prompts else "generation", "conv" if isinstance(shape, Convolution) else "scan"
        own = self._of_any_engine("state", f"{shape.kind}_{phase}", (part,))
        series = own or self._of_any_engine("state", f"gdn_{phase}", (part,))
        if series is None:
            return None
        sizes, price = (shape.sequences, shape.tokens), self.calibration
        time_us = (
            price.convolution_us(series, *sizes, shape.width)
            if isinstance(shape, Convolution)
            else price.state_scan_us(series, shape[2:])
        )
        return self._priced(series, time_us, sizes, part, unmeasured="" if own else f"{shape.kind} priced as {series}")

    def _of_any_engine(self, family: str, measured: str, endings: tuple[str, ...]) -> str | None:
        """The engine's own series of what was measured, else another engine's, the first of the endings first."""
        engines = dict.fromkeys((self.engine, "vllm", "sglang", "trtllm"))
        names = (f"{family}/{engine}/{measured}/{ending}" for ending in endings for engine in engines)
        return next((name for name in names if name in self.calibration.series), None)

    def _expert_kernel(
        self, shape: GroupedGemm | ExpertRouting | Permute | ExpertActivation, dtype: str
    ) -> PricedKernel | None:
        series = self._series_of("moe", dtype, "gated" if shape.gated else "plain")
        if series is None:
            return None
        curves, sizes, few, unmeasured = self.calibration, (), False, ""
        match shape:
            case GroupedGemm(rows, inner, columns, active, local, gated, skewed):
                sizes = (rows, inner * columns, local)
                few = local <= FEW_EXPERTS
                unmeasured = self._beyond_measured_layers(series, inner, columns / (2 if gated else 1), columns)
                measured_as = series.rpartition("/")[2]
                priced_as = dtype if BYTES[dtype] != BYTES[measured_as] else measured_as
                time_us = curves.grouped_gemm_us(series, rows, active, local, inner, columns, priced_as, skewed=skewed)
            case ExpertRouting(tokens, experts, topk):
                time_us = curves.moe_routing_us(series, tokens, experts, topk)
            case Permute(tokens, rows, hidden):
                time_us = curves.moe_permute_us(series, tokens, rows, hidden)
            case ExpertActivation(rows, width):
                time_us = curves.moe_activation_us(series, rows, width)
        return self._priced(series, time_us, sizes, dtype, few=few, unmeasured=unmeasured)

    def _beyond_measured_layers(self, series: str, inner: float, half: float, columns: float) -> str:
        """What says that no measured layer has such a GEMM, neither as its first nor as its second, or ""."""
        ranges = self.calibration.series[series].get("range", {})
        if "width_per_hidden" not in ranges or isinstance(inner, Lanes) or isinstance(columns, Lanes):
            return ""
        for hidden, width in ((inner, half), (columns, inner)):
            layer = {"hidden": hidden, "width": width, "width_per_hidden": width / hidden}
            if all(ranges[name][0] <= size <= ranges[name][1] for name, size in layer.items()):
                return ""
        return "experts of unmeasured widths"

    # --- messages ----------------------------------------------------------------------------------

    def collective(self, kind: str, degree: int, tensor_bytes: float) -> PricedKernel | None:
        """A collective inside a node on a tensor of `tensor_bytes` over the group, or None."""
        message_bytes = tensor_bytes / degree if kind == "all_to_all" else tensor_bytes
        if kind == "all_reduce" and self.all_reduce in SUMMED_AS:
            return self._by_algorithm(degree, message_bytes)
        libraries = self._libraries if kind == "all_reduce" else ("nccl",)
        found = [self._collective_of(library, _KINDS.get(kind, kind), degree, message_bytes) for library in libraries]
        return min([priced for priced in found if priced], default=None)  # by time

    def _by_algorithm(self, degree: int, message_bytes: float) -> PricedKernel | None:
        """NCCL's all-reduce of the format that it sums by one algorithm, or at best by that; see `SUMMED_AS`."""
        if self._newest is None:
            return self.rest._by_algorithm(degree, message_bytes) if self.rest else None
        time_us = self.calibration.collective_us(self._newest, "all_reduce", degree, message_bytes)
        found = self._priced(self._newest, time_us, (message_bytes, degree), "")
        return found._replace(algorithm=f"{self.all_reduce}, measured")

    def _collective_of(self, library: str, name: str, degree: int, message_bytes: float) -> PricedKernel | None:
        series = f"collectives/{name}/{library}"
        if series not in self.calibration.series:
            return self.rest._collective_of(library, name, degree, message_bytes) if self.rest else None
        time_us = self.calibration.collective_us(series, name, degree, message_bytes)
        return self._priced(series, time_us, (message_bytes, degree), "")._replace(algorithm=f"{library}, measured")

    def expert_all_to_all(
        self,
        side: str,
        tokens: float,
        columns: float,
        each: float,
        experts: int,
        topk: int,
        per_node: int,
        nodes: int,
        mode: DeepepMode = "auto",
    ) -> PricedKernel | None:
        """DeepEP's dispatch or combine, or None: low-latency kernels for few tokens, normal ones beyond.

        Args:
            side: "dispatch" or "combine".
            tokens: Tokens of one rank.
            columns: Hidden columns sent of each.
            each: Bytes per element; fp8 brings its scales along.
            experts: Experts of the layer.
            topk: Experts that a token visits.
            per_node: Ranks of the group on a node; within one node the copies that stay on a rank cost nothing.
            nodes: Nodes of the group.
            mode: "low_latency" or "normal": one kind whatever the tokens, where it was measured.
        """
        tier = "intra" if nodes == 1 else "inter"
        few = f"moe_alltoall_deepep/low_latency/{side}/0/{tier}"
        many = f"moe_alltoall_deepep/normal/{side}/{_NORMAL_SMS}/{tier}"
        width_bytes = columns * (DISPATCH_EACH if each == 1 else COMBINE_EACH)
        shape = (width_bytes, experts, topk, nodes)
        host_gpus = self.calibration.measured.host_gpus
        sent_share = 1.0 if nodes > 1 else (per_node - 1) / per_node * host_gpus / (host_gpus - 1)
        sizes, price = (tokens, columns, topk, experts, nodes), self.calibration.expert_all_to_all_us
        time_us = 0.0
        if few in self.calibration.series:
            normal = many in self.calibration.series and (
                mode == "normal" or (mode == "auto" and tokens > LOW_LATENCY_TOKENS)
            )
            if mode != "normal":
                time_us = price(side, (LOW_LATENCY_TOKENS if normal else tokens) * sent_share, *shape)
            if not normal:
                return self._priced(few, time_us, sizes, "")
        if many not in self.calibration.series:
            beside = self.rest
            rest = (side, tokens, columns, each, experts, topk, per_node, nodes, mode)
            return beside and beside.expert_all_to_all(*rest)
        # More tokens never take less: at the switch the normal kernels may, by the curves.
        time_us = larger(time_us, price(side, tokens * sent_share, *shape, mode="normal", sms=_NORMAL_SMS))
        return self._priced(many, time_us, sizes, "")

    def send_recv(self, *, same_node: bool, sent_bytes: float) -> PricedKernel | None:
        """Point to point between stages, or None."""
        tier = "intra" if same_node else "inter"
        if f"send_recv/{tier}" not in self.calibration.series:
            return self.rest.send_recv(same_node=same_node, sent_bytes=sent_bytes) if self.rest else None
        time_us = self.calibration.send_recv_us(tier, sent_bytes)
        return self._priced(f"send_recv/{tier}", time_us, (sent_bytes,), "")

    # --- series ------------------------------------------------------------------------------------

    def _find(self, family: str, dtype: str, variant: str = "") -> str | None:
        """The series that prices a kernel of the engine: its own, or the nearest fallback, or None.

        Args:
            family: As the first part of the series' name.
            dtype: Format of weights or KV cache.
            variant: Of decode attention "gqa" or "mha", of experts "gated" or "plain", of prefill the arithmetic.
        """
        found = (self._series_from(family, source, variant) for source in sources(family, self.engine, dtype))
        return next((series for series in found if series), None)

    def _series_from(self, family: str, source: Source, variant: str) -> str | None:
        known, (engine, dtype) = self.calibration.series, source
        match family:
            case "gemm":
                names = [f"gemm/{engine}/{dtype}"]
            case "attention_decode":
                names = [f"attention_decode/{engine}/{dtype}/{variant}"]
            case "mla_decode":
                names = [f"mla_decode/{engine}/{dtype}", f"mla_decode/{dtype}"]
            case "attention_prefill":
                names = [f"attention_prefill/{engine}/{arithmetic}/{dtype}" for arithmetic in (variant, "bf16")]
            case _:
                return self._expert_series(source, gated=variant == "gated")
        return next((name for name in names if name in known), None)

    def _expert_series(self, source: Source, *, gated: bool) -> str | None:
        """The kernel that the engine runs, if it is known and measured, else the one of most rows."""
        known, (engine, dtype) = self.calibration.series, source
        own = [name for name in known if name.startswith(f"moe/{engine}/") and name.endswith(f"/{dtype}")]
        alike = [name for name in own if is_plain(name) != gated] or own
        usual = [f"moe/{engine}/{kernel}/{dtype}" for kernel in EXPERT_KERNELS.get(source, ())]
        if ran := next((name for name in usual if name in alike), None):
            return ran
        return max(alike, key=lambda name: (known[name].get("rows", 0), name), default=None)

    def _find_trusted(self, series: str, dtype: str, *, few: bool) -> _Trusted:
        record = self.calibration.series[series]
        parts = series.split("/")
        fallback = ""
        if parts[0] in _BY_ENGINE and (dtype not in parts or parts[1] not in (self.engine, AITER)):
            fallback = f"{self.engine} {dtype} priced as {series}"
        elif on := record.get("measured_on"):
            fallback = f"{self.engine} {dtype} {_FAMILIES[parts[0]]} as measured on {on}"
        inside = record.get("mape"), (few and record.get("interval_of_few")) or record.get("interval")
        error = self.uncalibrated if inside[0] is None else float(inside[0])
        interval = error_interval(error) if inside[1] is None else (float(inside[1][0]), float(inside[1][1]))
        ranges = tuple((low, high) for low, high in record.get("range", {}).values())
        return _Trusted(error, interval, ranges, fallback)

    def _priced(
        self,
        series: str,
        time_us: float,
        sizes: tuple[float, ...],
        dtype: str,
        *,
        few: bool = False,
        unmeasured: str = "",
    ) -> PricedKernel:
        """Attaches the error of a series and says which of its sizes lie outside what was measured; not of lanes."""
        if isinstance(time_us, Lanes):
            return PricedKernel(time_us * 1e-6, *UNSURE)
        error, interval, ranges, fallback = self._trusted(series, dtype, few=few)
        unmeasured = unmeasured or fallback
        for index, ((low, high), size) in enumerate(zip(ranges, sizes)):  # noqa: B905 fewer sizes than columns are fine
            if not low <= size <= high:
                name = list(self.calibration.series[series]["range"])[index]
                unmeasured = f"{_FAMILIES[series.split('/')[0]]} beyond measured {_SIZES.get(name, name)}"
                break
        priced = PricedKernel(time_us * 1e-6, error, interval)
        if unmeasured:
            priced = self.beyond(priced, unmeasured + leaning(dtype))
            priced = priced._replace(interval=(priced.interval[0], priced.interval[1] * slower_by(dtype)))
        if origin := self.calibration.data.get("scaled_from"):
            what, (factors, bias) = f"efficiencies carried over from {origin}", self.carried_over
            carried = together(priced.interval, factors)
            priced = self.beyond(priced, f"{what}, {bias}" if bias else what)
            priced = priced._replace(interval=carried, error=max(priced.error, mean_error(factors)))
        return priced

    @property
    def other_machine(self) -> str:
        """The machine that these efficiencies, or what completes them, were measured on, if it is another; else ""."""
        return self.calibration.data.get("scaled_from") or (self.rest.other_machine if self.rest else "")

    def beyond(self, priced: PricedKernel, what: str) -> PricedKernel:
        """The same as something that no measurement covers: less sure."""
        error = max(priced.error, self.extrapolated)
        return PricedKernel(priced.time_s, error, wider(priced.interval, error_interval(error)), what)


class _Trusted(NamedTuple):
    """What is known of a series that prices a dtype: how sure, measured range per size, which fallback."""

    error: float
    interval: Interval
    ranges: tuple[tuple[float, float], ...]
    fallback: str
