"""The decode layer as data: its fused ops, the tensors between them, and their sizes.

Every tensor is seen on one ep rank as [rows, columns]: rows are tokens (`t`, or `c` once each
token has been copied to its experts), columns are the feature label. The layer repeats, so the
first op reads what the last one left. A layer that is attention alone, or a feed-forward network
alone, has the ops of that part, and leaves the residual stream behind its one residual add.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import Literal

from sim.layers.declared import OpKey, declared_choices
from sim.layers.model import LayerGroup, Model
from sim.strategy import CHOICES, FIRST_DECLARED, GATHERED, GATHERED_TOKENS, GEMM_CHOICES, NONE, TOKENS

OpKind = Literal["norm", "einsum", "attention", "residual_add", "router", "dispatch", "activation", "combine"]


@dataclass(frozen=True, slots=True, eq=False)
class Tensor:
    """A tensor on an edge.

    Attributes:
        letters: One einsum letter per dim, e.g. "td".
        producer: Op that leaves it.
        consumers: Ops that read it, in layer order.
        ends: The producer, then the consumers.
        by_expert: Whether its rows are the tokens' copies for experts.
    """

    name: str
    letters: str
    producer: str
    consumers: tuple[str, ...]
    ends: tuple[str, ...] = field(init=False)
    by_expert: bool = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "ends", (self.producer, *self.consumers))
        object.__setattr__(self, "by_expert", "c" in self.letters)

    def read_by(self, consumers: tuple[str, ...]) -> Tensor:
        """The same tensor where other ops read it."""
        return self if consumers == self.consumers else _read_by(self, consumers)


@lru_cache(maxsize=64)
def _read_by(tensor: Tensor, consumers: tuple[str, ...]) -> Tensor:
    return Tensor(tensor.name, tensor.letters, tensor.producer, consumers)


@dataclass(frozen=True, slots=True, eq=False)
class FusedOp:
    """One fused op of the layer.

    Attributes:
        kind: Which rule of `sim.layers.choices` and which cost of `sim.step.costs` apply.
        labels: The einsum letter that choice 0 and choice 1 shard over the tp axis.
        inputs: Tensors it reads.
        output: Tensor it leaves.
        equation: Einsum over its first input and its weight, if it has one.
    """

    name: str
    kind: OpKind
    labels: tuple[str, str]
    inputs: tuple[str, ...]
    output: str
    equation: str | None = None

    @property
    def key(self) -> OpKey:
        """Under which its declared choices are kept."""
        return self.name, self.kind, self.equation

    @property
    def choices(self) -> tuple[int, ...]:
        """Choices that the op has in the extended space, declared ones behind."""
        return (*(GEMM_CHOICES if self.kind == "einsum" else CHOICES), *declared_choices(self.key))

    def label(self, choice: int) -> str:
        """The einsum letter that a choice shards, "" for none.

        >>> [MOE_LAYER.op("ffn1").label(choice) for choice in GEMM_CHOICES]
        ['d', 'f', '', 'c', 'c', '']
        """
        if choice in (NONE, GATHERED):
            return ""
        if choice >= FIRST_DECLARED:
            return declared_choices(self.key)[choice].label
        if choice in (TOKENS, GATHERED_TOKENS):
            assert self.kind == "einsum"
            assert self.equation is not None
            return self.equation[-2]
        return self.labels[choice]


def gathers_weight(choice: int) -> bool:
    """Whether a choice keeps the op's weight sharded and gathers it at use."""
    return choice in (GATHERED_TOKENS, GATHERED)


@dataclass(frozen=True, slots=True, eq=False)
class Layer:
    """One layer: its ops in the order of `Strategy.dims`, and the tensors they leave."""

    op_by_name: Mapping[str, FusedOp]
    tensor_by_name: Mapping[str, Tensor]

    @property
    def ops(self) -> tuple[FusedOp, ...]:
        """The fused ops in order."""
        return tuple(self.op_by_name.values())

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """The tensors, in the order of the ops that leave them."""
        return tuple(self.tensor_by_name.values())

    @property
    def stream(self) -> Tensor:
        """The residual stream as the layer leaves it, and as a next one like it reads it."""
        return self.tensor_by_name["residual_in"]

    def op(self, name: str) -> FusedOp:
        """The op of that name."""
        return self.op_by_name[name]

    def tensor(self, name: str) -> Tensor:
        """The tensor of that name."""
        return self.tensor_by_name[name]


