"""Number formats: the one table of what each is."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal, NamedTuple, get_args

Dtype = Literal["bf16", "fp8", "fp8_block", "mxfp4"]
"""fp8 has one scale per tensor, fp8_block one per 128 x 128 block of weights, mxfp4 one per 32 weights."""
Arithmetic = Literal["bf16", "fp8"]
"""Formats that tensor cores multiply, each with a peak of its own."""


class Format(NamedTuple):
    """A number format.

    Attributes:
        bytes_each: Bytes per element; scales count where they are more than a hundredth.
        arithmetic: Format of the arithmetic on it, whose peak and efficiency hold.
    """

    bytes_each: float
    arithmetic: Arithmetic


FORMATS: Mapping[Dtype, Format] = {
    "bf16": Format(2, "bf16"),
    "fp8": Format(1, "fp8"),
    "fp8_block": Format(1, "fp8"),
    "mxfp4": Format(4.25 / 8, "bf16"),  # [spec] OCP MX: 4 bits and a shared 8-bit scale per 32; multiplied in bf16
}
DTYPE_BYTES: Mapping[Dtype, float] = {dtype: form.bytes_each for dtype, form in FORMATS.items()}
ARITHMETIC: tuple[Arithmetic, ...] = get_args(Arithmetic)


def bytes_each(dtype: str) -> float:
    """Bytes per element of a format by its name in a calibration. Raises: KeyError."""
    return _BYTES[dtype]


_BYTES: Mapping[str, float] = {str(dtype): form.bytes_each for dtype, form in FORMATS.items()}
