"""A layer as SVG: one column per strategy, rows aligned, so that the eye compares op with op."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from xml.etree import ElementTree
from xml.etree.ElementTree import Element, SubElement

from raysearch.reports.explain.marks import (
    BAND,
    COLOURS,
    FAINT,
    GLYPH,
    INK,
    KERNEL,
    PAPER,
    arrow,
    fitting,
    glyph,
    line,
    pill,
    rect,
    tensor,
    text,
)
from raysearch.reports.explain.picture import Edge, Node, Picture, ShownTensor, group_text
from sim.prices.collectives import Collective

WIDTH, GAP, MARGIN, TOP = 610, 30, 24, 180
SPINE, BOX_LEFT, BOX_WIDTH, BAR_LEFT, BAR_WIDTH = 250, 110, 280, 404, 130
TENSOR, PILL, OP, INSIDE, NOTE = 36, 30, 50, 26, 16


def draw_svg(heading: str, groups: Sequence[Sequence[Picture]]) -> str:
    """The SVG document of one strategy, or of several side by side.

    Args:
        heading: Above all, in two lines: what is priced, and the degrees.
        groups: Pictures of the strategies, per group of layers; drawn one below the other.
    """
    if len(groups) == 1:
        return _document(_section(heading, groups[0]))
    sections = [_section(f"{heading}; {group_text(pictures[0])}", pictures) for pictures in groups]
    height = sum(int(section.get("height", "0")) for section in sections)
    root, y = _canvas(sections[0].get("width", ""), height), 0
    for section in sections:
        section.set("y", str(y))
        y += int(section.get("height", "0"))
        root.append(section)
    return _document(root)


def _document(root: Element) -> str:
    ElementTree.indent(root)
    return ElementTree.tostring(root, encoding="unicode") + "\n"


def _canvas(width: str, height: int) -> Element:
    return Element(
        "svg",
        xmlns="http://www.w3.org/2000/svg",
        viewBox=f"0 0 {width} {height}",
        width=width,
        height=str(height),
        role="img",
    )


def _section(heading: str, pictures: Sequence[Picture]) -> Element:
    rows = list(zip(*(picture.nodes for picture in pictures), strict=True))
    tops, bottom = _rows(rows)
    width = 2 * MARGIN + len(pictures) * WIDTH + (len(pictures) - 1) * GAP
    height = bottom + TENSOR + 40 + NOTE * max(len(picture.extrapolated) for picture in pictures)
    root = _canvas(str(width), height)
    root.set("font-family", "Inter, 'Helvetica Neue', 'DejaVu Sans', Arial, sans-serif")
    SubElement(root, "title").text = heading
    priced, _, degrees = heading.partition("\n")
    rect(root, 0, 0, width, height, PAPER)
    layer = priced.partition("; limits ")[0]
    for y, part in zip((15, 29), layer.split(": ", 1), strict=False):
        text(root, MARGIN, y, part, fitting(part, width - 2 * MARGIN, 12), fill=FAINT)
    text(root, MARGIN, 46, degrees or " ", fitting(degrees or " ", width - 2 * MARGIN, 19), weight="bold")
    _legend(root, MARGIN, 70, bands=len(pictures) > 1)
    slowest_s = max(node.time_s for row in rows for node in row)
    _bands(root, rows, tops, width)
    for index, picture in enumerate(pictures):
        column = SubElement(root, "g", transform=f"translate({MARGIN + index * (WIDTH + GAP)},0)")
        _header(column, picture, max(other.layer_s for other in pictures))
        _lanes(column, picture, tops)
        for node, top in zip(picture.nodes, tops, strict=True):
            _edges(column, node, top, note="from the layer above" if node is picture.nodes[0] else "")
            _op(column, node, top, slowest_s)
        line(column, SPINE, bottom, SPINE, bottom + 8)
        tensor(column, picture.nodes[-1].output, SPINE, bottom + 8, "to the next layer")
        for number, what in enumerate(picture.extrapolated):
            text(column, 0, bottom + TENSOR + 28 + NOTE * number, f"extrapolated: {what}", 11, fill=FAINT)
    return root


# --- rows ---------------------------------------------------------------------------------------------

SvgRow = tuple[int, int, int]
"""y where its inputs begin, where its box begins, where its box ends."""


def _rows(rows: Sequence[Sequence[Node]]) -> tuple[list[SvgRow], int]:
    y, tops = TOP, list[SvgRow]()
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


def _bands(root: Element, rows: Sequence[Sequence[Node]], tops: Sequence[SvgRow], width: int) -> None:
    """Paints what differs between the strategies."""
    for nodes, (_, box, end) in zip(rows, tops, strict=True):
        if len({node.choice for node in nodes}) > 1:
            rect(root, 8, box - 5, width - 16, end - box + 10, BAND, radius=8)


# --- one column ---------------------------------------------------------------------------------------


def _header(column: Element, picture: Picture, slowest_layer_s: float) -> None:
    text(column, 0, 122, picture.title, 15, weight="bold")
    kinds = ", ".join(violation.kind for violation in picture.violations)
    state = "" if picture.feasible else f"   not allowed: {kinds}"
    figures = f"{picture.tokens_per_s_per_gpu:,.1f} tokens/s/GPU ±{picture.expected_error:.0%}"
    figures += f"   {picture.tpot_s * 1e3:.2f} ms per token"
    text(column, 0, 141, figures + state, 12, fill=INK if picture.feasible else COLOURS["all_reduce"])
    x, scale = 0.0, 380 / slowest_layer_s
    for colour, seconds in _shares(picture.nodes):
        rect(column, x, 151, seconds * scale, 12, colour)
        x += seconds * scale
    share = picture.communication_s / picture.layer_s
    text(column, x + 8, 161, f"layer {picture.layer_s * 1e6:,.1f} µs, {share:.0%} communication", 12)


def _shares(nodes: Sequence[Node]) -> Iterator[tuple[str, float]]:
    yield KERNEL, sum(node.kernel_time_s for node in nodes)
    for kind, colour in COLOURS.items():
        yield colour, sum(c.time_s for node in nodes for c in _collectives(node) if c.kind == kind)


def _collectives(node: Node) -> list[Collective]:
    return [c for edge in node.edges for c in edge.collectives] + list(node.inside)


def _edges(column: Element, node: Node, row: SvgRow, note: str) -> None:
    """The tensor from the op above, on the spine, with its collectives."""
    y, box, _ = row
    line(column, SPINE, y, SPINE, box - 1, pointed=True)
    for edge in node.edges:
        if edge.main:
            tensor(column, edge.produced, SPINE, y + 8, note)
            y += 8 + TENSOR
            for collective in edge.collectives:
                pill(column, BOX_LEFT + 4, y, BOX_WIDTH - 8, collective)
                tensor(column, edge.arrives, SPINE, y + PILL - 2)
                y += PILL + TENSOR


def _lanes(column: Element, picture: Picture, tops: Sequence[SvgRow]) -> None:
    """The tensors that pass ops by, down the left side, each with its collectives where it enters."""
    lane_of = {name: 14 + 20 * index for index, name in enumerate(("routing", "ffn_in", "residual_in", "residual_mid"))}
    lane_of["residual_mid"] = lane_of["residual_in"]
    for index, node in enumerate(picture.nodes):
        aside = [edge for edge in node.edges if not edge.main]
        box, pill_top = tops[index][1], tops[index][1] - 6
        for place, edge in enumerate(aside):
            # It leaves the spine where its tensor stands, above the op that follows its producer.
            start = tops[edge.producer + 1][0] + 8 + TENSOR // 2
            end, x = box + 14 + 20 * place, lane_of.get(edge.produced.name, 14)
            path = f"M {SPINE - GLYPH // 2 - 2} {start} H {x + 8} Q {x} {start} {x} {start + 8} V {end - 8} "
            path += f"Q {x} {end} {x + 8} {end} H {BOX_LEFT - 6}"
            SubElement(column, "path", d=path, fill="none", stroke=FAINT).set("stroke-width", "1.4")
            arrow(column, BOX_LEFT - 1, end, sideways=True)
            label = text(column, 0, 0, edge.produced.named, 10, fill=FAINT)
            label.set("transform", f"translate({x + 12},{start + 14}) rotate(90)")
            for collective in edge.collectives:
                pill_top -= 32
                pill(column, x - 14, pill_top, 128, collective, small=True)
                glyph(column, edge.arrives, BOX_LEFT - 40, end - GLYPH / 2)


def _op(column: Element, node: Node, row: SvgRow, slowest_s: float) -> None:
    _, y, end = row
    height = OP + INSIDE * len(node.inside)
    line(column, SPINE, y + height - 2, SPINE, end)  # where the op beside it is taller
    box = rect(column, BOX_LEFT, y, BOX_WIDTH, height - 2, "#f5f7f9", radius=7)
    box.set("stroke", INK)
    text(column, BOX_LEFT + 12, y + 20, node.name, 14, weight="bold")
    cut = "replicated" if node.label == "none" else f"cut along {node.label}"
    text(column, BOX_LEFT + 12, y + 37, cut, 11, fill=FAINT if node.label == "none" else INK)
    if node.weight:
        glyph(column, node.weight, BOX_LEFT + BOX_WIDTH - 32, y + 7)
        text(column, BOX_LEFT + BOX_WIDTH - 10, y + 42, node.weight.named, 10, anchor="end", fill=FAINT)
    for index, collective in enumerate(node.inside):
        pill(column, BOX_LEFT + 6, y + OP - 4 + index * INSIDE, BOX_WIDTH - 12, collective)
    _bar(column, node, y + 9, BAR_WIDTH / slowest_s)


def _bar(column: Element, node: Node, y: int, scale: float) -> None:
    x = float(BAR_LEFT)
    for colour, seconds in _shares([node]):
        if seconds:
            rect(column, x, y, seconds * scale, 13, colour)
            x += seconds * scale
    text(column, x + 6, y + 11, f"{node.time_s * 1e6:,.1f} µs", 12)
    text(column, BAR_LEFT, y + 30, f"{node.bound}-bound", 10, fill=FAINT)


def _legend(root: Element, left: float, y: float, *, bands: bool) -> None:
    marks = (
        ("R", "whole on every rank"),
        ("S(0)", "rows cut"),
        ("S(1)", "columns cut"),
        ("P(sum)", "parts to be summed"),
    )
    x = left
    for placement, meaning in marks:
        glyph(root, ShownTensor("", "", placement, 2), x, y - 15)
        text(root, x + GLYPH + 8, y, meaning, 11)
        x += GLYPH + 26 + 6.2 * len(meaning)
    colours = [(KERNEL, "kernel"), *((colour, kind.replace("_", "-")) for kind, colour in COLOURS.items())]
    x = left
    for colour, meaning in [*colours, (BAND, "strategies differ")] if bands else colours:
        rect(root, x, y + 15, 12, 12, colour, radius=3)
        text(root, x + 18, y + 25, meaning, 11)
        x += 36 + 6.2 * len(meaning)
