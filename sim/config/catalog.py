"""Loads calibrations, hardware, models and workloads: files in human units in, frozen SI values out."""

from __future__ import annotations

import hashlib
import json
import math
import re
from collections.abc import Callable
from dataclasses import replace
from functools import cache, lru_cache
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from sim.config.calibration_file import CalibrationFile
from sim.config.code import Origin
from sim.config.declarations import NotImported, declare
from sim.config.files import (
    LARGEST_JSON_BYTES,
    CatalogError,
    config_path,
    configs_root,
    list_names,
    read_config,
    read_json,
)
from sim.config.hardware_file import HardwareFile
from sim.config.huggingface.keys import CannotImport
from sim.config.huggingface.model_import import ModelImport, import_model
from sim.config.mistakes import first_error_text
from sim.config.reading import Unreadable, parse_object, read_bytes
from sim.config.schemas import EAGLE3, MTP, NGRAM, EngineVersionFile, ModelFile, WorkloadFile
from sim.engines.engine_registry import (
    BARE_MACHINE,
    UnknownEngine,
    engine_names,
    engine_rules,
    engine_rules_of,
    in_space,
)
from sim.engines.engine_rules import EngineRules
from sim.json_object import JsonObject
from sim.layers.eagle3_head import eagle3_head
from sim.layers.model import Model
from sim.near_names import did_you_mean
from sim.prices.calibration import Calibration
from sim.prices.engine import BARE, Engine, cell_of, times_of
from sim.prices.hardware import NCCL_ALGORITHMS, AllReduce, EngineName, Hardware
from sim.serving.acceptance import (
    ASSUMED_SPREAD,
    EAGLE3_SHARE,
    EAGLE3_SPREAD,
    MEASURED_SPREAD,
    accepted_drafts,
)
from sim.workload import (
    OWN_SPACES,
    TWO_DIMENSIONAL,
    BatchGrid,
    ExpertExchange,
    OpenLoop,
    Precisions,
    ServingTables,
    SpaceName,
    Speculation,
    Workload,
)


def load_calibration(name_or_path: str | Path, *, beside: Path | None = None) -> Calibration:
    """The fitted coefficients of a shipped name or of a file that `raysearch calibrate` wrote.

    Raises:
        CatalogError: No such file, or not one of coefficients.

    >>> "gemm/trtllm/fp8" in load_calibration("h100_sxm").series
    True
    """
    path = config_path("calibration", name_or_path, beside=beside)
    try:
        return _read_calibration(path.stem, read_bytes(path, LARGEST_JSON_BYTES))
    except OSError as error:
        raise CatalogError(f"cannot read {path}: {error}") from error
    except ValidationError as error:
        raise CatalogError(f"{path}: {first_error_text(error, CalibrationFile)}") from error
    except Unreadable as error:
        raise CatalogError(f"{path}: {error}") from error


@lru_cache(maxsize=32)
def _read_calibration(name: str, content: bytes) -> Calibration:
    data = parse_object(content)
    CalibrationFile.model_validate(data)
    return Calibration(name, data, hashlib.sha256(content).hexdigest()[:16])


def load_hardware(name_or_path: str | Path, *, beside: Path | None = None) -> Hardware:
    """The hardware of a shipped name or a file. Raises: CatalogError."""
    path = config_path("hardware", name_or_path, beside=beside)
    file, calibration = _with_calibration(read_config(path, HardwareFile), path)
    return file.to_si(calibration)


def _with_calibration(file: HardwareFile, path: Path) -> tuple[HardwareFile, Calibration | None]:
    """A hardware file with what it leaves to the machine that it names, and its curves."""
    calibration = None
    if file.calibration is not None:
        calibration = load_calibration(file.calibration, beside=path.parent)
        file.check_same_machine(calibration)
    if file.scaled_from is None:
        return file, calibration
    measured = read_config(config_path("hardware", file.scaled_from, beside=path.parent), HardwareFile)
    if measured.calibration is None or measured.scaled_from is not None:
        lacks = "no calibration" if measured.calibration is None else "its own efficiencies from another (scaled_from)"
        raise CatalogError(f"{path}: scaled_from names hardware {measured.name!r}, which has {lacks}")
    loaded = load_calibration(measured.calibration, beside=path.parent)
    measured.check_same_machine(loaded)
    carried = loaded.scaled_to(file.machine_header())
    return file.completed_by(measured), calibration.completed_by(carried) if calibration else carried


