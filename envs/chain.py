"""Lines that each carry the digest of themselves and of all before them, so that what is lost or altered shows."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from itertools import islice
from pathlib import Path

NO_ROWS_DIGEST = "0" * 32
"""What the first line's digest is chained to. Digests are 128 bits of a SHA-256: far more than chance ever matches."""
_CALL_KEY = b', "call": '
_DIGEST_KEY = b', "digest": "'
_END = b'"}\n'
_SUFFIX_BYTES = len(_DIGEST_KEY) + len(NO_ROWS_DIGEST) + len(_END)


class DamagedRows(ValueError):
    """A rows file is not what a run wrote; the message begins with its path."""


def chained_line(run: bytes, body: bytes, digest: str) -> tuple[bytes, str]:
    """A line of JSON and its digest, chained to that of the line before.

    Args:
        run: The object's beginning, `{"run_id": "..."`, which the digest leaves out: it says whether two runs made the
            same calls with the same results.
        body: All the other fields, `"call": 1, ...`, without braces.
        digest: Of the line before.
    """
    digest = _chained(digest.encode(), body).decode()
    return b"%b, %b%b%b%b" % (run, body, _DIGEST_KEY, digest.encode(), _END), digest


def follow(path: Path, lines: Iterable[bytes], most: int | None = None) -> tuple[int, str]:
    """How many lines there are, each of which follows from those before it, and the digest of the last.

    Args:
        path: For the message.
        lines: With their ends.
        most: Those behind so many are not looked at.

    Raises:
        DamagedRows: A line is lost, doubled, out of place or altered.
    """
    count, digest, run, body = 0, NO_ROWS_DIGEST.encode(), b"", 0
    sha256, digits, begin, end = hashlib.sha256, len(NO_ROWS_DIGEST), len(_DIGEST_KEY) - _SUFFIX_BYTES, -len(_END)
    for line in islice(lines, most):  # a million take a second: nothing stands in here that can be spared
        if not count:
            run = line.partition(_CALL_KEY)[0] + _CALL_KEY
            body = len(run) - len(_CALL_KEY) + len(", ")
        count += 1
        digest = sha256(digest + line[body:-_SUFFIX_BYTES]).hexdigest()[:digits].encode()
        if line[begin:end] != digest or not line.startswith(run):
            raise DamagedRows(f"{path}, line {count} is damaged: it does not follow from the lines before it")
    return count, digest.decode()


def _chained(digest: bytes, body: bytes) -> bytes:
    return hashlib.sha256(digest + body).hexdigest()[: len(NO_ROWS_DIGEST)].encode()
