"""Lines that each carry the digest of themselves and of all before them, so that what is lost or altered shows."""

from __future__ import annotations

import hashlib
import io
from collections.abc import Generator, Iterator
from contextlib import contextmanager
from io import BufferedReader
from itertools import islice
from pathlib import Path
from typing import BinaryIO, NamedTuple

from sim.config.reading import Unreadable, opened

NO_ROWS_DIGEST = "0" * 32
"""What the first line's digest is chained to. Digests are 128 bits of a SHA-256: far more than chance ever matches."""
_CALL_KEY = b', "call": '
_DIGEST_KEY = b', "digest": "'
_END = b'"}\n'
_BLOCK_BYTES = 4 * 1024**2
"""[assumed] Read at a time; no line is longer."""
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


def follow(path: Path, *, seal: Seal | None = None, most: int | None = None) -> Chain:
    """Checks that each whole line of a file follows from those before it, a block of them in memory at a time.

    Half a last line is passed over: it was never reported.

    Args:
        path: The file.
        seal: What the file must begin with, if that is known: it is compared at once.
        most: Lines behind so many are not looked at.

    Returns:
        How many lines there are, and the digest of the last.

    Raises:
        OSError: It cannot be read.
        DamagedRows: A line is lost, doubled, out of place or altered, or the file is none.
    """
    with _rows(path) as file:
        if seal is None:
            return _follow(path, file, Chain(), most)
        if _digest_of_first(file, seal.size_bytes) != seal.content:
            file.seek(0)
            there = _follow(path, file, Chain(), None).lines  # which says what line is wrong, if one is
            what = f"{there} rows" if there < seal.lines else "other rows"
            raise DamagedRows(f"{path} is damaged: it has {what}, but was saved after {seal.lines} calls")
        return _follow(path, file, Chain(seal.lines, seal.size_bytes, seal.digest), most)


def links(path: Path) -> Iterator[tuple[bytes, Chain]]:
    """Each whole line of a short file, and the file up to it. Raises: OSError, DamagedRows, see `follow`."""
    with _rows(path) as file:
        chain, run = Chain(), b""
        for block in _blocks(path, file):
            for line in block.splitlines(keepends=True):
                run = run or _run_of(line)
                chain = _linked(path, line, chain, run, None)
                yield line, chain


@contextmanager
def _rows(path: Path) -> Generator[BufferedReader]:
    try:
        with opened(path) as file:
            yield file
    except Unreadable as error:
        raise DamagedRows(f"{path} is damaged: {error}") from error


def _digest_of_first(file: BinaryIO, size_bytes: int) -> str | None:
    """The digest of a file's first bytes; None where it has not so many."""
    digest, left = content_digest(), size_bytes
    while left > 0 and (block := file.read(min(left, _BLOCK_BYTES))):
        digest.update(block)
        left -= len(block)
    return None if left else digest.hexdigest()


def _follow(path: Path, file: BinaryIO, after: Chain, most: int | None) -> Chain:
    """Follows the lines behind `after`, where the file stands."""
    chain, run = after, b""
    if after.lines:
        file.seek(0)
        run = _run_of(file.readline(_BLOCK_BYTES))
        file.seek(after.size_bytes)
    for block in _blocks(path, file):
        run = run or _run_of(block)
        chain = _linked(path, block, chain, run, most)
        if most is not None and chain.lines >= most:
            break
    return chain


def _blocks(path: Path, file: BinaryIO) -> Iterator[bytes]:
    """Whole lines, many at a time."""
    rest = b""
    while block := file.read(_BLOCK_BYTES):
        whole = block.rfind(b"\n") + 1
        if whole:
            yield rest + block[:whole]
            rest = block[whole:]
        elif rest:
            raise DamagedRows(f"{path} is damaged: a line has more than {_BLOCK_BYTES:,} bytes")
        else:
            rest = block


def _run_of(lines: bytes) -> bytes:
    """What each line of a file begins with, from its first."""
    return lines[: lines.find(b"\n") + 1].partition(_CALL_KEY)[0] + _CALL_KEY


def _linked(path: Path, lines: bytes, after: Chain, run: bytes, most: int | None) -> Chain:
    count, size, digest = after.lines, after.size_bytes, after.digest.encode()
    body, begin, end = len(run) - len(_CALL_KEY) + len(", "), len(_DIGEST_KEY) - _SUFFIX_BYTES, -len(_END)
    sha256, digits = hashlib.sha256, len(NO_ROWS_DIGEST)
    for line in islice(io.BytesIO(lines), None if most is None else max(0, most - count)):
        count += 1  # a million take seconds: nothing stands in here that can be spared
        size += len(line)
        digest = sha256(digest + line[body:-_SUFFIX_BYTES]).hexdigest()[:digits].encode()
        if line[begin:end] != digest or not line.startswith(run):
            raise DamagedRows(f"{path}, line {count} is damaged: it does not follow from the lines before it")
    return Chain(count, size, digest.decode())
