"""A strategy that is partly given, completed twice: as a compiler spreads shardings, and as is best."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from raysearch.answers.evaluated import evaluation_dict, workload_dict
from raysearch.answers.result import Result
from raysearch.base.errors import InputError
from raysearch.base.file_io import degrees_text
from raysearch.base.priced_heading import priced_text
from sim.config.question import Question
from sim.evaluation import Evaluation
from sim.json_object import JsonObject
from sim.layers.choices import rule
from sim.near_names import did_you_mean
from sim.ops.dims import dims_of
from sim.ops.layers import layer_of
from sim.ops.propagation import PartialDims, Propagated, megatron_weights, propagated
from sim.optimum.exact_search import find_best
from sim.optimum.spaces import Space, space_of
from sim.sharding.layout import parse_named
from sim.sharding.placement import PlacementError
from sim.strategy import NONE, VOCABULARY_OPS
from sim.workload import Workload

if TYPE_CHECKING:
    from matplotlib.figure import Figure
    from rich.console import RenderableType

WEIGHTS = "megatron-weights"
"""Stands for Megatron-LM's choices for the GEMMs, the others open."""
_TENSOR = re.compile(r"\w+\[[^\]]*\](?:\{[^]]*?\}(?!\}))?")


@dataclass(frozen=True, repr=False)
class CompletionResult(Result):
    """Two completions of a strategy.

    Attributes:
        question: What was asked.
        workload: What it is about.
        given: The choices that were given, None where one was to be found.
        spread: What propagation makes of them.
        by_propagation: The best strategy with these dims; None where none is feasible.
        best: The best strategy with the given choices; None where none is feasible.
    """

    question: Question
    workload: Workload
    given: PartialDims
    spread: Propagated
    by_propagation: Evaluation | None
    best: Evaluation | None

    @classmethod
    def of(
        cls,
        question: Question,
        workload: Workload,
        dims: str,
        degrees: Mapping[str, int],
        vocabulary: tuple[int, ...] = (),
    ) -> CompletionResult:
        """Completes the dims of a text at some degrees, those of the space where there are none.

        Args:
            question: What was asked.
            workload: What it is about.
            dims: See `parse_partial_dims`.
            degrees: By name.
            vocabulary: Choices of embedding, LM head and sampling; those of the space if there are none.

        Raises:
            InputError: The text means nothing, or names a choice that the space has not.
        """
        space = space_of(workload)
        given = parse_partial_dims(dims, workload)
        for name, choice in zip(space.choices, given, strict=True):
            if choice is not None and choice not in space.choices[name]:
                known = ", ".join(map(str, space.choices[name]))
                raise InputError(f"--dims: {name} is {choice}; in the space {workload.space!r} it is one of {known}")
        at_degrees = replace(space, **{name: (value,) for name, value in degrees.items()})
        if vocabulary:
            ends = {op: (choice,) for op, choice in zip(VOCABULARY_OPS, vocabulary, strict=True)}
            at_degrees = replace(at_degrees, vocabulary=ends)
        spread = propagated(workload, given, tuple(space.choices.values()))
        return cls(
            question,
            workload,
            given,
            spread,
            find_best(_with(at_degrees, spread.dims)).evaluation,
            find_best(_with(at_degrees, given)).evaluation,
        )

    @property
    def feasible(self) -> bool:
        """Whether anything can be run with the given choices."""
        return self.best is not None

    @property
    def share_of_best(self) -> float:
        """What propagation reaches of the best completion's tokens/s/GPU, in [0, 1]; 0.0 where it cannot be run."""
        if self.best is None or self.by_propagation is None:
            return 0.0
        return self.by_propagation.tokens_per_s_per_gpu / self.best.tokens_per_s_per_gpu

    def to_dict(self) -> JsonObject:
        """The answer as `raysearch complete --json` prints it."""
        completions = {"propagation": self.by_propagation, "best": self.best}
        return {
            **workload_dict(self.workload, self.question),
            "given": self.given,
            "ops": self.to_rows(),
            "conflicts": list(self.spread.conflicts),
            "share_of_best": self.share_of_best,
            **{
                name: None if found is None else evaluation_dict(self.workload, found)
                for name, found in completions.items()
            },
        }

    def to_rows(self) -> list[JsonObject]:
        """The fused ops: what is given, what propagation makes of it and why, and what is best."""
        best = self.best.strategy.dims if self.best else (None,) * len(self.given)
        found = zip(dims_of(self.workload), self.given, self.spread.dims, self.spread.origins, best, strict=True)
        return [
            {"op": dim.name, "given": given, "propagated": spread, "origin": origin, "best": choice}
            for dim, given, spread, origin, choice in found
        ]

    def blocks(self) -> Iterator[RenderableType]:
        """What `raysearch complete` prints."""
        from raysearch.base.rich_tables import plain_table

        yield priced_text(self.workload)
        ops = {dim.name: dim.op for dim in dims_of(self.workload)}
        rows = [
            tuple(
                "?" if choice is None else f"{choice} ({ops[row['op']].label(choice) or 'none'})"
                for choice in (row["given"], row["propagated"], row["best"])
            )
            for row in self.to_rows()
        ]
        table = [(name, *row, origin) for name, row, origin in zip(ops, rows, self.spread.origins, strict=True)]
        yield plain_table(None, ("op", "given", "by propagation", "best", "propagated"), table, left=5)
        for conflict in self.spread.conflicts:
            yield f"Conflict: {conflict}"
        yield f"By propagation: {_figures(self.by_propagation)}"
        yield f"Best completion: {_figures(self.best)}"
        if self.best and self.by_propagation:
            yield f"Propagation reaches {self.share_of_best:.1%} of the best completion."

    def figure(self) -> Figure:
        """Seconds of each fused op of both completions, side by side. Raises: ValueError: Neither is feasible."""
        from matplotlib.figure import Figure

        bars = {"by propagation": self.by_propagation, "best": self.best}
        found = {name: each for name, each in bars.items() if each}
        if not found:
            raise ValueError(f"no completion for {self.workload.name} is feasible: there is nothing to draw")
        ops = [op.name for op in next(iter(found.values())).ops]
        figure = Figure(figsize=(8, 0.5 * len(ops) + 1.2), layout="constrained")
        axes, thickness = figure.subplots(), 0.8 / len(found)
        for number, (name, each) in enumerate(found.items()):
            label = f"{name}: {each.tokens_per_s_per_gpu:,.1f} tokens/s/GPU"
            heights = [row + (number - (len(found) - 1) / 2) * thickness for row in range(len(ops))]
            axes.barh(heights, [op.time_s * 1e6 for op in each.ops], thickness, label=label)
        axes.set_yticks(range(len(ops)), ops)
        axes.invert_yaxis()
        axes.set(xlabel="us of one layer", title=f"{self.workload.name}: a strategy completed")
        axes.legend()
        return figure


