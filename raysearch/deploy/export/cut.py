"""What exports to frameworks share: a strategy as it cuts one layer, or some ops of it, and what that leaves out."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from raysearch.base.errors import InputError
from raysearch.deploy.export.deployment import Deployment
from raysearch.deploy.export.fitting import not_configurable
from raysearch.deploy.layers.sharded_layer import Sharded, sharded_layer_of, shown_group, unshown
from sim.near_names import did_you_mean
from sim.ops.layers import op_names
from sim.strategy import NONE


def cut_of(deployment: Deployment, target: str) -> Sharded:
    """The layer of a deployment as its strategy cuts it.

    Args:
        deployment: What is exported.
        target: To what.

    Raises:
        InputError: A strategy whose layers do not run.
    """
    try:
        return sharded_layer_of(deployment.workload, deployment.strategy)
    except InputError as error:
        raise InputError(f"--to {target}: {error}") from None


def with_ops(deployment: Deployment, names: Sequence[str]) -> Deployment:
    """The same, with every op but these whole over tp.

    Raises:
        InputError: The model has no such op.
    """
    known = op_names(deployment.workload.model)
    if unknown := [name for name in names if name not in known]:
        raise InputError(f"unknown op {unknown[0]!r}: {did_you_mean(unknown[0], known)}")
    choices = zip(known, deployment.strategy.dims, strict=True)
    dims = tuple(choice if name in names else NONE for name, choice in choices)
    return replace(deployment, strategy=replace(deployment.strategy, dims=dims))


def left_out(deployment: Deployment) -> tuple[str, ...]:
    """What one layer's shardings do not say of a model."""
    strategy, model = deployment.strategy, deployment.workload.model
    group = shown_group(model)
    dropped = [*not_configurable(deployment, None)]
    if strategy.pp > 1:
        uneven = f", {deployment.layer_partition}" if deployment.layer_partition else ""
        dropped.append(f"pp {strategy.pp}: give each stage a mesh and its layers{uneven}")
    if strategy.vocabulary:
        choices = ",".join(map(str, strategy.vocabulary))
        dropped.append(f"vocabulary {choices}: the plan is of layers; shard embedding and LM head beside it")
    if len(model.groups) > 1:
        dropped.append(f"of {len(model.groups)} groups of layers the specs are those of {group.name} alone")
    return (*dropped, *(f"no spec and no layer that runs: {part}" for part in unshown(model)))


def notes_of(deployment: Deployment) -> tuple[str, ...]:
    """What whoever runs one layer's shardings must know."""
    variables = deployment.nccl_variables.items()
    return (ORDER_NOTE, *(f"start it with {name}={value}, as it was priced" for name, value in variables))


ORDER_NOTE = (
    "queries, keys and values lie side by side for each group of heads, gate and up projections column by column"
)
