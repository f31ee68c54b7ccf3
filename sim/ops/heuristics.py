"""Sharding choices that today's systems make by rule; each op of `sim.ops.layers` has its own."""

from __future__ import annotations

from sim.layers.model import Model
from sim.ops.layers import layer_ops

MEGATRON_NOTE = (
    "Megatron-LM refuses experts with tensor parallelism and without sequence parallelism (redundant copies of "
    "tokens): its sharding without it is the paper's baseline, that with it is the one that runs."
)
"""What to say beside any figure of Megatron-LM's sharding of a mixture of experts.

Source: Megatron-Core, `model_parallel_config.py`: "When using expert parallelism and tensor parallelism, sequence
parallelism must be used".
"""


def megatron_dims(model: Model) -> tuple[int, ...]:
    """Megatron-LM's choice per fused op: two all-reduces per layer on the tp axis."""
    return tuple(op.megatron.plain for op in layer_ops(model).ops)


def megatron_sp_dims(model: Model) -> tuple[int, ...]:
    """The same with sequence parallelism: two all-gathers and two reduce-scatters per layer."""
    return tuple(op.megatron.sequence_parallel for op in layer_ops(model).ops)
