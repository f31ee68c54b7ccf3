"""One strategy, evaluated."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from functools import cached_property
from typing import TYPE_CHECKING

from raysearch.answers.result import Result
from raysearch.base.file_io import served_text, strategy_dict
from raysearch.base.measured_first_tokens import steady_first_token_s
from raysearch.base.priced_heading import priced_dict
from raysearch.deploy.contexts import context_warnings
from sim.config.question import Question
from sim.engines.engine_registry import lacking_formats
from sim.evaluation import Evaluation
from sim.json_object import JsonObject
from sim.layouts import layout_of
from sim.nearness import idle_slos, idle_stages, near_limits
from sim.optimum.spaces import space_of
from sim.precision import slow_precision
from sim.replay.goodput import Goodput, evaluate_in_phase, goodput
from sim.serving.phases import phase_of
from sim.sharding.grid import USUAL_RANKS
from sim.strategy import ONE_REPLICA, Strategy
from sim.workload import Workload

if TYPE_CHECKING:
    from matplotlib.figure import Figure
    from rich.console import RenderableType


@dataclass(frozen=True, repr=False)
class EvaluationResult(Result):
    """A strategy under a question.

    Attributes:
        question: What was asked.
        workload: What it is about.
        evaluation: Speed, latencies with intervals, memory, violations, and a breakdown per op.
    """

    question: Question
    workload: Workload
    evaluation: Evaluation

    @property
    def strategy(self) -> Strategy:
        """What was evaluated."""
        return self.evaluation.strategy

    @property
    def broken(self) -> list[str]:
        """Limits that it breaks, and what the engine whose space is searched refuses; empty if it can be run."""
        engine = space_of(self.workload).engine
        refused = engine.refusals(self.workload, self.strategy) if engine else []
        return list(dict.fromkeys([*(violation.message for violation in self.evaluation.violations), *refused]))

    @property
    def feasible(self) -> bool:
        """Whether it can be run."""
        return not self.broken

    @property
    def tokens_per_s_per_gpu(self) -> float:
        """Output tokens per second and GPU; of phase prefill prompt tokens."""
        return self.evaluation.tokens_per_s_per_gpu

    @cached_property
    def carried(self) -> Goodput | None:
        """In phase traffic, which load keeps the limits at the percentile; else None."""
        return goodput(self.workload, self.strategy) if phase_of(self.workload).replayed else None

    @property
    def outside_space(self) -> list[str]:
        """Why the strategy is not in the space that is searched; empty if it is."""
        return list(space_of(self.workload).outside(self.strategy))

    @cached_property
    def warnings(self) -> list[str]:
        """What of the question is too long, idle, unknown to the engine, or slower than it need be."""
        slow = slow_precision(
            self.workload,
            self.evaluation.tokens_per_s_per_gpu,
            lambda other, _: evaluate_in_phase(other, self.strategy).tokens_per_s_per_gpu,
        )
        idle = [*idle_slos(self.workload), *idle_stages(self.workload, self.strategy)]
        known = [*context_warnings(self.question, self.workload), *lacking_formats(self.workload)]
        return [*known, *idle, *([slow] if slow else [])]

    def to_dict(self) -> JsonObject:
        """The answer as `raysearch evaluate --json` prints it."""
        return {
            **workload_dict(self.workload, self.question),
            "outside_space": self.outside_space,
            **evaluation_dict(self.workload, self.evaluation),
            **({"goodput": goodput_dict(self.carried)} if self.carried else {}),
            "near_limits": [asdict(limit) for limit in near_limits(self.workload, self.evaluation)],
            "warnings": self.warnings,
        }

    def to_rows(self) -> list[JsonObject]:
        """The fused ops of one layer: choice, placements, work, time."""
        return [{**asdict(op), "collectives": len(op.collectives), "time_s": op.time_s} for op in self.evaluation.ops]

    def blocks(self) -> Iterator[RenderableType]:
        """What `raysearch evaluate` prints."""
        from raysearch.base.rich_tables import explanation

        yield from explanation(self.workload, self.evaluation, self.broken)
        if self.carried and self.feasible:
            yield goodput_text(self.workload, self.carried)
        if outside := [text for text in self.outside_space if text not in self.broken]:
            yield f"Not in the space {self.workload.space!r}: {'; '.join(outside)}"
        for warning in self.warnings:
            yield f"Warning: {warning}"

    def figure(self) -> Figure:
        """Seconds of each fused op of a layer: kernels and communication."""
        from matplotlib.figure import Figure

        ops = self.evaluation.ops
        figure = Figure(figsize=(8, 0.35 * len(ops) + 1.2), layout="constrained")
        axes, names = figure.subplots(), [f"{op.name} ({op.label})" for op in ops]
        kernels_us = [op.kernel_time_s * 1e6 for op in ops]
        axes.barh(names, kernels_us, label="kernels")
        axes.barh(names, [op.communication_time_s * 1e6 for op in ops], left=kernels_us, label="communication")
        axes.invert_yaxis()
        axes.set(xlabel="us of one layer", title=f"{self.workload.name}: {self.tokens_per_s_per_gpu:,.1f} tokens/s/GPU")
        axes.legend()
        return figure


def goodput_dict(found: Goodput) -> JsonObject:
    """A goodput as it stands in JSON."""
    return {
        "requests_per_s": found.requests_per_s,
        "gpus": found.gpus,
        "steady_state_requests_per_s": found.bound_per_s,
        "share_of_steady_state": found.share,
        "ttft_s": found.ttft_s,
        "tpot_s": found.tpot_s,
    }


def goodput_text(workload: Workload, found: Goodput) -> str:
    """A goodput in a sentence or two."""
    loop = workload.open_loop
    arrivals = "Poisson arrivals" if loop.cv == 1 else f"arrivals with a CV of {loop.cv:g}"
    served = found.steady_state.strategy.served
    alone = served == ONE_REPLICA
    of, per = ("", "per replica ") if alone else (f" of {served_text(served)}; {found.gpus} GPUs", "")
    return (
        f"Goodput{of}: {found.requests_per_s:,.2f} requests/s {per}with {arrivals}, {found.share:.0%} of its steady "
        f"state's {found.bound_per_s:,.2f}. At percentile {loop.percentile:g} it takes {found.ttft_s * 1e3:,.0f} ms to "
        f"the first token and {found.tpot_s * 1e3:,.1f} ms per token; latencies above are means of the steady state."
    )


def workload_dict(workload: Workload, question: Question) -> JsonObject:
    """What was asked, as it stands in JSON; `engine` is null for the bare machine."""
    curves, imported = workload.hardware.curves, question.import_record()
    return {
        "workload": workload.name,
        "question": question.record(),
        **priced_dict(workload),
        "kernels": curves.engine if curves else None,
        "groups": workload.groups,
        **({"tp_inner": workload.tp_inner} if workload.tp_inner != USUAL_RANKS else {}),
        **({"overlap_parts": workload.overlap_parts} if workload.overlap_parts > 1 else {}),
        **({"all_reduce": question.all_reduce} if question.all_reduce else {}),
        **{name: True for name in ("fp8_gather", "merge_collectives") if getattr(workload.hardware, name)},
        **({"stage_layers": workload.stage_layers} if workload.stage_layers else {}),
        "prompt_wait_steps": workload.prompt_wait_steps,
        **({"model_import": imported} if imported else {}),
    }


def evaluation_dict(workload: Workload, evaluation: Evaluation) -> JsonObject:
    """An evaluation as it stands in JSON; latencies that the phase does not have are null."""
    phase = phase_of(workload)
    return {
        "feasible": evaluation.feasible,
        "strategy": strategy_dict(evaluation.strategy),
        "layout": layout_of(evaluation.strategy),
        "tokens_per_s_per_gpu": evaluation.tokens_per_s_per_gpu,
        "tpot_s": evaluation.tpot_s if phase.decodes else None,
        "tpot_interval_s": list(evaluation.tpot_interval_s) if phase.decodes else None,
        "interval_because": evaluation.interval_because,
        "ttft_s": evaluation.ttft_s if phase.prefills else None,
        "ttft_interval_s": list(evaluation.ttft_interval_s) if phase.prefills else None,
        "measured_ttft_s": steady_first_token_s(workload, evaluation),
        "expected_error": evaluation.expected_error,
        "extrapolated": list(evaluation.extrapolated),
        "gpus": evaluation.gpus,
        "running": evaluation.running,
        "probability_within": {
            name: within(slo_s)
            for name, within, slo_s in (
                ("tpot", evaluation.tpot_within, workload.tpot_slo_s),
                ("ttft", evaluation.ttft_within, workload.ttft_slo_s),
            )
            if math.isfinite(slo_s)
        },
        "engine_s": evaluation.engine_s,
        "memory_bytes": {**asdict(evaluation.memory_bytes), "total": evaluation.memory_bytes.total},
        "violations": [asdict(violation) for violation in evaluation.violations],
        "stage": asdict(evaluation.stage),
        "prompt_stage": asdict(evaluation.prompt_stage) if evaluation.prompt_stage else None,
        "ops": [{**asdict(op), "time_s": op.time_s} for op in evaluation.ops],
    }
