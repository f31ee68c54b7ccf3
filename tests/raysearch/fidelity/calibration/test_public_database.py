"""The public performance database: its newest tables become those that a calibration reads, with their source."""

from __future__ import annotations

import itertools
import json
import os
import random
import shutil
import zipfile
from collections.abc import Callable
from pathlib import Path

import pandas as pd
import pyarrow as pa
import pytest
from pyarrow import parquet

from raysearch.base.errors import InputError
from raysearch.fidelity.calibration import public_database
from raysearch.fidelity.calibration.measured_tables import read_table
from raysearch.fidelity.calibration.public_database import write_tables
from sim.config.catalog import load_calibration
from tests.raysearch.fuzzing import broken, inputs, tried
from tests.raysearch.fuzzing import within_memory as within_memory

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
    notes = write_tables(published(tmp_path / "wheel"), "b200_sxm", tables)
    assert notes == [
        "attention_decode.csv: vllm 0.24.0",
        "attention_window_decode.csv: vllm 0.24.0",
        "gemm.csv: vllm 0.24.0",
    ]
    gemm, decode = read_table(tables, "gemm"), read_table(tables, "attention_decode")
    assert gemm is not None
    assert decode is not None
    assert len(gemm) == 72
    assert gemm.latency_us.max() == pytest.approx(4 + 2 * 32768 * 8192**2 / 1e9)  # longer than any grid, as it was
    assert decode.kv_len.tolist() == [512, 512]
    assert decode.num_kv_heads.tolist() == [8, 8]
    assert decode.window_size.tolist() == [0, 128]
    assert decode.latency_us.tolist() == [10.0, 10.0]


LATENT = {"mla_dtype": "bfloat16", "kv_cache_dtype": "fp8", "num_heads": 16, "batch_size": 2, "isl": 1, "step": 99}
MODULE = {"model": "deepseek-ai/DeepSeek-V3.2", "gemm_type": "fp8_block", "tp_size": 8}
EXCHANGE = {"node_num": 2, "hidden_size": 7168, "num_token": 64, "num_topk": 8, "num_experts": 256}
MESSAGE = {"num_gpus": 4, "message_size": 1024, "op_name": "all_reduce"}
DATABASE = {  # family, engine, version, name -> rows, as the collectors write them
    ("comm", "nccl", "2.29.2", "nccl"): [MESSAGE | {"nccl_dtype": "half", "kernel_source": "NCCL"}],
    ("comm", "vllm", "0.24.0", "custom_allreduce"): [
        MESSAGE | {"allreduce_dtype": "bfloat16", "kernel_source": "vLLM_custom_graph"}
    ],
    ("comm", "trtllm", "1.3.0", "custom_allreduce"): [
        MESSAGE | {"allreduce_dtype": "bfloat16", "kernel_source": "TRTLLM"}
    ],
    ("comm", "sglang", "0.5.12", "wideep_deepep_ll"): [
        EXCHANGE | {"dispatch_avg_t_us": 20.0, "combine_avg_t_us": 30.0}
    ],
    ("comm", "sglang", "0.5.12", "wideep_deepep_normal"): [
        EXCHANGE
        | {"dispatch_sms": 20, "dispatch_transmit_us": 50.0, "dispatch_notify_us": 5.0}
        | {"combine_sms": 20, "combine_transmit_us": 60.0, "combine_notify_us": 6.0}
    ],
    ("mla", "sglang", "0.5.14", "generation_mla"): [LATENT | {"op_name": "mla_generation", "latency": 0.02}],
    ("mla", "sglang", "0.5.10", "wideep_generation_mla"): [
        LATENT | MODULE | {"op_name": "mla_generation", "latency": 0.09}
    ],
    ("sparse_attention", "sglang", "0.5.14", "dsa_generation_module"): [
        LATENT | MODULE | {"op_name": "dsa_generation_module_skip_indexer", "latency": 0.05}
    ],
    ("linear_attention", "trtllm", "1.3.0", "mamba2"): [
        {"op_name": "mamba2", "phase": "context", "batch_size": 1, "seq_len": 64, "d_state": 128, "nheads": 64}
        | {"head_dim": 64, "n_groups": 8, "model_name": "nvidia/Nemotron-H", "latency": 0.004}
    ],
    ("moe", "trtllm", "1.3.0", "moe"): [
        {"op_name": "moe", "kernel_source": kernel, "moe_dtype": dtype, "num_tokens": 8, "hidden_size": 512}
        | {"inter_size": 512, "topk": 2, "num_experts": 8, "moe_tp_size": 1, "moe_ep_size": 1}
        | {"distribution": "balanced", "latency": 0.3}
        for kernel, dtype in (("cutlass", "nvfp4"), ("min_latency", "nvfp4"), ("cutlass", "some_newer_format"))
    ],
    ("moe", "trtllm", "1.4.0", "moe"): [
        {"op_name": "moe", "kernel_source": "cutlass", "moe_dtype": "nvfp4", "num_tokens": 8, "hidden_size": 512}
        | {"inter_size": 512, "topk": 2, "num_experts": 8, "moe_tp_size": 1, "moe_ep_size": 1}
        | {"distribution": "balanced", "latency": 0.2}
    ],
}


