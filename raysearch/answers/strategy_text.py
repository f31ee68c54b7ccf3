"""The strategy that degrees and dims describe in words, as options, exports and Python give them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from raysearch.base.errors import InputError
from sim.layouts import LayoutDegrees, degrees_of_layout
from sim.ops.dims import spread_choices
from sim.ops.heuristics import megatron_dims, megatron_sp_dims
from sim.optimum.exact_search import best_batch
from sim.strategy import Strategy
from sim.strategy_checks import check_strategy
from sim.workload import Workload

_NAMED_DIMS = {"megatron": megatron_dims, "megatron-sp": megatron_sp_dims}


def strategy_of(
    workload: Workload,
    tp: int | None,
    ep: int | None,
    pp: int,
    batch: int | None,
    dims: str,
    cp: int = 1,
    dp: int | None = None,
    layout: str | None = None,
    vocabulary: str | None = None,
) -> Strategy:
    """The strategy that the options describe, checked; without a batch, with that which serves it best.

    Raises:
        InputError: `dims` is no list of numbers, no degrees are given, or some that contradict each other.
        StrategyError: See `sim.strategy_checks.check_strategy`.
    """
    of_vocabulary, named_dims = _numbers("--set vocabulary", vocabulary) if vocabulary else (), ()
    if layout is not None:
        stated = _stated(tp, ep, pp, batch, dims, cp, dp, vocabulary)
        tp, ep, dp, cp, named_pp, named_batch, named_vocabulary, named_dims = _degrees_of(layout, stated)
        pp, batch, of_vocabulary = named_pp or pp, named_batch or batch, named_vocabulary or of_vocabulary
    if tp is None:
        raise InputError("expected --tp, or --layout with a name and the GPUs of a stage, such as --layout=tep8")
    ep = 1 if ep is None else ep
    of_ops = named_dims or parse_dims(dims, workload)
    strategy = Strategy(tp, ep, pp, 1 if batch is None else batch, of_ops, cp, dp, of_vocabulary)
    check_strategy(workload, strategy)
    return strategy if batch is not None else replace(strategy, batch=best_batch(workload, strategy))


def check_no_strategy(
    path: Path,
    tp: int | None,
    ep: int | None,
    pp: int,
    batch: int | None,
    dims: str,
    cp: int = 1,
    dp: int | None = None,
    layout: str | None = None,
    vocabulary: str | None = None,
) -> None:
    """Makes sure that no strategy is described beside the path of one.

    Raises:
        InputError: One is.
    """
    stated = [*_stated(tp, ep, pp, batch, dims, cp, dp, vocabulary), *(["layout"] if layout is not None else [])]
    if stated:
        options = ", ".join(f"--{name}" for name in stated)
        raise InputError(f"{path} has the strategy: leave out {options}, or the path")


def _stated(
    tp: int | None,
    ep: int | None,
    pp: int,
    batch: int | None,
    dims: str,
    cp: int,
    dp: int | None,
    vocabulary: str | None,
) -> list[str]:
    """Names of the options that say something of a strategy, others than their defaults."""
    given = {"tp": tp, "ep": ep, "dp": dp, "cp": None if cp == 1 else cp, "pp": None if pp == 1 else pp}
    given |= {"batch": batch, "dims": None if dims == "megatron" else dims, "set vocabulary": vocabulary}
    return [name for name, value in given.items() if value is not None]


def _degrees_of(layout: str, stated: list[str]) -> LayoutDegrees:
    try:
        found = degrees_of_layout(layout)
    except ValueError as error:
        raise InputError(f"--layout: {error}") from None
    beside = [f"--{name}" for name in stated if getattr(found, name.removeprefix("set ")) not in (None, ())]
    if beside:
        raise InputError(f"--layout={layout} already sets {' and '.join(beside)}: give one or the other")
    return found


def parse_dims(text: str, workload: Workload) -> tuple[int, ...]:
    """The dims that an option's text stands for: numbers joined by commas or not at all, or a heuristic's name."""
    if text in _NAMED_DIMS:
        return spread_choices(workload, _NAMED_DIMS[text](workload.model))
    return _numbers("--dims", text, f", or one of {', '.join(_NAMED_DIMS)};")


def _numbers(option: str, text: str, or_else: str = ",") -> tuple[int, ...]:
    try:
        return tuple(int(part) for part in (text.split(",") if "," in text else text.strip()))
    except ValueError:
        raise InputError(f"{option}: expected numbers joined by commas{or_else} got {text!r}") from None


def second_strategy_of(workload: Workload, text: str, degrees: Mapping[str, int | None]) -> tuple[str, Strategy]:
    """The dims, as written, and the strategy of a text such as "megatron tp=8 cp=1" or "megatron layout=tep8".

    Args:
        workload: Whose strategy it is.
        text: Dims, and any degrees in which it differs from the first strategy, by their option's name.
        degrees: The first strategy's, as `strategy_of` names them.

    Raises:
        InputError: As of `strategy_of`, or the text is no dims and degrees.
    """
    words = text.split()
    dims = [word for word in words if "=" not in word]
    changed: dict[str, int] = {}
    named = [word.partition("=")[2] for word in words if word.startswith("layout=")]
    for name, _, value in (word.partition("=") for word in words if "=" in word and not word.startswith("layout=")):
        if name not in degrees or not value.isdecimal():
            raise InputError(f"--set against takes degrees such as tp=8, of {', '.join(degrees)}; got {name}={value!r}")
        changed[name] = int(value)
    if len(dims) != 1:
        raise InputError(f"--set against takes dims, and degrees if they differ, such as 'megatron tp=8'; got {text!r}")
    kept = {**dict.fromkeys(("tp", "ep", "dp")), "cp": 1, "layout": named[-1]} if named else {}
    kept |= {"pp": 1} if named and _degrees_of(named[-1], []).pp else {}
    return dims[0], strategy_of(workload, dims=dims[0], **{**degrees, **kept, **changed})  # type: ignore[arg-type]
