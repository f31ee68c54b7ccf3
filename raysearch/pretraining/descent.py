"""Gradient descent as every network here is trained: it goes on after a stop, as if there had been none."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from raysearch.pretraining.checkpoints import keep, restored

TrainingProgress = Callable[[int, int], None]
"""Called with (steps done, steps)."""
TrainingLog = Callable[[str, float, int], object]
"""Called with (name, value, step)."""


class Descent(NamedTuple):
    """How far and how fast, and where it is told.

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
    if (begun := restored(descent.checkpoint, model, optimizer, schedule)) >= steps:
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
            keep(descent.checkpoint, step, model, optimizer)
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
