"""Published results of InferenceX as serving runs: the JSON of its dashboards, or a table of the same fields.

A run is one record: flat as `hardware`, `framework`, `model`, `precision`, `spec_method`, `disagg`, degrees and
workers, `isl`, `osl`, `conc`, `image`, `date`, and its measurements, beside these or under `metrics`, in seconds.
Licence: the dashboards' code is under the GPL, their figures are facts.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, cast

import pandas as pd

from raysearch.base.errors import InputError
from raysearch.fidelity.calibration.measured_tables import read_text
from sim.config.reading import Unreadable, parse_json, read_bytes
from sim.json_object import JsonFields, JsonObject

MACHINES: Mapping[str, str] = {
    "gb300": "gb300_nvl72",
    "gb200": "gb200_nvl72",
    "b300": "b300_sxm",
    "b200": "b200_sxm",
    "h200": "h200_sxm",
    "h100": "h100_sxm",
    "rtx6000pro": "rtx_pro_6000_server",
    "mi355x": "mi355x",
    "mi325x": "mi325x",
    "mi300x": "mi300x",
}
"""Its names of machines -> ours; longer ones first, since those begin with others."""
ENGINES: Mapping[str, str] = {
    "sglang": "sglang",
    "dynamo-sglang": "sglang",
    "sglang-disagg": "sglang",
    "mori-sglang": "sglang",
    "vllm": "vllm",
    "dynamo-vllm": "vllm",
    "llmd-vllm": "vllm",
    "trt": "trtllm",
    "dynamo-trt": "trtllm",
}
SOURCE = "InferenceX export of its dashboards"
_FORMATS = {"fp8": "fp8", "bf16": "bfloat16", "int4": "int4_wo"}
_FEW_DRAFTS = 2
_LARGEST_BYTES = 64 * 1024**2
_MOST_VALUES = 2_000_000
"""[assumed] Forty thousand runs of fifty fields; in memory a value takes up to two hundred bytes."""
_MOST = 10**7
"""[assumed] Of any number of tokens, requests, GPUs or workers."""


def machine_named(name: object) -> str | None:
    """Our name of a machine that a runner or a run names."""
    return next((ours for theirs, ours in MACHINES.items() if theirs in str(name).lower()), None)


def drafts_of(engine: str, dp: int, *, deepseek: bool) -> int:
    """Tokens drafted per step by multi-token prediction.

    [published] scripts under benchmarks/single_node: one of TensorRT-LLM with attention data-parallelism, two of SGLang
    for DeepSeek-R1 and of vLLM, else three.
    """
    if engine == "trtllm":
        return 1 if dp > 1 else 3
    return _FEW_DRAFTS if engine == "vllm" or deepseek else 3


def published_records(path: Path) -> Iterator[JsonObject]:
    """The runs of a file, or of every such file of a folder, each flat.

    Raises:
        InputError: A file cannot be read.
    """
    if not path.exists():
        raise InputError(f"no such file or folder: {path}")
    files = [path] if path.is_file() else sorted(each for each in path.glob("*") if each.suffix in (".json", ".csv"))
    for file in files:
        rows: Any = read_text(file).to_dict("records") if file.suffix == ".csv" else _parsed(file)
        if isinstance(rows, dict):
            rows = next((each for each in cast("dict[str, Any]", rows).values() if isinstance(each, list)), [])
        for row in cast("list[Any]", rows) if isinstance(rows, list) else []:
            if isinstance(row, dict):
                record = cast(JsonObject, row)
                metrics = record.get("metrics")
                yield {**record, **(cast(JsonObject, metrics) if isinstance(metrics, dict) else {})}


def _parsed(path: Path) -> Any:
    try:
        return parse_json(read_bytes(path, _LARGEST_BYTES), _MOST_VALUES, infinite=True)
    except (OSError, Unreadable) as error:
        raise InputError(f"{path}: cannot be read: {error}") from error


def number(fields: JsonFields, name: str) -> float | None:
    """A number, None for an empty cell. Raises: TypeError, ValueError: It is none, or infinite."""
    value = fields.get(name)
    if value in (None, ""):
        return None
    try:
        found = float(value) if isinstance(value, float | str) else float(whole_number(value, least=0))
    except (TypeError, ValueError):
        raise ValueError(f"{name}: expected a number, got {value!r:.40}") from None
    if math.isinf(found):
        raise ValueError(f"{name}: expected a finite number, got {value!r:.40}")
    return None if math.isnan(found) else found


def said_of(error: Exception) -> str:
    """What is wrong with a record, without the exception's name."""
    if isinstance(error, KeyError):
        return f"it has no {error.args[0]!r:.80}"
    if isinstance(error, ValueError):
        return f"{error}"[:200]
    return "one of its values is no table, list or number where such is expected"


