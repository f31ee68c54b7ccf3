"""Trains the network of a prior on what the simulator said, and fits how its errors go together."""

from __future__ import annotations

import collections
from collections.abc import Callable, Iterable, Mapping
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

from raysearch.pretraining.checkpoints import keep, restored
from raysearch.pretraining.dataset import Rows, kept_out
from raysearch.pretraining.pretraining_file import Network
from raysearch.searchers.prior.gaussian_process import log_marginal
from raysearch.searchers.prior.network import ResidualKernel
from raysearch.searchers.prior.strategy_features import Reals
from sim.arrays import Ints

OUTPUTS = 5
"""Corrections of the four `raysearch.pretraining.dataset.NETWORK_TARGETS`, and log odds that no limit is broken."""
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
    progress: Callable[[int, int], None],
    log: Callable[..., None],
) -> tuple[dict[str, Reals], Any]:
    """The network's arrays, and a function from inputs to its outputs, trained or gone on with from a checkpoint.

    Args:
        rows: Of all workloads; those kept for validation are left out here.
        network: What learns, and for how long.
        seed: Of weights and of the order of rows.
        checkpoint: Where the state is kept every few hundred steps, as arrays alone.
        progress: Called with (steps done, steps).
        log: Called with (name, value, step).
    """
    import torch

    torch.set_num_threads(1)
    torch.manual_seed(seed)
    learned = ~kept_out(rows.workload)
    mean, scale = _moments(rows.inputs[learned])
    sizes = [rows.inputs.shape[1], network.width, network.width, network.width, OUTPUTS]
    linear = [torch.nn.Linear(before, after) for before, after in pairwise(sizes)]
    with torch.no_grad():
        linear[-1].weight.mul_(0.1)
    model = torch.nn.Sequential(*[part for layer in linear for part in (layer, torch.nn.SiLU())][:-1])
    optimizer = torch.optim.AdamW(model.parameters(), network.learning_rate, weight_decay=1e-4, fused=True)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, network.learning_rate, network.steps, pct_start=0.1)
    inputs, wanted = torch.from_numpy(rows.inputs), torch.from_numpy(np.clip(rows.targets, -_CAP, _CAP))
    broken, weights = torch.from_numpy(rows.broken), torch.from_numpy(rows.weights)
    means, scales = torch.from_numpy(mean), torch.from_numpy(scale)
    places = np.flatnonzero(learned)
    shared = torch.from_numpy(_shared_by_workload(rows))
    begun = restored(checkpoint, model, optimizer, schedule)
    for step in range(begun, network.steps):
        # The order is a function of the step, so that a run that goes on sees what one that never stopped would.
        rng = np.random.default_rng([seed, 1 << 22, step])
        picked = torch.from_numpy(rng.choice(places, min(network.batch, len(places))))
        shown = (inputs[picked].float() - means) / scales
        # Else what a workload is made of becomes its name, and its error is learned by heart.
        blur = rng.standard_normal((len(picked), len(shared)), np.float32)
        shown[:, shared] += network.jitter * torch.from_numpy(blur)
        said = model(shown)
        weight = weights[picked]
        miss = torch.nn.functional.smooth_l1_loss(said[:, :4], wanted[picked], reduction="none", beta=0.03)
        limits = torch.nn.functional.binary_cross_entropy_with_logits(
            said[:, 4], (~broken[picked]).float(), reduction="none"
        )
        loss = ((miss * torch.tensor([1.0, 0.5, 0.3, 1.0])).sum(1) * weight + 0.1 * limits * weight).mean()
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        if (step + 1) % _SAVE_EVERY == 0 or step + 1 == network.steps:
            log("loss", float(loss.detach()), step + 1)
            keep(checkpoint, step + 1, model, optimizer)
            progress(step + 1, network.steps)
    arrays: dict[str, Reals] = {"mean": mean, "scale": scale}
    for number, layer in enumerate(linear):
        arrays |= {
            f"weight{number}": layer.weight.detach().numpy().T.copy(),
            f"bias{number}": layer.bias.detach().numpy().copy(),
        }
    return arrays, model


def _shared_by_workload(rows: Rows) -> Ints:
    """Inputs that all strategies of a workload have in common."""
    some, workload = rows.inputs[:20_000], rows.workload[:20_000]
    return np.flatnonzero(~((some[1:] != some[:-1]) & (workload[1:] == workload[:-1])[:, None]).any(0))


def _moments(inputs: Reals) -> tuple[Reals, Reals]:
    some = inputs[:: max(1, len(inputs) // 100_000)].astype(np.float32)
    return some.mean(0), some.std(0) + 0.02


# --- what it misses -----------------------------------------------------------------------------------


def network_figures(rows: Rows, said: Reals) -> dict[str, float]:
    """How far outputs `[n, 5]` err on the kept workloads' rows, near each workload's best."""
    near = rows.weights > 0.3
    as_measured = near & rows.known
    miss = np.abs(said[:, :4] - rows.targets)
    known = said[:, 4] > 0
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


def outputs(model: Any, arrays: Mapping[str, Reals], inputs: Reals) -> Reals:
    """What the trained network says of inputs `[n, F]`, `[n, 5]`."""
    import torch

    found: list[Reals] = []
    with torch.inference_mode():
        for start in range(0, len(inputs), 8192):
            block = (inputs[start : start + 8192].astype(np.float32) - arrays["mean"]) / arrays["scale"]
            found.append(model(torch.from_numpy(block)).numpy())
    return np.concatenate(found)
