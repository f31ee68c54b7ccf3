"""The workload that options name or describe: those of a command line, and those that a record of a command keeps."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from contextvars import ContextVar
from dataclasses import asdict
from enum import StrEnum
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field

from envs.strategy_env import brief
from raysearch.contexts import too_long
from raysearch.errors import InputError
from raysearch.files import anchored
from sim.config.code import Origin
from sim.config.described import Description
from sim.config.files import Kind
from sim.config.schemas import MTP, NGRAM
from sim.workload import Workload

Word = Annotated[str, Field(max_length=4096)]
"""A name, a path or a short text of a record."""
SPECULATION = ("draft_tokens", "acceptance", "draft")
"""Options of speculative decoding."""


class RecordedOptions(BaseModel):
    """The options of a workload as a record keeps them; their figures are checked where the workload is made."""

    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)

    workload: Word | None = None
    model: Word | None = None
    hardware: Word | None = None
    phase: Word | None = None
    isl: int | None = None
    osl: int | None = None
    engine: Word | None = None
    space: Word | None = None
    weights: Word | None = None
    kv_cache: Word | None = None
    tpot_ms: float | None = None
    ttft_ms: float | None = None
    max_gpus: int | None = None
    chunk_tokens: int | None = None
    prompt_wait_steps: int | None = None
    draft_tokens: int | None = None
    acceptance: Word | None = None
    draft: Word | None = None
    groups: Word | None = None
    any_degrees: Word | None = None
    redundant_experts: int | None = None
    margin: float | None = None
    batch_grid: Word | None = None


def workload_of_options(
    flags: dict[str, Any], batch_grid: str | None = None, *, origin: Origin = Origin.USER
) -> Workload:
    """The workload that a command line names (--workload) or describes (--model ...).

    Says on stderr what was read of a Hugging Face configuration, and keeps it and the options for the command's record.

    Args:
        flags: The options.
        batch_grid: Which batches, in place of the workload's list.
        origin: Who gave them.

    Raises:
        InputError, CatalogError: See `workload_of`.
    """
    from sim.config.files import config_path

    said = {name: _plain(value) for name, value in flags.items() if value is not None}
    said |= {"batch_grid": _plain(batch_grid)} if batch_grid else {}
    _IMPORTED.set(None)
    _ASKED.set(said)
    described = "model" in said and "workload" not in said
    if described:
        _tell_import(said["model"])
    workload = workload_of(said, origin)
    if described:
        longest = workload.prompt_tokens + workload.output_tokens
        for text in too_long(longest, workload.model, config_path("models", said["model"])):
            print(f"warning: {text}", file=sys.stderr)
    return workload


def workload_of(options: Mapping[str, Any], origin: Origin = Origin.USER) -> Workload:
    """The workload that options name (workload) or describe (model ...), as a command line or a record of one has them.

    Args:
        options: By their names; a record's are `RecordedOptions`.
        origin: Whose they are; code that a workload's file names is run for a user's alone.

    Raises:
        InputError: Both or neither, or options that say nothing beside a file.
        CatalogError: An unknown name or an unusable file.

    >>> workload_of({"model": "qwen3_32b", "isl": 4000, "osl": 500, "tpot_ms": 30}).name
    'qwen3_32b_decode'
    """
    from sim.config.catalog import load_workload
    from sim.config.described import described_workload

    said = {name: value for name, value in options.items() if value is not None}
    shared = {name: said.pop(name) for name in _OF_FILES if name in said}
    instead = {**shared, **_speculation(said)}
    instead |= {"batch": said.pop("batch_grid")} if "batch_grid" in said else {}
    instead |= degrees_of(said.pop("any_degrees", None))
    if "workload" in said:
        named, hardware = said.pop("workload"), said.pop("hardware", None)
        instead |= {key: said.pop(name) for name, key in _OF_ANY.items() if name in said}
        if said:
            option = next(iter(said)).replace("_", "-")
            raise InputError(f"--{option} describes a workload, --workload names one: give one or the other")
        return load_workload(named, hardware, origin=origin, **instead)
    if "model" not in said:
        raise InputError("expected --workload NAME, or --model NAME with --isl and --osl; `raysearch list` has names")
    return described_workload(Description(**{**_defaults(), **said}), instead)


_ASKED: ContextVar[dict[str, Any] | None] = ContextVar("asked_options", default=None)


def asked_options() -> dict[str, Any]:
    """The options that the running command's workload is of, for a record: `workload_of` makes the same of them.

    Paths are absolute, so that records are read from any working directory.
    """
    asked = _ASKED.get() or {}
    files: dict[str, Kind] = {
        name: _KINDS[name] for name in _KINDS if name in asked and asked[name] not in (MTP, NGRAM)
    }
    return asked | {name: anchored(kind, asked[name]) for name, kind in files.items()}


_KINDS: Mapping[str, Kind] = {"workload": "workloads", "model": "models", "hardware": "hardware", "draft": "models"}
"""Options that name files, and of which kind."""
_IMPORTED: ContextVar[dict[str, Any] | None] = ContextVar("model_import", default=None)


def model_import() -> dict[str, Any] | None:
    """What the running command read of a Hugging Face configuration, for its JSON; None where it read none."""
    return _IMPORTED.get()


def imported_from() -> str | None:
    """The path of the Hugging Face configuration that the running command read; None where it read none."""
    imported = model_import()
    return imported["path"] if imported else None


def _tell_import(model: str) -> None:
    """Says on stderr what a Hugging Face configuration was understood to say, and keeps it for `model_import`."""
    from sim.config.catalog import imported_model
    from sim.config.files import config_path

    path = config_path("models", model)
    imported = imported_model(path)
    if imported is None:
        return
    _IMPORTED.set({"path": str(path), **imported.told()})
    formats = imported.formats
    experts = f", experts in {formats.experts}" if formats.experts else ""
    print(f"{path}: {imported.family}, weights in {formats.weights or 'a format not known'}{experts}", file=sys.stderr)
    for note in imported.notes:
        print(f"  {note}", file=sys.stderr)
    if imported.unread:
        print(f"  not understood: {brief(', '.join(imported.unread))}", file=sys.stderr)


_OF_FILES = ("space", "margin", "groups", "redundant_experts", "prompt_wait_steps")
"""Options that a named workload takes too, named as the keys of its file are."""
_OF_ANY = {"engine": "engine", "tpot_ms": "tpot_slo_ms", "ttft_ms": "ttft_slo_ms", "max_gpus": "max_gpus"}
"""The others, by the key that they replace in its file."""


def _defaults() -> dict[str, Any]:
    return {name: value for name, value in asdict(Description("")).items() if name != "model"}


def _plain(value: Any) -> Any:
    return value.value if isinstance(value, StrEnum) else value


def _shares(text: str) -> list[float]:
    try:
        return [float(part) for part in text.split(",")]
    except ValueError:
        raise InputError(
            f"--acceptance takes a share such as 0.8, or one per place such as 0.9,0.7; got {text!r}"
        ) from None


def _speculation(said: dict[str, Any]) -> dict[str, Any]:
    """The key `speculation` that options stand for, taken out of what was said; nothing where they are not given.

    Raises:
        InputError: Options of a draft without its length.
    """
    given = {name: said.pop(name) for name in SPECULATION if name in said}
    if not given:
        return {}
    if "draft_tokens" not in given:
        raise InputError(f"--{next(iter(given))} is of speculative decoding: say --draft-tokens N too")
    if "acceptance" in given:
        shares = _shares(given.pop("acceptance"))
        given |= {"acceptance": shares[0]} if len(shares) == 1 else {"accepted": tuple(shares)}
    return {"speculation": given}


def degrees_of(text: str | None) -> dict[str, str]:
    """Keys of a workload's degrees that --any-degrees stands for.

    Raises:
        InputError: Another degree.
    """
    from sim.config.schemas import any_degrees

    try:
        return any_degrees(text) if text is not None else {}
    except ValueError as error:
        raise InputError(f"--any-degrees: {error}") from None
