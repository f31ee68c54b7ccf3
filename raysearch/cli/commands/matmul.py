"""`raysearch matmul`: the cheapest collectives around one sharded matrix product."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated

import typer

from raysearch.base.errors import InputError
from raysearch.cli.commands.options import JsonOption, MachineOption, print_json
from raysearch.cli.commands.settings import Setting, takes_settings
from sim.config.catalog import load_hardware
from sim.near_names import did_you_mean
from sim.prices.dtypes import Dtype
from sim.sharding.placement import PlacementError
from sim.sharding.redistribute import RedistributionError
from sim.sharding.sharded_matmul import parse_matmul
from sim.step.matmul_prices import MATMUL_DTYPES, MatmulObjective, priced_matmuls, unsharded_s

_USUAL_SIZE = 8192
_LARGEST_SIZE = 10_000_000
_LONGEST_AXIS = 10_000
_MOST_AXES = 3
_MOST_DIMS = 5
"""[assumed] Two batch dims; on three axes their plans take half a minute, and each dim more four times as long."""
_MOST_OTHERS = 5


@takes_settings
def matmul(
    product: Annotated[str, typer.Argument(metavar="PRODUCT", help="As in 'A[I, J_X] B[J_X, K] -> C[I, K]'.")],
    mesh: Annotated[str, typer.Option(help="Axes and devices along each, outermost first, as in X=4,Y=8.")],
    sizes: Annotated[
        list[str] | None, Setting("Sizes of dims, as in I=1024,J=4096.", f"{_USUAL_SIZE} for each dim")
    ] = None,
    dtype: Annotated[Dtype, Setting("Format of the operands and of the result.")] = "bf16",
    objective: Annotated[
        MatmulObjective, Setting("What to minimise: 'time', or the 'bytes' that a device sends.")
    ] = "time",
    hardware: MachineOption = "h100_sxm",
    as_json: JsonOption = False,
) -> None:
    """Plan one matrix product of sharded tensors: the cheapest collectives before and after it, in bytes and time.

    A subscript names the axes that shard a dim: A[I_X, J_Y], A[I_XY, J]; {U_X} after a tensor means partial sums over
    X; (B S) is one dim that a view makes of two. Every sharding of the product and every route to it is compared, so no
    other plan is cheaper.

    \b
    Examples:
      raysearch matmul "A[I, J_X] B[J_X, K] -> C[I, K]" --mesh X=4,Y=8
      raysearch matmul "x[B_X, D] W[D, F_Y] -> h[B_X, F_Y]" --mesh X=2,Y=8 --set sizes=B=64,D=8192,F=28672
      raysearch matmul "x[(B S)_X, D] W[D, (H E)_Y] -> q[B_X, S, H_Y, E]" --mesh X=2,Y=8 --set sizes=B=8,H=64,E=128
      raysearch matmul "A[I_X, J] B[J, K_X] -> C[I_X, K]" --mesh X=4 --hardware tpu_v5p --set objective=bytes --json
    """
    from raysearch.base.rich_tables import printer
    from raysearch.reports.explain.matmul_drawing import draw_matmul, matmul_dict, total_text

    if dtype not in MATMUL_DTYPES:
        raise InputError(f"--set dtype: unknown format {dtype!r}: {did_you_mean(dtype, MATMUL_DTYPES)}")
    machine, axes = load_hardware(hardware), _counts("--mesh", mesh.split(","), "X=4,Y=8", _LONGEST_AXIS)
    if len(axes) > _MOST_AXES:
        raise InputError(f"--mesh {mesh}: expected at most {_MOST_AXES} axes, got {len(axes)}")
    given = _counts("--set sizes", sizes or [], "I=1024,J=4096", _LARGEST_SIZE)
    try:
        asked = parse_matmul(product, axes, given, _USUAL_SIZE)
        if len(asked.sizes) > _MOST_DIMS:
            raise InputError(f"{product}: expected at most {_MOST_DIMS} dims, got {len(asked.sizes)}")
        found = priced_matmuls(machine, asked, dtype, objective)
    except (PlacementError, RedistributionError) as error:
        raise InputError(error) from None
    best, others, alone_s = found[0], found[1 : 1 + _MOST_OTHERS], unsharded_s(machine, asked, dtype)
    if as_json:
        setup = {"hardware": machine.name, "dtype": dtype, "objective": objective}
        plans = {"best": matmul_dict(best), "others": [*map(matmul_dict, others)]}
        print_json({**setup, "mesh": axes, "sizes": dict(asked.sizes), "unsharded_s": alone_s, **plans})
        return
    shown_sizes = ", ".join(f"{dim} = {size:,}" for dim, size in asked.sizes.items())
    shown_mesh = " x ".join(f"{axis} = {length}" for axis, length in axes.items())
    console = printer()
    console.print(f"{product}\non a mesh of {shown_mesh} of {machine.name}, {dtype}, {shown_sizes}\n")
    blocks = list(draw_matmul(best, others))
    console.print(blocks[0], total_text(best, alone_s), *blocks[1:], sep="\n")


def _counts(option: str, texts: Sequence[str], example: str, most: int) -> dict[str, int]:
    """Names and whole numbers, as in X=4."""
    found: dict[str, int] = {}
    for text in texts:
        name, _, count = text.partition("=")
        name, count = name.strip(), count.strip()
        if (
            not name.isidentifier()
            or not count.isascii()
            or not count.isdigit()
            or len(count) > 9
            or not 1 <= int(count) <= most
        ):
            raise InputError(f"{option}: expected names with counts from 1 to {most:,}, as in {example}, got {text!r}")
        if name in found:
            raise InputError(f"{option}: {name} is given twice")
        found[name] = int(count)
    return found
