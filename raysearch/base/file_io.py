"""The files of a results folder: written whole, checked when read."""

from __future__ import annotations

import errno
import hashlib
import io
import json
import os
import shutil
from collections.abc import Mapping
from datetime import UTC, datetime
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING

from pydantic import BaseModel, ValidationError

from raysearch.base.errors import InputError
from sim.config.files import ConfigKind, config_path, configs_root
from sim.config.mistakes import first_error_text
from sim.config.reading import Unreadable, parse_object, read_bytes
from sim.config.writing import write_atomically
from sim.json_object import JsonFields, JsonObject
from sim.layouts import layout_of, meshes_text
from sim.strategy import ONE_REPLICA, ReplicaSet, Strategy

if TYPE_CHECKING:
    from matplotlib.figure import Figure

RESULTS_ROOT = Path("results")
"""Where commands without --out put their folders, relative to the working directory."""


def write_bytes(path: Path, content: bytes) -> None:
    """Writes a file; see `sim.config.writing.write_atomically`."""
    write_atomically(path, lambda temporary: temporary.write_bytes(content))


def png_of(figure: Figure, dpi: int = 150) -> bytes:
    """A picture as a PNG file has it."""
    picture = io.BytesIO()
    figure.savefig(picture, format="png", dpi=dpi)
    return picture.getvalue()


def write_json(path: Path, value: JsonFields) -> None:
    """Writes a JSON object; see `sim.config.writing.write_atomically`."""
    write_bytes(path, _json_bytes(value))


def _json_bytes(value: JsonFields) -> bytes:
    return (json.dumps(value, indent=2, allow_nan=False) + "\n").encode()


def write_together(folder: Path, files: Mapping[str, bytes]) -> None:
    """Makes or replaces files of a folder, which is made if need be: all of them or, where one cannot be written, none.

    Args:
        folder: Where they are to lie; what else lies there stays.
        files: By path within it.

    Raises:
        OSError: One cannot be written, or would lie behind a link within the folder; nothing has changed.
    """
    for name in files:
        _check_place(folder, Path(name))
    top = folder.absolute()
    inside = Path()
    while not top.exists() and not top.parent.exists():
        top, inside = top.parent, top.name / inside
    made = not top.exists()
    staged = (top.parent if made else top) / f".{top.name}.{os.urandom(4).hex()}"
    try:
        for name, content in files.items():
            write_bytes(staged / inside / name, content)
        if made:
            staged.rename(top)
        else:
            for name in files:
                (top / name).parent.mkdir(parents=True, exist_ok=True)
                (staged / name).replace(top / name)
    finally:
        shutil.rmtree(staged, ignore_errors=True)


def _check_place(folder: Path, name: Path) -> None:
    """Makes sure that a file of a folder may be put where it is to lie. Raises: OSError."""
    for parent in (folder / each for each in name.parents if each != Path()):
        if os.path.lexists(parent) and (parent.is_symlink() or not parent.is_dir()):
            raise NotADirectoryError(errno.ENOTDIR, "expected a folder, or nothing, in its place", str(parent))
    if (place := folder / name).is_dir() and not place.is_symlink():
        raise IsADirectoryError(errno.EISDIR, "expected a file, or nothing, in its place", str(place))


def aside(path: Path) -> Path:
    """Where something is put aside: the path with a number behind its name, the first that is free."""
    return next(place for number in count() if not os.path.lexists(place := path.with_name(f"{path.name}.{number}")))


SEAL = "sha256"
"""The last key of a record: the digest of all the others."""
LARGEST_RECORD_BYTES = 32 * 1024**2
"""[assumed] A study of a hundred thousand runs takes a fifth of it; what is larger is not one of ours."""


def write_record(path: Path, value: JsonFields) -> None:
    """Writes a JSON object behind whose back nobody changes anything: `read_record` notices."""
    write_bytes(path, record_bytes(value))


def record_bytes(value: JsonFields) -> bytes:
    """What `write_record` writes."""
    return _json_bytes({**value, SEAL: _seal(value)})


def read_record(path: Path, schema: type[BaseModel], *, sealed: bool = True) -> JsonObject:
    """The object that `write_record` wrote.

    Args:
        path: Where.
        schema: What must stand in it.
        sealed: Whether it must carry its digest. A file that people may write themselves may lack one, but none that
            is not its own.

    Raises:
        InputError: It was altered since, or is not what `schema` says.
        OSError: There is no such file, or it cannot be read.
    """
    try:
        content = read_bytes(path, LARGEST_RECORD_BYTES)
        fields = parse_object(content)
        schema.model_validate_json(content, strict=True)
        seal = fields.pop(SEAL, None)
        if seal != _seal(fields) and (sealed or seal is not None):
            older = "or an older version wrote it" if sealed else f"without {SEAL!r} it is taken as it is"
            raise Unreadable(f"it was altered since it was written, {older}")
    except ValidationError as error:
        raise Damaged(f"{path} is damaged: {first_error_text(error, schema)}") from error
    except Unreadable as error:
        raise Damaged(f"{path} is damaged: {error}") from error
    return fields


