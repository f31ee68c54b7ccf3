"""Results as tables for people; `--json` gives the same figures to programs."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import groupby
from typing import Any, TypedDict, final

from rich import box
from rich.console import Console, ConsoleOptions, RenderableType, RenderResult
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from raysearch.base.console import InertConsole
from raysearch.base.file_io import counted, degrees_text
from raysearch.base.measured_first_tokens import steady_first_token_text
from raysearch.base.priced_heading import priced_text
from sim.evaluation import Evaluation, OpBreakdown
from sim.nearness import near_limits
from sim.prices.collectives import Collective
from sim.serving.phases import phase_of
from sim.step.pipeline import layers_of_stages
from sim.strategy import Strategy
from sim.workload import Workload

LEAST_WIDTH, ROOMY_WIDTH, PIPED_WIDTH = 80, 100, 120
"""Columns below which the terminal breaks lines, from which tables have room to break theirs, and of what is piped."""


def printer(*, stderr: bool = False) -> Console:
    """Stdout or stderr, as wide as the terminal, or as COLUMNS says of what is piped."""
    console = InertConsole(stderr=stderr)
    stated = console.is_terminal or os.environ.get("COLUMNS", "").isdigit()
    console.width = max(console.width, LEAST_WIDTH) if stated else PIPED_WIDTH
    return console


@final
class _FittingTable(Table):
    """A table; where a narrow terminal has no room for it, rows in lines, so that no figure is lost."""

    def __init__(self, *, left: int, **options: Any) -> None:
        super().__init__(**options)
        self._left = left

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        natural = self.__rich_measure__(console, options.update_width(1000)).maximum
        if natural <= options.max_width or options.max_width >= ROOMY_WIDTH:
            yield from super().__rich_console__(console, options)
            return
        if self.title:
            yield Text(str(self.title), "bold")
        names = [" ".join(str(column.header).split()) for column in self.columns]
        for cells in zip(*(map(str, column.cells) for column in self.columns), strict=True):
            figures = [f"{name} {cell}".strip() for name, cell in zip(names, cells, strict=True)]
            yield Text("  ".join(cell for cell in cells[: self._left] if cell))
            yield Padding(Text("; ".join(figures[self._left :])), (0, 0, 0, 4))


def print_blocks(blocks: Iterable[RenderableType], *, stderr: bool = False) -> None:
    """Prints each block on lines of its own as soon as it is there."""
    console = printer(stderr=stderr)
    for block in blocks:
        console.print(block)


def plain_table(
    title: str | None, columns: Sequence[str], rows: Iterable[Sequence[str]], *, left: int = 1, wrap: Sequence[str] = ()
) -> Table:
    """A table whose first `left` columns are text and whose others are figures. Those in `wrap` may break lines."""
    table = _FittingTable(
        left=left, title=title, box=box.SIMPLE_HEAD, title_justify="left", title_style="bold", padding=(0, 1, 0, 0)
    )
    for index, column in enumerate(columns):
        table.add_column(column, justify="left" if index < left else "right", no_wrap=column not in wrap)
    for row in rows:
        table.add_row(*row)
    return table


class ScoreRow(TypedDict):
    """Means over the runs of a searcher on a workload; `*_sd` is the sample deviation, None of a single run."""

    workload: str
    searcher: str
    runs: int
    complete: bool
    best: float
    best_sd: float | None
    fraction_of_optimum: float | None
    fraction_of_optimum_sd: float | None
    ratio: float | None
    ratio_bound: float | None
    feasible_share: float
    unique_share: float
    calls: float
    wall_s: float | None


def scores_table(scores: Sequence[ScoreRow]) -> RenderableType:
    """The one table a study ends with; a line with a workload's name stands above its searchers."""
    seeds = max(row["runs"] for row in scores)
    rows: list[tuple[str, ...]] = []
    for workload, of_workload in groupby(scores, key=lambda row: row["workload"]):
        rows += [(workload,), *map(_score_row, of_workload)]
    return plain_table(
        f"Mean ± deviation over {seeds} seeds" if seeds > 1 else None,
        ("searcher", "best\ntok/s/GPU", "f/f*", "x RW\n(bound)", "feasible", "unique", "calls", "wall s"),
        rows,
    )


