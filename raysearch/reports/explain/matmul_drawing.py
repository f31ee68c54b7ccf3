"""A sharded matrix product as text: each tensor from where it lies to where it is used, and the other ways."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

from raysearch.base.rich_tables import bytes_text, plain_table
from raysearch.reports.explain.layer_text import STYLES
from sim.json_object import JsonObject
from sim.prices.priced import PricedKernel
from sim.sharding.layout import Layout, format_layout, format_named, local_shape
from sim.sharding.placement import PlacementError
from sim.sharding.routes import Route, RouteStep
from sim.sharding.sharded_matmul import MatmulPlan, ShardedMatmul, ShardedTensor
from sim.step.matmul_prices import PricedMatmul


def draw_matmul(best: PricedMatmul, others: Sequence[PricedMatmul]) -> Iterator[RenderableType]:
    """The best plan from top to bottom, and a table of the others."""
    plan = best.plan
    first, second, result = (*plan.matmul.operands, plan.matmul.result)
    moves = iter(best.moves)
    table = Table(box=None, padding=(0, 3, 0, 0), show_header=False)
    table.add_column(no_wrap=True)
    for _ in range(2):
        table.add_column(no_wrap=True, justify="right")
    for tensor, route in zip((first, second), plan.before, strict=True):
        _draw_route(table, plan.matmul, tensor, route, moves)
    table.add_row(_product_text(plan), f"{plan.flops / 1e9:,.3g} GFLOP", _time_text(best.product), style="bold")
    _draw_route(table, plan.matmul, result, plan.after, moves, arrow_only=True)
    yield table
    if others:
        rows = [(_product_text(each.plan), *_figures(each)) for each in others]
        columns = ("other ways to multiply", "sent", "communication us", "product us", "total us")
        yield plain_table(None, columns, rows)


def matmul_dict(priced: PricedMatmul) -> JsonObject:
    """A plan for programs."""
    plan, moves = priced.plan, iter(priced.moves)
    first, second, result = (*plan.matmul.operands, plan.matmul.result)

    def steps(tensor: ShardedTensor, route: Route) -> list[JsonObject]:
        return [
            {
                "collective": step.collective or "slice",
                "axes": _axes(plan.matmul, step),
                "tensor": _named(plan.matmul, tensor, step.layout),
                "sent_bytes": step.bytes_per_device,
                "time_s": next(moves).time_s,
            }
            for step in route.steps
        ]

    return {
        "product": _product_text(plan),
        "moves": {
            first.name: steps(first, plan.before[0]),
            second.name: steps(second, plan.before[1]),
            result.name: steps(result, plan.after),
        },
        "flops_per_device": plan.flops,
        "sent_bytes_per_device": plan.sent_bytes,
        "communication_s": priced.communication_s,
        "product_s": priced.product.time_s,
        "total_s": priced.total_s,
        "overlapped_s": priced.overlapped_s,
        "interval_s": priced.interval_s,
    }


def _draw_route(
    table: Table,
    matmul: ShardedMatmul,
    tensor: ShardedTensor,
    route: Route,
    moves: Iterator[PricedKernel],
    *,
    arrow_only: bool = False,
) -> None:
    if not arrow_only:
        table.add_row(_laid(matmul, tensor, route.source), "", "")
    for step in route.steps:
        words = "slice along" if step.collective is None else step.collective.replace("_", "-") + " over"
        line = Text.assemble(
            "  │ ", (f"{words} {' x '.join(_axes(matmul, step))}", STYLES.get(step.collective or "", ""))
        )
        moved = next(moves)
        sent = bytes_text(step.bytes_per_device) if step.collective else ""
        table.add_row(line, sent, _time_text(moved) if step.collective else "")
        table.add_row(f"  ▼ {_laid(matmul, tensor, step.layout)}", "", "")
    if not arrow_only:
        table.add_row("", "", "")


def _axes(matmul: ShardedMatmul, step: RouteStep) -> list[str]:
    return list(matmul.mesh)[step.axis : step.axis + step.span]


def _laid(matmul: ShardedMatmul, tensor: ShardedTensor, layout: Layout) -> str:
    shape = local_shape(matmul.shape(tensor), layout, matmul.degrees)
    return f"{_named(matmul, tensor, layout)}   {' x '.join(f'{size:,}' for size in shape)} per device"


def _named(matmul: ShardedMatmul, tensor: ShardedTensor, layout: Layout) -> str:
    try:
        return format_named(tensor.name, tensor.dims, layout, tuple(matmul.mesh))
    except PlacementError:  # stripes, on the way between two layouts
        return f"{tensor.name}[{', '.join(tensor.dims)}] as {format_layout(layout)}"


def _product_text(plan: MatmulPlan) -> str:
    matmul, result = plan.matmul, plan.matmul.result
    operands = [
        _named(matmul, tensor, tuple(rule.inputs[index] for rule in plan.rules))
        for index, tensor in enumerate(matmul.operands)
    ]
    return f"{operands[0]} · {operands[1]} -> {_named(matmul, result, plan.product)}"


def _time_text(priced: PricedKernel) -> str:
    return f"{priced.time_s * 1e6:,.1f} us"


def _figures(priced: PricedMatmul) -> tuple[str, ...]:
    times = (priced.communication_s, priced.product.time_s, priced.total_s)
    return (bytes_text(priced.plan.sent_bytes), *(f"{time_s * 1e6:,.1f}" for time_s in times))


def total_text(priced: PricedMatmul, alone_s: float) -> str:
    """What a plan takes in all, in two lines.

    Args:
        priced: The plan.
        alone_s: Seconds of the whole product on one device.
    """
    low, high = (time_s * 1e6 for time_s in priced.interval_s)
    devices = math.prod(priced.plan.matmul.degrees)
    return (
        f"{priced.total_s * 1e6:,.1f} us in all, with 90 % confidence {low:,.1f} to {high:,.1f}; "
        f"{priced.overlapped_s * 1e6:,.1f} us where communication and product overlap fully\n"
        f"{bytes_text(priced.plan.sent_bytes)} sent by each of {devices} devices; "
        f"one device alone would multiply for {alone_s * 1e6:,.1f} us"
    )
