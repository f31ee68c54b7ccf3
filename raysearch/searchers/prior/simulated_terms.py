"""What is expected of strategies before any answer: by the built-in simulator, or by a network that emulates it.

The simulator's kernels and collectives, op by op, are put into the terms of the roofline, which a belief corrects by a
factor each. Where the roofline has two terms for one kernel, what streams weights and what multiplies them, they share
it in the roofline's proportion; what a message takes beyond its bytes is counted with the launches.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import lru_cache
from typing import Literal, NamedTuple

import numpy as np

from raysearch.searchers.prior.network import Prior, ResidualKernel, StepPrediction
from raysearch.searchers.prior.strategy_features import (
    FEATURE_TERMS,
    LEAST_LOG_SHARE,
    SHARES,
    Features,
    Reals,
    WorkloadFeatures,
)
from sim.batched import Evaluations, Strategies, evaluate_many, step_seconds
from sim.config.catalog import default_hardware, load_calibrated, load_engine
from sim.engines.engine_registry import engine_rules
from sim.optimum.exact_search import find_bests
from sim.optimum.spaces import joint_space, space_of
from sim.step.stage import room
from sim.strategy import Strategy
from sim.workload import Workload, coarse_steps

TermSourceName = Literal["simulator", "carried", "network"]
"""Where terms come from: the simulator as the workload has it; the same as if nobody had measured the machine, see
`carried_over`; the network."""
_ENGINE = "vllm"
"""Whose kernels and times stand for those of an engine that nobody measured."""
_MEASURED = 0.3
"""[assumed] Errors on a machine whose kernels were measured, over those on one that has another's efficiencies: 8 % on
the H100's serving runs, see docs/evidence/fidelity.md, and 20 to 30 % between machines."""
_LIMITS = ResidualKernel(shared=1e-4, terms=0.0, degrees=1e-4, choices=1e-4, length=2.0, ops=5.0, own=0.0)
"""[assumed] Of the simulator's bytes: 2 % out."""
_SURE = 6.0
"""[assumed] Log odds that what breaks a limit of the simulator breaks it there."""
_BROKEN = 1e-3
"""Excess beyond what latencies and memory explain, from which on another limit is broken."""
_MESHES = 16
"""[assumed] Degrees whose best strategies are candidates from the first call on."""
_KERNELS = {
    "qkv_proj": ("attention_weights", "attention_flops"),
    "o_proj": ("attention_weights", "attention_flops"),
    "attention": ("cache", "mixer_flops"),
    "ffn1": ("expert_weights", "dense_weights", "expert_flops"),
    "ffn2": ("expert_weights", "dense_weights", "expert_flops"),
}
"""Terms of an op's kernels; those of all others are launches."""
_EXCHANGES = ("dispatch", "combine")
"""Ops whose collectives send tokens to their experts and back."""


class TermSource(NamedTuple):
    """Where expectations come from.

    Attributes:
        predict: From strategies and their features to these with `SHARES` as expected, and all that is expected.
        time, limits: How its errors of the time go together, and those of the memory.
        dear: Whether asking takes so long that a roofline should choose what it is asked about.
        bests: The best strategies of different degrees, where more is known of them than by asking.
    """

    predict: Callable[[Strategies, Features], tuple[Features, StepPrediction]]
    time: ResidualKernel
    limits: ResidualKernel
    dear: bool
    bests: Callable[[], tuple[Strategy, ...]]


def term_source(name: TermSourceName, prior: Prior, features: WorkloadFeatures) -> TermSource:
    """The source of that name.

    Args:
        name: See `TermSourceName`.
        prior: The network, and how errors go together.
        features: Of the workload.

    Raises:
        InputError: The workload has ops or choices that no network knows.
    """
    header, workload = prior.header, features.workload
    if name == "network":
        features.check_known()
        return TermSource(lambda _, of: prior.predict(of), header.time, header.limits, False, tuple)
    engine, foreign = workload.engine, False
    if name == "carried":
        workload, foreign = carried_over(workload), engine is not None and engine.family != _ENGINE
    curves = workload.hardware.curves
    measured = not foreign and curves is not None and curves.calibration.machine == curves.calibration.measured
    kernel = header.simulated.times(_MEASURED) if measured else header.simulated
    asked = workload
    return TermSource(
        lambda strategies, of: simulated(asked, strategies, of), kernel, _LIMITS, True, lambda: best_of_meshes(asked)
    )