_ATTENTION = (
    FusedOp("attn_norm", "norm", ("t", "d"), ("residual_in",), "attn_in"),
    FusedOp("qkv_proj", "einsum", ("d", "q"), ("attn_in",), "qkv", "td,dq->tq"),
    FusedOp("attention", "attention", ("t", "h"), ("qkv",), "attn_out"),
    FusedOp("o_proj", "einsum", ("a", "d"), ("attn_out",), "attn_projected", "ta,ad->td"),
    FusedOp("attn_residual", "residual_add", ("t", "d"), ("attn_projected", "residual_in"), "residual_mid"),
)
_FFN_NORM = (FusedOp("ffn_norm", "norm", ("t", "d"), ("residual_mid",), "ffn_in"),)
_EXPERTS = (
    FusedOp("router", "router", ("t", "e"), ("ffn_in",), "routing", "td,de->te"),
    FusedOp("dispatch", "dispatch", ("t", "d"), ("ffn_in", "routing"), "expert_in"),
    FusedOp("ffn1", "einsum", ("d", "f"), ("expert_in",), "ffn_mid", "ecd,edf->ecf"),
    FusedOp("activation", "activation", ("c", "f"), ("ffn_mid",), "ffn_act"),
    FusedOp("ffn2", "einsum", ("f", "d"), ("ffn_act",), "expert_out", "ecf,efd->ecd"),
    FusedOp("combine", "combine", ("t", "d"), ("expert_out", "residual_mid", "routing"), "residual_in"),
)
_DENSE_FFN = (
    FusedOp("ffn1", "einsum", ("d", "f"), ("ffn_in",), "ffn_mid", "td,df->tf"),
    FusedOp("activation", "activation", ("t", "f"), ("ffn_mid",), "ffn_act"),
    FusedOp("ffn2", "einsum", ("f", "d"), ("ffn_act",), "ffn_out", "tf,fd->td"),
    FusedOp("combine", "residual_add", ("t", "d"), ("ffn_out", "residual_mid"), "residual_in"),
)
_LETTERS = {
    "residual_in": "td",
    "attn_in": "td",
    "qkv": "tq",
    "attn_out": "ta",
    "attn_projected": "td",
    "residual_mid": "td",
    "ffn_in": "td",
    "routing": "tk",
    "expert_in": "ecd",
    "ffn_mid": "ecf",
    "ffn_act": "ecf",
    "expert_out": "ecd",
    "ffn_out": "td",
}


def _layer(ops: tuple[FusedOp, ...], letters: Mapping[str, str]) -> Layer:
    tensors = {
        op.output: Tensor(op.output, letters[op.output], op.name, tuple(o.name for o in ops if op.output in o.inputs))
        for op in ops
    }
    return Layer({op.name: op for op in ops}, tensors)


def _alone(ops: tuple[FusedOp, ...]) -> tuple[FusedOp, ...]:
    """The ops of one part of a layer where nothing stands beside it: it reads and leaves the residual stream."""

    def renamed(tensor: str) -> str:
        return "residual_in" if tensor == "residual_mid" else tensor

    return tuple(replace(op, inputs=tuple(map(renamed, op.inputs)), output=renamed(op.output)) for op in ops)


_DENSE_LETTERS = _LETTERS | {"ffn_mid": "tf", "ffn_act": "tf"}
MOE_LAYER = _layer(_ATTENTION + _FFN_NORM + _EXPERTS, _LETTERS)
DENSE_LAYER = _layer(_ATTENTION + _FFN_NORM + _DENSE_FFN, _DENSE_LETTERS)
ATTENTION_ALONE = _layer(_alone(_ATTENTION), _LETTERS)
EXPERTS_ALONE = _layer(_alone(_FFN_NORM + _EXPERTS), _LETTERS)
DENSE_ALONE = _layer(_alone(_FFN_NORM + _DENSE_FFN), _DENSE_LETTERS)


def layer_of(group: LayerGroup) -> Layer:
    """The layer of a group: 12 fused ops for mixture-of-experts, 10 for dense; 5, 7 and 5 of a part alone."""
    if group.feed_forward is None:
        return ATTENTION_ALONE
    if group.attention is None:
        return EXPERTS_ALONE if group.is_moe else DENSE_ALONE
    return MOE_LAYER if group.is_moe else DENSE_LAYER


def layer_ops(model: Model) -> Layer:
    """The layer whose ops a strategy has choices for where groups share them: with experts if any group has them."""
    return MOE_LAYER if model.is_moe else DENSE_LAYER


@lru_cache(maxsize=1024)
def by_expert(op: FusedOp, layer: Layer) -> bool:
    """Whether an op works on the tokens' copies for experts; to the others the ep axis only says how many tokens."""
    return any(layer.tensor(name).by_expert for name in (op.output, *op.inputs))


def op_names(model: Model) -> tuple[str, ...]:
    """Names of the fused ops, in the order of `Strategy.dims` where groups share their choices."""
    return tuple(op.name for op in layer_ops(model).ops)
