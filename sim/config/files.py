"""Finds and reads configuration files: a shipped name or a path, TOML, a schema.

Every mistake a user can make in a file ends here, as one `CatalogError` that names the file, the
key, what was expected and what was found.
"""

from __future__ import annotations

import difflib
from collections.abc import Generator, Iterable
from contextlib import contextmanager
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Literal, TypeVar, get_args

from pydantic import BaseModel, ValidationError

from sim.config.reading import Unreadable, parse_object, parse_toml, read_bytes
from sim.json_object import JsonObject

if TYPE_CHECKING:
    from pydantic_core import ErrorDetails

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


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """A hint for an unknown name: the closest known one, or all of them."""
    known = sorted(known)
    close = difflib.get_close_matches(name, known, n=1, cutoff=0.5)
    if close:
        return f"did you mean {close[0]!r}?"
    return f"known: {', '.join(known)}" if known else "none is known"


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
    if kind == "models":
        for folder in (beside / text if beside else None, Path(text)):
            if folder is not None and (folder / _CONFIG_JSON).is_file():
                return folder / _CONFIG_JSON
        if "/" in text and Path(text).is_dir():
            raise CatalogError(f"no {_CONFIG_JSON} in the folder {text}")
    if not text.endswith((suffix, ".json") if kind == "models" else suffix):
        shipped = configs_root() / kind / f"{text}{suffix}"
        if "/" not in text and shipped.is_file():
            return shipped
        raise CatalogError(
            f"unknown {_SINGULAR[kind]} {text!r}: {did_you_mean(text, list_names(kind))} "
            f"(or give the path of a {suffix} file{' or of a config.json' if kind == 'models' else ''})"
        )
    for candidate in (beside / text if beside else None, Path(text)):
        if candidate is not None and candidate.is_file():
            return candidate
    raise CatalogError(f"no such {_SINGULAR[kind]} file: {text}")


SchemaT = TypeVar("SchemaT", bound=BaseModel)


def _known_keys(schema: type[BaseModel], location: tuple[str | int, ...]) -> list[str]:
    for part in location:
        if isinstance(part, int):
            continue  # one of a list of tables, which are all alike
        field = schema.model_fields.get(str(part))
        candidates = (field.annotation, *get_args(field.annotation)) if field else ()
        nested = [c for c in candidates if isinstance(c, type) and issubclass(c, BaseModel)]
        if not nested:
            return []
        schema = nested[0]
    return list(schema.model_fields)


_MOST_MISTAKES = 8


def first_error_text(error: ValidationError, schema: type[BaseModel]) -> str:
    """What is wrong with a file or options: key, expectation and value of the first mistakes, on one line."""
    lines: list[str] = []
    mistakes = [item for item in error.errors() if _is_of_its_kind(item)]
    for item in mistakes[:_MOST_MISTAKES]:
        location = tuple(part for part in item["loc"] if not _names_a_type(part))
        key = ".".join(str(part) for part in location) or "file"
        if item["type"] == "extra_forbidden":
            hint = did_you_mean(str(location[-1]), _known_keys(schema, location[:-1]))
            lines.append(f"{key}: unknown key; {hint}")
        elif item["type"] == "missing":
            lines.append(f"{key}: missing")
        else:
            message = item["msg"].removeprefix("Value error, ")
            stated = "got" in message or isinstance(item["input"], dict | BaseModel)
            lines.append(f"{key}: {message}" + ("" if stated else f", got {item['input']!r}"))
    more = len(mistakes) - len(lines)
    return "; ".join(lines) + (f"; and {more} more" if more else "")


def _names_a_type(part: int | str) -> bool:
    """Whether a part of a location is pydantic's name of one type that a key may have, and no key."""
    return isinstance(part, str) and "[" in part


def _is_of_its_kind(item: ErrorDetails) -> bool:
    """Where a key takes numbers or a name: of a text only what is wrong with the name, of numbers what is with them."""
    types = [part for part in item["loc"] if _names_a_type(part)]
    if not types:
        return True
    text = isinstance(item["input"], str) and _names_a_type(item["loc"][-1])
    return text == str(types[-1]).startswith("literal[")


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


_parsed = lru_cache(maxsize=32)(parse_toml)
"""By content: the same few files are behind every question, and to parse one takes longer than all that follows."""


@contextmanager
def _reading(path: Path) -> Generator[None]:
    try:
        yield
    except OSError as error:
        raise CatalogError(f"cannot read {path}: {error}") from error
    except Unreadable as error:
        raise CatalogError(f"{path}: {error}") from error
