"""Where a training stands, in files of arrays and text alone: nothing in them can run code."""

from __future__ import annotations

import collections
import json
from pathlib import Path
from typing import Any

from raysearch.base.errors import InputError
from raysearch.base.file_io import write_bytes
from sim.config.reading import parse_json

_LARGEST_BYTES = 512 * 1024**2
"""[assumed] That of the widest network has a third."""


def keep(path: Path, step: int, model: Any, optimizer: Any) -> None:
    """Writes a model and its optimiser as of a step."""
    from safetensors.torch import save

    tensors = {f"model.{name}": value for name, value in model.state_dict().items()}
    for index, state in optimizer.state_dict()["state"].items():
        tensors |= {f"optimizer.{index}.{name}": value for name, value in state.items()}
    about = {"step": str(step), "groups": json.dumps(optimizer.state_dict()["param_groups"])}
    write_bytes(path, save({name: value.contiguous() for name, value in tensors.items()}, about))


def restored(path: Path, model: Any, optimizer: Any, schedule: Any) -> int:
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
        said = " ".join(str(error).split())
        raise InputError(
            f"{path} is damaged, or of another network: {said:.200}; delete it, and the same command trains again"
        ) from error
    schedule.last_epoch = step
    return schedule.last_epoch


def _kinds(groups: Any) -> object:
    """The kind of each of an optimiser's settings; JSON makes lists of tuples."""

    def kind(value: object) -> type:
        return list if isinstance(value, tuple) else type(value)

    return [{name: kind(value) for name, value in each.items()} for each in groups]
