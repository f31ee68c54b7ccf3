"""What each other way to serve would give: exchange of experts, spare copies of them, overlapped halves, drafts."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from rich.table import Table

from raysearch.base.file_io import degrees_text
from raysearch.base.rich_tables import plain_table
from raysearch.deploy.recommend.demand import Demand, FormName
from raysearch.deploy.recommend.fleet import best_first, fleet_of
from raysearch.deploy.recommend.pool_pairs import Disaggregated, best_disaggregated, pools_text
from raysearch.deploy.recommend.recommendation import Option, best_alone
from sim.config.question import Question
from sim.engines.engine_registry import charged_rules
from sim.json_object import JsonObject
from sim.layers.model import Model
from sim.serving.phases import phase_of
from sim.simulate import evaluate
from sim.workload import Workload, coarse_steps

FormsCompared = Literal["all", "usual"]
"""Whether others are looked at than the one that an engine starts in."""
Changes = Mapping[str, Any]
"""Fields of a question."""
_SPARE_SHARE = 8
"""One spare copy for so many experts. [published] 32 beside 256: DeepSeek-V3's report (arXiv 2412.19437), 3.4.1."""
_NOTABLE, _FAR = 1.01, 1.5
"""What a form must gain to be worth its options, and by which factor replicas or pools are behind that no form makes up
for. [assumed]"""
_MOST_DRAFTS = 3
"""Tokens of multi-token prediction whose acceptance was measured; see `sim.serving.acceptance`."""


@dataclass(frozen=True)
class ServingForm:
    """A way to serve, with the best strategies of a coarse search: over few batches.

    Attributes:
        name: In the field's words.
        changes: What it changes of the question.
        tokens_per_s: Of all GPUs at hand, by the pools or the replicas that serve more; 0 where nothing is feasible.
        winner: Which of these.
        strategy_text: What would be run.
        share: By which tokens/s may differ in 90 % of cases for what drafts may hold; 0 without drafts.
    """

    name: str
    changes: Changes
    tokens_per_s: float
    winner: FormName | None
    strategy_text: str
    share: float = 0.0

    def to_dict(self, gpus: int) -> JsonObject:
        """As JSON has it, of so many GPUs at hand."""
        return {
            "name": self.name,
            "changes": dict(self.changes),
            "tokens_per_s_per_gpu_at_hand": self.tokens_per_s / gpus,
            "acceptance_interval": [self.tokens_per_s / gpus * (1 + sign * self.share) for sign in (-1, 1)],
            "form": self.winner,
            "strategy": self.strategy_text,
        }


def compares_forms(demand: Demand) -> bool:
    """Whether a model's checkpoint drafts for itself and its engine computes prompts and answers, without a load."""
    workload = demand.workload
    drafts = bool(workload.model.mtp_layers) and charged_rules(workload) is not None
    return drafts and phase_of(workload).mixes and not demand.loaded


def compared_forms(
    question: Question, asked: Callable[[Question], Demand], progress: Callable[[str], None]
) -> list[ServingForm]:
    """Every form that the question leaves open: those of experts, then drafts with the best of them.

    The first is what to run: the one that serves most, or as the engine starts where that is 1 % at most.

    Args:
        question: What it names stays as it is.
        asked: What is asked of a question.
        progress: Called with what is being worked out.
    """
    usual = asked(question)
    progress("forms: as engines start")
    coarse = best_alone(_coarse(usual))
    chunk, among = coarse.demand.workload.chunk_tokens, [each.evaluation for each in coarse.options]
    found = [_form("as engines start", {}, usual, coarse.pair, coarse.options)]
    progress(f"so far {found[0].tokens_per_s / usual.gpus:,.1f} tokens/s/GPU: {found[0].strategy_text}")
    replicas = coarse.options[0].fleet.tokens_per_s if coarse.options else 0.0
    pools = coarse.pair.tokens_per_s if coarse.pair else 0.0

    def tried(name: str, changes: Changes) -> ServingForm:
        progress(f"forms: {name}")
        demand = asked(replace(question, **changes))
        coarse = _coarse(demand).under(chunk_tokens=chunk)
        pair = best_disaggregated(coarse) if coarse.chooses_form and pools * _FAR >= replicas else None
        alike = [evaluate(coarse.workload, each.strategy) for each in among]
        bests = best_first(coarse, 1, {}, alike) if replicas * _FAR >= pools and demand.only != "disaggregated" else ()
        return _form(name, changes, demand, pair, [Option(each, fleet_of(coarse, each), "", "") for each in bests])

    for name, changes in _of_experts(question, usual.workload):
        found.append(tried(name, changes))
    before = ahead = _worth_its_options(found)
    for drafts in range(1, _MOST_DRAFTS + 1) if question.draft_tokens is None else ():
        tokens = f"{drafts} draft{'s' if drafts > 1 else ''} of multi-token prediction"
        name = tokens if not before.changes else f"{before.name}, {tokens}"
        found.append(tried(name, {**before.changes, "draft_tokens": drafts}))
        if found[-1].tokens_per_s <= ahead.tokens_per_s:
            break  # those that follow hold less often
        ahead = found[-1]
    first = _worth_its_options(found)
    return [first, *sorted((each for each in found if each is not first), key=lambda each: -each.tokens_per_s)]


