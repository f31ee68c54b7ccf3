"""The exact best of a space, and of several spaces beside each other."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from raysearch.answers.evaluated import EvaluationResult, evaluation_dict, goodput_dict, goodput_text, workload_dict
from raysearch.answers.result import Result
from raysearch.base.errors import InputError
from raysearch.base.file_io import degrees_text, strategy_dict
from raysearch.base.priced_heading import priced_dict, priced_text
from raysearch.deploy.contexts import context_warnings
from raysearch.optima.certificate_files import CountProgress, write_certificate
from raysearch.optima.named_spaces import COMPARED, SpaceBest, best_of_space, optimum_value
from raysearch.optima.optimum_cache import CachedOptimum, find_cached_optimum
from sim.arrays import Floats
from sim.config.question import Question
from sim.engines.engine_registry import lacking_formats
from sim.evaluation import Evaluation
from sim.json_object import JsonFields, JsonObject
from sim.layouts import layout_of
from sim.nearness import idle_slos, idle_stages, near_limits
from sim.ops.heuristics import MEGATRON_NOTE
from sim.optimum.exact_search import find_bests
from sim.optimum.landscape import can_be_added_up
from sim.optimum.spaces import space_of
from sim.optimum.uneven_stages import UnevenStages, best_stages, check_stages_may_differ
from sim.precision import slow_precision
from sim.replay.goodput import evaluate_in_phase, other_seeds
from sim.replay.goodput_search import BestGoodput, best_goodput
from sim.serving.phases import phase_of
from sim.simulate import evaluate
from sim.strategy import Strategy
from sim.workload import Workload

if TYPE_CHECKING:
    from matplotlib.figure import Figure
    from rich.console import RenderableType

USUAL_REPLAYS = 200
"""[assumed] Half a second each."""
_OTHER_SEEDS = 4
"""[assumed] Other arrivals under which the best is replayed, to tell chance from worth."""
Bars = Callable[[str], AbstractContextManager[CountProgress]]
"""Shows how far a piece of work is, which it is given the name of: called with (done, total)."""


def no_bars(_: str) -> AbstractContextManager[CountProgress]:
    """Shows nothing."""
    return nullcontext(lambda done, total: None)


@dataclass(frozen=True, repr=False)
class OptimumResult(Result):
    """The best strategy of a question's whole space; how the landscape lies around it is computed when it is read.

    Attributes:
        question: What was asked.
        workload: What it is about.
        landscape: Whether the feasible strategies are counted too, where they can be added up.
        fresh: Whether to search again even if the optimum is in the cache on disk.
        bars: Shows progress.
        uneven_stages: Whether pipelines with the best layers per stage are solved, too.
        replays: In phase traffic, strategies to replay at most.

    Raises:
        InputError: Uneven stages are asked for, and the phase, the space or the confidence has none.
    """

    question: Question
    workload: Workload
    landscape: bool = True
    fresh: bool = False
    bars: Bars = field(default=no_bars, repr=False, compare=False)
    uneven_stages: bool = False
    replays: int = USUAL_REPLAYS

    def __post_init__(self) -> None:
        if not self.uneven_stages:
            return
        try:
            check_stages_may_differ(space_of(self.workload))
        except ValueError as error:
            raise InputError(f"--set uneven_stages: {error}") from None

    @cached_property
    def under_traffic(self) -> BestGoodput | None:
        """In phase traffic what is known of the best goodput, of which `searched` has the bound; else None."""
        if not phase_of(self.workload).replayed:
            return None
        with self.bars(f"best goodput of {self.workload.name}") as progress:
            return best_goodput(
                space_of(self.workload), self.replays, lambda found: progress(found.replayed, self.replays)
            )

    @cached_property
    def other_seeds(self) -> Floats:
        """In phase traffic, goodput of the best under other arrivals, tokens/s/GPU: its own seed picked it."""
        return (
            other_seeds(self.workload, self.strategy, _OTHER_SEEDS)
            if self.under_traffic and self.strategy
            else np.zeros(0)
        )

    @cached_property
    def around(self) -> CachedOptimum | None:
        """The best and what lies around it: how many are feasible, and how fast; None where that was not asked for."""
        if not (self.landscape and can_be_added_up(space_of(self.workload))):
            return None
        with self.bars(f"landscape of {self.workload.name}") as progress:
            return find_cached_optimum(self.workload, progress, fresh=self.fresh, best=self.searched.strategy)

    @cached_property
    def searched(self) -> SpaceBest:
        """The best, and how many strategies were looked at to be sure of it."""
        with self.bars(f"exact optimum of {self.workload.name}") as progress:
            return best_of_space(self.workload, self.workload.space, progress, fresh=self.fresh)

    @property
    def strategy(self) -> Strategy | None:
        """The best strategy, of those replayed in phase traffic; None where nothing is feasible."""
        if (traffic := self.under_traffic) is not None:
            return traffic.best.steady_state.strategy if traffic.best else None
        return self.searched.strategy

    @property
    def feasible(self) -> bool:
        """Whether anything can be run within the limits."""
        return self.strategy is not None

    @cached_property
    def best(self) -> Evaluation | None:
        """The best strategy's evaluation; None where nothing is feasible."""
        return evaluate_in_phase(self.workload, self.strategy) if self.strategy else None

    @cached_property
    def uneven(self) -> UnevenStages | None:
        """The best pipeline with any number of layers per stage; None where none is feasible, or nobody asked."""
        return best_stages(space_of(self.workload)) if self.uneven_stages else None

    @property
    def tokens_per_s_per_gpu(self) -> float:
        """Of the best strategy; 0.0 where nothing is feasible."""
        return self.best.tokens_per_s_per_gpu if self.best else 0.0

    @cached_property
    def warnings(self) -> list[str]:
        """What of the question is too long, idle, unknown to the engine, or slower than it need be."""
        with self.bars(f"best of {self.workload.name} in another format") as progress:

            def figure(other: Workload, least: float) -> float:
                if self.strategy:
                    return evaluate_in_phase(other, self.strategy).tokens_per_s_per_gpu
                return _figure(find_bests(space_of(other), 1, progress=progress, reached=least))

            slow = slow_precision(self.workload, self.tokens_per_s_per_gpu, figure)
        idle = [*idle_slos(self.workload), *(idle_stages(self.workload, self.strategy) if self.strategy else [])]
        known = [*context_warnings(self.question, self.workload), *lacking_formats(self.workload)]
        return [*known, *idle, *([slow] if slow else [])]

    def to_dict(self) -> JsonObject:
        """The answer as `raysearch optimum --json` prints it; without a feasible strategy its figures are null."""
        around, fields = self.around, workload_dict(self.workload, self.question)
        fields |= {"config_hash": self.workload.config_hash, "feasible": self.feasible, "tokens_per_s_per_gpu": None}
        fields |= {"expected_error": None, "extrapolated": [], "warnings": self.warnings}
        if self.best is not None:
            fields |= evaluation_dict(self.workload, self.best)
            fields["near_limits"] = [asdict(limit) for limit in near_limits(self.workload, self.best)]
        found = asdict(around or self.searched)
        fields |= {name: value for name, value in found.items() if name not in ("tokens_per_s_per_gpu", "strategy")}
        if traffic := self.under_traffic:
            fields["goodput"] = {
                **(goodput_dict(traffic.best) if traffic.best else {}),
                "bound_tokens_per_s_per_gpu": traffic.bound,
                "gap": traffic.gap,
                "proven": traffic.proven,
                "replayed": traffic.replayed,
                "other_seeds_tokens_per_s_per_gpu": self.other_seeds.tolist(),
            }
        if self.uneven_stages:
            fields["uneven_stages"] = asdict(self.uneven) if self.uneven else None
        return fields | {"distinct_size": space_of(self.workload).distinct_size}

    def to_rows(self) -> list[JsonObject]:
        """Tokens/s/GPU at or below which shares of the feasible strategies lie.

        Where the strategies are not counted, as in an engine's space: the fused ops of the best, as of an evaluation.
        """
        if self.around is None:
            return EvaluationResult(self.question, self.workload, self.best).to_rows() if self.best else []
        quantiles = self.around.quantiles.items()
        return [{"share": float(share), "tokens_per_s_per_gpu": value} for share, value in quantiles]

    def blocks(self) -> Iterator[RenderableType]:
        """What `raysearch optimum` prints: the best at once, then what it was found among."""
        from raysearch.base.rich_tables import explanation, plain_table

        if self.best is None:
            yield priced_text(self.workload)
            yield f"No strategy of {self.workload.name} is feasible."
        else:
            yield from explanation(self.workload, self.best)
        if traffic := self.under_traffic:
            yield self._traffic_text(traffic)
        if around := self.around:
            how = f"{around.feasible_count:,} feasible ({around.feasible_share:.3%}), all evaluated"
        else:
            best = self.searched
            how = f"{best.opened:,} of {best.tuples:,} tuples of degrees and batch evaluated, bounds exclude the rest"
        differ = f"{space_of(self.workload).distinct_size:,} distinct"
        size = f"{self.searched.space_size:,} strategies of the space {self.workload.space!r} ({differ})"
        yield f"{size}, {how} in {(around or self.searched).wall_s:.1f} s"
        if around and around.quantiles:
            rows = [(f"{row['share']:.4%}", f"{row['tokens_per_s_per_gpu']:,.2f}") for row in self.to_rows()]
            yield plain_table("Quantiles of the feasible strategies", ("share", "tokens/s/GPU"), rows)
        if self.uneven_stages:
            yield self._uneven_text()
        for warning in self.warnings:
            yield f"Warning: {warning}"

    def _traffic_text(self, traffic: BestGoodput) -> str:
        """How sure the best goodput is."""
        if traffic.proven:
            known = "no strategy has more: proven" if traffic.best else "none has any: proven"
        else:
            known = f"at most {traffic.bound:,.2f}, a gap of {traffic.gap:.1%}; more --set replays close it"
        best = f"{goodput_text(self.workload, traffic.best)}\n" if traffic.best else ""
        if len(self.other_seeds):
            low, high, mean = self.other_seeds.min(), self.other_seeds.max(), self.other_seeds.mean()
            best += (
                f"Under the arrivals of {len(self.other_seeds)} other seeds it is {low:,.0f} to {high:,.0f} "
                f"tokens/s/GPU, {mean:,.0f} on average.\n"
            )
        return (
            f"{best}Best of {traffic.replayed:,} deployments replayed, in the order of their steady states, whose "
            f"optimum is {optimum_value(self.workload) or 0.0:,.2f} tokens/s/GPU; {known}."
        )

    def _uneven_text(self) -> str:
        if self.uneven is None:
            return "Stages of any number of layers: none feasible."
        counts = ",".join(map(str, self.uneven.layers))
        gain = self.uneven.tokens_per_s_per_gpu / self.tokens_per_s_per_gpu - 1 if self.best else math.inf
        more = f" ({gain:+.1%})" if math.isfinite(gain) else ""
        return (
            f"Stages of any number of layers: {self.uneven.tokens_per_s_per_gpu:,.2f} tokens/s/GPU{more}, "
            f"{degrees_text(self.uneven.strategy)}, stage_layers={counts}"
        )

    def figure(self) -> Figure:
        """Seconds of each fused op of the best strategy. Raises: ValueError: Nothing is feasible."""
        if self.best is None:
            raise ValueError(f"no strategy of {self.workload.name} is feasible: there is nothing to draw")
        return EvaluationResult(self.question, self.workload, self.best).figure()

    def write_certificate(self, path: str | Path) -> int:
        """Writes a proof that nothing is better, which `raysearch verify` replays; its ranges of batches."""
        with self.bars(f"certificate of {self.workload.name}") as progress:
            best = self.best
            if self.under_traffic is not None:  # what is certified is the bound
                best = evaluate(self.workload, self.searched.strategy) if self.searched.strategy else None
            return write_certificate(Path(path), self.question, self.workload, best, progress, self.under_traffic)

    def compare_spaces(self) -> SpacesResult:
        """The best of heuristics, of the paper's, the joint and the extended space, and of the engine's."""
        return SpacesResult.of(self.workload, fresh=self.fresh, bars=self.bars)