@cache
def default_hardware() -> str:
    """The machine of those who name none: the first of the shipped ones that was measured in all parts."""
    for name in list_names("hardware"):
        file = read_config(config_path("hardware", name), HardwareFile)
        if file.calibration and not file.scaled_from:
            return name
    raise CatalogError("no shipped hardware was measured: name one")


def load_machine_header(name_or_path: str | Path) -> dict[str, dict[str, float]]:
    """Peak rates and counts of a hardware file, whose calibration need not exist yet. Raises: CatalogError."""
    return read_config(config_path("hardware", name_or_path), HardwareFile).machine_header()


def load_calibrated(hardware: str | Path, calibration: str | Path | None = None) -> Calibration:
    """The coefficients that a hardware file names, or others for the same machine.

    Raises:
        CatalogError: An unknown name, a bad file, or coefficients of a machine with other peak rates.
    """
    path = config_path("hardware", hardware)
    file = read_config(path, HardwareFile)
    if calibration is None and file.calibration is None:
        raise CatalogError(f"hardware {file.name!r} names no calibration: say which coefficients to use")
    loaded = load_calibration(calibration or file.calibration or "", beside=None if calibration else path.parent)
    file.check_same_machine(loaded)
    return loaded


def load_machine(hardware: str | Path, calibration: Calibration) -> Callable[[EngineName], Hardware]:
    """A hardware file's machine under given coefficients, with the kernels of any engine. Raises: CatalogError."""
    path = config_path("hardware", hardware)
    file, _ = _with_calibration(read_config(path, HardwareFile), path)

    @cache
    def with_kernels(kernels: EngineName) -> Hardware:
        return file.model_copy(update={"kernels": kernels, "all_reduce": None}).to_si(calibration)

    return with_kernels


def measured_machine(hardware: str | Path) -> Callable[[EngineName], Hardware]:
    """A hardware file's machine with its own coefficients, completed as it says, under the kernels of any engine."""
    whole = load_hardware(hardware)

    @cache
    def with_kernels(kernels: EngineName) -> Hardware:
        assert whole.curves is not None
        return replace(whole, curves=whole.curves.under(engine=kernels, all_reduce=kernels))

    return with_kernels


def load_model(name_or_path: str | Path, *, beside: Path | None = None) -> Model:
    """The model of a shipped name, a file, or a Hugging Face configuration or its folder. Raises: CatalogError."""
    return read_model(config_path("models", name_or_path, beside=beside)).to_si()


def read_model(path: Path, family: str | None = None) -> ModelFile:
    """A model file, or what a Hugging Face configuration says as one, read as of a family. Raises: CatalogError."""
    imported = imported_model(path, family)
    if imported is None:
        return read_config(path, ModelFile)
    try:
        return ModelFile.model_validate(imported.content)
    except ValidationError as error:
        raise CatalogError(f"{path}, as a model file: {first_error_text(error, ModelFile)}") from error


def imported_model(path: Path, family: str | None = None) -> ModelImport | None:
    """What came of a Hugging Face configuration, read as of a family or of its own; None for a model file.

    `hf_quant_config.json` beside it says in which format its weights are.

    Raises:
        CatalogError: It cannot be read, or no model file can say what it says.
    """
    if path.suffix != ".json":
        if family:
            raise CatalogError(f"{path}: --as is for a Hugging Face config.json; a model file describes its own layers")
        return None
    beside = path.with_name(path.name.removesuffix("config.json") + "hf_quant_config.json")
    name = path.resolve().parent.name if path.name == "config.json" else path.stem.removesuffix("_config")
    try:
        return import_model(read_json(path), name, read_json(beside) if beside.is_file() else None, family or "")
    except CannotImport as error:
        raise CatalogError(f"{path}: {error}") from error


