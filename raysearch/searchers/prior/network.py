"""The network that knows other workloads, in numpy, and the file that it comes in.

Of a step's time it corrects each of the roofline's terms by a factor, so what it learned of a model's weights, of links
or of launches holds in whatever proportion they meet.

The file holds arrays and text alone (safetensors): nothing in it can run code. Its header says what made it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Annotated, NamedTuple, final

import numpy as np
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from raysearch.base.errors import InputError
from raysearch.base.file_io import write_bytes
from raysearch.searchers.prior.strategy_features import FEATURE_TERMS, LEAST_LOG_SHARE, SHARES, Features, Reals
from sim.config.mistakes import first_error_text
from sim.config.reading import parse_object, read_bytes
from sim.json_object import JsonFields

SHIPPED_PRIOR = Path(__file__).with_name("prior.safetensors")
"""The prior that comes with the package."""
PRIOR_FORMAT = "raysearch prior 4"
_LARGEST_BYTES = 20_000_000
_LARGEST_WEIGHT, _LARGEST_LOG = 1e6, 100.0
"""[assumed] Far beyond any of a trained network, and such that numbers made of them stay finite."""
FACTOR_COUNT = len(FEATURE_TERMS)
OUTPUTS = FACTOR_COUNT + 4
"""Of the network: logs of the factors of a step's terms; corrections of the logs of a token's time over a step's, of
the first token's time and of memory; log odds that no limit of the choices is broken."""
_BLOCK = 4096
"""Strategies that go through the network together."""


class StepPrediction(NamedTuple):
    """Of [n] strategies, before any call.

    Attributes:
        log_step_s: Log seconds of a step: tokens/s/GPU are `log_tokens` less this.
        log_tpot_s, log_ttft_s: Of the latencies.
        log_memory: Of needed over allowed bytes.
        kept: Log odds that no limit of the choices is broken.
    """

    log_step_s: Reals
    log_tpot_s: Reals
    log_ttft_s: Reals
    log_memory: Reals
    kept: Reals


_VARIANCES = ("shared", "terms", "degrees", "choices", "own")
_Variance = Annotated[float, Field(ge=0, le=1e3)]
_Distance = Annotated[float, Field(ge=1e-3, le=1e3)]


class ResidualKernel(BaseModel):
    """How errors of what is expected go together, as fitted on workloads that nothing was trained on.

    Attributes:
        shared: Variance that all strategies of a workload share.
        terms: Of what goes with the shares of a step's time.
        degrees: Of what strategies of near degrees share.
        choices: The same of those whose ops are also sharded alike.
        length: Doublings over which degrees go apart.
        ops: Ops, differently sharded, over which choices go apart.
        own: Of each strategy's own.
    """

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)

    shared: _Variance
    terms: _Variance
    degrees: _Variance
    choices: _Variance
    length: _Distance
    ops: _Distance
    own: _Variance

    def times(self, factor: float) -> ResidualKernel:
        """The same of errors that are so many times as large."""
        variances = {name: getattr(self, name) * factor**2 for name in _VARIANCES}
        return self.model_copy(update=variances)


class PriorHeader(BaseModel):
    """What a file says of itself.

    Attributes:
        format: Of the file.
        command: That made it.
        data: What it was trained on, the configuration's own words.
        figures: How far it errs on workloads kept from training.
        pool: Choices by op that were best on workloads of the training, the most frequent first.
        time, limits: How errors of the time go together, and those of the memory.
        simulated: How the simulator's errors of the time do, on machines that nobody measured.
    """

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)

    format: str
    command: str
    data: dict[str, object]
    figures: dict[str, float]
    pool: list[dict[str, int]]
    time: ResidualKernel
    limits: ResidualKernel
    simulated: ResidualKernel


@final
@dataclass(frozen=True, eq=False)
class Prior:
    """A trained network and what its file says.

    Attributes:
        header: See `PriorHeader`.
        arrays: `mean` and `scale` of the inputs, `[F]`, and `weight0`, `bias0`, ... of each layer.
    """

    header: PriorHeader
    arrays: Mapping[str, Reals]

    @property
    def mean(self) -> Reals:
        """Of the inputs, `[F]`."""
        return self.arrays["mean"]

    @property
    def scale(self) -> Reals:
        """Of the inputs, `[F]`."""
        return self.arrays["scale"]

    def predict(self, features: Features) -> tuple[Features, StepPrediction]:
        """What it expects of [n] strategies, and their features with `SHARES` as it expects them."""
        out = network_outputs(self.arrays, features.inputs)
        step, shares = corrected(features.inputs, out)
        inputs = features.inputs.copy()
        inputs[:, SHARES] = shares
        step = features.log_step_s + step
        tpot, ttft, memory, kept = out[:, FACTOR_COUNT:].T
        predicted = StepPrediction(step, step + tpot, features.log_ttft_s + ttft, features.log_memory + memory, kept)
        return features._replace(inputs=inputs), predicted


