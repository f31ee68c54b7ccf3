"""Placements in the terminal, as a picture and as files."""

from __future__ import annotations

import csv
import io
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import RenderableType

from raysearch.base.file_io import counted, degrees_text, png_of, write_bytes, write_record
from raysearch.base.measured_first_tokens import first_token_limit_text
from raysearch.base.priced_heading import engine_text, formats_text
from raysearch.base.rich_tables import plain_table
from raysearch.deploy.export.source import PLACEMENT_FILE
from raysearch.deploy.place.fleet_plan import SLOWER, CurvePoint, FleetPlan, PlacementOption, fleet_plan_dict
from raysearch.deploy.replay.seed_estimates import AttainmentEstimate, over_seeds
from sim.strategy import Strategy

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def fleet_plan_blocks(answer: FleetPlan) -> Iterator[RenderableType]:
    """An answer line by line."""
    file = answer.fleet.file
    best = answer.best
    workloads = answer.fleet.workloads
    formats = sorted({formats_text(each) for each in workloads})
    yield (
        f"{file.name} on {workloads[0].hardware.name}{engine_text(workloads[0])}: phase serve, "
        f"{counted(len(workloads), 'model')} on {counted(file.gpus, 'GPU')}; {' or '.join(formats)}"
    )
    yield f"{_estimate(best.attained)} of the requests meet their limits with"
    rows = _group_rows(best)
    yield plain_table(None, ("GPUs", "sharded", "models", "busy"), rows, left=3, wrap=("models", "sharded"))
    rows = [_row(answer, option) for option in answer.options]
    columns = (
        "",
        "in time",
        f"steps {SLOWER - 1:.0%}\nslower",
        f"p{answer.percentile:g} within\nlimits",
        "TTFT ms\nmean",
        "TTFT ms\n99 %",
        "best attains\nmore by",
    )
    yield plain_table("Kinds of placements", columns, rows)
    exact = all(option.found.exact for option in answer.options)
    tried = sum(option.found.tried for option in answer.options)
    how = "no other can be better on these runs" if exact else "found by a heuristic: better ones may exist"
    yield f"{tried:,} placements simulated; {how}."
    seeds, requests = len(answer.traffic.seeds), answer.traffic.requests
    yield (
        f"Brackets: 90 % intervals over {seeds} runs of {requests:,} requests that the search did not use: they cover "
        "the randomness of arrivals, not the step model's error."
    )
    yield (
        f"p{answer.percentile:g} within limits: the probability that every model's latencies at this percentile "
        "are, given the step model's error."
    )
    limits_s = [tenant.objective.ttft_s for tenant in answer.fleet.cluster.tenants]
    limited = [replace(each, ttft_slo_s=limit_s) for each, limit_s in zip(workloads, limits_s, strict=True)]
    yield from dict.fromkeys(text for each in limited if (text := first_token_limit_text(each)))


def _group_rows(option: PlacementOption) -> list[tuple[str, ...]]:
    """A line per group."""
    cluster = option.cluster
    rows: list[tuple[str, ...]] = []
    for at, placed in enumerate(option.found.placement):
        strategies = [cluster.services[model, placed.shape].strategy for model in placed.models]
        sharded = dict.fromkeys(_sharded(each) for each in strategies if each)
        names = ", ".join(cluster.tenants[model].name for model in placed.models) or "none"
        busy = sum(trial.busy[at] for trial in option.trials) / len(option.trials)
        rows.append((str(placed.shape), "; ".join(sharded), names, f"{busy:.0%}"))
    return rows


def _sharded(strategy: Strategy) -> str:
    return degrees_text(strategy).partition(", batch")[0]


def _row(answer: FleetPlan, option: PlacementOption) -> tuple[str, ...]:
    ttft = [sum(trial.ttft_s[at] for trial in option.trials) / len(option.trials) for at in (0, 1)]
    gain = "" if option is answer.best else _estimate(answer.gain(option), sign="+")
    slower = over_seeds(option.slower, 0.0, 1.0)
    return (
        option.name,
        _estimate(option.attained),
        f"{slower.value:.1%}",
        f"{option.probability:.2f}",
        *(f"{1e3 * each:,.0f}" for each in ttft),
        gain,
    )


def _estimate(estimate: AttainmentEstimate, sign: str = "") -> str:
    value = f"{estimate.value:{sign}.1%}"
    return value if estimate.low is None else f"{value} [{estimate.low:{sign}.1%}, {estimate.high:{sign}.1%}]"


def write_fleet_plan(answer: FleetPlan, points: Sequence[CurvePoint], folder: Path) -> None:
    """Writes placement.json, curves.csv and curves.png."""
    folder.mkdir(parents=True, exist_ok=True)
    write_record(folder / PLACEMENT_FILE, fleet_plan_dict(answer))
    table = io.StringIO()
    writer = csv.writer(table)
    writer.writerow(("placement", "varied", "at", "attained", "low", "high"))
    for each in points:
        writer.writerow((each.option, each.varied, each.at, each.attained.value, each.attained.low, each.attained.high))
    write_bytes(folder / "curves.csv", table.getvalue().encode())
    write_bytes(folder / "curves.png", png_of(curves_figure(answer, points)))


def curves_figure(answer: FleetPlan, points: Sequence[CurvePoint]) -> Figure:
    """The share in time of each placement against the rate and against burstiness."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 4), layout="constrained")
    labels = {"rate": "times the file's rates", "cv": "coefficient of variation of all gaps (1: Poisson)"}
    for axes, (varied, label) in zip(figure.subplots(1, 2, sharey=True), labels.items(), strict=True):
        for option in answer.options:
            own = [each for each in points if each.option == option.name and each.varied == varied]
            at = [each.at for each in own]
            axes.plot(at, [each.attained.value for each in own], marker="o", label=option.name)
            if own[0].attained.low is not None:
                bands = [[each.attained.low for each in own], [each.attained.high for each in own]]
                axes.fill_between(at, *bands, alpha=0.2, linewidth=0)
        axes.set(xlabel=label)
        axes.grid(alpha=0.3)
    first = figure.axes[0]
    first.set(ylabel="share of requests in time")
    first.legend(title="placement, as found for the file")
    figure.suptitle(f"{answer.fleet.file.name} on {answer.fleet.file.gpus} GPUs {answer.fleet.file.hardware}")
    return figure
