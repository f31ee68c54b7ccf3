"""A run's checkpoint on disk: a pickle behind its SHA-256, so that no damaged one is ever gone on from."""

from __future__ import annotations

import hashlib
import logging
import pickle
from pathlib import Path
from typing import Any

from raysearch.files import write_bytes

CHECKPOINT_FILE = "checkpoint.pkl"

_DIGEST_BYTES = hashlib.sha256().digest_size
_log = logging.getLogger(__name__)


def write_checkpoint(run_dir: Path, state: dict[str, Any]) -> None:
    """Replaces the checkpoint of a run."""
    content = pickle.dumps(state)
    write_bytes(run_dir / CHECKPOINT_FILE, hashlib.sha256(content).digest() + content)


def read_checkpoint(run_dir: Path) -> dict[str, Any] | None:
    """What was saved last; None if nothing was, or if it is damaged."""
    content = whole_checkpoint(run_dir)
    return None if content is None else pickle.loads(content)


def whole_checkpoint(run_dir: Path) -> bytes | None:
    """The pickle in the checkpoint; None without one. A damaged one counts as none, which is logged.

    Nothing is lost with it but time: a run that starts again makes the same calls bit for bit.
    """
    path = run_dir / CHECKPOINT_FILE
    if not path.is_file():
        return None
    stored = path.read_bytes()
    digest, content = stored[:_DIGEST_BYTES], stored[_DIGEST_BYTES:]
    if hashlib.sha256(content).digest() != digest:
        _log.warning("note: %s is damaged: its run starts again from the first call", path)
        return None
    return content
