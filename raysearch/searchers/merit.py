"""What a call is worth: to searchers that rank all calls, and to walks that cross infeasible ground."""

from __future__ import annotations

import math

from raysearch.searchers.interface import Outcome

LEAST_RAW = 1e-3
"""[assumed] tokens/s/GPU that no strategy worth finding falls below; what does counts as this much."""


def merit(outcome: Outcome) -> float:
    """Log of tokens/s/GPU; of an infeasible call the log of `LEAST_RAW`, less its excess.

    In nats, so that differences mean the same on every workload: 0.01 is one percent of throughput, or of a limit.

    >>> import numpy as np
    >>> feasible = Outcome(raw=200.0, feasible=True, reward=0.0, best=200.0, observation=np.zeros((3, 16), np.float32))
    >>> round(merit(feasible), 3)
    5.298
    """
    if outcome.feasible:
        return math.log(max(outcome.raw, LEAST_RAW))
    return math.log(LEAST_RAW) - outcome.excess


def worth(raw: float, excess: float, *, best: float, gap: float) -> float:
    """What a strategy is worth to a walk that crosses infeasible ground, nats below the best so far.

    Args:
        raw: Tokens/s/GPU, 0.0 if infeasible.
        excess: Of an infeasible strategy.
        best: Best tokens/s/GPU so far, 0.0 while nothing feasible was found.
        gap: How far below the best an infeasible strategy lies before its excess is counted.

    >>> round(worth(50.0, 0.0, best=100.0, gap=2.0), 3), worth(0.0, 0.5, best=100.0, gap=2.0)
    (-0.693, -2.5)
    """
    return math.log(raw / best) if raw > 0 else -gap - excess
