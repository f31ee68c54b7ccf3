"""A layer as SVG: one column per strategy, rows aligned, so that the eye compares op with op."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from xml.etree import ElementTree
from xml.etree.ElementTree import Element, SubElement

from raysearch.explain.picture import Edge, Held, Node, Picture
from sim.placement import parse_placement
from sim.types import Collective

COLOURS = {
    "all_reduce": "#c8413b",
    "reduce_scatter": "#8a4fa8",
    "all_gather": "#2b6cb0",
    "all_to_all": "#16877a",
}
"""A hue per collective, told apart by the colour-blind too; each pill also says its name."""
KERNEL, INK, FAINT, PAPER, BAND = "#64707d", "#1d2733", "#7b8794", "#ffffff", "#fff3c9"
FILL = "#f2b134"

WIDTH, GAP, MARGIN, TOP = 610, 30, 24, 180
SPINE, BOX_LEFT, BOX_WIDTH, BAR_LEFT, BAR_WIDTH = 250, 110, 280, 404, 130
TENSOR, PILL, OP, INSIDE, GLYPH = 36, 30, 50, 26, 22


def draw(heading: str, pictures: Sequence[Picture]) -> str:
    """The SVG document of one strategy, or of several side by side."""
    rows = list(zip(*(picture.nodes for picture in pictures), strict=True))
    tops, bottom = _rows(rows)
    width = 2 * MARGIN + len(pictures) * WIDTH + (len(pictures) - 1) * GAP
    height = bottom + TENSOR + 40
    root = Element(
        "svg",
        xmlns="http://www.w3.org/2000/svg",
        viewBox=f"0 0 {width} {height}",
        width=str(width),
        height=str(height),
        role="img",
    )
    root.set("font-family", "Inter, 'Helvetica Neue', 'DejaVu Sans', Arial, sans-serif")
    SubElement(root, "title").text = heading
    _rect(root, 0, 0, width, height, PAPER)
    _text(root, MARGIN, 36, heading, 19, weight="bold")
    _legend(root, MARGIN, 64, bands=len(pictures) > 1)
    slowest_s = max(node.time_s for row in rows for node in row)
    _bands(root, rows, tops, width)
    for index, picture in enumerate(pictures):
        column = SubElement(root, "g", transform=f"translate({MARGIN + index * (WIDTH + GAP)},0)")
        _header(column, picture, max(other.layer_s for other in pictures))
        _lanes(column, picture, tops)
        for node, top in zip(picture.nodes, tops, strict=True):
            _edges(column, node, top, note="from the layer above" if node is picture.nodes[0] else "")
            _op(column, node, top[1], slowest_s)
        _line(column, SPINE, bottom, SPINE, bottom + 8)
        _tensor(column, picture.nodes[-1].output, bottom + 8, "to the next layer")
    ElementTree.indent(root)
    return ElementTree.tostring(root, encoding="unicode") + "\n"


# --- rows ---------------------------------------------------------------------------------------------

Row = tuple[int, int, int]
"""y where its inputs begin, where its box begins, where its box ends."""


def _rows(rows: Sequence[Sequence[Node]]) -> tuple[list[Row], int]:
    y, tops = TOP, list[Row]()
    for nodes in rows:
        box = y + max(max(_edge_height(edge) if edge.main else 0 for edge in node.edges) for node in nodes)
        box = max(box, y + 14 + max(sum(32 for edge in node.edges if _moves_aside(edge)) for node in nodes))
        end = box + OP + max(INSIDE * len(node.inside) for node in nodes)
        tops.append((y, box, end))
        y = end
    return tops, y


def _edge_height(edge: Edge) -> int:
    return 16 + TENSOR + len(edge.collectives) * (PILL + TENSOR)


def _moves_aside(edge: Edge) -> bool:
    return bool(edge.collectives) and not edge.main


def _bands(root: Element, rows: Sequence[Sequence[Node]], tops: Sequence[Row], width: int) -> None:
    """Paints what differs between the strategies."""
    for nodes, (_, box, end) in zip(rows, tops, strict=True):
        if len({node.choice for node in nodes}) > 1:
            _rect(root, 8, box - 5, width - 16, end - box + 10, BAND, radius=8)


# --- one column ---------------------------------------------------------------------------------------


def _header(column: Element, picture: Picture, slowest_layer_s: float) -> None:
    _text(column, 0, 122, picture.title, 15, weight="bold")
    kinds = ", ".join(violation.kind for violation in picture.violations)
    state = "" if picture.feasible else f"   not allowed: {kinds}"
    figures = f"{picture.tokens_per_s_per_gpu:,.1f} tokens/s/GPU   {picture.tpot_s * 1e3:.2f} ms per token"
    _text(column, 0, 141, figures + state, 12, fill=INK if picture.feasible else COLOURS["all_reduce"])
    x, scale = 0.0, 380 / slowest_layer_s
    for colour, seconds in _shares(picture.nodes):
        _rect(column, x, 151, seconds * scale, 12, colour)
        x += seconds * scale
    share = picture.communication_s / picture.layer_s
    _text(column, x + 8, 161, f"layer {picture.layer_s * 1e6:,.1f} µs, {share:.0%} communication", 12)


def _shares(nodes: Sequence[Node]) -> Iterator[tuple[str, float]]:
    yield KERNEL, sum(node.kernel_time_s for node in nodes)
    for kind, colour in COLOURS.items():
        yield colour, sum(c.time_s for node in nodes for c in _collectives(node) if c.kind == kind)


def _collectives(node: Node) -> list[Collective]:
    return [c for edge in node.edges for c in edge.collectives] + list(node.inside)


def _edges(column: Element, node: Node, row: Row, note: str) -> None:
    """The tensor from the op above, on the spine, with its collectives."""
    y, box, _ = row
    _line(column, SPINE, y, SPINE, box - 1, arrow=True)
    for edge in node.edges:
        if edge.main:
            _tensor(column, edge.held, y + 8, note)
            y += 8 + TENSOR
            for collective in edge.collectives:
                _pill(column, BOX_LEFT + 4, y, BOX_WIDTH - 8, collective)
                _tensor(column, edge.arrives, y + PILL - 2)
                y += PILL + TENSOR


def _lanes(column: Element, picture: Picture, tops: Sequence[Row]) -> None:
    """The tensors that pass ops by, down the left side, each with its collectives where it enters."""
    lane_of = {name: 14 + 20 * index for index, name in enumerate(("routing", "ffn_in", "residual_in", "residual_mid"))}
    lane_of["residual_mid"] = lane_of["residual_in"]
    for index, node in enumerate(picture.nodes):
        aside = [edge for edge in node.edges if not edge.main]
        box, pill_top = tops[index][1], tops[index][1] - 6
        for place, edge in enumerate(aside):
            # It leaves the spine where its tensor stands, above the op that follows its producer.
            start = tops[edge.producer + 1][0] + 8 + TENSOR // 2
            end, x = box + 14 + 20 * place, lane_of.get(edge.held.name, 14)
            path = f"M {SPINE - GLYPH // 2 - 2} {start} H {x + 8} Q {x} {start} {x} {start + 8} V {end - 8} "
            path += f"Q {x} {end} {x + 8} {end} H {BOX_LEFT - 6}"
            SubElement(column, "path", d=path, fill="none", stroke=FAINT).set("stroke-width", "1.4")
            _arrow(column, BOX_LEFT - 1, end, sideways=True)
            label = _text(column, 0, 0, edge.held.named, 10, fill=FAINT)
            label.set("transform", f"translate({x + 12},{start + 14}) rotate(90)")
            for collective in edge.collectives:
                pill_top -= 32
                _pill(column, x - 14, pill_top, 128, collective, small=True)
                _glyph(column, edge.arrives, BOX_LEFT - 40, end - GLYPH / 2)


def _op(column: Element, node: Node, y: int, slowest_s: float) -> None:
    height = OP + INSIDE * len(node.inside)
    box = _rect(column, BOX_LEFT, y, BOX_WIDTH, height - 2, "#f5f7f9", radius=7)
    box.set("stroke", INK)
    _text(column, BOX_LEFT + 12, y + 20, node.name, 14, weight="bold")
    cut = "replicated" if node.label == "none" else f"cut along {node.label}"
    _text(column, BOX_LEFT + 12, y + 37, cut, 11, fill=FAINT if node.label == "none" else INK)
    if node.weight:
        _glyph(column, node.weight, BOX_LEFT + BOX_WIDTH - 32, y + 7)
        _text(column, BOX_LEFT + BOX_WIDTH - 10, y + 42, node.weight.named, 10, anchor="end", fill=FAINT)
    for index, collective in enumerate(node.inside):
        _pill(column, BOX_LEFT + 6, y + OP - 4 + index * INSIDE, BOX_WIDTH - 12, collective)
    _bar(column, node, y + 9, BAR_WIDTH / slowest_s)


def _bar(column: Element, node: Node, y: int, scale: float) -> None:
    x = float(BAR_LEFT)
    for colour, seconds in _shares([node]):
        if seconds:
            _rect(column, x, y, seconds * scale, 13, colour)
            x += seconds * scale
    _text(column, x + 6, y + 11, f"{node.time_s * 1e6:,.1f} µs", 12)
    _text(column, BAR_LEFT, y + 30, f"{node.bound}-bound", 10, fill=FAINT)


# --- marks --------------------------------------------------------------------------------------------


def _tensor(column: Element, held: Held, y: float, note: str = "") -> None:
    _rect(column, SPINE - GLYPH / 2 - 3, y + 2, GLYPH + 6, GLYPH + 8, PAPER)
    _glyph(column, held, SPINE - GLYPH / 2, y + 6)
    _text(column, SPINE + GLYPH / 2 + 10, y + 21, held.named, 12)
    extent = 6.7 * len(held.named)
    _text(column, SPINE + GLYPH / 2 + 18 + extent, y + 21, f"{held.placement}  {note}".strip(), 11, fill=FAINT)


def _glyph(column: Element, held: Held, x: float, y: float) -> None:
    """A square for a tensor: what one of four ranks holds is filled; parts lie stacked."""
    placement = parse_placement(held.placement)
    if placement.holds == "part":
        for back in (6, 3, 0):
            sheet = _rect(column, x + back - 2, y - back + 2, GLYPH - 4, GLYPH - 4, "#fae3ae")
            sheet.set("stroke", INK)
        _text(column, x + GLYPH / 2 - 4, y + 16, "Σ", 13, weight="bold", anchor="middle")
        return
    if not placement.dims:
        _rect(column, x, y, GLYPH, GLYPH, FILL).set("stroke", INK)
        return
    _rect(column, x, y, GLYPH, GLYPH, PAPER).set("stroke", INK)
    by_columns = placement.dims[0] == held.dims - 1
    quarter = GLYPH / 4
    filled = (quarter, GLYPH) if by_columns else (GLYPH, quarter)
    _rect(column, x, y, *filled, FILL).set("stroke", INK)
    for cut in (2, 3):
        at = cut * quarter
        ends = (x + at, y, x + at, y + GLYPH) if by_columns else (x, y + at, x + GLYPH, y + at)
        _line(column, *ends, colour=FAINT)


def _pill(column: Element, x: float, y: float, width: float, collective: Collective, *, small: bool = False) -> None:
    height = 28 if small else 22
    _rect(column, x, y, width, height, COLOURS.get(collective.kind, KERNEL), radius=11)
    name = f"{collective.kind.replace('_', '-')} over {collective.axis}"
    figures = f"{_bytes(collective.bytes_per_device)} · {collective.time_s * 1e6:,.1f} µs"
    if small:
        _text(column, x + width / 2, y + 12, name, 10, fill=PAPER, anchor="middle", weight="bold")
        _text(column, x + width / 2, y + 23, figures, 10, fill=PAPER, anchor="middle")
    else:
        _text(column, x + 12, y + 15, name, 11, fill=PAPER, weight="bold")
        _text(column, x + width - 12, y + 15, figures, 11, fill=PAPER, anchor="end")


def _legend(root: Element, left: float, y: float, *, bands: bool) -> None:
    marks = (
        ("R", "whole on every rank"),
        ("S(0)", "rows cut"),
        ("S(1)", "columns cut"),
        ("P(sum)", "parts to be summed"),
    )
    x = left
    for placement, meaning in marks:
        _glyph(root, Held("", "", placement, 2), x, y - 15)
        _text(root, x + GLYPH + 8, y, meaning, 11)
        x += GLYPH + 26 + 6.2 * len(meaning)
    colours = [(KERNEL, "kernel"), *((colour, kind.replace("_", "-")) for kind, colour in COLOURS.items())]
    x = left
    for colour, meaning in [*colours, (BAND, "strategies differ")] if bands else colours:
        _rect(root, x, y + 15, 12, 12, colour, radius=3)
        _text(root, x + 18, y + 25, meaning, 11)
        x += 36 + 6.2 * len(meaning)


def _rect(parent: Element, x: float, y: float, width: float, height: float, fill: str, *, radius: float = 0) -> Element:
    figures = {"x": x, "y": y, "width": width, "height": height, **({"rx": radius} if radius else {})}
    return SubElement(parent, "rect", {name: f"{value:g}" for name, value in figures.items()}, fill=fill)


def _text(
    parent: Element,
    x: float,
    y: float,
    text: str,
    size: int,
    *,
    fill: str = INK,
    weight: str = "normal",
    anchor: str = "start",
) -> Element:
    attributes = {"font-size": str(size), "font-weight": weight, "text-anchor": anchor, "xml:space": "preserve"}
    element = SubElement(parent, "text", attributes, x=f"{x:g}", y=f"{y:g}", fill=fill)
    element.text = text
    return element


def _line(
    parent: Element, x1: float, y1: float, x2: float, y2: float, *, colour: str = INK, arrow: bool = False
) -> None:
    ends = {"x1": x1, "y1": y1, "x2": x2, "y2": y2}
    SubElement(parent, "line", {name: f"{value:g}" for name, value in ends.items()}, stroke=colour)
    if arrow:
        _arrow(parent, x2, y2)


def _arrow(parent: Element, x: float, y: float, *, sideways: bool = False) -> None:
    corners = ((x - 7, y - 4), (x - 7, y + 4)) if sideways else ((x - 4, y - 7), (x + 4, y - 7))
    points = " ".join(f"{a:g},{b:g}" for a, b in ((x, y), *corners))
    SubElement(parent, "polygon", points=points, fill=FAINT if sideways else INK)


def _bytes(size: float) -> str:
    for unit, scale in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if size >= scale:
            return f"{size / scale:,.2f} {unit}"
    return f"{size:,.0f} B"
