"""Choices of embedding and LM head that an exact search need try: those that no others beat.

What an end costs depends on its own choices and on how the layers' last op leaves the residual stream. So of a GPU and
a step, choices that are no faster under any choice of that op, and hold no less, can be left out. The terms that few
choices decide are priced once and added up for all.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from sim.arrays import Floats
from sim.step.attention_expert_meshes import Sides, Stack
from sim.step.costs import seconds
from sim.step.speculative_decoding import draft_of
from sim.step.stage import end_group
from sim.step.vocabulary_layers import (
    embedding_s,
    entering,
    head_activation_bytes,
    kernels_s,
    logits_moved,
    sides_with_vocabulary,
    tokens_moved,
    vocabulary_bytes,
    vocabulary_work,
)
from sim.strategy import ENGINES_VOCABULARY

Tables = Sequence[Sequence[int]]
"""Choices of each of these ops, in the order of `Strategy.vocabulary`; empty for one way, that of the workload."""


@dataclass(frozen=True, slots=True)
class VocabularyChoice:
    """How embedding and LM head lie, and both sides of a GPU where they do, per group of layers and kind of step."""

    vocabulary: tuple[int, ...]
    stacks: tuple[Stack, ...]


def unbeaten_vocabulary_choices(
    stacks: Sequence[Stack], tables: Tables, last_choices: Sequence[int]
) -> tuple[VocabularyChoice, ...]:
    """Of all choices of embedding and LM head those that no others beat.

    Args:
        stacks: Both sides of a GPU per group of layers, per kind of step.
        tables: What may be chosen.
        last_choices: Of the op that leaves the residual stream.
    """
    if not tables:
        return (VocabularyChoice((), tuple(stacks)),)
    asked = list(itertools.product(*tables))
    end = [stack[end_group(stack)] for stack in stacks]
    columns = [each for sides in end for each in _seconds(sides, tables, last_choices)] + _bytes(end[-1], tables)
    figures = np.stack([column.ravel() for column in columns], axis=-1)
    kept: list[int] = []
    for at in np.lexsort(figures.T[::-1]).tolist():  # whoever beats it comes before it
        if not any((figures[other] <= figures[at]).all() for other in kept):
            kept.append(at)
    return tuple(
        VocabularyChoice(asked[at], tuple(_lying_so(stack, asked[at]) for stack in stacks)) for at in sorted(kept)
    )


def _lying_so(stack: Stack, choices: tuple[int, ...]) -> Stack:
    end = end_group(stack)
    return (*stack[:end], sides_with_vocabulary(stack[end], choices), *stack[end + 1 :])


def _seconds(sides: Sides, tables: Tables, last_choices: Sequence[int]) -> list[Floats]:
    """[embedding, head, sampling] of the first and of the last end, by the last op's choice; and of the draft."""
    size = tuple(map(len, tables))
    looked, heads, sampled = (_alone(sides, table, at) for at, table in enumerate(tables))
    own_s = np.array([kernels_s(each.attention, "lm_head") for each in heads])
    inside_s = np.array([seconds(vocabulary_work(each.attention, "lm_head").collectives) for each in heads])
    offered_s = np.array([seconds(vocabulary_work(each.attention, "sampling").collectives) for each in sampled])
    logits_s, tokens_s = np.zeros(size[1:]), np.zeros((size[0], 1, size[2]))
    for (row, head), (column, sampling) in itertools.product(enumerate(tables[1]), enumerate(tables[2])):
        logits_s[row, column] = seconds(
            logits_moved(sides_with_vocabulary(sides, (ENGINES_VOCABULARY[0], head, sampling)).attention)
        )
    for (row, looked_up), (column, sampling) in itertools.product(enumerate(tables[0]), enumerate(tables[2])):
        tokens_s[row, 0, column] = seconds(
            tokens_moved(sides_with_vocabulary(sides, (looked_up, ENGINES_VOCABULARY[1], sampling)).attention)
        )
    around_s = (own_s + inside_s)[:, None] + logits_s + offered_s + tokens_s
    found: list[Floats] = []
    if sides.attention.workload.speculation:  # a draft of the model's own layers has its embedding and head
        drafts_s = [draft_of(sides_with_vocabulary(sides, each)).time_s for each in itertools.product(*tables)]
        found.append(np.reshape(drafts_s, size))
    for choice in last_choices:
        first_s = np.array([embedding_s(each, choice) for each in looked])
        enter_s = np.array([seconds(entering(each, choice)) for each in heads])
        found += [np.broadcast_to(first_s[:, None, None], size), around_s + enter_s[:, None]]
    return found


def _bytes(sides: Sides, tables: Tables) -> list[Floats]:
    """[embedding, head, sampling] weights of the first end, of the last, of both, and activations at the head."""
    shape = (3, *map(len, tables[:2]), 1)
    pairs = itertools.product(*tables[:2])
    held = [vocabulary_bytes(sides_with_vocabulary(sides, (*pair, ENGINES_VOCABULARY[2])).attention) for pair in pairs]
    embedding, head, tied = np.array(held).T.reshape(shape)
    logits = [
        head_activation_bytes(sides_with_vocabulary(sides, (ENGINES_VOCABULARY[0], *pair)).attention)
        for pair in itertools.product(*tables[1:])
    ]
    size = tuple(map(len, tables))
    peak = np.reshape(logits, size[1:])
    return [np.broadcast_to(each, size) for each in (embedding, head, embedding + head - tied, peak)]


def _alone(sides: Sides, table: Sequence[int], at: int) -> list[Sides]:
    """One op under each of its choices, the others as engines have them."""
    return [
        sides_with_vocabulary(sides, (*ENGINES_VOCABULARY[:at], choice, *ENGINES_VOCABULARY[at + 1 :]))
        for choice in table
    ]
