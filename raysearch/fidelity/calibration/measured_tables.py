"""The CSV files of measurements: schemas, reading, and one clear error for a bad one."""

from __future__ import annotations

import io
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

import numpy as np
import pandas as pd
from numpy.typing import NDArray
from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError

from raysearch.base.errors import InputError
from raysearch.fidelity.calibration.mixer_tables import usable_modules, usable_states
from sim.config.mistakes import expectation
from sim.config.reading import Unreadable, read_bytes
from sim.json_object import JsonObject
from sim.near_names import did_you_mean

LARGEST_MEASURED = 10**9
"""No size, count or time in these files is larger; what is would be a slip, and its products overflow."""
TablePositive = Annotated[float, Field(gt=0, le=LARGEST_MEASURED, allow_inf_nan=False)]
TableCount = Annotated[int, Field(ge=1, le=LARGEST_MEASURED)]
Bytes = Annotated[int, Field(ge=1, le=LARGEST_MEASURED**2 // 10**6)]
NAME_PATTERN = r"^[A-Za-z0-9_.+-]+$"
"""Text cells become parts of series' names, which slashes separate."""
_NAME_WANTED = "expected a name of letters, digits and _ . + - only"
TableText = Annotated[str, Field(pattern=NAME_PATTERN, max_length=100)]
KvDtype = Literal["bfloat16", "fp8"]
MathDtype = Literal["bfloat16", "fp8", "fp8_block", "nvfp4", "int4_wo", "w4a16_mxfp4", "w4a8_mxfp4_mxfp8"]


class _Row(BaseModel):
    model_config = ConfigDict(extra="ignore", frozen=True)


class _Gemm(_Row):
    framework: TableText
    dtype: MathDtype
    kernel_source: TableText | Literal[""] = ""
    m: TableCount
    n: TableCount
    k: TableCount
    latency_us: TablePositive


class _AttentionDecode(_Row):
    framework: TableText
    kv_cache_dtype: KvDtype
    batch_size: TableCount
    kv_len: TableCount
    num_heads: TableCount
    num_kv_heads: TableCount
    head_dim: TableCount
    window_size: Annotated[int, Field(ge=0, le=LARGEST_MEASURED)] = 0
    latency_us: TablePositive


class _AttentionPrefill(_Row):
    framework: TableText
    attn_dtype: KvDtype
    kv_cache_dtype: KvDtype
    batch_size: TableCount
    isl: TableCount
    num_heads: TableCount
    num_kv_heads: TableCount
    head_dim: TableCount
    window_size: Annotated[int, Field(ge=0, le=LARGEST_MEASURED)] = 0
    latency_us: TablePositive


class _MlaDecode(_Row):
    framework: Annotated[str, Field(pattern=NAME_PATTERN, max_length=100)] | Literal[""] = ""
    mla_dtype: TableText
    kv_cache_dtype: KvDtype
    batch_size: TableCount
    kv_len: TableCount
    num_heads: TableCount
    latency_us: TablePositive


class _Moe(_Row):
    framework: TableText
    framework_version: TableText | Literal[""] = ""
    kernel_source: TableText
    dtype: MathDtype
    num_tokens: TableCount
    hidden_size: TableCount
    inter_size: TableCount
    topk: TableCount
    num_experts: TableCount
    moe_tp_size: TableCount
    moe_ep_size: TableCount
    distribution: TableText
    latency_us: TablePositive


class _Collective(_Row):
    source: TableText
    op: Literal["all_reduce", "all_gather", "reduce_scatter", "alltoall"]
    dtype: TableText
    num_gpus: Annotated[int, Field(ge=2, le=LARGEST_MEASURED)]
    num_nodes: Annotated[int, Field(ge=1, le=1)] = 1
    message_bytes: Bytes
    latency_us: TablePositive


class _ExpertAllToAll(_Row):
    mode: Literal["low_latency", "normal"]
    num_nodes: TableCount
    hidden: TableCount
    topk: TableCount
    num_experts: TableCount
    tokens_per_rank: TableCount
    comm_sms: Annotated[int, Field(ge=0, le=LARGEST_MEASURED)]
    dispatch_us: TablePositive
    combine_us: TablePositive


class _SendRecv(_Row):
    scope: Annotated[str, Field(pattern="^int(er|ra)_node")]
    message_bytes: Bytes
    median_us: TablePositive


class _Module(_Row):
    framework: TableText
    op: TableText
    variant: str = ""
    model: Annotated[str, Field(max_length=200)]
    kv_cache_dtype: Literal["bfloat16", "fp8", "fp8_e4m3"]
    gemm_type: Literal["bfloat16", "fp8", "fp8_block", "nvfp4"]
    num_heads: TableCount
    batch_size: TableCount
    isl: TableCount
    step: Annotated[int, Field(ge=0, le=LARGEST_MEASURED)]
    latency_us: TablePositive


TableCell = Annotated[float, BeforeValidator(lambda cell: cell or 0.0), Field(ge=0, le=LARGEST_MEASURED)]
"""A number that rows of another kind leave empty."""


class _State(_Row):
    framework: TableText
    op: Literal["gdn", "kda", "mamba2"]
    kernel_source: TableText
    phase: Literal["context", "generation"]
    batch_size: TableCount
    seq_len: TableCount
    num_k_heads: TableCell = 0.0
    head_k_dim: TableCell = 0.0
    num_v_heads: TableCell = 0.0
    head_v_dim: TableCell = 0.0
    d_state: TableCell = 0.0
    nheads: TableCell = 0.0
    head_dim: TableCell = 0.0
    n_groups: TableCell = 0.0
    model: Annotated[str, Field(max_length=200)]
    latency_us: TablePositive


@dataclass(frozen=True, slots=True)
class Family:
    """One CSV file of kernel measurements.

    Attributes:
        file: Its name.
        schema: What a row must hold.
        keys: Columns that name a shape; rows that share them are never split between fit and test.
        groups: Columns that name what is fitted and reported on its own.
        time: Column of the measured microseconds.
        sizes: Columns whose range is recorded with the fit.
        windowed: File of the same kernels under a sliding window, whose rows have a `window_size` too.
    """

    file: str
    schema: type[BaseModel]
    keys: tuple[str, ...]
    groups: tuple[str, ...]
    time: str = "latency_us"
    sizes: tuple[str, ...] = ()
    windowed: str = ""


MEASURED_FAMILIES: dict[str, Family] = {
    "gemm": Family("gemm.csv", _Gemm, ("n", "k"), ("framework", "dtype"), sizes=("m", "n", "k")),
    "attention_decode": Family(
        "attention_decode.csv",
        _AttentionDecode,
        ("batch_size", "kv_len", "num_heads", "num_kv_heads", "head_dim", "window_size"),
        ("framework", "kv_cache_dtype"),
        sizes=("batch_size", "kv_len", "num_heads", "num_kv_heads", "head_dim"),
        windowed="attention_window_decode.csv",
    ),
    "attention_prefill": Family(
        "attention_prefill.csv",
        _AttentionPrefill,
        ("batch_size", "isl", "num_heads", "num_kv_heads", "head_dim", "window_size"),
        ("framework", "attn_dtype", "kv_cache_dtype"),
        sizes=("batch_size", "isl", "num_heads", "num_kv_heads", "head_dim"),
        windowed="attention_window_prefill.csv",
    ),
    "mla_decode": Family(
        "mla_decode.csv",
        _MlaDecode,
        ("batch_size", "kv_len", "num_heads"),
        ("kv_cache_dtype",),
        sizes=("batch_size", "kv_len", "num_heads"),
    ),
    "sparse_attention": Family(
        "modules.csv",
        _Module,
        ("op", "model", "num_heads", "batch_size", "isl", "step"),
        ("framework", "op", "kv_cache_dtype"),
        sizes=("batch_size", "isl", "step", "num_heads"),
    ),
    "state": Family(
        "linear_attention.csv",
        _State,
        ("op", "kernel_source", "phase", "batch_size", "seq_len", "model"),
        ("framework", "op", "phase"),
        sizes=("batch_size", "seq_len"),
    ),
    "moe": Family(
        "moe.csv",
        _Moe,
        ("hidden_size", "inter_size", "topk", "num_experts", "moe_tp_size", "moe_ep_size"),
        ("framework", "kernel_source", "dtype"),
        sizes=("num_tokens", "hidden_size", "inter_size", "topk", "num_experts"),
    ),
    "collectives": Family(
        "collectives.csv", _Collective, ("op", "num_gpus", "message_bytes"), ("op", "source"), sizes=("message_bytes",)
    ),
    "moe_alltoall_deepep": Family(
        "moe_alltoall_deepep.csv",
        _ExpertAllToAll,
        ("mode", "num_nodes", "hidden", "topk", "num_experts", "tokens_per_rank"),
        ("mode", "side", "comm_sms", "num_nodes"),
        sizes=("tokens_per_rank", "hidden", "topk", "num_experts", "num_nodes"),
    ),
    "send_recv": Family(
        "p2p_send_recv_vidur.csv", _SendRecv, ("message_bytes",), ("scope",), "median_us", ("message_bytes",)
    ),
}
"""Every family of kernel measurements, by name."""


def read_table(directory: Path, family: str) -> pd.DataFrame | None:
    """The validated rows of a family in long form; None if its file is missing.

    Raises:
        InputError: The file cannot be read, lacks a column, or holds an impossible value.
    """
    path, schema = table_path(directory, family), MEASURED_FAMILIES[family].schema
    if not path.exists():
        return None
    raw, _ = usable_rows(family, path)
    frame = check_rows(path, raw, schema)
    if (windowed := windowed_path(directory, family)) is not None:
        frame = pd.concat([frame, check_rows(windowed, usable_rows(family, windowed)[0], schema)], ignore_index=True)
    return long_form(family, frame)


def windowed_path(directory: Path, family: str) -> Path | None:
    """The file of a family's kernels under a sliding window, if the folder has one."""
    name = MEASURED_FAMILIES[family].windowed
    return directory / name if name and (directory / name).exists() else None


_OTHERWISE_CALLED = {"moe_alltoall_deepep": "moe_alltoall.csv"}
"""Files that hold a family's rows among those of other libraries."""


def table_path(directory: Path, family: str) -> Path:
    """The file of a family in a folder, whether it exists or not."""
    path = directory / MEASURED_FAMILIES[family].file
    beside = directory / _OTHERWISE_CALLED.get(family, path.name)
    return path if path.exists() or not beside.exists() else beside


_NO_FORMATS = ("sq", "int8_wo")
"""Formats of 8 bits that the simulator has not."""
_GEMM_SHAPE = ("framework", "dtype", "m", "n", "k")


def usable_rows(family: str, path: Path) -> tuple[pd.DataFrame, list[str]]:
    """The rows of a public table that a fit can use, under their numbers in the file, and what became of the others.

    Of several kernels of an engine for one GEMM the fastest stays ([assumed] what a tuned engine runs); of expert
    all-to-alls DeepEP's as SGLang runs it, as on the H100.
    """
    raw, notes = read_text(path), list[str]()
    if family in ("gemm", "moe") and "dtype" in raw.columns:
        known = ~raw["dtype"].isin(_NO_FORMATS).to_numpy()
        if not known.all():
            notes.append(f"{int((~known).sum())} rows in {', '.join(_NO_FORMATS)} left out: no such format here")
        raw = raw.loc[known]
    if family == "gemm" and {"kernel_source", "latency_us", *_GEMM_SHAPE} <= set(raw.columns):
        order = np.argsort(pd.Series(pd.to_numeric(raw["latency_us"], errors="coerce")).to_numpy(), kind="stable")
        fastest = np.empty(len(raw), dtype=bool)
        fastest[order] = ~raw.iloc[order].duplicated(list(_GEMM_SHAPE)).to_numpy(dtype=bool)
        if not fastest.all():
            notes.append(f"{int((~fastest).sum())} rows of slower kernels of the same engine left out")
        raw = raw.loc[fastest]
        raw = raw.assign(kernel_source=_kernels_apart(raw) if fastest.all() else "")
    for kept, what in _KEPT.get(family, ()):
        usable = kept(raw)
        if len(usable) < len(raw):
            notes.append(f"{len(raw) - len(usable)} rows of {what} left out")
        raw = usable
    if path.name == _OTHERWISE_CALLED.get(family) and "source" in raw.columns:
        ours = raw["source"].str.startswith("deepep_sglang").to_numpy(dtype=bool)
        if not ours.all():
            notes.append(f"{int((~ours).sum())} rows of other libraries than DeepEP under SGLang left out")
        raw = raw.loc[ours]
    return raw, notes


def _kernels_apart(gemms: pd.DataFrame) -> NDArray[np.object_]:
    """[rows] the kernel where an engine's of a format were measured on shapes of their own, else ""."""
    kinds = gemms.groupby(["framework", "dtype"])["kernel_source"].transform("nunique")
    return np.where(kinds.to_numpy() > 1, gemms["kernel_source"].to_numpy(), "")


_KEPT: Mapping[str, tuple[tuple[Callable[[pd.DataFrame], pd.DataFrame], str], ...]] = {
    "sparse_attention": ((usable_modules, "single kernels, latent attention alone and dense attention"),),
    "state": ((usable_states, "verified drafts and of whole decode steps"),),
}
"""Which rows of a family's file are of its kind, and what the others are."""


def read_csv(path: Path, schema: type[BaseModel]) -> pd.DataFrame:
    """The columns that a schema names, every row checked.

    Raises:
        InputError: Names the file, the line and the column, what was expected and what was found.
    """
    return check_rows(path, read_text(path), schema)


_LARGEST_TABLE_BYTES = 64 * 1024**2
"""[assumed] A million measured rows."""
_MOST_CELLS = 4_000_000
"""[assumed] Half a million rows of the widest table; in memory a cell takes up to a hundred bytes."""
_MOST_COLUMNS = 1000
"""[assumed] Ten times those of any table; pandas takes minutes to tell a million apart."""


def read_text(path: Path) -> pd.DataFrame:
    """A CSV file as text, cell by cell.

    Raises:
        InputError: The file cannot be read.
    """
    try:
        content = read_bytes(path, _LARGEST_TABLE_BYTES)
        if content.partition(b"\n")[0].count(b",") > _MOST_COLUMNS:
            raise Unreadable(f"it is too long: expected at most {_MOST_COLUMNS:,} columns")
        if content.count(b",") + content.count(b"\n") > _MOST_CELLS:
            raise Unreadable(f"it is too long: expected at most {_MOST_CELLS:,} cells")
        frame = pd.read_csv(io.BytesIO(content), keep_default_na=False, dtype=str)
    except (OSError, ValueError, pd.errors.ParserError) as error:
        raise InputError(f"cannot read {path}: {str(error).strip()}") from error
    if not isinstance(frame.index, pd.RangeIndex):  # pandas took the first cells for names of the rows
        count = len(frame.columns)
        raise InputError(f"{path}: rows have more cells than the header's {count}: is there a comma at their ends?")
    return frame


def check_names(path: Path, column: str, cells: Iterable[str]) -> None:
    """Raises InputError for a cell that is no name; see `NAME_PATTERN`."""
    for line, cell in enumerate(cells, start=2):
        if not re.fullmatch(NAME_PATTERN[1:-1], cell):
            raise InputError(f"{path}, line {line}, column {column}: {_NAME_WANTED}, got {cell!r}")


def check_rows(path: Path, raw: pd.DataFrame, schema: type[BaseModel]) -> pd.DataFrame:
    """The columns that a schema names of rows read as text, which are numbered as in the file; see `read_csv`."""
    wanted = list(schema.model_fields)
    needed = [name for name, field in schema.model_fields.items() if field.is_required()]
    if missing := [name for name in needed if name not in raw.columns]:
        raise InputError(f"{path}: no column {missing[0]!r}; {did_you_mean(missing[0], raw.columns)}")
    if raw.empty:
        raise InputError(f"{path} has no rows")
    records: list[JsonObject] = []
    found = [name for name in wanted if name in raw.columns]
    for row, values in zip(raw.index, zip(*(raw[name] for name in found), strict=True), strict=True):
        try:
            records.append(dict(schema.model_validate(dict(zip(found, values, strict=True)))))
        except ValidationError as error:
            item = error.errors()[0]
            named = item.get("ctx", {}).get("pattern") == NAME_PATTERN
            expected = f"{_NAME_WANTED}, got {item['input']!r}" if named else expectation(item)
            raise InputError(f"{path}, line {row + 2}, column {item['loc'][0]}: {expected}") from None
    return pd.DataFrame.from_records(records, columns=wanted)


def long_form(family: str, frame: pd.DataFrame) -> pd.DataFrame:
    """The frame with a `latency_us` per row; an expert all-to-all gives a row each for dispatch and combine."""
    if family == "moe_alltoall_deepep" and "side" not in frame:
        sides = [frame.assign(side=side, latency_us=frame[f"{side}_us"]) for side in ("dispatch", "combine")]
        return pd.concat(sides, ignore_index=True)
    if family == "send_recv" and "latency_us" not in frame:
        return frame.assign(latency_us=frame["median_us"])
    return frame


def measured_us(frame: pd.DataFrame) -> NDArray[np.float64]:
    """[rows] measured microseconds of a long frame."""
    return frame["latency_us"].to_numpy(dtype=float)
