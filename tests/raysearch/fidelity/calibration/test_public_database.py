"""The public performance database: its newest tables become those that a calibration reads, with their source."""

from __future__ import annotations

import itertools
import json
import zipfile
from pathlib import Path

import pandas as pd
import pytest

from raysearch.base.errors import InputError
from raysearch.fidelity.calibration.measured_tables import read_table
from raysearch.fidelity.calibration.public_database import write_tables

pytest.importorskip("pyarrow")
BASE = {"framework": "VLLM", "device": "some GPU", "op_name": "gemm", "kernel_source": "vllm_default"}


def published(folder: Path, system: str = "b200_sxm") -> Path:
    """A database with GEMMs of two versions and decode attention of one."""

    def save(family: str, version: str, rows: list[dict[str, object]]) -> None:
        place = folder / "aiconfigurator_core" / "systems" / "data" / system / family / "vllm" / version
        place.mkdir(parents=True)
        pd.DataFrame(rows).to_parquet(place / f"{family}_perf.parquet")

    for version, factor in (("0.9.0", 2.0), ("0.24.0", 1.0)):
        shapes = itertools.product((1, 64, 4096, 32768), (1024, 4096, 8192), (1024, 4096, 8192))
        rows = [
            BASE
            | {"version": version, "gemm_dtype": dtype, "m": m, "n": n, "k": k}
            | {"latency": factor * (0.004 + 2 * m * n * k / 1e12)}
            for m, n, k in shapes
            for dtype in ("bfloat16", "nvfp4")
        ]
        save("gemm", version, rows)
    rows = [
        BASE
        | {"version": "0.24.0", "op_name": "generation_attention", "batch_size": 4, "isl": 1, "step": 511}
        | {"num_heads": 8, "num_key_value_heads": 0, "head_dim": 128, "beam_width": 1, "window_size": window}
        | {"kv_cache_dtype": "fp8", "latency": 0.01}
        for window in (0, 128)
    ]
    save("generation_attention", "0.24.0", rows)
    return folder


def test_the_newest_version_of_each_engine_is_read_in_microseconds(tmp_path: Path) -> None:
    tables = tmp_path / "tables"
    tables.mkdir()
    told = write_tables(published(tmp_path / "wheel"), "b200_sxm", tables)
    assert told == ["attention_decode.csv: vllm 0.24.0", "gemm.csv: vllm 0.24.0"]
    gemm, decode = read_table(tables, "gemm"), read_table(tables, "attention_decode")
    assert gemm is not None
    assert decode is not None
    assert len(gemm) == 72
    assert gemm.latency_us.max() == pytest.approx(4 + 2 * 32768 * 8192**2 / 1e9)  # longer than any grid, as it was
    assert (decode.kv_len.tolist(), decode.num_kv_heads.tolist(), decode.latency_us.tolist()) == ([512], [8], [10.0])


def test_a_wheel_is_read_and_its_source_is_kept(raysearch, tmp_path: Path) -> None:
    folder, wheel = published(tmp_path / "files"), tmp_path / "core.whl"
    with zipfile.ZipFile(wheel, "w") as file:
        for path in folder.rglob("*.parquet"):
            file.write(path, path.relative_to(folder).as_posix())
    out = tmp_path / "b200.json"
    done = raysearch("calibrate", wheel, "--out", out, "--hardware", "b200_sxm", "--set", "system=b200_sxm")
    assert done.returncode == 0, done.stderr
    content = json.loads(out.read_text(encoding="utf-8"))
    assert {"gemm/vllm/bf16", "gemm/vllm/nvfp4"} <= set(content["series"])
    assert "Apache-2.0" in content["provenance"]["source"]
    assert "gemm.csv: vllm 0.24.0" in content["provenance"]["source"]


def test_an_unknown_machine_and_what_is_no_wheel_are_one_message(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="no tables of 'b20_sxm' that are known: did you mean 'b200_sxm'"):
        write_tables(published(tmp_path / "files"), "b20_sxm", tmp_path)
    (tmp_path / "some.whl").write_text("no archive", encoding="utf-8")
    with pytest.raises(InputError, match="expected a wheel or a folder of Parquet files"):
        write_tables(tmp_path / "some.whl", "b200_sxm", tmp_path)
