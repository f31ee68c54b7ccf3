"""What is served, on what, under which objective: everything but the strategy."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Final, Literal, Protocol

from sim.layers.model import Model
from sim.prices.curves import DeepepMode
from sim.prices.dtypes import Dtype
from sim.prices.engine import Engine
from sim.prices.hardware import Hardware
from sim.strategy import ENGINES_VOCABULARY, Strategy

PhaseName = str
"""What a deployment does: "decode", "serve", "prefill", "traffic", or a registered one: see `sim.serving.phases`."""
SpaceName = str
"""The strategies that a search may choose: one of `OWN_SPACES`, or an engine's name for what it can run; see
`sim.optimum.spaces`."""
TWO_DIMENSIONAL = "two_dimensional"
OWN_SPACES: Final[Mapping[SpaceName, str]] = {
    "paper": "no op sharded over tokens",
    "joint": "these too",
    "extended": "also separate meshes for attention and experts, and more choices per op",
    "generated": "the extended one with choices for embedding, LM head and sampling",
    TWO_DIMENSIONAL: "the joint one with ops that shard two dims, over tp = a x b",
}
"""Spaces that are no engine's, and what is in them: their strategies are judged by what hardware and model allow."""
GroupChoices = Literal["shared", "own"]
"""Whether all groups of a model's layers have one choice per fused op, or each group its own."""
BatchGrid = Literal["powers_of_two", "any"]
"""Named lists of batches. Powers of two are the paper's, whose table 1 was searched on them; any is every batch, for
those who deploy: memory and SLO rarely bind at a power of two."""
Routing = Literal["balanced", "skewed"]
"""Which tokens go to which expert: equally likely, or as skewed as measured with a power law."""
ExpertExchange = Literal["all_to_all", "all_gather"]
"""How tokens reach their experts: each copy to its expert's rank (DeepEP), or every token to every rank, whose results
are summed (what engines do without an expert-parallel library)."""
EVEN_ODDS = 0.5
"""Confidence at which a latency counts as predicted: a measured run is as often longer as shorter."""


@dataclass(frozen=True, slots=True)
class Precisions:
    """Storage formats. GEMMs run at the peak of `weights`, attention at that of `activations`.

    Embedding and LM head are kept in `activations`, as published checkpoints keep them.

    Attributes:
        weights: Of the weights of attention and feed-forward networks.
        kv_cache: Of cached keys and values.
        activations: Of what is computed between the weights, and of collectives.
        dispatch: Of tokens on their way to experts; they come back in `activations`.
    """

    weights: Dtype
    kv_cache: Dtype
    activations: Dtype
    dispatch: Dtype


@dataclass(frozen=True, slots=True)
class Speculation:
    """Speculative decoding: a step verifies drafted tokens beside the next one, and keeps those up to the first wrong.

    Attributes:
        draft_tokens: Drafted per step and sequence, >= 1.
        accepted: Of each of them, the share accepted where all before it are.
        draft: What drafts: the model's own "mtp" layers, another model, or None for what costs nothing (n-grams).
        spread: By which share the tokens of a step may differ in 90 % of cases; 0 of a share that somebody stated.
        eagle3: Whether the other model is an EAGLE-3 head, which reads the model's hidden states.
    """

    draft_tokens: int
    accepted: tuple[float, ...]
    draft: Model | Literal["mtp"] | None = None
    spread: float = 0.0
    eagle3: bool = False

    def __str__(self) -> str:
        whose = "Qwen3's heads" if self.eagle3 else "DeepSeek-R1"
        within = f" within {self.spread:.0%}, as of {whose}" if self.spread else ""
        return (
            f"{self.draft_tokens} drafted per step by {self.drafter}, {self.tokens_per_step:.2f} tokens gained{within}"
        )

    @property
    def drafter(self) -> str:
        """What drafts, by name: "mtp", "ngram", "eagle3" or the model's."""
        if self.eagle3:
            return "eagle3"
        return self.draft if isinstance(self.draft, str) else self.draft.name if self.draft else "ngram"

    @property
    def tokens_per_step(self) -> float:
        """Tokens that a sequence gains per step, on average.

        Source: Leviathan et al. (arXiv 2211.17192), equation 1, whose acceptance is the same at every place.

        >>> Speculation(3, (0.5, 0.5, 0.5)).tokens_per_step
        1.875
        """
        kept, tokens = 1.0, 1.0
        for share in self.accepted:
            kept *= share
            tokens += kept
        return tokens


