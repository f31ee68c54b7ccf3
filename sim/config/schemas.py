"""What a model or workload file may say, in the units people use, and its value in SI units."""

from __future__ import annotations

from typing import Annotated, Any, Literal, cast

from pydantic import AfterValidator, BeforeValidator, Field, field_validator, model_validator

from sim.config.fields import (
    Count,
    Degrees,
    FileSchema,
    LayerCount,
    Limit,
    Name,
    Positive,
    Probability,
    Switch,
    Whole,
    is_nothing,
)
from sim.config.mistakes import REPOSITORY_PATTERN, STAGES_PATTERN, VERSION_PATTERN
from sim.engines.engine_registry import engine_names
from sim.layers import mixers
from sim.layers import model as layers_model
from sim.near_names import did_you_mean
from sim.prices import hardware
from sim.prices.curves import DeepepMode
from sim.prices.dtypes import Dtype
from sim.prices.engine import EngineVersion
from sim.serving.phases import phase_named
from sim.workload import (
    EVEN_ODDS,
    OWN_SPACES,
    BatchGrid,
    DegreeTables,
    ExpertExchange,
    GroupChoices,
    OpenLoop,
    PhaseName,
    Routing,
    ServingTables,
    SpaceName,
)


def _is_auto(value: object) -> bool:
    return value == "auto"


def _is_even(value: object) -> bool:
    return value == EVEN_ODDS


def _is_one(value: object) -> bool:
    return value == 1


def _is_two(value: object) -> bool:
    return value == 2


# What was added later is left out of digests where it is not given, so that older ones stay valid.
MaybeWhole = Annotated[Whole, Field(exclude_if=is_nothing)]


class _LatentAttention(FileSchema):
    query_rank: Whole
    kv_rank: Count
    rope_dim: Count
    value_dim: Count
    output_gate: Switch = False


class _CompressedAttention(FileSchema):
    query_rank: Count
    rope_dim: Count
    window: Count
    output_groups: Count
    output_rank: Count
    ratio: Whole = 0


class _LinearMixer(FileSchema):
    kind: mixers.LinearKind
    heads: Count
    key_heads: Count
    key_dim: Count
    value_dim: Count
    conv_kernel: Count = 4
    full_gate: Switch = False


class _Indexer(FileSchema):
    heads: Whole
    head_dim: Whole
    topk: Count
    block: MaybeWhole = 0


