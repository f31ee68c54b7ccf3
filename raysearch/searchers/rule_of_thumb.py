"""What an engineer would try first."""

from __future__ import annotations

import numpy as np

from envs.space import StrategySpace
from raysearch.searchers.prior.candidate_strategies import CandidateStrategies
from sim.prices.dtypes import DTYPE_BYTES
from sim.strategy import Strategy

_WEIGHTS_SHARE = 0.6
"""[assumed] Of the memory, for weights: the rest is for caches."""
_WIDEST_EXPERTS = 64
"""[assumed] GPUs over which experts are spread; wider is for those who have measured it."""
_BATCHES_PER_GPU = (32, 64, 16, 128, 8)
"""[assumed] Sequences: what one tries first, more for throughput, fewer where that is too slow."""


def rule_of_thumb(space: StrategySpace, count: int = 20) -> list[Strategy]:
    """What an engineer would try who has a roofline in mind and nothing measured.

    Megatron-LM's sharding; a pipeline only where weights would not fit; tensor parallelism within a node, wide to
    narrow; experts over as few GPUs as hold them, and over many; batches of so many sequences per GPU.

    >>> from sim.config.catalog import load_workload
    >>> rule_of_thumb(StrategySpace(load_workload("llama_3_1_405b_8k")), 1)[0].tp
    8
    """
    workload, candidates = space.workload, CandidateStrategies(space, ())
    bases = candidates.bases
    values = space.strategies(bases)
    gpus = values.tp * values.cp * values.dp * values.pp
    weights_bytes = workload.model.parameters * DTYPE_BYTES[workload.precisions.weights] / gpus
    good = (values.tp <= workload.hardware.node_gpus) & (values.cp == 1) & (values.ep <= _WIDEST_EXPERTS)
    good &= weights_bytes <= _WEIGHTS_SHARE * workload.hbm_limit_bytes
    if not good.any():
        good |= weights_bytes <= weights_bytes.min()
    bases, gpus, tp, pp = bases[good], gpus[good], values.tp[good], values.pp[good]
    shortest = pp == pp.min()
    bases, gpus, tp = bases[shortest], gpus[shortest], tp[shortest]
    meshes = [
        bases[rows[pick]]
        for width in np.unique(tp)[::-1]
        for rows in [np.flatnonzero(tp == width)[np.argsort(gpus[tp == width], kind="stable")]]
        for pick in (0, -1)
    ]
    batches = np.array(space.coordinates[candidates.batch].values)
    counted = space.strategies(np.array(meshes))
    gpus = counted.tp * counted.cp * counted.dp * counted.pp
    found: list[Strategy] = []
    for each in _BATCHES_PER_GPU:
        for mesh, wanted in zip(meshes, each * gpus, strict=True):
            tried = mesh.copy()
            tried[candidates.batch] = np.abs(np.log2(batches) - np.log2(wanted)).argmin()
            found.append(space.decode(space.folded(tried)))
    return list(dict.fromkeys(found))[:count]
