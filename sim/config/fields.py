"""The kinds of value that configuration files hold, and what every file shares."""

from __future__ import annotations

import math
from typing import Annotated, TypeVar

from pydantic import AfterValidator, BaseModel, ConfigDict, Field

from sim.config.mistakes import FILE_NAME_PATTERN
from sim.prices.dtypes import Dtype

_SMALLEST = 1e-6


def _finite(value: float) -> float:
    if not math.isfinite(value):
        raise ValueError(f"expected a finite number, got {value}")
    return value


def _none_or_positive(value: float) -> float:
    if 0 < value < _SMALLEST:
        raise ValueError(f"expected 0 for no limit, or at least {_SMALLEST}, got {value}")
    return value


Numeric = TypeVar("Numeric", int, float)


def ascending(values: tuple[Numeric, ...]) -> tuple[Numeric, ...]:
    """The values, if they ascend without repeats. Raises: ValueError."""
    if sorted(set(values)) != list(values):
        raise ValueError("expected ascending values without repeats")
    return values


# Strict: a quoted figure or a boolean is a mistake, not a number.
Positive = Annotated[float, Field(ge=_SMALLEST, strict=True), AfterValidator(_finite)]
NonNegative = Annotated[float, Field(ge=0, strict=True), AfterValidator(_finite)]
Limit = Annotated[NonNegative, AfterValidator(_none_or_positive)]
"""0 for none."""
Probability = Annotated[float, Field(ge=0, le=1, strict=True)]
Share = Annotated[float, Field(gt=0, le=1, strict=True)]


def is_nothing(value: object) -> bool:
    """Whether a value is that of a key left out, which then stays out of digests."""
    return not value


Switch = Annotated[bool, Field(strict=True, exclude_if=is_nothing)]
LARGEST_FIELD = 10**9
"""Largest number of anything that is counted. [assumed]"""
MOST_LAYERS = 4096
"""Most layers of a model, which are priced one by one. [assumed] Thirty times those of the deepest published one."""
Count = Annotated[int, Field(ge=1, le=LARGEST_FIELD, strict=True)]
Whole = Annotated[int, Field(ge=0, le=LARGEST_FIELD, strict=True)]
LayerCount = Annotated[int, Field(ge=1, le=MOST_LAYERS, strict=True)]
Microseconds = Annotated[NonNegative, Field(lt=1e6)]
GigabytesPerSecond = Annotated[Positive, Field(lt=1e6)]
Degrees = Annotated[tuple[Count, ...], Field(min_length=1), AfterValidator(ascending)]
Name = Annotated[str, Field(pattern=FILE_NAME_PATTERN, max_length=100)]
ByDtype = dict[Dtype, Share]


class FileSchema(BaseModel):
    """What every configuration file shares: unknown keys are refused."""

    model_config = ConfigDict(extra="forbid", frozen=True, defer_build=True)  # a command reads few kinds of files
