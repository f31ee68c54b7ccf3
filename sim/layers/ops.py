"""What a layer is made of: fused ops, and the tensors between them. `sim.ops.layers` has those of transformers.

Every tensor is seen on one ep rank as [rows, columns]: rows are tokens (`t`, or `c` once each
token has been copied to its experts), columns are the feature label. The layer repeats, so the
first op reads what the last one left.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import Any, Literal, NamedTuple

from sim.layers.declared import OpKey, declared_choices
from sim.layers.model import LayerGroup
from sim.sharding.placement import Shard
from sim.sharding.rules import Operation, rules_of
from sim.strategy import CHOICES, FIRST_DECLARED, GATHERED, GATHERED_TOKENS, GRID, NONE, TOKENS

Side = Literal["attention", "experts"]
"""The mesh whose group shares an op: attention's, or that of the experts or of the one feed-forward network."""
OpWork = Callable[[Any, Any, str], Any]
"""From a `sim.ops.rank.Rank`, the op and the letter that it shards to its `sim.ops.rank.Work`."""


class Megatron(NamedTuple):
    """Megatron-LM's choice for an op.

    Attributes:
        plain: Without sequence parallelism.
        sequence_parallel: With it.
    """

    plain: int
    sequence_parallel: int


class Storage(NamedTuple):
    """How an op leaves its output, where that is not activations of the last letter's width.

    Attributes:
        columns: Of it all, in such layers; None for the letter's.
        dispatched: Whether in the format that tokens are dispatched in.
        each_bytes: Bytes per element, where it has no format.
    """

    columns: Callable[[LayerGroup], int] | None = None
    dispatched: bool = False
    each_bytes: float | None = None


PLAIN = Storage()


@dataclass(frozen=True, slots=True, eq=False)
class Tensor:
    """A tensor on an edge.

    Attributes:
        letters: One einsum letter per dim, e.g. "td".
        storage: Its width and format.
        producer: Op that leaves it.
        consumers: Ops that read it, in layer order.
        ops: The producer, then the consumers.
        by_expert: Whether its rows are the tokens' copies for experts.
    """

    name: str
    letters: str
    storage: Storage
    producer: str
    consumers: tuple[str, ...]
    ops: tuple[str, ...] = field(init=False)
    by_expert: bool = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "ops", (self.producer, *self.consumers))
        object.__setattr__(self, "by_expert", "c" in self.letters)

    def read_by(self, consumers: tuple[str, ...]) -> Tensor:
        """The same tensor where other ops read it."""
        return self if consumers == self.consumers else _read_by(self, consumers)


@lru_cache(maxsize=64)
def _read_by(tensor: Tensor, consumers: tuple[str, ...]) -> Tensor:
    return replace(tensor, consumers=consumers)


@dataclass(frozen=True, slots=True, eq=False)
class FusedOp:
    """One fused op of a layer, with all that is known of it: whoever works on ops asks here and names none.

    Attributes:
        kind: Ops that compute the same are of one kind.
        side: On whose mesh it lies.
        labels: The einsum letter that choice 0 and choice 1 shard over the side's group.
        inputs: Tensors it reads.
        output: Tensor it leaves.
        letters: One einsum letter per dim of that tensor, the last one's width that of a feature.
        operation: Its numbers, from the inputs and then the weight; the rules of the operation's kind are the op's.
        work: What it costs on one GPU: kernels, collectives of its own and bytes.
        megatron: Heuristic choices.
        weighted: Whether the operation's last operand is a weight of the op's own.
        storage: Of the tensor it leaves.
        unsupported: Whether a GPU cannot run it sharded over a letter, though the operation could.
    """

    name: str
    kind: str
    side: Side
    labels: tuple[str, str]
    inputs: tuple[str, ...]
    output: str
    letters: str
    operation: Operation
    work: OpWork
    megatron: Megatron
    weighted: bool = False
    storage: Storage = PLAIN
    unsupported: Callable[[Any, str], bool] | None = None

    @property
    def equation(self) -> str | None:
        """Its einsum over inputs and weight, if it has a weight."""
        return self.operation.equation if self.weighted else None

    @property
    def key(self) -> OpKey:
        """Under which its declared choices are kept."""
        return self.name, self.kind, self.equation

    @property
    def choices(self) -> tuple[int, ...]:
        """Choices that the op's proven rules allow, declared ones behind: see `choices_by_rule`."""
        return (*choices_by_rule(self), *declared_choices(self.key))

    @lru_cache(maxsize=4096)  # noqa: B019 ops live as long as the process
    def label(self, choice: int) -> str:
        """The einsum letter that a choice shards, "" for none; two over two sub-axes, the outer one's first.

        >>> from sim.ops.layers import MOE_LAYER
        >>> [MOE_LAYER.op("ffn1").label(choice) for choice in MOE_LAYER.op("ffn1").choices]
        ['d', 'f', '', 'c', 'c', '']
        """
        if choice in (NONE, GATHERED):
            return ""
        if choice in GRID:
            return "".join(self.labels if choice % 2 == 0 else reversed(self.labels))
        if choice >= FIRST_DECLARED:
            return declared_choices(self.key)[choice].label
        if choice in (TOKENS, GATHERED_TOKENS):
            return rows_of(self)
        return self.labels[choice]