class _LayerFile(FileSchema):
    """The parts of one layer. A group of layers states only what differs from the file's own.

    Attributes:
        value_dim: Width of a value.
        latent_attention: In place of grouped-query attention, multi-head latent attention (DeepSeek V2 and V3).
        compressed_attention: In place of grouped-query attention, attention over compressed keys (DeepSeek V4).
        linear_mixer: In place of attention, a linear mixer: gated delta rule, KDA or Mamba-2.
        shared_experts: Experts that every token visits, each as wide as a routed one.
        expert_latent: Width of the latent space in which routed experts work.
        only: The part that the layers have.
    """

    heads: Count | None = None
    kv_heads: Count | None = None
    head_dim: Count | None = None
    value_dim: Whole | None = None  # head_dim
    window: Whole | None = None  # 0 for none
    chunked: Annotated[bool, Field(strict=True)] | None = None
    sinks: Whole | None = None
    output_gate: Annotated[bool, Field(strict=True)] | None = None
    latent_attention: _LatentAttention | None = None
    compressed_attention: Annotated[_CompressedAttention | None, Field(exclude_if=is_nothing)] = None
    linear_mixer: _LinearMixer | None = None
    indexer: _Indexer | None = None
    ffn_hidden: Count | None = None
    experts: Count | None = None
    experts_per_token: Count | None = None
    gated: Annotated[bool, Field(strict=True)] | None = None
    shared_experts: Whole | None = None
    shared_ffn_hidden: Whole | None = None
    expert_latent: Annotated[Whole | None, Field(exclude_if=is_nothing)] = None
    only: Annotated[Literal["mixer", "feed_forward"] | None, Field(exclude_if=is_nothing)] = None  # both parts

    def attention(self) -> mixers.Attention | None:
        """The layer's mixer; None where it is a feed-forward network alone. Raises: ValueError."""
        return None if self.only == "feed_forward" else self._mixer()

    def feed_forward(self) -> layers_model.FeedForward | None:
        """The layer's feed-forward network or experts; None where it mixes tokens alone. Raises: ValueError."""
        return None if self.only == "mixer" else self._network()

    def _mixer(self) -> mixers.Attention:
        if self.linear_mixer is not None:
            if self.linear_mixer.heads % self.linear_mixer.key_heads:
                fields = f"key_heads ({self.linear_mixer.key_heads}) must divide heads ({self.linear_mixer.heads})"
                raise ValueError(f"linear_mixer: {fields}")
            return mixers.LinearMixer(**self.linear_mixer.model_dump())
        indexer = self._indexer()
        heads, head_dim = _given("heads", self.heads), _given("head_dim", self.head_dim)
        if self.latent_attention is not None:
            return mixers.LatentAttention(heads, head_dim, **self.latent_attention.model_dump(), indexer=indexer)
        if (compressed := self.compressed_attention) is not None:
            if heads % compressed.output_groups:
                raise ValueError(f"output_groups ({compressed.output_groups}) must divide heads ({heads})")
            if compressed.rope_dim > head_dim:
                raise ValueError(f"rope_dim ({compressed.rope_dim}) exceeds head_dim ({head_dim})")
            if indexer and not compressed.ratio:
                raise ValueError("an indexer picks among compressed keys: give ratio, the tokens of each")
            return mixers.CompressedAttention(heads, head_dim, **compressed.model_dump(), indexer=indexer)
        kv_heads = _given("kv_heads", self.kv_heads)
        if heads % kv_heads:
            raise ValueError(f"kv_heads (num_key_value_heads, {kv_heads}) must divide heads ({heads})")
        if self.chunked and not self.window:
            raise ValueError("chunked needs window, the tokens of a chunk")
        return mixers.GroupedAttention(
            heads,
            kv_heads,
            head_dim,
            value_width=self.value_dim or 0,
            window=self.window or 0,
            chunked=bool(self.chunked),
            sinks=self.sinks or 0,
            output_gate=bool(self.output_gate),
            indexer=indexer,
        )

    def _indexer(self) -> mixers.Indexer | None:
        if self.indexer is None:
            return None
        if not self.indexer.heads and (self.indexer.head_dim or self.compressed_attention):
            raise ValueError("indexer: heads = 0 says that an earlier layer's picks are read: head_dim is 0 then, too")
        if self.indexer.heads and not self.indexer.head_dim:
            raise ValueError("indexer: lacks head_dim")
        return mixers.Indexer(**self.indexer.model_dump())

    def _network(self) -> layers_model.FeedForward:
        ffn_hidden, gated = _given("ffn_hidden", self.ffn_hidden), bool(_given("gated", self.gated))
        experts, topk = _given("experts", self.experts), _given("experts_per_token", self.experts_per_token)
        if topk > experts:
            raise ValueError(f"experts_per_token ({topk}) exceeds experts ({experts})")
        if self.shared_experts and self.shared_ffn_hidden:
            raise ValueError("give shared_experts, each as wide as the others, or shared_ffn_hidden, not both")
        shared = self.shared_ffn_hidden or (self.shared_experts or 0) * ffn_hidden
        return layers_model.FeedForward(
            ffn_hidden, experts, topk, gated, shared, (self.expert_latent or 0) if experts > 1 else 0
        )


def _given(key: str, value: int | None) -> int:
    if value is None:
        raise ValueError(f"lacks {key}")
    return value


class _GroupFile(_LayerFile):
    """[[groups]] of a model file: layers that are alike. A group with `experts = 1` is dense."""

    name: Name
    count: Count

    def over(self, common: _LayerFile) -> _LayerFile:
        """The group's layers, with what it leaves out taken from the file's own keys."""
        own = {key: getattr(self, key) for key in _LayerFile.model_fields if getattr(self, key) is not None}
        if own.get("experts") == 1:
            own = {"experts_per_token": 1, "shared_experts": 0, "shared_ffn_hidden": 0} | own
        for alternatives in (
            ("shared_experts", "shared_ffn_hidden"),
            ("latent_attention", "compressed_attention", "linear_mixer"),
        ):
            if any(each in own for each in alternatives):  # a group's own says which of them it is
                own = dict.fromkeys(alternatives) | own
        return common.model_copy(update=own)


Repository = Annotated[str, Field(min_length=1, max_length=200, pattern=REPOSITORY_PATTERN)]
"""Where weights are: on Hugging Face, or a path."""


