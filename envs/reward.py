"""The learning signal: equation 1 of the paper, made free of the workload's scale."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import final


@final
@dataclass(frozen=True, slots=True)
class ImprovementReward:
    """Rewards throughput and, on top, improvement over the best so far.

    The paper's r(a) = alpha raw(a) + beta (raw(a) - b) is in tokens/s/GPU, which differs by an order of
    magnitude between workloads: one alpha, beta and penalty cannot fit all of them. So both terms are divided
    by the best throughput seen, this call included, max(raw(a), b):

    - a feasible call earns between -beta and alpha + beta; one as good as the best earns alpha, the first
      feasible one alpha + beta. The range is known before the search, in any unit, on any workload;
    - within a search it still rises strictly with raw(a), and is continuous where raw(a) = b;
    - dividing by b alone would let a poor first strategy make every later reward arbitrarily large.

    The price: a reward says how a call compares with the best of its time, so two calls of one strategy, early
    and late, may earn differently. (The paper's b term does the same.)

    Example:
        >>> reward = ImprovementReward()
        >>> reward(40.0, best=0.0, feasible=True), reward(40.0, best=80.0, feasible=True)
        (2.0, 0.0)

    Source: "Learning to Shard", eq. 1; it names no values for alpha, beta and "large negative rewards".

    Attributes:
        alpha: Weight of the throughput, > 0. [assumed]
        beta: Weight of the improvement, > 0. [assumed] equal to alpha, so that neither term drowns the other.
        penalty: What an infeasible call costs, in the same normalised unit; above beta, so that it costs more
            than any feasible one. [assumed] several times the width of the feasible range: "large negative".

    Raises:
        ValueError: A value is not finite, alpha or beta is not positive, or the penalty does not exceed beta.
    """

    alpha: float = 1.0
    beta: float = 1.0
    penalty: float = 10.0

    def __post_init__(self) -> None:
        if not all(math.isfinite(value) for value in (self.alpha, self.beta, self.penalty)):
            raise ValueError(f"expected finite alpha, beta and penalty, got {self}")
        if self.alpha <= 0 or self.beta <= 0:
            raise ValueError(f"expected alpha > 0 and beta > 0, got alpha={self.alpha}, beta={self.beta}")
        if self.penalty <= self.beta:
            raise ValueError(
                f"expected penalty > beta, got {self.penalty} <= {self.beta}: "
                "the worst feasible strategy earns -beta and an infeasible one must earn less"
            )

    def __call__(self, raw: float, best: float, feasible: bool) -> float:
        """Reward of one call.

        Args:
            raw: Its tokens/s/GPU, >= 0.
            best: b, the best feasible tokens/s/GPU before the call, 0.0 if there was none.
            feasible: Whether it broke no limit.
        """
        if not feasible:
            return -self.penalty
        scale = max(raw, best)
        if scale == 0.0:
            return 0.0
        return (self.alpha * raw + self.beta * (raw - best)) / scale
