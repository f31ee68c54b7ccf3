"""Rows of measured serving runs as strategies on workloads: model, engine, precisions and degrees."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any, Literal, cast

import pandas as pd

from raysearch.fidelity.calibration.server_settings import AS_SHIPPED, ServerSettings, published_settings
from sim.config.catalog import load_model
from sim.engines.engine_registry import engine_rules
from sim.json_object import JsonFields
from sim.layers.model import Model
from sim.ops.heuristics import megatron_dims
from sim.prices.dtypes import Dtype
from sim.prices.engine import BARE, Engine, EngineTimes, MemoryPolicy
from sim.prices.hardware import EngineName, Hardware
from sim.serving.acceptance import accepted_drafts
from sim.strategy import Strategy
from sim.workload import DegreeTables, ExpertExchange, PhaseName, Precisions, Routing, Speculation, Workload

_MODELS: tuple[tuple[str, str, Dtype], ...] = (
    # pattern in a model's name, file in configs/models, format in which it is published
    (r"deepseek-(v3|r1)", "deepseek_v3", "fp8_block"),
    (r"glm-5", "glm_5", "bf16"),
    (r"gpt-oss-120b", "gpt_oss_120b", "bf16"),
    (r"kimi-k2\.5", "kimi_k2_5", "bf16"),
    (r"minimax-m2", "minimax_m2_5", "fp8_block"),
    (r"qwen3-235b.*fp8", "qwen3_235b_a22b", "fp8_block"),
    (r"qwen3-235b", "qwen3_235b_a22b", "bf16"),
    (r"qwen3\.5-397b", "qwen3_5_397b_a17b", "bf16"),
    (r"qwen3-32b.*fp8", "qwen3_32b", "fp8_block"),
    (r"qwen3-32b", "qwen3_32b", "bf16"),
    (r"llama-2-70b", "llama_2_70b", "bf16"),
    (r"llama-?3.*405b", "llama_3_1_405b", "bf16"),
    (r"llama-?3.*70b", "llama_3_1_70b", "bf16"),
    (r"llama-?3.*8b", "llama_3_1_8b", "bf16"),
    (r"llama-?4.*scout", "llama_4_scout", "bf16"),
    (r"llama-?4.*maverick", "llama_4_maverick", "bf16"),
    (r"mixtral-8x22b", "mixtral_8x22b", "bf16"),
    (r"mixtral-8x7b", "mixtral_8x7b", "bf16"),
    (r"mistral-7b", "mistral_7b", "bf16"),
)


CLIENT_OF_512 = 512
"""Requests that InferenceX's script of gpt-oss-120b on H100 held open whatever step of the sweep it ran.

[published] SemiAnalysisAI/InferenceX: benchmarks/gptoss_fp4_h100_docker.sh starts vLLM with `--max-num-seqs=$CONC` and
asynchronous scheduling and sends `CONC * 10` requests; from pull request 227 to 310 (merged 2025-12-08, which calls it
a bug) its client ran with `--max-concurrency 512`. Such a row states the client's 512 and nowhere the server's limit.
"""
SWEPT = (4, 8, 16, 32, 64)
"""[published] Steps of that sweep, .github/configs/master.yaml, gptoss-fp4-h100-vllm: conc-start 4, conc-end 64."""


MeasuredMachine = Callable[[EngineName], Hardware]
"""The hardware on which a run was measured, with the kernels of an engine."""
_NO_SEARCH = DegreeTables((1,), (1,), (1,), (1,))
_ENGINES: tuple[EngineName, ...] = ("trtllm", "vllm", "sglang")
_FORMATS: Mapping[str, Dtype] = {
    "fp8": "fp8",
    "fp8_block": "fp8_block",
    "bfloat16": "bf16",
    "float16": "bf16",
    "nvfp4": "nvfp4",
    "mxfp4": "mxfp4",
    "int4_wo": "int4",
}
"""Names of a row's quantisation -> the format that runs; an empty cell means as published."""


@dataclass(frozen=True, slots=True)
class Skipped:
    """A row that is not priced, and why."""

    reason: str


