"""Lines that each carry the digest of themselves and of all before them, so that what is lost or altered shows."""

from __future__ import annotations

import hashlib
import io
from itertools import islice
from pathlib import Path
from typing import NamedTuple

NO_ROWS_DIGEST = "0" * 32
"""What the first line's digest is chained to. Digests are 128 bits of a SHA-256: far more than chance ever matches."""
_CALL_KEY = b', "call": '
_DIGEST_KEY = b', "digest": "'
_END = b'"}\n'
_SUFFIX_BYTES = len(_DIGEST_KEY) + len(NO_ROWS_DIGEST) + len(_END)


class DamagedRows(ValueError):
    """A rows file is not what a run wrote; the message begins with its path."""


class Chain(NamedTuple):
    """A file's first lines.

    Attributes:
        lines: How many.
        size_bytes: Of all of them.
        digest: Of the last.
    """

    lines: int = 0
    size_bytes: int = 0
    digest: str = NO_ROWS_DIGEST


class Seal(NamedTuple):
    """A file's first lines as they were when a run was saved, to be compared as a whole: no line needs to be followed.

    Attributes:
        lines, size_bytes, digest: See `Chain`.
        content: The `content_digest` of their bytes, hexadecimal.
    """

    lines: int
    size_bytes: int
    digest: str
    content: str


def content_digest(content: bytes | memoryview = b"") -> hashlib.blake2b:
    """A hash of bytes, to which more may be added. BLAKE2b: half the time of SHA-256 where processors know neither."""
    return hashlib.blake2b(content, digest_size=16)


def chained_line(run: bytes, body: bytes, digest: str) -> tuple[bytes, str]:
    """A line of JSON and its digest, chained to that of the line before.

    Args:
        run: The object's beginning, `{"run_id": "..."`, which the digest leaves out: it says whether two runs made the
            same calls with the same results.
        body: All the other fields, `"call": 1, ...`, without braces.
        digest: Of the line before.
    """
    digest = chained(digest, body)
    return b"%b, %b%b%b%b" % (run, body, _DIGEST_KEY, digest.encode(), _END), digest


def chained(digest: str, body: bytes) -> str:
    """The digest of a line, given that of the line before."""
    return hashlib.sha256(digest.encode() + body).hexdigest()[: len(NO_ROWS_DIGEST)]


def follow(path: Path, content: bytes, *, seal: Seal | None = None, most: int | None = None) -> Chain:
    """Checks that each line follows from those before it; returns how many there are, and the digest of the last.

    Args:
        path: For the message.
        content: Whole lines.
        seal: What the file must begin with, if that is known.
        most: Lines behind so many are not looked at.

    Raises:
        DamagedRows: A line is lost, doubled, out of place or altered.
    """
    if seal is None:
        return _follow(path, content, Chain(), most)
    sealed = memoryview(content)[: seal.size_bytes]
    if content_digest(sealed).hexdigest() != seal.content:
        there = _follow(path, content, Chain(), None).lines  # which says what line is wrong, if one is
        what = f"{there} rows" if there < seal.lines else "other rows"
        raise DamagedRows(f"{path} is damaged: it holds {what}, but was saved after {seal.lines} calls")
    return _follow(path, content, Chain(seal.lines, seal.size_bytes, seal.digest), most)


def _follow(path: Path, content: bytes, after: Chain, most: int | None) -> Chain:
    count, size, digest = after.lines, after.size_bytes, after.digest.encode()
    run = content[: content.find(b"\n") + 1].partition(_CALL_KEY)[0] + _CALL_KEY
    body, begin, end = len(run) - len(_CALL_KEY) + len(", "), len(_DIGEST_KEY) - _SUFFIX_BYTES, -len(_END)
    sha256, digits = hashlib.sha256, len(NO_ROWS_DIGEST)
    lines = io.BytesIO(content)
    lines.seek(size)
    for line in islice(lines, None if most is None else max(0, most - count)):
        count += 1  # a million take seconds: nothing stands in here that can be spared
        size += len(line)
        digest = sha256(digest + line[body:-_SUFFIX_BYTES]).hexdigest()[:digits].encode()
        if line[begin:end] != digest or not line.startswith(run):
            raise DamagedRows(f"{path}, line {count} is damaged: it does not follow from the lines before it")
    return Chain(count, size, digest.decode())
