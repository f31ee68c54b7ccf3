"""Sharding choices that today's systems make by rule.

Source: Shoeybi et al., Megatron-LM (2019), section 3: column-parallel then row-parallel GEMMs, one
all-reduce after each pair; Korthikanti et al. (2022), section 4.2.2: sequence parallelism, which
keeps norms and residuals sharded over tokens and splits each all-reduce into an all-gather and a
reduce-scatter.
"""

from __future__ import annotations

from sim.layers.model import Model
from sim.layers.ops import op_names
from sim.strategy import NONE

MEGATRON_NOTE = (
    "Megatron-LM refuses experts with tensor parallelism and without sequence parallelism (redundant copies of "
    "tokens): its sharding without it is the paper's baseline, that with it is the one that runs."
)
"""What to say beside any figure of Megatron-LM's sharding of a mixture of experts.

Source: Megatron-Core, `model_parallel_config.py`: "When using expert parallelism and tensor parallelism, sequence
parallelism must be used".
"""

_MEGATRON = {"qkv_proj": 1, "attention": 1, "o_proj": 0, "ffn1": 1, "activation": 1, "ffn2": 0}
_ALONG_TOKENS = ("attn_norm", "attn_residual", "ffn_norm", "router", "dispatch", "combine")


def megatron_choice(op: str, *, sequence_parallel: bool) -> int:
    """Megatron-LM's choice for a fused op, by its name."""
    if sequence_parallel and op in _ALONG_TOKENS:
        return 0
    return _MEGATRON.get(op, NONE)


def megatron_dims(model: Model) -> tuple[int, ...]:
    """Megatron-LM's choice per fused op: two all-reduces per layer on the tp axis."""
    return tuple(megatron_choice(name, sequence_parallel=False) for name in op_names(model))


def megatron_sp_dims(model: Model) -> tuple[int, ...]:
    """The same with sequence parallelism: two all-gathers and two reduce-scatters per layer."""
    return tuple(megatron_choice(name, sequence_parallel=True) for name in op_names(model))
