"""An inference engine: its own time beside its kernels, and how much memory it gives to the KV cache."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, slots=True)
class MemoryPolicy:
    """How much memory an engine gives to the KV cache, and how it fills it.

    Attributes:
        share: Share of `of` that weights and KV cache ("total") or the KV cache alone ("free") may take.
        of: "total": the GPU's memory; "free": what weights and runtime leave.
        runtime_bytes: Context, communication buffers, graphs, activations.
        reserves_output: Whether a request holds its whole output's cache from its start (no eviction).
        max_sequences: Most sequences that run at once on one attention rank.
    """

    share: float
    of: Literal["total", "free"]
    runtime_bytes: float
    reserves_output: bool
    max_sequences: int


@dataclass(frozen=True, slots=True)
class EngineTimes:
    """An engine's own time beside its kernels. [fitted] to serving runs.

    Attributes:
        step_s: Time of a step that no kernel accounts for.
        sequence_s: The same for each running sequence: sampling, detokenising, bookkeeping.
        prefill_share: Share of the other requests' prompt work that a running request waits for, at most 1.
    """

    step_s: float
    sequence_s: float
    prefill_share: float


BARE = EngineTimes(0.0, 0.0, 1.0)
"""Of the bare machine, where kernels and collectives are all that takes time."""


@dataclass(frozen=True, slots=True)
class Engine:
    """An inference engine, as a deployment names it."""

    name: str
    times: EngineTimes
    memory: MemoryPolicy
