"""`raysearch explain`: the layer as a picture, beside the same under a second strategy."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from raysearch.commands.options import HardwareOption, JsonOption, WorkloadOption, print_json
from raysearch.commands.strategy import (
    BatchOption,
    CpOption,
    DimsOption,
    DpOption,
    EpOption,
    MoeTpOption,
    PpOption,
    TpOption,
    strategy_of,
)
from raysearch.errors import InputError
from raysearch.files import degrees_text
from sim.catalog import load_workload
from sim.simulate import evaluate


def explain_strategy(
    workload: WorkloadOption,
    tp: TpOption,
    ep: EpOption,
    pp: PpOption,
    batch: BatchOption,
    dims: DimsOption,
    against: Annotated[
        str | None, typer.Option(help="Dims of a second strategy of the same degrees, as --dims takes them.")
    ] = None,
    svg: Annotated[Path | None, typer.Option(help="Write the picture to this file instead of the terminal.")] = None,
    cp: CpOption = 1,
    dp: DpOption = None,
    moe_tp: MoeTpOption = None,
    hardware: HardwareOption = None,
    as_json: JsonOption = False,
) -> None:
    """Draw one layer: ops, how each tensor lies, and the collectives between them with bytes and time.

    \b
    Examples:
      raysearch explain -w gpt_moe_1_2t_16k --tp 8 --ep 16 --pp 2 --batch 512 --dims megatron
      raysearch explain -w gpt_moe_1_2t_16k --tp 8 --ep 16 --pp 2 --batch 512 --dims megatron-sp --against megatron --svg layer.svg
    """  # noqa: E501
    from raysearch.explain.picture import Picture, picture_dict, picture_of

    loaded = load_workload(workload, hardware)
    pictures: list[Picture] = []
    for text in (dims, against) if against is not None else (dims,):
        strategy = strategy_of(loaded, tp, ep, pp, batch, text, cp, dp, moe_tp)
        title = f"{text} ({','.join(map(str, strategy.dims))})" if not text[:1].isdigit() else f"dims {text}"
        pictures.append(picture_of(title, loaded, evaluate(loaded, strategy)))
    heading = f"{loaded.name} on {loaded.hardware.name}: {degrees_text(strategy)}"
    if svg is not None:
        _write(svg, heading, pictures)
    if as_json:
        print_json({"heading": heading, "pictures": [*map(picture_dict, pictures)], "svg": str(svg) if svg else None})
    elif svg is not None:
        print(f"Picture: {svg}")
    else:
        from raysearch.explain.terminal import draw
        from raysearch.tables import printer

        printer().print(*draw(heading, pictures), sep="\n")


def _write(path: Path, heading: str, pictures: list) -> None:
    from raysearch.explain.svg import draw

    try:
        path.write_text(draw(heading, pictures), encoding="utf-8")
    except OSError as error:
        raise InputError(f"cannot write --svg {path}: {error.strerror}; name a file in a folder that exists") from None
