"""A question about a deployment: what is served, on what, under which limits, and what may be searched.

One object behind the command's options, Python's arguments and the records on disk: each field states once what it
means, its unit and bounds, and which key of a workload file it stands for.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from numbers import Integral, Real
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final, Literal, cast, get_args, get_type_hints

from pydantic import BaseModel, ConfigDict, Field, ValidationError, create_model

from sim.config.catalog import assembled, default_hardware, imported_model, load_workload, read_model
from sim.config.code import Origin
from sim.config.fields import LARGEST_FIELD
from sim.config.files import CatalogError, ConfigKind, config_path
from sim.config.huggingface.model_import import ModelImport
from sim.config.mistakes import expectation, first_error_text
from sim.config.schemas import DEEPEST, EAGLE3, MOST_PARTS, MTP, NGRAM, WorkloadFile, any_degrees
from sim.engines.engine_registry import BARE_MACHINE, UnknownEngine, engine_rules
from sim.json_object import JsonFields, JsonObject
from sim.near_names import did_you_mean
from sim.prices.curves import DeepepMode
from sim.prices.dtypes import Dtype
from sim.prices.hardware import AllReduce
from sim.serving.phases import DECODE, SERVE, UnknownPhase, phase_named, phases
from sim.workload import EVEN_ODDS, OWN_SPACES, BatchGrid, ExpertExchange, GroupChoices, PhaseName, Routing, Workload

Panel = Literal["named", "deployment", "limits", "search", "load"]
"""What a field is about: a workload file, the deployment, its limits, the search, or the load that it carries."""

USUAL_ENGINE = "vllm"
"""[assumed] Most published deployments of open models run it."""
USUAL_CONFIDENCE = 0.9
"""[assumed] Nine picks in ten keep their limits; a pick as predicted, the best of many, misses more often than not."""
USUAL_GPUS = 64
"""[assumed] Eight nodes of eight."""
USUAL_TPOT_MS = 100.0
"""[assumed] Ten tokens a second, faster than people read: without a limit the most tokens make users wait for ever."""
USUAL_TTFT_MS, MS_PER_PROMPT_TOKEN = 10_000.0, 1.0
"""[assumed] Of the first token, and more of it for each token of the prompt."""
ANY_FORMAT: Final = "any"
"""In the place of a format of weights: whichever published one serves most, as `recommend` compares them."""
WIDEST = 128
"""Largest searched tp and ep. [assumed] as in the paper's table 1, whose tp ends there."""