def _seal(value: JsonFields) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()


class Damaged(InputError):
    """A file of results is not what was written.

    Attributes:
        what: Which one, and what is wrong with it.
    """

    def __init__(self, what: str) -> None:
        super().__init__(
            f"{what}; bring it back from a copy, make it again (with --resume, if it is of a study, search or tuning), "
            "or use another folder"
        )
        self.what = what


def results_folder(out: Path | None, name: str) -> Path:
    """Where new results go: `out`, or results/<name>-<UTC time>. Creates nothing."""
    return out or RESULTS_ROOT / f"{name}-{datetime.now(UTC):%Y%m%dT%H%M%SZ}"


def anchored(kind: ConfigKind, name_or_path: str, *, beside: Path | None = None) -> str:
    """A shipped name as it is; a path made absolute, so that results read back from any working directory.

    Raises:
        CatalogError: No such name or file.
    """
    path = config_path(kind, name_or_path, beside=beside)
    if path == configs_root() / kind / f"{name_or_path}{path.suffix}":
        return name_or_path
    return str(path.resolve() if path.suffix == ".toml" else path.absolute())  # downloaded ones are links to blobs


def strategy_dict(strategy: Strategy) -> JsonObject:
    """A strategy in JSON: tp, ep, pp, batch, the list dims; beyond the paper's space also cp, dp, vocabulary.

    In phase traffic also how replicas serve together, unless it is one alone.
    """
    fields: JsonObject = {
        "tp": strategy.tp,
        "ep": strategy.ep,
        "pp": strategy.pp,
        "batch": strategy.batch,
        "dims": list(strategy.dims),
    }
    own = {"cp": strategy.cp, "dp": strategy.attention_dp} if strategy.extended else {}
    fields |= own | ({"vocabulary": list(strategy.vocabulary)} if strategy.vocabulary else {})
    return fields | ({"served": _served_dict(strategy.served)} if strategy.served != ONE_REPLICA else {})


def _served_dict(served: ReplicaSet) -> JsonObject:
    pool = {"prefill": strategy_dict(served.prefill)} if served.prefill else {}
    own = {name: getattr(served, name) for name in ("replicas", "chunk_tokens", "prefills")}
    return own | pool


def counted(count: int, noun: str) -> str:
    """A number of things in words.

    >>> counted(1, "GPU"), counted(2000, "run")
    ('1 GPU', '2,000 runs')
    """
    return f"{count:,} {noun}{'' if count == 1 else 's'}"


def degrees_text(strategy: Strategy) -> str:
    """Degrees and batch in words; the layout's name first if it has one, as people who deploy say it.

    >>> degrees_text(Strategy(4, 4, 2, 64, (), dp=1)), degrees_text(Strategy(8, 16, 1, 64, ()))
    ('TEP4 PP2, batch 64 (attention TP4, experts EP4)', 'attention TP8 DP16, experts TP8 EP16, batch 64')
    """
    vocabulary = f", vocabulary {','.join(map(str, strategy.vocabulary))}" if strategy.vocabulary else ""
    batch, meshes = f"batch {strategy.batch}", meshes_text(strategy)
    if (name := layout_of(strategy)) is None:
        stages = f"PP{strategy.pp}, " if strategy.pp > 1 else ""
        return f"{meshes}, {stages}{batch}{vocabulary}"
    behind = f" ({meshes})" if strategy.ep > 1 else ""
    return f"{name}, {batch}{behind}{vocabulary}"


def served_text(served: ReplicaSet) -> str:
    """How replicas serve together, in words.

    >>> served_text(ReplicaSet(2, 2048))
    '2 replicas, chunks of 2,048 tokens'
    """
    many = f"{served.replicas} replica{'s' if served.replicas > 1 else ''}"
    if (pool := served.prefill) is not None:
        ahead = f"{served.prefills} prefill replica{'s' if served.prefills > 1 else ''} of {degrees_text(pool)}"
        return f"{many} that decode, behind {ahead}"
    return f"{many}, chunks of {served.chunk_tokens:,} tokens" if served.chunk_tokens else f"{many}, whole prompts"


def as_strategy(fields: JsonFields) -> Strategy:
    """A strategy from its JSON form."""
    known = {**fields, "dims": tuple(fields["dims"]), "vocabulary": tuple(fields.get("vocabulary") or ())}
    if served := known.pop("served", None):
        pool = served.get("prefill")
        known["served"] = ReplicaSet(**{**served, "prefill": as_strategy(pool) if pool else None})
    return Strategy(**known)
