"""`raysearch explain`: the layer as a picture, beside the same under a second strategy."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from raysearch.commands.evaluate import parse_dims
from raysearch.commands.options import HardwareOption, JsonOption, WorkloadOption, print_json
from raysearch.errors import InputError
from sim.catalog import load_workload
from sim.simulate import evaluate
from sim.types import Strategy
from sim.validate import check_strategy


def explain_strategy(
    workload: WorkloadOption,
    tp: Annotated[int, typer.Option(help="Tensor-parallel degree.")],
    ep: Annotated[int, typer.Option(help="Expert-parallel degree.")],
    pp: Annotated[int, typer.Option(help="Pipeline-parallel degree.")],
    batch: Annotated[int, typer.Option(help="Sequences of one microbatch over the ep group.")],
    dims: Annotated[
        str,
        typer.Option(help="One number per fused op (0, 1: its dim 0 or 1; 2: none), or 'megatron', 'megatron-sp'."),
    ],
    against: Annotated[
        str | None, typer.Option(help="Dims of a second strategy of the same degrees, as --dims takes them.")
    ] = None,
    svg: Annotated[Path | None, typer.Option(help="Write the picture to this file instead of the terminal.")] = None,
    hardware: HardwareOption = None,
    as_json: JsonOption = False,
) -> None:
    """Draw one layer: ops, how each tensor lies, and the collectives between them with bytes and time.

    \b
    Examples:
      raysearch explain -w gpt_moe_1_2t_16k --tp 8 --ep 16 --pp 2 --batch 512 --dims megatron
      raysearch explain -w gpt_moe_1_2t_16k --tp 8 --ep 16 --pp 2 --batch 512 --dims megatron-sp --against megatron --svg layer.svg
    """  # noqa: E501
    from raysearch.explain.picture import picture_dict, picture_of

    loaded = load_workload(workload, hardware)
    pictures = []
    for text in (dims, against) if against is not None else (dims,):
        strategy = Strategy(tp, ep, pp, batch, parse_dims(text, loaded.model))
        check_strategy(loaded, strategy)
        title = f"{text} ({','.join(map(str, strategy.dims))})" if not text[:1].isdigit() else f"dims {text}"
        pictures.append(picture_of(title, loaded, evaluate(loaded, strategy)))
    heading = f"{loaded.name} on {loaded.hardware.name}: tp {tp}, ep {ep}, pp {pp}, batch {batch}"
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
