"""Addends of many meshes, priced at once, are those of each mesh, to the last bit."""

import numpy as np
import pytest

from sim.config.catalog import load_workload
from sim.config.question import Question
from sim.prices.mesh import MeshGroup
from sim.serving.phases import batching
from sim.step.attention_expert_meshes import sides_of
from sim.step.layer import group_sums
from sim.step.many_meshes import MOST_IN_LANES, ManyMeshes, branches_alike
from sim.step.stage import base_of, stream_to_s, vocabulary_seconds
from tests.questions import question_about

SERVED = question_about(
    "qwen3_235b_a22b", phase="serve", isl=1024, osl=1024, engine="vllm", kv_cache="fp8", weights="fp8"
)
LATENT = question_about("deepseek_v3", phase="serve", isl=4096, osl=512, engine="sglang", kv_cache="fp8")
PROMPTS = question_about("qwen3_235b_a22b", phase="prefill", isl=4096, osl=512)
WINDOWS = question_about("gpt_oss_120b", isl=4096, osl=512)


def drawn_meshes(rng, *, two):
    """Meshes `(tp, cp, dp, ep, batch)` that go together, of one mesh of GPUs or of two."""
    found = []
    for _ in range(6):
        tp, dp, ep, batch = (int(rng.integers(1, most)) for most in (10, 9, 9, 3000))
        found.append((tp + 1, 1, dp, 3 * dp, batch) if two else (tp, 1, ep, ep, batch))
    return found


def together(known, meshes):
    """Those of meshes that branch alike, and both sides of each one's GPU in each kind of step."""
    groups = {}
    for mesh in meshes:
        groups.setdefault(branches_alike(known, mesh), []).append(mesh)
    for its in groups.values():
        states = [batching(known, batch, dp) for _, _, dp, _, batch in its]
        each = [
            [sides_of(known, load, *mesh[:4]) for load in state.loads] for mesh, state in zip(its, states, strict=True)
        ]
        yield ManyMeshes.of(known, its, [state.loads for state in states]), each


def agree(gpus, each, price):
    """Compares figures of all at once with those of each."""
    np.testing.assert_array_equal(gpus.figures(price), [price(stacks) for stacks in each])


def prices(addend, group, choices, figures=None):
    """The first figures of an addend in a group of layers, of every load."""
    return lambda stacks: [number for stack in stacks for number in addend.price(stack[group], choices)[:figures]]


@pytest.mark.parametrize("two", [False, True], ids=["one mesh", "two meshes"])
@pytest.mark.parametrize(
    "workload", ["gpt_moe_1_2t_16k", "llama_3_1_405b_8k", SERVED, LATENT, PROMPTS, WINDOWS], ids=str
)
def test_addends_of_many_meshes_are_those_of_each(workload, two):
    known = workload.load() if isinstance(workload, Question) else load_workload(workload)
    rng = np.random.default_rng(1)
    for gpus, each in together(known, drawn_meshes(rng, two=two)):
        agree(gpus, each, lambda stacks: list(base_of(stacks[-1])))
        for index, group in enumerate(group_sums(known)):
            layer = group.layer
            for choice in (0, 1, 2):
                for addend in layer.costs:
                    agree(gpus, each, prices(addend, index, (choice,), 5))
            for addend in layer.moves:
                if two and not each[0][0][index].within_a_group(layer.layer.tensor(addend.name)):
                    continue  # a route of its own for each mesh
                choices = tuple(rng.integers(3, size=len(addend.ops)).tolist())
                agree(gpus, each, prices(addend, index, choices))
        if not two:
            agree(
                gpus,
                each,
                lambda stacks: [number for stack in stacks for number in vocabulary_seconds(stack[-1], 1, 0)],
            )
        agree(gpus, each, lambda stacks: [stream_to_s(stack[-1], MeshGroup(2, 1), 1) for stack in stacks])


def test_meshes_whose_sizes_no_whole_number_of_64_bits_holds_go_alone():
    known = load_workload("gpt_moe_1_2t_16k")
    assert branches_alike(known, (8, 1, 2, 2, MOST_IN_LANES)) is not None
    assert branches_alike(known, (8, 1, 2, 2, MOST_IN_LANES + 1)) is None
