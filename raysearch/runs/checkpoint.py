"""A run's checkpoint on disk: arrays and plain data behind their SHA-256, so that no damaged one is ever resumed from.

Nothing in it can run code: the arrays are NumPy's, read without pickle, and all else is JSON. What a checkpoint may
hold is None, bool, int, float, str, lists, tuples and dictionaries of such, and arrays of numbers.
"""

from __future__ import annotations

import hashlib
import io
import json
import logging
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from envs.saved_state import SavedState
from raysearch.base.file_io import write_bytes
from sim.config.reading import Unreadable, parse_object, read_bytes

CHECKPOINT_FILE = "checkpoint.bin"

LARGEST_BYTES = 512 * 1024**2
"""[assumed] The largest searcher after a million calls takes a third of it; what is larger is not one of ours."""
_MOST_VALUES = 100_000_000
"""[assumed] Of plain data: those of a searcher that keeps each of ten million calls."""
_TREE = "tree"
"""Name of the member that holds the plain data; the arrays are named by their numbers."""
_UNREADABLE = (
    *(zipfile.BadZipFile, RuntimeError, OSError, EOFError),  # the archive, which may say that it is encrypted
    *(KeyError, TypeError, MemoryError),  # what is in it
)
_DIGEST_BYTES = hashlib.sha256().digest_size
_log = logging.getLogger(__name__)


def write_checkpoint(run_dir: Path, state: SavedState) -> None:
    """Replaces the checkpoint of a run.

    Raises:
        TypeError: The state holds something that is neither plain data nor an array.
    """
    content = pack(state)
    write_bytes(run_dir / CHECKPOINT_FILE, hashlib.sha256(content).digest() + content)


def read_checkpoint(run_dir: Path) -> SavedState | None:
    """What was saved last; None if nothing was, or if it is damaged, which is logged.

    Nothing is lost with a damaged one but time: a run that starts again makes the same calls bit for bit.
    """
    try:
        return load_checkpoint(run_dir)
    except ValueError as error:
        path = run_dir / CHECKPOINT_FILE
        _log.warning("note: %s is damaged (%s): its run starts again from the first call", path, error)
        return None


def load_checkpoint(run_dir: Path) -> SavedState | None:
    """What was saved last; None if nothing was.

    Raises:
        ValueError: It is damaged; the message says how, without the path.
    """
    try:
        stored = read_bytes(run_dir / CHECKPOINT_FILE, LARGEST_BYTES)
    except FileNotFoundError:
        return None
    except OSError as error:
        raise Unreadable(f"it cannot be read: {error.strerror}") from error
    digest, content = stored[:_DIGEST_BYTES], stored[_DIGEST_BYTES:]
    if hashlib.sha256(content).digest() != digest:
        raise Unreadable("its digest is not that of its content")
    return unpack(content)


def pack(state: SavedState) -> bytes:
    """A state as an archive of NumPy, uncompressed.

    Raises:
        TypeError: See `write_checkpoint`; the message says where in the state.

    >>> unpack(pack({"step": 3, "pair": (1.5, None), "moments": {0: np.arange(3)}}))
    {'step': 3, 'pair': (1.5, None), 'moments': {0: array([0, 1, 2])}}
    """
    arrays: list[np.ndarray] = []
    tree = json.dumps(_plain(state, arrays, "state")).encode()
    members = {str(number): array for number, array in enumerate(arrays)}
    buffer = io.BytesIO()
    np.savez(buffer, allow_pickle=False, **{_TREE: np.frombuffer(tree, np.uint8)}, **members)
    return buffer.getvalue()


def unpack(content: bytes) -> SavedState:
    """The state that `pack` wrote.

    Raises:
        ValueError: It did not write this.
    """
    try:
        with zipfile.ZipFile(io.BytesIO(content)) as archive:  # one that unfolds to more than it is was never ours
            if any(member.compress_type != zipfile.ZIP_STORED for member in archive.infolist()):
                raise ValueError("its arrays are compressed")
        with np.load(io.BytesIO(content), allow_pickle=False) as members:
            state = _restored(parse_object(members[_TREE].tobytes(), _MOST_VALUES, infinite=True), members)
    except _UNREADABLE as error:
        raise ValueError(f"{type(error).__name__}: {error}") from error
    if not isinstance(state, dict):
        raise ValueError(f"expected named values, got {type(state).__name__}")
    return state


def _plain(value: Any, arrays: list[np.ndarray], where: str) -> Any:
    """The value as JSON has it; what JSON has no word for becomes a dictionary with one key that begins with "$"."""
    if value is None or isinstance(value, (bool, int, str)):
        return value
    if isinstance(value, float):
        return float(value)  # of NumPy's, the plain one
    if type(value) is list:
        return [_plain(item, arrays, f"{where}[{position}]") for position, item in enumerate(value)]
    if type(value) is tuple:
        return {"$tuple": _plain(list(value), arrays, where)}
    if isinstance(value, Mapping):
        if all(isinstance(key, str) and not key.startswith("$") for key in value):
            return {key: _plain(item, arrays, f"{where}.{key}") for key, item in value.items()}
        return {"$items": [[_plain(k, arrays, where), _plain(v, arrays, f"{where}[{k!r}]")] for k, v in value.items()]}
    if isinstance(value, np.ndarray) and value.dtype.kind in "biuf":
        arrays.append(value)
        return {"$array": len(arrays) - 1}
    raise TypeError(f"expected plain data or an array of numbers at {where}, got {type(value).__name__}: {value!r:.80}")


def _restored(value: Any, members: Mapping[str, np.ndarray]) -> Any:
    if isinstance(value, list):
        return [_restored(item, members) for item in value]
    if not isinstance(value, dict):
        return value
    match value:
        case {"$array": number}:
            return members[str(number)]
        case {"$tuple": items}:
            return tuple(_restored(items, members))
        case {"$items": items}:
            return {_restored(key, members): _restored(item, members) for key, item in items}
        case _:
            return {key: _restored(item, members) for key, item in value.items()}
