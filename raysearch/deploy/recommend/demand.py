"""A question about a deployment, with the load that its replicas are to carry together."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any

from raysearch.base.errors import InputError
from sim.config.question import Question
from sim.serving.phases import phase_of
from sim.workload import Workload


@dataclass(frozen=True)
class Demand:
    """A workload, the GPUs at hand and the load.

    Attributes:
        workload: What is served; its space is the engine's, its budget the GPUs.
        gpus: GPUs at hand.
        question: The workload's, for records; None where it was made otherwise.
        top: How many strategies to list.
        requests_per_s: Load to carry with the fewest GPUs, or None to fill all.
        concurrency: Requests at once to carry with the fewest GPUs, or None.
        cv: How bursty the load comes: coefficient of variation of the gaps, 1 for a Poisson process.
        percentile: Of the latencies that the limits are about under a load.
        confidence: Probability with which they are to hold there.
        requests: Of a replay under it.
        price_per_gpu_hour: What a GPU costs, or None.
        largest_replica: Most GPUs of a replica.
    """

    workload: Workload
    gpus: int
    question: Question | None = None
    top: int = 5
    requests_per_s: float | None = None
    concurrency: int | None = None
    price_per_gpu_hour: float | None = None
    cv: float = 1.0
    percentile: float = 99.0
    confidence: float = 0.9
    requests: int = 2000
    largest_replica: float = math.inf

    def __post_init__(self) -> None:
        if self.requests_per_s is not None and self.concurrency is not None:
            raise InputError("give --requests-per-s or --concurrency, not both")
        if self.requests_per_s is not None and not 0 < self.requests_per_s < math.inf:
            raise InputError(f"--requests-per-s: expected a number above 0, got {self.requests_per_s:g}")
        if self.price_per_gpu_hour is not None and not 0 <= self.price_per_gpu_hour < math.inf:
            raise InputError(f"--set price: expected a number from 0, got {self.price_per_gpu_hour:g}")

    @property
    def loaded(self) -> bool:
        """Whether it is asked how few GPUs carry a load."""
        return self.requests_per_s is not None or self.concurrency is not None

    @property
    def under_traffic(self) -> bool:
        """Whether requests come at a rate, so that they queue."""
        return self.requests_per_s is not None and phase_of(self.workload).mixes

    @property
    def unloaded(self) -> Demand:
        """The same demand without its load: how to fill the GPUs at hand."""
        return replace(self, requests_per_s=None, concurrency=None)

    def under(self, **changes: Any) -> Demand:
        """The same demand of a workload with other fields."""
        return replace(self, workload=replace(self.workload, **changes))
