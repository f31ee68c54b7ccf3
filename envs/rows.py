"""One row per call on disk: JSON Lines while the run goes on, Parquet when it is done.

Every line carries the digest of itself and of all before it, so that what is lost, doubled, swapped or altered shows.

At every moment, also after a kill, one file holds all rows: the Parquet file replaces the JSON Lines only once
it is complete, and where both exist they agree and the JSON Lines count.
"""
# pyright: reportMissingTypeStubs=false, reportUnknownMemberType=false, reportUnknownArgumentType=false
# pyright: reportUnknownVariableType=false
# (pandas and pyarrow have no stubs of their own and leave parts of their interface untyped)

from __future__ import annotations

import hashlib
import io
import json
import os
from collections.abc import Iterable, Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO, NamedTuple, final, get_type_hints

import numpy as np

from envs.chain import NO_ROWS_DIGEST, DamagedRows, chained_line, follow
from envs.files import write_atomically

if TYPE_CHECKING:
    import pandas as pd

    from sim.evaluation import Evaluation
    from sim.strategy import Strategy

ROWS_FILE = "rows.jsonl"
COMPACT_FILE = "rows.parquet"
_TAIL_BYTES = 16384
"""[assumed] More than two rows of any workload take."""
_BLOCK_BYTES = 16 * 1024**2
"""[assumed] Of JSON that is parsed at a time; a row that is longer is not one of ours."""


class RowsTaken(RuntimeError):
    """Another process goes on with the run; the message begins with the path of its rows."""


class CallRow(NamedTuple):
    """One call. No clock, so that a rerun writes the same bytes.

    Attributes:
        run_id: Which run.
        call: Number of the call, from 1.
        tp, ep, pp, batch: The strategy's degrees.
        dims: Its choices, "2,1,..."; beyond the paper's space with attention's degrees behind them, ";cp=2;dp=16".
        tokens_per_s_per_gpu: As simulated, of infeasible strategies too.
        tpot_s: Time per output token.
        memory_bytes: Of the fullest GPU, all kinds.
        feasible: Whether no limit is broken.
        violations: Kinds of the broken limits, "hbm;tpot".
        reward: The environment's reward.
        best_so_far: Best feasible tokens/s/GPU, this call included, 0.0 if none.
    """

    run_id: str
    call: int
    tp: int
    ep: int
    pp: int
    batch: int
    dims: str
    tokens_per_s_per_gpu: float
    tpot_s: float
    memory_bytes: float
    feasible: bool
    violations: str
    reward: float
    best_so_far: float

    @classmethod
    def of(cls, evaluation: Evaluation, *, run_id: str, call: int, reward: float, best_so_far: float) -> CallRow:
        """The row of one evaluation."""
        strategy = evaluation.strategy
        return cls(
            run_id=run_id,
            call=call,
            tp=strategy.tp,
            ep=strategy.ep,
            pp=strategy.pp,
            batch=strategy.batch,
            dims=dims_text(strategy),
            # A plugged-in simulator may return numpy scalars, whose text depends on numpy's version.
            tokens_per_s_per_gpu=float(evaluation.tokens_per_s_per_gpu),
            tpot_s=float(evaluation.tpot_s),
            memory_bytes=float(evaluation.memory_bytes.total),
            feasible=bool(evaluation.feasible),
            violations=";".join(violation.kind for violation in evaluation.violations),
            reward=reward,
            best_so_far=best_so_far,
        )

    def to_json(self, digest: str) -> tuple[bytes, str]:
        """One line of the JSON Lines file, and its digest, which is chained to that of the line before."""
        run_id, *rest = self._asdict().items()
        return chained_line(json.dumps(dict([run_id]))[:-1].encode(), json.dumps(dict(rest))[1:-1].encode(), digest)


def dims_text(strategy: Strategy) -> str:
    """What of a strategy the columns of its degrees do not say; see `CallRow`."""
    dims = ",".join(map(str, strategy.dims))
    return f"{dims};cp={strategy.cp};dp={strategy.attention_dp}" if strategy.extended else dims