class _Repositories(FileSchema):
    """[repositories] of a model file: by the format of the weights, the preferred one first.

    Attributes:
        bf16, fp8, fp8_block, mxfp4, nvfp4, int4: Name on Hugging Face, or a path, of the weights in that format.
    """

    bf16: Repository | None = None
    fp8: Repository | None = None
    fp8_block: Repository | None = None
    mxfp4: Repository | None = None
    nvfp4: Repository | None = None
    int4: Repository | None = None


class ModelFile(_LayerFile):
    """configs/models/*.toml: dimensions of a decoder-only transformer.

    Attributes:
        layers: Layers of the decoder.
        context_tokens: Tokens of the longest request, prompt and answer.
    """

    name: Name
    layers: LayerCount
    hidden: Count
    vocab: Count
    expert_dtype: Dtype | None = None
    fp8_weights: Literal["fp8", "fp8_block"] = "fp8"  # the form in which its fp8 weights are published
    tied_embeddings: Annotated[bool, Field(strict=True)] = False
    mtp_layers: Whole = 0
    residual_streams: Annotated[Count, Field(le=64, exclude_if=_is_one)] = 1
    residual_blocks: MaybeWhole = 0
    # These are published beside the dimensions, and in no digest.
    context_tokens: Annotated[Count | None, Field(exclude=True)] = None  # not known
    repositories: Annotated[_Repositories, Field(exclude=True)] = _Repositories()
    fp8_kv_repository: Annotated[Repository | None, Field(exclude=True)] = None
    eagle3_repository: Annotated[Repository | None, Field(exclude=True)] = None
    measured_drafts: Annotated[Literal["mtp", "eagle3"] | None, Field(exclude=True)] = (
        None  # whose acceptance is fitted
    )
    layernorm_sp: Annotated[tuple[Name, ...], Field(exclude=True)] = ()
    simulators: Annotated[
        dict[Name, Repository], Field(default_factory=dict, exclude=True)
    ]  # by another simulator, what it calls it
    own_code: Annotated[bool, Field(strict=True, exclude=True)] = False
    groups: tuple[_GroupFile, ...] = ()  # one, of all layers
    order: tuple[Name, ...] = ()  # names of groups, repeated over the layers; one group after the other

    @model_validator(mode="after")
    def _is_consistent(self) -> ModelFile:
        if sum(group.count for group in self.groups) not in (0, self.layers):
            counts = " + ".join(str(group.count) for group in self.groups)
            raise ValueError(f"the groups have {counts} layers, the model has {self.layers}")
        if repeated := {group.name for group in self.groups if self._named(group.name) > 1}:
            raise ValueError(f"two groups are called {sorted(repeated)[0]!r}")
        groups = self._groups()
        if not all(any(part) for part in ([g.attention for g in groups], [g.feed_forward for g in groups])):
            raise ValueError(
                f"every layer is {self.only or groups[0].name!r} alone; a model has mixers and feed-forward networks"
            )
        self._order()
        return self

    @property
    def usual_weights(self) -> Dtype:
        """Format of the weights unless another is asked for: the maker's fp8, or bf16 where only that is published.

        A model that nobody publishes counts in fp8. Source: the repositories of the files; gpt-oss and Kimi K2 keep all
        but their experts in bf16.
        """
        published = self.repositories.model_dump(exclude_none=True)
        unknown = not (published or self.expert_dtype)
        return self.fp8_weights if unknown or self.fp8_weights in published else "bf16"

    @property
    def usual_kv_cache(self) -> Dtype:
        """Format of the KV cache unless another is asked for: bf16, or fp8 of compressed keys.

        Source: `auto` of vLLM, SGLang and TensorRT-LLM, the format of the activations; DeepSeek V4's own code keeps its
        compressed keys in fp8.
        """
        compressed = any(layer.compressed_attention for layer in (*self.groups, self))
        return "fp8" if compressed else "bf16"

    def _named(self, name: str) -> int:
        return sum(group.name == name for group in self.groups)

    def _groups(self) -> tuple[layers_model.LayerGroup, ...]:
        layers = [(group.name, group.count, group.over(self)) for group in self.groups]
        groups: list[layers_model.LayerGroup] = []
        for name, count, layer in layers or [("layers", self.layers, self)]:
            try:
                groups.append(layers_model.LayerGroup(name, count, layer.attention(), layer.feed_forward()))
            except ValueError as error:
                raise ValueError(f"group {name!r}: {error}" if self.groups else str(error)) from error
        return tuple(groups)

    def _order(self) -> tuple[int, ...]:
        index = {group.name: position for position, group in enumerate(self.groups)}
        if unknown := [name for name in self.order if name not in index]:
            raise ValueError(f"order names {unknown[0]!r}, which is no group (groups: {', '.join(index) or 'none'})")
        if not self.order:
            return ()
        order = [self.order[layer % len(self.order)] for layer in range(self.layers)]
        for group in self.groups:
            if order.count(group.name) != group.count:
                raise ValueError(
                    f"order, repeated over {self.layers} layers, has {order.count(group.name)} of {group.name!r}, "
                    f"whose count is {group.count}"
                )
        return tuple(index[name] for name in order)

    def to_si(self) -> layers_model.Model:
        """The model; nothing in it has a unit."""
        return layers_model.Model(
            name=self.name,
            hidden=self.hidden,
            vocab=self.vocab,
            groups=self._groups(),
            order=self._order(),
            expert_dtype=self.expert_dtype,
            tied_embeddings=self.tied_embeddings,
            mtp_layers=self.mtp_layers,
            residual_streams=self.residual_streams,
            residual_blocks=self.residual_blocks,
            published=layers_model.Published(
                self.context_tokens,
                cast("dict[Dtype, str]", self.repositories.model_dump(exclude_none=True)),
                self.fp8_kv_repository,
                self.eagle3_repository,
                self.measured_drafts,
                self.layernorm_sp,
                self.simulators,
                self.own_code,
            ),
        )


