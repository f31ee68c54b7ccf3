"""A whole pre-training: rows, network, kernels, and the file that a search reads."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import numpy as np

from raysearch.base.errors import InputError
from raysearch.base.extras import check_installed
from raysearch.pretraining.array_files import make_files
from raysearch.pretraining.dataset import kept_out, read_files, row_files
from raysearch.pretraining.pretraining_file import PretrainingFile
from raysearch.pretraining.search_episodes import Searches
from raysearch.pretraining.search_tables import kept_tables, read_tables, table_files
from raysearch.pretraining.training import fitted_kernel, network_figures, outputs, pool_of, trained
from raysearch.searchers.prior.network import PRIOR_FORMAT, PriorHeader, write_prior
from raysearch.searchers.prior.policy import POLICY_FORMAT, PolicyHeader, write_policy
from sim.config.files import config_path, read_config

PRIOR_FILE = "prior.safetensors"
POLICY_FILE = "policy.safetensors"
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
        InputError: PyTorch or RLlib is not installed, or the folder holds rows of another configuration.
        CatalogError: The configuration cannot be used.
    """
    check_installed("pretrain", "raysearch pretrain")
    pretraining = read_config(config_path("pretraining", name_or_path), PretrainingFile)
    folder.mkdir(parents=True, exist_ok=True)
    with bars("evaluating workloads") as progress:
        paths = make_files(row_files(pretraining), folder, processes, progress)
    try:
        rows, choices = read_files(paths, pretraining)
    except ValueError as error:
        raise InputError(str(error)) from error
    with bars("training") as progress, _tensorboard(folder) as log:
        checkpoint = folder / "training.safetensors"
        arrays = trained(rows, pretraining.network, pretraining.seed, checkpoint, progress, log)
    kept = rows.at(np.flatnonzero(kept_out(rows.workload)))
    predicted, inputs, out = outputs(arrays, kept.inputs)
    expected = kept._replace(inputs=inputs)
    with bars("fitting the errors") as progress:
        kernels = []
        apart = kept.at(np.flatnonzero(~kept.known))
        for rows_of, missed in (
            (expected, kept.targets[:, 0] - predicted[:, 0]),
            (expected, kept.targets[:, 3] - predicted[:, 3]),
            (apart.as_simulated(), apart.missed),
        ):
            kernels.append(fitted_kernel(rows_of, missed, pretraining.seed))
            progress(len(kernels), 3)
    header = PriorHeader(
        format=PRIOR_FORMAT,
        command=f"raysearch pretrain {name_or_path}",
        data=pretraining.model_dump(mode="json", exclude={"policy"}),
        figures={
            **network_figures(kept, predicted, out),
            "workloads": float(len(np.unique(rows.workload))),
            "strategies": float(len(rows.workload)),
        },
        pool=pool_of(choices),
        time=kernels[0],
        limits=kernels[1],
        simulated=kernels[2],
    )
    write_prior(folder / PRIOR_FILE, header, arrays)
    return header


def pretrain_policy(name_or_path: str, folder: Path, processes: int, bars: TrainingBars) -> PolicyHeader | None:
    """Trains the policy that chooses calls for a prior, and writes `policy.safetensors`; gone on with like a prior.

    It learns from the true regret of candidates first, then by PPO. Of the imitated policy and those after each
    iteration the one is kept that searches the kept tables best. None where the configuration asks for none.

    Args:
        name_or_path: Of configs/pretraining, or of a TOML file.
        folder: That holds the prior.
        processes: That evaluate; then RLlib's env runners.
        bars: Of the work's parts.

    Raises:
        CatalogError, InputError: See `pretrain`.
    """
    pretraining = read_config(config_path("pretraining", name_or_path), PretrainingFile)
    policy, prior = pretraining.policy, folder / PRIOR_FILE
    if not policy.tables:
        return None
    check_installed("pretrain", "raysearch pretrain")
    import torch

    from raysearch.pretraining.policy_module import PolicyNetwork
    from raysearch.pretraining.policy_training import (
        States,
        as_policy,
        by_improvement,
        by_policy,
        imitated,
        judged,
        reinforced,
        states,
    )
    from raysearch.processes.connection import connected  # imports Ray, which nothing before needs

    with bars("evaluating searches") as progress:
        paths = make_files(table_files(pretraining, prior), folder, processes, progress)
    try:
        tables = read_tables(paths, pretraining)
    except ValueError as error:
        raise InputError(str(error)) from error
    learned, kept = (
        [table for table, is_kept in zip(tables, kept_tables(tables), strict=True) if is_kept == wanted]
        for wanted in (False, True)
    )
    searches, unseen = Searches(pretraining, prior, learned), Searches(pretraining, prior, kept)
    torch.manual_seed(pretraining.seed)
    network = PolicyNetwork(searches.layout, policy.width, policy.depth)

    def shown_states() -> States:
        with bars("searching") as progress:
            return states(searches, pretraining, progress)

    with _tensorboard(folder) as log:
        with bars("imitating") as progress:
            imitated(network, shown_states, pretraining, folder / "imitation.safetensors", progress, log)
        figures = {"expected improvement": judged(unseen, by_improvement, pretraining.seed, policy.calls)}
        figures["imitated"] = judged(unseen, by_policy(as_policy(network)), pretraining.seed, policy.calls)
        best, arrays = "imitated", network.arrays()
        with bars("reinforcing") as progress, connected(cpus=max(processes, 1)):
            for number, each in enumerate(
                reinforced(network, pretraining, paths, prior, folder, processes, progress, log), start=1
            ):
                name = f"reinforced {number}"
                figures[name] = judged(unseen, by_policy(as_policy(each)), pretraining.seed, policy.calls)
                for after, value in figures[name].items():
                    log(f"kept tables, call {after}", value, number)
                if sum(figures[name].values()) > sum(figures[best].values()):
                    best, arrays = name, each.arrays()
    header = PolicyHeader(
        format=POLICY_FORMAT,
        command=f"raysearch pretrain {name_or_path}",
        data=pretraining.model_dump(mode="json", include={"seed", "distribution", "policy"}),
        figures={
            **{f"{name}, call {after}": value for name, by_call in figures.items() for after, value in by_call.items()},
            "tables": float(len(learned)),
            "kept tables": float(len(kept)),
        },
        chosen=best,
    )
    write_policy(folder / POLICY_FILE, header, arrays)
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