def read_engine_version(engine: str, version: str, beside: Path | None = None) -> EngineVersionFile:
    """What is known of a version of an engine that is not the one whose rules are built in.

    Args:
        engine: Its name.
        version: As a file in configs/engines states it, or the path of a TOML file.
        beside: A folder that a relative path is tried against first.

    Raises:
        CatalogError: No such version, or one of another engine.
    """
    known = _shipped_versions(engine)
    if version in known:
        return known[version]
    if not version.endswith(".toml"):
        rules = engine_rules(engine)
        versions = ", ".join(engine_versions(engine))
        raise CatalogError(
            f"engine_version: unknown version {version!r} of {rules.title}: known: {versions}; for another, give the "
            "path of a TOML file in place of the number (docs/guides/add_an_engine.md)"
        )
    path = config_path("engines", version, beside=beside)
    file = read_config(path, EngineVersionFile)
    if file.engine != engine:
        raise CatalogError(f"{path}: expected a version of {engine!r}, got one of {file.engine!r}")
    return file


def engine_versions(engine: str) -> tuple[str, ...]:
    """The known versions of an engine, that of its built-in rules first."""
    return (engine_rules(engine).version, *_shipped_versions(engine))


def read_versions(engine: str) -> tuple[str, ...]:
    """Versions whose own sources were read, the oldest first; see configs/engines/capabilities."""
    names = (path.stem.rpartition("-") for path in (configs_root() / "engines" / "capabilities").glob("*.json"))
    found = [version for name, _, version in names if name == engine]
    return tuple(sorted(found, key=lambda version: [int(part) for part in re.findall(r"\d+", version)]))


def _shipped_versions(engine: str) -> dict[str, EngineVersionFile]:
    files = (read_config(config_path("engines", name), EngineVersionFile) for name in list_names("engines"))
    stated = {each.version: each for each in files if each.engine == engine}
    rules = engine_rules(engine)
    source = f"options: its own sources; rules and times: those of {rules.version} [assumed]"
    others = (each for each in reversed(read_versions(engine)) if each != rules.version)
    return {each: EngineVersionFile(engine=engine, version=each, source=source) for each in others} | stated


def load_engine(
    name: str,
    calibration: Calibration | None,
    model: Model,
    weights: str,
    version: EngineVersionFile | None = None,
    *,
    drafts: bool = False,
) -> Engine:
    """An inference engine: its own time as fitted to serving runs, and its memory policy.

    A machine without serving runs charges no time of the engine's own, which the error of its figures covers. [assumed]

    Args:
        name: Of the engine, or of a generation that was fitted for itself.
        calibration: Of the machine.
        model: What it serves.
        weights: In which format.
        version: Of the engine, other than the one whose rules are built in.
        drafts: Whether layers of multi-token prediction draft.

    Raises:
        CatalogError: An unknown name.
    """
    fitted: dict[str, JsonObject] = calibration.data.get("serving", {}).get("engines", {}) if calibration else {}
    known = sorted({*engine_names(), *(each for each in fitted if "<" in each)})
    if name not in known:
        raise CatalogError(f"unknown engine {name!r}: {did_you_mean(name, known)}")
    engine = Engine(name, BARE, engine_rules(name).memory, version.to_si() if version else None)
    record = fitted.get(engine.runs, fitted.get(engine.family))
    cells = cells_of(model, weights, drafts=drafts)
    return engine if record is None else replace(engine, times=times_of(record, cells, model.layers))


def cells_of(model: Model, weights: str, *, drafts: bool) -> tuple[str, ...]:
    """Whose times stand for a model's among an engine's, the best first: its own, or those of any like it."""
    served = model.expert_dtype or weights
    kind = "moe" if model.is_moe else "dense"
    own = [cell_of(model.name, served, drafts=each) for each in ((True, False) if drafts else (False,))]
    return (*own, model.name, kind)