@dataclass(frozen=True, slots=True)
class About:
    """What a field of a question means.

    Attributes:
        help: One sentence, with the unit.
        panel: See `Panel`.
        usual: What holds where it is not given, in words.
        key: Of a workload file, with the table's name in front; "" for none of its own.
        least, most: Bounds, both included.
        kind: Of the configuration file that it may name.
        rare: Whether a command line gives it by `--set NAME=VALUE`, as few questions need it.
    """

    help: str
    panel: Panel
    usual: str = "the workload's"
    key: str = ""
    least: float | None = None
    most: float | None = None
    kind: ConfigKind | None = None
    rare: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Question:
    """A question about one deployment: what is served, on what, within which limits, and what is searched.

    Either `workload` names a file, and the other fields override it, or `model`, `isl` and `osl` describe a workload,
    and the rest has defaults. Under an engine, the default, the phase is "serve"; on the bare machine it is "decode".

    >>> Question(model="qwen3_32b", isl=4000, osl=500, tpot_ms=30).load().phase
    'serve'
    >>> Question(workload="gpt_moe_1_2t_16k", tpot_ms=40).load().tpot_slo_s
    0.04
    """

    workload: Annotated[
        str | None,
        About("Name in configs/workloads, or the path of a TOML file.", "named", "given by --model", kind="workloads"),
    ] = None
    model: Annotated[
        str | None,
        About(
            "Name in configs/models, or the path of a TOML file or of a Hugging Face config.json or its folder.",
            "deployment",
            "named by --workload",
            "model",
            kind="models",
        ),
    ] = None
    family: Annotated[
        str | None,
        About(
            "Read the config.json as this model_type, such as deepseek_v3: for a known architecture under a new name.",
            "deployment",
            "the file's own model_type",
        ),
    ] = None
    hardware: Annotated[
        str | None,
        About(
            "Machine: a name in configs/hardware, or the path of a TOML file.",
            "deployment",
            "the workload's, else the first in `raysearch list` that was measured in all parts",
            "hardware",
            kind="hardware",
        ),
    ] = None
    engine: Annotated[
        str | None,
        About(
            "Inference engine: vllm, sglang, trtllm, megatron_core, a plugin's, or none for the bare machine. Sets "
            "which strategies are supported (see --space), the engine's own time and its memory policy.",
            "deployment",
            f"the workload's, else {USUAL_ENGINE}",
            "engine",
        ),
    ] = None
    engine_version: Annotated[
        str | None,
        About(
            "Version of the engine, or the path of a TOML file that describes one. Versions differ in rules and "
            "times: see `raysearch list`.",
            "deployment",
            "the workload's, else the first in `raysearch list`",
            "engine_version",
        ),
    ] = None
    phase: Annotated[
        PhaseName | None,
        About(
            f"{'; '.join(f'{phase.name!r}: {phase.summary}' for phase in phases())}.",
            "deployment",
            "the workload's, else serve, or decode without an engine; always serve in pools",
            "phase",
        ),
    ] = None
    isl: Annotated[
        int | None, About("Prompt length in tokens.", "deployment", key="prompt_tokens", least=1, most=LARGEST_FIELD)
    ] = None
    osl: Annotated[
        int | None, About("Output length in tokens.", "deployment", key="output_tokens", least=1, most=LARGEST_FIELD)
    ] = None
    weights: Annotated[
        str | None,
        About(
            "Format of the weights: bf16, fp8, fp8_block, mxfp4, nvfp4 or int4; any compares the published ones.",
            "deployment",
            "as published: the checkpoint's, its maker's fp8 if there is one, else bf16",
            "precisions.weights",
        ),
    ] = None
    kv_cache: Annotated[
        str | None,
        About(
            "Format of the KV cache: bf16 or fp8.",
            "deployment",
            "the checkpoint's, else bf16, or fp8 of compressed keys",
            "precisions.kv_cache",
        ),
    ] = None
    chunk_tokens: Annotated[
        int | None,
        About(
            "Prompt tokens per step at most (chunked prefill); 0 for whole prompts.",
            "deployment",
            "the workload's, else whole prompts; recommend and pools also search chunks of 512, 2,048 and 8,192",
            "chunk_tokens",
            least=0,
        ),
    ] = None
    prompt_wait_steps: Annotated[
        int | None,
        About(
            "Maximum number of steps for which a prompt waits, so that all attention groups compute their prompts in "
            "the same step (SGLang's prefill delayer, 30; TensorRT-LLM's enable_balance, 50).",
            "deployment",
            "0",
            "prompt_wait_steps",
            least=0,
            most=100_000,
            rare=True,
        ),
    ] = None
    expert_exchange: Annotated[
        ExpertExchange | None,
        About(
            "How tokens reach their experts: 'all_to_all' sends each token to its experts' ranks only (DeepEP); "
            "'all_gather' sends every token to every rank.",
            "deployment",
            "the engine's; all_to_all on the bare machine",
            "expert_exchange",
        ),
    ] = None
    redundant_experts: Annotated[
        int | None,
        About(
            "Extra copies of popular experts per layer, for load balance (EPLB).",
            "deployment",
            "0",
            "redundant_experts",
            least=0,
            most=4096,
        ),
    ] = None
    two_batch_overlap: Annotated[
        bool | None,
        About(
            "Overlap the expert exchange of one half of the batch with the computation of the other "
            "(SGLang's --enable-two-batch-overlap, vLLM's --enable-dbo).",
            "deployment",
            "off, as in all engines",
            "two_batch_overlap",
            rare=True,
        ),
    ] = None
    stage_layers: Annotated[
        str | Sequence[int] | None,
        About(
            "Layers of each pipeline stage, as in 14,16,16,15, for strategies with as many stages.",
            "deployment",
            "as many in each",
            "stage_layers",
            rare=True,
        ),
    ] = None
    tp_inner: Annotated[
        int | None,
        About(
            "In the space two_dimensional, GPUs of the inner sub-axis of tp, b of tp = a x b: 2, 4, 8 or 16.",
            "search",
            "2",
            "tp_inner",
            least=2,
            most=16,
            rare=True,
        ),
    ] = None
    overlap_parts: Annotated[
        int | None,
        About(
            "Maximum number of parts of an operator's batch, the communication of one overlapping the computation of "
            "the next (asynchronous tensor parallelism); the best number up to it is used.",
            "deployment",
            "1: no overlap",
            "overlap_parts",
            least=1,
            most=MOST_PARTS,
            rare=True,
        ),
    ] = None
    all_reduce: Annotated[
        AllReduce | None,
        About(
            "All-reduce inside a node: the kernel of 'trtllm', 'vllm', 'sglang' or 'nccl'; 'fastest', for each message "
            "the fastest of these that was measured; or an algorithm, wherever it can run: 'ring', 'tree', 'nvls', "
            "'one_shot' or 'two_shot'.",
            "deployment",
            "the engine's",
            "all_reduce",
            rare=True,
        ),
    ] = None
    fp8_gather: Annotated[
        bool | None,
        About(
            "Send all-gathers of 16-bit activations in fp8 where that is faster, quantising included; it changes "
            "numerics.",
            "deployment",
            "off",
            "fp8_gather",
            rare=True,
        ),
    ] = None
    merge_collectives: Annotated[
        bool | None,
        About(
            "Merge neighbouring collectives into one call where that is legal and faster (two inputs of an op, an "
            "input and a gathered weight), and split an all-reduce into a reduce-scatter and an all-gather.",
            "deployment",
            "off",
            "merge_collectives",
            rare=True,
        ),
    ] = None
    deepep_mode: Annotated[
        DeepepMode | None,
        About(
            "DeepEP kernels: 'auto', 'low_latency' or 'normal'.",
            "deployment",
            "auto: low latency up to 1,024 tokens per GPU",
            "deepep_mode",
            rare=True,
        ),
    ] = None
    routing: Annotated[
        Routing | None,
        About(
            "How tokens are distributed over experts: 'skewed', as measured, or 'balanced'.",
            "deployment",
            "the workload's, else skewed",
            "routing",
            rare=True,
        ),
    ] = None
    draft_tokens: Annotated[
        int | None,
        About(
            "Tokens drafted per step (speculative decoding).",
            "deployment",
            "0",
            "speculation.draft_tokens",
            least=0,
            most=64,
        ),
    ] = None
    acceptance: Annotated[
        str | float | Sequence[float] | None,
        About(
            "Acceptance rate of a drafted token, given that those before it were accepted: 0.8, or one per position: "
            "0.9,0.7.",
            "deployment",
            "for mtp, as measured on DeepSeek-R1 at such lengths",
            key="speculation.acceptance",
        ),
    ] = None
    draft: Annotated[
        str | None,
        About(
            "What drafts tokens: 'mtp', 'eagle3', 'ngram' (free), or a model, as in --model.",
            "deployment",
            "mtp if the model has it",
            "speculation.draft",
            kind="models",
            rare=True,
        ),
    ] = None
    tpot_ms: Annotated[
        float | None,
        About(
            "Limit on the time per output token, in milliseconds; 0 for none.",
            "limits",
            f"the workload's, else {USUAL_TPOT_MS:g} in phases serve and traffic",
            "tpot_slo_ms",
            least=0,
        ),
    ] = None
    ttft_ms: Annotated[
        float | None,
        About(
            "Limit on the time to the first token, in milliseconds; 0 for none.",
            "limits",
            f"the workload's, else {USUAL_TTFT_MS:,.0f} and {MS_PER_PROMPT_TOKEN:g} more per prompt token in phases "
            "serve and traffic",
            "ttft_slo_ms",
            least=0,
        ),
    ] = None
    gpus: Annotated[
        int | None,
        About(
            "GPUs available.",
            "limits",
            f"the workload's, else {USUAL_GPUS}",
            "max_gpus",
            least=1,
        ),
    ] = None
    margin: Annotated[
        float | None,
        About(
            "Share of the latency limits and of the memory to keep free, such as 0.05.",
            "limits",
            "0",
            "margin",
            least=0,
            most=0.99,
            rare=True,
        ),
    ] = None
    confidence: Annotated[
        float | None,
        About(
            "Probability with which the latency limits are to be met; 0.5 takes latencies as predicted.",
            "limits",
            f"the workload's, else {USUAL_CONFIDENCE}, or 0.5 without an engine",
            "confidence",
            least=EVEN_ODDS,
            most=0.99,
            rare=True,
        ),
    ] = None
    space: Annotated[
        str | None,
        About(
            f"Strategies to search. {'; '.join(f'{name!r}: {text}' for name, text in OWN_SPACES.items())}; or an "
            "engine's name: what it supports.",
            "search",
            "the engine's, else 'joint'",
            "space",
        ),
    ] = None
    groups: Annotated[
        GroupChoices | None,
        About(
            "'shared': all kinds of layers make the same choice for an op; 'own': each kind makes its own.",
            "search",
            "shared",
            "groups",
            rare=True,
        ),
    ] = None
    batches: Annotated[
        BatchGrid | None,
        About(
            "Batch sizes to search: 'any', or 'powers_of_two', as in the paper.",
            "search",
            "the workload's list, else any; in tune-live, powers_of_two",
            "degrees.batch",
            rare=True,
        ),
    ] = None
    serving: Annotated[
        Literal["searched"] | None,
        About(
            "In phase traffic, 'searched' also searches the number of replicas (up to 8), the size of chunks and a "
            "prefill pool (up to 8 replicas).",
            "search",
            "the workload's, else one replica and whole prompts",
            rare=True,
        ),
    ] = None
    any_degrees: Annotated[
        str | None,
        About(
            "pp, ep or pp,ep: search every number of pipeline stages (up to 64), of expert-parallel ranks, or of both.",
            "search",
            "the workload's, else divisors and powers of two",
            rare=True,
        ),
    ] = None

    def __post_init__(self) -> None:
        for name, value in self.given():
            object.__setattr__(self, name, str(value) if isinstance(value, Path) else plain(value))
        rate = self.acceptance
        rates = (rate,) if type(rate) in (float, int) else rate
        for name, given in (("acceptance", rates), ("stage_layers", self.stage_layers)):
            if text := _listed(given):
                object.__setattr__(self, name, text)
        try:
            RecordedQuestion.model_validate(dict(self.given()))
        except ValidationError as error:
            first = error.errors()[0]
            raise CatalogError(f"{option_of(str(first['loc'][0]))}: {expectation(first)}") from error
        for each in fields(self):
            value, about = getattr(self, each.name), QUESTION_FIELDS[each.name]
            if isinstance(value, int | float) and not (_at_least(value, about.least) and _at_most(value, about.most)):
                raise CatalogError(f"{option_of(each.name)}: expected {_range(about)}, got {value}")

        _check_names(self)

    def load(self) -> Workload:
        """The workload of the question, for Python: as `load_question`, whose errors then name arguments."""
        try:
            return load_question(self)
        except CatalogError as error:
            error.args = (as_arguments(str(error), option_names()),)
            raise

    @property
    def resolved(self) -> Question:
        """The same question with the defaults filled in that its meaning rests on, for records."""
        if self.model is None:
            return self
        engine = self.engine or USUAL_ENGINE
        weights, kv_cache = self._usual_formats(engine)
        phase = self.phase or (DECODE if engine == BARE_MACHINE else SERVE).name
        return replace(
            self,
            hardware=self.hardware or default_hardware(),
            engine=engine,
            phase=phase,
            weights=self.weights or weights,
            kv_cache=self.kv_cache or kv_cache,
            gpus=self.gpus or USUAL_GPUS,
            confidence=self.confidence or (EVEN_ODDS if engine == BARE_MACHINE else USUAL_CONFIDENCE),
            **self._usual_limits(phase),
            batches=self.batches or "any",
        )

    def _usual_limits(self, phase: PhaseName) -> dict[str, float]:
        """Limits on latencies that nobody gave, in phases that answer prompts from end to end."""
        if not phase_named(phase).mixes:
            return {}
        usual = {"tpot_ms": USUAL_TPOT_MS, "ttft_ms": USUAL_TTFT_MS + MS_PER_PROMPT_TOKEN * (self.isl or 0)}
        return {name: limit for name, limit in usual.items() if getattr(self, name) is None}

    @property
    def defaulted_limits(self) -> list[str]:
        """Fields of latency limits that hold by default."""
        phase = self.resolved.phase
        return list(self._usual_limits(phase)) if self.model and phase else []

    def _usual_formats(self, engine: str) -> tuple[str, str]:
        """Formats of the weights and of the KV cache that a model has under an engine. Raises: CatalogError."""
        path = _path("model", self.model or "")
        file, imported = read_model(path, self.family), imported_model(path, self.family)
        stored = imported.formats if imported else None
        weights = _of_engine(engine, (stored and stored.weights) or file.usual_weights)
        return weights, (stored and stored.kv_cache) or file.usual_kv_cache

    def model_import(self) -> ModelImport | None:
        """What was read of a Hugging Face configuration; None where the model is no such file. Raises: CatalogError."""
        return imported_model(_path("model", self.model), self.family) if self.model is not None else None

    def import_record(self) -> JsonObject | None:
        """What was read of a Hugging Face configuration, and where, for JSON."""
        imported = self.model_import()
        return {"path": str(config_path("models", self.model or "")), **imported.to_dict()} if imported else None

    def given(self) -> Iterator[tuple[str, Any]]:
        """The fields that are given, by name."""
        return ((each.name, value) for each in fields(self) if (value := getattr(self, each.name)) is not None)

    def record(self) -> JsonObject:
        """The question as a record keeps it: what was given, defaults that decide, and absolute paths."""
        return {name: _anchored(name, value) for name, value in self.resolved.given()}

    @classmethod
    def of_record(cls, content: JsonFields) -> Question:
        """The question of a record, or of keyword arguments.

        Raises:
            CatalogError: An unknown field, or a value of another type.

        >>> Question.of_record({"model": "qwen3_32b", "isl": 10, "osl": 5}).isl
        10
        """
        if unknown := [name for name in content if name not in QUESTION_FIELDS]:
            raise CatalogError(f"a question has no field {unknown[0]!r}: {did_you_mean(unknown[0], QUESTION_FIELDS)}")
        return cls(**content)