@lru_cache(maxsize=256)
def choices_by_rule(op: FusedOp) -> tuple[int, ...]:
    """The numbers of the registered rules that run the op in plain chunks, in the order in which rules are found.

    0 and 1 shard the op's two letters, 2 nothing. Then, where its operation has such rules: 3 shards the rows, if
    neither letter does; 4 and 5 do the same as 3 and 2 with a weight that rests in shards and is gathered at use.

    Raises:
        ValueError: No rule shards one of the op's two letters.
    """
    rules = rules_of(op.operation, (Shard(0),))
    sharded = {rule.label for rule in rules}
    if lacking := [label for label in op.labels if label not in sharded]:
        raise ValueError(f"no rule of {op.name} shards {lacking[0]!r}; its rules shard {', '.join(sorted(sharded))}")
    by_rows = rows_of(op) in sharded - {*op.labels, ""}
    gathered = op.weighted and any(rule.run and not rule.label for rule in rules)
    more = {TOKENS: by_rows, GATHERED_TOKENS: by_rows and gathered, GATHERED: gathered}
    return (*CHOICES, *(choice for choice, proven in more.items() if proven))


def rows_of(op: FusedOp) -> str:
    """The letter of the rows of what an op leaves: tokens, or their copies for experts."""
    return op.letters[-2:-1]


def gathers_weight(choice: int) -> bool:
    """Whether a choice keeps the op's weight sharded and gathers it at use."""
    return choice in (GATHERED_TOKENS, GATHERED)


@dataclass(frozen=True, slots=True, eq=False)
class Layer:
    """One layer: its ops in the order of `Strategy.dims`, and the tensors they leave.

    Attributes:
        stream: The residual stream as the layer leaves it, and as a next one like it reads it.
    """

    op_by_name: Mapping[str, FusedOp]
    tensor_by_name: Mapping[str, Tensor]
    ops: tuple[FusedOp, ...] = field(init=False)
    tensors: tuple[Tensor, ...] = field(init=False)
    stream: Tensor = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "ops", tuple(self.op_by_name.values()))
        object.__setattr__(self, "tensors", tuple(self.tensor_by_name.values()))
        object.__setattr__(self, "stream", self.tensor_by_name["residual_in"])

    def op(self, name: str) -> FusedOp:
        """The op of that name."""
        return self.op_by_name[name]

    def tensor(self, name: str) -> Tensor:
        """The tensor of that name."""
        return self.tensor_by_name[name]


@lru_cache(maxsize=256)
def crossing_tensors(layer: Layer) -> tuple[Tensor, ...]:
    """What moves between the sides of a layer, or from a layer to the next one.

    >>> from sim.ops.layers import MOE_LAYER
    >>> [tensor.name for tensor in crossing_tensors(MOE_LAYER)]
    ['residual_mid', 'residual_in']
    """
    sides = {tensor: {layer.op(name).side for name in tensor.ops} for tensor in layer.tensors}
    return tuple(tensor for tensor in layer.tensors if tensor is layer.stream or len(sides[tensor]) > 1)


def layer_from(ops: Sequence[FusedOp]) -> Layer:
    """The layer of some ops in order, the same one for the same ops: what is known of a layer is kept by it."""
    return _layer(tuple(ops))


@lru_cache(maxsize=256)
def _layer(ops: tuple[FusedOp, ...]) -> Layer:
    tensors = {
        op.output: Tensor(
            op.output, op.letters, op.storage, op.name, tuple(o.name for o in ops if op.output in o.inputs)
        )
        for op in ops
    }
    return Layer({op.name: op for op in ops}, tensors)


@lru_cache(maxsize=1024)
def by_expert(op: FusedOp, layer: Layer) -> bool:
    """Whether an op works on the tokens' copies for experts; to the others the ep axis only says how many tokens."""
    return any(layer.tensor(name).by_expert for name in (op.output, *op.inputs))