@lru_cache(maxsize=8)
def carried_over(workload: Workload) -> Workload:
    """The workload on a machine of the same rates, and under its engine, as if nobody had measured either.

    Kernels and messages have the efficiencies of the machine that is the default of all questions, the H100; an engine
    has vLLM's kernels and times, and what it documents: its options, memory and scheduler.
    """
    hardware, engine, curves = workload.hardware, workload.engine, workload.hardware.curves
    if curves is None:
        return workload
    header = {part: curves.calibration.data[part] for part in ("machine", "speed_of_light")}
    calibration = load_calibrated(default_hardware()).scaled_to(header)
    curves = curves.under(calibration)
    if engine is not None:
        kernels = engine_rules(_ENGINE).kernels
        curves = curves.under(engine=kernels, all_reduce=kernels if curves.all_reduce == curves.engine else "")
        times = load_engine(_ENGINE, calibration, workload.model, workload.precisions.weights).times
        engine = replace(engine, times=times)
    hardware = replace(hardware, curves=curves)
    return replace(workload, hardware=hardware, engine=engine, config_hash=f"{workload.config_hash}-carried")


@lru_cache(maxsize=8)
def best_of_meshes(workload: Workload) -> tuple[Strategy, ...]:
    """The best strategies of different degrees, exactly: draws crowd around one mesh where another's choices are rare.

    Of few batches, and of the extended space's joint part, which take a second; an engine runs so few choices that
    draws have them all.
    """
    space = joint_space(workload) if workload.space == "extended" else space_of(workload)
    if space.engine is not None:
        return ()
    few = set(coarse_steps(space.batch[-1]))
    batches = tuple(batch for batch in space.batch if batch in few) or space.batch
    return tuple(each.strategy for each in find_bests(replace(space, batch=batches), _MESHES))


def simulated(workload: Workload, strategies: Strategies, features: Features) -> tuple[Features, StepPrediction]:
    """What the simulator expects of [n] strategies, and their features with `SHARES` as it expects them."""
    inputs = features.inputs.copy()
    inputs[:, SHARES] = _shares(workload, strategies, features)
    found = as_prediction(workload, features, evaluate_many(workload, strategies))
    return features._replace(inputs=inputs), found


def as_prediction(workload: Workload, features: Features, evaluated: Evaluations) -> StepPrediction:
    """What the simulator says of [n] strategies, in logs; limits but those of latency and memory are kept or not."""
    step = features.log_tokens - np.log(evaluated.tokens_per_s_per_gpu)
    tpot, ttft = (np.log(np.maximum(each, 1e-9)) for each in (evaluated.tpot_s, evaluated.ttft_s))
    needed, allowed = room(workload, evaluated.memory_bytes, np.zeros(len(evaluated)))
    memory = np.log(needed / allowed)
    known = [np.maximum(tpot - np.log(workload.tpot_limit_s), 0), np.maximum(memory, 0)]
    known.append(np.maximum(ttft - np.log(workload.ttft_limit_s), 0))
    return StepPrediction(step, tpot, ttft, memory, np.where(evaluated.excess - sum(known) > _BROKEN, -_SURE, _SURE))


def _shares(workload: Workload, strategies: Strategies, features: Features) -> Reals:
    """Logs of the shares of `FEATURE_TERMS` in a step's time, `[n, FACTOR_COUNT]`."""
    found = step_seconds(workload, strategies)
    roofline_s = np.exp(features.inputs[:, SHARES] + features.log_step_s[:, None])
    terms = np.zeros(roofline_s.shape)
    launches = FEATURE_TERMS.index("launches")
    terms[:, launches] = found.vocabulary + found.engine
    for op, each_s in found.kernels.items():
        places = [FEATURE_TERMS.index(name) for name in _KERNELS.get(op, ("launches",))]
        parts = roofline_s[:, places]
        terms[:, places] += each_s[:, None] * parts / parts.sum(1, keepdims=True)
    exchanged = sum((found.collectives[op] for op in _EXCHANGES if op in found.collectives), np.zeros(len(terms)))
    others = sum(found.collectives.values(), found.moves) - exchanged
    for name, each_s in (("expert_messages", exchanged), ("tensor_messages", others)):
        place = FEATURE_TERMS.index(name)
        terms[:, place] = np.clip(each_s, 0, roofline_s[:, place])
        terms[:, launches] += np.maximum(each_s - terms[:, place], 0)
    return np.log(np.maximum(terms / terms.sum(1, keepdims=True), np.exp(LEAST_LOG_SHARE)))