_HINTS = get_type_hints(Question, include_extras=True)
QUESTION_FIELDS: Final[Mapping[str, About]] = {
    name: next(each for each in get_args(hint) if isinstance(each, About)) for name, hint in _HINTS.items()
}
"""What each field of a question means, by name."""
Text = Annotated[str, Field(max_length=4096)]
"""A name, a path or a short text of a record."""
if TYPE_CHECKING:

    class RecordedQuestion(BaseModel):
        """The schema of a question as a record keeps it; its figures are checked where the workload is made."""
else:
    RecordedQuestion = create_model(
        "RecordedQuestion",
        __config__=ConfigDict(extra="forbid", strict=True, allow_inf_nan=False, defer_build=True),
        **{name: (Text | None if str in get_args(get_args(hint)[0]) else hint, None) for name, hint in _HINTS.items()},
    )


def option_of(name: str) -> str:
    """What a command line calls a field.

    >>> option_of("tpot_ms"), option_of("margin")
    ('--tpot-ms', '--set margin')
    """
    return f"--set {name}" if QUESTION_FIELDS[name].rare else "--" + _CALLED.get(name, name).replace("_", "-")


_CALLED = {"family": "as"}
"""Options whose word no field can have."""
_OPTION = re.compile(r"(?<![\w-])--(?:set )?([a-z][a-z0-9_-]*)(=[^\s:;,]+)?(:)?")


