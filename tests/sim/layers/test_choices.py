"""Sharding rules, held against numbers: op(pieces of the inputs) must be the pieces of op(inputs)."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import pytest

from sim.layers.choices import rule
from sim.layers.ops import FusedOp, Layer
from sim.ops.layers import DENSE_LAYER, MOE_LAYER
from sim.sharding.placement import PARTIAL, REPLICATE, Partial, Placement, Replicate, Shard
from sim.sharding.rules import einsum_rule
from sim.step.vocabulary_layers import vocabulary_plan
from sim.strategy import ENGINES_VOCABULARY, VOCABULARY_OPS

Pieces = list[np.ndarray]
RANKS = 3
SEEDS = (0, 1, 2)
# Different within an equation, so that no dim can pass for another; three ranks get uneven chunks of each.
LETTER_SIZES = {"t": 7, "d": 10, "q": 11, "a": 5, "e": 4, "c": 8, "f": 13, "b": 4, "h": 5, "k": 8}


def chunks(tensor: np.ndarray, dim: int) -> Pieces:
    """`Shard(dim)`: rank i holds the i-th chunk of ceil(size / ranks)."""
    step = math.ceil(tensor.shape[dim] / RANKS)
    return [np.take(tensor, range(i * step, min((i + 1) * step, tensor.shape[dim])), dim) for i in range(RANKS)]


def place(tensor: np.ndarray, placement: Placement, rng: np.random.Generator) -> Pieces:
    """What every rank holds. Parts are random, of both signs and larger than their sum."""
    match placement:
        case Replicate():
            return [tensor] * RANKS
        case Shard(dim):
            return chunks(tensor, dim)
        case Partial():
            parts = [10.0 * rng.standard_normal(tensor.shape) for _ in range(RANKS - 1)]
            return [*parts, tensor - sum(parts)]


def holds(pieces: Sequence[np.ndarray], tensor: np.ndarray, placement: Placement) -> bool:
    """Whether the pieces are the tensor under the placement."""
    match placement:
        case Replicate():
            wanted = [tensor] * RANKS
        case Shard(dim):
            wanted = chunks(tensor, dim)
        case Partial():
            pieces, wanted = [sum(pieces)] if len({p.shape for p in pieces}) == 1 else [], [tensor]
    if len(pieces) != len(wanted):
        return False
    return all(
        piece.shape == want.shape and np.allclose(piece, want, atol=1e-9)
        for piece, want in zip(pieces, wanted, strict=True)
    )


# --- einsums: every combination of placements ----------------------------------------------------------

Combination = tuple[Placement, Placement, Placement]


def placements_of(letters: str) -> list[Placement]:
    return [REPLICATE, *(Shard(dim) for dim in range(len(letters))), PARTIAL]


def is_right(equation: str, combination: Combination, seed: int) -> bool:
    """Executes the einsum on every rank's pieces; shapes that do not match are wrong, too."""
    rng = np.random.default_rng(seed)
    operands, _ = equation.split("->")
    tensors = [rng.standard_normal([LETTER_SIZES[letter] for letter in letters]) for letters in operands.split(",")]
    left, right = (place(tensor, placement, rng) for tensor, placement in zip(tensors, combination[:2], strict=True))
    try:
        pieces = [np.einsum(equation, a, b) for a, b in zip(left, right, strict=True)]
    except ValueError:
        return False
    return holds(pieces, np.einsum(equation, *tensors), combination[2])


def three_cases(equation: str) -> set[Combination]:
    """What the label rule calls right: replicate all, shard one label everywhere, pass one Partial on."""
    cases: set[Combination] = {
        (REPLICATE, REPLICATE, REPLICATE),
        (PARTIAL, REPLICATE, PARTIAL),
        (REPLICATE, PARTIAL, PARTIAL),
    }
    for label in set(equation) - set(",->"):
        (left, right), output = einsum_rule(equation, label)
        cases.add((left, right, output))
    return cases


@pytest.mark.parametrize(
    ("equation", "combinations", "right"),
    [
        ("td,dq->tq", 4**3, 3 + 3),
        ("ta,ad->td", 4**3, 3 + 3),
        ("ecd,edf->ecf", 5**3, 3 + 4),
        ("bhqd,bhkd->bhqk", 6**3, 3 + 5),  # with one of two dims and one of three: the 405 of the design
    ],
)
def test_the_label_rule_finds_all_right_placements_and_no_wrong_one(
    equation: str, combinations: int, right: int
) -> None:
    operands, result = equation.split("->")
    every = list(itertools.product(*(placements_of(letters) for letters in (*operands.split(","), result))))
    assert len(every) == combinations
    found = {combination for combination in every if all(is_right(equation, combination, seed) for seed in SEEDS)}
    assert len(found) == right
    assert found == three_cases(equation)


