"""The answer to a demand: the deployment, alternatives, the limiting factor, and what the engine's limits cost."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from raysearch.base.file_io import degrees_text
from raysearch.deploy.recommend.alternatives import alternatives, reason
from raysearch.deploy.recommend.demand import Demand, FormName
from raysearch.deploy.recommend.fleet import Replicas, Searched, best_first, better, fleet_of, gain, largest_batch
from raysearch.deploy.recommend.limiting_factor import NearestMiss, binding_limit, nearest_miss
from raysearch.deploy.recommend.load_replay import LoadReplay, with_report
from raysearch.deploy.recommend.load_search import LoadProof, carrying
from raysearch.deploy.recommend.pool_pairs import FAR, Disaggregated, ahead_by, best_disaggregated, paired, pools_text
from raysearch.deploy.recommend.variations import FrontPoint, Variation, front, variations
from raysearch.processes.second_process import begun_beside
from sim.evaluation import Evaluation
from sim.optimum.exact_search import Known
from sim.simulate import evaluate


@dataclass(frozen=True)
class Option:
    """A strategy to run.

    Attributes:
        evaluation: Of one replica.
        fleet: Its replicas.
        limit: What keeps it from a larger batch.
        reason: Why it is worth a look beside the best; of the best, what it is best in.
        load: Its replicas where requests come at random; None where no load is asked for, or it
            takes more GPUs than are at hand or than another option does.
    """

    evaluation: Evaluation
    fleet: Replicas
    limit: str
    reason: str
    load: LoadReplay | None = None


@dataclass(frozen=True)
class Beside:
    """What another space has.

    Attributes:
        evaluation: Of its exact best.
        reached: Share of that one's tokens/s, all GPUs at hand filled, that the engine's best reaches.
    """

    evaluation: Evaluation
    reached: float


@dataclass(frozen=True)
class Recommendation:
    """What to run.

    Attributes:
        demand: What was asked.
        options: The best first; none where nothing is feasible.
        even: The best at even odds, where the confidence asks for more; None where nothing is feasible then.
        beside: The paper's and the extended space as predicted, by name; None where nothing is feasible.
        variations: The best if something were different.
        front: From most throughput to most speed.
        miss: Where nothing is feasible.
        pair: The best separate prefill and decode pools; None where none keeps the limits, or they are not
            asked for.
        proof: What is known of the fewest GPUs where requests come at random; None otherwise.
        searched: What the searches have computed.
    """

    demand: Demand
    options: tuple[Option, ...]
    even: Evaluation | None
    beside: Mapping[str, Beside | None]
    variations: tuple[Variation, ...]
    front: tuple[FrontPoint, ...]
    miss: NearestMiss | None
    pair: Disaggregated | None = None
    proof: LoadProof | None = None
    searched: Searched = field(default_factory=Searched)

    @property
    def winner(self) -> FormName | None:
        """The form of deployment that serves most, the simpler of equal ones; None where nothing is feasible."""
        if self.pair and (not self._carried or ahead_by(self.pair, self.options[0].fleet) > 0):
            return "disaggregated"
        return "aggregated" if self.options else None

    @property
    def tokens_per_s(self) -> float:
        """Of the form that serves most, on the GPUs at hand, or that has requests at once on the fewest; 0 for none."""
        if self.pair and self.demand.concurrency is not None and self.winner == "disaggregated":
            return self.pair.tokens_per_s
        if self.options and self.demand.concurrency is not None:
            return self.options[0].fleet.tokens_per_s
        return max(
            [0.0, *(each.fleet.tokens_per_s for each in self.options), *([self.pair.tokens_per_s] if self.pair else [])]
        )

    @property
    def gpus(self) -> float:
        """That what would be run takes; infinite where nothing is feasible."""
        if self.pair and self.winner == "disaggregated":
            return self.pair.matched.gpus
        return self.options[0].fleet.gpus if self.options else math.inf

    @property
    def strategy_text(self) -> str:
        """What would be run."""
        if self.pair and self.winner == "disaggregated":
            return pools_text(self.pair.matched)
        return degrees_text(self.options[0].evaluation.strategy) if self.options else "nothing fits"

    @property
    def _carried(self) -> bool:
        """Whether any aggregated deployment is feasible, and carries the load if there is one."""
        return bool(self.options) and not (self.demand.under_traffic and self.options[0].load is None)

    @property
    def ranked(self) -> tuple[Option | Disaggregated, ...]:
        """What may be run, the best first; `raysearch export --alternative` counts from it."""
        if self.pair and self.winner == "disaggregated":
            return (self.pair, *self.options)
        return self.options


def recommended(
    demand: Demand,
    progress: Callable[[str], None] = lambda _: None,
    found: Callable[[Recommendation], None] = lambda _: None,
    near: Recommendation | None = None,
    *,
    parallel: bool = False,
) -> Recommendation:
    """Answers a demand exactly: every strategy of the engine's space and every batch are accounted for.

    Where pools serve over `FAR` times as much, the chunk of replicas is found over few batches, and other spaces are
    not compared with the replicas.

    Args:
        demand: What is asked.
        progress: Called with what is being computed.
        found: Given the best as soon as it is known, before what stands beside it is computed; not called where
            nothing is feasible.
        near: Of the same demand over few batches: its strategies are tried first.
        parallel: Whether parts that do not need each other may be computed in processes beside this one.
    """
    progress("the engine's best")
    searched, begin = near.searched if near else Searched(), near.pair.strategies if near and near.pair else ()

    def pools(asked: Demand) -> Disaggregated | None:
        return best_disaggregated(asked, begin, searched) if asked.chooses_form else None

    chunks = demand.in_chunks
    if begin and not (demand.only or demand.under_traffic):
        matched = begun_beside(lambda asked=demand: (each := pools(asked)) and each.matched, parallel=parallel)
        demand, known = _with_best_chunk(demand, searched, near, near and near.pair)
        pair = (each := matched()) and paired(demand, each)
    else:
        pair = pools(demand)
        if pair and demand.only:
            alone = Recommendation(demand, (), None, {}, (), (), None, pair)
            found(alone)
            return alone
        demand, known = _with_best_chunk(demand, searched, near, pair)
    even = next(iter(best_first(demand.at_even_odds, 1, known)), None) if demand.guarded else None
    bests = best_first(demand.ranked, 1, known)
    if not bests or demand.only == "disaggregated":
        if not pair:
            progress("the nearest miss")
        miss = None if pair else nearest_miss(demand, known)
        return Recommendation(demand, (), even, {}, (), (), miss, pair)
    best = bests[0]

    def option(each: Evaluation) -> Option:
        return Option(each, fleet_of(demand, each), binding_limit(demand, each), reason(demand, each, best))

    options, proof = [option(best)], None
    if not demand.under_traffic:
        found(Recommendation(demand, tuple(options), even, {}, (), (), None, pair))
    progress("what else to run")
    steady = not demand.under_traffic  # else the demand and what is best in it are those of the replay below
    varied = begun_beside(lambda: tuple(variations(demand, best, known)), parallel=parallel and steady)
    points = begun_beside(lambda: tuple(front(demand, known)), parallel=parallel and steady)
    options += map(option, alternatives(demand.ranked, best, known))
    if demand.under_traffic:
        progress("the load, replayed")
        others = [each for each in chunks if each.workload.chunk_tokens != demand.workload.chunk_tokens]
        demand, options, proof = _under_load(demand, options, others)
        known = searched.of(demand.workload)
        best = options[0].evaluation
        found(Recommendation(demand, tuple(options[:1]), even, {}, (), (), None, pair, proof))
    settled = pair and steady and demand.concurrency is None and ahead_by(pair, options[0].fleet) > FAR - 1
    beside = {} if settled else _beside(demand, best, known, progress)
    progress("what if")
    several = tuple(options), even, beside, varied()
    progress("the front")
    return Recommendation(demand, *several, points(), None, pair, proof)


def _beside(
    demand: Demand, best: Evaluation, known: Known, progress: Callable[[str], None]
) -> dict[str, Beside | None]:
    """What other spaces have as predicted, all GPUs filled: whole replicas would hide what limits cost."""
    fill = demand.unloaded.at_even_odds
    fastest = best_first(fill, 1, known)[0]
    beside: dict[str, Beside | None] = {}
    others = [best, fastest]
    for name in ("paper", "extended"):
        progress(f"the best of the {name} space")
        if other := _best_beside(fill, name, others):
            others.append(other)
        beside[name] = Beside(other, 1 / (1 + gain(fill, other, fastest))) if other else None
    return beside


def best_alone(demand: Demand, searched: Searched | None = None) -> Recommendation:
    """The best of each form under a demand without a load, and nothing beside it.

    Args:
        demand: What is asked.
        searched: Of the same demand with other limits or batches; what is computed is added.
    """
    searched = searched or Searched()
    pair = best_disaggregated(demand, searched=searched) if demand.chooses_form else None
    demand, known = _with_best_chunk(demand, searched, pair=pair)
    bests = [] if demand.only == "disaggregated" else best_first(demand, 1, known)
    options = (Option(each, fleet_of(demand, each), binding_limit(demand, each), "") for each in bests)
    return Recommendation(demand, tuple(options), None, {}, (), (), None, pair, searched=searched)


def begun(demand: Demand, searched: Searched) -> Recommendation:
    """The best of each form that is soon found: over few batches, prompts whole or in the chunks that are asked for.

    Args:
        demand: What is asked; requests that come at random are served in the steady state.
        searched: What is computed is added.
    """
    few = demand.over_few_batches
    pair = None
    if few.chooses_form and not few.under_traffic:
        pair = best_disaggregated(few, searched=searched)
    bests = [] if few.only == "disaggregated" else best_first(few, 1, searched.of(few.workload))
    options = (Option(each, fleet_of(few, each), "", "") for each in bests)
    return Recommendation(few, tuple(options), None, {}, (), (), None, pair, searched=searched)


def _with_best_chunk(
    demand: Demand, searched: Searched, near: Recommendation | None = None, pair: Disaggregated | None = None
) -> tuple[Demand, Known]:
    """The demand with prompts whole or in the chunks with which the best strategy serves most, and what was found out.

    A chunk that is given stays. Good strategies are found over few batches first, so that fewer are looked into. Where
    requests come at random replays choose the chunk, and the first is taken in which anything keeps the limits.

    Args:
        demand: What is asked.
        searched: What is computed is added.
        near: As of `recommended`: its chunk and strategies are tried first.
        pair: The best pools; where they are far ahead, the chunk is the best over few batches.
    """
    workload, known = demand.workload, searched.of(demand.workload)
    chunks: dict[int | None, tuple[Demand, Known]] = {
        each.workload.chunk_tokens: (each, searched.of(each.workload)) for each in demand.in_chunks
    }
    if len(chunks) == 1:
        return demand, known
    if demand.under_traffic:
        feasible = (found for found in chunks.values() if best_first(found[0].ranked, 1, found[1]))
        return next(feasible, (demand, known))
    first, begin = next(iter(chunks)), ()
    if near and near.options:
        first = near.demand.workload.chunk_tokens
        begin = tuple(evaluate(chunks[first][0].workload, each.evaluation.strategy) for each in near.options)
    else:
        for chunk, (each, own) in chunks.items():
            found = best_first(each.over_few_batches, 1, own, begin)
            if found and (not begin or better(demand, found[0], begin[0])):
                first, begin = chunk, found
    among = [larger for each in begin if (larger := largest_batch(chunks[first][0], each))]
    if pair and begin and ahead_by(pair, fleet_of(chunks[first][0], begin[0])) > FAR - 1:
        chunks = {first: chunks[first]}
    if begin and not near and demand.over_few_batches == demand:
        return chunks[first]  # each chunk was looked into already
    best: tuple[Evaluation, ...] = ()
    for each, own in [chunks[first], *(chunks[chunk] for chunk in chunks if chunk != first)]:
        found = best_first(each, 1, own, best or among)
        if not best or (found and better(demand, found[0], best[0])):
            best, workload, known = found or best, each.workload if found else workload, own if found else known
    return replace(demand, workload=workload), known


def _under_load(
    demand: Demand, options: Sequence[Option], others: Sequence[Demand]
) -> tuple[Demand, list[Option], LoadProof]:
    """The options with the replicas that the load takes, the fewest GPUs first; then those that take more or fail.

    Whatever else holds on fewer GPUs is among them, or in other chunks instead of them.
    """
    demand, tried, proof = carrying(demand, [each.evaluation for each in options], others)
    replayed = [_replayed_option(demand, evaluation, load) for evaluation, load in tried]
    replayed.sort(key=lambda option: option.fleet.gpus if option.load else math.inf)
    if best := replayed[0].load:
        replayed[0] = replace(replayed[0], load=with_report(demand, replayed[0].evaluation, best))
    return demand, replayed, proof


def _replayed_option(demand: Demand, evaluation: Evaluation, load: LoadReplay | None) -> Option:
    """An option with the replicas on which the limits hold, if on any."""
    gpus, limit = evaluation.gpus, binding_limit(demand, evaluation)
    if load is None:
        words = f"needs more GPUs {demand.sent.arrivals_text}, or never meets the limits"
        return Option(evaluation, fleet_of(demand, evaluation), limit, words)
    words = (
        f"{load.replicas * gpus} GPUs {demand.sent.arrivals_text}, {load.in_steady_state * gpus} in the steady state"
    )
    return Option(evaluation, fleet_of(demand, evaluation, load.replicas), limit, words, load)


_NEAR = 4
"""Times a batch within which another space's best is looked for. [assumed]"""


def _best_beside(demand: Demand, name: str, others: Sequence[Evaluation]) -> Evaluation | None:
    """The exact best of a space over every batch; of the extended one over the others' batches and powers of two near.

    These lie within `_NEAR` times of them.
    """
    degrees = demand.workload.degrees
    if name == "extended":
        theirs = {other.strategy.batch for other in others}
        near = range(min(theirs) // _NEAR, _NEAR * max(theirs) + 1)
        powers = {1 << power for power in range(13)} & set(degrees.batch) & set(near)
        degrees = replace(degrees, batch=tuple(sorted(powers | theirs)))
    return next(iter(best_first(demand.under(space=name, degrees=degrees), 1, among=others)), None)
