"""A recommended deployment."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from raysearch.answers.compared_advice import ComparedAdvice
from raysearch.answers.result import Result
from raysearch.base.errors import InputError
from raysearch.deploy.contexts import check_reach
from raysearch.deploy.recommend.demand import Demand, FormName, Without, check_traffic, chunks_of
from raysearch.deploy.recommend.fleet import Searched
from raysearch.deploy.recommend.formats_compared import FormatChoice, compared_formats, formats_table
from raysearch.deploy.recommend.forms_compared import (
    FormsCompared,
    ServingForm,
    compared_forms,
    compares_forms,
    forms_table,
    untried,
)
from raysearch.deploy.recommend.recommendation import Recommendation, begun, best_alone, recommended
from raysearch.deploy.recommend.recommendation_files import option_figures, recommendation_dict, write_recommendation
from raysearch.deploy.replay.trace_files import read_trace, with_lengths_of
from sim.config.question import ANY_FORMAT, Question, load_question
from sim.evaluation import Evaluation
from sim.json_object import JsonObject
from sim.serving.phases import phase_of
from sim.strategy import Strategy

if TYPE_CHECKING:
    from matplotlib.figure import Figure
    from rich.console import RenderableType

Recommender = Literal["aisimulate"]
"""Others that recommend deployments."""


@dataclass(frozen=True, repr=False)
class RecommendationResult(Result):
    """The recommended deployment, alternatives and the limiting factor.

    Attributes:
        question: What was asked.
        answer: The strategies with their fleets, the best first; where nothing is feasible, the nearest miss.
        formats: Where weights were `any`, all published formats, the best first, which the answer has.
        forms: Ways to serve, the best first, which the answer has; none where the engine's own is the only one.
        compare_with: Another recommender that is asked too, once its answer is read.
    """

    question: Question
    answer: Recommendation
    formats: tuple[FormatChoice, ...] = ()
    forms: tuple[ServingForm, ...] = ()
    compare_with: Recommender | None = None

    @classmethod
    def of(
        cls,
        question: Question,
        *,
        requests_per_s: float | None,
        concurrency: int | None,
        price: float | None,
        top: int,
        cv: float,
        percentile: float,
        requests: int,
        only: FormName | None,
        replays: int,
        trace: Path | None = None,
        forms: FormsCompared = "all",
        without: Without | None = None,
        compare_with: Recommender | None = None,
        progress: Callable[[str], None],
        found: Callable[[Recommendation], None] = lambda _: None,
        early: Callable[[Recommendation], None] | None = None,
        parallel: bool = False,
    ) -> RecommendationResult:
        """Answers a question; see `raysearch.api.recommend`, and `recommended` of the deployment for `found`.

        Where forms, formats or a load at random take their time, `early` is given what is soon found before. With
        `parallel` a second core is used: see `raysearch.processes.second_process`.
        """
        if compare_with:
            from raysearch.simulators.aisimulate import check_here

            check_here()
        check_traffic(cv, percentile, trace, loaded=trace is not None or requests_per_s is not None)
        recorded = None if trace is None else read_trace(trace, requests)
        question = with_lengths_of(question, recorded)
        traffic: dict[str, Any] = {"cv": cv, "percentile": percentile, "requests": requests, "trace": recorded}
        load = requests_per_s, concurrency, price

        def asked(each: Question) -> Demand:
            workload = load_question(each)
            check_reach(each, workload)
            if phase_of(workload).replayed:
                raise InputError(
                    f"--phase={workload.phase}: deployments are recommended in phase serve: leave it out, and give the "
                    "load by --requests-per-s; `optimum` finds the highest goodput in this phase"
                )
            if without:
                none = dict.fromkeys(without.split(","), (1,))
                workload = replace(workload, degrees=replace(workload.degrees, **none))
            given = {"only": only, "replays": replays, "chunks": chunks_of(each)}
            return Demand(workload, workload.max_gpus, each, top, *load, **traffic, **given)

        formats, compared, near, searched = list[FormatChoice](), list[ServingForm](), None, Searched()
        any_format = question.weights == ANY_FORMAT
        demand = asked(replace(question, weights=None) if any_format else question)
        if any_format and demand.loaded:
            raise InputError(
                "--weights=any compares tokens/s of all GPUs: leave out --requests-per-s and --concurrency"
            )
        if any_format or demand.under_traffic or compares_forms(demand, forms):
            if early:
                early(begun(demand, searched))
        elif demand.chooses_form and demand.concurrency is None:
            near = best_alone(demand.over_few_batches, searched)
        if any_format:
            formats, searched = compared_formats(question, asked, progress), Searched()
            question = formats[0].question
            demand = asked(question)
        if compares_forms(demand, forms):
            compared = compared_forms(question, asked, progress, searched, parallel=parallel)
            question, near = replace(question, **compared[0].changes), compared[0].answer
            demand = asked(question)
        answer = recommended(demand, progress, found, near, parallel=parallel)
        return cls(question, answer, tuple(formats), tuple(compared), compare_with)

    @cached_property
    def advice(self) -> ComparedAdvice | None:
        """What the other recommender says; None where none is asked. Raises: InputError: It cannot answer."""
        return ComparedAdvice.of(self.answer.demand) if self.compare_with else None

    @property
    def feasible(self) -> bool:
        """Whether anything can be run within the limits, and carries the load that is asked for."""
        answer = self.answer
        if answer.winner == "aggregated" and answer.demand.under_traffic:
            return answer.options[0].load is not None
        return answer.winner is not None

    @property
    def winner(self) -> FormName | None:
        """The form of deployment that serves most: "aggregated" or "disaggregated"; None where nothing is feasible."""
        return self.answer.winner

    @property
    def best(self) -> Evaluation | None:
        """One replica of the best aggregated deployment; None where none is feasible."""
        return self.answer.options[0].evaluation if self.answer.options else None

    @property
    def strategy(self) -> Strategy | None:
        """Of the best aggregated deployment; None where none is feasible."""
        return self.best.strategy if self.best else None

    def to_dict(self) -> JsonObject:
        """The answer as `raysearch recommend --json` prints it."""
        found = recommendation_dict(self.answer)
        more: JsonObject = {"formats": [each.to_dict() for each in self.formats]} if self.formats else {}
        if self.forms:
            more["serving_forms"] = [each.to_dict(self.answer.demand.gpus) for each in self.forms]
        if self.advice:
            more["compare_with"] = self.advice.to_dict()
        return found | more

    def to_rows(self) -> list[JsonObject]:
        """A row per aggregated deployment, the best first."""
        workload = self.answer.demand.workload
        return [
            {
                **option_figures(workload, option.evaluation),
                **asdict(option.fleet),
                "limit": option.limit,
                "reason": option.reason,
            }
            for option in self.answer.options
        ]

    def blocks(self) -> Iterator[RenderableType]:
        """What `raysearch recommend` prints."""
        from raysearch.deploy.recommend.recommendation_text import best_blocks

        if self.answer.winner:
            yield from best_blocks(self.answer)
        yield from self.rest()

    def rest(self) -> Iterator[RenderableType]:
        """What follows the best deployments."""
        from raysearch.deploy.recommend.recommendation_text import rest_blocks

        yield from rest_blocks(self.answer)
        if any(each.tokens_per_s for each in self.forms):
            yield forms_table(self.forms, self.answer.demand.gpus)
        elif more := untried(self.answer.demand):
            yield more
        if self.formats:
            yield formats_table(self.formats)
        if self.advice:
            yield str(self.advice)

    def figure(self) -> Figure:
        """The front between tokens/s per GPU and per user."""
        from raysearch.deploy.recommend.front_plot import front_figure

        return front_figure(self.answer)

    def write(self, folder: str | Path) -> None:
        """Writes recommendation.json, the front and each option's command, for `raysearch export`."""
        from raysearch.processes.claim import check_folder

        check_folder(Path(folder), "recommendation.json")
        write_recommendation(self.answer, Path(folder))