def under_engine(workload: Workload, name: str) -> Workload:
    """A workload under another inference engine: what that can run, its kernels, its own time and memory policy."""
    rules = engine_rules(name)
    workload = as_configurable(workload, rules)
    hardware, calibration = workload.hardware, None
    if curves := hardware.curves:
        calibration = curves.calibration
        all_reduce = curves.all_reduce if curves.all_reduce in rules.all_reduces else rules.kernels
        hardware = replace(hardware, curves=curves.under(engine=rules.kernels, all_reduce=all_reduce))
    waits = workload.prompt_wait_steps if rules.prompts_wait else 0
    overlaps = workload.two_batch_overlap and rules.overlaps_batches
    drafts = workload.speculation is not None and workload.speculation.draft == MTP
    engine = load_engine(name, calibration, workload.model, workload.precisions.weights, drafts=drafts)
    instead = {"prompt_wait_steps": waits, "two_batch_overlap": overlaps}
    return in_space(replace(workload, hardware=hardware, engine=engine, **instead), name)


def as_configurable(workload: Workload, rules: EngineRules | None) -> Workload:
    """A workload whose collectives run as an engine has options for, or a framework where no engine's rules are given.

    None hides communication behind an operator's own work, gathers in fp8 or merges collectives, and each has options
    for some all-reduces alone. Itself where there is an option for all of it.
    """
    hardware = workload.hardware
    options: tuple[AllReduce | None, ...] = (None, "nccl", *NCCL_ALGORITHMS)
    if rules:
        options = (None, rules.kernels, *rules.all_reduces)
    if hardware.collectives.all_reduce not in options:
        curves, collectives = hardware.curves, replace(hardware.collectives, all_reduce=None)
        hardware = replace(hardware, collectives=collectives, curves=curves and curves.under(all_reduce=curves.engine))
    if hardware.fp8_gather or hardware.merge_collectives:
        hardware = replace(hardware, fp8_gather=False, merge_collectives=False)
    overlaps = workload.two_batch_overlap and rules is not None
    if (hardware, 1, overlaps) == (workload.hardware, workload.overlap_parts, workload.two_batch_overlap):
        return workload
    return replace(workload, hardware=hardware, overlap_parts=1, two_batch_overlap=overlaps)


def load_workload(
    name_or_path: str | Path,
    hardware: str | Path | None = None,
    space: SpaceName | None = None,
    margin: float | None = None,
    batch: BatchGrid | None = None,
    *,
    origin: Origin = Origin.USER,
    **instead: Any,
) -> Workload:
    """A workload with its model and hardware.

    Args:
        name_or_path: A name in configs/workloads or the path of a TOML file.
        hardware: Replaces the hardware that the file names.
        space: Replaces the strategy space that the file names; see `sim.optimum.spaces`.
        margin: Replaces the share of SLO and memory that the file keeps free.
        batch: Replaces the list of batches that the file names.
        origin: Who named the workload; code that its file names is run for a user alone.
        instead: Replaces further keys of the file, and entries of its tables `precisions` and `degrees`; `engine` also
            its space, unless one is given, and "none" takes its engine away; lengths of prompts and answers also its
            context.

    Raises:
        CatalogError: An unknown name or an unusable file.

    >>> load_workload("gpt_moe_1_2t_16k").context_tokens
    16384
    """
    path = config_path("workloads", name_or_path)
    file = read_config(path, WorkloadFile)
    asked: JsonObject = {**instead, "space": space, "margin": margin}
    given = {key: value for key, value in asked.items() if value is not None}
    if batch is not None:
        given["degrees"] = {**given.get("degrees", {}), "batch": batch}
    for table in _TABLES & given.keys():
        given[table] = {**getattr(file, table).model_dump(), **given[table]}
    if given:
        kept = file.model_dump(exclude_unset=True, exclude={key for name in given for key in _FOLLOWS.get(name, ())})
        new = {key: value for key, value in given.items() if (key, value) != ("engine", BARE_MACHINE)}
        try:
            file = WorkloadFile.model_validate({**kept, **new})
        except ValidationError as error:  # of what was given, since the file was valid
            raise CatalogError(first_error_text(error, WorkloadFile)) from error
    # A --hardware path is the caller's, so it is relative to the working directory, not to the workload.
    hardware_path = (
        config_path("hardware", file.hardware, beside=path.parent)
        if hardware is None
        else config_path("hardware", hardware)
    )
    model_path = config_path("models", file.model, beside=path.parent)
    return assembled(
        file, model_path, hardware_path, engine_replaced="engine" in given, beside=path.parent, origin=origin
    )


