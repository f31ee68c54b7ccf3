"""Rows as pandas frames: from JSON Lines, from and to Parquet, and back to the bytes that were hashed."""
# pyright: reportMissingTypeStubs=false, reportUnknownMemberType=false, reportUnknownArgumentType=false
# pyright: reportUnknownVariableType=false
# (pandas and pyarrow have no stubs of their own and leave parts of their interface untyped)

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_type_hints

import numpy as np

from envs.calls import CallRow
from envs.chain import DamagedRows

if TYPE_CHECKING:
    import pandas as pd

_BLOCK_BYTES = 16 * 1024**2
"""[assumed] Of JSON that is parsed at a time; a row that is longer is not one of ours."""
_BLOCK_ROWS = 100_000
"""[assumed] Turned back into text at a time: some 50 MB."""


def parsed(path: Path, lines: bytes, made: int) -> pd.DataFrame:
    """The rows in JSON Lines.

    Args:
        path: For the message.
        lines: Whole ones.
        made: How many there are.

    Raises:
        DamagedRows: They are not the calls from 1 to `made`.
    """
    import pyarrow as pa
    from pyarrow import json as arrow_json

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


def read_parquet(path: Path, columns: Sequence[str] = CallRow._fields) -> pd.DataFrame:
    """The rows that `write_parquet` wrote.

    Raises:
        FileNotFoundError: There is no such file.
        DamagedRows: It is not one of ours.
    """
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
    if values.dtype == np.float64:  # told apart by their bits: -0.0 is not 0.0
        codes, bits = pd.factorize(values.view(np.int64))
        each = bits.view(np.float64)
    else:
        codes, each = pd.factorize(values, use_na_sentinel=False)
    return np.array([json.dumps(value) for value in each.tolist()], dtype=object)[codes].tolist()