def option_names(*others: str) -> dict[str, str]:
    """Arguments by the words of their options: those of a question, and others."""
    return {_CALLED.get(name, name).replace("_", "-"): name for name in (*QUESTION_FIELDS, *others)}


def as_arguments(text: str, names: Mapping[str, str]) -> str:
    """A message whose options are named as arguments; `names` has those that are known, by the words of options.

    >>> names = {"tpot-ms": "tpot_ms", "phase": "phase", "margin": "margin"}
    >>> as_arguments("--tpot-ms: expected a number, with --phase=serve or --set margin; vLLM's --dp-size", names)
    "tpot_ms: expected a number, with phase=serve or margin=; vLLM's --dp-size"
    """

    def argument(found: re.Match[str]) -> str:
        name = names.get(found[1].replace("_", "-"))
        if name is None:
            return found[0]
        return f"{name}{found[2]}{found[3] or ''}" if found[2] else f"{name}:" if found[3] else f"{name}="

    return _OPTION.sub(argument, text)


def plain(value: Any) -> Any:
    """The same value, as Python's own if it is a number of NumPy's."""
    if isinstance(value, int | float) or not isinstance(value, Real):
        return value
    return int(value) if isinstance(value, Integral) else float(value)


def _listed(given: object) -> str:
    """Numbers as the text that an option takes; "" of anything else."""
    listed = [*map(plain, cast("Sequence[object]", given))] if isinstance(given, list | tuple) else []
    return ",".join(map(str, listed)) if all(type(each) in (float, int) for each in listed) else ""