_TABLES = {"degrees", "precisions"}
"""Tables of a workload file of which single entries are replaced."""
_FOLLOWS = {
    "engine": ("engine", "engine_version", "space"),
    "prompt_tokens": ("context_tokens",),
    "output_tokens": ("context_tokens",),
}
"""Keys of a file that what it says no longer holds for, once another key is replaced."""


def assembled(
    file: WorkloadFile,
    model_path: Path,
    hardware_path: Path,
    *,
    family: str | None = None,
    engine_replaced: bool = False,
    beside: Path | None = None,
    origin: Origin = Origin.USER,
) -> Workload:
    """A workload from its file's content and the files of its model and hardware.

    Args:
        file: Its content.
        model_path: Of the model.
        hardware_path: Of the machine.
        family: What a Hugging Face configuration is read as, whatever it calls itself.
        engine_replaced: Whether the file was not written for its engine: then its formats stay, though the engine may
            not have them (`lacking_formats` of `sim.engines.engine_registry` says so).
        beside: The workload file's folder, which the path of an engine's version is tried against first.
        origin: See `load_workload`.

    Raises:
        CatalogError: An unusable file.
    """
    _check_no_engine_is_asked_for_more(file)
    model_file = read_model(model_path, family)
    try:
        rules = engine_rules(file.engine) if file.engine else None
    except UnknownEngine as error:
        raise CatalogError(str(error)) from error
    version = _engine_version(file, beside)
    rules = rules.of_version(version.to_si()) if rules and version else rules
    kernels = file.kernels or (rules.kernels if rules else None)
    software = {
        "kernels": kernels,
        "all_reduce": file.all_reduce,
        "fp8_gather": file.fp8_gather or None,
        "merge_collectives": file.merge_collectives or None,
    }
    chosen = {key: value for key, value in software.items() if value is not None}
    stated = read_config(hardware_path, HardwareFile).model_copy(update=chosen)
    hardware_file, calibration = _with_calibration(stated, hardware_path)
    precisions, machine = Precisions(**file.precisions.model_dump()), hardware_file.to_si(calibration)
    if rules and (lacks := rules.not_on(machine) if engine_replaced else rules.lacks(precisions, machine)):
        raise CatalogError(f"{lacks[0]}; on the bare machine it can be searched: --engine=none --space={rules.name}")
    if file.prompt_wait_steps and rules and not rules.prompts_wait:
        raise CatalogError(
            f"{rules.title} {rules.version}: the engine does not delay prompts across attention groups: leave out "
            f"prompt_wait_steps, got {file.prompt_wait_steps}"
        )
    digest = hashlib.sha256()
    if calibration:
        digest.update(calibration.digest.encode())
    if file.declared_choices:
        if origin is Origin.RECORD:
            raise NotImported(file.declared_choices)
        digest.update(declare(file.declared_choices).encode())
    own_version = {"engine_version": None} if version is None else {}  # named or not, it is the same engine
    nameless = (
        file.model_copy(update={"model": "", "hardware": "", **own_version}),
        model_file,
        hardware_file.model_copy(update={"calibration": None}),
    )
    for part in (*nameless, *([version] if version else [])):
        digest.update(json.dumps(part.model_dump(mode="json"), sort_keys=True).encode())
    model = model_file.to_si()
    exchange = file.expert_exchange or (rules.expert_exchange if rules else "all_to_all")
    _check_experts(file, model, exchange)
    copies = file.redundant_experts
    speculation = _speculation(file, model, model_path.parent)
    drafts = speculation is not None and speculation.draft == MTP
    weights = precisions.weights
    engine = load_engine(file.engine, calibration, model, weights, version, drafts=drafts) if file.engine else None
    if engine and file.engine_version:
        engine = replace(engine, version_stated=True)
    if speculation and isinstance(speculation.draft, Model):
        digest.update(repr(speculation.draft).encode())
    workload = Workload(
        name=file.name,
        model=model,
        hardware=machine,
        phase=file.phase,
        context_tokens=file.context,
        tpot_slo_s=file.tpot_slo_ms * 1e-3 if file.tpot_slo_ms else math.inf,
        ttft_slo_s=file.ttft_slo_ms * 1e-3 if file.ttft_slo_ms else math.inf,
        max_gpus=file.max_gpus,
        precisions=precisions,
        load_imbalance=file.load_imbalance,
        degrees=file.degrees.to_si(model.layers, model.experts + copies, file.max_gpus),
        config_hash=digest.hexdigest()[:16],
        groups=file.groups,
        margin=file.margin,
        confidence=file.confidence,
        prompt_tokens=file.prompt_tokens or 0,
        output_tokens=file.output_tokens or 0,
        engine=engine,
        chunk_tokens=file.chunk_tokens,
        prompt_wait_steps=file.prompt_wait_steps,
        routing=file.routing,
        expert_exchange=exchange,
        declarations=file.declared_choices,
        speculation=speculation,
        redundant_experts=copies,
        two_batch_overlap=file.two_batch_overlap,
        tp_inner=file.tp_inner,
        overlap_parts=file.overlap_parts,
        stage_layers=_stage_layers(file, model, rules if file.space not in OWN_SPACES else None),
        deepep_mode=file.deepep_mode,
        open_loop=OpenLoop(**file.open_loop.model_dump()) if file.open_loop else OpenLoop(),
        serving=file.serving.to_si() if file.serving else ServingTables(),
    )
    workload = in_space(workload, file.space)
    if workload.two_batch_overlap:
        _check_batches_may_overlap(workload, rules)
    return workload