def test_the_two_and_three_and_four_dim_einsums_have_405_combinations() -> None:
    assert 4**3 + 5**3 + 6**3 == 405


@pytest.mark.parametrize(
    ("equation", "label", "inputs", "output"),
    [
        ("td,dq->tq", "d", ["S(1)", "S(0)"], "P(sum)"),
        ("td,dq->tq", "q", ["R", "S(1)"], "S(1)"),
        ("td,dq->tq", "t", ["S(0)", "R"], "S(0)"),
        ("ta,ad->td", "a", ["S(1)", "S(0)"], "P(sum)"),
        ("ecd,edf->ecf", "d", ["S(2)", "S(1)"], "P(sum)"),
        ("ecd,edf->ecf", "f", ["R", "S(2)"], "S(2)"),
        ("ecf,efd->ecd", "f", ["S(2)", "S(1)"], "P(sum)"),
        ("ecf,efd->ecd", "d", ["R", "S(2)"], "S(2)"),
    ],
)
def test_a_sharded_label_is_cut_wherever_it_occurs(equation: str, label: str, inputs: list[str], output: str) -> None:
    found_inputs, found_output = einsum_rule(equation, label)
    assert [str(placement) for placement in found_inputs] == inputs
    assert str(found_output) == output


# --- the registered rules of every op of both layers ---------------------------------------------------

TOKENS, HIDDEN, EXPERTS, TOP_K, FFN = 7, 10, 5, 2, 8
GROUPS, QUERIES, HEAD, CONTEXT = 6, 2, 3, 4  # six KV heads with two query heads each
GROUP_WIDTH = (QUERIES + 2) * HEAD
WIDTHS = {
    "td": (TOKENS, HIDDEN),
    "tq": (TOKENS, GROUPS * GROUP_WIDTH),  # query, key and value head by head, so that a chunk holds whole groups
    "ta": (TOKENS, GROUPS * QUERIES * HEAD),
    "tf": (TOKENS, FFN),
    "ecd": (EXPERTS, TOKENS, HIDDEN),  # one slot per token and expert, empty where the token went elsewhere
    "ecf": (EXPERTS, TOKENS, FFN),
}
# Gate and up columns lie side by side, f by f, so that both are cut alike.
WEIGHTS = {
    "qkv_proj": (HIDDEN, GROUPS * GROUP_WIDTH),
    "o_proj": (GROUPS * QUERIES * HEAD, HIDDEN),
    "router": (HIDDEN, EXPERTS),
}


@dataclass
class Case:
    """One op with its global tensors and one placement of each: what the checker runs."""

    op: FusedOp
    inputs: list[np.ndarray]
    weight: np.ndarray | None
    cache: np.ndarray

    def whole(self) -> np.ndarray:
        """The op on the whole tensors."""
        return self.on_ranks([[tensor] for tensor in self.inputs], [self.weight], [self.cache])[0]

    def on_ranks(self, inputs: list[Pieces], weights: Sequence[np.ndarray | None], caches: Pieces) -> Pieces:
        """The op on every rank's pieces, with the collectives inside it."""
        return _RUN[self.op.kind](self, inputs, weights, caches)


def softmax(scores: np.ndarray) -> np.ndarray:
    shifted = np.exp(scores - scores.max(-1, keepdims=True))
    return shifted / shifted.sum(-1, keepdims=True)


def run_norm(case: Case, inputs: list[Pieces], weights: object, caches: object) -> Pieces:
    pieces = inputs[0]
    sharded = len(pieces) > 1 and pieces[0].shape[1] < HIDDEN
    squares = [np.square(piece).sum(1, keepdims=True) for piece in pieces]
    totals = [sum(squares)] * len(pieces) if sharded else squares  # the small all-reduce of the statistic
    return [piece / np.sqrt(total / HIDDEN + 1e-6) for piece, total in zip(pieces, totals, strict=True)]


def run_einsum(case: Case, inputs: list[Pieces], weights: Sequence[np.ndarray | None], caches: object) -> Pieces:
    return [np.einsum(case.op.equation, piece, weight) for piece, weight in zip(inputs[0], weights, strict=True)]


