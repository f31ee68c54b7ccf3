"""AIConfigurator's performance database as it is published, as the tables that a calibration reads.

A wheel of `aiconfigurator-core`, or a folder, holds systems/data/SYSTEM/FAMILY/ENGINE/VERSION/*.parquet; tables are
known by their columns, which its collectors (collector/, `log_perf`) name, with latencies in milliseconds. Apache-2.0.
"""

from __future__ import annotations

import io
import re
import zipfile
import zlib
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path, PurePosixPath
from typing import Any, NamedTuple

import pandas as pd

from envs.parquet_pages import unfolded_bytes
from envs.strategy_env import failure_text
from raysearch.base.errors import InputError
from sim.config.reading import Unreadable, opened, read_bytes
from sim.near_names import did_you_mean

_LARGEST_TABLE_BYTES = 128 * 1024**2
"""[assumed] Of a file, and of its rows as they are encoded; several times the largest."""
_MOST_CELLS = 2 * 10**7
"""[assumed] Several times those of the largest table; in memory each takes eight bytes, however few in the file."""
_MOST_CELLS_TOGETHER = 5 * 10**7
"""[assumed] Of all tables of a machine that are kept: of few engines, however many a file names."""


class _Table(NamedTuple):
    """One kind of table: the file it becomes, columns that tell it, new names, and what else becomes of its rows."""

    file: str
    told_by: frozenset[str]
    renamed: Mapping[str, str]
    rows: Callable[[pd.DataFrame], pd.DataFrame]


def _whole(frame: pd.DataFrame) -> pd.DataFrame:
    return frame


def _full_attention(frame: pd.DataFrame) -> pd.DataFrame:
    """Rows without a window, of one beam; MHA is told by 0 KV heads or as many as heads."""
    kept = frame.loc[(frame.get("window_size", 0) == 0) & (frame.get("beam_width", 1) == 1)]
    kv_heads = kept["num_kv_heads"].where(kept["num_kv_heads"] > 0, kept["num_heads"])
    return kept.assign(num_kv_heads=kv_heads)


def _prompts(frame: pd.DataFrame) -> pd.DataFrame:
    kept = frame.loc[frame["op_name"].str.startswith("context")]
    return _full_attention(kept.loc[kept.get("step", 0) == 0])


def _decoded(frame: pd.DataFrame) -> pd.DataFrame:
    kept = frame.loc[frame["op_name"].str.startswith("generation")]
    return _full_attention(kept.assign(kv_len=kept["isl"] + kept["step"]))


_HEADS = {"num_key_value_heads": "num_kv_heads"}
_ATTENTION = frozenset({"num_key_value_heads", "head_dim", "isl", "batch_size"})
_TABLES = (
    _Table("gemm.csv", frozenset({"gemm_dtype", "m", "n", "k"}), {"gemm_dtype": "dtype"}, _whole),
    _Table("moe.csv", frozenset({"moe_dtype", "num_tokens", "inter_size", "topk"}), {"moe_dtype": "dtype"}, _whole),
    _Table("attention_prefill.csv", _ATTENTION | {"attn_dtype"}, _HEADS, _prompts),
    _Table("attention_decode.csv", _ATTENTION | {"step"}, _HEADS, _decoded),
)


def write_tables(database: Path, system: str, folder: Path) -> list[str]:
    """Writes what a database has of a machine as CSV files: of each engine and kind of table the newest version.

    Args:
        database: A wheel, or a folder.
        system: The machine's name there.
        folder: To write to.

    Returns:
        What each table became of, a line each.

    Raises:
        InputError: No such machine, or a table that cannot be read.
    """
    newest: dict[tuple[str, str], tuple[tuple[int, ...], str, pd.DataFrame]] = {}
    systems: set[str] = set()
    for path, content in _files(database):
        parts = PurePosixPath(path).parts
        place = len(parts) - 1 - parts[::-1].index("data") if "data" in parts else len(parts)
        if len(parts) < place + 5:
            continue
        systems.add(parts[place + 1])
        if parts[place + 1] != system:
            continue
        engine, version = parts[-3], parts[-2]
        frame = _read(path, content)
        for table in _TABLES:
            if table.told_by <= set(frame.columns):
                order = tuple(int(number) for number in re.findall(r"\d{1,9}", version))
                known = newest.get((table.file, engine))
                if known is None or order > known[0]:
                    newest[table.file, engine] = (order, version, _as_measured(path, table, frame, engine, version))
        if sum(each.size for _, _, each in newest.values()) > _MOST_CELLS_TOGETHER:
            raise InputError(f"{database} has more than {_MOST_CELLS_TOGETHER:,} cells of {system!r}")
    if not newest and system in systems:
        raise InputError(f"{database} has no table of {system!r} whose columns are known")
    if not newest:
        raise InputError(f"{database} has no tables of {system!r} that are known: {did_you_mean(system, systems)}")
    versions: list[str] = []
    for file in sorted({file for file, _ in newest}):
        found = {engine: each for (name, engine), each in newest.items() if name == file}
        pd.concat([frame for _, _, frame in found.values()]).to_csv(folder / file, index=False)
        versions.append(
            f"{file}: {', '.join(f'{engine} {version}' for engine, (_, version, _) in sorted(found.items()))}"
        )
    return versions


