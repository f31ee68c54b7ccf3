"""Choices of embedding and LM head that an exact search need try: those that no others beat.

What an end costs depends on its own choices and on how the layers' last op leaves the residual stream. So of a GPU and
a step, choices that are no faster under any choice of that op, and hold no less, can be left out. The terms that few
choices decide are priced once and added up for all.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial

import numpy as np

from sim.arrays import Floats
from sim.ops.rank import Rank
from sim.step.attention_expert_meshes import Sides, Stack
from sim.step.pipeline import Stage
from sim.step.speculative_decoding import drafts
from sim.step.stage import draft_of, end_group, vocabulary_stored
from sim.step.vocabulary_layers import (
    HEAD_ADDENDS,
    HeadSeconds,
    embedding_s,
    entering_s,
    head_activation_bytes,
    sides_with_vocabulary,
    vocabulary_bytes,
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
    with_drafts = drafts(end[-1].attention.workload)
    tabulated = [partial(_tabulated, lru_cache(None)(partial(sides_with_vocabulary, sides)), tables) for sides in end]
    columns = [each for of_kind in tabulated for each in _seconds(of_kind, last_choices, drafts=with_drafts)]
    columns += _bytes(tabulated[-1], drafts=with_drafts)
    figures = np.stack([column.ravel() for column in np.broadcast_arrays(*columns)], axis=-1)
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


_OfChoices = Callable[[tuple[int, ...], Callable[[Sides], float]], Floats]
"""See `_tabulated`, of a GPU and tables."""


def _seconds(tabulated: _OfChoices, last_choices: Sequence[int], *, drafts: bool) -> list[Floats]:
    """[embedding, head, sampling] of the first and of the last end, by the last op's choice; and of the draft."""
    head = HeadSeconds(*[tabulated(each.ops, partial(_of_attention, each.price)) for each in HEAD_ADDENDS])
    found = [tabulated((0, 1, 2), _draft_s)] if drafts else []  # its ends lie as the model's
    for choice in last_choices:
        found.append(tabulated((0,), partial(embedding_s, last_choice=choice)))
        found.append(head.total_s(tabulated((1,), partial(entering_s, last_choice=choice))))
    return found


def _bytes(tabulated: _OfChoices, *, drafts: bool) -> list[Floats]:
    """[embedding, head, sampling] weights of the first end, of the last, of both, and activations at the head."""
    ends = [Stage((), (), first, last) for first, last in ((True, False), (False, True), (True, True))]
    stored = [tabulated((0, 1), partial(_stored, end)) for end in ends]
    draft = [tabulated((0, 1, 2), _draft_bytes)] if drafts else []
    return [*stored, *draft, tabulated((1, 2), partial(_of_attention, head_activation_bytes))]


def _of_attention(price: Callable[[Rank], float], sides: Sides) -> float:
    return price(sides.attention)


def _stored(stage: Stage, sides: Sides) -> float:
    return vocabulary_stored(stage, *vocabulary_bytes(sides.attention))


def _draft_s(sides: Sides) -> float:
    return draft_of(sides).time_s


def _draft_bytes(sides: Sides) -> float:
    return draft_of(sides).weight_bytes


def _tabulated(
    lying: Callable[[tuple[int, ...]], Sides], tables: Tables, ops: tuple[int, ...], price: Callable[[Sides], float]
) -> Floats:
    """[embedding, head, sampling] what some of them decide, along the others of size 1.

    Args:
        lying: A GPU where they lie so.
        tables: What may be chosen.
        ops: Which of them decide, by place; the others are as engines have them.
        price: What it is.
    """
    rows = [table if at in ops else ENGINES_VOCABULARY[at : at + 1] for at, table in enumerate(tables)]
    found = [price(lying(choices)) for choices in itertools.product(*rows)]
    return np.reshape(found, tuple(map(len, rows)))
