"""A whole pre-training: rows, network, kernels, and the file that a search reads."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import numpy as np

from raysearch.base.errors import InputError
from raysearch.base.extras import check_installed
from raysearch.pretraining.dataset import kept_out, make_files, read_files
from raysearch.pretraining.pretraining_file import PretrainingFile
from raysearch.pretraining.training import fitted_kernel, network_figures, outputs, pool_of, trained
from raysearch.searchers.prior.network import PRIOR_FORMAT, PriorHeader, write_prior
from sim.config.files import config_path, read_config

PRIOR_FILE = "prior.safetensors"
TrainingBars = Callable[[str], AbstractContextManager[Callable[[int, int], None]]]
"""Shows how far work is, by its name: see `raysearch.base.progress.stepping`."""


def pretrain(name_or_path: str, folder: Path, processes: int, bars: TrainingBars) -> PriorHeader:
    """Draws workloads, evaluates their strategies, trains the network and writes `prior.safetensors`.

    What a folder holds is not made again: a run that was stopped goes on, after the last rows and the last checkpoint.

    Args:
        name_or_path: Of configs/pretraining, or of a TOML file.
        folder: For rows, checkpoints, TensorBoard's log and the prior.
        processes: That evaluate.
        bars: Of the work's parts.

    Raises:
        InputError: PyTorch is not installed, or the folder holds rows of another configuration.
        CatalogError: The configuration cannot be used.
    """
    check_installed("pretrain", "raysearch pretrain")
    pretraining = read_config(config_path("pretraining", name_or_path), PretrainingFile)
    folder.mkdir(parents=True, exist_ok=True)
    with bars("evaluating workloads") as progress:
        paths = make_files(pretraining, folder, processes, progress)
    try:
        rows, choices = read_files(paths, pretraining)
    except ValueError as error:
        raise InputError(str(error)) from error
    with bars("training") as progress, _tensorboard(folder) as log:
        arrays, model = trained(
            rows, pretraining.network, pretraining.seed, folder / "training.safetensors", progress, log
        )
    kept = rows.at(np.flatnonzero(kept_out(rows.workload)))
    said = outputs(model, arrays, kept.inputs)
    with bars("fitting the errors") as progress:
        kernels = []
        for at in (0, 3):
            kernels.append(fitted_kernel(kept, kept.targets[:, at] - said[:, at], pretraining.seed))
            progress(len(kernels), 2)
    header = PriorHeader(
        format=PRIOR_FORMAT,
        command=f"raysearch pretrain {name_or_path}",
        data=pretraining.model_dump(mode="json"),
        figures={
            **network_figures(kept, said),
            "workloads": float(len(np.unique(rows.workload))),
            "strategies": float(len(rows.workload)),
        },
        pool=pool_of(choices),
        time=kernels[0],
        limits=kernels[1],
    )
    write_prior(folder / PRIOR_FILE, header, arrays)
    return header


class _tensorboard:  # noqa: N801 used as a function
    """Logs scalars for TensorBoard, where its writer is installed."""

    def __init__(self, folder: Path) -> None:
        self._writer: Any = None
        try:
            from tensorboardX import SummaryWriter
        except ImportError:
            return
        self._writer = SummaryWriter(str(folder))

    def __enter__(self) -> Callable[[str, float, int], None]:
        return lambda name, value, step: self._writer and self._writer.add_scalar(name, value, step)

    def __exit__(self, *_: object) -> None:
        if self._writer:
            self._writer.close()