def _at_least(value: float, least: float | None) -> bool:
    return least is None or value >= least


def _at_most(value: float, most: float | None) -> bool:
    return most is None or value <= most


def _range(about: About) -> str:
    return f"at least {about.least}" if about.most is None else f"{about.least} to {about.most}"


def _path(name: str, given: str) -> Path:
    """The file that a field names. Raises: CatalogError: There is none; the field's option is named."""
    kind = QUESTION_FIELDS[name].kind
    assert kind is not None
    try:
        return config_path(kind, given)
    except CatalogError as error:
        raise CatalogError(f"{option_of(name)}: {error}") from error


def _anchored(name: str, value: Any) -> Any:
    """An absolute path where a field names a file of the user's own, so that records are read from anywhere."""
    if name == "engine_version":
        return str(Path(value).resolve()) if value.endswith(".toml") else value
    kind = QUESTION_FIELDS[name].kind
    if kind is None or value in (MTP, NGRAM, EAGLE3):
        return value
    path = config_path(kind, value)
    return value if path.stem == value else str(path.resolve())


_POWERS = (1, 2, 4, 8)
_CHUNKS = (0, 512, 1024, 2048, 4096, 8192)
"""[assumed] Engines' defaults are 2,048 to 16,384; 0 computes prompts whole."""


