"""Answers in the terminal: one in full, several as a table."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace

from rich.console import RenderableType

from raysearch.base.measured_first_tokens import first_token_limit_text
from raysearch.base.priced_heading import priced_text
from raysearch.base.rich_tables import plain_table
from raysearch.deploy.pools.pool_comparison import WAYS, PoolComparison, Way
from raysearch.deploy.pools.pools_files import what_runs
from raysearch.deploy.recommend.alternatives import gpus_text
from raysearch.deploy.replay.replay_text import rate_text, replayed_line
from sim.pools.matching import Matched
from sim.pools.resharding import Resharded


def pools_blocks(found: Sequence[PoolComparison]) -> Iterator[RenderableType]:
    """Answers line by line."""
    limits = found[0].case.limits
    limited = replace(found[0].case.workload, tpot_slo_s=limits.tpot_s, ttft_slo_s=limits.ttft_s)
    yield priced_text(limited)
    yield from _one(found[0]) if len(found) == 1 else _table(found)
    if text := first_token_limit_text(limited):
        yield text


def _one(answer: PoolComparison) -> Iterator[str]:
    case, limits = answer.case, answer.case.limits
    yield f"{gpus_text(limits.gpus)}; {_lengths(answer)}"
    for name, way in answer.ways.items():
        words = WAYS[name]
        mark = " <- highest requests/s per GPU" if name == answer.winner else ""
        yield f"{name.capitalize()}: {words}{mark}"
        if way is None:
            yield "  none keeps the limits"
            continue
        yield f"  {what_runs(case.workload, way)}"
        left = limits.gpus - way.gpus
        yield (
            f"  {rate_text(way.requests_per_s)} on {gpus_text(way.gpus)}{f', {left} idle' if left else ''}: "
            f"{answer.goodput_per_gpu(name):.3f} per GPU; {way.tpot_s * 1e3:.1f} ms per token, "
            f"{way.ttft_s * 1e3:,.0f} ms to the first"
        )
        for line in _notes(way):
            yield f"  {line}"
        if name in answer.replays:
            yield f"  {replayed_line(answer.replays[name])}"


def _lengths(answer: PoolComparison) -> str:
    kinds = answer.case.traffic.kinds
    return ", ".join(
        f"{kind.prompt_tokens:,} in and {kind.output_tokens:,} out" + (f" ({kind.share:.0%})" if len(kinds) > 1 else "")
        for kind in kinds
    )


def _notes(way: Way) -> list[str]:
    if isinstance(way, Matched):
        over = "the node's links" if way.same_node else "the network"
        spare = [
            (name, count * replica.requests_per_s / way.requests_per_s - 1)
            for name, count, replica in (("prefill", way.prefills, way.prefill), ("decode", way.decodes, way.decode))
        ]
        spare_text = ", ".join(f"{name} has {share:.0%} spare capacity" for name, share in spare if share > 0.005)
        return [f"KV cache: {way.transfer_s * 1e3:.1f} ms over {over}" + (f"; {spare_text}" if spare_text else "")]
    if isinstance(way, Resharded):
        return [
            f"Cycles of {way.cycle_s:,.1f} s: {way.cycle_requests:,} requests of each replica in {way.waves} waves; "
            f"weights move for {way.switch_s * 1e3:,.0f} ms of it, there and back"
        ]
    return []


def _table(found: Sequence[PoolComparison]) -> Iterator[RenderableType]:
    columns = ("prompt", "GPUs", "TTFT ms", "load /s", *(f"{name} /s/GPU" for name in found[0].ways), "wins", "by")
    table: list[tuple[str, ...]] = []
    for answer in found:
        limits = answer.case.limits
        goodputs = sorted(map(answer.goodput_per_gpu, answer.ways), reverse=True)
        lead = f"{goodputs[0] / goodputs[1] - 1:.0%}" if goodputs[1] else "-"
        table.append(
            (
                f"{answer.case.traffic.prompt_tokens:,.0f}",
                f"{limits.gpus:,}",
                "any" if limits.ttft_s == math.inf else f"{limits.ttft_s * 1e3:,.0f}",
                "full" if limits.requests_per_s is None else f"{limits.requests_per_s:g}",
                *(f"{answer.goodput_per_gpu(name):.4f}" if way else "-" for name, way in answer.ways.items()),
                answer.winner or "none",
                lead,
            )
        )
    yield plain_table("Requests/s within the limits, per GPU", columns, table, left=0)
    yield "; ".join(f"{name}: {WAYS[name]}" for name in found[0].ways)
