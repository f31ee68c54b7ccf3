"""AIConfigurator's performance database as it is published, as the tables that a calibration reads.

A wheel of `aiconfigurator-core`, or a folder, holds systems/data/SYSTEM/FAMILY/ENGINE/VERSION/*.parquet; tables are
known by their columns, which its collectors (collector/, `log_perf`) name, with latencies in milliseconds. Apache-2.0.
"""

from __future__ import annotations

import io
import re
import zipfile
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path, PurePosixPath
from typing import Any, Literal, NamedTuple, get_args, get_origin

import pandas as pd
from pydantic import BaseModel

from envs.parquet_pages import unfolded_bytes
from envs.strategy_env import failure_text
from raysearch.base.errors import InputError
from raysearch.fidelity.calibration.measured_tables import MEASURED_FAMILIES, Family
from raysearch.fidelity.calibration.tuned_tables import is_tuned, write_tuned_tables
from sim.config.reading import Unreadable, opened, read_bytes
from sim.near_names import did_you_mean

_LARGEST_TABLE_BYTES = 128 * 1024**2
"""[assumed] Of a file, and of its rows as they are encoded; several times the largest."""
_MOST_CELLS = 2 * 10**7
"""[assumed] Several times those of the largest table; in memory each takes eight bytes, however few in the file."""
_MOST_CELLS_TOGETHER = 5 * 10**7
"""[assumed] Of all tables of a machine that are kept: of few engines, however many a file names."""


class _Table(NamedTuple):
    """One kind of table: the family and file it becomes, columns that tell it, new names, what becomes of its rows."""

    family: str
    file: str
    recognised_by: frozenset[str]
    renamed: Mapping[str, str]
    rows: Callable[[pd.DataFrame], pd.DataFrame]


def _whole(frame: pd.DataFrame) -> pd.DataFrame:
    return frame


def _experts(frame: pd.DataFrame) -> pd.DataFrame:
    """Layers of experts alone: other tables with the same columns hold messages or shared experts, too."""
    return frame.loc[frame["op_name"] == "moe"]


def _attention(frame: pd.DataFrame, *, windowed: bool) -> pd.DataFrame:
    """Rows of one beam under a window or none; MHA has 0 KV heads or as many as heads."""
    under = frame["window_size"] > 0 if "window_size" in frame else pd.Series(data=False, index=frame.index)
    kept = frame.loc[(under == windowed) & (frame.get("beam_width", 1) == 1)]
    kv_heads = kept["num_kv_heads"].where(kept["num_kv_heads"] > 0, kept["num_heads"])
    return kept.assign(num_kv_heads=kv_heads)


def _prompts(frame: pd.DataFrame, *, windowed: bool = False) -> pd.DataFrame:
    kept = frame.loc[frame["op_name"].str.startswith("context")]
    return _attention(kept.loc[kept.get("step", 0) == 0], windowed=windowed)


def _decoded(frame: pd.DataFrame, *, windowed: bool = False) -> pd.DataFrame:
    kept = frame.loc[frame["op_name"].str.startswith("generation")]
    return _attention(_with_cached(kept), windowed=windowed)


def _with_cached(frame: pd.DataFrame) -> pd.DataFrame:
    return frame.assign(kv_len=frame["isl"] + frame["step"])


def _latent(frame: pd.DataFrame) -> pd.DataFrame:
    """Rows of the decode kernel alone, as whole modules and those of wide expert parallelism are not."""
    alone = (frame["op_name"] == "mla_generation") & (frame["isl"] == 1) & (frame["step"] > 0)
    return _with_cached(frame.loc[alone & ("gemm_type" not in frame)])


def _modules(frame: pd.DataFrame) -> pd.DataFrame:
    kept = frame.loc[frame["op_name"].str.contains("_module")]
    return kept.assign(variant=kept["op_name"], op=kept["op_name"].str.replace("_module.*", "", regex=True))


_WIDTHS = {"half": 2, "bfloat16": 2, "int8": 1, "float": 4}


def _messages(frame: pd.DataFrame) -> pd.DataFrame:
    """Sizes are in elements; an engine's own all-reduce is captured in a CUDA graph or not, as its name says."""
    kept = frame.loc[frame["dtype"].isin(_WIDTHS)]
    names = [str(name).lower() for name in kept["kernel_source"]]
    ends = (name.rpartition("_")[2] for name in names)
    launched = ["" if end == "nccl" else end if end in ("graph", "eager") else "custom" for end in ends]
    sent = [size * _WIDTHS[dtype] for size, dtype in zip(kept["message_size"], kept["dtype"], strict=True)]
    return kept.assign(launched=launched, message_bytes=sent)


