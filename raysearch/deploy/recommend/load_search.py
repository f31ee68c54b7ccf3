"""Branch and bound on the steady state: whether any strategy carries a load that comes at random on fewer GPUs.

The steady state at its best is a bound, that of phase traffic: prompts of all attention groups meet, none stalls a
pipeline, and queues never empty. So once some strategy holds, only those need be replayed whose steady state would
carry the load on fewer GPUs, the cheapest first, each once on as many replicas as fit below what holds so far. More
replicas are taken never to hold less. Prompts are whole at first; each other size of chunks has a steady state of its
own, by which those strategies are replayed that may carry the load in such chunks on fewer GPUs still. A mix or a trace
has unlike lengths, and some prompts of traces are cached: of these the steady state is no bound, and the best
strategies of all degrees are replayed, in other chunks that of the fewest GPUs alone.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from raysearch.deploy.recommend.demand import Demand
from raysearch.deploy.recommend.fleet import EVERY, best_first, fleet_worth, gpus_worth, largest_batch, needed_gpus
from raysearch.deploy.recommend.load_replay import LoadReplay, load_replay
from sim.evaluation import Evaluation
from sim.optimum.exact_search import find_bests
from sim.optimum.spaces import space_of
from sim.serving.phases import TRAFFIC
from sim.simulate import evaluate


@dataclass(frozen=True)
class LoadProof:
    """What is known of the fewest GPUs under a load.

    Attributes:
        open: Strategies that the bound did not exclude.
        replayed: Of these, those that were replayed.
        least_gpus: That the load takes at least: those that were found to hold, unless replays ended before.
        chunks: By the most tokens of a chunk, None for whole prompts, in the order in which they were tried: the GPUs
            on which the load holds; None where it does not on fewer than with those before.
    """

    open: int
    replayed: int
    least_gpus: int
    chunks: Mapping[int | None, int | None] = field(default_factory=dict[int | None, int | None])


Carrying = list[tuple[Evaluation, LoadReplay | None]]
"""Strategies with the replicas that a load takes, each with its largest batch; None where they take more or fail."""


def carrying(
    demand: Demand, listed: Sequence[Evaluation], others: Sequence[Demand] = ()
) -> tuple[Demand, Carrying, LoadProof]:
    """The demand in the chunks in which the load takes the fewest GPUs, strategies that carry it so, and the proof.

    The strategy of the fewest GPUs is among them, unless replays end before, as the proof says.

    Args:
        demand: With a load.
        listed: To be replayed in any case.
        others: The same in other chunks.
    """
    best, tried = demand, _listed(demand, listed, demand.gpus)
    most = min((gpus_of(each, load) for each, load in tried if load), default=demand.gpus + 1)
    passed, among = {degrees_of(each) for each, _ in tried}, None
    proof = LoadProof(0, 0, most)
    for each in (demand, *others):
        if each is not demand:
            passed = set[tuple[int, ...]]()
            if demand.unlike:
                holding = [found.strategy for found, load in tried if load and gpus_of(found, load) == most]
                among = [evaluate(each.workload, strategy) for strategy in holding]
        left = replace(each, replays=demand.replays - proof.replayed)
        found, own = fewer_gpus(left, most, passed, among)
        if found:
            tried, best, most = [*(tried if each is demand else ()), *found], each, gpus_of(*found[-1])
        holds_here = found or (each is demand and most <= demand.gpus)
        proof = LoadProof(
            proof.open + own.open,
            proof.replayed + own.replayed,
            min(most, proof.least_gpus, own.least_gpus),
            {**proof.chunks, each.workload.chunk_tokens: most if holds_here else None},
        )
    if best is not demand:
        shown = {degrees_of(each) for each, _ in tried}
        beside = [evaluate(best.workload, each.strategy) for each in listed if degrees_of(each) not in shown]
        tried += _listed(best, beside, most)
    return best, tried, proof


def _listed(demand: Demand, listed: Sequence[Evaluation], most: int) -> Carrying:
    """Each on at most so many GPUs, and on no more than those before it."""
    tried = Carrying()
    roomy = {found.strategy: found for each in listed for found in (largest_batch(demand, each) or each,)}
    for evaluation in roomy.values():
        load = load_replay(demand, evaluation, most)
        most = gpus_of(evaluation, load) if load else most
        tried.append((evaluation, load))
    return tried


def gpus_of(evaluation: Evaluation, load: LoadReplay) -> int:
    """Of all replicas."""
    return load.replicas * evaluation.gpus


def fewer_gpus(
    demand: Demand, most: int, passed: set[tuple[int, ...]], among: Sequence[Evaluation] | None = None
) -> tuple[list[tuple[Evaluation, LoadReplay]], LoadProof]:
    """Strategies that hold on fewer GPUs, each on fewer than the one before, and what is known then.

    Args:
        demand: With a load.
        most: GPUs on which some strategy holds.
        passed: Degrees that were replayed already.
        among: All candidates; None for every strategy that the steady state does not exclude.
    """
    every = _unbeaten(demand, most) if among is None else among
    candidates = [each for each in every if degrees_of(each) not in passed]
    found: list[tuple[Evaluation, LoadReplay]] = []
    replayed = 0
    for at, each in enumerate(candidates):
        if _least_gpus(demand, each) >= most:
            continue
        if replayed == demand.replays:
            least = min(_least_gpus(demand, other) for other in candidates[at:])
            return found, LoadProof(len(candidates), replayed, min(least, most))
        replayed += 1
        loose = evaluate(demand.workload, each.strategy)
        roomy = largest_batch(demand, loose) or loose
        if load := load_replay(demand, roomy, most - 1):  # which fails at once on as many as fit, or holds
            most = gpus_of(roomy, load)
            found.append((roomy, load))
    return found, LoadProof(len(candidates), replayed, most)


def _unbeaten(demand: Demand, most: int) -> list[Evaluation]:
    """Strategies that may carry the load on fewer than so many GPUs, those first that need fewest without queues."""
    if demand.unlike:
        every = best_first(demand.unloaded, EVERY)
        return sorted((each for each in every if each.gpus < most), key=lambda one: needed_gpus(demand, one))

    def score(tokens_per_s_per_gpu: float, gpus: int) -> float:
        return fleet_worth(demand, tokens_per_s_per_gpu, gpus)

    # Limits at the percentile are kept on average too, and with the confidence: steps of replays are as much longer.
    space = space_of(replace(demand.asked, phase=TRAFFIC.name))
    bests = find_bests(space, EVERY, score, reached=gpus_worth(demand, most - 1))
    fewer = (each for each in bests if needed_gpus(demand, each) < most)
    return sorted(fewer, key=lambda one: needed_gpus(demand, one))


def _least_gpus(demand: Demand, each: Evaluation) -> int:
    """GPUs without which a strategy carries the load in no replay."""
    return each.gpus if demand.unlike else needed_gpus(demand, each)


def degrees_of(each: Evaluation) -> tuple[int, ...]:
    """What distinguishes candidates: all but the batch."""
    strategy = each.strategy
    return (strategy.tp, strategy.cp, strategy.attention_dp, strategy.ep, strategy.pp)
