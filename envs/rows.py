"""One row per call on disk: JSON Lines while the run continues, Parquet when it is done.

Every line carries the digest of itself and of all before it, so that what is lost, doubled, swapped or altered shows.

At every moment, also after a kill, one file holds all rows: the Parquet file replaces the JSON Lines only once
it is complete, and where both exist they agree and the JSON Lines count.
"""
# pyright: reportMissingTypeStubs=false, reportUnknownMemberType=false, reportUnknownArgumentType=false
# (pandas has no stubs of its own and leaves parts of its interface untyped)

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO, final, get_type_hints

from envs.calls import CallRow, run_head
from envs.chain import NO_ROWS_DIGEST, Chain, DamagedRows, Seal, chained, chained_line, content_digest, follow
from envs.frames import bodies, parsed, read_parquet, write_parquet
from sim.config.reading import Unreadable, opened, parse_object
from sim.config.writing import write_atomically

if TYPE_CHECKING:
    import pandas as pd

ROWS_FILE = "rows.jsonl"
COMPACT_FILE = "rows.parquet"
LONGEST_ROW_BYTES = 8192
"""[assumed] More than a row of any workload takes."""


_FRAME_ROWS = 8
"""[assumed] As many rows' room takes what a Parquet file holds besides its rows."""


class RowsTaken(RuntimeError):
    """Another process continues with the run; the message begins with the path of its rows."""


@final
class RowWriter:
    """Appends rows to a JSON Lines file; each row is handed to the operating system before `write` returns.

    Args:
        path: A file that does not exist yet; its folder does.

    Raises:
        FileExistsError: There are rows already, plain or compacted.
    """

    def __init__(
        self, path: Path, *, file: BinaryIO | None = None, chain: Chain | None = None, content: bytes = b""
    ) -> None:
        self.path = path
        self._chain = chain or Chain()
        self._content = content_digest(content)
        self._file = file or _create(path)

    @classmethod
    def resume(cls, path: Path, calls: int, seal: Seal | None = None) -> RowWriter:
        """A writer that continues after the first `calls` rows; later ones are dropped, for the run makes them again.

        Also right if the file ends in half a row, was compacted meanwhile, or (with 0 calls) does not exist.

        Args:
            path: The rows.
            calls: So many are kept.
            seal: What `seal` returned after as many, if that is known.

        Raises:
            ValueError: There are fewer whole rows than that, or they are damaged.
        """
        file, chain, content = _reopen(path, calls, seal)
        return cls(path, file=file, chain=chain, content=content)

    @property
    def lines(self) -> int:
        """Rows so far."""
        return self._chain.lines

    @property
    def digest(self) -> str:
        """Of all rows so far: equal if and only if two runs made the same calls with the same results."""
        return self._chain.digest

    def seal(self) -> Seal:
        """What is written so far, for `read_rows`, `whole_rows` and `resume` to compare with."""
        return Seal(*self._chain, self._content.hexdigest())

    def write(self, row: CallRow) -> None:
        """Appends one row.

        Raises:
            OSError: It cannot be written. Part of it may be on disk, which `resume` drops.
        """
        line, digest = row.to_json(self.digest)
        rest = line
        while rest:  # an unbuffered file may take a part; one with a buffer would try again to write it when closed
            rest = rest[self._file.write(rest) :]
        self._content.update(line)
        self._chain = Chain(self._chain.lines + 1, self._chain.size_bytes + len(line), digest)

    def sync(self) -> None:
        """Returns once every row is on the disk, or on the server that other hosts see: not even a lost host loses it.

        Raises:
            OSError: It cannot be written.
        """
        os.fsync(self._file.fileno())

    def check_ours(self) -> None:
        """Makes sure that no other process has resumed the run since.

        A process may outlive its being given up for dead, say behind a broken network. What it still writes goes into
        a file that has lost its name to the other's; before it writes elsewhere in the folder, it must ask here.

        Raises:
            RowsTaken: Another process has it.
        """
        try:
            ours = os.path.samestat(os.fstat(self._file.fileno()), self.path.stat())
        except (FileNotFoundError, ValueError):  # it is finished, and compacted; or closed
            ours = False
        if not ours:
            raise RowsTaken(f"{self.path} has been taken over by another process, which continues the run")

    def close(self) -> None:
        """Closes the file; a second time does nothing."""
        self._file.close()


def compact(jsonl_path: Path, parquet_path: Path, *, calls: int | None = None) -> None:
    """Turns a finished run's JSON Lines into Parquet and removes them; does nothing if that is done already.

    Raises:
        RowsTaken: See `write_compact`.
    """
    if jsonl_path.exists() or not parquet_path.exists():
        write_compact(jsonl_path, parquet_path, calls=calls)
        jsonl_path.unlink(missing_ok=True)  # who went on with the run may have been as fast


def write_compact(jsonl_path: Path, parquet_path: Path, *, calls: int | None = None, seal: Seal | None = None) -> str:
    """Writes a run's JSON Lines as Parquet, too; returns the SHA-256 of that file.

    Args:
        jsonl_path: The rows.
        parquet_path: Where to.
        calls: How many there must be, if that is known.
        seal: The seal of their writer, if that is known.

    Raises:
        RowsTaken: There are not as many rows as `calls`: another process is making them again.
        DamagedRows: They are not what a run wrote.
    """
    rows = _load(jsonl_path, seal)
    if calls is not None and len(rows) != calls:
        raise RowsTaken(f"{jsonl_path} has {len(rows)} rows of {calls}: another process continues the run")
    write_atomically(parquet_path, lambda temporary: write_parquet(rows, temporary))
    return file_digest(parquet_path)