def network_outputs(arrays: Mapping[str, Reals], inputs: Reals) -> Reals:
    """What a network says of inputs `[n, F]`, `[n, OUTPUTS]`.

    Args:
        arrays: See `Prior`.
        inputs: As features have them.
    """
    layers = sum(name.startswith("weight") for name in arrays)
    blocks: list[Reals] = []
    for start in range(0, len(inputs), _BLOCK):
        found = (inputs[start : start + _BLOCK] - arrays["mean"]) / arrays["scale"]
        for layer in range(layers):
            found = found @ arrays[f"weight{layer}"] + arrays[f"bias{layer}"]
            if layer + 1 < layers:
                found = found / (1 + np.exp(-np.clip(found, -60, None)))  # SiLU
        blocks.append(found.astype(np.float64))
    return np.clip(np.concatenate(blocks), -_LARGEST_LOG, _LARGEST_LOG)


def corrected(inputs: Reals, out: Reals) -> tuple[Reals, Reals]:
    """Log of a step's time over the roofline's `[n]`, and the logs of its terms' shares `[n, FACTOR_COUNT]`.

    Args:
        inputs: Of the network, `[n, F]`.
        out: Its outputs, `[n, OUTPUTS]`.
    """
    terms = inputs[:, SHARES].astype(np.float64) + out[:, :FACTOR_COUNT]
    step = np.logaddexp.reduce(terms, axis=1)
    return step, np.maximum(terms - step[:, None], LEAST_LOG_SHARE)


def write_prior(path: Path, header: PriorHeader, arrays: Mapping[str, Reals]) -> None:
    """Writes a prior: `mean`, `scale`, and `weight0`, `bias0`, ... of each layer."""
    from safetensors.numpy import save

    content = save(
        {name: np.ascontiguousarray(array, np.float32) for name, array in arrays.items()},
        {"header": header.model_dump_json()},
    )
    write_bytes(path, content)


def read_arrays(path: Path, kind: str) -> tuple[JsonFields, dict[str, Reals]]:
    """The header and the arrays of a file that `raysearch pretrain` wrote.

    Args:
        path: Of the file.
        kind: What it is to be, for messages.

    Raises:
        InputError: It cannot be read, or holds anything but sound numbers.
    """
    from safetensors import SafetensorError
    from safetensors.numpy import load

    try:
        content = read_bytes(path, _LARGEST_BYTES)
        arrays = load(content)
        words = parse_object(content[8 : 8 + int.from_bytes(content[:8], "little")])  # [spec] of the format
        header = parse_object(words["__metadata__"]["header"].encode())
        if not all(array.dtype == np.float32 and (abs(array) <= _LARGEST_WEIGHT).all() for array in arrays.values()):
            raise ValueError(f"expected weights of 32 bits and at most {_LARGEST_WEIGHT:g}")
    except OSError as error:
        raise InputError(f"cannot read the {kind} {path}: {error.strerror or error}") from error
    except (SafetensorError, ValueError, LookupError, TypeError, AttributeError) as error:
        raise InputError(f"{path} is no {kind} that `raysearch pretrain` wrote: {error}") from error
    return header, arrays


@contextmanager
def checking(path: Path, kind: str, header: type[BaseModel]) -> Iterator[None]:
    """Turns whatever a file's content fails on into one error of the file."""
    try:
        yield
    except ValidationError as error:
        reason = first_error_text(error, header)
        raise InputError(f"{path} is no {kind} that `raysearch pretrain` wrote: {reason}") from error
    except (ValueError, LookupError, TypeError, AttributeError) as error:
        raise InputError(f"{path} is no {kind} that `raysearch pretrain` wrote: {error}") from error


@lru_cache(maxsize=4)
def read_prior(path: Path) -> Prior:
    """A prior from its file.

    Raises:
        InputError: It cannot be read, or is none.
    """
    words, arrays = read_arrays(path, "prior")
    with checking(path, "prior", PriorHeader):
        header = PriorHeader.model_validate(words)
        prior = Prior(header, arrays)
        if header.format != PRIOR_FORMAT:
            raise ValueError(f"expected {PRIOR_FORMAT!r}, got {header.format!r}")
        if not (prior.scale >= 1 / _LARGEST_WEIGHT).all():
            raise ValueError(f"expected scales of at least {1 / _LARGEST_WEIGHT:g}")
        if network_outputs(arrays, np.zeros((1, len(prior.mean)), np.float32)).shape != (1, OUTPUTS):
            raise ValueError(f"expected {OUTPUTS} outputs")
    return prior
