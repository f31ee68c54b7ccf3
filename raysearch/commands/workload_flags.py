"""The options that name a workload or describe one, for the commands that take both."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from enum import StrEnum
from typing import Annotated, Any

import typer

from raysearch.commands.options import AnyDegreesOption, GroupsOption, MarginOption, SpaceOption
from raysearch.described import SPECULATION, workload_of_options
from sim.serving.phases import phases

BatchGrid = StrEnum("BatchGrid", {"powers_of_two": "powers_of_two", "any": "any"})

BatchGridOption = Annotated[
    BatchGrid | None,
    typer.Option(
        "--batch",
        help="'any': every batch; 'powers_of_two': the paper's list.",
        show_default="the workload's list, else powers_of_two",
    ),
]

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
PromptWaitOption = Annotated[
    int | None,
    _option(
        "Most steps that a prompt waits for those of other attention groups, so that all groups have theirs in "
        "one step (SGLang's prefill delayer, 30; TensorRT-LLM's enable_balance, 50).",
        min=0,
        max=100_000,
        show_default="0",
    ),
]
_SPECULATION = dict(zip(SPECULATION, (DraftTokensOption, AcceptanceOption, DraftOption), strict=True))
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
            str | None,
            _option(
                f"{'; '.join(f'{phase.name!r}: {phase.summary}' for phase in phases())}.",
                show_default="decode",
                metavar=f"[{'|'.join(phase.name for phase in phases())}]",
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
                show_default="as published: the checkpoint's, else its fp8, or bf16 beside 4-bit experts",
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
    "prompt_wait_steps": (PromptWaitOption, None),
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


def takes_workload(command: Callable[..., None]) -> Callable[..., None]:
    """Gives a command the options that name or describe a workload, and passes it the workload as `workload`.

    A command whose `workload` has a default gets that where no option says one.
    """
    signature = inspect.signature(command, eval_str=True).parameters
    own, needed = [p for p in signature.values() if p.name != "workload"], signature["workload"]

    @functools.wraps(command)
    def with_options(**options: Any) -> None:
        flags = {name: options.pop(name, None) for name in _FLAGS}
        if needed.default is not needed.empty and all(value is None for value in flags.values()):
            command(workload=needed.default, **options)
            return
        command(workload=workload_of_options(flags, options.get("batch_grid")), **options)

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
