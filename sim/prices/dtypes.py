"""Number formats: the one table of what each is."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal, NamedTuple

Dtype = Literal["bf16", "fp8", "fp8_block", "mxfp4", "nvfp4", "int4"]
"""fp8 has one scale per tensor, fp8_block one per 128 x 128 block of weights, mxfp4 one per 32 weights, nvfp4 one per
16, int4 one per 32 to 128."""
Arithmetic = Literal["bf16", "fp8", "fp4"]
"""Formats that tensor cores multiply, each with a peak of its own; not every machine has fp8 and fp4."""


class Format(NamedTuple):
    """A number format.

    Attributes:
        bytes_each: Bytes per element; scales count where they are more than a hundredth.
        arithmetic: Format of the arithmetic on it, whose peak and efficiency hold.
        narrow: The same on machines that multiply fp4, if another.
    """

    bytes_each: float
    arithmetic: Arithmetic
    narrow: Arithmetic | None = None

    def peak(self, tflops: Mapping[str, float]) -> float:
        """The peak of a machine whose rates are called bf16_tflops, fp8_tflops and, if it has it, fp4_tflops."""
        arithmetic = self.narrow if self.narrow and "fp4_tflops" in tflops else self.arithmetic
        return tflops[f"{arithmetic}_tflops"]


FORMATS: Mapping[Dtype, Format] = {
    "bf16": Format(2, "bf16"),
    "fp8": Format(1, "fp8"),
    "fp8_block": Format(1, "fp8"),
    # [spec] OCP MX: 4 bits and a shared 8-bit scale per 32. Weights alone: multiplied in bf16, or with fp8 activations.
    "mxfp4": Format(4.25 / 8, "bf16", "fp8"),
    "nvfp4": Format(4.5 / 8, "bf16", "fp4"),  # [published] NVIDIA: 4 bits and an 8-bit scale per 16
    "int4": Format(4.25 / 8, "bf16"),  # [assumed] a 16-bit scale per 64: published checkpoints have one per 32 or 128
}
DTYPE_BYTES: Mapping[Dtype, float] = {dtype: form.bytes_each for dtype, form in FORMATS.items()}
ARITHMETIC: tuple[Arithmetic, ...] = ("bf16", "fp8")
"""Of which every machine's efficiency is known."""


BYTES: Mapping[str, float] = {str(dtype): form.bytes_each for dtype, form in FORMATS.items()}
"""Bytes per element of a format by its name in a calibration."""