@dataclass(frozen=True, slots=True)
class ServingRun:
    """A measured deployment, as the strategy and the workload that `sim.simulate.evaluate` takes.

    Attributes:
        strategy: Degrees, requests in flight over all attention ranks, and the engine's dims.
        backend: The engine, whatever its version.
        engine: Its name in the fitted serving parameters.
        generation: The same of releases that are fitted for themselves where runs of all machines are.
        scored_alone: Whether it is validated like any, but no time is fitted to it.
        stated: Requests in flight as the row states them.
        states_its_batch: Whether that is what the server ran; else its own limit is not in the row.
        replicas: Copies of a dense model that share nothing, of which the strategy is one.
        redundant_experts: Copies of experts, placed with them by their loads (EPLB).
        two_batch_overlap: Whether half batches overlapped.
        speculation: What was drafted, if anything.
        memory_share: Share of the GPU's memory that the server was set to take; None for its default.
        prompt_wait_steps: Most steps that a prompt waits for those of other attention groups.
        server: What decides when requests have their first token.
        reread: Where the run is not what the row says word for word, and how it was read.
    """

    model: Model
    prompt_tokens: int
    output_tokens: int
    weights: Dtype
    kv_cache: Dtype
    strategy: Strategy
    backend: str
    engine: str
    stated: int
    states_its_batch: bool = True
    replicas: int = 1
    phase: PhaseName = "serve"
    expert_exchange: ExpertExchange = "all_gather"
    routing: Routing = "skewed"  # as real prompts show
    redundant_experts: int = 0
    two_batch_overlap: bool = False
    speculation: Speculation | None = None
    memory_share: float | None = None
    prompt_wait_steps: int = 0
    generation: str = ""
    scored_alone: bool = False
    server: ServerSettings = AS_SHIPPED
    reread: tuple[str, ...] = ()

    @property
    def gpus(self) -> int:
        """GPUs of all replicas."""
        return self.strategy.gpus * self.replicas

    @property
    def kernels(self) -> EngineName:
        """Whose kernels run."""
        return cast(EngineName, self.backend)

    def workload(
        self, machine: MeasuredMachine, times: EngineTimes = BARE, memory: MemoryPolicy | None = None
    ) -> Workload:
        """What was served, under an engine's own times."""
        memory = memory or engine_rules(self.kernels).memory
        if self.memory_share is not None:
            memory = replace(memory, share=max(memory.share, self.memory_share))
        return Workload(
            name="measured",
            model=self.model,
            hardware=machine(self.kernels),
            phase=self.phase,
            context_tokens=self.prompt_tokens + self.output_tokens // 2,
            tpot_slo_s=math.inf,
            max_gpus=10**9,
            precisions=Precisions(self.weights, self.kv_cache, "bf16", "fp8"),
            load_imbalance=1.0,
            degrees=_NO_SEARCH,
            config_hash="",
            prompt_tokens=self.prompt_tokens,
            output_tokens=self.output_tokens,
            engine=Engine(self.engine, times, memory),
            routing=self.routing,
            expert_exchange=self.expert_exchange,
            redundant_experts=self.redundant_experts,
            two_batch_overlap=self.two_batch_overlap,
            speculation=self.speculation,
            prompt_wait_steps=self.prompt_wait_steps,
        )


def strategy_of_run(model: Model, concurrency: int, tp: int, dp: int, moe_ep: int) -> tuple[Strategy, int]:
    """(strategy, replicas) of engines' degrees; attention data-parallelism of a dense model is so many replicas."""
    if model.is_moe:
        return Strategy(tp, moe_ep, 1, concurrency, megatron_dims(model), dp=dp), 1
    return Strategy(tp, 1, 1, max(1, round(concurrency / dp)), megatron_dims(model)), dp


@lru_cache(maxsize=64)
def known_model(name: str) -> tuple[Model, Dtype] | None:
    """The model behind a published name and the format it is published in, or None."""
    for pattern, file, published in _MODELS:
        if re.search(pattern, name.lower()):
            return load_model(file), published
    return None


def engine_of(backend: str, version: Any) -> str:
    """The engine's name in the serving parameters.

    vLLM schedules the next step while the GPU computes this one by default since 0.14 (vllm-project/vllm#31998 names
    the default); before, the scheduler's time is added to every step. An unknown version counts as current.
    """
    match = re.match(r"(\d+)\.(\d+)", str(version))
    if backend == "vllm" and match and (int(match[1]), int(match[2])) < (0, 14):
        return "vllm<0.14"
    return backend


