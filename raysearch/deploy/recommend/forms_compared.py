"""What each other way to serve would give: exchange of experts, spare copies of them, overlapped halves, drafts."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from rich.table import Table

from raysearch.base.rich_tables import plain_table
from raysearch.deploy.recommend.demand import Demand
from raysearch.deploy.recommend.fleet import Searched, best_first, fleet_of
from raysearch.deploy.recommend.pool_pairs import FAR, best_disaggregated
from raysearch.deploy.recommend.recommendation import Option, Recommendation, best_alone
from sim.config.question import Question
from sim.engines.engine_registry import charged_rules
from sim.json_object import JsonObject
from sim.serving.phases import phase_of
from sim.simulate import evaluate
from sim.workload import Workload

FormsCompared = Literal["all", "eagle3", "usual"]
"""Whether others are looked at than the one that an engine starts in, and EAGLE-3 heads of models that do not draft."""
_NOT_TRIED = "Not tried: draft models, as no public runs tell what they hold; --set draft= prices them"
Changes = Mapping[str, Any]
"""Fields of a question."""
_SPARE_SHARE = 8
"""One spare copy for so many experts. [published] 32 beside 256: DeepSeek-V3's report (arXiv 2412.19437), 3.4.1."""
_NOTABLE = 1.01
"""What a form must gain to be worth its options. [assumed]"""
_OF_EXPERTS = {"redundant_experts", "expert_exchange", "two_batch_overlap"}
"""What means nothing where each GPU has a part of every expert."""
_MOST_DRAFTS = 3
"""Tokens whose acceptance was measured; see `sim.serving.acceptance`."""


@dataclass(frozen=True)
class ServingForm:
    """A way to serve.

    Attributes:
        name: In the field's words.
        changes: What it changes of the question.
        answer: The best strategies of a coarse search: over few batches.
        share: By which tokens/s may differ in 90 % of cases for what drafts may hold; 0 without drafts.
    """

    name: str
    changes: Changes
    answer: Recommendation
    share: float = 0.0

    @property
    def tokens_per_s(self) -> float:
        """Of all GPUs at hand."""
        return self.answer.tokens_per_s

    @property
    def expert_ranks(self) -> int:
        """GPUs that share the experts of a layer, in the decode pool where there are two; 1 where nothing fits."""
        answer = self.answer
        if answer.pair and answer.winner == "disaggregated":
            return answer.pair.matched.decode.evaluation.strategy.ep
        return answer.options[0].evaluation.strategy.ep if answer.options else 1

    @property
    def in_use(self) -> bool:
        """Whether the best strategy has what the form changes: without expert parallelism there is no exchange."""
        if not self.changes.keys() & _OF_EXPERTS:
            return True
        answer = self.answer
        pools = answer.pair.strategies if answer.pair and answer.winner == "disaggregated" else ()
        found = pools or [each.evaluation.strategy for each in answer.options[:1]]
        return any(each.ep > 1 for each in found)

    def to_dict(self, gpus: int) -> JsonObject:
        """As JSON has it, of so many GPUs at hand."""
        return {
            "name": self.name,
            "changes": dict(self.changes),
            "tokens_per_s_per_gpu_at_hand": self.tokens_per_s / gpus,
            "acceptance_interval": [self.tokens_per_s / gpus * (1 + sign * self.share) for sign in (-1, 1)],
            "form": self.answer.winner,
            "strategy": self.answer.strategy_text,
        }


def compares_forms(demand: Demand, forms: FormsCompared = "all") -> bool:
    """Whether other forms are worth a look, its engine computes prompts and answers, and no number is in flight.

    They are of checkpoints that draft for themselves and, where that is asked for, of those with a public EAGLE-3 head.
    """
    workload = demand.workload
    drafts = bool(workload.model.mtp_layers) or (forms == "eagle3" and has_head(workload))
    charged = charged_rules(workload) is not None
    return forms != "usual" and drafts and charged and phase_of(workload).mixes and demand.concurrency is None


def has_head(workload: Workload) -> bool:
    """Whether a public EAGLE-3 head drafts for a model that has no layers for it."""
    return not workload.model.mtp_layers and workload.model.published.eagle3_repository is not None


def untried(demand: Demand) -> str:
    """What a wider comparison would look at; "" for nothing."""
    workload, head = demand.workload, demand.workload.model.published.eagle3_repository
    if workload.speculation is not None or not compares_forms(demand, "eagle3") or compares_forms(demand):
        return ""
    return f"Not tried: drafts of the EAGLE-3 head {head}; --set forms=eagle3 compares them"


