"""Number formats: one table of what each is, in bytes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

Dtype = Literal["bf16", "fp8", "fp8_block"]
"""fp8 has one scale per tensor, fp8_block one per 128 x 128 block of weights (for weights alone)."""
DTYPE_BYTES: Mapping[Dtype, int] = {"bf16": 2, "fp8": 1, "fp8_block": 1}