def _as_measured(path: str, table: _Table, frame: pd.DataFrame, engine: str, version: str) -> pd.DataFrame:
    try:
        rows = table.rows(frame.rename(columns=dict(table.renamed)))
        latency_us = rows["latency"].astype(float) * 1e3
    except (KeyError, TypeError, ValueError, AttributeError) as error:  # a column that is missing, or of another type
        raise InputError(f"{path} cannot be read as {table.file}: {failure_text(error)}") from error
    return rows.assign(framework=engine, framework_version=version, latency_us=latency_us).drop(columns=["latency"])


def _files(database: Path) -> Iterator[tuple[str, Callable[[], bytes]]]:
    """Parquet files by their paths with forward slashes, and what reads each."""
    if database.is_dir():
        for path in sorted(database.rglob("*.parquet")):
            yield _in_one_line(path.as_posix()), lambda path=path: read_bytes(path, _LARGEST_TABLE_BYTES)
        return
    try:
        with opened(database) as file, zipfile.ZipFile(file) as wheel:
            for member in wheel.infolist():
                if member.filename.endswith(".parquet"):
                    yield _in_one_line(member.filename), lambda member=member: _member(wheel, member)
    except (OSError, ValueError, NotImplementedError, zipfile.BadZipFile) as error:
        raise InputError(f"cannot read {database}: expected a wheel or a folder of Parquet files: {error}") from error


def _in_one_line(path: str) -> str:
    return path.replace("\n", "\\n")  # a name that was handed over may have line breaks


def _member(wheel: zipfile.ZipFile, member: zipfile.ZipInfo) -> bytes:
    if member.file_size > _LARGEST_TABLE_BYTES:  # of which no more is read than it says
        raise Unreadable(f"it is too long: expected at most {_LARGEST_TABLE_BYTES:,} bytes")
    return wheel.read(member)


def _read(path: str, content: Callable[[], bytes]) -> pd.DataFrame:
    try:
        import pyarrow as pa
    except ImportError as error:
        raise InputError("Parquet files need pyarrow: pip install pyarrow") from error
    known = (
        OSError,
        ValueError,
        RuntimeError,
        MemoryError,
        EOFError,
        zlib.error,
        zipfile.BadZipFile,
        pa.ArrowException,
    )
    try:
        return _frame(io.BytesIO(content()))
    except (*known, pa.ArrowException) as error:  # depends on where zipfile and pyarrow stumble
        raise InputError(f"cannot read {path}: {failure_text(error)}") from error


def _frame(content: io.BytesIO) -> pd.DataFrame:
    """The columns of numbers and texts of a Parquet file.

    Raises:
        Unreadable: It unfolds to more than any table has: a short file may mean terabytes.
    """
    import pyarrow as pa
    from pyarrow import compute, parquet

    schema, kinds, arrow = parquet.read_schema(content), pa.types, compute
    texts = [field.name for field in schema if kinds.is_string(field.type) or kinds.is_large_string(field.type)]
    names = texts + [field.name for field in schema if kinds.is_integer(field.type) or kinds.is_floating(field.type)]
    with parquet.ParquetFile(content, read_dictionary=texts) as file:
        size = unfolded_bytes(content, _LARGEST_TABLE_BYTES)
        if file.metadata.num_rows * len(names) > _MOST_CELLS or size > _LARGEST_TABLE_BYTES:
            raise Unreadable(f"it has {file.metadata.num_rows:,} rows of {len(names)} columns, more than any table")
        table: Any = file.read(columns=names)
    for name in texts:
        for part in table.column(name).chunks:
            size += arrow.sum(arrow.binary_length(part.dictionary).take(part.indices)).as_py() or 0
    if size > _LARGEST_TABLE_BYTES:
        raise Unreadable("its texts are longer than those of any table")
    return table.to_pandas(ignore_metadata=True)