def written(folder: Path, tables: dict[tuple[str, str, str, str], list[dict[str, object]]]) -> Path:
    for (family, engine, version, name), rows in tables.items():
        place = folder / "systems" / "data" / "b200_sxm" / family / engine / version
        place.mkdir(parents=True, exist_ok=True)
        frame = pd.DataFrame([{"op_name": name, "kernel_source": "default", "latency": 0.01} | row for row in rows])
        frame.to_parquet(place / f"{name}_perf.parquet")
    return folder


def test_every_kind_of_table_is_read_as_its_family_and_a_newer_version_replaces_what_it_measured(
    tmp_path: Path,
) -> None:
    tables = tmp_path / "tables"
    tables.mkdir()
    notes = write_tables(written(tmp_path / "database", DATABASE), "b200_sxm", tables)
    assert "moe.csv: trtllm 1.3.0, trtllm 1.4.0" in notes
    assert "mla_decode.csv: sglang 0.5.14" in notes, "not the modules of wide expert parallelism"
    frames = {}
    for family in ("collectives", "moe_alltoall_deepep", "mla_decode", "sparse_attention", "state", "moe"):
        frames[family] = read_table(tables, family)
        assert frames[family] is not None, family
    messages = frames["collectives"]
    assert sorted(zip(messages.source, messages.message_bytes, messages.latency_us, strict=True)) == [
        ("nccl_2.29.2", 2048, 10.0),
        ("trtllm_custom_1.3.0", 2048, 10.0),
        ("vllm_graph_0.24.0", 2048, 10.0),
    ]
    sides = frames["moe_alltoall_deepep"]
    assert sorted(zip(sides["mode"], sides.side, sides.comm_sms, sides.latency_us, strict=True)) == [
        ("low_latency", "combine", 0, 30.0),
        ("low_latency", "dispatch", 0, 20.0),
        ("normal", "combine", 20, 66.0),
        ("normal", "dispatch", 20, 55.0),
    ]
    assert frames["mla_decode"][["framework", "kv_len", "latency_us"]].to_numpy().tolist() == [["sglang", 100, 20.0]]
    module = frames["sparse_attention"].to_dict("records")[0]
    assert (module["op"], module["variant"]) == ("dsa_generation", "dsa_generation_module_skip_indexer")
    assert frames["state"].to_dict("records")[0]["model"] == "nvidia/Nemotron-H"
    experts = frames["moe"]
    assert set(experts["framework_version"]) == {"1.3.0", "1.4.0"}, "which may say how a row is read"
    assert sorted(zip(experts.kernel_source, experts.dtype, experts.latency_us, strict=True)) == [
        ("cutlass", "nvfp4", 200.0),
        ("min_latency", "nvfp4", 300.0),
    ]


def test_of_many_rows_of_a_format_as_many_are_drawn_as_a_fit_needs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(public_database, "_MOST_ROWS", 10)
    write_tables(published(tmp_path / "wheel"), "b200_sxm", tmp_path)
    gemm = read_table(tmp_path, "gemm")
    assert gemm is not None
    assert gemm.groupby("dtype").size().to_dict() == {"bfloat16": 10, "nvfp4": 10}
    assert gemm["k"].nunique() == 3


def test_a_database_of_more_engines_than_there_are_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = published(tmp_path / "wheel")
    for place in list(whole.rglob("vllm")):
        for number in range(9):
            shutil.copytree(place, place.with_name(f"engine{number}"))
    monkeypatch.setattr(public_database, "_MOST_CELLS_TOGETHER", 5000)
    with pytest.raises(InputError, match="has more than 5,000 cells of 'b200_sxm'"):
        write_tables(whole, "b200_sxm", tmp_path)


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
    assert content["serving"] == load_calibration("b200_sxm").data["serving"], (
        "new kernels, the engines' times as before"
    )


def test_an_unknown_machine_and_what_is_no_wheel_are_one_message(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="no tables of 'b20_sxm' that are known: did you mean 'b200_sxm'"):
        write_tables(published(tmp_path / "files"), "b20_sxm", tmp_path)
    (empty := tmp_path / "empty").mkdir()
    with pytest.raises(InputError, match="no tables of any machine"):
        write_tables(empty, "b200_sxm", tmp_path)
    (tmp_path / "some.whl").write_text("no archive", encoding="utf-8")
    with pytest.raises(InputError, match="expected a wheel or a folder of Parquet files"):
        write_tables(tmp_path / "some.whl", "b200_sxm", tmp_path)


