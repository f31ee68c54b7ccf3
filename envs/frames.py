"""Rows as pandas frames: from JSON Lines, from and to Parquet, and back to the bytes that were hashed."""
# pyright: reportMissingTypeStubs=false, reportUnknownMemberType=false, reportUnknownArgumentType=false
# pyright: reportUnknownVariableType=false
# (pandas and pyarrow have no stubs of their own and leave parts of their interface untyped)

from __future__ import annotations

import io
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO, get_type_hints

import numpy as np

from envs.calls import CallRow
from envs.chain import Chain, DamagedRows
from envs.parquet_pages import PAGE_BYTES, unfolded_bytes
from sim.config.reading import Unreadable, opened
from sim.strategy_checks import LARGEST

if TYPE_CHECKING:
    import pandas as pd

_BLOCK_BYTES = 16 * 1024**2
"""[assumed] Of JSON that is parsed at a time; a row that is longer is not one of ours."""
_BLOCK_ROWS = 100_000
"""[assumed] Turned back into text at a time: some 50 MB."""


def parsed(path: Path, chain: Chain) -> pd.DataFrame:
    """The rows in a file of JSON Lines.

    Args:
        path: The file.
        chain: How far it is read.

    Raises:
        FileNotFoundError: There is no such file any more.
        DamagedRows: They are not the calls from 1 on.
    """
    import pyarrow as pa
    from pyarrow import json as arrow_json

    schema = _schema()
    if not chain.lines:
        return schema.empty_table().to_pandas()
    parsing = arrow_json.ParseOptions(schema.append(pa.field("digest", pa.string())), unexpected_field_behavior="error")
    blocks = arrow_json.ReadOptions(block_size=_BLOCK_BYTES)
    try:
        with opened(path) as file:
            lines = pa.PythonFile(_First(file, chain.size_bytes), mode="r")
            table: Any = arrow_json.read_json(lines, read_options=blocks, parse_options=parsing)
    except (pa.ArrowException, Unreadable) as error:
        raise DamagedRows(f"{path} is damaged: {_line(error)}") from error
    if table.num_rows != chain.lines:
        raise DamagedRows(f"{path} is damaged: expected {chain.lines} calls, it has {table.num_rows}")
    return _checked(path, table.select(schema.names))


class _First(io.RawIOBase):
    """The first bytes of a file, as a file of its own."""

    def __init__(self, file: BinaryIO, size_bytes: int) -> None:
        self._file, self._left = file, size_bytes

    def readable(self) -> bool:
        """Always."""
        return True

    def read(self, size: int = -1, /) -> bytes:
        """At most so many further bytes; -1 for all."""
        block = self._file.read(self._left if size < 0 else min(size, self._left))
        self._left -= len(block)
        return block


def _schema() -> Any:
    import pyarrow as pa

    types = {str: pa.string(), int: pa.int64(), float: pa.float64(), bool: pa.bool_()}
    return pa.schema([(name, types[kind]) for name, kind in get_type_hints(CallRow).items()])


def _checked(path: Path, table: Any) -> pd.DataFrame:
    """The rows of a table if each is a call that can have been made, in order."""
    if any(column.null_count for column in table.columns):
        raise DamagedRows(f"{path} is damaged: expected calls with the fields {', '.join(CallRow._fields)}")
    rows = table.to_pandas(ignore_metadata=True)
    for name in rows.columns:
        values = rows[name].to_numpy()
        if name == "call":
            wrong = values != np.arange(1, len(values) + 1)
        elif name == "asked":
            wrong = values < 1
        elif name in _DEGREES:
            wrong = (values < 1) | (values > LARGEST)
        elif name in _FIGURES:
            wrong = ~((values >= 0) & (values <= _LARGEST_FIGURE))
        else:
            continue
        if wrong.any():
            line = int(wrong.argmax())
            what = f"of call {values[line]}" if name == "call" else f"of {name} {values[line]}"
            raise DamagedRows(f"{path}, line {line + 1} is damaged: it is {what}")
    return rows


