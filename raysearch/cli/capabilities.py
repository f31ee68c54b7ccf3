"""What can be done with each shipped machine and model, and what of it was measured."""

from __future__ import annotations

from dataclasses import dataclass

from sim.config.catalog import load_hardware
from sim.config.question import Question
from sim.json_object import JsonObject
from sim.ops.heuristics import megatron_dims
from sim.prices.curves import Curves
from sim.serving.phases import SERVE
from sim.simulate import evaluate
from sim.strategy import Strategy

_DO = ("evaluate", "optimum", "search")
"""What every machine and model can do."""


@dataclass(frozen=True, slots=True)
class MachineFacts:
    """A machine.

    Attributes:
        can: Commands that take it.
        efficiencies: Of kernels: "measured", "carried over from" another machine, or "assumed" throughout.
        serving: The same of engines' own times, which serving runs show.
        interval: Factors on kernels' times beside those of their fit; [1, 1] where they were measured.
        bias: To which side what was carried over probably errs, or "".
        node_gpus, rack_gpus: GPUs of a node, and of a tier between node and network, 0 without one.
        topology: How the GPUs of a node are joined.
        formats: Arithmetic in bf16, and in what is faster.
    """

    can: tuple[str, ...]
    efficiencies: str
    serving: str
    interval: tuple[float, float]
    bias: str
    node_gpus: int
    rack_gpus: int
    topology: str
    formats: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class ModelFacts:
    """A model, on the measured machine.

    Attributes:
        can: Commands that take it.
        parameters, active_parameters: Weights, and those that a token is multiplied with.
        serving_measured_under: Engines under which runs of the model were measured.
        assumed: What no measurement covers when it decodes, with its share of a layer's time.
    """

    can: tuple[str, ...]
    parameters: int
    active_parameters: int
    serving_measured_under: tuple[str, ...]
    assumed: tuple[str, ...]


def machine_facts(name: str) -> MachineFacts:
    """What is known of a shipped machine."""
    hardware = load_hardware(name)
    curves, rates = hardware.curves, hardware.peak_flop_per_s
    kernels = _kernels(curves) if curves else "assumed"
    carried = curves.carried_over if curves and kernels != "measured" else None
    return MachineFacts(
        can=_DO,
        efficiencies=kernels,
        serving=_serving(curves) if curves else "assumed",
        interval=carried.interval if carried else (1.0, 1.0),
        bias=carried.bias if carried else "",
        node_gpus=hardware.node_gpus,
        rack_gpus=hardware.tiers[1],
        topology=hardware.collectives.topology,
        formats=("bf16", *(name for name in ("fp8", "mxfp4", "nvfp4") if rates[name] > rates["bf16"])),
    )


def _kernels(curves: Curves) -> str:
    """On which machine a machine's kernels were measured, all of them or some."""
    if source := curves.calibration.data.get("scaled_from"):
        return f"carried over from {source}"
    families = {series.split("/")[0] for series in curves.calibration.series}
    if not curves.rest or "attention_decode" in families:
        return "measured"
    own = " and ".join(word for family, word in (("gemm", "GEMMs"), ("moe", "experts")) if family in families)
    return f"{own} measured, the rest carried over from {curves.other_machine}"


def _serving(curves: Curves) -> str:
    """Whose serving runs a machine's engine times are fitted to; some are fitted to those of several machines."""
    own, other = curves.calibration.data.get("serving", {}), curves.other_machine
    if not other:
        return "measured" if own else "assumed"
    beside = load_hardware(other).curves
    if beside is not None and own == beside.calibration.data.get("serving", {}):
        return f"carried over from {other}"
    return "measured" if own.get("rows") else "carried over from several machines"


def model_facts(name: str) -> ModelFacts:
    """What is known of a shipped model."""
    workload = Question(model=name, engine="none", phase=SERVE.name, isl=_PROMPT, osl=_ANSWER, gpus=1).load()
    calibration = workload.hardware.curves.calibration if workload.hardware.curves else None
    engines: JsonObject = calibration.data.get("serving", {}).get("engines", {}) if calibration else {}
    found = evaluate(workload, Strategy(1, 1, 1, _BATCH, megatron_dims(workload.model)))
    return ModelFacts(
        can=_DO,
        parameters=workload.model.parameters,
        active_parameters=workload.model.active_parameters,
        serving_measured_under=tuple(sorted(engine for engine in engines if name in engines[engine].get("models", ()))),
        assumed=found.extrapolated,
    )


_PROMPT, _ANSWER, _BATCH = 4096, 512, 32
"""Of the one strategy that shows what of a model was measured: an everyday request. [assumed]"""
