"""One accelerator as its kernels see it: the rates and counts that a calibration's terms are made of."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from sim.json_object import JsonFields
from sim.prices.dtypes import FORMATS


class Machine(NamedTuple):
    """Peak rates, and where parallel work and caches end.

    Attributes:
        flop_per_us: Tensor cores' peak, by format of the weights.
        hbm_bytes_per_us: Peak of the memory.
        nvlink_bytes_per_us, network_bytes_per_us: Peak per direction of the links inside a node and between nodes.
        sms: Streaming multiprocessors: tiles that run at once.
        l2_mb: Second-level cache.
        node_gpus: GPUs of a node.
        host_gpus: Of a host, among which expert all-to-alls are measured; less than a node where links join several.
    """

    flop_per_us: Mapping[str, float]
    hbm_bytes_per_us: float
    nvlink_bytes_per_us: float
    network_bytes_per_us: float
    sms: int
    l2_mb: float
    node_gpus: int
    host_gpus: int


def machine_of(header: JsonFields) -> Machine:
    """The machine of a calibration: its keys `speed_of_light` and `machine`."""
    light, counts = header["speed_of_light"], header["machine"]
    return Machine(
        flop_per_us={dtype: form.peak(light) * 1e6 for dtype, form in FORMATS.items()},
        hbm_bytes_per_us=light["hbm_gb_per_s"] * 1e3,
        nvlink_bytes_per_us=light["nvlink_gb_per_s"] * 1e3,
        network_bytes_per_us=light["network_gb_per_s"] * 1e3,
        sms=counts["sms"],
        l2_mb=counts["l2_mb"],
        node_gpus=counts["node_gpus"],
        host_gpus=counts.get("host_gpus", counts["node_gpus"]),
    )