_DEGREES = ("tp", "ep", "pp", "batch")
_FIGURES = ("tokens_per_s_per_gpu", "best_so_far")
_TEXTS = tuple(name for name, kind in get_type_hints(CallRow).items() if kind is str)
_LARGEST_ROW = 1024
"""[assumed] Bytes of a row on average, several times that of any workload."""
_PAGES_BYTES = 4 * len(CallRow._fields) * PAGE_BYTES
"""[assumed] Of the pages of few rows: each field has two at most, and twice as many are allowed."""
_LARGEST_FIGURE = 1e15
"""[assumed] Of any strategy; beyond it, sums might not be numbers any more."""


def read_parquet(path: Path, columns: Sequence[str] = CallRow._fields) -> pd.DataFrame:
    """The rows that `write_parquet` wrote.

    Raises:
        FileNotFoundError: There is no such file.
        DamagedRows: It is not one of ours.
    """
    import pyarrow as pa
    from pyarrow import parquet

    other = f"{path} is damaged: expected the columns {', '.join(CallRow._fields)}"
    try:
        with opened(path) as file, parquet.ParquetFile(file, read_dictionary=list(_TEXTS)) as stored:
            schema = stored.schema_arrow
            kinds = [pa.string() if pa.types.is_dictionary(kind) else kind for kind in schema.types]
            if schema.names != _schema().names or kinds != _schema().types:
                raise DamagedRows(other)
            if stored.metadata.num_rows > path.stat().st_size:
                raise DamagedRows(f"{path} is damaged: it claims to have more calls than bytes")
            most = stored.metadata.num_rows * _LARGEST_ROW + _PAGES_BYTES
            if unfolded_bytes(file, most) > most:
                raise DamagedRows(f"{path} is damaged: its rows unfold to more than any of ours have")
            table = _unfolded(path, stored.read(columns=list(columns)))
            return _checked(path, table).reindex(columns=list(columns))
    except (FileNotFoundError, DamagedRows):
        raise
    except KeyError as error:  # a text that there is no column of
        raise DamagedRows(other) from error
    except (OSError, ValueError, MemoryError, pa.ArrowException) as error:  # depends on where pyarrow stumbles
        raise DamagedRows(f"{path} is damaged: {_line(error)}") from error


def _unfolded(path: Path, table: Any) -> Any:
    """The table with its texts written out, each of which stands in it once: a short file may mean terabytes."""
    import pyarrow as pa
    from pyarrow import compute

    arrow: Any = compute  # whose functions are made as it is imported
    for number, field in enumerate(table.schema):
        if pa.types.is_dictionary(field.type):
            texts = table.column(number)
            sizes = (arrow.binary_length(part.dictionary).take(part.indices) for part in texts.chunks)
            if sum(arrow.sum(each).as_py() or 0 for each in sizes) > len(texts) * _LARGEST_ROW:
                raise DamagedRows(f"{path} is damaged: its rows unfold to more than any of ours have")
            table = table.set_column(number, field.name, texts.cast(pa.string()))
    return table


def _line(error: Exception) -> str:
    """An error of pyarrow's, of several lines at times, on one."""
    return " ".join(str(error).split())


def write_parquet(rows: pd.DataFrame, path: Path) -> None:
    """Writes rows as a Parquet file."""
    rows.to_parquet(path, index=False, compression="zstd")  # a quarter less than pandas's own choice


def bodies(rows: pd.DataFrame) -> Iterator[bytes]:
    """What `CallRow.to_json` writes of each row behind its run id.

    Column by column, each value once: a tenth of the time of one row after the other.
    """
    names = CallRow._fields[1:]
    form = ", ".join(f'"{name}": %s' for name in names)
    for start in range(0, len(rows), _BLOCK_ROWS):
        block = rows.iloc[start : start + _BLOCK_ROWS]
        for row in zip(*(_texts(block[name]) for name in names), strict=True):
            yield (form % row).encode()


def _texts(column: pd.Series) -> list[str]:
    """Each value as JSON."""
    import pandas as pd

    values = column.to_numpy()
    if values.dtype == np.float64:  # distinguished by their bits: -0.0 is not 0.0
        codes, bits = pd.factorize(values.view(np.int64))
        each = bits.view(np.float64)
    else:
        codes, each = pd.factorize(values, use_na_sentinel=False)
    return np.array([json.dumps(value) for value in each.tolist()], dtype=object)[codes].tolist()
