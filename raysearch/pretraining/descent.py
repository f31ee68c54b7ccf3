"""Gradient descent as every network here is trained: it goes on after a stop, as if there had been none.

Where it stands is kept in files of arrays and text alone: nothing in them can run code.
"""

from __future__ import annotations

import collections
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from raysearch.base.errors import InputError
from raysearch.base.file_io import write_bytes
from sim.config.reading import parse_json

TrainingProgress = Callable[[int, int], None]
"""Called with (steps done, steps)."""
TrainingLog = Callable[[str, float, int], object]
"""Called with (name, value, step)."""
_LARGEST_BYTES = 512 * 1024**2
"""[assumed] That of the widest network has a third."""


class Descent(NamedTuple):
    """How far and how fast, and where its state is kept.

    Attributes:
        name: Of what is logged.
        steps: To take.
        learning_rate: The largest; it rises in the first tenth of the steps and falls on a cosine.
        weight_decay: Of AdamW.
        seed: Of the generator of each step.
        checkpoint: Where the state is kept every `save_every` steps, as arrays alone.
    """

    name: str
    steps: int
    learning_rate: float
    weight_decay: float
    seed: tuple[int, ...]
    checkpoint: Path
    save_every: int


Loss = Callable[[np.random.Generator], Any]
"""A step's loss, a tensor, on rows that the generator picks."""


def descend(
    model: Any, ready: Callable[[], Loss], descent: Descent, progress: TrainingProgress, log: TrainingLog
) -> None:
    """Trains a model in place, or goes on from its checkpoint.

    Args:
        model: To train.
        ready: Gives the loss; not asked where all steps were taken before.
        descent: See `Descent`.
        progress: See `TrainingProgress`.
        log: See `TrainingLog`.

    Raises:
        InputError: The checkpoint cannot be read.
    """
    import torch

    torch.set_num_threads(1)  # threads that wait for each other take ten times the processor's time on such networks
    rate, steps = descent.learning_rate, descent.steps
    optimizer = torch.optim.AdamW(model.parameters(), rate, weight_decay=descent.weight_decay, fused=True)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, rate, steps, pct_start=0.1)
    if (begun := _restored(descent.checkpoint, model, optimizer, schedule)) >= steps:
        return
    loss_of = ready()
    for step in range(begun + 1, steps + 1):
        # The rows are a function of the step, so that a run that goes on sees what one that never stopped would.
        loss = loss_of(np.random.default_rng([*descent.seed, step - 1]))
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        if step % descent.save_every == 0 or step == steps:
            log(descent.name, float(loss.detach()), step)
            _keep(descent.checkpoint, step, model, optimizer)
            progress(step, steps)


def blurred(rows: Any, places: Any, jitter: float, rng: np.random.Generator) -> Any:
    """Rows `[n, F]` with noise of that size at some places, in place.

    What all strategies of a workload share would otherwise become its name, and what is learned of it would be learned
    by heart.
    """
    import torch

    blur = rng.standard_normal((len(rows), len(places)), np.float32)
    rows[:, places] += jitter * torch.from_numpy(blur)
    return rows


def _keep(path: Path, step: int, model: Any, optimizer: Any) -> None:
    """Writes a model and its optimiser as of a step."""
    from safetensors.torch import save

    tensors = {f"model.{name}": value for name, value in model.state_dict().items()}
    for index, state in optimizer.state_dict()["state"].items():
        tensors |= {f"optimizer.{index}.{name}": value for name, value in state.items()}
    about = {"step": str(step), "groups": json.dumps(optimizer.state_dict()["param_groups"])}
    write_bytes(path, save({name: value.contiguous() for name, value in tensors.items()}, about))


def _restored(path: Path, model: Any, optimizer: Any, schedule: Any) -> int:
    """Puts a checkpoint back; returns the steps that it stands behind. Raises: InputError."""
    import torch
    from safetensors import SafetensorError, safe_open

    if not path.is_file():
        return 0
    try:
        if (size := path.stat().st_size) > _LARGEST_BYTES:
            raise ValueError(f"it has {size:,} bytes, more than any")
        with safe_open(path, framework="pt") as file:
            about = file.metadata()
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 no dictionary
        model.load_state_dict(
            {name.removeprefix("model."): value for name, value in tensors.items() if name.startswith("model.")}
        )
        state: dict[int, dict[str, torch.Tensor]] = collections.defaultdict(dict)
        for name, value in tensors.items():
            if name.startswith("optimizer."):
                _, index, what = name.split(".")
                state[int(index)][what] = value
        groups, step = parse_json(about["groups"].encode()), int(about["step"])
        if step < 0 or _kinds(groups) != _kinds(optimizer.state_dict()["param_groups"]):
            raise ValueError("its settings are no optimiser's")
        optimizer.load_state_dict({"state": dict(state), "param_groups": groups})
    except (SafetensorError, OSError, RuntimeError, ValueError, LookupError, TypeError, AttributeError) as error:
        why = " ".join(str(error).split())
        raise InputError(
            f"{path} is damaged, or of another network: {why:.200}; delete it, and the same command trains again"
        ) from error
    schedule.last_epoch = step
    return schedule.last_epoch


def _kinds(groups: Any) -> object:
    """The kind of each of an optimiser's settings; JSON makes lists of tuples."""

    def kind(value: object) -> type:
        return list if isinstance(value, tuple) else type(value)

    return [{name: kind(value) for name, value in each.items()} for each in groups]
