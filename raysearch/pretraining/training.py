"""Trains the network of a prior on what the simulator answered, and fits how its errors go together."""

from __future__ import annotations

import collections
from collections.abc import Iterable, Mapping
from itertools import pairwise
from pathlib import Path

import numpy as np

from raysearch.pretraining.dataset import Rows, kept_out
from raysearch.pretraining.descent import Descent, Loss, TrainingLog, TrainingProgress, blurred, descend
from raysearch.pretraining.pretraining_file import Network
from raysearch.searchers.prior.gaussian_process import log_marginal
from raysearch.searchers.prior.network import FACTOR_COUNT, OUTPUTS, ResidualKernel, corrected, network_outputs
from raysearch.searchers.prior.strategy_features import SHARES, Reals
from sim.arrays import Ints

_IMPORTANCE = (1.0, 0.5, 0.3, 1.0)
"""[assumed] Of errors of `raysearch.pretraining.dataset.NETWORK_TARGETS`."""
_CAP = 6.0
"""[assumed] Nats beyond which how wrong the roofline is makes no difference: no such strategy is any good."""
_SAVE_EVERY = 500
_POOL = 24
"""Choices by op that a prior keeps. [assumed] the best strategy's of half the workloads is among them."""
_LEAST_LOGS = (-16, -16, -16, -16, -6, -6, -16)
"""[assumed] Of a kernel's fields: variances and distances below which nothing changes."""
_KERNEL_ROWS, _KERNEL_WORKLOADS = 24, 64
"""Strategies of each workload, and workloads, that a kernel is fitted to. [assumed]"""


def trained(
    rows: Rows,
    network: Network,
    seed: int,
    checkpoint: Path,
    progress: TrainingProgress,
    log: TrainingLog,
) -> dict[str, Reals]:
    """The network's arrays, trained or gone on with from a checkpoint.

    Args:
        rows: Of all workloads; those kept for validation are left out here.
        network: What learns, and for how long.
        seed: Of weights and of the order of rows.
        checkpoint: Where the state is kept every few hundred steps, as arrays alone.
        progress: See `raysearch.pretraining.descent`.
        log: See `raysearch.pretraining.descent`.
    """
    import torch

    torch.manual_seed(seed)
    learned = ~kept_out(rows.workload)
    mean, scale = _moments(rows.inputs[learned])
    sizes = [rows.inputs.shape[1], network.width, network.width, network.width, OUTPUTS]
    linear = [torch.nn.Linear(before, after) for before, after in pairwise(sizes)]
    with torch.no_grad():
        linear[-1].weight.mul_(0.1)
    model = torch.nn.Sequential(*[part for layer in linear for part in (layer, torch.nn.SiLU())][:-1])

    def ready() -> Loss:
        inputs, wanted = torch.from_numpy(rows.inputs), torch.from_numpy(np.clip(rows.targets, -_CAP, _CAP))
        broken, weights = torch.from_numpy(rows.broken), torch.from_numpy(rows.weights)
        means, scales, importance = torch.from_numpy(mean), torch.from_numpy(scale), torch.tensor(_IMPORTANCE)
        places, shared = np.flatnonzero(learned), torch.from_numpy(_shared_by_workload(rows))

        def loss_of(rng: np.random.Generator) -> torch.Tensor:
            picked = torch.from_numpy(rng.choice(places, min(network.batch, len(places))))
            bare = inputs[picked].float()
            out = model(blurred((bare - means) / scales, shared, network.jitter, rng))
            step = torch.logsumexp(bare[:, SHARES] + out[:, :FACTOR_COUNT], 1, keepdim=True)
            predicted = torch.cat([step, out[:, FACTOR_COUNT:-1]], 1)
            miss = torch.nn.functional.smooth_l1_loss(predicted, wanted[picked], reduction="none", beta=0.03)
            limits = torch.nn.functional.binary_cross_entropy_with_logits(
                out[:, -1], (~broken[picked]).float(), reduction="none"
            )
            return (((miss * importance).sum(1) + 0.1 * limits) * weights[picked]).mean()

        return loss_of

    steps = Descent("loss", network.steps, network.learning_rate, 1e-4, (seed, 1 << 22), checkpoint, _SAVE_EVERY)
    descend(model, ready, steps, progress, log)
    arrays: dict[str, Reals] = {"mean": mean, "scale": scale}
    for number, layer in enumerate(linear):
        arrays |= {
            f"weight{number}": layer.weight.detach().numpy().T.copy(),
            f"bias{number}": layer.bias.detach().numpy().copy(),
        }
    return arrays