def _engine_version(file: WorkloadFile, beside: Path | None) -> EngineVersionFile | None:
    """What a workload's engine does otherwise than its built-in rules. Raises: CatalogError."""
    if file.engine_version is None:
        return None
    if file.engine is None:
        raise CatalogError(f"engine_version: the bare machine has none, got {file.engine_version!r}: name an engine")
    engine = file.engine.partition("<")[0]
    if file.engine_version == engine_rules(engine).version:
        return None
    return read_engine_version(engine, file.engine_version, beside)


def _check_experts(file: WorkloadFile, model: Model, exchange: ExpertExchange) -> None:
    """Raises: CatalogError: What is stated about experts changes nothing."""
    of_sending = {"two_batch_overlap": file.two_batch_overlap, "deepep_mode": file.deepep_mode != "auto"}
    of_experts = {
        "redundant_experts": file.redundant_experts,
        "expert_exchange": file.expert_exchange,
        "routing": "routing" in file.model_fields_set,
    }
    if not model.is_moe and (given := [name for name, stated in (of_experts | of_sending).items() if stated]):
        raise CatalogError(f"{given[0]}: {model.name} has no experts: leave it out")
    if exchange != "all_to_all" and (given := [name for name, stated in of_sending.items() if stated]):
        raise CatalogError(
            f"{given[0]}: works with expert_exchange=all_to_all only, and that is {exchange}: change that, or leave "
            "this out"
        )


def _check_batches_may_overlap(workload: Workload, rules: EngineRules | None) -> None:
    """Raises: CatalogError unless strategies are those of the engine that is charged, and half batches overlap there.

    Args:
        workload: As asked.
        rules: Of the engine that is charged.
    """
    judges = engine_rules_of(workload)
    if rules is None or not rules.overlaps_batches or judges is None or judges.name != rules.name:
        who = f"{rules.title} in space {workload.space!r}" if rules else "the bare machine"
        raise CatalogError(f"two_batch_overlap is of SGLang or vLLM, in that engine's own space, not of {who}")


def _check_no_engine_is_asked_for_more(file: WorkloadFile) -> None:
    """Raises: CatalogError where an engine's space is to do what no engine does."""
    beyond = {
        "overlap_parts": (file.overlap_parts > 1, "no plan of an engine pipelines operators"),
        "fp8_gather": (file.fp8_gather, "no engine quantises what it gathers"),
        "merge_collectives": (file.merge_collectives, "no engine merges collectives"),
    }
    for name, (asked, why) in beyond.items():
        if asked and file.space not in OWN_SPACES:
            raise CatalogError(
                f"{name}: {why}, and {file.space!r} is an engine's space: name another one, such as 'joint', or leave "
                f"{name} out"
            )
    if file.tp_inner != 2 and file.space != TWO_DIMENSIONAL:
        raise CatalogError(
            f"tp_inner: sub-axes of tp are of the space {TWO_DIMENSIONAL!r}, got {file.tp_inner} in {file.space!r}: "
            "name that space, or leave tp_inner out"
        )
    if file.all_reduce and file.space not in OWN_SPACES:
        rules = engine_rules(file.space)
        known = tuple(dict.fromkeys((rules.kernels, *rules.all_reduces)))
        if file.all_reduce not in known:
            raise CatalogError(
                f"all_reduce: {rules.title} has no option for {file.all_reduce!r}, but for {', '.join(known)}: name "
                "one of these, another space, such as 'joint', or leave all_reduce out"
            )
    if file.merge_collectives and file.overlap_parts > 1:
        raise CatalogError(
            "merge_collectives: a gather in parts is no one call with that of a weight: leave out overlap_parts or this"
        )