def _figures(found: Evaluation | None) -> str:
    if found is None:
        return "nothing feasible"
    return (
        f"{found.tokens_per_s_per_gpu:,.2f} tokens/s/GPU, {found.tpot_s * 1e3:,.2f} ms per output token, "
        f"{degrees_text(found.strategy)}"
    )


def _with(space: Space, dims: PartialDims) -> Space:
    tables = {
        name: table if choice is None else (choice,)
        for (name, table), choice in zip(space.choices.items(), dims, strict=True)
    }
    return replace(space, choices=tables)


def parse_partial_dims(text: str, workload: Workload) -> PartialDims:
    """The choices that a text gives, None for the others.

    It is `WEIGHTS`; or one number or "?" per fused op, joined by commas or not at all; or tensors as in
    "qkv[t,q_tp] ffn_mid[e,c,f_tp]": the op that leaves each has the choice that leaves it so.

    Raises:
        InputError: It is none of these.
    """
    if text == WEIGHTS:
        return megatron_weights(workload)
    entries = dims_of(workload)
    if "[" in text:
        return _from_tensors(text, workload)
    parts = [part.strip() for part in (text.split(",") if "," in text else text)]
    if len(parts) != len(entries) or not all(part == "?" or part.isdecimal() for part in parts):
        names = ", ".join(dim.name for dim in entries)
        raise InputError(
            f"--dims: expected {len(entries)} numbers or '?', one per fused op ({names}), or {WEIGHTS}, or tensors "
            f"such as qkv[t,q_tp]; got {text!r}"
        )
    return tuple(None if part == "?" else int(part) for part in parts)


def _from_tensors(text: str, workload: Workload) -> PartialDims:
    entries, found = dims_of(workload), dict[int, int]()
    if rest := _TENSOR.sub("", text).strip(" ,"):
        raise InputError(f"--dims: expected tensors such as qkv[t,q_tp], got {rest!r}")
    layers = [layer_of(group) for group in workload.model.groups]
    for written in _TENSOR.findall(text):
        try:
            name, letters, layout = parse_named(written, ("tp",))
        except PlacementError as error:
            raise InputError(f"--dims: {error}") from None
        leaves = [
            (place, layers[group], dim.op)
            for place, dim in enumerate(entries)
            for group in dim.groups
            if dim.op.output == name and tuple(dim.op.letters) == letters
        ]
        if not leaves:
            tensors = dict.fromkeys(f"{dim.op.output}[{','.join(dim.op.letters)}]" for dim in entries)
            raise InputError(f"--dims: no op leaves a tensor {written}: {did_you_mean(written, list(tensors))}")
        for place, layer, op in leaves:
            choices = [choice for choice in op.choices if rule(op, layer, choice).output == layout[0]]
            if not choices:
                raise InputError(f"--dims: {op.name} cannot leave {written}")
            found[place] = NONE if NONE in choices else choices[0]
    return tuple(found.get(place) for place in range(len(entries)))
