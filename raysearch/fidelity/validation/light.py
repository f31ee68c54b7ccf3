"""The bare roofline of a step: all its FLOPs or all its bytes at the peak rates, whichever takes longer."""

from __future__ import annotations

from sim.ops.dims import choices_of
from sim.ops.sizes import Load
from sim.ops.work import op_work
from sim.prices.engine import BARE
from sim.serving.phases import Batching, PacedSteps
from sim.step.attention_expert_meshes import sides_of_strategy
from sim.step.stage import end_of
from sim.step.vocabulary_layers import vocabulary_work
from sim.strategy import Strategy
from sim.workload import Workload


def light_tpot_s(workload: Workload, strategy: Strategy, state: Batching) -> float:
    """Seconds per output token at the bare roofline."""
    return _light_steps(workload, strategy, state).tpot_s if state.decode else 0.0


def light_step_s(workload: Workload, strategy: Strategy, state: Batching) -> float:
    """Mean seconds of a step at the bare roofline."""
    return _light_steps(workload, strategy, state).step_s


def _light_steps(workload: Workload, strategy: Strategy, state: Batching) -> PacedSteps:
    """What the steps come to, without an engine's own time."""
    found = [light_s(workload, strategy, load) for load in state.loads]
    return PacedSteps(state.pace, BARE, found[0], found[-1])


def light_s(workload: Workload, strategy: Strategy, load: Load) -> float:
    """Seconds of one step through all layers and the LM head, from the very kernels that `evaluate` prices."""
    stack, hardware = sides_of_strategy(workload, load, strategy), workload.hardware
    launched = [(kernel, 1) for kernel in vocabulary_work(end_of(stack).attention, "lm_head").kernels]
    for group, sides, choices in zip(workload.model.groups, stack, choices_of(workload, strategy.dims), strict=True):
        for op in sides.experts.layer.ops:
            work = op_work(sides.rank_by_op[op.name], op, choices[op.name])
            launched += [(kernel, group.count) for kernel in work.kernels]
    compute_s = sum(count * kernel.flops / hardware.peak_flop_per_s[kernel.math_dtype] for kernel, count in launched)
    memory_s = sum(count * kernel.traffic_bytes for kernel, count in launched) / hardware.hbm_bandwidth_bytes_per_s
    return max(compute_s, memory_s)