def _stage_layers(file: WorkloadFile, model: Model, rules: EngineRules | None) -> tuple[int, ...]:
    """Layers of each pipeline stage; none where they are shared out evenly. Raises: CatalogError."""
    counts = tuple(int(text) for text in file.stage_layers.split(",") if text)
    if counts and rules is not None and not rules.cuts_stages:
        raise CatalogError(
            f"stage_layers: {rules.title} has no option for the layers of each stage: leave it out, or name another "
            "space, such as 'joint'"
        )
    if counts and (min(counts) < 1 or sum(counts) != model.layers):
        raise CatalogError(
            f"stage_layers: expected layers of each stage, 1 or more, {model.layers} together, got {file.stage_layers} "
            f"({sum(counts)})"
        )
    return counts


def _speculation(file: WorkloadFile, model: Model, beside: Path) -> Speculation | None:
    """What is drafted, or None for nothing. Raises: CatalogError."""
    given = file.speculation
    if given is None or not given.draft_tokens:
        return None
    has_head = model.published.eagle3_repository is not None
    draft = given.draft or (MTP if model.mtp_layers else EAGLE3 if has_head else None)
    if draft is None:
        raise CatalogError(
            f"speculation.draft: {model.name} has no layers of multi-token prediction: name a model, or {NGRAM!r}"
        )
    if draft == MTP and not model.mtp_layers:
        raise CatalogError(f"speculation.draft: {model.name} has no layers of multi-token prediction (mtp_layers)")
    if draft == EAGLE3:
        if not has_head:
            raise CatalogError(
                f"speculation.draft: no public EAGLE-3 head of {model.name} is known: name it in its file, as "
                "eagle3_repository"
            )
        spread = EAGLE3_SPREAD if model.published.measured_drafts == EAGLE3 else ASSUMED_SPREAD
        shares = given.shares or (EAGLE3_SHARE,) * given.draft_tokens
        return Speculation(given.draft_tokens, shares, eagle3_head(model), 0.0 if given.shares else spread, eagle3=True)
    try:
        draft_model = None if draft in (MTP, NGRAM) else load_model(draft, beside=beside)
    except CatalogError as error:
        raise CatalogError(f"speculation.draft: expected {MTP!r}, {EAGLE3!r}, {NGRAM!r} or a model: {error}") from error
    shares, spread = given.shares, 0.0
    if shares is None:
        if draft != MTP:
            raise CatalogError(f"speculation.acceptance is missing: the accepted share of tokens drafted by {draft!r}")
        shares = accepted_drafts(given.draft_tokens, file.prompt_tokens or file.context, file.output_tokens or 0)
        spread = MEASURED_SPREAD if model.published.measured_drafts == MTP else ASSUMED_SPREAD
    if draft_model is None:
        return Speculation(given.draft_tokens, shares, "mtp" if draft == MTP else None, spread)
    if abs(draft_model.vocab - model.vocab) > _PADDING:
        raise CatalogError(
            f"speculation: {draft_model.name} has a vocabulary of {draft_model.vocab:,} tokens, {model.name} one of "
            f"{model.vocab:,}: a draft must share its model's"
        )
    return Speculation(given.draft_tokens, shares, draft_model)


_PADDING = 512
"""By how much vocabularies that are one may differ: rows that fill them up to a multiple. [published] Qwen2's 151,936
of small models and 152,064 of large ones; engines refuse drafts of another vocabulary."""