def _worth_its_options(forms: Sequence[ServingForm]) -> ServingForm:
    """The best, or the first if none serves notably more."""
    best = max(forms, key=lambda each: each.tokens_per_s)
    return best if best.tokens_per_s > _NOTABLE * forms[0].tokens_per_s else forms[0]


def _of_experts(question: Question, workload: Workload) -> Iterator[tuple[str, Changes]]:
    """What may be changed of how experts are reached, of what the question leaves open."""
    rules, model = charged_rules(workload), workload.model
    spare = {"redundant_experts": _spare(model)}
    opens_copies = model.is_moe and question.redundant_experts is None
    if opens_copies:
        yield f"EPLB with {_spare(model)} copies", spare
    if not model.is_moe or rules is None or not rules.overlaps_batches or question.expert_exchange is not None:
        return
    sent = {"expert_exchange": "all_to_all"}
    yield "DeepEP", sent
    if opens_copies:
        yield f"DeepEP, EPLB with {_spare(model)} copies", sent | spare
    if question.two_batch_overlap is None:
        yield "DeepEP, two batches overlapped", sent | {"two_batch_overlap": True}


def _spare(model: Model) -> int:
    return max(1, model.experts // _SPARE_SHARE)


def _coarse(demand: Demand) -> Demand:
    """The same over batches that are powers of two and half way between them."""
    degrees = demand.workload.degrees
    few = tuple(batch for batch in coarse_steps(4096) if batch in degrees.batch)
    return demand.under(degrees=replace(degrees, batch=few)) if few else demand


def _form(
    name: str, changes: Changes, demand: Demand, pair: Disaggregated | None, options: Sequence[Option]
) -> ServingForm:
    speculation = demand.workload.speculation
    share = speculation.spread if speculation else 0.0
    if pair and (not options or pair.tokens_per_s > options[0].fleet.tokens_per_s):
        return ServingForm(name, changes, pair.tokens_per_s, "disaggregated", pools_text(pair.matched), share)
    if not options:
        return ServingForm(name, changes, 0.0, None, "nothing fits", share)
    best = options[0]
    words = degrees_text(best.evaluation.strategy)
    return ServingForm(name, changes, best.fleet.tokens_per_s, "aggregated", words, share)


def forms_table(forms: Sequence[ServingForm], gpus: int) -> Table:
    """All of them beside each other, on so many GPUs at hand."""
    best = forms[0].tokens_per_s
    rows = [
        (
            each.name,
            f"{each.tokens_per_s / gpus:,.1f}" + (f" ±{each.share:.0%}" if each.share else ""),
            f"{each.tokens_per_s / best - 1:+.1%}" if best else "-",
            each.strategy_text,
        )
        for each in forms
    ]
    columns = ("form", "tok/s/GPU at hand", "gain", "strategy")
    title = "Forms, over few batches (± for what drafts hold)"
    return plain_table(title, columns, rows, left=4, wrap=("form", "strategy"))