def whole_of(fields: JsonFields, name: str, *, least: int = 1) -> int:
    """A field's whole number. Raises: KeyError, ValueError: It is missing, or none that can be."""
    try:
        return whole_number(fields[name], least=least)
    except (TypeError, ValueError):
        raise ValueError(f"{name}: expected a number from {least} to {_MOST:,}, got {fields[name]!r:.40}") from None


def whole_number(value: object, *, least: int = 1) -> int:
    """A number of tokens, requests, GPUs or workers. Raises: TypeError, ValueError: It is none, or out of bounds."""
    found = value if isinstance(value, int) else float(cast(Any, value))
    if not least <= found <= _MOST:
        raise ValueError(f"expected a number from {least} to {_MOST:,}, got {value!r:.40}")
    return int(found)


def flag(fields: JsonFields, name: str) -> bool:
    """Whether a cell says yes."""
    return str(fields.get(name, "")).lower() in ("true", "1")


def serving_frame(path: Path) -> pd.DataFrame:
    """The aggregated runs of engines that we know, as `read_serving_runs` has such.

    Raises:
        InputError: A file cannot be read, a run lacks what it needs, or there is none.
    """
    rows: list[JsonObject] = []
    for line, fields in enumerate(published_records(path), 1):
        engine, machine = ENGINES.get(str(fields.get("framework"))), machine_named(fields.get("hardware"))
        if engine is None or machine is None or flag(fields, "disagg"):
            continue
        try:
            rows.append(published_row(fields, engine, machine, line))
        except (KeyError, TypeError, ValueError) as error:
            raise InputError(f"{path}: run {line} is none of InferenceX: {said_of(error)}") from error
    rows = [row for row in rows if row["silicon_tpot_ms"]]
    if not rows:
        raise InputError(f"{path}: no aggregated run of vLLM, SGLang or TensorRT-LLM with a time per token")
    return pd.DataFrame(rows)


_PERCENTILES = ("median_ttft", "median_tpot", "p99_ttft", "p99_tpot")


def published_row(fields: JsonObject, engine: str, machine: str, line: int) -> JsonObject:
    """A record as a row of serving runs, with its percentiles in milliseconds.

    Raises:
        KeyError, TypeError, ValueError: It lacks what a run needs.
    """
    gpus, ep = (whole_number(number(fields, f"decode_{each}") or number(fields, each) or 1) for each in ("tp", "ep"))
    dp = gpus if flag(fields, "decode_dp_attention") or flag(fields, "dp_attention") else 1
    tpot_s = number(fields, "mean_tpot") or number(fields, "median_tpot") or 0.0
    model, precision = str(fields["model"]), str(fields["precision"])
    four_bits = "mxfp4" if machine.startswith("mi") else "nvfp4"
    drafts = str(fields.get("spec_method") or "none") != "none"
    release = re.search(r"v?(\d+\.\d+(?:\.\d+)?(?:rc\d+)?)", str(fields.get("image") or "").partition(":")[2])
    return {
        "id": f"{_name(fields)}#{line}",
        "source": SOURCE,
        "measured": str(fields.get("date") or ""),
        "system": machine,
        "backend": engine,
        "backend_version": release[1] if release else "nan",
        "model_path": model,
        "mode": "agg",
        "gemm_quant_mode": _FORMATS.get(precision, four_bits),
        "isl": whole_of(fields, "isl"),
        "osl": whole_of(fields, "osl"),
        "silicon_ttft_ms": 1e3 * (number(fields, "mean_ttft") or float("nan")),
        "silicon_tpot_ms": tpot_s * 1e3,
        **{f"{name}_ms": 1e3 * (number(fields, name) or float("nan")) for name in _PERCENTILES},
        "concurrency": whole_of(fields, "conc"),
        "batch_size": float("nan"),
        "tp_size": gpus // dp,
        "attention_dp_size": dp,
        "moe_tp_size": gpus // ep,
        "moe_ep_size": ep,
        "draft_tokens": drafts_of(engine, dp, deepseek="deepseek" in model.lower()) if drafts else 0,
    }


def _name(fields: JsonFields) -> str:
    return "-".join(str(fields.get(name, "")) for name in ("hardware", "framework", "precision", "isl", "osl", "conc"))
