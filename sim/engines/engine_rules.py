"""What an inference engine supports: its plans for the ops of a layer, and the degrees it refuses.

A user says what an engine runs with a few flags, so no op can be chosen for itself: an engine has a few plans, each of
which shards every op of the layer, and rules for the degrees under each.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace

from sim.canonical import canonical
from sim.layers.mixers import CompressedAttention, GroupedAttention, LinearMixer
from sim.layers.model import Model
from sim.ops.dims import dims_of, spread_choices
from sim.prices.dtypes import FORMATS, Dtype
from sim.prices.engine import EngineVersion, MemoryPolicy, SchedulerPolicy
from sim.prices.hardware import NCCL_ALGORITHMS, AllReduce, EngineName, Hardware
from sim.serving.phases import PoolRole, phase_of
from sim.strategy import ENGINES_VOCABULARY, Strategy
from sim.workload import ExpertExchange, Precisions, Workload

Refuses = Callable[[Workload, Strategy], Iterable[str]]
"""Texts that say why an engine does not run a strategy's degrees, whatever its batch and dims; none if it does."""


def never(_workload: Workload, _strategy: Strategy) -> tuple[str, ...]:
    """Refuses nothing."""
    return ()


def any_stages(_prefill: int, _decode: int) -> tuple[str, ...]:
    """Connects pools of whatever pipelines."""
    return ()


def any_machine(_hardware: Hardware) -> tuple[str, ...]:
    """Refuses no machine."""
    return ()


def plain_scheduler(_hardware: Hardware) -> SchedulerPolicy:
    """Whole prompts beside those that decode, as many as come."""
    return SchedulerPolicy()


def by_memory(hardware: Hardware, small: int, middle: int, large: int) -> int:
    """Tokens of a step by a GPU's memory: below 70 GiB, below 160 GiB, from there on."""
    gib = hardware.hbm_bytes / 2**30
    return large if gib >= 160 else middle if gib >= 70 else small


@dataclass(frozen=True, slots=True)
class Plan:
    """One way in which an engine shards all ops of a layer.

    Attributes:
        name: As the engine's users call it.
        dims: One choice per fused op, in the layer's order; `EngineRules.plans_of` has them per group too.
        refuses: What it refuses besides what its engine does.
    """

    name: str
    dims: tuple[int, ...]
    refuses: Refuses = never