class _PrecisionsTable(FileSchema):
    weights: Dtype
    kv_cache: Literal["bf16", "fp8"]
    activations: Literal["bf16", "fp8"]
    dispatch: Literal["bf16", "fp8"]


def check_space(name: str) -> None:
    """Accepts the name of a strategy space.

    Raises:
        ValueError: There is none of that name.
    """
    known = (*OWN_SPACES, *engine_names())
    if name not in known:
        raise ValueError(f"unknown space {name!r}: {did_you_mean(name, known)}")


MOST_PARTS = 16
"""Most parts of an operator's batch. [assumed] a part of a sixteenth reads its weights sixteen times."""


LARGEST_BATCH = 4096
"""Largest batch of a named list. [assumed] as in the paper's table 1."""


DEEPEST = 64
"""Most searched pipeline stages. [assumed] as in the paper's table 1."""


ANY_DEGREES = ("pp", "ep")
"""Degrees of which every number may be searched."""


def any_degrees(text: str) -> dict[str, str]:
    """Keys of [degrees] for a text such as "pp" or "pp,ep".

    Raises:
        ValueError: Another degree.

    >>> any_degrees("pp,ep")
    {'pp': 'any', 'ep': 'any'}
    """
    names = [name.strip() for name in text.split(",")]
    if unknown := [name for name in names if name not in ANY_DEGREES]:
        raise ValueError(f"expected pp, ep or pp,ep, got {unknown[0]!r}")
    return dict.fromkeys(names, "any")


class _DegreesTable(FileSchema):
    tp: Degrees
    ep: Degrees | Literal["any"]
    pp: Degrees | Literal["any"]
    batch: Degrees | BatchGrid

    def to_si(self, layers: int, experts: int, max_gpus: int) -> DegreeTables:
        """The tables; where any degree will do, every one that layers or experts and the GPUs allow."""
        pp = tuple(range(1, min(layers, max_gpus, DEEPEST) + 1)) if self.pp == "any" else self.pp
        ep = tuple(range(1, min(experts, max_gpus) + 1)) if self.ep == "any" else self.ep
        batch = self.batch
        if batch == "any":
            batch = tuple(range(1, LARGEST_BATCH + 1))
        elif batch == "powers_of_two":
            batch = tuple(1 << power for power in range(LARGEST_BATCH.bit_length()))
        return DegreeTables(self.tp, ep, pp, batch)


MTP, NGRAM, EAGLE3 = "mtp", "ngram", "eagle3"
"""What may draft besides a model: the model's own layers of multi-token prediction, what stands in the text, and a
public EAGLE-3 head."""


class _SpeculationTable(FileSchema):
    """[speculation]: tokens drafted per step, and the share of each that is accepted where those before it are."""

    draft_tokens: Annotated[int, Field(ge=0, le=64, strict=True)]
    acceptance: Probability | None = None  # of every token alike
    accepted: tuple[Probability, ...] | None = None  # or one per place
    draft: str | None = None  # "mtp", "ngram", "eagle3", or a model's name or path; the first that the model has

    @model_validator(mode="after")
    def _says_how_many_hold(self) -> _SpeculationTable:
        if self.acceptance is not None and self.accepted is not None:
            raise ValueError(
                "give acceptance, the share of drafted tokens that are accepted, or accepted, one per position"
            )
        if self.accepted is not None and len(self.accepted) != self.draft_tokens:
            raise ValueError(f"expected {self.draft_tokens} rates, one per drafted token, got {len(self.accepted)}")
        return self

    @property
    def shares(self) -> tuple[float, ...] | None:
        """One per drafted token; None: nobody says."""
        return self.accepted or (None if self.acceptance is None else (self.acceptance,) * self.draft_tokens)


