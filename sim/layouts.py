"""Layouts by the names that people who deploy have for them: TP, TEP and DEP.

On n GPUs of a pipeline stage, TP shares everything; TEP shares attention and gives whole experts to GPUs; DEP gives
each GPU requests of its own (attention is data-parallel) and whole experts. Source: workers of InferenceX and Dynamo
are named so.
"""

from __future__ import annotations

import re
from typing import NamedTuple

from sim.strategy import Strategy

LAYOUTS = ("tp", "tep", "dep")


class StageDegrees(NamedTuple):
    """Degrees of one pipeline stage, as `Strategy` has them."""

    tp: int
    ep: int
    dp: int


def degrees_of_layout(text: str) -> StageDegrees:
    """The degrees that a name stands for, the GPUs of a stage behind it.

    Raises:
        ValueError: It is no such name.

    >>> degrees_of_layout("TEP8"), degrees_of_layout("dep16")
    (StageDegrees(tp=8, ep=8, dp=1), StageDegrees(tp=1, ep=16, dp=16))
    """
    found = re.fullmatch(r"(tp|tep|dep)([1-9]\d{0,8})", text.strip().lower())
    if found is None:
        raise ValueError(f"expected one of {', '.join(LAYOUTS)} and the GPUs of a stage, such as tep8; got {text!r}")
    return _degrees(found[1], int(found[2]))


def _degrees(name: str, gpus: int) -> StageDegrees:
    return StageDegrees(1 if name == "dep" else gpus, 1 if name == "tp" else gpus, gpus if name == "dep" else 1)


def layout_of(strategy: Strategy) -> str | None:
    """The name of a strategy's layout, or None for one that has no such name.

    >>> layout_of(Strategy(8, 8, 2, 64, (), dp=1)), layout_of(Strategy(4, 2, 1, 64, (), dp=1))
    ('TEP8 PP2', None)
    """
    gpus, own = strategy.stage_gpus, StageDegrees(strategy.tp, strategy.ep, strategy.attention_dp)
    for name in LAYOUTS:
        if strategy.cp == 1 and own == _degrees(name, gpus):
            return f"{name.upper()}{gpus}" + (f" PP{strategy.pp}" if strategy.pp > 1 else "")
    return None


def meshes_text(strategy: Strategy) -> str:
    """How the GPUs of a stage share attention and the layer behind it, without the degrees that are 1.

    >>> meshes_text(Strategy(2, 8, 1, 64, (), dp=4)), meshes_text(Strategy(2, 1, 1, 64, (), cp=2, dp=2))
    ('attention TP2 DP4, experts EP8', 'attention TP2 CP2 DP2, FFN TP8')
    """
    attention = _above_one(TP=strategy.tp, CP=strategy.cp, DP=strategy.attention_dp)
    behind = _above_one(TP=strategy.moe_tp, EP=strategy.ep)
    return f"attention {attention}, {'experts' if strategy.ep > 1 else 'FFN'} {behind}"


def _above_one(**degrees: int) -> str:
    return " ".join(f"{axis}{degree}" for axis, degree in degrees.items() if degree > 1) or "TP1"
