"""The exporters by name: shipped ones, and whatever an installed package adds.

An exporter is a function from a `Deployment` to an `Export`. A package adds one by an entry point of the group
"raysearch.exporters", a script by `register_exporter`.

>>> exporter_names()[:3]
('vllm', 'sglang', 'trtllm')
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from raysearch.base.errors import InputError
from raysearch.base.named_code import declared_points, load_named, note_if_declared
from raysearch.deploy.export.deployment import Deployment, Export
from sim.near_names import did_you_mean

EXPORTERS_GROUP = "raysearch.exporters"
Exporter = Callable[[Deployment], Export]
PoolsExporter = Callable[[Mapping[str, Deployment]], Export]


class _Entry(NamedTuple):
    summary: str
    load: str
    pools: str


_ENTRIES: dict[str, _Entry] = {}


def register_exporter(name: str, summary: str, load: str, pools: str = "") -> None:
    """Adds an exporter.

    Args:
        name: As `--to` has it.
        summary: One line for lists.
        load: "package.module:function", imported when first needed.
        pools: The same of a function that writes pools which serve together as one, by their names; "" has each
            written by itself.

    Raises:
        ValueError: The name is taken, or `load` names no function.
    """
    if name in _ENTRIES:
        raise ValueError(f"exporter {name!r} is registered already, as {_ENTRIES[name].load}: choose another name")
    for function in (load, *([pools] if pools else [])):
        if function.count(":") != 1:
            raise ValueError(f"exporter {name!r}: expected 'package.module:function', got {function!r}")
    _ENTRIES[name] = _Entry(summary, load, pools)


def exporter_names() -> tuple[str, ...]:
    """All names, shipped ones first."""
    return (*_ENTRIES, *(name for name in declared_points(EXPORTERS_GROUP) if name not in _ENTRIES))


def exporter_summary(name: str) -> str:
    """What it writes, in one line; "" for an installed package's."""
    return _ENTRIES[name].summary if name in _ENTRIES else ""


def exporter(name: str) -> Exporter:
    """The function behind a name, imported now.

    Raises:
        InputError: There is none of that name.
    """
    if name in _ENTRIES:
        note_if_declared("export target", name, EXPORTERS_GROUP)
        return _loaded(_ENTRIES[name].load)
    if name not in declared_points(EXPORTERS_GROUP):
        raise InputError(f"unknown export target {name!r}: {did_you_mean(name, exporter_names())}")
    return load_named("export target", name, EXPORTERS_GROUP, "an entry point")


def pools_exporter(name: str) -> PoolsExporter | None:
    """The function that writes pools which serve together as one; None where each is written by itself."""
    return _loaded(_ENTRIES[name].pools) if name in _ENTRIES and _ENTRIES[name].pools else None


def _loaded(function: str) -> Any:
    module, _, name = function.partition(":")
    return getattr(importlib.import_module(module), name)


register_exporter("vllm", "`vllm serve` (0.33.0)", "raysearch.deploy.export.vllm:export")
register_exporter("sglang", "`python -m sglang.launch_server` (0.5.23)", "raysearch.deploy.export.sglang:export")
register_exporter(
    "trtllm", "`trtllm-serve` and its config.yaml (TensorRT-LLM 1.3.0rc)", "raysearch.deploy.export.trtllm:export"
)
register_exporter(
    "megatron", "Megatron-LM's inference server (Megatron-Core 0.16.1)", "raysearch.deploy.export.megatron_core:export"
)
register_exporter(
    "dynamo",
    "a DynamoGraphDeployment, nvidia.com/v1beta1 (NVIDIA Dynamo 1.6.1)",
    "raysearch.deploy.export.dynamo:export",
    "raysearch.deploy.export.dynamo:export_pools",
)
register_exporter(
    "llm-d",
    "Kubernetes resources of llm-d and values of its router",
    "raysearch.deploy.export.llm_d:export",
    "raysearch.deploy.export.llm_d:export_pools",
)
register_exporter("jax", "a mesh and `PartitionSpec`s (jax 0.10)", "raysearch.deploy.export.jax:export")
register_exporter(
    "dtensor", "a mesh and a `parallelize_module` plan (PyTorch 2.13)", "raysearch.deploy.export.dtensor:export"
)
