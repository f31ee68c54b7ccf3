"""How replicas fill the GPUs at hand, and how few carry a load."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from raysearch.deploy.recommend.demand import Demand
from raysearch.deploy.recommend.requests_at_once import fewest_gpus
from sim.evaluation import Evaluation
from sim.optimum.exact_search import Known, find_bests
from sim.optimum.spaces import space_of
from sim.pools.best_pair import PairKnown
from sim.serving.phases import phase_of
from sim.simulate import evaluate
from sim.workload import Workload


@dataclass(frozen=True)
class Searched:
    """What searches of one question have computed, whatever limits and batches they had.

    Attributes:
        replicas: By the prompts' chunk.
        pools: Of prefill and decode pools.
    """

    replicas: dict[int | None, Known] = field(default_factory=dict[int | None, Known])
    pools: PairKnown = field(default_factory=lambda: ({}, {}))

    def of(self, workload: Workload) -> Known:
        """Of replicas that serve a workload."""
        return self.replicas.setdefault(workload.chunk_tokens, {})


@dataclass(frozen=True)
class Replicas:
    """Replicas of one strategy.

    Attributes:
        replicas: Copies that share nothing.
        gpus: Of all of them.
        left_over: Of the GPUs at hand, those that run nothing.
        tokens_per_s: Output tokens of all replicas (in phase prefill, prompt tokens).
        requests_per_s: Requests that end each second; None where the output length is not known.
        requests_at_once: In flight over all replicas.
    """

    replicas: int
    gpus: int
    left_over: int
    tokens_per_s: float
    requests_per_s: float | None
    requests_at_once: int


def fleet_of(demand: Demand, evaluation: Evaluation, replicas: int | None = None) -> Replicas:
    """So many replicas, or those that a demand asks for: all that the GPUs hold, or the fewest that carry the load."""
    replicas = replicas or needed_replicas(demand, evaluation)
    gpus = replicas * evaluation.gpus
    tokens_per_s = evaluation.tokens_per_s_per_gpu * gpus
    each = _request_tokens(demand)
    return Replicas(
        replicas,
        gpus,
        demand.gpus - gpus,
        tokens_per_s,
        tokens_per_s / each if each else None,
        replicas * evaluation.running * evaluation.strategy.pp,
    )


def _request_tokens(demand: Demand) -> int:
    """Tokens of a request that throughput counts: of its answer, or of its prompt where there is none."""
    workload = demand.workload
    return phase_of(workload).counted_tokens(workload.prompt_tokens, workload.output_tokens)


def _load_tokens_per_s(demand: Demand) -> float | None:
    """The tokens/s of the load to carry; None where none is asked for, or one of requests at once."""
    if demand.requests_per_s is None:
        return None
    return demand.requests_per_s * max(1, _request_tokens(demand))


def gpus_at_low_end(demand: Demand, evaluation: Evaluation, tokens_per_s_per_gpu: float) -> int | None:
    """GPUs that carry the load where a GPU does only so much, as the low end of an interval; None without a rate."""
    load = _load_tokens_per_s(demand)
    if load is None:
        return None
    return math.ceil(load / (tokens_per_s_per_gpu * evaluation.gpus) * (1 - 1e-12)) * evaluation.gpus


def needed_replicas(demand: Demand, evaluation: Evaluation) -> int:
    """Replicas of a strategy: the fewest for the load, or as many as the GPUs hold."""
    if (tokens_per_s := _load_tokens_per_s(demand)) is not None:
        return math.ceil(tokens_per_s / (evaluation.tokens_per_s_per_gpu * evaluation.gpus) * (1 - 1e-12))
    if demand.concurrency is not None:
        return math.ceil(demand.concurrency / (evaluation.running * evaluation.strategy.pp))
    return demand.gpus // evaluation.gpus


def needed_gpus(demand: Demand, evaluation: Evaluation) -> int:
    """GPUs of all those replicas."""
    return needed_replicas(demand, evaluation) * evaluation.gpus


def gain(demand: Demand, evaluation: Evaluation, over: Evaluation) -> float:
    """What a strategy has over another in what recommendations go by, as a share.

    That is tokens/s of all GPUs at hand; under a load, how few GPUs it takes.
    """
    own, other = (needed_gpus(demand, each) for each in (evaluation, over))
    if demand.loaded:
        return other / own - 1
    return evaluation.tokens_per_s_per_gpu * own / (over.tokens_per_s_per_gpu * other) - 1


def better(demand: Demand, evaluation: Evaluation, over: Evaluation) -> bool:
    """Whether a strategy is to be preferred to another: of those that take as many GPUs for a load the faster one."""
    more = gain(demand, evaluation, over)
    return more > 0 or (more == 0 and evaluation.tokens_per_s_per_gpu > over.tokens_per_s_per_gpu)


@dataclass(frozen=True)
class Stay:
    """How long a request is there, and where that time shows.

    Of others' prompts TPOT counts what measured runs of the engine do (`prefill_share`), throughput all. The rest lies
    before the first token where requests start at once, as in those runs, and between tokens where they do not.

    Attributes:
        request_s: Mean seconds from a request's start to its end: by Little's law those at once over those that end
            each second.
        ttft_at_once_s: Mean seconds to the first token where requests start at once.
        tpot_one_by_one_s: Mean seconds per token after the first where they come one by one.
    """

    request_s: float
    ttft_at_once_s: float
    tpot_one_by_one_s: float


def stay_of(demand: Demand, evaluation: Evaluation, fleet: Replicas) -> Stay | None:
    """How long requests stay; None in a pool beside another, and where answers are one token."""
    tokens = demand.workload.output_tokens - 1
    if not phase_of(demand.workload).mixes or tokens < 1 or not fleet.requests_per_s:
        return None
    request_s = fleet.requests_at_once / fleet.requests_per_s
    first_s, each_s = evaluation.ttft_s, evaluation.tpot_s
    return Stay(request_s, max(first_s, request_s - tokens * each_s), max(each_s, (request_s - first_s) / tokens))


def cost(demand: Demand, fleet: Replicas) -> tuple[float, float] | None:
    """The price an hour, and per million tokens of the load or else of all that they can do; None without a price."""
    if demand.price_per_gpu_hour is None:
        return None
    hourly = demand.price_per_gpu_hour * fleet.gpus
    return hourly, hourly / ((_load_tokens_per_s(demand) or fleet.tokens_per_s) * 3600) * 1e6


_TIE = 1e-6
"""Share by which throughput beyond the load's decides between strategies that take as many GPUs."""


