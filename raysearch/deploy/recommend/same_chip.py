"""What another machine of the same chip says of a strategy where its serving runs know the model and ours do not."""

from __future__ import annotations

from dataclasses import dataclass, replace

from raysearch.deploy.recommend.demand import Demand
from sim.config.catalog import list_names, load_hardware
from sim.evaluation import Evaluation
from sim.prices.hardware import Hardware
from sim.simulate import evaluate

_APART = 1.1
"""Ratio of two throughputs above which both are stated. [assumed]"""


@dataclass(frozen=True)
class SameChip:
    """A strategy on a machine whose chip computes as fast.

    Attributes:
        machine: Its name.
        evaluation: Of the same strategy there.
    """

    machine: str
    evaluation: Evaluation


def where_measured(demand: Demand, best: Evaluation) -> SameChip | None:
    """The strategy where its model was measured; None where it was here, or the machines are of one mind."""
    question, workload = demand.question, demand.workload
    engine = workload.engine
    if not best.interval_because or engine is None or question is None or not question.model:
        return None
    own = workload.hardware
    for name in list_names("hardware"):
        other = load_hardware(name)
        if (
            other.name == own.name
            or _chip(other) != _chip(own)
            or not _knows(other, engine.family, workload.model.name)
        ):
            continue
        there = replace(replace(question, hardware=name).load(), chunk_tokens=workload.chunk_tokens)
        found = evaluate(there, best.strategy)
        ratio = best.tokens_per_s_per_gpu / found.tokens_per_s_per_gpu
        return SameChip(name, found) if max(ratio, 1 / ratio) > _APART else None
    return None


def _chip(hardware: Hardware) -> tuple[object, ...]:
    return hardware.vendor, tuple(sorted(hardware.peak_flop_per_s.items()))


def _knows(hardware: Hardware, engine: str, model: str) -> bool:
    """Whether serving runs of a machine's own are of a model under an engine."""
    serving = hardware.curves.calibration.data.get("serving", {}) if hardware.curves else {}
    return model in serving.get("engines", {}).get(engine, {}).get("models", ())
