"""Token mixers: what they keep per token and per sequence, as engines' own layouts have it."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from sim.batched import evaluate_many
from sim.config.huggingface.model_import import import_model
from sim.config.schemas import ModelFile
from sim.layers.model import Model
from sim.ops.layers import layer_of
from sim.ops.rank import Rank
from sim.ops.sizes import Load
from sim.ops.work import op_work
from sim.optimum.spaces import extended_space
from sim.simulate import evaluate
from sim.strategy import CHOICES
from sim.workload import Workload
from tests.questions import question_about
from tests.sim.config.test_huggingface import DEEPSEEK_V4_FLASH, DEEPSEEK_V4_PRO, KIMI_K3, Config


def model_of(content: Config) -> Model:
    return ModelFile.model_validate(import_model(content, "tried").content).to_si()


def workload_of(content: Config) -> Workload:
    return replace(
        question_about("deepseek_v3", isl=1000, osl=24, gpus=8, kv_cache="fp8").load(), model=model_of(content)
    )


def ranks(workload: Workload, sequences: int, tokens: int, tp: int = 1) -> list[Rank]:
    load = Load(sequences, tokens, tokens)
    groups = enumerate(workload.model.groups)
    return [Rank(workload, load, tp, 1, layer_of(group), layer_group=index) for index, group in groups]


def kept(workload: Workload, tokens: int, tp: int = 1) -> float:
    """Bytes that one sequence keeps in all layers on one GPU of a group that shards heads."""
    found = 0.0
    for rank in ranks(workload, 1, tokens, tp):
        found += rank.layers.count * op_work(rank, rank.layer.op("attention"), CHOICES[1]).kv_bytes
    return found


@pytest.mark.parametrize(
    ("content", "per_token", "per_sequence_mib"), [(DEEPSEEK_V4_FLASH, 3850, 14.7), (DEEPSEEK_V4_PRO, 5511, 22.2)]
)
def test_compressed_keys_take_what_engines_keep_of_them(
    content: Config, per_token: float, per_sequence_mib: float
) -> None:
    """584 B a key, 132 of the indexer's; windows and fp32 states of compressors whatever the context."""
    workload = workload_of(content)
    shorter, longer = (kept(workload, tokens) for tokens in (12_800, 128_000))
    each = (longer - shorter) / (128_000 - 12_800)
    assert each == pytest.approx(per_token, rel=1e-3)
    assert (shorter - 12_800 * each) / 2**20 == pytest.approx(per_sequence_mib, rel=0.01)


def test_compressed_keys_are_whole_on_every_gpu_and_a_state_goes_with_its_heads() -> None:
    assert kept(workload_of(DEEPSEEK_V4_FLASH), 12_800, tp=8) == kept(workload_of(DEEPSEEK_V4_FLASH), 12_800)
    kimi = workload_of(KIMI_K3)
    states = [kept(kimi, tokens=1, tp=tp) for tp in (1, 8)]
    assert states[1] == pytest.approx(states[0] / 8, rel=0.01)
    assert states[0] / 2**20 == pytest.approx(428.6, rel=0.01)


@pytest.mark.parametrize("content", [DEEPSEEK_V4_FLASH, KIMI_K3])
def test_weights_of_the_ops_are_those_of_the_model(content: Config) -> None:
    """On one GPU the ops hold what `parameters` counts, but for the short convolutions and norms."""
    workload = workload_of(content)
    one = replace(workload, precisions=replace(workload.precisions, weights="bf16"))
    one = replace(one, model=replace(one.model, expert_dtype=None))
    found = 0.0
    for rank in ranks(one, 8, 100):
        found += rank.layers.count * sum(op_work(rank, op, CHOICES[0]).weight_bytes for op in rank.layer.ops)
    own = one.model.parameters - 2 * one.model.vocab * one.model.hidden
    assert found / 2 == pytest.approx(own, rel=1e-3)


@pytest.mark.parametrize("content", [DEEPSEEK_V4_FLASH, KIMI_K3])
def test_many_at_once_have_the_figures_of_one_by_one(content: Config) -> None:
    workload = workload_of(content)
    space, rng = extended_space(workload), np.random.default_rng(1)
    sampled = [space.sample(rng) for _ in range(16)]
    many = evaluate_many(workload, sampled)
    for index, strategy in enumerate(sampled):
        one = evaluate(workload, strategy)
        assert (one.tokens_per_s_per_gpu, one.tpot_s, one.feasible) == (
            many.tokens_per_s_per_gpu[index],
            many.tpot_s[index],
            many.feasible[index],
        )