_USUAL_LOOP = OpenLoop()


class _OpenLoopTable(FileSchema):
    """[open_loop]: how requests come in phase traffic, and at which percentile latencies must meet the SLOs.

    Attributes:
        percentile: Percentile of the requests' latencies that must meet the SLOs.
        cv: Standard deviation of the gaps between requests over their mean; 1 is Poisson.
        requests: Requests of each replica that a replay counts.
        seed: Random seed of the arrivals.
    """

    percentile: Annotated[Positive, Field(le=100)] = _USUAL_LOOP.percentile
    cv: Annotated[Positive, Field(le=100)] = _USUAL_LOOP.cv
    requests: Annotated[Count, Field(ge=20, le=1_000_000)] = _USUAL_LOOP.requests
    seed: Annotated[int, Field(ge=0, lt=2**63, strict=True)] = _USUAL_LOOP.seed


def _ascend(values: tuple[int, ...]) -> tuple[int, ...]:
    if not values or tuple(sorted(set(values))) != values:
        raise ValueError(f"expected ascending numbers without repetition, got {list(values)}")
    return values


def _none_of_zero(value: object) -> object:
    return None if value == 0 and type(value) is int else value


_FromZero = Annotated[int, Field(ge=0, le=1_000_000, strict=True)]


class _ServingTable(FileSchema):
    """[serving]: how replicas may serve together in phase traffic; a search chooses one value of each.

    Attributes:
        replicas: Numbers of replicas behind one router; of the decode pool, where there are two.
        chunk_tokens: Prompt tokens per step; 0 takes the workload's.
        prefills: Replicas of a prefill pool; 0 for none.
    """

    replicas: Annotated[tuple[Annotated[Count, Field(le=64)], ...], AfterValidator(_ascend)] = (1,)
    chunk_tokens: Annotated[tuple[_FromZero, ...], AfterValidator(_ascend)] = (0,)
    prefills: Annotated[tuple[Annotated[_FromZero, Field(le=64)], ...], AfterValidator(_ascend)] = (0,)

    def to_si(self) -> ServingTables:
        """The tables as the simulator has them."""
        return ServingTables(self.replicas, self.chunk_tokens, self.prefills)


class EngineVersionFile(FileSchema):
    """configs/engines/*.toml: what a version of an engine does otherwise than the one whose rules are built in.

    Attributes:
        engine: Engine of this version: a name that `raysearch list` shows.
        version: Version as the engine writes it.
        source: Where its rules and figures come from.
        times: Serving runs of a calibration whose times it takes.
    """

    engine: Name
    version: Annotated[str, Field(pattern=VERSION_PATTERN, max_length=64)]
    source: str
    times: str | None = None  # those of the engine
    weights: list[Dtype] | None = None  # those of the built-in rules
    kv_cache: list[Dtype] | None = None  # those of the built-in rules

    def to_si(self) -> EngineVersion:
        """The version as the simulator has it."""
        formats = (tuple(each) if each else None for each in (self.weights, self.kv_cache))
        return EngineVersion(self.version, self.times, *formats)