_GENERATIONS: Mapping[str, tuple[tuple[tuple[int, ...], str], ...]] = {
    # engine -> the first release of each later generation, and the month or day on which runs first used it
    "vllm": (((0, 14), "2026-01"), ((0, 18), "2026-03")),
    "trtllm": (((1, 2), "2026-01"),),
    "sglang": (((0, 5, 7), "2026-01"), ((0, 5, 11), "2026-05-16")),
}
"""Releases between which the same configuration grew 10 to 25 % faster, on B300 three times at the last of SGLang's:
runs of 13 and 15 May took as long as those of April, of the 17th a third. [fitted: runs of H200, B200 and B300]"""


def generation_of(backend: str, version: Any, measured: Any) -> str:
    """The engine and, of all generations but the newest, the release before which it was: "vllm<0.18".

    Where no release is stated, as of a build of some day, the date of the run says which it can have been; without one
    it counts as the newest.

    >>> generation_of("trtllm", "1.1.0rc2.post2", ""), generation_of("sglang", "nightly-dev-20260216", "2026-02-20")
    ('trtllm<1.2', 'sglang<0.5.11')
    """
    stated = str(version).removeprefix("v").partition("rc")[0]
    numbers = tuple(int(part) for part in re.findall(r"\d+", stated)[:3]) if re.match(r"\d+\.\d", stated) else ()
    when = str(measured)
    dated = not numbers and bool(re.match(r"\d{4}-\d{2}", when))
    for release, month in _GENERATIONS.get(backend, ()):
        if (numbers and numbers[: len(release)] < release) or (dated and when < month):
            return f"{backend}<{'.'.join(map(str, release))}"
    return backend