def _figure(bests: tuple[Evaluation, ...]) -> float:
    """Tokens/s/GPU of the best of them; 0 of none."""
    return bests[0].tokens_per_s_per_gpu if bests else 0.0


_BASES = ("megatron", "megatron-sp", "joint")
"""Spaces over whose bests the others' are shown."""


@dataclass(frozen=True, repr=False)
class SpacesResult(Result):
    """The exact best of several spaces of one workload.

    Attributes:
        workload: Whose.
        bests: By the space's name.
    """

    workload: Workload
    bests: Mapping[str, SpaceBest]

    @classmethod
    def of(cls, workload: Workload, *, fresh: bool = False, bars: Bars = no_bars) -> SpacesResult:
        """Searches each of them."""
        engine = (workload.engine.family,) if workload.engine else ()
        bests: dict[str, SpaceBest] = {}
        for name in (*COMPARED, *engine):
            with bars(f"best of {workload.name}, {name}") as progress:
                bests[name] = best_of_space(workload, name, progress, fresh=fresh)
        return cls(workload, bests)

    @property
    def feasible(self) -> bool:
        """Whether any space has a strategy within the limits."""
        return any(best.strategy for best in self.bests.values())

    def to_dict(self) -> JsonObject:
        """The answer as `raysearch optimum --set compare_spaces --json` prints it."""
        spaces = {name: {**asdict(best), **self._judged(best.strategy)} for name, best in self.bests.items()}
        return {"workload": self.workload.name, **priced_dict(self.workload), "spaces": spaces}

    def _judged(self, strategy: Strategy | None) -> JsonObject:
        """A best strategy and how far to trust its figure."""
        best = evaluate(self.workload, strategy) if strategy else None
        return {
            "expected_error": best.expected_error if best else None,
            "extrapolated": list(best.extrapolated) if best else [],
            "near_limits": [asdict(limit) for limit in near_limits(self.workload, best)] if best else [],
            "strategy": strategy_dict(strategy) if strategy else None,
            "layout": layout_of(strategy) if strategy else None,
        }

    def to_rows(self) -> list[JsonObject]:
        """A row per space: its best, how many strategies it has, and the ratio to some others' bests."""
        rows: list[JsonObject] = []
        for name, best in self.bests.items():
            value = best.tokens_per_s_per_gpu
            bases = {base: self.bests[base].tokens_per_s_per_gpu for base in _BASES}
            rows.append(
                {
                    "space": name,
                    "strategy": best.strategy,
                    "space_size": best.space_size,
                    "wall_s": best.wall_s,
                    "tokens_per_s_per_gpu": value,
                    "expected_error": evaluate(self.workload, best.strategy).expected_error if best.strategy else None,
                    **{f"x {name}": value / base if value and base else None for name, base in bases.items()},
                }
            )
        return rows

    def blocks(self) -> Iterator[RenderableType]:
        """What `raysearch optimum --set compare_spaces` prints."""
        from raysearch.base.rich_tables import plain_table

        ratios = [f"x {name}" for name in _BASES]
        columns = ("space", "best strategy", "strategies", "s", "tok/s/GPU", "error", *ratios)
        title = f"{self.workload.name}: the exact best of each space"
        yield plain_table(title, columns, map(self._cells, self.to_rows()), left=2, wrap=("best strategy",))
        if self.workload.model.is_moe:
            yield MEGATRON_NOTE

    def _cells(self, row: JsonFields) -> tuple[str, ...]:
        best, value = row["strategy"], row["tokens_per_s_per_gpu"]
        return (
            row["space"],
            f"{degrees_text(best)}; {''.join(map(str, best.dims))}" if best else "none fits",
            f"{row['space_size']:.1e}",
            f"{row['wall_s']:.1f}",
            f"{value:,.2f}" if value else "-",
            f"±{row['expected_error']:.0%}" if best else "-",
            *(f"{row[f'x {name}']:.3f}" if row[f"x {name}"] else "-" for name in _BASES),
        )

    def figure(self) -> Figure:
        """The best of each space, tokens/s/GPU."""
        from matplotlib.figure import Figure

        rows = self.to_rows()
        figure = Figure(figsize=(8, 0.35 * len(rows) + 1.2), layout="constrained")
        axes = figure.subplots()
        axes.barh([row["space"] for row in rows], [row["tokens_per_s_per_gpu"] or 0.0 for row in rows])
        axes.invert_yaxis()
        axes.set(xlabel="tokens/s/GPU", title=f"{self.workload.name}: the exact best of each space")
        return figure
