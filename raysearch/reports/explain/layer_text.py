"""A layer as text: one column per strategy, rows aligned."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import zip_longest

from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

from raysearch.base.rich_tables import bytes_text
from raysearch.reports.explain.picture import Edge, Node, Picture, group_text
from sim.prices.collectives import Collective

STYLES = {
    "all_reduce": "bold red",
    "reduce_scatter": "bold magenta",
    "all_gather": "bold blue",
    "all_to_all": "bold cyan",
}
_BAR = 9
_NAME = 37
"""Columns for an op and how its weight lies: "► ffn2 ffn hidden  W[e, f_moe_tp, d]" fits."""


def draw_text(heading: str, groups: Sequence[Sequence[Picture]]) -> list[RenderableType]:
    """What to print for one strategy, or for several side by side.

    Args:
        heading: Above all, in two lines: what is priced, and the degrees.
        groups: Pictures of the strategies, per group of layers.
    """
    first = groups[0]
    marks = [Text("► marks the ops on which the strategies differ")] if len(first) > 1 else []
    tables = [shown for pictures in groups for shown in _section(pictures, named=len(groups) > 1)]
    return [Text(heading, style="bold"), *tables, *marks, *map(_extrapolated, filter(_extrapolates, first))]


def _section(pictures: Sequence[Picture], *, named: bool) -> Iterator[RenderableType]:
    if named:
        yield Text(f"\n{group_text(pictures[0])}", style="bold underline")
    slowest_s = max(node.time_s for picture in pictures for node in picture.nodes)
    table = Table(box=None, padding=(0, 3, 0, 0), show_header=False)
    for _ in pictures:
        table.add_column(no_wrap=True, width=58)
    table.add_row(*(Text(picture.title, style="bold") for picture in pictures))
    table.add_row(*map(_figures, pictures))
    for nodes in zip(*(picture.nodes for picture in pictures), strict=True):
        differs = len({node.choice for node in nodes}) > 1
        for lines in zip_longest(*map(_edge_lines, nodes), fillvalue=Text("  │")):
            table.add_row(*lines)
        for line in zip(*(_op_lines(node, slowest_s, differs=differs) for node in nodes), strict=True):
            table.add_row(*line)
        for lines in zip_longest(*(list(map(_collective, node.inside)) for node in nodes), fillvalue=Text("  │")):
            table.add_row(*lines)
    table.add_row(*(Text(f"  ▼ {picture.nodes[-1].output.named} to the next layer") for picture in pictures))
    yield table


def _extrapolates(picture: Picture) -> bool:
    return bool(picture.extrapolated)


def _extrapolated(picture: Picture) -> Text:
    return Text(f"extrapolated in {picture.title}: {'; '.join(picture.extrapolated)}", style="yellow")


def _figures(picture: Picture) -> Text:
    share = picture.communication_s / picture.layer_s
    text = f"{picture.tokens_per_s_per_gpu:,.1f} tok/s/GPU ±{picture.expected_error:.0%}"
    text += f", layer {picture.layer_s * 1e6:,.1f} us, {share:.0%} comm"
    kinds = ", ".join(violation.kind for violation in picture.violations)
    return Text(text, style="green") if picture.feasible else Text(f"{text}\nnot allowed: {kinds}", style="red")


def _edge_lines(node: Node) -> list[Text]:
    return [line for edge in node.edges for line in _edge(edge)]


def _edge(edge: Edge) -> list[Text]:
    mark = "│" if edge.main else "├"
    lines = [Text(f"  {mark} {edge.produced.named}", style="" if edge.main else "dim")]
    for collective in edge.collectives:
        lines.append(_collective(collective))
        lines.append(Text(f"  {mark} {edge.arrives.named}", style="" if edge.main else "dim"))
    return lines


def _collective(collective: Collective) -> Text:
    figures = f"{bytes_text(collective.bytes_per_device)}, {collective.time_s * 1e6:,.1f} us"
    text = Text("  ◆ ", style=STYLES.get(collective.kind, ""))
    return text.append(f"{collective.kind} over {collective.axis}").append(f"  {figures}", style="not bold")


def _op_lines(node: Node, slowest_s: float, *, differs: bool) -> list[Text]:
    label = "" if node.label == "none" else f" {node.label}"
    name = Text(f"{'►' if differs else ' '} ").append(node.name, style="bold").append(label, style="yellow")
    if node.weight:
        name.append(f"  {node.weight.named}", style="dim")
    name.pad_right(max(_NAME - len(name), 1))
    filled = max(round(_BAR * node.time_s / slowest_s), 1)
    kernel = round(filled * node.kernel_time_s / node.time_s) if node.time_s else 0
    name.append(f"{node.time_s * 1e6:7,.1f} us ").append("█" * kernel, style="dim").append(
        "█" * (filled - kernel), "red"
    )
    return [name]