def agg_run(row: JsonFields) -> ServingRun | Skipped:
    """A row of endtoend_ttft_tpot.csv with mode agg, or why it cannot be priced.

    The identity attention_tp * attention_dp = moe_tp * moe_ep fixes the degree that a row leaves out. Engines switch
    attention data-parallelism on with a flag and go on counting all GPUs of a replica as their tensor-parallel size, so
    a row whose attention_dp_size equals its tp_size is that many GPUs, not their product: such rows take as long as
    plain tensor parallelism over tp_size GPUs does.
    """
    served = _served(row)
    if isinstance(served, Skipped):
        return served
    model, weights, reread = served
    concurrency, per_rank = _number(row["concurrency"]), _number(row["batch_size"])
    if not (concurrency or per_rank):
        return Skipped("it states neither a concurrency nor a batch")
    if (stages := _number(row.get("pp_size"))) > 1:
        return Skipped(f"it runs {stages} pipeline stages, whose microbatches it does not state")
    tp = _number(row["tp_size"]) or 1
    dp = _number(row["attention_dp_size"])
    names_dp = dp > 0
    moe_tp, moe_ep = _number(row["moe_tp_size"]) or 1, _number(row["moe_ep_size"]) or 1
    if _counts_expert_parallelism_twice(row):
        reread += (f"{tp * dp} GPUs read as {moe_ep}: the product counts expert parallelism twice",)
        tp, dp, moe_tp = (moe_ep, 1, 1) if dp == 1 else (1, moe_ep, 1)
    if model.heads % tp:
        return Skipped(f"no engine cuts {model.heads} heads over {tp} GPUs: these are the GPUs of several workers")
    if not dp and model.is_moe and _is_inferencex(row) and moe_tp * moe_ep > tp:
        dp = moe_tp * moe_ep // tp
    shares = max(1, concurrency // per_rank) if per_rank else 1
    apart = not model.is_moe or row.get("source") == _ON_64_GPUS
    if not dp:
        dp = 1 if apart else shares
    workers = shares if apart else 1
    gpus = tp * dp
    counts_all_gpus = moe_tp * moe_ep == tp and tp % dp == 0
    if model.is_moe and dp > 1 and (counts_all_gpus or (names_dp and dp == tp)):
        if not counts_all_gpus:
            reread += (f"attention_dp_size = tp_size = {tp} read as the engine's flag: {tp} GPUs, not {gpus}",)
        tp, gpus = tp // dp, tp
    if model.is_moe and moe_tp * moe_ep != gpus:
        moe_tp = moe_tp if gpus % moe_tp == 0 else gpus
        moe_ep = gpus // moe_tp
    if not model.is_moe:
        moe_tp, moe_ep = gpus, 1
    stated = concurrency or per_rank * dp
    hidden = _hides_the_servers_limit(row, model, stated)
    batch = SWEPT[len(SWEPT) // 2] if hidden else stated
    if dp == 1 < workers:
        batch, reread = per_rank, (*reread, f"{stated} requests of {workers} workers read as {per_rank} of each")
    if hidden:
        reread += (f"the client's {stated} requests at once read as a server that admits {batch}",)
    strategy, replicas = strategy_of_run(model, batch, tp, dp, moe_ep)
    backend = str(row["backend"])
    speculation = _drafted(row, model, dp, stated)
    if speculation:
        reread += (f"{speculation.draft_tokens} tokens drafted per step, as published of its image",)
    cached = row.get("source") == _CACHED_PROMPTS
    if cached:
        reread += ("prompts read as cached: at once they would take up to 2.3 times as long as their requests did",)
    return ServingRun(
        model,
        int(row["isl"]),
        int(row["osl"]),
        weights,
        _kv_cache(row, model, weights),
        strategy,
        backend,
        "vllm" if hidden else engine_of(backend, row["backend_version"]),
        stated,
        not hidden,
        replicas * (workers if dp == 1 else 1),
        scored_alone=row.get("source") in _SCORED_ALONE,
        speculation=speculation,
        memory_share=_MOST_MEMORY if _is_inferencex(row) else None,
        phase="decode" if cached else "serve",
        generation=generation_of(backend, row["backend_version"], row.get("measured", "")),
        prompt_wait_steps=_BALANCED_WAIT if _is_inferencex(row) and backend == "trtllm" and dp > 1 else 0,
        server=_settings(row, backend, model, speculation, gpus, stated, dp),
        reread=reread,
    )


def _settings(
    row: JsonFields, backend: str, model: Model, drafted: Speculation | None, gpus: int, clients: int, dp: int
) -> ServerSettings:
    if not _is_inferencex(row):
        return AS_SHIPPED
    return published_settings(
        backend,
        str(row.get("system", "")),
        model.name,
        four_bits=str(row["gemm_quant_mode"]) in ("nvfp4", "mxfp4"),
        draft_tokens=drafted.draft_tokens if drafted else 0,
        gpus=gpus,
        prompt_tokens=int(row["isl"]),
        clients=clients,
        requests_per_rank=math.ceil(clients / dp),
        newest=generation_of(backend, row["backend_version"], row.get("measured", "")) == backend,
    )


_CACHED_PROMPTS = "InferenceX export nvidia_Llama-3.1-8B-Instruct-FP8.csv"
"""A sweep whose prompts vLLM's prefix cache must have held: no other run took less time than its prompts alone."""
_SCORED_ALONE = ("InferenceX export tensorrtllm-runtime:0.9.0", "InferenceX export tensorrtllm-runtime:0.8.0")
"""Exports of Qwen3-32B on GB200 that no time is fitted to. Two sweeps whose times per token rise and fall with the load
(8, 21, 51, 94, 103, 133, 72 ms from 1 to 128 clients): no curve that rises is less than 16 % off, where those of other
sweeps are within 1 %. Three runs that state what a batch may hold but no clients, and 17 to 54 s to the first token."""
_ON_64_GPUS = "InferenceX export tensorrtllm-runtime:0.8.1"
"""An export whose every deployment fills 64 GPUs, so that what clients send is shared out over workers: 32 of TP2, 40
of TP1 beside 6 of TP4, and 8 of TP8. Read as 8 attention ranks, that one would beat runs of a third of its load."""
_BALANCED_WAIT = 60
"""[published] timeout_iters of attention_dp_config in InferenceX's scripts, with enable_balance."""
_MOST_MEMORY = 0.95
"""[assumed] share of memory that InferenceX's servers take: each script sets its own, and all stated requests ran."""


def _drafted(row: JsonFields, model: Model, dp: int, requests: int) -> Speculation | None:
    """What a row of InferenceX drafted with the layers of multi-token prediction, which no column states.

    [published] SemiAnalysisAI/InferenceX, .github/configs/nvidia-master.yaml (March 2026): dsr1-*-trt-mtp ran in image
    1.2.0rc6.post3, and before that on 2026-01-14 in 1.1.0rc2.post2, alone with attention data-parallelism from 128
    requests on; dsr1-fp8-b200-sglang stops at 64 requests, with prompts of 8,192 tokens at 4, where its -mtp twin goes
    on. Their scripts draft 3 tokens, one with attention data-parallelism; SGLang's 2.
    """
    if (stated := row.get("draft_tokens")) is not None:
        return _accepting(int(stated), int(row["isl"]), int(row["osl"])) if _number(stated) else None
    if not (_is_inferencex(row) and model.name == "deepseek_v3"):
        return None
    prompt, output, version = int(row["isl"]), int(row["osl"]), str(row["backend_version"])
    when, backend = str(row.get("measured", "")), str(row["backend"])
    if backend == "trtllm":
        drafts = version == "1.2.0rc6.post3" or (
            version == "1.1.0rc2.post2" and (when == "2026-01-14" or (dp > 1 and requests >= 128))
        )
        return _accepting(1 if dp > 1 else 3, prompt, output) if drafts else None
    alone = 4 if int(row["isl"]) == 8192 else 64
    twin = (
        backend == "sglang" and version == "0.5.9" and row["gemm_quant_mode"] == "fp8" and row["system"] == "b200_sxm"
    )
    return _accepting(2, prompt, output) if twin and _number(row["tp_size"]) == 8 and requests > alone else None


def _accepting(draft_tokens: int, prompt_tokens: int, output_tokens: int) -> Speculation:
    return Speculation(draft_tokens, accepted_drafts(draft_tokens, prompt_tokens, output_tokens), "mtp")


def _is_inferencex(row: JsonFields) -> bool:
    return str(row.get("source", "")).startswith(("InferenceX export", "db-dump"))


def _counts_expert_parallelism_twice(row: JsonFields) -> bool:
    """Whether the degrees of a row of InferenceX are those of more GPUs than it ran on.

    Its dashboards name tp=8, ep=8 (with or without attention data-parallelism) what runs on eight GPUs; rows of the
    database have moe_tp=8, ep=8 and 64 GPUs instead, the same times under both readings.
    """
    tp, dp, moe_tp, moe_ep = (
        _number(row[name]) for name in ("tp_size", "attention_dp_size", "moe_tp_size", "moe_ep_size")
    )
    return _is_inferencex(row) and tp * dp == moe_tp * moe_ep and moe_tp == moe_ep > 1


def _hides_the_servers_limit(row: JsonFields, model: Model, stated: int) -> bool:
    """Whether a row is of the script behind `CLIENT_OF_512`. Its server ran one of `SWEPT`: the middle one is taken."""
    dump = str(row.get("source", "")).startswith("source_file=")  # InferenceX, as the database names its dumps
    return dump and row["backend"] == "vllm" and model.name == "gpt_oss_120b" and stated == CLIENT_OF_512


def as_stated(run: ServingRun) -> ServingRun:
    """The run with as many requests at once as its row states, whatever is known of its server."""
    return replace(run, strategy=replace(run.strategy, batch=max(1, round(run.stated / run.replicas))))


def disagg_worker(row: JsonFields, phase: Literal["prefill", "decode"]) -> ServingRun | Skipped:
    """The workers of one phase of a row with separate prefill and decode workers, or why they cannot be priced."""
    served = _served(row)
    if isinstance(served, Skipped):
        return served
    model, weights, reread = served
    tp, dp, moe_tp = (
        _number(row.get(f"{phase}_{name}")) or 1 for name in ("tp_size", "attention_dp_size", "moe_tp_size")
    )
    if (stages := _number(row.get(f"{phase}_pp_size"))) > 1:
        return Skipped(f"its {phase} workers run {stages} pipeline stages, whose microbatches it does not state")
    batch = _worker_batch(row, phase, dp)
    if isinstance(batch, Skipped):
        return batch
    if (tp * dp) % moe_tp:
        moe_tp = tp * dp
    strategy, replicas = strategy_of_run(model, batch, tp, dp, tp * dp // moe_tp)
    backend, drafted = str(row["backend"]), _number(row.get("draft_tokens"))
    wide = model.is_moe and dp > 1 and str(row.get("system", "")).startswith(_RACKS)
    return ServingRun(
        model,
        int(row["isl"]),
        int(row["osl"]),
        weights,
        _kv_cache(row, model, weights),
        strategy,
        backend,
        engine_of(backend, row["backend_version"]),
        batch,
        replicas=replicas,
        phase=phase,
        expert_exchange="all_to_all" if wide else "all_gather",
        redundant_experts=_copies(row, model, backend) if wide and phase == "decode" else 0,
        speculation=_accepting(drafted, int(row["isl"]), int(row["osl"])) if drafted and phase == "decode" else None,
        reread=reread,
    )


_RACKS = ("gb200", "gb300")
"""Machines on whose racks attention ranks send tokens to experts instead of gathering all.

[published] TensorRT-LLM, docs/source/blogs/tech_blog/blog4: kernels of its own over NVLink between trays; SGLang, by
NVIDIA/srt-slurm, recipes/gb200-fp8, gb300-fp8 and gb300-fp4: DeepEP.
"""
_SGLANG_COPIES = 32
"""Of experts, in all of these recipes. [published] there: `ep-num-redundant-experts`, `eplb-algorithm: deepseek`"""


def _copies(row: JsonFields, model: Model, backend: str) -> int:
    """Copies of experts of a decode worker on a rack; one stands for experts that are dealt by loads without copies."""
    slots = _number(row.get("expert_slots"))
    return _SGLANG_COPIES if backend == "sglang" else max(1, slots - model.experts) if slots else 0


def _worker_batch(row: JsonFields, phase: str, dp: int) -> int | Skipped:
    """Requests of one worker over its attention ranks: as stated per rank, and no more than clients send to each.

    The database states the clients' requests over the decode workers as their batch, which of a worker with attention
    data-parallelism is all ranks' together: it must not be counted once per rank.
    """
    stated = _number(row.get(f"{phase}_batch_size")) * dp
    if phase == "prefill":
        return stated or dp  # one prompt on each rank, where the row leaves it open
    sent, workers = _number(row["concurrency"]), _number(row.get("decode_num_workers")) or 1
    each = math.ceil(sent / workers)
    if not (stated or each):
        return Skipped("it states neither a decode_batch_size nor a concurrency")
    return min(stated or each, each or stated)


def _served(row: JsonFields) -> tuple[Model, Dtype, tuple[str, ...]] | Skipped:
    """(model, format of its weights, what was read otherwise than stated) of a row."""
    known, backend, stated = known_model(str(row["model_path"])), str(row["backend"]), str(row["gemm_quant_mode"])
    if known is None:
        return Skipped(f"unknown model {row['model_path']!r}")
    if backend not in _ENGINES:
        return Skipped(f"unknown framework {backend!r}")
    model, published = known
    if stated in ("", "nan", "None"):
        return model, published, ()
    if model.expert_dtype:  # published with narrow experts and everything else in one format, and served so
        read = "" if _FORMATS.get(stated) == published else f"{stated} weights of {model.name} read as published"
        return model, published, (read,) if read else ()
    if stated not in _FORMATS:
        return Skipped(f"no kernels for {stated!r} weights")
    if stated == "mxfp4" and model.is_moe:
        return replace(model, expert_dtype="mxfp4"), "bf16", ()
    if stated == "nvfp4" and model.is_moe:
        # [published] model cards of nvidia/DeepSeek-R1-0528-FP4, GLM-5-NVFP4 and others: attention stays in bf16.
        return replace(model, expert_dtype="nvfp4"), "bf16", ()
    if stated == "fp8" and str(row.get("moe_quant_mode", "")) == "fp8_block":
        return model, "fp8_block", ()
    if published == "fp8_block" and stated == "fp8":
        return model, published, (f"fp8 weights of {model.name} read as fp8_block, in which it is published",)
    return model, _FORMATS[stated], ()


def _number(value: Any) -> int:
    """A count, or 0 for an empty cell and for the zeros that stand for "not used"."""
    return 0 if value == "" or pd.isna(value) else max(0, int(float(value)))


_BLACKWELL = ("b200", "b300", "gb200", "gb300")


def _kv_cache(row: JsonFields, model: Model, weights: Dtype) -> Dtype:
    """TensorRT-LLM caches in fp8 when it serves quantised weights; the others in bf16 by default [assumed].

    [published] InferenceX's scripts (April 2026) ask every engine for fp8 on Blackwell and on AMD's
    machines where weights are quantised.
    """
    quantised = weights != "bf16" or model.expert_dtype is not None
    if str(row["backend"]) == "trtllm" and (weights != "bf16" or model.expert_dtype == "nvfp4"):
        return "fp8"
    blackwell = _is_inferencex(row) and str(row.get("system", "")).startswith(_BLACKWELL)
    amd = _is_inferencex(row) and str(row.get("system", "")).startswith("mi")
    return "fp8" if (blackwell or amd) and quantised else "bf16"