@dataclass(frozen=True, slots=True)
class EngineRules:
    """An inference engine as a strategy space.

    Attributes:
        name: As options and files name it; also that of the space.
        title: As its makers write it.
        version: Whose rules these are.
        memory: What it gives to the KV cache by default.
        kernels: Whose measured kernels stand for its own.
        expert_exchange: How tokens reach their experts by default.
        plans: Of a workload, whose model and phase may decide.
        refuses: Degrees that it does not run, whatever the plan.
        cuts_context: Whether it can share a sequence's KV cache between GPUs (cp) in a workload's phase.
        weights: Formats of weights that it runs, the first its own where a model's published fp8 is none of them.
        kv_cache: The same of its KV cache; bf16 where nothing else is stated.
        lacks_machine: Why it does not run on a machine; nothing if it does.
        prompts_wait: Whether it can let a prompt wait for those of other attention groups; not by default.
        overlaps_batches: Whether it can overlap two half batches, one's exchange with experts and the other's work.
        scheduler: What its steps hold by default on a machine.
        disaggregates: Whether pools of its prompts and of its answers can send caches between them.
        refuses_stages: Why caches do not go from a prefill pool of so many pipeline stages to a decode pool of so many.
        all_reduces: All-reduces that it has options for, in place of its own.
        cuts_stages: Whether it has an option for the layers of each pipeline stage.
    """

    name: str
    title: str
    version: str
    memory: MemoryPolicy
    kernels: EngineName
    expert_exchange: ExpertExchange
    plans: Callable[[Workload], tuple[Plan, ...]]
    refuses: Refuses
    cuts_context: Callable[[Workload], bool]
    weights: tuple[Dtype, ...] = tuple(FORMATS)
    kv_cache: tuple[Dtype, ...] = ("bf16", "fp8")
    lacks_machine: Callable[[Hardware], Iterable[str]] = any_machine
    prompts_wait: bool = False
    overlaps_batches: bool = False
    scheduler: Callable[[Hardware], SchedulerPolicy] = plain_scheduler
    disaggregates: bool = False
    refuses_stages: Callable[[int, int], Iterable[str]] = any_stages
    all_reduces: tuple[AllReduce, ...] = ("nccl", *NCCL_ALGORITHMS)
    cuts_stages: bool = False

    def of_version(self, version: EngineVersion | None) -> EngineRules:
        """These rules with what a version does otherwise."""
        if version is None:
            return self
        weights, kv_cache = version.weights or self.weights, version.kv_cache or self.kv_cache
        return replace(self, version=version.number, weights=weights, kv_cache=kv_cache)

    def lacks(self, precisions: Precisions, hardware: Hardware) -> list[str]:
        """Why it runs nothing with such formats or on such a machine, each text naming its rule; none if it does."""
        return [*self.lacks_formats(precisions), *self.not_on(hardware)]

    def lacks_formats(self, precisions: Precisions) -> list[str]:
        """Which formats it has not, each text naming its rule."""
        return [
            f"{self.title} {self.version}: it keeps its {what} in {' or '.join(known)}, not in {asked}"
            for what, asked, known in (
                ("weights", precisions.weights, self.weights),
                ("KV cache", precisions.kv_cache, self.kv_cache),
            )
            if asked not in known
        ]

    def not_on(self, hardware: Hardware) -> list[str]:
        """Why it does not run on a machine, each text naming its rule."""
        return [f"{self.title} {self.version}: {text}" for text in self.lacks_machine(hardware)]

    def plans_of(self, workload: Workload) -> tuple[Plan, ...]:
        """Its plans, the choices of an op the same in all groups of layers."""
        return tuple(replace(plan, dims=spread_choices(workload, plan.dims)) for plan in self.plans(workload))

    def pair_refusals(self, prefill: Strategy, decode: Strategy) -> list[str]:
        """Why two pools that it runs each do not serve together, each text naming its rule; none if they do."""
        return [f"{self.title} {self.version}: {text}" for text in self.refuses_stages(prefill.pp, decode.pp)]

    def refusals(self, workload: Workload, strategy: Strategy) -> list[str]:
        """Why the engine does not run a strategy, each text naming the engine's rule; none if it does."""
        plans = self.plans_of(workload)
        wanted = canonical(strategy).dims
        fitting = [plan for plan in plans if canonical(replace(strategy, dims=plan.dims)).dims == wanted]
        violations = list(self.refuses(workload, strategy))
        if not fitting:
            violations.append(_no_plan(workload, strategy, plans))
        elif all(refused := [list(plan.refuses(workload, strategy)) for plan in fitting]):
            violations += refused[0]
        if strategy.vocabulary not in ((), ENGINES_VOCABULARY) and strategy.tp * strategy.cp > 1:
            own, asked = (",".join(map(str, each)) for each in (ENGINES_VOCABULARY, strategy.vocabulary))
            violations.append(f"embedding, LM head and sampling are sharded along the vocabulary, {own}, not {asked}")
        return [f"{self.title} {self.version}: {text}" for text in violations]


def _no_plan(workload: Workload, strategy: Strategy, plans: tuple[Plan, ...]) -> str:
    """Which ops keep a strategy from the plan that comes nearest."""
    names = [dim.name for dim in dims_of(workload)]

    def differs(plan: Plan) -> list[str]:
        pairs = zip(names, strategy.dims, plan.dims, strict=True)
        return [f"{name} {has}, not {is_}" for name, is_, has in pairs if is_ != has]

    nearest = min(plans, key=lambda plan: len(differs(plan)))
    return f"ops have no choices of their own; {nearest.name} has the dims {', '.join(differs(nearest))}"


# --- rules that several engines have -------------------------------------------------------------


def nvidia_alone(hardware: Hardware) -> Iterator[str]:
    """Its kernels are in CUDA."""
    if hardware.vendor not in (None, "nvidia"):
        yield f"it runs on NVIDIA GPUs alone, not on {hardware.name}"


def dense_copies(workload: Workload, strategy: Strategy) -> Iterator[str]:
    """Data-parallel ranks of a dense model share nothing: they are replicas."""
    if not workload.model.is_moe and strategy.attention_dp > 1:
        yield f"dp={strategy.attention_dp} ranks of a dense model share nothing: run replicas, each with dp=1"


