"""A replay in the terminal, and its picture."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import TYPE_CHECKING

import numpy as np

from raysearch.base.file_io import degrees_text
from raysearch.base.measured_first_tokens import MEASURED_WORDS, first_token_limit_text
from raysearch.base.priced_heading import priced_text
from raysearch.base.rich_tables import plain_table
from raysearch.deploy.replay.deployed_fleets import AggregatedFleet, DeployedFleet
from raysearch.deploy.replay.replay_report import METRICS, ReplayReport
from raysearch.deploy.replay.seed_estimates import AttainmentEstimate
from raysearch.deploy.replay.trace_files import recorded_per_s
from sim.layouts import layout_of
from sim.replay.requests import Requests
from sim.strategy import Strategy

if TYPE_CHECKING:
    from matplotlib.figure import Figure
    from rich.console import RenderableType


def replay_blocks(report: ReplayReport) -> Iterator[RenderableType]:
    """What `raysearch replay` prints."""
    setup = report.setup
    yield priced_text(setup.workload)
    yield f"{_fleet_text(setup.fleet)}, {report.gpus} GPU{'s' if report.gpus > 1 else ''}"
    yield _sent_line(report)
    rows = [
        (words, *(_milliseconds(report.seconds_of(metric, name)) for name in report.names))
        for metric, words in METRICS.items()
    ]
    yield plain_table(None, ("milliseconds", *report.names), rows)
    if measured := report.measured_first_s:
        figures = (
            f"{words} {measured[name][0] * 1e3:,.0f} [{measured[name][1] * 1e3:,.0f}, {measured[name][2] * 1e3:,.0f}]"
            for name, words in MEASURED_WORDS.items()
        )
        yield f"First tokens as clients measure them, with 90 % intervals: {', '.join(figures)} ms"
    served, good, busy, waiting, in_system = (
        report.figure_of(value).value
        for value in (
            lambda run: run.served_per_s,
            lambda run: run.goodput_per_s,
            lambda run: run.utilisation,
            lambda run: run.waiting,
            lambda run: run.in_system,
        )
    )
    served_words = "they serve at most, prompts cached" if setup.sent.cached else "they serve without queueing"
    load = f", sent {report.load:.0%} of what {served_words}" if report.load is not None else ""
    yield f"Served: {rate_text(served)}, in time {rate_text(good)}; replicas are busy {busy:.0%} of the time{load}"
    most = max(run.most_waiting for run in report.runs)
    yield (
        f"In the system: {in_system:,.2f} requests on average, of which {waiting:,.2f} wait; at most {most:,} wait at "
        "once for one microbatch"
    )
    yield from _notes(report)


def _sent_line(report: ReplayReport) -> str:
    sent, setup = report.setup.sent, report.setup
    if sent.clients is not None:
        when = f"{sent.clients} clients, each with one request open"
    else:
        recorded = f" of {_trace_text(sent.trace)}" if sent.trace is not None else f" at random (CV {sent.cv:g})"
        when = f"{rate_text(sent.rate_per_s)}{recorded}" if sent.rate_per_s else f"all at once{recorded}"
    count = len(report.first.sent_s)
    return f"Sent: {when}; {count:,} requests in {f'each of {setup.seeds} runs' if setup.seeds > 1 else 'one run'}"


def _trace_text(trace: Requests) -> str:
    span_s = float(trace.arrival_s[-1])
    own = f", {rate_text(recorded_per_s(trace))}" if span_s else ""
    isl, osl = trace.mean_tokens
    return f"a trace ({len(trace):,} requests in {span_s:,.4g} s{own}; {isl:,} tokens in and {osl:,} out on average)"


def _notes(report: ReplayReport) -> Iterator[str]:
    setup, workload = report.setup, report.setup.workload
    refused = max(run.refused for run in report.runs)
    limits = [
        f"{name} {limit_s * 1e3:g} ms"
        for name, limit_s in (("TTFT", workload.ttft_slo_s), ("TPOT", workload.tpot_slo_s))
        if limit_s < math.inf
    ]
    if limits and report.probability is not None:
        held, runs = sum(run.holds for run in report.runs), len(report.runs)
        longer = (
            ", which takes longer steps than these" if not report.met and report.probability >= setup.confidence else ""
        )
        yield (
            f"{' and '.join(limits)} at {percentile_text(setup.percentile)}: {'' if report.met else 'not '}met with "
            f"probability {setup.confidence:g}{longer}: they hold in {sum(report.kept)} of {report.replays} replays "
            f"({report.probability:.2f}) over the step model's error, in {held} of {runs} with steps as predicted"
            f"{f'; {_refused_text(refused)}' if refused else ''}"
        )
        if text := first_token_limit_text(workload):
            yield text
    if report.breaks_at_per_s is not None:
        most = "at most served" if setup.sent.cached else "without queueing up to"
        yield f"{_breaks_text(report, refused)}; {most} {rate_text(report.bound_per_s)}"
    first = report.runs[0]
    if first.hit_share:
        yield f"Prefix cache: {first.hit_share:.0%} of the prompt tokens found"
    if preempted := report.figure_of(lambda run: run.preempted).value:
        yield f"{preempted:,.0f} requests per run were preempted and recomputed: allow fewer at once"
    if refused and not limits:
        yield _refused_text(refused)


def _breaks_text(report: ReplayReport, refused: int) -> str:
    if report.breaks_at_per_s:
        least = report.breaks_at_per_s == report.most_per_s
        return f"Limits met {_up_to_text(report)}{', the most that is served' if least else ''}"
    sure = ", since requests are refused" if refused else f" with probability {report.setup.confidence:g}"
    return f"Limits met at no load{sure}"


def _up_to_text(report: ReplayReport) -> str:
    rate_per_s = report.breaks_at_per_s or 0.0
    least = "at least " if rate_per_s == report.most_per_s else ""
    return f"with probability {report.setup.confidence:g} up to {least}{rate_text(rate_per_s)}"


def _refused_text(count: int) -> str:
    return f"{count:,} request{'s' if count != 1 else ''} never fit{'' if count != 1 else 's'} in the KV cache"


def replayed_line(report: ReplayReport) -> str:
    """Latencies at the percentile, and the load up to which the limits hold with the confidence."""
    name = f"p{report.setup.percentile:g}"
    ttft, tpot = report.seconds_of("ttft_s", name), report.seconds_of("tpot_s", name)
    kept = f"; limits met {_up_to_text(report)}" if report.breaks_at_per_s else ""
    return (
        f"Replayed: {name} {ttft.value * 1e3:,.0f} ms to the first token and {tpot.value * 1e3:,.1f} ms per token{kept}"
    )


def _fleet_text(fleet: DeployedFleet) -> str:
    if isinstance(fleet, AggregatedFleet):
        return f"{copies_text(fleet.replicas)} of {_strategy_text(fleet.strategy)}"
    pools = fleet.pools
    prefill, decode = (_strategy_text(each.strategy) for each in (pools.prefill, pools.decode))
    return f"Prompts on {copies_text(pools.prefills)} of {prefill}; answers on {copies_text(pools.decodes)} of {decode}"


def _strategy_text(strategy: Strategy) -> str:
    return f"{layout_of(strategy) or degrees_text(strategy)}, at most {strategy.batch} requests each"


def percentile_text(percentile: float) -> str:
    """A percentile in words."""
    last = int(percentile) % 10 if percentile % 1 == 0 and int(percentile) // 10 != 1 else 0
    return f"the {percentile:g}{({1: 'st', 2: 'nd', 3: 'rd'}).get(last, 'th')} percentile"


def rate_text(requests_per_s: float) -> str:
    """Requests a second in words."""
    return f"{requests_per_s:,.2f} requests/s" if requests_per_s >= 0.1 else f"{requests_per_s:.2g} requests/s"


def copies_text(count: int) -> str:
    """Replicas in words."""
    return "1 replica" if count == 1 else f"{count:,} replicas"


def _milliseconds(estimate: AttainmentEstimate) -> str:
    digits = 1 if estimate.value < 0.1 else 0
    if estimate.high is None:
        return f"{estimate.value * 1e3:,.{digits}f}"
    return f"{estimate.value * 1e3:,.{digits}f} ±{(estimate.high - estimate.value) * 1e3:,.{digits}f}"


def replay_figure(report: ReplayReport) -> Figure:
    """Requests that run and wait over time, and how the latencies are spread."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 6.5), layout="constrained")
    over_time, first, each = figure.subplot_mosaic([["time", "time"], ["first", "each"]]).values()
    steps, workload = report.first.steps, report.setup.workload
    edges = np.linspace(0, report.first.end_s, 400)
    for column, words in ((2, "run"), (3, "wait")):
        over_time.step(edges[:-1], _mean_over(edges, steps, column), where="post", label=words, linewidth=1)
    over_time.set(xlabel="seconds", ylabel="requests", title="on all replicas")
    over_time.legend()
    for axes, values, limit_s, words in (
        (first, report.first.ttft_s, workload.ttft_slo_s, "time to the first token (ms)"),
        (each, report.first.tpot_s, workload.tpot_slo_s, "time per output token (ms)"),
    ):
        known = np.sort(values[~np.isnan(values)]) * 1e3
        axes.plot(known, np.arange(1, len(known) + 1) / max(1, len(known)))
        if limit_s < math.inf:
            axes.axvline(limit_s * 1e3, color="tab:red", linewidth=1, label="limit")
            axes.legend()
        axes.set(xlabel=words, ylabel="share of requests", ylim=(0, 1.01))
    first.set_xscale("log")
    return figure


def _mean_over(edges: np.ndarray, steps: np.ndarray, column: int) -> np.ndarray:
    """A column of stretches of steps, weighted by their time in each interval between edges."""
    begins, ends, values = steps[:, 0], steps[:, 1], steps[:, column]
    at_edges = np.zeros(len(edges))
    for edge, time_s in enumerate(edges):  # what had been added up by then
        at_edges[edge] = (np.clip(np.minimum(ends, time_s) - begins, 0, None) * values).sum()
    return np.diff(at_edges) / np.diff(edges)