@dataclass(frozen=True, slots=True)
class OpenLoop:
    """Requests that come whether or not earlier ones are answered, and how their latencies are judged.

    Attributes:
        percentile: Of both latencies that keeps the SLOs, in (0, 100].
        cv: Coefficient of variation of the gaps between requests: 1 is a Poisson process, more comes in bursts.
        requests: Of each replica that are counted in a replay, on average; more where more run at once.
        seed: Of their gaps.
    """

    percentile: float = 99.0
    cv: float = 1.0
    requests: int = 1600
    seed: int = 0


@dataclass(frozen=True, slots=True)
class ServingTables:
    """The values that phase traffic may choose for how replicas serve: see `sim.strategy.ReplicaSet`.

    Attributes:
        replicas: Numbers of replicas.
        chunk_tokens: Prompt tokens of a step; 0: as the workload says.
        prefills: Replicas of a prefill pool; 0: none.
    """

    replicas: tuple[int, ...] = (1,)
    chunk_tokens: tuple[int, ...] = (0,)
    prefills: tuple[int, ...] = (0,)


def coarse_steps(most: int) -> tuple[int, ...]:
    """Powers of two and those half way between them, ascending, for searches over few counts.

    >>> coarse_steps(12)
    (1, 2, 3, 4, 6, 8, 12)
    """
    steps = {base << power for base in (1, 3) for power in range(most.bit_length())}
    return tuple(sorted(each for each in steps if each <= most))


@dataclass(frozen=True, slots=True)
class DegreeTables:
    """The values a search may choose for each degree, ascending.

    Attributes:
        tp: Tensor parallelism.
        ep: Expert parallelism.
        pp: Pipeline stages.
        batch: Sequences of a microbatch.
    """

    tp: tuple[int, ...]
    ep: tuple[int, ...]
    pp: tuple[int, ...]
    batch: tuple[int, ...]


class Rules(Protocol):
    """What an engine supports: a `sim.engines.engine_rules.EngineRules`."""

    @property
    def name(self) -> str:
        """The engine's, and that of its space."""
        ...

    def refusals(self, workload: Workload, strategy: Strategy) -> list[str]:
        """Why the engine does not run a strategy, each text naming its rule; none if it does."""
        ...


