"""One point of the search space: degrees, batch and a sharding choice per fused op."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Choice = Literal[0, 1, 2]
"""What one fused op is sharded over on the tp axis: its dim 0, its dim 1, or nothing."""
NONE: Choice = 2
CHOICES: tuple[Choice, ...] = (0, 1, 2)

TOKENS, GATHERED_TOKENS, GATHERED = 3, 4, 5
"""Choices of the extended space that GEMMs alone have: sharded over tokens with the whole weight on every GPU; the
same with weights that are sharded at rest and gathered at use; replicated, with weights gathered at use."""
FIRST_DECLARED = 6
"""Numbers from here on belong to choices that users declare: see `sim.layers.choices.declare_choice`."""
GRID = tuple(range(16, 24))
"""Choices of the two-dimensional space: both dims of the op, dim 0 over the outer and dim 1 over the inner sub-axis of
tp; or dim 1 over the outer one; a pair for each of `INNER_RANKS`. Declared choices lie below. [assumed] ten of one op
are plenty."""
INNER_RANKS = (2, 4, 8, 16)
"""GPUs of the inner sub-axis, b of tp = a x b. With both orders of the dims, every pair of degrees up to tp = 512."""
MOST_CHOICES = 24
"""All numbers lie below."""


def grid_choices(inner_ranks: int) -> tuple[int, int]:
    """The two choices of both dims over sub-axes, of which the inner one has so many GPUs.

    >>> grid_choices(2), grid_choices(8), inner_ranks_of(21)
    ((16, 17), (20, 21), 8)
    """
    first = GRID[2 * INNER_RANKS.index(inner_ranks)]
    return first, first + 1


def inner_ranks_of(choice: int) -> int:
    """GPUs of the inner sub-axis under a choice of both dims."""
    return INNER_RANKS[(choice - GRID[0]) // 2]


VOCABULARY_OPS: tuple[str, ...] = ("embedding", "lm_head", "sampling")
"""The vocabulary layers: the fused ops before and after the layers, in the order of `Strategy.vocabulary`."""
ENGINES_VOCABULARY: tuple[int, ...] = (0, 1, 1)
"""All three sharded over the vocabulary, as vLLM, SGLang, TensorRT-LLM and Megatron-LM do; `()` stands for it."""


@dataclass(frozen=True, slots=True)
class ReplicaSet:
    """How replicas of a strategy serve traffic together: what phase traffic chooses beside a replica's strategy.

    Attributes:
        replicas: Behind one router; of the decode pool, where there are two.
        chunk_tokens: Prompt tokens of a step at most, where prompts and answers share a pool; 0: as the workload says.
        prefills: Replicas of a pool for prompts alone; 0: there is none.
        prefill: The strategy of one of them.
    """

    replicas: int = 1
    chunk_tokens: int = 0
    prefills: int = 0
    prefill: Strategy | None = None

    def gpus(self, replica_gpus: int) -> int:
        """Of both pools, where a replica of the strategy has so many."""
        return self.replicas * replica_gpus + (self.prefills * self.prefill.gpus if self.prefill else 0)


ONE_REPLICA = ReplicaSet()


@dataclass(frozen=True, slots=True)
class Strategy:
    """One point of the search space.

    Attributes:
        tp: Tensor-parallel degree, >= 1.
        ep: Expert-parallel degree (attention is data-parallel over it), >= 1.
        pp: Pipeline-parallel degree, >= 1.
        batch: Sequences of one in-flight microbatch over the whole ep group, >= 1.
        dims: One `Choice` per fused op of the model, or of each of its groups of layers: see `sim.ops.dims.dims_of`.
        cp: Degree over which the context is cut, and with it each sequence's KV cache.
        dp: Degree over which attention is data-parallel; None for the paper's meaning, that of ep.
        vocabulary: One choice per `VOCABULARY_OPS`; empty for `ENGINES_VOCABULARY`. Of all spaces the generated one
            alone has others.
        served: In phase traffic, how replicas serve together; nothing else about a replica depends on it.

    cp and dp span the extended space: attention lies on a mesh (dp, tp, cp) and the experts on one
    (ep, moe_tp) of the same GPUs, so `moe_tp` follows.
    """

    tp: int
    ep: int
    pp: int
    batch: int
    dims: tuple[int, ...]
    cp: int = 1
    dp: int | None = None
    vocabulary: tuple[int, ...] = ()
    served: ReplicaSet = ONE_REPLICA

    @property
    def attention_dp(self) -> int:
        """Groups of GPUs that share a sequence's attention, whichever way dp was given."""
        return self.ep if self.dp is None else self.dp

    @property
    def stage_gpus(self) -> int:
        """GPUs of one pipeline stage: tp * dp * cp, which is moe_tp * ep."""
        return self.tp * self.attention_dp * self.cp

    @property
    def moe_tp(self) -> int:
        """GPUs that share an expert, rounded up where ep does not divide the stage's GPUs."""
        return -(-self.stage_gpus // self.ep)

    @property
    def gpus(self) -> int:
        """GPUs of one replica: those of a stage times pp."""
        return self.stage_gpus * self.pp

    @property
    def extended(self) -> bool:
        """Whether the degrees lie outside the paper's space, so that attention has a mesh of its own."""
        return self.cp != 1 or self.attention_dp != self.ep