def parse_dims_text(text: str) -> dict[str, Any]:
    """The fields of a strategy that `dims_text` wrote.

    >>> parse_dims_text("2,1,0;cp=4;dp=2")
    {'dims': [2, 1, 0], 'cp': 4, 'dp': 2}
    """
    dims, *own = text.split(";")
    fields = (part.split("=") for part in own)
    return {"dims": [int(choice) for choice in dims.split(",")], **{name: int(value) for name, value in fields}}


@final
class RowWriter:
    """Appends rows to a JSON Lines file; each row is handed to the operating system before `write` returns.

    Args:
        path: A file that does not exist yet; its folder does.

    Attributes:
        digest: Of all rows so far: equal if and only if two runs made the same calls with the same results.

    Raises:
        FileExistsError: There are rows already, plain or compacted.
    """

    def __init__(self, path: Path, *, file: BinaryIO | None = None, digest: str = NO_ROWS_DIGEST) -> None:
        self.path = path
        self.digest = digest
        self._file = file or _create(path)

    @classmethod
    def resume(cls, path: Path, calls: int) -> RowWriter:
        """A writer that goes on after the first `calls` rows; later ones are dropped, for the run makes them again.

        Also right if the file ends in half a row, was compacted meanwhile, or (with 0 calls) does not exist.

        Raises:
            ValueError: There are fewer whole rows than that, or they are damaged.
        """
        file, digest = _reopen(path, calls)
        return cls(path, file=file, digest=digest)

    def write(self, row: CallRow) -> None:
        """Appends one row.

        Raises:
            OSError: It cannot be written. Part of it may be on disk, which `resume` drops.
        """
        line, digest = row.to_json(self.digest)
        while line:  # an unbuffered file may take a part; one with a buffer would try again to write it when closed
            line = line[self._file.write(line) :]
        self.digest = digest

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
            raise RowsTaken(f"{self.path} is in the hands of another process, which goes on with the run")

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


def write_compact(jsonl_path: Path, parquet_path: Path, *, calls: int | None = None) -> str:
    """Writes a run's JSON Lines as Parquet, too; returns the SHA-256 of that file.

    Raises:
        RowsTaken: There are not as many rows as `calls`: another process is making them again.
        DamagedRows: They are not what a run wrote.
    """
    rows = _load(jsonl_path)
    if calls is not None and len(rows) != calls:
        raise RowsTaken(f"{jsonl_path} holds {len(rows)} rows of {calls}: another process goes on with the run")
    write_atomically(parquet_path, lambda temporary: _to_parquet(rows, temporary))
    return file_digest(parquet_path)