@dataclass(frozen=True, slots=True, eq=False)
class Workload:
    """A model on a hardware under a service-level objective: everything but the strategy.

    Attributes:
        name: For people, and in the names of results.
        phase: See `PhaseName`.
        context_tokens: In phase decode, cached tokens every sequence attends to.
        prompt_tokens: Tokens of a request's prompt; 0 in phase decode where only the context is known.
        output_tokens: Tokens of its answer.
        tpot_slo_s: Longest allowed time per output token.
        ttft_slo_s: Longest allowed time to the first token; infinite for none.
        max_gpus: Device budget.
        precisions: Storage formats.
        load_imbalance: Tokens of the busiest ep rank over the mean, >= 1.
        degrees: The searched degree tables.
        config_hash: Digest of everything above, of the model and of the hardware.
        space: Which strategies a search may choose; see `sim.optimum.spaces`.
        rules: What an engine supports, in its own space: see `sim.engines.engine_registry.in_space`.
        groups: See `GroupChoices`; a model of one group has the same of both.
        margin: Share of the SLO and of the memory that is kept free, in [0, 1).
        confidence: Probability with which a measured run is to keep the limits on latencies: `sim.serving.confidence`.
        engine: Whose own time and memory policy are charged; None for the bare machine.
        chunk_tokens: In phase serve, most prompt tokens of a step (chunked prefill); None computes prompts whole.
        prompt_wait_steps: In phase serve, most steps that a prompt waits for those of other attention groups; 0: none
            waits, and every group's prompts come when they come.
        routing: See `Routing`.
        expert_exchange: See `ExpertExchange`.
        redundant_experts: Extra copies of experts in each layer, for balance (EPLB).
        two_batch_overlap: Whether half batches overlap, the expert exchange of one with the computation of the other.
        tp_inner: In the two-dimensional space, GPUs of the inner sub-axis of tp: one of `sim.strategy.INNER_RANKS`.
        overlap_parts: Maximum number of parts of an operator's batch, the communication of one overlapping the
            computation of the next; 1: no overlap. See `sim.step.operator_pipelines`.
        deepep_mode: Which kernels send tokens to their experts; see `DeepepMode`.
        speculation: Speculative decoding, or None for one token per step and sequence.
        stage_layers: Layers of each stage, in pipelines of as many stages; others share theirs out evenly.
        vocabulary: Choices of embedding, LM head and sampling: see `sim.strategy.Strategy.vocabulary`.
        open_loop: In phase traffic, how requests come and are judged.
        serving: In phase traffic, how replicas may serve together.
        declarations: "module:function" that declared choices of ops for the extended space; None: no file named any.
    """

    name: str
    model: Model
    hardware: Hardware
    phase: PhaseName
    context_tokens: int
    tpot_slo_s: float
    max_gpus: int
    precisions: Precisions
    load_imbalance: float
    degrees: DegreeTables
    config_hash: str
    space: SpaceName = "joint"
    rules: Rules | None = None
    groups: GroupChoices = "shared"
    margin: float = 0.0
    confidence: float = EVEN_ODDS
    prompt_tokens: int = 0
    output_tokens: int = 0
    ttft_slo_s: float = float("inf")
    engine: Engine | None = None
    chunk_tokens: int | None = None
    prompt_wait_steps: int = 0
    routing: Routing = "balanced"
    expert_exchange: ExpertExchange = "all_to_all"
    declarations: str | None = None
    speculation: Speculation | None = None
    redundant_experts: int = 0
    two_batch_overlap: bool = False
    tp_inner: int = 2
    overlap_parts: int = 1
    deepep_mode: DeepepMode = "auto"
    stage_layers: tuple[int, ...] = ()
    vocabulary: tuple[int, ...] = ENGINES_VOCABULARY
    open_loop: OpenLoop = OpenLoop()
    serving: ServingTables = ServingTables()

    def __post_init__(self) -> None:
        if self.space in OWN_SPACES:
            object.__setattr__(self, "rules", None)
        elif self.rules is None or self.rules.name != self.space:
            raise ValueError(
                f"{self.space!r} is an engine's space, with its rules: see in_space(workload, {self.space!r})"
            )

    @property
    def queries(self) -> int:
        """Tokens that a step computes of each decoding sequence."""
        return 1 + self.speculation.draft_tokens if self.speculation else 1

    @property
    def tokens_per_step(self) -> float:
        """Tokens that a decoding sequence gains per step."""
        return self.speculation.tokens_per_step if self.speculation else 1.0

    @property
    def tpot_limit_s(self) -> float:
        """Longest time per output token that is accepted: the SLO less the margin."""
        return self.tpot_slo_s * (1 - self.margin)

    @property
    def ttft_limit_s(self) -> float:
        """Longest time to the first token that is accepted."""
        return self.ttft_slo_s * (1 - self.margin)

    @property
    def hbm_limit_bytes(self) -> float:
        """Most memory of a GPU that is accepted: its HBM less the margin."""
        return self.hardware.hbm_bytes * (1 - self.margin)


@lru_cache(maxsize=1024)
def with_vocabulary(workload: Workload, vocabulary: tuple[int, ...]) -> Workload:
    """The workload with these choices of its vocabulary layers; itself where they are already so."""
    return workload if vocabulary in ((), workload.vocabulary) else replace(workload, vocabulary=vocabulary)