def _exchanges(frame: pd.DataFrame) -> pd.DataFrame:
    """DeepEP as SGLang runs it, in microseconds: of low latency, or with what normal mode tells the ranks before."""
    if "dispatch_avg_t_us" in frame:
        sides = {"dispatch_us": frame["dispatch_avg_t_us"], "combine_us": frame["combine_avg_t_us"]}
        return frame.assign(mode="low_latency", comm_sms=0, latency=0.0, **sides)
    sides = {
        f"{side}_us": frame[f"{side}_transmit_us"] + frame[f"{side}_notify_us"] for side in ("dispatch", "combine")
    }
    return frame.assign(mode="normal", comm_sms=frame["dispatch_sms"], latency=0.0, **sides)


_HEADS = {"num_key_value_heads": "num_kv_heads"}
_OF_ATTENTION = frozenset({"num_key_value_heads", "head_dim", "isl", "batch_size"})
_EXPERTS = frozenset({"moe_dtype", "num_tokens", "inter_size", "topk", "distribution"})
_MIXER = frozenset({"phase", "batch_size", "seq_len", "model_name"})
_MESSAGE = frozenset({"num_gpus", "message_size", "op_name"})
_EXCHANGED = {"node_num": "num_nodes", "hidden_size": "hidden", "num_token": "tokens_per_rank", "num_topk": "topk"}
_EXCHANGE = frozenset({*_EXCHANGED, "num_experts"})
_DECODE, _PREFILL = _OF_ATTENTION | {"step"}, _OF_ATTENTION | {"attn_dtype"}
_TABLES = (
    _Table("gemm", "gemm.csv", frozenset({"gemm_dtype", "m", "n", "k"}), {"gemm_dtype": "dtype"}, _whole),
    _Table("moe", "moe.csv", _EXPERTS, {"moe_dtype": "dtype"}, _experts),
    _Table("attention_prefill", "attention_prefill.csv", _PREFILL, _HEADS, _prompts),
    _Table(
        "attention_prefill",
        "attention_window_prefill.csv",
        _PREFILL,
        _HEADS,
        lambda rows: _prompts(rows, windowed=True),
    ),
    _Table("attention_decode", "attention_decode.csv", _DECODE, _HEADS, _decoded),
    _Table(
        "attention_decode", "attention_window_decode.csv", _DECODE, _HEADS, lambda rows: _decoded(rows, windowed=True)
    ),
    _Table("mla_decode", "mla_decode.csv", frozenset({"mla_dtype", "num_heads", "isl", "step"}), {}, _latent),
    _Table("sparse_attention", "modules.csv", frozenset({"mla_dtype", "gemm_type", "model"}), {}, _modules),
    _Table("state", "linear_attention.csv", _MIXER, {"op_name": "op", "model_name": "model"}, _whole),
    *(
        _Table("collectives", "collectives.csv", _MESSAGE | {name}, {name: "dtype", "op_name": "op"}, _messages)
        for name in ("nccl_dtype", "allreduce_dtype")
    ),
    *(
        _Table("moe_alltoall_deepep", "moe_alltoall_deepep.csv", _EXCHANGE | {name}, _EXCHANGED, _exchanges)
        for name in ("dispatch_avg_t_us", "dispatch_transmit_us")
    ),
)
_MOST_ROWS = 600
"""Of an engine's format or kernel, drawn at random from a table that has more. [assumed] Twice as many as the shipped
curves of most were fitted to: a machine is fitted in some CPU minutes, and errors hardly fall with more."""


def public_tables(path: Path, system: str, units: int, folder: Path) -> str:
    """Writes a public database's rows of a machine as tables, and says where they come from.

    Args:
        path: AIConfigurator's wheel or folder, or a folder of ROCm/aiter's tuned tables.
        system: The machine, as the database names it.
        units: Of its multiprocessors, or compute units.
        folder: To write to.

    Raises:
        InputError: It cannot be read, or has no row of this machine.
    """
    if is_tuned(path):
        found = "; ".join(write_tuned_tables(path, system, units, folder))
        return f"{path.name}: {system} of ROCm/aiter's tuned tables (MIT): {found}"
    found = "; ".join(write_tables(path, system, folder))
    return f"{path.name}: {system} of AIConfigurator's performance database (Apache-2.0): {found}"