def compared_forms(
    question: Question, asked: Callable[[Question], Demand], progress: Callable[[str], None], searched: Searched
) -> list[ServingForm]:
    """Every form that the question leaves open: those of experts, then drafts with the best of them.

    A load is carried by the fewest GPUs in the form in which each serves most.

    The first is what to run: the one that serves most, or as the engine starts where that is 1 % at most. Forms of
    experts whose best strategy is without expert parallelism are left out.

    Args:
        question: What it names stays as it is.
        asked: What is asked of a question.
        progress: Called with what is being worked out.
        searched: Of the question as it is; what is worked out is added.
    """
    usual = asked(question).unloaded
    progress("forms: as engines start")
    coarse = best_alone(usual.over_few_batches, searched)
    found = [_form("as engines start", {}, coarse)]
    replicas = coarse.options[0].fleet.tokens_per_s if coarse.options else 0.0
    pools = coarse.pair.tokens_per_s if coarse.pair else 0.0

    def tried(name: str, changes: Changes) -> ServingForm:
        progress(f"forms: {name}")
        demand = asked(replace(question, **changes)).unloaded
        few = demand.over_few_batches.under(chunk_tokens=coarse.demand.workload.chunk_tokens)
        begin, own = next((each.answer.pair.strategies for each in found[::-1] if each.answer.pair), ()), Searched()
        pair = best_disaggregated(few, begin, own.pools) if few.chooses_form and pools * FAR >= replicas else None
        alike = [evaluate(few.workload, each.evaluation.strategy) for each in coarse.options]
        apart = pools > replicas * FAR or demand.only == "disaggregated"
        bests = [each for each in alike if each.feasible] if apart else best_first(few, 1, own.of(few.workload), alike)
        options = [Option(each, fleet_of(few, each), "", "") for each in bests]
        return _form(name, changes, Recommendation(few, tuple(options), None, {}, (), (), None, pair, searched=own))

    for name, changes in _of_experts(question, usual.workload, found):
        found.append(tried(name, changes))
    before = ahead = _worth_its_options([each for each in found if each.in_use])
    by = "EAGLE-3" if has_head(usual.workload) else "multi-token prediction"
    for drafts in range(1, _MOST_DRAFTS + 1) if question.draft_tokens is None else ():
        tokens = f"{drafts} draft{'s' if drafts > 1 else ''} of {by}"
        name = tokens if not before.changes else f"{before.name}, {tokens}"
        found.append(tried(name, {**before.changes, "draft_tokens": drafts}))
        if found[-1].tokens_per_s <= ahead.tokens_per_s:
            break  # those that follow hold less often
        ahead = found[-1]
    found = [each for each in found if each.in_use]
    first = _worth_its_options(found)
    return [first, *sorted((each for each in found if each is not first), key=lambda each: -each.tokens_per_s)]


def _worth_its_options(forms: Sequence[ServingForm]) -> ServingForm:
    """The best, or the first if none serves notably more."""
    best = max(forms, key=lambda each: each.tokens_per_s)
    return best if best.tokens_per_s > _NOTABLE * forms[0].tokens_per_s else forms[0]


def _of_experts(question: Question, workload: Workload, found: Sequence[ServingForm]) -> Iterator[tuple[str, Changes]]:
    """What may be changed of how experts are reached, of what the question leaves open; the last found is the last."""
    rules, model = charged_rules(workload), workload.model
    if not model.is_moe:
        return
    spare: Changes = {}
    if question.redundant_experts is None:
        most = max(1, model.experts // _SPARE_SHARE)
        yield _eplb(most), {"redundant_experts": most}
        # Every copy is read: where each GPU has several, one does nearly as much for the balance.
        if 1 < (ranks := max(each.expert_ranks for each in found)) < most:
            yield _eplb(ranks), {"redundant_experts": ranks}
        spare = max(found[1:], key=lambda each: each.tokens_per_s).changes
    if rules is None or not rules.overlaps_batches or question.expert_exchange is not None:
        return
    sent: Changes = {"expert_exchange": "all_to_all"}
    yield "DeepEP", sent
    if spare:
        yield f"DeepEP, {_eplb(spare['redundant_experts'])}", {**sent, **spare}
    if question.two_batch_overlap is None:
        yield "DeepEP, two batches overlapped", {**sent, "two_batch_overlap": True}


def _eplb(copies: int) -> str:
    return f"EPLB with {copies} copies"


def _form(name: str, changes: Changes, answer: Recommendation) -> ServingForm:
    speculation = answer.demand.workload.speculation
    return ServingForm(name, changes, answer, speculation.spread if speculation else 0.0)


def forms_table(forms: Sequence[ServingForm], gpus: int) -> Table:
    """All of them beside each other, on so many GPUs at hand."""
    best = forms[0].tokens_per_s
    rows = [
        (
            each.name,
            f"{each.tokens_per_s / gpus:,.1f}" + (f" ±{each.share:.0%}" if each.share else ""),
            f"{each.tokens_per_s / best - 1:+.1%}" if best else "-",
            each.answer.strategy_text,
        )
        for each in forms
    ]
    columns = ("form", "tok/s/GPU at hand", "gain", "strategy")
    title = "Forms, over few batches (± for what drafts hold)"
    table = plain_table(title, columns, rows, left=4, wrap=("form", "strategy"))
    table.caption, table.caption_justify = _NOT_TRIED, "left"
    return table