def served_pool(workload: Workload) -> PoolRole | None:
    """Which pool of a disaggregated deployment an engine serves; None for a whole one, and where none is named.

    Without an engine, a phase is that of a bare machine, whose engine's space is asked for its shardings alone.
    """
    return phase_of(workload).pool if workload.engine else None


def whole_heads(workload: Workload, strategy: Strategy) -> Iterator[str]:
    """Every GPU of an attention group has the same number of heads, KV heads whole or repeated, groups whole."""
    model, tp = workload.model, strategy.tp * strategy.cp
    if model.heads % tp:
        yield f"tensor-parallel size {tp} does not divide {model.heads} attention heads"
        return
    for kv_heads in sorted({attention.kv_heads for attention in _with_kv_heads(model)}):
        if kv_heads % tp and tp % kv_heads:
            yield f"tensor-parallel size {tp} neither divides {kv_heads} KV heads nor is a multiple of them"
    for attention in dict.fromkeys(group.attention for group in model.groups):
        if isinstance(attention, CompressedAttention) and attention.output_groups % tp:
            yield f"tensor-parallel size {tp} does not divide {attention.output_groups} groups of output latents"
        if isinstance(attention, LinearMixer) and attention.key_heads % tp and attention.key_heads > 1:
            yield f"tensor-parallel size {tp} does not divide {attention.key_heads} key heads or groups of states"


def whole_experts(workload: Workload, strategy: Strategy) -> Iterator[str]:
    """Every rank has the same number of experts."""
    copies = workload.model.experts + workload.redundant_experts
    if copies % strategy.ep:
        more = -copies % strategy.ep
        yield f"expert-parallel size {strategy.ep} does not divide {copies} experts; {more} more copies would do"


def shared_context(workload: Workload, strategy: Strategy) -> Iterator[str]:
    """GPUs that would only repeat a KV head may share its context instead (decode context parallelism)."""
    cp, tp = strategy.cp, strategy.tp * strategy.cp
    if cp == 1:
        return
    if workload.two_batch_overlap:
        yield f"decode context parallel size {cp}: two half batches overlap over whole contexts alone"
    if any(isinstance(group.attention, CompressedAttention) for group in workload.model.groups):
        yield f"decode context parallel size {cp}: caches of compressed keys are whole on every GPU"
    for heads, kv_heads in sorted({(each.heads, each.kv_heads) for each in _with_kv_heads(workload.model)}):
        if tp <= kv_heads or cp > tp // kv_heads:
            yield (
                f"decode context parallel size {cp} exceeds the {max(1, tp // kv_heads)} copies of a KV head that "
                f"tensor-parallel size {tp} makes of {kv_heads}"
            )
        elif (heads // kv_heads) % cp:
            yield f"decode context parallel size {cp} does not divide {heads // kv_heads} heads per KV head"


def _with_kv_heads(model: Model) -> list[GroupedAttention]:
    """Attention of the groups of layers that cache keys and values of heads."""
    return [group.attention for group in model.groups if isinstance(group.attention, GroupedAttention)]


BLOCK = 128
"""Rows and columns of a block of fp8_block weights. [published] DeepSeek-V3 and Qwen3 checkpoints."""


def whole_blocks(workload: Workload, strategy: Strategy) -> Iterator[str]:
    """A GPU's share of an fp8_block weight must be whole blocks."""
    if workload.precisions.weights != "fp8_block":
        return
    model, moe_tp, tp = workload.model, strategy.moe_tp, strategy.tp * strategy.cp
    what = "moe_tp" if model.is_moe else "tensor-parallel size"
    for group, layers in zip(model.groups, model.named_groups, strict=True):
        dense = model.is_moe and not group.is_moe  # on attention's mesh
        shares, width = tp if dense else moe_tp, group.feed_forward.ffn_hidden if group.feed_forward else 0
        if width % (shares * BLOCK):
            named = "tensor-parallel size" if dense else what
            yield f"{named} {shares} cuts {width} feed-forward columns{layers} inside blocks of {BLOCK} (fp8_block)"
        columns = group.attention.output_width if group.attention else 0
        if columns % (tp * BLOCK):
            yield f"tensor-parallel size {tp} cuts {columns} columns of attention{layers} inside blocks of {BLOCK}"
