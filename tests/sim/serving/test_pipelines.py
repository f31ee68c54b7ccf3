"""What prompts cost a pipeline, against its stages played through one microbatch after the other."""

import math
from dataclasses import replace

import numpy as np
import pytest

import raysearch as rs
from sim.arrays import Floats
from sim.serving.phases import batching, in_step_s
from sim.serving.pipelines import stall_factor


def _lost_s(stages: int, prompts: Floats) -> Floats:
    """Seconds per step, [runs], of microbatches whose steps take as long on every stage as they have prompts.

    Args:
        stages: As many microbatches follow each other, none overtaking.
        prompts: [steps, runs].
    """
    free_s, done_s = np.zeros((2, stages, prompts.shape[1]))
    for step, took_s in enumerate(prompts):
        at_s = done_s[step % stages]
        for stage in range(stages):
            at_s = free_s[stage] = np.maximum(at_s, free_s[stage]) + took_s
        done_s[step % stages] = at_s
    return free_s[-1] / len(prompts)


def _seconds(stages: int, steps: Floats) -> float:
    return float(_lost_s(stages, steps).mean())


@pytest.mark.parametrize("stages", [2, 4, 16])
@pytest.mark.parametrize("mean", [0.05, 0.3, 1.0, 4.0])
def test_prompts_that_come_at_random_hold_a_pipeline_up_by_the_factor(stages: int, mean: float) -> None:
    prompts = np.random.default_rng(0).poisson(mean, (800, 60)).astype(float)
    assert _seconds(stages, prompts) / prompts.mean() == pytest.approx(stall_factor(stages, 1 / mean), rel=0.1)


def test_what_is_lost_grows_with_a_prompt_s_length_and_with_nothing_else() -> None:
    prompts = np.random.default_rng(1).poisson(0.3, (600, 8)).astype(float)
    lost = _lost_s(4, prompts)
    for longer in (0.5, 3.0, 20.0):
        assert _lost_s(4, 1 + longer * prompts) == pytest.approx(1 + longer * lost, rel=0.02)


def test_two_stages_take_as_long_as_the_busier_of_two_microbatches() -> None:
    # E max(K, L) of two Poisson numbers is their mean and half of E|K - L|.
    prompts = np.random.default_rng(2).poisson(1.0, (4000, 40)).astype(float)
    expected = 1 + math.exp(-2) * (np.i0(2.0) + _i1(2.0))
    assert _seconds(2, prompts) == pytest.approx(expected, rel=0.02)
    assert stall_factor(2, 1.0) == pytest.approx(expected, rel=0.05)


def _i1(x: float) -> float:
    return sum((x / 2) ** (2 * k + 1) / math.factorial(k) / math.factorial(k + 1) for k in range(30))


def test_one_stage_and_equal_steps_lose_nothing_and_lone_prompts_lose_all_stages() -> None:
    assert stall_factor(1, 3.7) == 1
    assert stall_factor(8, 0.0) == 1
    assert stall_factor(8, 1e9) == pytest.approx(8, rel=1e-3)
    assert _seconds(8, np.ones((400, 1))) == pytest.approx(1, rel=0.02)


def test_more_stages_and_more_spread_never_lose_less() -> None:
    stages, spread = np.meshgrid(np.arange(1, 65), np.geomspace(0.01, 1000, 60))
    factor = stall_factor(stages, spread)
    assert (np.diff(factor, axis=0) >= 0).all()
    assert (np.diff(factor, axis=1) >= 0).all()
    assert (factor <= stages).all()


def test_each_further_stage_lengthens_an_engines_steps_and_none_of_a_bare_machine() -> None:
    asked = rs.question(model="qwen3_32b", isl=1000, osl=200, engine="vllm", hardware="h100_sxm", gpus=8)
    served = asked.load()
    for phase, share in (("serve", 0.10), ("decode", 0.10), ("prefill", 0.07)):
        pace = batching(replace(served, phase=phase), 16, 1).pace
        assert [pace.through(stages).drag for stages in (1, 2, 4)] == pytest.approx([1, 1 + share, 1 + 3 * share])
        assert batching(replace(served, phase=phase, engine=None), 16, 1).pace.through(4).drag == 1
    alone = batching(replace(served, phase="decode"), 16, 1)
    assert alone.through(2).steps(0.01, 0.01).tpot_s == pytest.approx(
        1.1 * in_step_s(alone.times, 0.01) + 2 * alone.pace.engine_s(alone.times)
    )


def test_two_stages_serve_the_share_of_tp_that_was_measured() -> None:
    """gpt-oss-120b on two H100 under vLLM: 0.70 of TP2 in a burst (GPUStack); a steady state of as many has no tail."""
    asked = rs.question(model="gpt_oss_120b", isl=215, osl=196, engine="vllm", hardware="h100_sxm", gpus=2)
    tp2, pp2 = (rs.evaluate(asked, batch=1000 // pp, tp=tp, pp=pp) for tp, pp in ((2, 1), (1, 2)))
    share = pp2.evaluation.tokens_per_s_per_gpu / tp2.evaluation.tokens_per_s_per_gpu
    assert share == pytest.approx(0.70, rel=0.05)
