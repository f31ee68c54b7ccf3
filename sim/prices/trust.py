"""How far a figure may be off, and what in it no measurement covers."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

from sim.prices.hardware import Hardware
from sim.prices.priced import (
    EXACT,
    SIGNS,
    Interval,
    PricedKernel,
    apart,
    error_interval,
    exp_of,
    hypot_of,
    log_of,
    together_end,
)

_LEAST_SHARE = 0.01
"""What takes less of a layer's time than this is not worth a warning."""


class Trust(NamedTuple):
    """How far to trust a step.

    Attributes:
        expected_error: Mean relative error to expect.
        extrapolated: What rests on extrapolation, the largest share of the time first.
        kernels: Factors between which its kernels and collectives put the time in 90 % of cases.
    """

    expected_error: float
    extrapolated: tuple[str, ...]
    kernels: Interval


def trust_of(hardware: Hardware, parts: Sequence[PricedKernel]) -> Trust:
    """How far to trust the time of a step.

    Errors of one layer's kernels and collectives, weighted by time as if all erred to the same side, and the residual
    of measured serving runs on top, as if independent. [assumed]

    Args:
        hardware: Whose residual.
        parts: Of a layer.
    """
    total_s = sum([part.time_s for part in parts])
    beyond_s: dict[str, float] = {}
    for part in parts:
        if part.extrapolated:
            beyond_s[part.extrapolated] = beyond_s.get(part.extrapolated, 0.0) + part.time_s
    named = tuple(
        f"{what} ({part_s / total_s:.0%} of a layer)"
        for what, part_s in sorted(beyond_s.items(), key=lambda item: -item[1])
        if part_s >= _LEAST_SHARE * total_s
    )
    error, low, high = (
        sum([share * part.time_s for share, part in zip(shares, parts, strict=True)]) / total_s
        for shares in zip(*[(part.error, *part.interval) for part in parts], strict=True)
    )
    return Trust(math.hypot(error, hardware.errors.serving), named, (low, high))


class Stated(NamedTuple):
    """A 90 % interval as factors, and what makes it wider than that of a measured model; "" for nothing."""

    factors: Interval
    because: str


@dataclass(frozen=True, slots=True)
class StepInterval:
    """The interval of measured over predicted time of steps, and so of the time per output token, on one machine.

    Residuals of serving runs hold the errors of their kernels. What a strategy's own err beyond those comes on top, and
    so does the whole of what efficiencies of another machine may be off, as if independent. [assumed]

    Attributes:
        serving: That of serving runs, its lower end, 0, or its upper one, 1, by the share of the time that prompts
            take: of a token's time other requests', of a first token's 1.
        usual: What kernels put into it.
        carried: Of the efficiencies of another machine; None where they are this one's.
        because: See `Stated`.
    """

    serving: Callable[[int, Any], Any]
    usual: Interval
    carried: Interval | None
    because: str

    def factors(self, prompt_share: Any, kernels: Interval) -> Interval:
        """The interval, at a share or at each of an array; `kernels`: of `Trust`."""
        return self.end(0, prompt_share, kernels), self.end(1, prompt_share, kernels)

    def end(self, end: int, prompt_share: Any, kernels: Interval) -> Any:
        """Its lower end, 0, or its upper one, 1."""
        own = kernels if self.carried is None else apart(kernels, self.carried)
        found = on_top_end(end, self.serving(end, prompt_share), own[end], self.usual[end])
        return found if self.carried is None else together_end(end, found, self.carried[end])

    def stated(self, prompt_share: float, kernels: Interval) -> Stated:
        """The same with what makes it wider."""
        return Stated(self.factors(prompt_share, kernels), self.because)


def step_interval(hardware: Hardware, engine: str | None, model: str, *, moe: bool) -> StepInterval:
    """The interval of a model under an engine.

    Args:
        hardware: The machine.
        engine: Whose own time is charged; None for the bare machine.
        model: Its name.
        moe: Whether it has experts.
    """
    errors, curves = hardware.errors, hardware.curves
    runs = errors.runs
    if runs is None:
        same = error_interval(errors.serving)
        return StepInterval(lambda end, _: same[end], EXACT, None, "no serving run of this machine was measured")
    if engine is None:
        widths, because = runs.bare, "no engine is named, so its time per step is not included"
    elif model in _under(runs.models, engine):
        widths, because = runs.measured, ""
    else:
        widths, because = runs.unmeasured, f"no serving run of {model} under {engine} was measured"
        family = engine.partition("<")[0]
        others = [
            each for each in sorted(runs.models) if each.partition("<")[0] == family and model in runs.models[each]
        ]
        if others:
            because += f", only under {', '.join(others)}"
        elif model in _under(runs.elsewhere, engine):
            because += f" on {hardware.name}, so its engine times are those of its runs on others"
    serving = partial(widths.end, moe=moe)
    if curves is None or not (curves.other_machine and curves.calibration.carries_serving):
        return StepInterval(serving, runs.kernels, None, because)
    what = "what was not measured here is" if curves.rest else "efficiencies and serving runs are those"
    unknown = f"{what} of {curves.other_machine}, not of {hardware.name}"
    because = "; ".join(filter(None, (unknown, because)))
    return StepInterval(serving, runs.kernels, curves.carried_over.interval, because)


def _under(models: Mapping[str, frozenset[str]], engine: str) -> frozenset[str]:
    """Models of an engine of some generation, or of any where that has none."""
    return models.get(engine, models.get(engine.partition("<")[0], frozenset()))


def on_top(serving: Interval, kernels: Interval, usual: Interval) -> Interval:
    """The interval of serving runs, and by what the kernels' own is wider than usual."""
    lower, upper = (on_top_end(end, serving[end], kernels[end], usual[end]) for end in (0, 1))
    return lower, upper


def on_top_end(end: int, serving: Any, kernels: float, usual: float) -> Any:
    """The lower end of it, 0, or the upper one, 1."""
    return exp_of(SIGNS[end] * hypot_of(log_of(serving), max(0.0, SIGNS[end] * math.log(kernels / usual))))
