"""An inference engine: its own time beside its kernels, its memory for the KV cache, and its scheduler."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from sim.prices.dtypes import Dtype


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
class SchedulerPolicy:
    """What an engine puts into a step under traffic.

    Attributes:
        mixes: Whether prompts are computed in the steps of those that decode; else these stand still meanwhile.
        step_tokens: Most tokens of a step on an attention rank; of prompts alone where it does not mix.
        chunks: Whether a prompt may be cut to fit.
        reserved_output: Share of the answers yet to come for which a new request must leave room.
        shared_by_ranks: Whether `step_tokens` is shared out over attention ranks.
        block_tokens: Of a block of the prefix cache.
    """

    mixes: bool = True
    step_tokens: int = 10**9
    chunks: bool = False
    reserved_output: float = 0.0
    shared_by_ranks: bool = False
    block_tokens: int = 16


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
class EngineVersion:
    """A version of an engine, and what it does otherwise than the one whose rules are built in.

    Attributes:
        number: As its makers count, such as "0.12.0".
        runs: The serving runs, as a calibration names them, whose times it is charged; None for the engine's.
        weights, kv_cache: Formats that it runs, the first its own; None for those of the built-in rules.
    """

    number: str
    runs: str | None = None
    weights: tuple[Dtype, ...] | None = None
    kv_cache: tuple[Dtype, ...] | None = None


@dataclass(frozen=True, slots=True)
class Engine:
    """An inference engine, as a deployment names it.

    Attributes:
        name: As its rules have it, or with the versions whose serving runs are meant, as "vllm<0.14".
        times: Its own time beside its kernels.
        memory: How much of it goes to the KV cache.
        version: None for the one whose rules are built in.
    """

    name: str
    times: EngineTimes
    memory: MemoryPolicy
    version: EngineVersion | None = None

    @property
    def family(self) -> str:
        """The engine's name, whatever its version."""
        return self.name.partition("<")[0]

    @property
    def runs(self) -> str:
        """What a calibration calls the serving runs that its times are fitted to."""
        return (self.version.runs if self.version else None) or self.name
