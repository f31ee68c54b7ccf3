"""Finds and reads configuration files: a shipped name or a path, TOML, a schema.

Every mistake a user can make in a file ends here, as one `CatalogError` that names the file, the
key, what was expected and what was found.
"""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager
from functools import lru_cache
from pathlib import Path
from typing import Literal, TypeVar

from pydantic import BaseModel, ValidationError

from sim.config.mistakes import first_error_text
from sim.config.reading import Unreadable, parse_object, parse_toml, read_bytes
from sim.json_object import JsonObject
from sim.near_names import did_you_mean

ConfigKind = Literal[
    "hardware", "models", "workloads", "studies", "searchers", "calibration", "fleets", "engines", "pretraining"
]
_SINGULAR = {
    "hardware": "hardware",
    "models": "model",
    "workloads": "workload",
    "studies": "study",
    "searchers": "searcher",
    "calibration": "calibration",
    "fleets": "fleet",
    "engines": "engine version",
    "pretraining": "pretraining",
}
_SUFFIX = {"calibration": ".json"}
_CONFIG_JSON = "config.json"
"""What Hugging Face calls a model's configuration."""


class CatalogError(ValueError):
    """A configuration that cannot be used; the message says why and how to mend it."""


def configs_root() -> Path:
    """The folder of shipped configurations: inside an installed package, or beside a checkout's sim/."""
    package = Path(__file__).resolve().parents[1]
    installed = package / "configs"
    return installed if installed.is_dir() else package.parent / "configs"


def list_names(kind: ConfigKind) -> list[str]:
    """Names of the shipped files of a kind, sorted."""
    return sorted(path.stem for path in (configs_root() / kind).glob(f"*{_SUFFIX.get(kind, '.toml')}"))


def config_path(kind: ConfigKind, name_or_path: str | Path, *, beside: Path | None = None) -> Path:
    """The file behind a shipped name or a path of the user's own.

    Args:
        kind: Which folder of configs/ a name is looked up in.
        name_or_path: A name without ".toml", or a path that ends in ".toml" (".json" for a calibration). A model may
            also be a Hugging Face configuration: a path that ends in ".json", or a folder with a config.json.
        beside: A folder that relative paths are tried against first.

    Raises:
        CatalogError: No such name or file.

    >>> config_path("hardware", "h100_sxm").name
    'h100_sxm.toml'
    """
    text, suffix = str(name_or_path), _SUFFIX.get(kind, ".toml")
    if len(text) > 4096 or any(len(part) > 255 for part in Path(text).parts):
        raise CatalogError(f"the name or path of a {_SINGULAR[kind]} is too long: {text[:40]}...")
    shipped = configs_root() / kind / f"{text}{suffix}"
    if "/" not in text and shipped.is_file():  # whatever lies in the working directory by that name
        return shipped
    if kind == "models":
        for folder in (beside / text if beside else None, Path(text)):
            if folder is not None and (folder / _CONFIG_JSON).is_file():
                return folder / _CONFIG_JSON
        if text and Path(text).is_dir():
            raise CatalogError(f"no {_CONFIG_JSON} in the folder {text}")
    if not text.endswith((suffix, ".json") if kind == "models" else suffix):
        hint = (kind == "models" and _published_as(text)) or did_you_mean(text, list_names(kind))
        raise CatalogError(
            f"unknown {_SINGULAR[kind]} {text!r}: {hint} "
            f"(or give the path of a {suffix} file{' or of a config.json' if kind == 'models' else ''})"
        )
    for candidate in (beside / text if beside else None, Path(text)):
        if candidate is not None and candidate.is_file():
            return candidate
    raise CatalogError(f"no such {_SINGULAR[kind]} file: {text}")


def _published_as(repository: str) -> str:
    """A hint at the shipped model whose file names a repository; "" where none does."""
    files = {name: configs_root() / "models" / f"{name}.toml" for name in list_names("models")}
    quoted = f'= "{repository.lower()}"'
    found = [name for name, path in files.items() if quoted in read_bytes(path, LARGEST_FILE_BYTES).decode().lower()]
    return f"its name here is {found[0]!r}" if found and "/" in repository else ""


SchemaT = TypeVar("SchemaT", bound=BaseModel)


def read_json(path: Path) -> JsonObject:
    """Reads a JSON object of others' making, whose numbers may be infinite. Raises: CatalogError."""
    with _reading(path):
        return parse_object(read_bytes(path, LARGEST_JSON_BYTES), infinite=True)


LARGEST_FILE_BYTES = 1_000_000
"""[assumed] A hundred times the longest configuration; what is longer was meant for something else."""
LARGEST_JSON_BYTES = 10_000_000
"""[assumed] Several times the longest model configuration, which names every quantised weight."""


def read_config(path: Path, schema: type[SchemaT]) -> SchemaT:
    """Reads one TOML file and validates it.

    Raises:
        CatalogError: The file cannot be read, is no TOML, or breaks the schema.
    """
    with _reading(path):
        data = _parsed(read_bytes(path, LARGEST_FILE_BYTES))
    try:
        return schema.model_validate(data)
    except ValidationError as error:
        raise CatalogError(f"{path}: {first_error_text(error, schema)}") from error


_parsed = lru_cache(maxsize=256)(parse_toml)
"""By content: the same few files are behind every question, and to parse one takes longer than all that follows."""


@contextmanager
def _reading(path: Path) -> Generator[None]:
    try:
        yield
    except OSError as error:
        raise CatalogError(f"cannot read {path}: {error}") from error
    except Unreadable as error:
        raise CatalogError(f"{path}: {error}") from error
