"""Branch and bound on the steady state: whether any strategy carries a load that comes at random on fewer GPUs.

The steady state at its best is a bound, that of phase traffic: prompts of all attention groups meet, none stalls a
pipeline, and queues never empty. So once some strategy holds, only those need be replayed whose steady state would
carry the load on fewer GPUs, the cheapest first, each once on as many replicas as fit below what holds so far. More
replicas are taken never to hold less. A trace has unlike lengths, and prompts that are cached in part: of these the
steady state is no bound, and the best strategies of all degrees are replayed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

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
    """

    open: int
    replayed: int
    least_gpus: int


def carrying(
    demand: Demand, listed: Sequence[Evaluation]
) -> tuple[list[tuple[Evaluation, LoadReplay | None]], LoadProof]:
    """Strategies with the replicas that a load takes, each with its largest batch; None where they take more or fail.

    The strategy of the fewest GPUs is among them, unless replays end before, as the proof says.

    Args:
        demand: With a load.
        listed: To be replayed in any case.
    """
    most, replayed = demand.gpus, list[tuple[Evaluation, LoadReplay | None]]()
    roomy = {found.strategy: found for each in listed for found in (largest_batch(demand, each) or each,)}
    for evaluation in roomy.values():
        load = load_replay(demand, evaluation, most)
        most = load.replicas * evaluation.gpus if load else most
        replayed.append((evaluation, load))
    holding = any(load for _, load in replayed)
    found, proof = fewer_gpus(demand, most if holding else most + 1, set(map(degrees_of, roomy.values())))
    return [*replayed, *found], proof


def fewer_gpus(
    demand: Demand, most: int, passed: set[tuple[int, ...]]
) -> tuple[list[tuple[Evaluation, LoadReplay]], LoadProof]:
    """Strategies that hold on fewer GPUs, each on fewer than the one before, and what is known then.

    Args:
        demand: With a load.
        most: GPUs on which some strategy holds.
        passed: Degrees that were replayed already.
    """
    candidates = [each for each in _unbeaten(demand, most) if degrees_of(each) not in passed]
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
            most = load.replicas * roomy.gpus
            found.append((roomy, load))
    return found, LoadProof(len(candidates), replayed, most)


def _unbeaten(demand: Demand, most: int) -> list[Evaluation]:
    """Strategies that may carry the load on fewer than so many GPUs, those first that need fewest without queues."""
    if demand.trace is not None:
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
    return needed_gpus(demand, each) if demand.trace is None else each.gpus


def degrees_of(each: Evaluation) -> tuple[int, ...]:
    """What distinguishes candidates: all but the batch."""
    strategy = each.strategy
    return (strategy.tp, strategy.cp, strategy.attention_dp, strategy.ep, strategy.pp)