def _score_row(row: ScoreRow) -> tuple[str, ...]:
    return (
        f"  {row['searcher']}{_ending(row)}",
        _spread(row["best"], row["best_sd"], 2),
        _spread(row["fraction_of_optimum"], row["fraction_of_optimum_sd"], 3),
        "-" if row["ratio"] is None else f"{row['ratio']:.2f} ({_figure(row['ratio_bound'], 2)})",
        f"{row['feasible_share']:.1%}",
        f"{row['unique_share']:.1%}",
        f"{row['calls']:,.0f}",
        _figure(row["wall_s"], 1),
    )


def _ending(row: ScoreRow) -> str:
    if not row["complete"]:
        return " (unfinished)"
    return "" if row["calls"] else " (ended without an evaluation)"


def _figure(value: float | None, digits: int) -> str:
    return "-" if value is None else f"{value:,.{digits}f}"


def _spread(value: float | None, deviation: float | None, digits: int) -> str:
    return _figure(value, digits) + ("" if deviation is None else f" ± {deviation:.{digits}f}")


def explanation(
    workload: Workload, evaluation: Evaluation, broken: Sequence[str] | None = None
) -> list[RenderableType]:
    """Everything about one evaluated strategy: why it cannot be run, degrees, ops, stage, memory.

    Args:
        workload: What it serves.
        evaluation: Of it.
        broken: All that is wrong with it; by default its violations.
    """
    broken = [violation.message for violation in evaluation.violations] if broken is None else broken
    return [
        Text(priced_text(workload), "bold"),
        *(f"Infeasible: {text}" for text in broken),
        _headline(workload, evaluation),
        *_layer_tables(workload, evaluation),
        _stage_line(workload, evaluation),
        _memory_table(workload, evaluation),
        *([] if broken else [Text("Violations: none", style="green")]),
        *(Text(f"Near its limit: {near.message}", "yellow") for near in near_limits(workload, evaluation)),
    ]


def _headline(workload: Workload, evaluation: Evaluation) -> Text:
    strategy, curves = evaluation.strategy, workload.hardware.curves
    others = curves is not None and curves.engine != (workload.engine.name if workload.engine else None)
    return Text.assemble(
        (degrees_text(strategy), "bold"),
        f", dims {','.join(map(str, strategy.dims))}\n",
        (f"{evaluation.tokens_per_s_per_gpu:,.2f} tokens/s/GPU", "bold"),
        f", ±{evaluation.expected_error:.0%}, on {counted(evaluation.gpus, 'GPU')}{_latencies(workload, evaluation)}",
        f"\npriced by the kernels of {curves.engine}" if curves and others else "",
        ("".join(f"\nextrapolated: {what}" for what in evaluation.extrapolated), "yellow"),
    )


def _latencies(workload: Workload, evaluation: Evaluation) -> str:
    latency_text, phase = "", phase_of(workload)
    if phase.decodes:
        low_s, high_s = evaluation.tpot_interval_s
        within = evaluation.tpot_within
        latency_text += f", {evaluation.tpot_s * 1e3:.2f} ms per output token{_allowed(workload.tpot_slo_s, within)}"
        latency_text += f", with 90 % confidence {low_s * 1e3:.1f} to {high_s * 1e3:.1f} ms"
    if phase.prefills:
        low_s, high_s = evaluation.ttft_interval_s
        within = evaluation.ttft_within
        latency_text += f", {evaluation.ttft_s * 1e3:.0f} ms to the first token{_allowed(workload.ttft_slo_s, within)}"
        latency_text += f" without a queue, by its kernels {low_s * 1e3:.0f} to {high_s * 1e3:.0f} ms"
        latency_text += f"; {text}" if (text := steady_first_token_text(workload, evaluation)) else ""
    return latency_text + (f" ({evaluation.interval_because})" if evaluation.interval_because else "")


