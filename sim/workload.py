"""What is served, on what, under which objective: everything but the strategy."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from sim.layers.model import Model
from sim.prices.dtypes import Dtype
from sim.prices.hardware import Hardware

SpaceName = Literal["paper", "joint", "extended"]
"""The strategies that a search may choose: see `sim.optimum.spaces`."""


@dataclass(frozen=True, slots=True)
class Precisions:
    """Storage formats. GEMMs run at the peak of `weights`, attention at that of `activations`."""

    weights: Dtype
    kv_cache: Dtype
    activations: Dtype
    dispatch: Dtype


@dataclass(frozen=True, slots=True)
class DegreeTables:
    """The values a search may choose for each degree, ascending."""

    tp: tuple[int, ...]
    ep: tuple[int, ...]
    pp: tuple[int, ...]
    batch: tuple[int, ...]


@dataclass(frozen=True, slots=True, eq=False)
class Workload:
    """A model on a hardware under a service-level objective: everything but the strategy.

    Attributes:
        phase: "decode": one new token per sequence and step, `context_tokens` cached.
        context_tokens: Cached tokens every sequence attends to.
        tpot_slo_s: Longest allowed time per output token.
        max_gpus: Device budget.
        load_imbalance: Tokens of the busiest ep rank over the mean, >= 1.
        degrees: The searched degree tables.
        config_hash: Digest of everything above, of the model and of the hardware.
        space: Which strategies a search may choose; see `sim.optimum.spaces`.
        margin: Share of the SLO and of the memory that is kept free, in [0, 1).
    """

    name: str
    model: Model
    hardware: Hardware
    phase: Literal["decode"]
    context_tokens: int
    tpot_slo_s: float
    max_gpus: int
    precisions: Precisions
    load_imbalance: float
    degrees: DegreeTables
    config_hash: str
    space: SpaceName = "joint"
    margin: float = 0.0

    @property
    def tpot_limit_s(self) -> float:
        """Longest time per output token that is accepted: the SLO less the margin."""
        return self.tpot_slo_s * (1 - self.margin)

    @property
    def hbm_limit_bytes(self) -> float:
        """Most memory of a GPU that is accepted: its HBM less the margin."""
        return self.hardware.hbm_bytes * (1 - self.margin)