def write_tables(database: Path, system: str, folder: Path) -> list[str]:
    """Writes what a database has of a machine as CSV files: of each engine's formats and kernels the newest version.

    Args:
        database: A wheel, or a folder.
        system: The machine's name there.
        folder: To write to.

    Returns:
        What each file was made of, a line each.

    Raises:
        InputError: No such machine, or a table that cannot be read.
    """
    found: dict[tuple[str, str, str], list[tuple[tuple[int, ...], str, pd.DataFrame]]] = {}
    systems: set[str] = set()
    for path, content in _files(database):
        parts = PurePosixPath(path).parts
        place = len(parts) - 1 - parts[::-1].index("data") if "data" in parts else len(parts)
        if len(parts) < place + 5:
            continue
        systems.add(parts[place + 1])
        if parts[place + 1] != system:
            continue
        engine, version, name = parts[-3:]
        order = tuple(int(number) for number in re.findall(r"\d{1,9}", version))
        frame = _read(path, content)
        for table in _TABLES:
            if table.recognised_by <= set(frame.columns):
                rows = _as_measured(path, table, frame, engine, version)
                found.setdefault((table.file, engine, name), []).append((order, version, rows))
        if sum(rows.size for each in found.values() for *_, rows in each) > _MOST_CELLS_TOGETHER:
            raise InputError(f"{database} has more than {_MOST_CELLS_TOGETHER:,} cells of {system!r}")
    if not found and system in systems:
        raise InputError(f"{database} has no table of {system!r} whose columns are known")
    if not systems:
        where = "data/SYSTEM/ENGINE/VERSION/*.parquet, as in AIConfigurator's wheel"
        raise InputError(f"{database} has no tables of any machine: expected {where}, or CSV files of ROCm/aiter")
    if not found:
        raise InputError(f"{database} has no tables of {system!r} that are known: {did_you_mean(system, systems)}")
    notes: list[str] = []
    for file in sorted({file for file, *_ in found}):
        family = next(table.family for table in _TABLES if table.file == file)
        parts = {
            key[1:]: _newest(MEASURED_FAMILIES[family], each) for key, each in sorted(found.items()) if key[0] == file
        }
        rows = [(engine, version, rows) for (engine, _), each in parts.items() for version, rows in each.items()]
        if rows:
            pd.concat([each for *_, each in rows]).to_csv(folder / file, index=False)
            notes.append(f"{file}: {', '.join(sorted({f'{engine} {version}' for engine, version, _ in rows}))}")
    return notes


def _newest(family: Family, versions: Sequence[tuple[tuple[int, ...], str, pd.DataFrame]]) -> dict[str, pd.DataFrame]:
    """Rows by version, where no newer one has rows of the same format and kernel: it may have measured but a few."""
    kept: dict[str, pd.DataFrame] = {}
    known: set[tuple[object, ...]] = set()
    for _, version, rows in sorted(versions, key=lambda each: each[0], reverse=True):
        names = [name for name in family.groups if name in rows and name != "source"]
        of_rows = list(zip(*(rows[name] for name in names), strict=True))
        new = rows.loc[[of not in known for of in of_rows]]
        known |= set(of_rows)
        if len(new):
            kept[version] = new
    return kept


def _as_measured(path: str, table: _Table, frame: pd.DataFrame, engine: str, version: str) -> pd.DataFrame:
    """A table's rows in formats that the simulator has, a random part of those of which there are many."""
    family = MEASURED_FAMILIES[table.family]
    try:
        texts = dict.fromkeys(frame.select_dtypes("category"), object)
        rows = table.rows(frame.astype(texts).rename(columns=dict(table.renamed)))
        rows = rows.assign(latency_us=rows["latency"].astype(float) * 1e3)
    except (KeyError, TypeError, ValueError, AttributeError) as error:  # a column that is missing, or of another type
        raise InputError(f"{path} cannot be read as {table.file}: {failure_text(error)}") from error
    rows = rows.assign(framework=engine, framework_version=version)
    if "launched" in rows:
        rows = rows.assign(source=[f"{engine}_{how}_{version}".replace("__", "_") for how in rows["launched"]])
    for name, values in _known_values(family.schema):
        if name in rows:
            rows = rows.loc[rows[name].isin(values)]
    drawn = rows.sample(frac=1, random_state=0).groupby([name for name in family.groups if name in rows], sort=False)
    kept = [name for name in (*family.schema.model_fields, "kernel_source", "source") if name in rows]
    return pd.DataFrame(drawn.head(_MOST_ROWS)).sort_index().loc[:, list(dict.fromkeys(kept))]


def _known_values(schema: type[BaseModel]) -> Iterator[tuple[str, tuple[str, ...]]]:
    """Columns that a schema knows but some values of, as formats: a newer database may have more."""
    for name, field in schema.model_fields.items():
        if get_origin(field.annotation) is Literal:
            yield name, get_args(field.annotation)


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
