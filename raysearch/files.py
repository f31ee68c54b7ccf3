"""The files of a results folder: written whole, checked when read."""

from __future__ import annotations

import json
from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ValidationError

from envs.files import write_atomically
from raysearch.errors import InputError
from sim.config.files import Kind, config_path, explain
from sim.strategy import Strategy

RESULTS_ROOT = Path("results")
"""Where commands without --out put their folders, relative to the working directory."""


def write_bytes(path: Path, content: bytes) -> None:
    """Writes a file; see `envs.files.write_atomically`."""
    write_atomically(path, lambda temporary: temporary.write_bytes(content))


def write_json(path: Path, value: Mapping[str, Any]) -> None:
    """Writes a JSON object; see `envs.files.write_atomically`."""
    write_bytes(path, (json.dumps(value, indent=2, allow_nan=False) + "\n").encode())


def read_json(path: Path, schema: type[BaseModel]) -> dict[str, Any]:
    """The object of a JSON file of ours.

    Raises:
        InputError: It is not what `schema` says.
        OSError: There is no such file, or it cannot be read.
    """
    try:
        fields = json.loads(path.read_bytes())
        schema.model_validate(fields)
    except ValidationError as error:
        raise damaged(f"{path} is damaged: {explain(error, schema)}") from error
    except ValueError as error:
        raise damaged(f"{path} is damaged: {error}") from error
    return fields


def damaged(what: str) -> InputError:
    """The error for a result that cannot be read, with what can be done about it."""
    return InputError(f"{what}; bring it back from a copy, or run again into another folder")


def results_folder(out: Path | None, name: str) -> Path:
    """Where new results go: `out`, or results/<name>-<UTC time>. Creates nothing."""
    return out or RESULTS_ROOT / f"{name}-{datetime.now(UTC):%Y%m%dT%H%M%SZ}"


def anchored(kind: Kind, name_or_path: str, *, beside: Path | None = None) -> str:
    """A shipped name as it is; a path made absolute, so that results read back from any working directory.

    Raises:
        CatalogError: No such name or file.
    """
    path = config_path(kind, name_or_path, beside=beside)
    return str(path.resolve()) if name_or_path.endswith(".toml") else name_or_path


def strategy_dict(strategy: Strategy) -> dict[str, Any]:
    """A strategy as it stands in JSON: tp, ep, pp, batch, the list dims; beyond the paper's space also cp and dp."""
    fields: dict[str, Any] = {
        "tp": strategy.tp,
        "ep": strategy.ep,
        "pp": strategy.pp,
        "batch": strategy.batch,
        "dims": list(strategy.dims),
    }
    return fields | ({"cp": strategy.cp, "dp": strategy.attention_dp} if strategy.extended else {})


def degrees_text(strategy: Strategy) -> str:
    """Degrees and batch in words."""
    rest = f"pp {strategy.pp}, batch {strategy.batch}"
    if not strategy.extended:
        return f"tp {strategy.tp}, ep {strategy.ep}, {rest}"
    attention = f"attention tp {strategy.tp}, cp {strategy.cp}, dp {strategy.attention_dp}"
    return f"{attention}; experts tp {strategy.moe_tp}, ep {strategy.ep}; {rest}"


def as_strategy(fields: Mapping[str, Any]) -> Strategy:
    """A strategy from its JSON form."""
    return Strategy(**{**fields, "dims": tuple(fields["dims"])})