def worth_asked(demand: Demand, evaluation: Evaluation) -> float:
    """What a strategy is worth: see `fleet_worth`; for requests at once the less the more GPUs it takes."""
    if demand.concurrency is not None:
        return 1 / needed_gpus(demand, evaluation)
    return fleet_worth(demand, evaluation.tokens_per_s_per_gpu, evaluation.gpus)


def fleet_worth(demand: Demand, tokens_per_s_per_gpu: float, gpus: int) -> float:
    """What a strategy is worth: tokens/s of the GPUs at hand, or of the GPUs that the load takes, per GPU.

    It never falls with the throughput, so that the exact search can go by it.
    """
    if tokens_per_s_per_gpu <= 0 or gpus > min(demand.gpus, demand.largest_replica):
        return 0.0
    tokens_per_s = _load_tokens_per_s(demand)
    if tokens_per_s is None:
        return tokens_per_s_per_gpu * (demand.gpus // gpus) * gpus / demand.gpus
    taken = gpus * max(1, math.ceil(tokens_per_s / (tokens_per_s_per_gpu * gpus) * (1 - 1e-12)))
    if taken > demand.gpus:
        return 0.0
    return tokens_per_s / taken * (1 - _TIE) + _TIE * min(tokens_per_s_per_gpu, tokens_per_s)


def gpus_worth(demand: Demand, gpus: int) -> float:
    """What a strategy is worth at least that carries a demand's load of requests a second on so many GPUs."""
    return (_load_tokens_per_s(demand) or 0.0) / gpus * (1 - _TIE) if gpus > 0 else math.inf


EVERY = 10**6
"""More than there are degrees."""


def best_first(
    demand: Demand, count: int, known: Known | None = None, among: Sequence[Evaluation] = (), least: float = 0.0
) -> tuple[Evaluation, ...]:
    """The best strategies of different degrees, the best first; those that cannot carry the load are left out.

    For requests at once the best alone: see `raysearch.deploy.recommend.requests_at_once.fewest_gpus`.

    Args:
        demand: What was asked.
        count: How many, at most.
        known: As of `sim.optimum.exact_search.find_best`.
        among: Strategies under the demand. Where one is asked for, what is worth less than the best of them that is
            feasible and in the space is passed by.
        least: A worth below which nothing is looked for.
    """
    if demand.concurrency is None:
        return _by_worth(demand, count, known, among if count == 1 else (), least)
    found = fewest_gpus(demand, {} if known is None else known, 1 / least if least else math.inf)
    return (found,) if found else ()


def _by_worth(
    demand: Demand, count: int, known: Known | None, among: Sequence[Evaluation] = (), least: float = 0.0
) -> tuple[Evaluation, ...]:
    def score(tokens_per_s_per_gpu: float, gpus: int) -> float:
        return fleet_worth(demand, tokens_per_s_per_gpu, gpus)

    space = space_of(demand.workload)
    inside = [each for each in among if each.feasible and not space.outside(each.strategy)]
    reached = max((score(each.tokens_per_s_per_gpu, each.gpus) for each in inside), default=0.0)
    return find_bests(space, count, score, known=known, reached=max(reached, least))


def largest_batch(demand: Demand, evaluation: Evaluation) -> Evaluation | None:
    """The same degrees and choices with the largest batch that keeps the limits; None where the least does not.

    Limits that a batch breaks, larger ones are taken to break, too.
    """
    batches, strategy = space_of(demand.workload).batch, evaluation.strategy
    found = {strategy.batch: evaluation}

    def breaks(batch: int) -> bool:
        if batch not in found:
            found[batch] = evaluate(demand.workload, replace(strategy, batch=batch))
        return not found[batch].feasible

    at = bisect_left(batches, True, key=breaks)
    return found[batches[at - 1]] if at else None
