"""How replicas may serve together in phase traffic: how many, in chunks of which size, and with a pool for prompts.

A search chooses the number of replicas, the tokens of a chunk, and the number and kind of prefill replicas beside a
strategy, which then is that of a replica that does both, or of a decode replica. Of prefill replicas those may be
chosen that no other of as many GPUs beats in rate and latency, each with the fastest choices of its degrees and batch.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache

from sim.engines.engine_registry import engine_rules_of
from sim.evaluation import Evaluation
from sim.optimum.exact_search import best_of_degrees
from sim.optimum.spaces import Coordinate, space_of
from sim.pools.candidates import replica_of, unbeaten
from sim.pools.traffic import Traffic, TrafficKind, workload_of
from sim.serving.phases import PREFILL, phase_of
from sim.simulate import evaluate
from sim.strategy import ReplicaSet, Strategy
from sim.workload import ServingTables, Workload

_PREFILL_BATCHES = (1, 2, 4, 8, 16)
"""Prompts of a step of a prefill pool. [assumed] more of them make a first token late, and kernels no faster."""


@lru_cache(maxsize=64)
def in_chunks(workload: Workload, tokens: int) -> Workload:
    """The workload with chunks of so many tokens; itself at 0, one object for all who ask."""
    return replace(workload, chunk_tokens=tokens) if tokens else workload


@lru_cache(maxsize=64)
def of_pool(workload: Workload, phase: str) -> Workload:
    """What a pool of a phase has to do of a workload's requests."""
    return workload_of(equal_requests(workload), workload, phase)


def equal_requests(workload: Workload) -> Traffic:
    """A workload's equal requests."""
    return Traffic((TrafficKind(workload.prompt_tokens, workload.output_tokens),))


@lru_cache(maxsize=16)
def prefill_replicas(workload: Workload) -> tuple[Evaluation, ...]:
    """Prefill replicas that a search may choose, fewest GPUs first."""
    pool = of_pool(workload, PREFILL.name)
    space = replace(space_of(pool), batch=_PREFILL_BATCHES)
    found = (evaluate(pool, strategy) for strategy in best_of_degrees(space))
    kept = unbeaten(
        (replica_of(pool, equal_requests(workload), each) for each in found if each.feasible), pool.ttft_limit_s
    )
    return tuple(each.evaluation for each in kept if each.gpus < workload.max_gpus)


@dataclass(frozen=True)
class ServingSpace:
    """What may be chosen of how replicas serve together.

    Attributes:
        workload: In phase traffic, or any other, where nothing is chosen.
    """

    workload: Workload

    @cached_property
    def coordinates(self) -> tuple[Coordinate, ...]:
        """Those with more than one value; `prefill` counts `prefill_replicas` of the workload."""
        tables: dict[str, Sequence[int]] = {
            "replicas": self._tables.replicas,
            "chunk_tokens": self._tables.chunk_tokens,
        }
        tables |= {"prefills": self.prefills, "prefill": range(len(self._prefill))}
        return tuple(
            Coordinate(name, tuple(values), ordered=True) for name, values in tables.items() if len(values) > 1
        )

    @property
    def _tables(self) -> ServingTables:
        return self.workload.serving if phase_of(self.workload).replayed else ServingTables()

    @cached_property
    def prefills(self) -> tuple[int, ...]:
        """Numbers of prefill replicas, of engines that send caches between pools."""
        wanted = self._tables.prefills
        if wanted == (0,):
            return wanted
        rules = engine_rules_of(self.workload)
        joined = rules is None or rules.disaggregates
        return wanted if joined and self.workload.output_tokens > 1 and prefill_replicas(self.workload) else (0,)

    @cached_property
    def _prefill(self) -> tuple[Strategy, ...]:
        return tuple(each.strategy for each in prefill_replicas(self.workload)) if self.prefills != (0,) else ()

    def replica_set(self, values: Mapping[str, int]) -> ReplicaSet:
        """That of values of the coordinates, by name; a pool for prompts computes them whole."""
        prefills = values.get("prefills", self.prefills[0])
        if prefills:
            at = values.get("prefill", 0)
            return ReplicaSet(values.get("replicas", self._tables.replicas[0]), 0, prefills, self._prefill[at])
        return ReplicaSet(
            values.get("replicas", self._tables.replicas[0]),
            values.get("chunk_tokens", self._tables.chunk_tokens[0]),
        )

    def values(self, served: ReplicaSet) -> dict[str, int]:
        """Of the coordinates, by name, for one that `replica_set` made. Raises: ValueError: It did not."""
        if served.prefill and served.prefill not in self._prefill:
            raise ValueError(f"{self.workload.name} has no such prefill replica: {served.prefill}")
        at = self._prefill.index(served.prefill) if served.prefill else 0
        own = {"replicas": served.replicas, "chunk_tokens": served.chunk_tokens, "prefills": served.prefills}
        return {**own, "prefill": at}
