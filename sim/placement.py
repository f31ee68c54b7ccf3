"""How a tensor lies on the ranks of one mesh axis: replicated, cut along a dim, or as unreduced parts."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Replicate:
    """Every rank holds the whole tensor."""

    def __str__(self) -> str:
        return "R"


@dataclass(frozen=True, slots=True)
class Shard:
    """Rank i holds the i-th chunk along tensor dim `dim`, chunks of ceil(size / degree)."""

    dim: int

    def __str__(self) -> str:
        return f"S({self.dim})"


@dataclass(frozen=True, slots=True)
class Partial:
    """Every rank holds a full-size part; the tensor is their elementwise reduction."""

    op: str = "sum"

    def __str__(self) -> str:
        return f"P({self.op})"


Placement = Replicate | Shard | Partial

REPLICATE = Replicate()
PARTIAL = Partial()