def load_question(question: Question, origin: Origin = Origin.USER) -> Workload:
    """The workload of a question.

    Args:
        question: What is asked.
        origin: Who asks; code that a workload's file names is run for a user alone.

    Raises:
        CatalogError: Both or neither of `workload` and `model`, an unknown name, an unusable file, or figures that no
            workload may have; options are named.
    """
    if question.weights == ANY_FORMAT:
        known = ", ".join(get_args(Dtype))
        raise CatalogError(f"--weights=any compares formats, as `recommend` alone does: name one of {known}")
    if question.workload is None:
        return _workload_of_options(question, origin)
    if question.model is not None:
        raise CatalogError(
            f"--model={question.model} describes a workload, --workload={question.workload} names one: give one of them"
        )
    if question.family is not None:
        raise CatalogError(f"--as={question.family} is about the config.json that --model names: give --model too")
    path, hardware = _path("workload", question.workload), question.hardware and _path("hardware", question.hardware)
    try:
        return load_workload(path, hardware, origin=origin, **_keys(question, leave=("hardware",)))
    except CatalogError as error:
        text = str(error)
        raise CatalogError(text if text.startswith(f"{path}: ") else _in_options(text)) from error


# --- keys of a workload file ---------------------------------------------------------------------


def _keys(question: Question, leave: tuple[str, ...] = ()) -> JsonObject:
    """What a question says, as keys of a workload file, tables within it.

    Raises:
        CatalogError: Options of a draft without its length, or degrees that are none.
    """
    content: JsonObject = {}
    for name, value in question.given():
        key = QUESTION_FIELDS[name].key
        if key and name not in leave:
            table, _, inner = key.rpartition(".")
            (content.setdefault(table, {}) if table else content)[inner] = value
    if question.serving is not None:
        content["serving"] = {"replicas": _POWERS, "chunk_tokens": _CHUNKS, "prefills": (0, *_POWERS)}
    if question.any_degrees is not None:
        try:
            content.setdefault("degrees", {}).update(any_degrees(question.any_degrees))
        except ValueError as error:
            raise CatalogError(f"{option_of('any_degrees')}: {error}") from error
    if drafted := content.get("speculation"):
        content["speculation"] = _speculation(drafted)
    return content


def _speculation(drafted: JsonObject) -> JsonObject:
    """The table [speculation] of the fields about drafts. Raises: CatalogError."""
    if "draft_tokens" not in drafted:
        raise CatalogError(f"{option_of(next(iter(drafted)))} is for speculative decoding: give --draft-tokens too")
    text = drafted.pop("acceptance", None)
    if text is None:
        return drafted
    try:
        shares = tuple(float(part) for part in str(text).split(","))
    except ValueError:
        raise CatalogError(
            f"--acceptance: expected a rate such as 0.8, or one per position such as 0.9,0.7; got {text!r}"
        ) from None
    return drafted | ({"acceptance": shares[0]} if len(shares) == 1 else {"accepted": shares})