def _allowed(slo_s: float, within: Callable[[float], float]) -> str:
    return f" (limit {slo_s * 1e3:g} ms, met with probability {within(slo_s):.2f})" if math.isfinite(slo_s) else ""


def _layer_tables(workload: Workload, evaluation: Evaluation) -> Iterator[RenderableType]:
    """One layer of each group, and its communication."""
    model, stage = workload.model, evaluation.stage
    for group, layer_s in zip(model.groups, stage.group_layer_s, strict=True):
        several = f" of the {group.count} of {model.layers} that are {group.name}" if len(model.groups) > 1 else ""
        ops = evaluation.group_ops(group.name)
        yield _ops_table(f"One layer{several}, op by op", evaluation.strategy, ops, layer_s)
        yield _communication_table(f"Communication of one layer{several}", ops)


def _ops_table(title: str, strategy: Strategy, ops: Sequence[OpBreakdown], layer_s: float) -> Table:
    placements = "inputs -> output over " + ("its group" if strategy.extended else "tp")
    return plain_table(
        title,
        ("op", "sharded dim", placements, "bound by", "kernel us", "comm us", "total us", "share"),
        [_op_row(op, layer_s) for op in ops],
        left=4,
        wrap=(placements,),
    )


def _op_row(op: OpBreakdown, layer_s: float) -> tuple[str, ...]:
    inputs = ", ".join(f"{tensor} {placement}" for tensor, placement in op.placements_in.items())
    return (
        op.name,
        f"{op.choice} ({op.label})",
        f"{inputs} -> {op.placement_out}",
        op.bound,
        *(f"{seconds * 1e6:,.1f}" for seconds in (op.kernel_time_s, op.communication_time_s, op.time_s)),
        f"{op.time_s / layer_s:.1%}",
    )


def _communication_table(title: str, ops: Sequence[OpBreakdown]) -> RenderableType:
    rows = [
        (
            op.name,
            _kind_text(c),
            c.algorithm,
            c.tensor,
            f"{c.axis} = {c.degree}",
            bytes_text(c.bytes_per_device),
            f"{c.time_s * 1e6:,.1f}",
        )
        for op in ops
        for c in op.collectives
    ]
    if not rows:
        return Text("No communication within a layer")
    columns = ("for op", "collective", "by", "tensor", "over", "bytes per GPU", "us")
    return plain_table(title, columns, rows, left=5)


def _kind_text(collective: Collective) -> str:
    return collective.kind if collective.parts == 1 else f"{collective.kind} in {collective.parts} parts"


def bytes_text(size: float) -> str:
    """A size in the largest decimal unit that fits."""
    for unit, scale in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if size >= scale:
            return f"{size / scale:,.2f} {unit}"
    return f"{size:,.0f} B"


def _stage_line(workload: Workload, evaluation: Evaluation) -> Text:
    stage = evaluation.stage
    parts = {
        f"{stage.layers} layers x {stage.layer_s * 1e6:,.1f} us": stage.layers * stage.layer_s,
        "embedding": stage.embedding_s,
        "head": stage.head_s,
        "send and receive": stage.send_recv_s,
        **({"draft": stage.draft_s} if stage.draft_s else {}),
    }
    text = ", ".join(f"{name} {seconds * 1e3:.2f} ms" for name, seconds in parts.items())
    layers = layers_of_stages(workload, min(evaluation.strategy.pp, workload.model.layers))
    uneven = f"\nLayers of its {len(layers)} stages: {', '.join(map(str, layers))}" if len(set(layers)) > 1 else ""
    return Text(f"Slowest pipeline stage {stage.total_s * 1e3:.2f} ms: {text}{uneven}")


def _memory_table(workload: Workload, evaluation: Evaluation) -> Table:
    memory, capacity = evaluation.memory_bytes, workload.hardware.hbm_bytes
    kinds = {name: getattr(memory, name) for name in ("weights", "kv_cache", "activations", "overhead", "total")}
    rows = [(name.replace("_", " "), bytes_text(size), f"{size / capacity:.1%}") for name, size in kinds.items()]
    return plain_table("Memory of the fullest GPU", ("kind", "size", f"of {bytes_text(capacity)}"), rows)
