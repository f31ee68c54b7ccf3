"""What each other way to serve would give: expert exchange, redundant experts, overlapped halves, drafts."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from rich.table import Table

from raysearch.base.rich_tables import plain_table
from raysearch.deploy.recommend.demand import Demand
from raysearch.deploy.recommend.fleet import Searched, best_first, fleet_of
from raysearch.deploy.recommend.pool_pairs import FAR, ahead_by, best_disaggregated, paired
from raysearch.deploy.recommend.recommendation import Option, Recommendation, best_alone
from raysearch.processes.second_process import begun_beside
from sim.config.question import Question
from sim.engines.engine_registry import charged_rules
from sim.evaluation import Evaluation
from sim.json_object import JsonObject
from sim.pools.matching import Matched
from sim.serving.phases import phase_of
from sim.simulate import evaluate
from sim.workload import Workload

FormsCompared = Literal["all", "eagle3", "usual"]
"""Whether others are looked at than the one that an engine starts in, and EAGLE-3 heads of models that do not draft."""
_NOT_TRIED = "Not tried: draft models, as no public runs state their acceptance; --set draft= prices them"
Changes = Mapping[str, Any]
"""Fields of a question."""
_SPARE_SHARE = 8
"""One spare copy for so many experts. [published] 32 beside 256: DeepSeek-V3's report (arXiv 2412.19437), 3.4.1."""
_NOTABLE = 1.01
"""What a form must gain to be worth its options. [assumed]"""
_USUAL = "as engines start"
_DEEPEP = "DeepEP"
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
        """Of all GPUs at hand; of those that requests at once take."""
        return self.answer.tokens_per_s

    @property
    def rank(self) -> tuple[float, float]:
        """What it goes by, the best highest: for requests at once how few GPUs it takes, then tokens/s."""
        return (0.0 if self.answer.demand.concurrency is None else -self.answer.gpus), self.tokens_per_s

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
            **({} if self.answer.demand.concurrency is None else {"gpus": self.answer.gpus}),
            "tokens_per_s_per_gpu_at_hand": self.tokens_per_s / gpus,
            "acceptance_interval": [self.tokens_per_s / gpus * (1 + sign * self.share) for sign in (-1, 1)],
            "form": self.answer.winner,
            "strategy": self.answer.strategy_text,
        }


def compares_forms(demand: Demand, forms: FormsCompared = "all") -> bool:
    """Whether other forms are worth a look, and its engine computes prompts and answers.

    They are of checkpoints with multi-token prediction and, where asked for, of those with a public EAGLE-3 head.
    """
    workload = demand.workload
    drafts = bool(workload.model.mtp_layers) or (forms == "eagle3" and has_head(workload))
    charged = charged_rules(workload) is not None
    return forms != "usual" and drafts and charged and phase_of(workload).mixes


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
    question: Question,
    asked: Callable[[Question], Demand],
    progress: Callable[[str], None],
    searched: Searched,
    *,
    parallel: bool = False,
) -> list[ServingForm]:
    """Every form that the question leaves open: those of experts, then drafts with the best of them.

    A load is carried by the fewest GPUs in the form in which each serves most. For requests at once each form is asked
    for its fewest GPUs.

    The first is what to run: the one that serves most, or as the engine starts where that is 1 % at most. Forms of
    experts whose best strategy is without expert parallelism are left out.

    Args:
        question: What it names stays as it is.
        asked: What is asked of a question.
        progress: Called with what is being computed.
        searched: Of the question as it is; what is computed is added.
        parallel: Whether what needs no other form's answer may be computed in processes beside this one.
    """

    def demanded(changes: Changes) -> Demand:
        demand = asked(replace(question, **changes))
        return (demand if demand.concurrency is not None else demand.unloaded).over_few_batches

    progress(f"forms: {_USUAL}")
    usual = best_alone(demanded({}), searched)
    found, workload = [_form(_USUAL, {}, usual)], usual.demand.workload

    def begin(changes: Changes, *, beside: bool = False) -> Callable[[], Recommendation]:
        demand = demanded(changes).under(chunk_tokens=workload.chunk_tokens)
        return _begun_form(demand, usual, parallel=parallel and beside)

    drafts, exchanges = _drafts(question, workload), _exchanges(question, workload)
    begun = {name: begin(changes, beside=True) for name, changes in (*exchanges, *drafts[:1])}

    def tried(name: str, changes: Changes) -> ServingForm:
        progress(f"forms: {name}")
        found.append(_form(name, changes, (begun.get(name) or begin(changes))()))
        return found[-1]

    for spare in _spare_copies(question, workload, found):
        tried(*spare)
    best_spare = max(found[1:], key=lambda each: each.rank, default=None)
    for name, changes in exchanges:
        tried(name, changes)
        if best_spare and name == _DEEPEP:
            tried(f"{name}, {best_spare.name}", {**changes, **best_spare.changes})
    before = ahead = _worth_its_options([each for each in found if each.in_use])
    for name, changes in drafts:
        drafted = tried(f"{before.name}, {name}" if before.changes else name, {**before.changes, **changes})
        if drafted.rank <= ahead.rank:
            break  # those that follow hold less often
        ahead = drafted
    found = [each for each in found if each.in_use]
    first = _worth_its_options(found)
    return [first, *sorted((each for each in found if each is not first), key=lambda each: each.rank, reverse=True)]


