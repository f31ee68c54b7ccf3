"""Prefill and decode on one pool of GPUs or on two."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

from raysearch.answers.result import Result
from raysearch.base.errors import InputError
from raysearch.base.file_io import degrees_text, strategy_dict
from raysearch.base.limits import check_rate
from raysearch.deploy.pools.pool_comparison import Case, PoolComparison, along_traffic
from raysearch.deploy.pools.pools_files import COLUMNS, answers_dict, rows, write_answers
from raysearch.deploy.recommend.demand import check_traffic, chunks_of
from raysearch.deploy.replay.trace_files import read_trace, recorded_per_s, with_lengths_of
from sim.config.question import Question, load_question
from sim.evaluation import Evaluation
from sim.json_object import JsonObject
from sim.optimum.exact_search import find_best
from sim.optimum.spaces import space_of
from sim.pools.afd import AfdPool, best_afd
from sim.pools.matching import Limits
from sim.pools.resharding import Host
from sim.pools.traffic import Traffic, TrafficKind, workload_of
from sim.serving.phases import DECODE, SERVE

if TYPE_CHECKING:
    from matplotlib.figure import Figure
    from rich.console import RenderableType

SWEEPABLE: Mapping[str, bool] = {"isl": True, "gpus": True, "ttft_ms": False, "requests_per_s": False}
"""What may be swept, and whether it is whole."""


@dataclass(frozen=True, repr=False)
class PoolsResult(Result):
    """The best of each way to serve a mix of requests, under one or several limits, loads and prompt lengths.

    Attributes:
        question: What was asked.
        points: One comparison per combination of what was swept.
        afd: Whether the decode pool of the first point is also laid out with experts on GPUs of their own.
    """

    question: Question
    points: Sequence[PoolComparison]
    afd: bool = False

    @classmethod
    def of(
        cls,
        question: Question,
        *,
        mix: Sequence[tuple[int, int, float]] | None,
        requests_per_s: float | None,
        sweep: Mapping[str, Sequence[float]] | None,
        kv_hidden: float,
        host: Host | None,
        cv: float = 1.0,
        percentile: float = 99.0,
        requests: int = 2000,
        trace: Path | None = None,
        progress: Callable[[str], None],
        afd: bool = False,
    ) -> PoolsResult:
        """Answers a question; see `raysearch.api.pools`."""
        sweep = sweep or {}
        loaded = (requests_per_s, trace, sweep.get("requests_per_s")) != (None, None, None)
        check_traffic(cv, percentile, trace, loaded=loaded)
        recorded = None if trace is None else read_trace(trace, requests)
        if recorded is not None:
            if mix is not None or "isl" in sweep:
                raise InputError("--set trace: a trace has lengths of its own: leave out --set mix and a sweep of isl")
            question = with_lengths_of(question, recorded)
            if requests_per_s is None:
                requests_per_s = recorded_per_s(recorded)
        if question.phase not in (None, SERVE.name):
            raise InputError(f"--phase={question.phase}: pools are compared in phase serve: leave it out")
        if unknown := [name for name in sweep if name not in SWEEPABLE]:
            raise InputError(f"--set sweep: cannot sweep {unknown[0]}: expected some of {', '.join(SWEEPABLE)}")
        for rate in (loads := sweep.get("requests_per_s", [requests_per_s])):
            check_rate(rate)
        mixes = _mixes(question, sweep.get("isl"), mix)
        gpus = int(max(sweep["gpus"])) if "gpus" in sweep else question.gpus
        questions = [
            replace(
                question,
                phase=SERVE.name,
                isl=max(1, round(mix.prompt_tokens)),
                osl=max(1, round(mix.output_tokens)),
                gpus=gpus,
            )
            for mix in mixes
        ]
        question = questions[0]
        workload = load_question(question)
        if afd and not workload.model.is_moe:
            raise InputError(f"--set afd: {workload.model.name} has no experts to set apart: leave it out")
        kept = 1 - workload.margin

        def limits_of(asked: Question) -> list[Limits]:
            ttfts_s = (
                [each / 1e3 for each in sweep["ttft_ms"]] if "ttft_ms" in sweep else [load_question(asked).ttft_slo_s]
            )
            return [
                Limits(int(size), workload.tpot_slo_s * kept, ttft_s * kept, load)
                for size in sweep.get("gpus", [workload.max_gpus])
                for ttft_s in ttfts_s
                for load in loads
            ]

        limits = [limits_of(each) for each in questions]
        unlimited = replace(workload, tpot_slo_s=math.inf, ttft_slo_s=math.inf)
        case = Case(unlimited, mixes[0], limits[0][0], kv_hidden, host, cv, percentile, requests, recorded)
        case = replace(case, chunks=chunks_of(question))
        return cls(question, along_traffic(case, zip(mixes, limits, strict=True), progress), afd)

    @cached_property
    def decode_pools(self) -> tuple[AfdPool | None, Evaluation | None]:
        """The best decode pool with experts on GPUs of their own, and the best with them on the same ones."""
        case = self.points[0].case
        limited = replace(
            workload_of(case.traffic, case.workload, DECODE.name),
            tpot_slo_s=case.limits.tpot_s / (1 - case.workload.margin),
            max_gpus=case.limits.gpus,
        )
        return best_afd(limited), find_best(space_of(limited)).evaluation

    @property
    def feasible(self) -> bool:
        """Whether any way keeps the limits at any point."""
        return any(each.winner for each in self.points)

    @property
    def winner(self) -> str | None:
        """The way with the most requests per GPU at the first point: "aggregated", "disaggregated" or "resharded"."""
        return self.points[0].winner

    def to_dict(self) -> JsonObject:
        """The answer as `raysearch pools --json` prints it."""
        return answers_dict(self.points, self.question) | (self._afd_dict() if self.afd else {})

    def _afd_dict(self) -> JsonObject:
        apart, together = self.decode_pools
        beside = together and {
            "tokens_per_s_per_gpu": together.tokens_per_s_per_gpu,
            "tpot_s": together.tpot_s,
            "gpus": together.gpus,
            "strategy": strategy_dict(together.strategy),
        }
        return {"afd": {"apart": {**asdict(apart), "gpus": apart.gpus} if apart else None, "together": beside}}

    def to_rows(self) -> list[JsonObject]:
        """A row per point: limits, and of each way its requests/s, GPUs and goodput per GPU."""
        return [dict(zip(COLUMNS, row, strict=True)) for row in rows(self.points)]

    def blocks(self) -> Iterator[RenderableType]:
        """What `raysearch pools` prints."""
        from raysearch.deploy.pools.pools_text import pools_blocks

        yield from pools_blocks(self.points)
        if self.afd:
            yield self._afd_text()

    def _afd_text(self) -> str:
        """Both decode pools, in words."""
        apart, together = self.decode_pools
        lines = ["decode pool with attention and experts on GPUs of their own (AFD)"]
        if apart is None:
            lines.append("  none keeps the limits")
        else:
            tp = f"tensor-parallel over {apart.attention_tp}" if apart.attention_tp > 1 else "data-parallel"
            lines += [
                f"  {apart.attention_gpus} GPUs for attention, {tp}, {apart.expert_gpus} for experts; "
                f"{apart.microbatches} microbatch{'es' if apart.microbatches > 1 else ''} of {apart.batch:,}",
                f"  of a layer and microbatch: attention {apart.attention_s * 1e6:,.0f} us, experts "
                f"{apart.experts_s * 1e6:,.0f}, there {apart.to_experts_s * 1e6:,.0f}, back {apart.back_s * 1e6:,.0f}; "
                f"{apart.hidden_share:.0%} of the way is hidden",
                f"  {apart.tokens_per_s_per_gpu:,.1f} tokens/s per GPU, {apart.tpot_s * 1e3:.1f} ms per token",
                "  not exported: no release of an engine serves it; vLLM has it in an experimental plugin alone",
            ]
        if together:
            lines.append(
                f"decode pool with both on the same GPUs: {together.tokens_per_s_per_gpu:,.1f} tokens/s per GPU, "
                f"{together.tpot_s * 1e3:.1f} ms per token, {degrees_text(together.strategy)}"
            )
        return "\n".join(lines)

    def figure(self) -> Figure:
        """Requests/s per GPU of each way along what was swept."""
        from raysearch.deploy.pools.pools_plot import pools_figure

        return pools_figure(self.points)

    def write(self, folder: str | Path) -> None:
        """Writes pools.json, pools.csv and, of several points, pools.png, for `raysearch export`."""
        from raysearch.processes.claim import check_folder

        check_folder(Path(folder), "pools.json")
        write_answers(self.points, self.to_dict(), Path(folder))


def _mixes(
    question: Question, lengths: Sequence[float] | None, mix: Sequence[tuple[int, int, float]] | None
) -> list[Traffic]:
    """One mix per prompt length, or the one that is given."""
    if mix is not None:
        if question.isl is not None or question.osl is not None or lengths is not None:
            raise InputError("give --isl and --osl, or --set mix, not both: mix has lengths of its own")
        try:
            return [Traffic.of(TrafficKind(*kind) for kind in mix)]
        except ValueError as error:
            raise InputError(f"--set mix: {error}") from None
    lengths = lengths or ([question.isl] if question.isl is not None else None)
    if question.workload is not None and lengths is None and question.osl is None:
        file = load_question(question)
        return [Traffic.of([TrafficKind(file.prompt_tokens, file.output_tokens)])]
    if lengths is None or question.osl is None:
        raise InputError("expected --isl and --osl, or --set mix")
    return [Traffic.of([TrafficKind(int(length), question.osl)]) for length in lengths]