_ALL_OPTIONS = {about.key: option_of(name) for name, about in QUESTION_FIELDS.items() if about.key}
"""What a command line calls the keys of a workload file."""
_NO_WORDS = [key for key in _ALL_OPTIONS if "_" in key or "." in key]
"""Keys that are no word of a sentence."""
_KEYS = re.compile(
    rf"^({'|'.join(map(re.escape, _ALL_OPTIONS))})(?=:)|"
    rf"(?<![\w.-])(?<!--set )({'|'.join(map(re.escape, _NO_WORDS))})(?![\w.])"
)


def _option_of_key(key: str) -> str:
    return _ALL_OPTIONS.get(key, key)


def _in_options(text: str) -> str:
    """What is wrong with the keys that options stand for, in the options' names."""
    return _KEYS.sub(lambda found: _ALL_OPTIONS[found[0]], text)


# --- workloads that no file holds ----------------------------------------------------------------


def _workload_of_options(asked: Question, origin: Origin) -> Workload:
    """The workload of a question without a file: its degrees follow from the model and the GPUs.

    Routing is skewed as measured, since real prompts are.
    """
    if asked.model is None:
        raise CatalogError("expected --workload, or --model with --isl and --osl; `raysearch list` has names")
    if missing := [option_of(name) for name in ("isl", "osl") if getattr(asked, name) is None]:
        are = "is" if len(missing) == 1 else "are"
        raise CatalogError(f"{' and '.join(missing)} {are} missing: lengths of a prompt and of an answer, in tokens")
    question = asked.resolved
    assert question.hardware is not None
    assert question.gpus is not None
    model_path, hardware_path = _path("model", asked.model), _path("hardware", question.hardware)
    model, gpus = read_model(model_path, asked.family).to_si(), question.gpus
    keys = _keys(question, leave=("engine",) if question.engine == BARE_MACHINE else ())
    copies = keys.get("redundant_experts", 0) if model.is_moe else 0
    content: JsonObject = {
        "name": f"{model.name}_{question.phase}",
        **({"routing": "skewed"} if model.is_moe else {}),
        **keys,
        "precisions": {"activations": "bf16", "dispatch": "fp8", **keys["precisions"]},
        "degrees": {
            "tp": [n for n in _powers_of_two(min(WIDEST, gpus)) if model.heads % n == 0],
            "ep": [
                n
                for n in _powers_of_two(min(WIDEST, gpus))
                if model.experts % n == 0 or (model.experts + copies) % n == 0
            ],
            "pp": _stages(model.layers, min(DEEPEST, gpus, model.layers)),
            **keys.get("degrees", {}),
        },
    }
    try:
        workload = WorkloadFile.model_validate(content)
    except ValidationError as error:
        raise CatalogError(_in_options(first_error_text(error, WorkloadFile, _option_of_key))) from error
    try:
        return assembled(workload, model_path, hardware_path, family=asked.family, origin=origin)
    except CatalogError as error:
        raise CatalogError(_in_options(str(error))) from error


def _check_names(question: Question) -> None:
    """Raises: CatalogError: There is no such phase, engine or format of weights."""
    formats, engine = (ANY_FORMAT, *get_args(Dtype)), question.engine
    if question.weights not in (None, *formats):
        raise CatalogError(f"--weights: unknown format {question.weights!r}: {did_you_mean(question.weights, formats)}")
    try:
        if question.phase is not None:
            phase_named(question.phase)
    except UnknownPhase as error:
        raise CatalogError(f"--phase: {error}") from None
    try:
        if engine not in (None, BARE_MACHINE):
            engine_rules(engine)
    except UnknownEngine as error:
        raise CatalogError(f"--engine: {error}") from None


def _of_engine(engine: str | None, weights: str) -> str:
    """Usual format of the weights, or in its place the first that an engine has."""
    try:
        rules = engine_rules(engine) if engine not in (None, BARE_MACHINE) else None
    except UnknownEngine:  # reported with the others of its kind, by `assembled`
        rules = None
    return weights if rules is None or weights in rules.weights else rules.weights[0]


def _stages(layers: int, most: int) -> list[int]:
    """Divisors of the layers, whose stages are equal, and powers of two, since GPUs come in those.

    Others are in no list of their own: between two powers of two they leave GPUs of a node idle.
    """
    return sorted({n for n in range(1, most + 1) if layers % n == 0} | set(_powers_of_two(most)))


def _powers_of_two(most: int) -> list[int]:
    return [1 << power for power in range(max(most, 1).bit_length())]
