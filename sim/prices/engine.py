"""An inference engine: its own time beside its kernels, its memory for the KV cache, and its scheduler."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

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
        most_sent_tokens: Most tokens of an attention rank that it lets DeepEP's kernels for decoding send; None: any.
    """

    share: float
    of: Literal["total", "free"]
    runtime_bytes: float
    reserves_output: bool
    max_sequences: int
    most_sent_tokens: int | None = None


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
        whole_blocks: Whether `step_tokens` is a multiple of `block_tokens`.
    """

    mixes: bool = True
    step_tokens: int = 10**9
    chunks: bool = False
    reserved_output: float = 0.0
    shared_by_ranks: bool = False
    block_tokens: int = 16
    whole_blocks: bool = False


@dataclass(frozen=True, slots=True)
class EngineTimes:
    """An engine's own time beside its kernels. [fitted] to serving runs.

    Attributes:
        step_s: Time of a step that no kernel accounts for.
        sequence_s: The same for each running sequence: sampling, detokenising, bookkeeping.
        prefill_share: Share of the other requests' prompt work that a running request waits for, at most 1.
        kernel_factor: What its kernels and collectives take in a step over what they took alone.
        prompt_factor: The same of steps that carry prompts, besides; at least 1.
    """

    step_s: float
    sequence_s: float
    prefill_share: float
    kernel_factor: float = 1.0
    prompt_factor: float = 1.0


BARE = EngineTimes(0.0, 0.0, 1.0)
"""Of the bare machine, where kernels and collectives are all that takes time."""


_EXACT = {"kernel_factor": 1.0, "prompt_factor": 1.0, "layer_s": 0.0}


def cell_of(model: str, weights: str, *, drafts: bool) -> str:
    """The key of a model's own times among those of an engine; `weights`: format of its experts, if it has any."""
    return f"{model}/{weights}" + "/mtp" * drafts


def times_of(record: Mapping[str, Any], cells: Iterable[str], layers: int) -> EngineTimes:
    """An engine's times as a calibration stores them.

    Args:
        record: Of the engine, with those of some cells under the key "of".
        cells: Whose times are meant, the best first; the engine's own stand where it has none of them.
        layers: Of the model.
    """
    own = record.get("of", {})
    found = _EXACT | dict(next((own[cell] for cell in cells if cell in own), record))
    step_s = found["step_s"] + layers * found["layer_s"] if found["layer_s"] else found["step_s"]
    parts = ("sequence_s", "prefill_share", "kernel_factor", "prompt_factor")
    return EngineTimes(step_s, *(found[part] for part in parts))


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
        version_stated: Whether that is what somebody asked for, and no default; no figure depends on it.
    """

    name: str
    times: EngineTimes
    memory: MemoryPolicy
    version: EngineVersion | None = None
    version_stated: bool = field(default=False, compare=False)

    @property
    def family(self) -> str:
        """The engine's name, whatever its version."""
        return self.name.partition("<")[0]

    @property
    def runs(self) -> str:
        """What a calibration calls the serving runs that its times are fitted to."""
        return (self.version.runs if self.version else None) or self.name
