"""The marks a picture is made of: tensors, collectives, lines and texts, as SVG elements."""

from __future__ import annotations

from xml.etree.ElementTree import Element, SubElement

from raysearch.base.rich_tables import bytes_text
from raysearch.reports.explain.picture import ShownTensor
from sim.prices.collectives import Collective
from sim.sharding.placement import parse_placement

COLOURS = {
    "all_reduce": "#c8413b",
    "reduce_scatter": "#8a4fa8",
    "all_gather": "#2b6cb0",
    "all_to_all": "#16877a",
}
"""A hue per collective, distinguishable by the colour-blind too; each pill also says its name."""
KERNEL, INK, FAINT, PAPER, BAND = "#64707d", "#1d2733", "#7b8794", "#ffffff", "#fff3c9"
FILL = "#f2b134"
GLYPH = 22
LETTER = 0.58
"""Width of a letter over its size, half of them bold. [assumed] of DejaVu Sans, the widest of the fonts asked for"""


def tensor(column: Element, shown: ShownTensor, x: float, y: float, note: str = "") -> None:
    """A tensor on the line that runs down at x: its glyph, its name with its axes, its placement."""
    rect(column, x - GLYPH / 2 - 3, y + 2, GLYPH + 6, GLYPH + 8, PAPER)
    glyph(column, shown, x - GLYPH / 2, y + 6)
    text(column, x + GLYPH / 2 + 10, y + 21, shown.named, 12)
    extent = 6.7 * len(shown.named)
    text(column, x + GLYPH / 2 + 18 + extent, y + 21, f"{shown.placement}  {note}".strip(), 11, fill=FAINT)


def glyph(column: Element, shown: ShownTensor, x: float, y: float) -> None:
    """A square for a tensor: what one of four ranks holds is filled; parts lie stacked."""
    placement = parse_placement(shown.placement)
    if placement.holds == "part":
        for back in (6, 3, 0):
            sheet = rect(column, x + back - 2, y - back + 2, GLYPH - 4, GLYPH - 4, "#fae3ae")
            sheet.set("stroke", INK)
        text(column, x + GLYPH / 2 - 4, y + 16, "Σ", 13, weight="bold", anchor="middle")
        return
    if not placement.dims:
        rect(column, x, y, GLYPH, GLYPH, FILL).set("stroke", INK)
        return
    rect(column, x, y, GLYPH, GLYPH, PAPER).set("stroke", INK)
    by_columns = placement.dims[0] == shown.dims - 1
    quarter = GLYPH / 4
    filled = (quarter, GLYPH) if by_columns else (GLYPH, quarter)
    rect(column, x, y, *filled, FILL).set("stroke", INK)
    for cut in (2, 3):
        at = cut * quarter
        ends = (x + at, y, x + at, y + GLYPH) if by_columns else (x, y + at, x + GLYPH, y + at)
        line(column, *ends, colour=FAINT)


def pill(column: Element, x: float, y: float, width: float, collective: Collective, *, small: bool = False) -> None:
    """A collective: its name, bytes and time on its colour."""
    height = 28 if small else 22
    rect(column, x, y, width, height, COLOURS.get(collective.kind, KERNEL), radius=11)
    name = f"{collective.kind.replace('_', '-')} over {collective.axis}"
    figures = f"{bytes_text(collective.bytes_per_device)} · {collective.time_s * 1e6:,.1f} µs"
    if small:
        text(column, x + width / 2, y + 12, name, 10, fill=PAPER, anchor="middle", weight="bold")
        text(column, x + width / 2, y + 23, figures, 10, fill=PAPER, anchor="middle")
    else:
        size = fitting(f"{name}  {figures}", width - 24, 11)
        text(column, x + 12, y + 15, name, size, fill=PAPER, weight="bold")
        text(column, x + width - 12, y + 15, figures, size, fill=PAPER, anchor="end")


def fitting(words: str, width: float, size: int) -> int:
    """The font size, at most `size`, at which words are no wider than `width`."""
    return min(size, int(width / (LETTER * len(words))))


def rect(parent: Element, x: float, y: float, width: float, height: float, fill: str, *, radius: float = 0) -> Element:
    """A rectangle."""
    figures = {"x": x, "y": y, "width": width, "height": height, **({"rx": radius} if radius else {})}
    return SubElement(parent, "rect", {name: f"{value:g}" for name, value in figures.items()}, fill=fill)


def text(
    parent: Element,
    x: float,
    y: float,
    words: str,
    size: int,
    *,
    fill: str = INK,
    weight: str = "normal",
    anchor: str = "start",
) -> Element:
    """A line of text; `anchor` says which of its ends x is."""
    attributes = {"font-size": str(size), "font-weight": weight, "text-anchor": anchor, "xml:space": "preserve"}
    element = SubElement(parent, "text", attributes, x=f"{x:g}", y=f"{y:g}", fill=fill)
    element.text = words
    return element


def line(
    parent: Element, x1: float, y1: float, x2: float, y2: float, *, colour: str = INK, pointed: bool = False
) -> None:
    """A line, with an arrow's head at its end if pointed."""
    ends = {"x1": x1, "y1": y1, "x2": x2, "y2": y2}
    SubElement(parent, "line", {name: f"{value:g}" for name, value in ends.items()}, stroke=colour)
    if pointed:
        arrow(parent, x2, y2)


def arrow(parent: Element, x: float, y: float, *, sideways: bool = False) -> None:
    """An arrow's head that points down, or to the right."""
    corners = ((x - 7, y - 4), (x - 7, y + 4)) if sideways else ((x - 4, y - 7), (x + 4, y - 7))
    points = " ".join(f"{a:g},{b:g}" for a, b in ((x, y), *corners))
    SubElement(parent, "polygon", points=points, fill=FAINT if sideways else INK)