def database(folder: Path, frame: pd.DataFrame) -> Path:
    place = folder / "data" / "b200_sxm" / "gemm" / "vllm" / "1.0"
    place.mkdir(parents=True)
    frame.to_parquet(place / "gemm.parquet")
    return place / "gemm.parquet"


GEMM = {"gemm_dtype": "bfloat16", "m": 64, "n": 1024, "k": 1024, "latency": 0.01}


def unfolding(path: Path) -> None:
    """Writes a gigabyte of text in some kB."""
    text = pa.DictionaryArray.from_arrays(pa.array([0] * 10_000, pa.int32()), pa.array(["x" * 100_000]))
    table = pa.Table.from_pandas(pd.DataFrame([GEMM] * 10_000)).set_column(0, "gemm_dtype", text)
    parquet.write_table(table, path, store_schema=False)


FORGED: dict[str, Callable[[Path], object]] = {
    "missing": lambda path: pd.DataFrame([GEMM]).drop(columns="latency").to_parquet(path),
    "texts": lambda path: pd.DataFrame([GEMM | {"latency": "x"}]).to_parquet(path),
    "nested": lambda path: pd.DataFrame([GEMM | {"latency": [1.0]}]).to_parquet(path),
    "many": lambda path: pd.DataFrame([GEMM]).loc[[0] * 30_000].to_parquet(path),  # 150,000 cells in some kB
    "long": lambda path: unfolding(path),
    "no Parquet": lambda path: path.write_bytes(b"PAR1" * 10),
    "huge": lambda path: os.truncate(path, 3 * 10**9),
    "pipe": lambda path: (path.unlink(), os.mkfifo(path)),
    "device": lambda path: (path.unlink(), path.symlink_to("/dev/zero")),
    "nothing": lambda path: (path.unlink(), path.symlink_to("nothing")),
}


@pytest.mark.parametrize("forge", FORGED.values(), ids=FORGED)
def test_a_table_that_is_none_is_refused_in_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, forge: Callable[[Path], object]
) -> None:
    monkeypatch.setattr(public_database, "_MOST_CELLS", 10**5)
    forge(database(tmp_path / "files", pd.DataFrame([GEMM])))
    with pytest.raises(InputError, match=r"gemm\.parquet|no table of .* whose columns are known") as refusal:
        write_tables(tmp_path / "files", "b200_sxm", tmp_path)
    assert "\n" not in str(refusal.value)


def test_a_wheel_whose_members_unfold_without_end_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(public_database, "_LARGEST_TABLE_BYTES", 10**6)
    with zipfile.ZipFile(tmp_path / "bomb.whl", "w", zipfile.ZIP_DEFLATED) as wheel:
        wheel.writestr("data/b200_sxm/gemm/vllm/1.0/gemm.parquet", bytes(2 * 10**6))
    with pytest.raises(InputError, match=r"gemm\.parquet: .*it is too long"):
        write_tables(tmp_path / "bomb.whl", "b200_sxm", tmp_path)
    for make in (os.mkfifo, Path.mkdir, lambda path: path.symlink_to("/dev/zero")):
        make(other := tmp_path / make.__name__)
        with pytest.raises(InputError, match=r"no regular file|no tables of"):
            write_tables(other, "b200_sxm", tmp_path)


def test_a_wheel_whose_members_have_line_breaks_in_their_names_is_refused_in_one_line(tmp_path: Path) -> None:
    with zipfile.ZipFile(tmp_path / "core.whl", "w") as wheel:
        wheel.writestr("data/b200_sxm/gemm/vllm\n1.0/1.0/gemm.parquet", b"PAR1")
    with pytest.raises(
        InputError, match=r"^cannot read data/b200_sxm/gemm/vllm\\n1\.0/1\.0/gemm\.parquet: .*$"
    ) as refusal:
        write_tables(tmp_path / "core.whl", "b200_sxm", tmp_path)
    assert "\n" not in str(refusal.value)


def test_a_broken_database_is_refused_in_one_line_or_read(tmp_path: Path) -> None:
    table = database(tmp_path / "files", pd.DataFrame([GEMM] * 20))
    wheel = tmp_path / "core.whl"
    with zipfile.ZipFile(wheel, "w", zipfile.ZIP_DEFLATED) as file:
        file.write(table, table.relative_to(tmp_path / "files").as_posix())
    for path, source in ((table, tmp_path / "files"), (wheel, wheel)):
        whole = path.read_bytes()
        for seed in range(inputs(20)):
            path.write_bytes(broken(whole, random.Random(seed)))
            tried(lambda source=source: write_tables(source, "b200_sxm", tmp_path))
