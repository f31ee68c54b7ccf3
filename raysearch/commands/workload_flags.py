"""The options that name a workload or describe one, for the commands that take both."""

from __future__ import annotations

import functools
import inspect
import sys
from collections.abc import Callable
from contextvars import ContextVar
from dataclasses import asdict
from enum import StrEnum
from typing import Annotated, Any, get_args

import typer

from envs.strategy_env import brief
from raysearch.commands.options import AnyDegreesOption, GroupsOption, MarginOption, SpaceOption
from raysearch.errors import InputError
from sim.config.described import Description
from sim.workload import Phase, Workload

PhaseName = StrEnum("PhaseName", {name: name for name in get_args(Phase)})
BatchGrid = StrEnum("BatchGrid", {"powers_of_two": "powers_of_two", "any": "any"})

_FROM_FILE = "Workload by name or file"
_BY_OPTIONS = "Workload by options"


def _option(help_text: str, panel: str = _BY_OPTIONS, **more: Any) -> Any:
    return typer.Option(help=help_text, rich_help_panel=panel, **more)


DraftTokensOption = Annotated[
    int | None, _option("Tokens drafted per step (speculative decoding).", min=0, max=64, show_default="0")
]
AcceptanceOption = Annotated[
    str | None,
    _option("Share of drafted tokens accepted where those before them are: 0.8, or one per place: 0.9,0.7."),
]
DraftOption = Annotated[
    str | None,
    _option("'mtp', 'ngram' (costs nothing), or a model as --model.", show_default="mtp if the model has it"),
]
_SPECULATION = {"draft_tokens": DraftTokensOption, "acceptance": AcceptanceOption, "draft": DraftOption}
_FLAGS: dict[str, tuple[Any, Any]] = {
    "workload": (
        Annotated[
            str | None,
            typer.Option(
                "--workload",
                "-w",
                help="Name in configs/workloads, or the path of a TOML file.",
                rich_help_panel=_FROM_FILE,
            ),
        ],
        None,
    ),
    "model": (
        Annotated[
            str | None,
            _option(
                "Name in configs/models, or the path of a TOML file or of a Hugging Face config.json or its folder."
            ),
        ],
        None,
    ),
    "hardware": (
        Annotated[
            str | None,
            _option(
                "Name in configs/hardware, or the path of a TOML file.", show_default="the workload's, else h100_sxm"
            ),
        ],
        None,
    ),
    "phase": (
        Annotated[
            PhaseName | None,
            _option(
                "'decode': a pool that only decodes; 'serve': continuous batching, whose steps also carry prompts; "
                "'prefill': a pool that only computes prompts.",
                show_default="decode",
            ),
        ],
        None,
    ),
    "isl": (Annotated[int | None, _option("Tokens of a prompt.", min=1)], None),
    "osl": (Annotated[int | None, _option("Tokens of an answer.", min=1)], None),
    "engine": (
        Annotated[
            str | None,
            _option(
                "vllm, sglang, trtllm or megatron_core: what it can run (see --space), its own time and memory policy.",
                show_default="the bare machine",
            ),
        ],
        None,
    ),
    "weights": (
        Annotated[
            str | None,
            _option(
                "bf16, fp8, fp8_block, mxfp4, nvfp4 or int4.",
                show_default="the checkpoint's, else its fp8",
            ),
        ],
        None,
    ),
    "kv_cache": (Annotated[str | None, _option("bf16 or fp8.", show_default="the checkpoint's, else fp8")], None),
    "tpot_ms": (Annotated[float | None, _option("Longest time per output token.", show_default="no limit")], None),
    "ttft_ms": (Annotated[float | None, _option("Longest time to the first token.", show_default="no limit")], None),
    "max_gpus": (Annotated[int | None, _option("Device budget.", min=1, show_default="64")], None),
    "chunk_tokens": (
        Annotated[
            int | None,
            _option("Most prompt tokens of a step (chunked prefill).", min=1, show_default="prompts whole"),
        ],
        None,
    ),
    "prompt_wait_steps": (
        Annotated[
            int | None,
            _option(
                "Most steps that a prompt waits for those of other attention groups, so that all groups have theirs in "
                "one step (SGLang's prefill delayer, 30; TensorRT-LLM's enable_balance, 50).",
                min=0,
                max=100_000,
                show_default="0",
            ),
        ],
        None,
    ),
    **{name: (option, None) for name, option in _SPECULATION.items()},
    "groups": (GroupsOption, None),
    "any_degrees": (AnyDegreesOption, None),
    "redundant_experts": (
        Annotated[
            int | None,
            _option("Copies of popular experts per layer, for balance (EPLB).", min=0, max=4096, show_default="0"),
        ],
        None,
    ),
    "space": (SpaceOption, None),
    "margin": (MarginOption, None),
}


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
    given = {name: said.pop(name) for name in _SPECULATION if name in said}
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


def takes_workload(command: Callable[..., None]) -> Callable[..., None]:
    """Gives a command the options that name or describe a workload, and passes it the workload as `workload`.

    A command whose `workload` has a default gets that where no option says one.
    """
    signature = inspect.signature(command, eval_str=True).parameters
    own, needed = [p for p in signature.values() if p.name != "workload"], signature["workload"]

    @functools.wraps(command)
    def with_options(**options: Any) -> None:
        flags = {name: options.pop(name) for name in _FLAGS}
        if needed.default is not needed.empty and all(value is None for value in flags.values()):
            command(workload=needed.default, **options)
            return
        command(workload=workload_of_flags(flags, options.get("batch_grid")), **options)

    keyword = inspect.Parameter.KEYWORD_ONLY
    parameters = [
        inspect.Parameter(name, keyword, default=default, annotation=annotation)
        for name, (annotation, default) in _FLAGS.items()
    ]
    parameters += [parameter.replace(kind=keyword) for parameter in own]
    with_options.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    with_options.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    del with_options.__wrapped__  # typer would ask it for its own options
    return with_options


def workload_of_flags(flags: dict[str, Any], batch_grid: str | None = None) -> Workload:
    """The workload that options name (--workload) or describe (--model ...).

    Raises:
        InputError: Both or neither, or options that say nothing beside a file.
        CatalogError: An unknown name or an unusable file.
    """
    from sim.config.catalog import load_workload
    from sim.config.described import described_workload

    said = {name: _plain(value) for name, value in flags.items() if value is not None}
    _IMPORTED.set(None)
    shared = {name: said.pop(name) for name in _OF_FILES if name in said}
    instead = {**shared, **_speculation(said), **({"batch": batch_grid} if batch_grid else {})}
    instead |= degrees_of(said.pop("any_degrees", None))
    if "workload" in said:
        named, hardware = said.pop("workload"), said.pop("hardware", None)
        instead |= {key: said.pop(name) for name, key in _OF_ANY.items() if name in said}
        if said:
            option = next(iter(said)).replace("_", "-")
            raise InputError(f"--{option} describes a workload, --workload names one: give one or the other")
        return load_workload(named, hardware, **instead)
    if "model" not in said:
        raise InputError("expected --workload NAME, or --model NAME with --isl and --osl; `raysearch list` has names")
    _tell_import(said["model"])
    return described_workload(Description(**{**_defaults(), **said}), instead)


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
