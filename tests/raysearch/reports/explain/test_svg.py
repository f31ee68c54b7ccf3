"""The SVG is well formed, names everything, and keeps to its canvas."""

from __future__ import annotations

import itertools
import re
from dataclasses import replace
from xml.etree import ElementTree

import pytest

from raysearch.reports.explain.picture import Picture, pictures_of
from raysearch.reports.explain.svg import draw_svg
from sim.config.catalog import load_model, load_workload
from sim.ops.heuristics import megatron_dims
from sim.simulate import evaluate
from sim.strategy import Strategy
from sim.workload import Workload

SVG = "{http://www.w3.org/2000/svg}"


def pictures(workload: Workload) -> list[Picture]:
    ops = len(megatron_dims(workload.model))
    every = [megatron_dims(workload.model), *((choice,) * ops for choice in (0, 1, 2))]
    return [pictures_of("a < b & c", workload, evaluate(workload, Strategy(8, 1, 2, 64, dims)))[0] for dims in every]


@pytest.mark.parametrize("name", ["gpt_moe_1_2t_16k", "llama_3_1_405b_8k"])
@pytest.mark.parametrize("count", [1, 2])
def test_the_drawing_names_every_op_tensor_and_collective(name: str, count: int) -> None:
    shown = pictures(load_workload(name))
    for first, second in itertools.pairwise(shown):
        chosen = [first, second][:count]
        root = ElementTree.fromstring(draw_svg("heading", [chosen]))
        texts = [text.text or "" for text in root.iter(f"{SVG}text")]
        for picture in chosen:
            for node in picture.nodes:
                assert node.name in texts
                assert node.output.named in texts
                for collective in [*node.inside, *(c for edge in node.edges for c in edge.collectives)]:
                    assert any(collective.kind.replace("_", "-") in text for text in texts)


def test_nothing_lies_outside_the_canvas() -> None:
    shown = pictures(load_workload("gpt_moe_1_2t_16k"))
    root = ElementTree.fromstring(draw_svg("heading", [shown[:2]]))
    width, height = float(root.attrib["width"]), float(root.attrib["height"])
    for group in [root, *root.iter(f"{SVG}g")]:
        moved = re.match(r"translate\((\d+),", group.get("transform", ""))
        left = float(moved[1]) if moved else 0
        for rect in group.findall(f"{SVG}rect"):
            x, y, w, h = (float(rect.attrib[name]) for name in ("x", "y", "width", "height"))
            assert x + left >= 0
            assert x + left + w <= width
            assert 0 <= y <= y + h <= height


def test_a_collective_s_name_does_not_run_into_its_figures() -> None:
    workload = load_workload("gpt_moe_1_2t_1m")
    strategy = Strategy(1, 16, 1, 64, (2, 0, 1, 0, 2, 2, 2, 1, 0, 1, 0, 2), 8, 16)
    root = ElementTree.fromstring(draw_svg("heading " * 20, [pictures_of("x", workload, evaluate(workload, strategy))]))
    texts = {text.text or "": text for text in root.iter(f"{SVG}text")}
    name, figures = (
        next(text for text in texts if part in text) for part in ("reduce-scatter over moe_tp", "860.16 kB")
    )
    begin, end = (float(texts[words].attrib["x"]) for words in (name, figures))
    letters = len(name + figures) * float(texts[name].attrib["font-size"])
    assert begin + 0.58 * letters < end
    heading = texts["heading " * 20]
    assert 0.58 * len(heading.text or "") * float(heading.attrib["font-size"]) < float(root.attrib["width"])


def test_texts_are_escaped() -> None:
    first = pictures(load_workload("gpt_moe_1_2t_16k"))[0]
    drawn = draw_svg("</svg><script>", [[replace(first, title='"&<>')]])
    assert "<script>" not in drawn
    assert ElementTree.fromstring(drawn).find(f"{SVG}title").text == "</svg><script>"  # type: ignore[union-attr]


def test_equal_strategies_show_no_difference() -> None:
    first, second, *_ = pictures(load_workload("gpt_moe_1_2t_16k"))
    assert draw_svg("h", [[first, first]]).count('fill="#fff3c9"') == 1  # the legend's
    assert draw_svg("h", [[first, second]]).count('fill="#fff3c9"') > 1


def test_groups_of_layers_stand_one_below_the_other() -> None:
    workload = replace(load_workload("gpt_moe_1_2t_16k"), model=load_model("deepseek_v3"))
    strategy = Strategy(8, 8, 1, 64, megatron_dims(workload.model))
    groups = [[picture] for picture in pictures_of("x", workload, evaluate(workload, strategy))]
    root = ElementTree.fromstring(draw_svg("heading", groups))
    dense, experts = root.findall(f"{SVG}svg")
    assert float(experts.attrib["y"]) == float(dense.attrib["height"])
    assert float(root.attrib["height"]) == float(dense.attrib["height"]) + float(experts.attrib["height"])
    assert dense.find(f"{SVG}title").text == "heading; dense: 3 of 61 layers"  # type: ignore[union-attr]