def file_digest(path: Path) -> str:
    """The SHA-256 of a file."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def rows_digest(run_dir: Path) -> str:
    """The digest of a run's rows as `RowWriter` has it, worked out anew from each of them.

    Raises:
        FileNotFoundError, DamagedRows: See `read_rows`.
    """
    digest = NO_ROWS_DIGEST
    for row in read_rows(run_dir).itertuples(index=False):
        digest = CallRow(*row).to_json(digest)[1]
    return digest


def whole_rows(run_dir: Path) -> int | None:
    """How many rows a run under way has, every one of them looked at; None once it is compacted.

    Raises:
        DamagedRows: One is lost, doubled, out of place or altered.
    """
    path = run_dir / ROWS_FILE
    try:
        return follow(path, io.BytesIO(_whole_lines(path)))[0]
    except FileNotFoundError:
        return None


def read_rows(run_dir: Path, columns: Sequence[str] = CallRow._fields) -> pd.DataFrame:
    """All whole rows of a run, while it runs or afterwards.

    Args:
        run_dir: The run's folder.
        columns: The fields of `CallRow` that are wanted; few are read faster.

    Raises:
        FileNotFoundError: The folder holds no rows.
        DamagedRows: The file is not whole (half a last line is no damage: that row was never reported).
    """
    path = run_dir / ROWS_FILE
    try:
        return _load(path).reindex(columns=list(columns))
    except FileNotFoundError:  # compacted, perhaps this very moment
        pass
    try:
        return _read_compacted(run_dir / COMPACT_FILE, columns)
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
        with path.open("rb") as file:
            file.seek(max(0, file.seek(0, os.SEEK_END) - _TAIL_BYTES))
            lines = file.read().splitlines(keepends=True)
    except FileNotFoundError:
        return None
    whole = [line for line in lines[-2:] if line.endswith(b"\n")]
    return _parse(whole[-1], f"{path}, last line") if whole else None


def _compacted(path: Path) -> Path:
    return path.with_suffix(".parquet")


def _create(path: Path) -> BinaryIO:
    for existing in (path, _compacted(path)):
        if existing.exists():
            raise FileExistsError(f"{existing} holds a run already: resume it or choose another folder")
    return path.open("xb", buffering=0)


def _reopen(path: Path, calls: int) -> tuple[BinaryIO, str]:
    if calls:
        _expand(path)
    lines = list(islice(io.BytesIO(_whole_lines(path)), calls)) if calls and path.exists() else []
    made, digest = follow(path, lines)
    if made < calls:
        raise ValueError(
            f"{path} holds {made} whole rows, but the run was saved after {calls} calls: "
            "this is not the folder of that run, or rows were removed"
        )
    # A new file, not the old one cut short: a process that still holds the old one must not write into ours.
    write_atomically(path, lambda temporary: temporary.write_bytes(b"".join(lines)))
    _compacted(path).unlink(missing_ok=True)
    return path.open("ab", buffering=0), digest


def _expand(path: Path) -> None:
    """Undoes `compact`, wherever it was interrupted."""
    compacted = _compacted(path)
    if compacted.exists() and not path.exists():
        rows = (CallRow(*values) for values in _read_compacted(compacted).itertuples(index=False))
        write_atomically(path, lambda temporary: temporary.write_bytes(b"".join(_lines(rows))))


def _lines(rows: Iterable[CallRow]) -> Iterator[bytes]:
    digest = NO_ROWS_DIGEST
    for row in rows:
        line, digest = row.to_json(digest)
        yield line


def _whole_lines(path: Path) -> bytes:
    content = path.read_bytes()
    return content[: content.rfind(b"\n") + 1]


def _load(path: Path) -> pd.DataFrame:
    import pyarrow as pa
    from pyarrow import json as arrow_json

    lines = _whole_lines(path)
    made, _ = follow(path, io.BytesIO(lines))
    types = {str: pa.string(), int: pa.int64(), float: pa.float64(), bool: pa.bool_()}
    schema = pa.schema([(name, types[kind]) for name, kind in get_type_hints(CallRow).items()])
    if not made:
        return schema.empty_table().to_pandas()
    parsing = arrow_json.ParseOptions(schema.append(pa.field("digest", pa.string())), unexpected_field_behavior="error")
    blocks = arrow_json.ReadOptions(block_size=_BLOCK_BYTES)
    try:
        table: Any = arrow_json.read_json(pa.BufferReader(lines), read_options=blocks, parse_options=parsing)
    except pa.ArrowInvalid as error:
        raise DamagedRows(f"{path} is damaged: {error}") from error
    if table.num_rows != made or any(column.null_count for column in table.columns):
        raise DamagedRows(f"{path} is damaged: expected {made} calls with the fields {', '.join(CallRow._fields)}")
    calls = table["call"].to_numpy()
    if len(wrong := np.flatnonzero(calls != np.arange(1, made + 1))):
        raise DamagedRows(f"{path}, line {wrong[0] + 1} is damaged: it is of call {calls[wrong[0]]}")
    return table.select(schema.names).to_pandas()


def _parse(line: bytes, where: str) -> CallRow:
    try:
        fields = json.loads(line)
        del fields["digest"]
        return CallRow(**fields)
    except (ValueError, TypeError, KeyError, RecursionError) as error:
        raise DamagedRows(f"{where} is damaged: expected one call as JSON: {error}") from error


def _read_compacted(path: Path, columns: Sequence[str] = CallRow._fields) -> pd.DataFrame:
    import pandas as pd
    from pyarrow import parquet

    try:
        if tuple(parquet.read_schema(path).names) != CallRow._fields:
            raise DamagedRows(f"{path} is damaged: expected the columns {', '.join(CallRow._fields)}")
        return pd.read_parquet(path, columns=list(columns))
    except (FileNotFoundError, DamagedRows):
        raise
    except (OSError, ValueError) as error:  # which of the two depends on where pyarrow stumbles
        raise DamagedRows(f"{path} is damaged: {error}") from error


def _to_parquet(rows: pd.DataFrame, path: Path) -> None:
    rows.to_parquet(path, index=False, compression="zstd")  # a quarter less than pandas's own choice