def _shared_by_workload(rows: Rows) -> Ints:
    """Inputs that all strategies of a workload have in common."""
    some, workload = rows.inputs[:20_000], rows.workload[:20_000]
    return np.flatnonzero(~((some[1:] != some[:-1]) & (workload[1:] == workload[:-1])[:, None]).any(0))


def _moments(inputs: Reals) -> tuple[Reals, Reals]:
    some = inputs[:: max(1, len(inputs) // 100_000)].astype(np.float32)
    return some.mean(0), some.std(0) + 0.02


# --- what it misses -----------------------------------------------------------------------------------


def network_figures(rows: Rows, predicted: Reals, out: Reals) -> dict[str, float]:
    """How far corrections `[n, 4]` and outputs `[n, OUTPUTS]` err on the kept rows, near each workload's best."""
    near = rows.weights > 0.3
    as_measured = near & rows.known
    miss = np.abs(predicted - rows.targets)
    known = out[:, -1] > 0
    return {
        "median_error_step": float(np.median(miss[near, 0])),
        "p90_error_step": float(np.quantile(miss[near, 0], 0.9)),
        **({"median_error_step_as_measured": float(np.median(miss[as_measured, 0]))} if as_measured.any() else {}),
        "median_error_memory": float(np.median(miss[near, 3])),
        "p90_error_memory": float(np.quantile(miss[near, 3], 0.9)),
        "limits_told_right": float((known == ~rows.broken).mean()),
    }


def fitted_kernel(rows: Rows, residuals: Reals, seed: int) -> ResidualKernel:
    """The likeliest kernel of residuals `[n]` on workloads that the network was not trained on."""
    from scipy.optimize import minimize

    rng = np.random.default_rng([seed, 1 << 23])
    parts: list[tuple[Reals, Reals]] = []
    for workload in np.unique(rows.workload)[:_KERNEL_WORKLOADS]:
        own = np.flatnonzero((rows.workload == workload) & (rows.weights > 0.2))
        if len(own) < 8:
            continue
        picked = rng.choice(own, min(_KERNEL_ROWS, len(own)), replace=False)
        parts.append((rows.inputs[picked].astype(np.float32), np.clip(residuals[picked], -1, 1)))
    start = np.log([0.03**2, 0.03**2, 0.03**2, 0.03**2, 2.0, 2.0, 0.01**2])

    def kernel(logs: Reals) -> ResidualKernel:
        return ResidualKernel(
            **dict(zip(ResidualKernel.model_fields, np.exp(np.clip(logs, _LEAST_LOGS, 4)).tolist(), strict=True))
        )

    def unlikely(logs: Reals) -> float:
        found, total = kernel(logs), 0.0
        for inputs, values in parts:
            total -= log_marginal(found, inputs, values)
        return total / max(1, len(parts)) + 1e-3 * float(((logs - start) ** 2).sum())

    found = minimize(unlikely, start, method="L-BFGS-B", options={"maxiter": 25})
    return kernel(found.x)


def pool_of(choices: Iterable[Mapping[str, int]]) -> list[dict[str, int]]:
    """The choices by op that were a workload's best most often."""
    counted = collections.Counter(tuple(sorted(each.items())) for each in choices)
    return [dict(each) for each, _ in counted.most_common(_POOL)]


def outputs(arrays: Mapping[str, Reals], inputs: Reals) -> tuple[Reals, Reals, Reals]:
    """What a trained network says of inputs `[n, F]`.

    Returns:
        Corrections `[n, 4]` of `raysearch.pretraining.dataset.NETWORK_TARGETS`; the inputs with the shares of a step's
        time as the network expects them; and its outputs `[n, OUTPUTS]`.
    """
    found = inputs.astype(np.float32)
    out = network_outputs(arrays, found)
    step, found[:, SHARES] = corrected(found, out)
    return np.concatenate([step[:, None], out[:, FACTOR_COUNT:-1]], 1), found, out
