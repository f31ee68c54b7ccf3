"""Layouts by name: each way round, in the spaces, and what they say of a GPU."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from raysearch.base.file_io import degrees_text
from sim.layouts import LAYOUTS, degrees_of_layout, layout_of, meshes_text
from sim.ops.heuristics import megatron_dims
from sim.optimum.spaces import extended_space
from sim.simulate import evaluate
from sim.strategy import Strategy
from tests.questions import question_about


def named(text: str, dims: tuple[int, ...] = (), pp: int = 1, batch: int = 64) -> Strategy:
    stage = degrees_of_layout(text)
    return Strategy(stage.tp, stage.ep, pp, batch, dims, dp=stage.dp)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("gpus", [2, 8, 72])
def test_a_layout_is_on_its_gpus_and_has_its_name_back(layout: str, gpus: int) -> None:
    assert named(f"{layout}{gpus}").stage_gpus == gpus
    assert layout_of(named(f"{layout.upper()}{gpus}")) == f"{layout.upper()}{gpus}"
    assert layout_of(named(f"{layout}{gpus}", pp=4)) == f"{layout.upper()}{gpus} PP4"


def test_one_gpu_has_one_name_and_mixtures_none() -> None:
    assert {layout_of(named(f"{layout}1")) for layout in LAYOUTS} == {"TP1"}
    for mixture in (Strategy(4, 2, 1, 64, (), dp=2), Strategy(4, 2, 1, 64, (), dp=1), Strategy(4, 1, 1, 64, (), cp=2)):
        assert layout_of(mixture) is None


@pytest.mark.parametrize("text", ["", "tep", "8", "tep0", "ep8", "dep8x", "tp٣", "attention TP8", "tp8, experts EP8"])
def test_what_is_no_layout_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="such as tep8"):
        degrees_of_layout(text)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("attention TP2 DP4, experts EP4", "attention is on 8 GPUs of a stage, and what is behind it on 4"),
        ("TEP8, batch 64 (attention TP8, experts TP8)", "expected .attention TP8, experts EP8. in"),
    ],
)
def test_a_text_that_contradicts_itself_is_refused(text: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        degrees_of_layout(text)


DEGREE = st.sampled_from([1, 2, 3, 4, 8, 16, 72])


@given(DEGREE, DEGREE, DEGREE, DEGREE, st.integers(1, 61), st.integers(1, 10**6), st.booleans())
def test_what_is_printed_of_a_strategy_is_read_as_it(
    tp: int, cp: int, dp: int, moe_tp: int, pp: int, batch: int, chosen: bool
) -> None:
    assume(tp * cp * dp % moe_tp == 0)
    vocabulary = (3, 0, 2) if chosen else ()
    strategy = Strategy(tp, tp * cp * dp // moe_tp, pp, batch, (), cp, dp, vocabulary)
    assert degrees_of_layout(degrees_text(strategy)).strategy == strategy
    assert degrees_of_layout(f"{degrees_text(strategy)}; 210").dims == (2, 1, 0)
    assert degrees_of_layout(f"{degrees_text(strategy)}, dims 2,1,10").strategy == replace(strategy, dims=(2, 1, 10))
    meshes = degrees_of_layout(meshes_text(strategy)).strategy
    assert meshes == replace(strategy, pp=1, batch=1, vocabulary=())
    if name := layout_of(strategy):
        for text in (name, name.lower().replace(" ", "")):
            assert degrees_of_layout(text).strategy == replace(strategy, batch=1, vocabulary=())


@pytest.mark.parametrize("model", ["deepseek_v3", "qwen3_235b_a22b", "gpt_oss_120b"])
def test_the_extended_space_holds_every_layout(model: str) -> None:
    workload = question_about(model, phase="serve", isl=1024, osl=128, gpus=64).load()
    space = extended_space(workload)
    for gpus in (2, 4, 8, 16, 32, 64):
        for layout in LAYOUTS:
            strategy = named(f"{layout}{gpus}", megatron_dims(workload.model))
            assert not space.outside(strategy) or workload.model.heads % strategy.tp


def test_layouts_differ_in_what_a_gpu_holds() -> None:
    """KV heads over the group or requests of its own: an eighth of the cache.

    DEP has attention and the vocabulary whole, as each of its GPUs serves requests of its own; TP has an eighth.
    """
    workload = question_about("gpt_oss_120b", isl=4096, osl=512, gpus=8).load()
    model = workload.model
    tp, tep, dep = (evaluate(workload, named(f"{layout}8", megatron_dims(model))).memory_bytes for layout in LAYOUTS)
    assert tp.kv_cache == tep.kv_cache == pytest.approx(dep.kv_cache)
    attention = sum(group.count * group.attention.parameters(model.hidden) for group in model.groups)
    ends = 2 * model.vocab * model.hidden
    assert dep.weights - tep.weights == pytest.approx((attention + ends) * 7 / 8 * 2, rel=0.01)  # bf16, as published
