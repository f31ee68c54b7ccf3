"""Deployments that are replayed: replicas of one strategy, or a pool for prompts and one for answers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache

from raysearch.base.errors import InputError
from sim.evaluation import Evaluation
from sim.replay.drive import Replayed, RouterName, Watch, as_they_come, by_clients, nobody
from sim.replay.goodput import step_factor
from sim.replay.replica import Deployed
from sim.replay.requests import Requests
from sim.replay.two_pools import TwoPools, handover_of, through_pools
from sim.serving.phases import TRAFFIC, phase_of
from sim.simulate import evaluate
from sim.strategy import Strategy
from sim.workload import Workload

MOST_QUEUES = 50_000
"""[assumed] 4,096 replicas of a pipeline of twelve stages; each takes a kilobyte and some microseconds a request."""
_deployed, _steady = lru_cache(maxsize=64)(Deployed.of), lru_cache(maxsize=64)(evaluate)
"""One replica of a strategy prices its steps for all fleets that have it."""


@dataclass(frozen=True)
class AggregatedFleet:
    """Replicas of one strategy that share nothing but the router.

    Attributes:
        deployed: A replica.
        replicas: How many.
        router: Whom a request goes to.
    """

    deployed: Deployed
    replicas: int
    router: RouterName = "least_loaded"

    def __post_init__(self) -> None:
        _check_queues(self.replicas, self.strategy)

    @classmethod
    def of(
        cls, workload: Workload, strategy: Strategy, replicas: int = 1, router: RouterName = "least_loaded"
    ) -> AggregatedFleet:
        """Replicas of a strategy."""
        return cls(_deployed(workload, strategy), replicas, router)

    @property
    def strategy(self) -> Strategy:
        """Of a replica."""
        return self.deployed.strategy

    @cached_property
    def evaluation(self) -> Evaluation:
        """The steady state of a replica."""
        return _steady(self.deployed.prices.workload, self.strategy)

    @property
    def evaluations(self) -> Sequence[Evaluation]:
        """Of each of its pools: one."""
        return (self.evaluation,)

    @property
    def copies(self) -> int:
        """Replicas of all pools."""
        return self.replicas

    @property
    def gpus(self) -> int:
        """Of all replicas."""
        return self.replicas * self.evaluation.gpus

    @property
    def latencies_s(self) -> tuple[float, float]:
        """(to the first token, per token) in the steady state."""
        return self.evaluation.ttft_s, self.evaluation.tpot_s

    def bound_per_s(self, prompt_tokens: float, output_tokens: float) -> float:
        """Requests per second in the steady state of a full batch, without queues."""
        return _rate_per_s(self.deployed, self.evaluation, prompt_tokens, output_tokens) * self.replicas

    def tokens_per_s_per_gpu(self, _prompt_tokens: float, _output_tokens: float) -> float:
        """Tokens of answers in that state, whatever the lengths: as `evaluate` has them."""
        return self.evaluation.tokens_per_s_per_gpu

    def most_per_s(self, prompt_tokens: float, output_tokens: float) -> float:
        """Requests per second that no load exceeds for long: prompts of all attention groups meet, none stalls."""
        workload = self.deployed.prices.workload
        if not phase_of(workload).mixes:
            return self.bound_per_s(prompt_tokens, output_tokens)
        best = evaluate(replace(workload, phase=TRAFFIC.name), self.strategy)
        rate_per_s = _rate_per_s(self.deployed, best, prompt_tokens, output_tokens) * self.replicas
        return max(rate_per_s, self.bound_per_s(prompt_tokens, output_tokens))

    def at(self, probability: float) -> AggregatedFleet:
        """The same with steps as long as they are at most with a probability."""
        return replace(self, deployed=_slower(self.deployed, self.evaluation, probability))

    def replayed(self, requests: Requests, clients: int | None, watch: Watch = nobody) -> Replayed:
        """What becomes of requests, at their times or by so many clients of the whole."""
        if clients is not None:
            return by_clients(self.deployed, requests, clients, self.replicas, self.router)
        return as_they_come(self.deployed, requests, self.replicas, self.router, watch)


@dataclass(frozen=True)
class DisaggregatedFleet:
    """A pool that computes prompts and one that decodes answers.

    Attributes:
        pools: Both.
    """

    pools: TwoPools

    def __post_init__(self) -> None:
        for copies, deployed in ((self.pools.prefills, self.pools.prefill), (self.pools.decodes, self.pools.decode)):
            _check_queues(copies, deployed.strategy)

    @classmethod
    def of(
        cls,
        prefill: tuple[Workload, Strategy, int],
        decode: tuple[Workload, Strategy, int],
        *,
        hidden: float = 0.0,
    ) -> DisaggregatedFleet:
        """Both pools, each by its workload, its strategy and how many replicas.

        Args:
            prefill: Of phase prefill.
            decode: Of phase decode.
            hidden: Share of the cache's transfer that hides behind the prompt's computing.
        """
        gpus = sum(strategy.gpus * copies for _, strategy, copies in (prefill, decode))
        near = gpus <= prefill[0].hardware.node_gpus
        handover = handover_of(prefill[0], (prefill[1], decode[1]), same_node=near, hidden=hidden)
        one, other = (_deployed(workload, strategy) for workload, strategy, _ in (prefill, decode))
        return cls(TwoPools(one, other, prefill[2], decode[2], handover))

    @cached_property
    def evaluations(self) -> Sequence[Evaluation]:
        """The steady states of a prefill and a decode replica."""
        return tuple(_steady(each.prices.workload, each.strategy) for each in (self.pools.prefill, self.pools.decode))

    @property
    def copies(self) -> int:
        """Replicas of both pools."""
        return self.pools.prefills + self.pools.decodes

    @property
    def gpus(self) -> int:
        """Of both pools."""
        prefill, decode = self.evaluations
        return self.pools.prefills * prefill.gpus + self.pools.decodes * decode.gpus

    @property
    def latencies_s(self) -> tuple[float, float]:
        """(to the first token, per token) in the steady state, both pools full."""
        prefill, decode = self.evaluations
        waits_s = self.pools.handover.waits_s(self.pools.prefill.prices.workload.prompt_tokens)
        return prefill.ttft_s + waits_s + decode.tpot_s, decode.tpot_s

    def bound_per_s(self, prompt_tokens: float, output_tokens: float) -> float:
        """Requests per second of the slower pool in its steady state, without queues."""
        pools, (prefill, decode) = self.pools, self.evaluations
        return min(
            pools.prefills * _rate_per_s(pools.prefill, prefill, prompt_tokens, output_tokens),
            pools.decodes * _rate_per_s(pools.decode, decode, prompt_tokens, output_tokens),
        )

    def tokens_per_s_per_gpu(self, prompt_tokens: float, output_tokens: float) -> float:
        """Tokens of answers in that state."""
        return self.bound_per_s(prompt_tokens, output_tokens) * output_tokens / self.gpus

    def most_per_s(self, prompt_tokens: float, output_tokens: float) -> float:
        """Requests per second that no load exceeds for long: the same."""
        return self.bound_per_s(prompt_tokens, output_tokens)

    def at(self, probability: float) -> DisaggregatedFleet:
        """The same with steps of both pools as long as they are at most with a probability."""
        pools, (prefill, decode) = self.pools, self.evaluations
        slower = {
            "prefill": _slower(pools.prefill, prefill, probability),
            "decode": _slower(pools.decode, decode, probability),
        }
        return DisaggregatedFleet(replace(pools, **slower))

    def replayed(self, requests: Requests, clients: int | None, watch: Watch = nobody) -> Replayed:
        """What becomes of requests, at their times or by so many clients of the whole."""
        return through_pools(self.pools, requests, clients, watch=watch)


DeployedFleet = AggregatedFleet | DisaggregatedFleet


def _slower(deployed: Deployed, evaluation: Evaluation, probability: float) -> Deployed:
    return replace(deployed, slower=step_factor(evaluation, probability))


def _rate_per_s(deployed: Deployed, evaluation: Evaluation, prompt_tokens: float, output_tokens: float) -> float:
    counted = phase_of(deployed.prices.workload).counted_tokens(prompt_tokens, output_tokens)
    return evaluation.tokens_per_s_per_gpu * evaluation.gpus / counted


def _check_queues(replicas: int, strategy: Strategy) -> None:
    if (queues := replicas * strategy.attention_dp * strategy.pp) > MOST_QUEUES:
        raise InputError(
            f"a replay has a queue per microbatch of each data-parallel rank: expected at most {MOST_QUEUES:,} "
            f"(replicas * dp * pp), got {queues:,}"
        )