def _begun_form(demand: Demand, usual: Recommendation, *, parallel: bool) -> Callable[[], Recommendation]:
    """Begins to answer a demand of another form than the engine starts in, and returns what waits for the answer.

    Where one of pools and replicas is far ahead in the usual form, the other is not looked for; replicas that are
    behind are those of the usual form.
    """
    searched = Searched()

    def bests() -> tuple[Matched | None, tuple[Evaluation, ...]]:
        lead, begin = _lead_of_pools(usual), usual.pair.strategies if usual.pair else ()
        behind = 1 if demand.concurrency is not None else FAR
        pair = best_disaggregated(demand, begin, searched) if demand.chooses_form and lead * behind >= 1 else None
        alike = tuple(evaluate(demand.workload, each.evaluation.strategy) for each in usual.options)
        if demand.only == "disaggregated" or (lead > FAR and demand.concurrency is None):
            return pair and pair.matched, tuple(each for each in alike if each.feasible)
        return pair and pair.matched, best_first(demand, 1, searched.of(demand.workload), alike)

    found = begun_beside(bests, parallel=parallel)

    def answer() -> Recommendation:
        matched, best = found()
        options = tuple(Option(each, fleet_of(demand, each), "", "") for each in best)
        pair = matched and paired(demand, matched)
        return Recommendation(demand, options, None, {}, (), (), None, pair, searched=searched)

    return answer


def _lead_of_pools(answer: Recommendation) -> float:
    """Times what replicas serve that pools do, or for requests at once as few GPUs as they take."""
    if answer.pair is None:
        return 0.0
    return 1 + ahead_by(answer.pair, answer.options[0].fleet) if answer.options else math.inf


def _worth_its_options(forms: Sequence[ServingForm]) -> ServingForm:
    """The best, or the first if none serves notably more, or as many requests on fewer GPUs."""
    best, first = max(forms, key=lambda each: each.rank), forms[0]
    fewer = best.rank[0] > first.rank[0]
    return best if fewer or best.tokens_per_s > _NOTABLE * first.tokens_per_s else first


def _spare_copies(
    question: Question, workload: Workload, found: Sequence[ServingForm]
) -> Iterator[tuple[str, Changes]]:
    """Numbers of redundant experts, where the question leaves that open; the last found is the last."""
    model = workload.model
    if not model.is_moe or question.redundant_experts is not None:
        return
    most = max(1, model.experts // _SPARE_SHARE)
    yield _eplb(most), {"redundant_experts": most}
    # Every copy is read: where each GPU has several, one does nearly as much for the balance.
    if 1 < (ranks := max(each.expert_ranks for each in found)) < most:
        yield _eplb(ranks), {"redundant_experts": ranks}


def _exchanges(question: Question, workload: Workload) -> list[tuple[str, Changes]]:
    """Other ways to send tokens to experts than the engine starts in, where the question leaves that open."""
    rules = charged_rules(workload)
    if not workload.model.is_moe or rules is None or not rules.overlaps_batches or question.expert_exchange is not None:
        return []
    sent: Changes = {"expert_exchange": "all_to_all"}
    overlapped = {**sent, "two_batch_overlap": True}
    both = [(_DEEPEP, sent), (f"{_DEEPEP}, two batches overlapped", overlapped)]
    return both if question.two_batch_overlap is None else both[:1]


def _drafts(question: Question, workload: Workload) -> list[tuple[str, Changes]]:
    """Numbers of drafts, the fewest first, where the question leaves that open."""
    if question.draft_tokens is not None:
        return []
    by = "EAGLE-3" if has_head(workload) else "multi-token prediction"
    return [(f"{n} draft{'s' if n > 1 else ''} of {by}", {"draft_tokens": n}) for n in range(1, _MOST_DRAFTS + 1)]


def _eplb(copies: int) -> str:
    return f"EPLB with {copies} copies"


def _form(name: str, changes: Changes, answer: Recommendation) -> ServingForm:
    speculation = answer.demand.workload.speculation
    return ServingForm(name, changes, answer, speculation.spread if speculation else 0.0)


def forms_table(forms: Sequence[ServingForm], gpus: int) -> Table:
    """All of them beside each other, on so many GPUs at hand; for requests at once on those that each takes."""
    first = forms[0]
    at_once = first.answer.demand.concurrency is not None
    rows = []
    for each in forms:
        taken = each.answer.gpus if at_once else gpus
        per_gpu = f"{each.tokens_per_s / taken:,.1f}" + (f" ±{each.share:.0%}" if each.share else "")
        gain = f"{each.tokens_per_s / first.tokens_per_s - 1:+.1%}" if first.tokens_per_s else "-"
        rows.append((each.name, *([str(taken)] if at_once else []), per_gpu, gain, each.answer.strategy_text))
    columns = ("GPUs", "tok/s/GPU") if at_once else ("tok/s/GPU at hand",)
    title = f"Forms{'' if at_once else ', over few batches'} (± for what drafts hold)"
    gained = "tokens/s" if at_once else "gain"
    table = plain_table(
        title, ("form", *columns, gained, "strategy"), rows, left=5 if at_once else 4, wrap=("form", "strategy")
    )
    table.caption, table.caption_justify = _NOT_TRIED, "left"
    return table
