"""Layouts by the names that people who deploy have for them: TP, TEP and DEP.

On n GPUs of a pipeline stage, TP shares everything; TEP shares attention and gives whole experts to GPUs; DEP gives
each GPU requests of its own (attention is data-parallel) and whole experts. Source: workers of InferenceX and Dynamo
are named so.
"""

from __future__ import annotations

import re
from collections import defaultdict
from typing import NamedTuple

from sim.strategy import Strategy

LAYOUTS = ("tp", "tep", "dep")


_NUMBER = "[1-9][0-9]{0,8}"
_NAMED = rf"(?P<name>tp|tep|dep)(?P<gpus>{_NUMBER})"
_MESHES = rf"attention(?P<attention>( (tp|cp|dp){_NUMBER})+), (experts|ffn)(?P<behind>( (tp|ep){_NUMBER})+)"
_REST = rf"([ ,]*pp(?P<pp>{_NUMBER}))?(,? batch (?P<batch>{_NUMBER}))?( \((?P<meshes>[^()]+)\))?"
_ENDS = r"(, vocabulary (?P<vocabulary>[0-9](,[0-9])*))?((, dims |; )(?P<dims>[0-9]+(,[0-9]+)*))?"
_LAYOUT = re.compile(f"({_NAMED}|{_MESHES}){_REST}{_ENDS}")


class LayoutDegrees(NamedTuple):
    """Degrees that a text names, as `Strategy` has them; None where it leaves them open."""

    tp: int
    ep: int
    dp: int
    cp: int = 1
    pp: int | None = None
    batch: int | None = None
    vocabulary: tuple[int, ...] = ()
    dims: tuple[int, ...] = ()

    @property
    def strategy(self) -> Strategy:
        """With them, and 1 in place of what is open."""
        return Strategy(self.tp, self.ep, self.pp or 1, self.batch or 1, self.dims, self.cp, self.dp, self.vocabulary)


def degrees_of_layout(text: str) -> LayoutDegrees:
    """The degrees that a name stands for, the GPUs of a stage behind it, or that an answer prints.

    Raises:
        ValueError: It is neither, or contradicts itself.

    >>> degrees_of_layout("TEP8").strategy.moe_tp, degrees_of_layout("dep16pp2")
    (1, LayoutDegrees(tp=1, ep=16, dp=16, cp=1, pp=2, batch=None, vocabulary=(), dims=()))
    >>> degrees_of_layout("attention TP2 DP4, experts EP8, batch 64")
    LayoutDegrees(tp=2, ep=8, dp=4, cp=1, pp=None, batch=64, vocabulary=(), dims=())
    """
    found = _LAYOUT.fullmatch(" ".join(text.lower().split()))
    if found is None:
        raise ValueError(
            f"expected one of {', '.join(LAYOUTS)} and the GPUs of a stage, such as tep8 or dep8pp2, or degrees as "
            f"answers print them, such as 'attention TP2 DP4, experts EP8'; got {text!r}"
        )
    if found["name"]:
        stage = _degrees(found["name"], int(found["gpus"]))
    else:
        attention, behind = _numbers(found["attention"]), _numbers(found["behind"])
        stage = LayoutDegrees(attention["tp"], behind["ep"], attention["dp"], attention["cp"])
        gpus = stage.tp * stage.cp * stage.dp, behind["tp"] * behind["ep"]
        if gpus[0] != gpus[1]:
            raise ValueError(f"attention is on {gpus[0]} GPUs of a stage, and what is behind it on {gpus[1]}: {text!r}")
    if found["meshes"] not in (None, meshes_text(stage.strategy).lower()):
        raise ValueError(f"expected ({meshes_text(stage.strategy)}) in {text!r}")
    pp, batch = (int(found[name]) if found[name] else None for name in ("pp", "batch"))
    vocabulary, dims = (_each(found[name] or "") for name in ("vocabulary", "dims"))
    return stage._replace(pp=pp, batch=batch, vocabulary=vocabulary, dims=dims)


def _each(numbers: str) -> tuple[int, ...]:
    """Numbers joined by commas, or digits that are not joined."""
    return tuple(map(int, numbers.split(",") if "," in numbers else numbers))


def _numbers(degrees: str) -> defaultdict[str, int]:
    """By axis, of a text such as " tp2 dp4"; 1 for those that it leaves out."""
    found = defaultdict[str, int](lambda: 1)
    for word in degrees.split():
        found[word[:2]] *= int(word[2:])
    return found


def _degrees(name: str, gpus: int) -> LayoutDegrees:
    return LayoutDegrees(1 if name == "dep" else gpus, 1 if name == "tp" else gpus, gpus if name == "dep" else 1)


def layout_of(strategy: Strategy) -> str | None:
    """The name of a strategy's layout, or None for one that has no such name.

    >>> layout_of(Strategy(8, 8, 2, 64, (), dp=1)), layout_of(Strategy(4, 2, 1, 64, (), dp=1))
    ('TEP8 PP2', None)
    """
    gpus, own = strategy.stage_gpus, LayoutDegrees(strategy.tp, strategy.ep, strategy.attention_dp)
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
