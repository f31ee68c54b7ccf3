"""What the operands of an operation may be: rules are proved on numbers drawn from there.

A rule speaks of a tensor that lies in the domain; its parts under `Partial` need not, so an operation that only takes
positive numbers passes no parts of a sum.

>>> import numpy as np
>>> NON_NEGATIVE.draw(np.random.default_rng(0), (3,), -1.0).round(1).tolist()
[0.1, 0.1, 0.6]
>>> indices(4).draw(np.random.default_rng(0), (6,), 1.0).tolist()
[3, 2, 2, 1, 1, 0]
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from sim.sharding.placement import Array


@dataclass(frozen=True, slots=True)
class Domain:
    """A set of tensors.

    Attributes:
        draw: A random tensor of a shape, its numbers negated where the sign is -1 and negative ones belong to the set.
        signed: Whether they do.
    """

    draw: Callable[[np.random.Generator, Sequence[int], float], Array]
    signed: bool = False


REALS = Domain(lambda rng, shape, sign: sign * rng.standard_normal(shape), signed=True)
NON_NEGATIVE = Domain(lambda rng, shape, sign: np.abs(rng.standard_normal(shape)))
TIED = Domain(lambda rng, shape, sign: sign * np.round(4 * rng.standard_normal(shape)), signed=True)
"""Numbers of which many are equal, as those are between which an argmax must choose alike on every rank."""


def indices(below: int) -> Domain:
    """Integers from 0 on, such as tokens of a vocabulary."""
    return Domain(lambda rng, shape, sign: rng.integers(below, size=tuple(shape)))