def run_attention(case: Case, inputs: list[Pieces], weights: object, caches: Pieces) -> Pieces:
    outputs = []
    for piece, cache in zip(inputs[0], caches, strict=True):
        rows = piece.reshape(len(piece), -1, QUERIES + 2, HEAD)
        keys = np.concatenate([cache[..., 0, :], rows[:, :, None, QUERIES]], 2)
        values = np.concatenate([cache[..., 1, :], rows[:, :, None, QUERIES + 1]], 2)
        shares = softmax(np.einsum("tgqh,tgch->tgqc", rows[:, :, :QUERIES], keys))
        outputs.append(np.einsum("tgqc,tgch->tgqh", shares, values).reshape(len(piece), -1))
    return outputs


def run_add(case: Case, inputs: list[Pieces], weights: object, caches: object) -> Pieces:
    return [left + right for left, right in zip(*inputs, strict=True)]


def run_activation(case: Case, inputs: list[Pieces], weights: object, caches: object) -> Pieces:
    return [piece[..., ::2] / (1 + np.exp(-piece[..., ::2])) * piece[..., 1::2] for piece in inputs[0]]


def run_router(case: Case, inputs: list[Pieces], weights: Sequence[np.ndarray | None], caches: object) -> Pieces:
    logits = [piece @ weight for piece, weight in zip(inputs[0], weights, strict=True)]
    if len(logits) > 1 and logits[0].shape[1] < EXPERTS:
        logits = [np.concatenate(logits, 1)] * len(logits)  # top-k needs all of e
    outputs = []
    for local in logits:
        chosen = np.argsort(-local, 1)[:, :TOP_K]
        outputs.append(np.concatenate([chosen, softmax(np.take_along_axis(local, chosen, 1))], 1))
    return outputs


def run_dispatch(case: Case, inputs: list[Pieces], weights: object, caches: object) -> Pieces:
    outputs = []
    for tokens, routing in zip(*inputs, strict=True):
        copies = np.zeros((EXPERTS, *tokens.shape))
        for slot in range(TOP_K):
            copies[routing[:, slot].astype(int), range(len(tokens))] = tokens
        outputs.append(copies)
    return outputs


def weighted_sum(results: np.ndarray, routing: np.ndarray) -> np.ndarray:
    chosen, shares = routing[:, :TOP_K].astype(int), routing[:, TOP_K:]
    rows = np.arange(results.shape[1])
    return sum(shares[:, [slot]] * results[chosen[:, slot], rows] for slot in range(TOP_K))


def run_combine(case: Case, inputs: list[Pieces], weights: object, caches: object) -> Pieces:
    return [weighted_sum(results, routing) + residual for results, residual, routing in zip(*inputs, strict=True)]


_RUN: dict[str, Callable[[Case, list[Pieces], Sequence[np.ndarray | None], Pieces], Pieces]] = {
    "norm": run_norm,
    "einsum": run_einsum,
    "attention": run_attention,
    "residual_add": run_add,
    "activation": run_activation,
    "router": run_router,
    "dispatch": run_dispatch,
    "combine": run_combine,
}


def make_case(layer: Layer, op: FusedOp, rng: np.random.Generator) -> Case:
    inputs = [make_tensor(layer, name, rng) for name in op.inputs]
    shape = WEIGHTS.get(op.name)
    if op.name in ("ffn1", "ffn2"):
        sizes = (HIDDEN, 2 * FFN) if op.name == "ffn1" else (FFN, HIDDEN)
        shape = (EXPERTS, *sizes) if layer is MOE_LAYER else sizes
    weight = rng.standard_normal(shape) if shape else None
    return Case(op, inputs, weight, rng.standard_normal((TOKENS, GROUPS, CONTEXT, 2, HEAD)))


def make_tensor(layer: Layer, name: str, rng: np.random.Generator) -> np.ndarray:
    if name == "routing":
        chosen = np.array([rng.permutation(EXPERTS)[:TOP_K] for _ in range(TOKENS)])
        return np.concatenate([chosen, softmax(rng.standard_normal((TOKENS, TOP_K)))], 1)
    *rows, columns = WIDTHS[layer.tensor(name).letters]
    return rng.standard_normal((*rows, 2 * columns if name == "ffn_mid" else columns))


