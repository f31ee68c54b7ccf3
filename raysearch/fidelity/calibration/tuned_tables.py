"""AMD's tuned tables as ROCm/aiter publishes them, as the tables that a calibration reads.

A folder of its repository, aiter/configs, holds a CSV file per format and model: for each shape the fastest kernel
that its tuner found on a chip, in microseconds. vLLM and SGLang call these kernels on AMD's machines. MIT.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pandas as pd

from envs.strategy_env import brief
from raysearch.base.errors import InputError
from raysearch.fidelity.calibration.measured_tables import LARGEST_MEASURED, read_text
from sim.arrays import Floats
from sim.prices.kernel_fallbacks import AITER, AITER_EXPERTS

_GEMM, _EXPERTS = {"cu_num", "M", "N", "K", "us"}, {"cu_num", "token", "model_dim", "inter_dim", "expert", "topk", "us"}
_FORMATS = (("a4w4", "w4a8_mxfp4_mxfp8"), ("a8w8_blockscale", "fp8_block"), ("a8w8", "fp8"), ("bf16", "bfloat16"))
"""What a file of GEMMs has in its name -> format; 4 bits on either side count as MXFP4, their weights."""
_EXPERT_FORMATS = {
    ("QuantType.No", "bfloat16"): "bfloat16",
    ("QuantType.per_Token", "float8"): "fp8",
    ("QuantType.per_1x128", "float8"): "fp8_block",
    ("QuantType.per_1x32", "float4"): "w4a8_mxfp4_mxfp8",
    ("QuantType.per_1x32", "int4"): "int4_wo",
}
"""Scaling and format of the weights -> format; others (int8, MXFP8) are not among ours."""


def is_tuned(path: Path) -> bool:
    """Whether a folder holds such files."""
    return path.is_dir() and next(_files(path), None) is not None


def write_tuned_tables(folder_of_aiter: Path, chip: str, units: int, folder: Path) -> list[str]:
    """Writes what the files say of a machine as gemm.csv and moe.csv.

    Args:
        folder_of_aiter: aiter/configs, or any folder with such files.
        chip: As they name it: gfx942 (MI300X, MI325X), gfx950 (MI355X).
        units: Its compute units, which tell partitions of a chip apart.
        folder: To write to.

    Returns:
        What each table became of, a line each.

    Raises:
        InputError: A file cannot be read, or none has a row of this chip.
    """
    found: dict[str, list[pd.DataFrame]] = {"gemm.csv": [], "moe.csv": []}
    chips: set[str] = set()
    for path, raw in _files(folder_of_aiter):
        named = raw["gfx"] if "gfx" in raw.columns else pd.Series("", raw.index)
        counts = _numbers(raw, "cu_num")
        pairs = set(zip(map(str, named), counts, strict=True))
        chips |= {f"{brief(name)} of {count:g} units" for name, count in pairs if name}
        ours = pd.DataFrame(raw[(counts == units) & np.isin(list(named), (chip, ""))])
        table, rows = ("gemm.csv", _gemms(path, ours)) if set(raw.columns) >= _GEMM else ("moe.csv", _experts(ours))
        found[table].append(rows)
    notes: list[str] = []
    for table, parts in found.items():
        rows = pd.concat(parts) if parts else pd.DataFrame()
        if len(rows):
            shape = [name for name in rows.columns if name not in ("latency_us", "kernel_source")]
            rows = rows.sort_values("latency_us", kind="stable").drop_duplicates(shape).sort_index(kind="stable")
            rows.to_csv(folder / table, index=False)
            notes.append(f"{table}: {len(rows):,} shapes")
    if not notes:
        known = ", ".join(sorted(chips)[:_SHOWN_CHIPS]) or "none"
        if f"{brief(chip)} of {units} units" in chips:
            why = "has a shape, a format and a time that we know"
            raise InputError(f"{folder_of_aiter}: none of its rows of {chip} with {units} compute units {why}")
        raise InputError(
            f"{folder_of_aiter} has no row of {chip} with {units} compute units, as --hardware has: it has {known}"
        )
    return notes


def _files(folder: Path) -> Iterator[tuple[Path, pd.DataFrame]]:
    for path in sorted(folder.rglob("*.csv")):
        raw = read_text(path)
        if set(raw.columns) >= _GEMM or set(raw.columns) >= _EXPERTS:
            yield path, raw


def _numbers(raw: pd.DataFrame, column: str) -> Floats:
    values = np.array(pd.to_numeric(raw[column], errors="coerce"), dtype=float)
    return np.where(np.isfinite(values), values, 0.0)


def _gemms(path: Path, raw: pd.DataFrame) -> pd.DataFrame:
    """Rows in a format of ours; "file" names the file where many were joined to one."""
    names = raw["file"] if "file" in raw.columns else pd.Series(path.name, raw.index)
    formats = np.array([_format_of(str(name)) for name in names], dtype=object)
    weights = list(raw["q_dtype_w"]) if "q_dtype_w" in raw.columns else [""] * len(raw)
    integers = np.array(["int" in str(each) for each in weights], dtype=bool)
    frame = pd.DataFrame(
        {
            "framework": AITER,  # which of its kernels a shape has got is the tuner's choice, and no series of its own
            "dtype": formats,
            **{name.lower(): _numbers(raw, name) for name in "MNK"},
            "latency_us": _numbers(raw, "us"),
        },
        index=raw.index,
    )
    return _usable(pd.DataFrame(frame[(formats != "") & ~integers]))


def _format_of(file: str) -> str:
    """The format of a file's GEMMs; "" of batched ones and of others."""
    batched = "batched" in file
    return next((dtype for part, dtype in _FORMATS if part in file and not batched), "")


def _experts(raw: pd.DataFrame) -> pd.DataFrame:
    cells = (raw[name] if name in raw.columns else pd.Series("", raw.index) for name in ("q_type", "q_dtype_w"))
    short = re.compile(r"torch\.(bfloat16|float8|float4|int4)")
    formats = [
        _EXPERT_FORMATS.get((str(kind), match[1]), "") if (match := short.match(str(weights))) else ""
        for kind, weights in zip(*cells, strict=True)
    ]
    gated = _numbers(raw, "use_g1u1") if "use_g1u1" in raw.columns else np.ones(len(raw))
    sizes = {"num_tokens": "token", "hidden_size": "model_dim", "inter_size": "inter_dim"}
    sizes |= {"topk": "topk", "num_experts": "expert"}
    frame = pd.DataFrame(
        {
            "framework": AITER,
            "kernel_source": AITER_EXPERTS,
            "dtype": formats,
            **{ours: _numbers(raw, theirs) for ours, theirs in sizes.items()},
            "moe_tp_size": 1,  # widths and experts are those of one GPU
            "moe_ep_size": 1,
            "distribution": "balanced",
            "latency_us": _numbers(raw, "us"),
        },
        index=raw.index,
    )
    return _usable(pd.DataFrame(frame[(np.array(formats, dtype=object) != "") & (gated == 1)]))


def _usable(frame: pd.DataFrame) -> pd.DataFrame:
    """Rows whose sizes and time are above 0: a kernel that failed has 0 or -1."""
    sizes = [name for name in frame.columns if name not in _TEXTS]
    numbers = np.array(frame[sizes], dtype=float)
    kept = ((numbers > 0) & (numbers <= LARGEST_MEASURED)).all(axis=1)
    return pd.DataFrame(frame[kept]).astype({name: int for name in sizes if name != "latency_us"})


_SHOWN_CHIPS = 20
_TEXTS = ("framework", "kernel_source", "dtype", "distribution")