class WorkloadFile(FileSchema):
    """configs/workloads/*.toml: a model on a machine under an objective, and the degrees to search.

    Attributes:
        kernels: Engine whose measured kernels price the ops.
        declared_choices: Function "module:function" that declares further choices of ops, in the extended space only.
    """

    name: Name
    model: str
    hardware: str
    engine: str | None = None  # the bare machine
    # The one whose rules are built in: left out of digests, as it was before versions could be named.
    engine_version: Annotated[str | None, Field(exclude_if=is_nothing)] = None
    kernels: hardware.EngineName | None = None  # the engine's, or the hardware file's
    all_reduce: hardware.AllReduce | None = None  # the kernels', or the hardware file's
    phase: PhaseName
    context_tokens: Count | None = None  # half way through the answer
    prompt_tokens: Count | None = None
    output_tokens: Count | None = None
    tpot_slo_ms: Limit | None = None  # no limit
    ttft_slo_ms: Limit | None = None  # no limit
    max_gpus: Count
    load_imbalance: Annotated[Positive, Field(ge=1)] = 1.0
    routing: Routing = "balanced"
    redundant_experts: Annotated[int, Field(ge=0, le=4096, strict=True)] = 0
    expert_exchange: ExpertExchange | None = None  # what the engine does; all_to_all on the bare machine
    two_batch_overlap: Switch = False
    fp8_gather: Switch = False
    merge_collectives: Switch = False
    # Pairs of neighbours: left out of digests, as it was before other splits were there.
    tp_inner: Annotated[Literal[2, 4, 8, 16], Field(exclude_if=_is_two)] = 2
    overlap_parts: Annotated[Count, Field(le=MOST_PARTS, exclude_if=_is_one)] = 1  # no overlap
    deepep_mode: Annotated[DeepepMode, Field(exclude_if=_is_auto)] = "auto"
    # Shared out evenly: left out of digests, as it was before layers could be given.
    stage_layers: Annotated[str, Field(pattern=STAGES_PATTERN, max_length=400, strict=True, exclude_if=is_nothing)] = (
        ""  # of each pipeline stage, as in "14,16,16,15"
    )
    chunk_tokens: Annotated[Count | None, BeforeValidator(_none_of_zero)] = None  # whole prompts
    # No prompt waits for those of other attention groups: left out of digests, so that those of older results hold.
    prompt_wait_steps: Annotated[int, Field(ge=0, le=100_000, strict=True, exclude_if=is_nothing)] = 0
    speculation: _SpeculationTable | None = None  # one token per step
    # Poisson, at the 99th percentile: left out of digests, as it was before there was a phase traffic.
    open_loop: Annotated[_OpenLoopTable | None, Field(exclude_if=is_nothing)] = None
    # One replica that does both: left out of digests in the same way.
    serving: Annotated[_ServingTable | None, Field(exclude_if=is_nothing)] = None
    precisions: _PrecisionsTable
    groups: GroupChoices = "shared"
    space: SpaceName = "joint"  # the engine's, where one is named
    declared_choices: str | None = None
    margin: Annotated[float, Field(ge=0, lt=1, strict=True)] = 0.0
    # As predicted: left out of digests, as it was before confidence could be asked for.
    confidence: Annotated[float, Field(ge=0.5, le=0.99, strict=True, exclude_if=_is_even)] = EVEN_ODDS
    degrees: _DegreesTable

    @model_validator(mode="before")
    @classmethod
    def _searches_what_its_engine_runs(cls, content: Any) -> Any:
        if not isinstance(content, dict):
            return content
        table = cast("dict[str, Any]", content)
        engine = str(table.get("engine") or "").partition("<")[0]
        if engine in engine_names() and table.get("space") is None:  # others are refused where they are looked up
            return {**table, "space": engine}
        return table

    @field_validator("phase")
    @classmethod
    def _is_a_phase(cls, name: str) -> str:
        return phase_named(name).name

    @field_validator("space")
    @classmethod
    def _is_a_space(cls, name: str) -> str:
        check_space(name)
        return name

    @model_validator(mode="after")
    def _says_its_traffic(self) -> WorkloadFile:
        if phase_named(self.phase).prefills:
            for key in ("prompt_tokens", "output_tokens"):
                if getattr(self, key) is None:
                    raise ValueError(f"phase {self.phase!r} needs {key}")
            if self.context_tokens is not None:
                raise ValueError(f"context_tokens is of phase 'decode'; phase {self.phase!r} takes it from the prompt")
        elif self.context_tokens is None and (self.prompt_tokens is None or self.output_tokens is None):
            raise ValueError(f"phase {self.phase!r} needs context_tokens, or prompt_tokens and output_tokens")
        return self

    @model_validator(mode="after")
    def _says_how_prompts_meet_in_serve_alone(self) -> WorkloadFile:
        for key in ("chunk_tokens", "prompt_wait_steps"):
            if getattr(self, key) and not phase_named(self.phase).mixes:
                raise ValueError(f"{key} is of phase 'serve', where prompts meet others' tokens: leave it out")
        for key in ("open_loop", "serving"):
            if getattr(self, key) and not phase_named(self.phase).replayed:
                raise ValueError(f"{key} is of phase 'traffic', whose requests come at random: leave it out")
        return self

    @property
    def context(self) -> int:
        """Cached tokens of a decoding sequence, on average."""
        return self.context_tokens or (self.prompt_tokens or 0) + (self.output_tokens or 0) // 2