def obeys(
    case: Case, inputs: Sequence[Placement], weight: Placement | None, output: Placement, rng: np.random.Generator
) -> bool:
    """The checker: whether the op on placed inputs leaves the placed output. Shapes must match, too."""
    cache_placement = inputs[0] if case.op.kind == "attention" else REPLICATE  # the cache lies as its queries do
    weights = place(case.weight, weight, rng) if case.weight is not None and weight else [None] * RANKS
    placed = [place(tensor, placement, rng) for tensor, placement in zip(case.inputs, inputs, strict=True)]
    try:
        got = case.on_ranks(placed, weights, place(case.cache, cache_placement, rng))
    except (ValueError, IndexError):
        return False
    return holds(got, case.whole(), output)


EVERY_CHOICE = [
    pytest.param(layer, op, choice, id=f"{name}-{op.name}-{choice}")
    for name, layer in (("moe", MOE_LAYER), ("dense", DENSE_LAYER))
    for op in layer.ops
    for choice in (0, 1, 2)
]


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize(("layer", "op", "choice"), EVERY_CHOICE)
def test_every_choice_of_every_op_keeps_the_numbers(layer: Layer, op: FusedOp, choice: int, seed: int) -> None:
    rng = np.random.default_rng(seed)
    op_rule = rule(op, layer, choice)
    assert obeys(make_case(layer, op, rng), op_rule.inputs, op_rule.weight, op_rule.output, rng)


@pytest.mark.parametrize("seed", SEEDS)
def test_parts_may_pass_through_the_weighted_sum_up_to_the_residual_add(seed: int) -> None:
    rng = np.random.default_rng(seed)
    case = make_case(MOE_LAYER, MOE_LAYER.op("combine"), rng)
    results, residual, routing = case.inputs
    parts = [weighted_sum(piece, routing) for piece in place(results, PARTIAL, rng)]
    np.testing.assert_allclose(sum(parts) + residual, case.whole(), atol=1e-9)
    assert rule(case.op, MOE_LAYER, 2).passes_partial


@pytest.mark.parametrize(("layer", "op", "choice"), EVERY_CHOICE)
def test_only_a_linear_op_passes_parts(layer: Layer, op: FusedOp, choice: int) -> None:
    op_rule = rule(op, layer, choice)
    assert not any(isinstance(placement, Partial) for placement in op_rule.inputs)
    if op_rule.passes_partial:
        assert op.kind in ("einsum", "dispatch", "combine")


@pytest.mark.parametrize("name", ["attn_norm", "attention", "router", "activation"])
def test_the_checker_catches_parts_that_enter_a_non_linear_op(name: str) -> None:
    rng = np.random.default_rng(0)
    case = make_case(MOE_LAYER, MOE_LAYER.op(name), rng)
    weight = REPLICATE if case.weight is not None else None
    assert not obeys(case, [PARTIAL], weight, PARTIAL, rng)
    assert not obeys(case, [PARTIAL], weight, REPLICATE, rng)


def test_the_checker_catches_a_residual_that_every_part_adds_again() -> None:
    rng = np.random.default_rng(0)
    case = make_case(DENSE_LAYER, DENSE_LAYER.op("combine"), rng)
    assert not obeys(case, [PARTIAL, REPLICATE], None, PARTIAL, rng)


def test_the_third_choice_replicates_inputs_weight_and_output() -> None:
    for layer in (MOE_LAYER, DENSE_LAYER):
        for op in layer.ops:
            op_rule = rule(op, layer, 2)
            assert set(op_rule.inputs) == {REPLICATE}
            assert op_rule.output == REPLICATE
            assert op_rule.weight in (None, REPLICATE)


def test_the_small_router_weight_is_replicated_when_tokens_are_sharded() -> None:
    assert rule(MOE_LAYER.op("router"), MOE_LAYER, 0).weight == REPLICATE
    assert rule(MOE_LAYER.op("router"), MOE_LAYER, 1).output == REPLICATE


def test_both_ends_of_the_model_are_priced_by_rules_that_fit_each_other() -> None:
    rules = vocabulary_plan(ENGINES_VOCABULARY).rules
    embedding, head, sampling = (rules[name] for name in VOCABULARY_OPS)
    assert (embedding.inputs, embedding.weight, embedding.output) == ((REPLICATE,), Shard(0), PARTIAL)
    assert (head.inputs, head.weight, head.output) == ((REPLICATE,), Shard(1), Shard(1))
    assert sampling.inputs == (head.output,)
    assert embedding.inputs[0] == sampling.output  # the next step looks up what this one has chosen