def file_digest(path: Path, calls: int | None = None) -> str:
    """The SHA-256 of a file.

    Args:
        path: The file.
        calls: How many rows it holds, if that is known: one that is too long for them is not read.

    Raises:
        OSError: It cannot be read.
        DamagedRows: It is no regular file, or too long.
    """
    try:
        with opened(path) as file:
            size = os.fstat(file.fileno()).st_size
            if calls is not None and size > (calls + _FRAME_ROWS) * LONGEST_ROW_BYTES:
                raise Unreadable(f"it is too long for {calls} calls: {size:,} bytes")
            return hashlib.file_digest(file, "sha256").hexdigest()
    except Unreadable as error:
        raise DamagedRows(f"{path} is damaged: {error}") from error


def rows_digest(run_dir: Path) -> str:
    """The digest of a run's rows as `RowWriter` has it, computed again from each of them.

    Raises:
        FileNotFoundError, DamagedRows: See `read_rows`.
    """
    digest = NO_ROWS_DIGEST
    for body in bodies(read_rows(run_dir)):
        digest = chained(digest, body)
    return digest


def whole_rows(run_dir: Path, seal: Seal | None = None) -> int | None:
    """How many rows a run under way has, every one of them looked at; None once it is compacted.

    Args:
        run_dir: The run's folder.
        seal: Of its writer, when it was saved: what it covers is compared at once.

    Raises:
        DamagedRows: One is lost, doubled, out of place or altered.
    """
    path = run_dir / ROWS_FILE
    try:
        return follow(path, seal=seal).lines
    except FileNotFoundError:
        return None


def read_rows(run_dir: Path, columns: Sequence[str] = CallRow._fields, *, seal: Seal | None = None) -> pd.DataFrame:
    """All whole rows of a run, while it runs or afterwards.

    Args:
        run_dir: The run's folder.
        columns: The fields of `CallRow` that are wanted; few are read faster.
        seal: Of its writer, when it was saved: what it covers is compared at once.

    Raises:
        FileNotFoundError: The folder holds no rows.
        DamagedRows: The file is not whole (half a last line is no damage: that row was never reported).
    """
    path = run_dir / ROWS_FILE
    try:
        return _load(path, seal).reindex(columns=list(columns))
    except FileNotFoundError:  # compacted, perhaps this very moment
        pass
    try:
        return read_parquet(run_dir / COMPACT_FILE, columns)
    except FileNotFoundError:
        raise FileNotFoundError(f"no calls in {run_dir}: expected {ROWS_FILE} or {COMPACT_FILE}") from None


def last_row(run_dir: Path) -> CallRow | None:
    """The last whole row of a run under way, whose `call` is how far it is; None before the first and once compacted.

    Reads the end of the file only.

    Raises:
        DamagedRows: The line is not what a run wrote.
    """
    path = run_dir / ROWS_FILE
    try:
        with opened(path) as file:
            file.seek(max(0, file.seek(0, os.SEEK_END) - 2 * LONGEST_ROW_BYTES))
            lines = file.read().splitlines(keepends=True)
    except FileNotFoundError:
        return None
    except Unreadable as error:
        raise DamagedRows(f"{path} is damaged: {error}") from error
    whole = [line for line in lines[-2:] if line.endswith(b"\n")]
    return _parse(whole[-1], f"{path}, last line") if whole else None


def _compacted(path: Path) -> Path:
    return path.with_suffix(".parquet")


def _create(path: Path) -> BinaryIO:
    for existing in (path, _compacted(path)):
        if existing.exists():
            raise FileExistsError(f"{existing} contains a run already: resume it or choose another folder")
    return path.open("xb", buffering=0)


def _reopen(path: Path, calls: int, seal: Seal | None) -> tuple[BinaryIO, Chain, bytes]:
    if calls:
        _expand(path)
    chain = follow(path, seal=seal, most=calls) if calls and path.exists() else Chain()
    if chain.lines < calls:
        raise ValueError(
            f"{path} has {chain.lines} whole rows, but the run was saved after {calls} calls: "
            "this is not the folder of that run, or rows were removed"
        )
    kept = b""
    if chain.lines:
        with opened(path) as file:
            kept = file.read(chain.size_bytes)
    # A new file, not the old one cut short: a process that still holds the old one must not write into ours.
    write_atomically(path, lambda temporary: temporary.write_bytes(kept))
    _compacted(path).unlink(missing_ok=True)
    return path.open("ab", buffering=0), chain, kept


def _expand(path: Path) -> None:
    """Undoes `compact`, wherever it was interrupted."""
    compacted = _compacted(path)
    if compacted.exists() and not path.exists():
        lines = b"".join(_lines(read_parquet(compacted)))
        write_atomically(path, lambda temporary: temporary.write_bytes(lines))


def _lines(rows: pd.DataFrame) -> Iterator[bytes]:
    digest = NO_ROWS_DIGEST
    for run_id, body in zip(rows["run_id"], bodies(rows), strict=True):
        line, digest = chained_line(run_head(run_id), body, digest)
        yield line


def _load(path: Path, seal: Seal | None = None) -> pd.DataFrame:
    return parsed(path, follow(path, seal=seal))


def _parse(line: bytes, where: str) -> CallRow:
    try:
        fields = parse_object(line)
        del fields["digest"]
        row = CallRow(**fields)
        for name, kind in get_type_hints(CallRow).items():
            if type(value := getattr(row, name)) is not kind:
                raise ValueError(f"{name} is {value!r:.40}")
        return row
    except (ValueError, TypeError, KeyError) as error:
        raise DamagedRows(f"{where} is damaged: expected one call as JSON: {error}") from error
