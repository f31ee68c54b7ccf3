"""Tables as the public performance database has them: more formats, libraries and kernels than the first ones."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from raysearch.base.errors import InputError
from raysearch.fidelity.calibration.fit import H100_SXM, fit_family
from raysearch.fidelity.calibration.kernel_families import GRIDS
from raysearch.fidelity.calibration.measured_tables import read_table, usable_rows
from raysearch.fidelity.calibration.predict import predict, series_of
from sim.prices.kernel_fallbacks import EXPERT_KERNELS

BLACKWELL = {"speed_of_light": {**H100_SXM["speed_of_light"], "fp4_tflops": 4000.0}, "machine": H100_SXM["machine"]}


def written(folder: Path, name: str, rows: list[dict[str, object]]) -> Path:
    pd.DataFrame(rows).to_csv(folder / name, index=False)
    return folder


def gemms(dtype: str, most_m: int) -> list[dict[str, object]]:
    """What multiplies at a fixed rate after 5 us."""
    return [
        {"framework": "trtllm", "dtype": dtype, "m": m, "n": n, "k": k, "latency_us": 5 + 2 * m * n * k / 5e8}
        for m in (1, 64, 256, 1024, 4096, 16384, 65536)
        if m <= most_m
        for n in (1024, 4096)
        for k in (1024, 4096, 8192)
    ]


@pytest.mark.parametrize("dtype", ["nvfp4"])
def test_rows_above_the_table_say_what_lies_above_it(tmp_path: Path, dtype: str) -> None:
    """At four times as many rows as the table reaches a time grows fourfold, as the table prices it."""
    frames = []
    for most in (16384, 65536):
        frame = read_table(written(tmp_path, "gemm.csv", gemms(dtype, most)), "gemm")
        assert frame is not None
        frames.append(frame)
    without, with_them = (fit_family("gemm", frame, BLACKWELL) for frame in frames)
    edge = frames[0].loc[frames[0].m == 16384]
    times = [predict("gemm", edge, fitted) for fitted in (without, with_them)]
    np.testing.assert_allclose(times[1], edge.latency_us, rtol=0.05)
    np.testing.assert_allclose(*times, rtol=0.05)
    assert GRIDS["gemm"].above(np.log([[65536.0, 1024.0, 1024.0], [1.0, 1.0, 1.0]])) == pytest.approx([np.log(4), 0])


def test_engines_and_formats_are_called_as_the_simulator_calls_them(tmp_path: Path) -> None:
    shape = {"num_tokens": 8, "hidden_size": 512, "inter_size": 512, "topk": 2, "num_experts": 8}
    mesh = {"moe_tp_size": 1, "moe_ep_size": 1, "distribution": "balanced", "latency_us": 9.0}
    formats = ("w4a16_mxfp4", "w4a8_mxfp4_mxfp8", "int4_wo", "int8_wo")
    rows = [{"framework": "trtllm", "kernel_source": "flow", "dtype": each, **shape, **mesh} for each in formats]
    experts = read_table(written(tmp_path, "moe.csv", rows), "moe")
    assert experts is not None
    assert series_of("moe", experts) == ["moe/trtllm/flow/mxfp4", "moe/trtllm/flow_w4a8/mxfp4", "moe/trtllm/flow/int4"]
    message = {"op": "all_reduce", "dtype": "half", "num_gpus": 16, "message_bytes": 1024, "latency_us": 9.0}
    sources = ("nccl_2.29.2", "vllm_graph_0.24.0", "sglang_eager_0.5.14", "trtllm_custom_1.3.0rc20")
    rows = [{"source": source, **message} for source in sources]
    collectives = read_table(written(tmp_path, "collectives.csv", rows), "collectives")
    assert collectives is not None
    names = [name.split("/")[2] for name in series_of("collectives", collectives)]
    assert names == ["nccl", "vllm_custom_graph", "sglang_custom_eager", "trtllm_custom"]
    latent = {"mla_dtype": "bfloat16", "kv_cache_dtype": "fp8", "batch_size": 1, "kv_len": 9, "num_heads": 8}
    for more, series in (({}, "mla_decode/fp8"), ({"framework": "sglang"}, "mla_decode/sglang/fp8")):
        frame = read_table(written(tmp_path, "mla_decode.csv", [{**latent, **more, "latency_us": 9.0}]), "mla_decode")
        assert frame is not None
        assert series_of("mla_decode", frame) == [series]


def test_of_several_kernels_for_one_product_the_fastest_stays_and_it_is_stated(tmp_path: Path) -> None:
    same = {"framework": "vllm", "dtype": "fp8_block", "m": "1", "n": "2", "k": "3"}
    raw = pd.DataFrame([{**same, "kernel_source": name, "latency_us": us} for name, us in (("a", "9"), ("b", "10"))])
    pd.concat([raw, raw.assign(m="4")]).to_csv(tmp_path / "gemm.csv", index=False)
    kept, notes = usable_rows("gemm", tmp_path / "gemm.csv")
    assert list(kept["latency_us"]) == ["9", "9"]
    assert notes == ["2 rows of slower kernels of the same engine left out"]


def test_kernels_that_were_measured_on_shapes_of_their_own_are_fitted_apart(tmp_path: Path) -> None:
    same = {"framework": "vllm", "dtype": "fp8_block", "n": 2, "k": 3, "latency_us": 9.0}
    rows = [{**same, "m": m, "kernel_source": name} for m, name in ((1, "a"), (4, "b"))]
    alone = {**same, "m": 1, "dtype": "fp8", "kernel_source": "c"}
    frame = read_table(written(tmp_path, "gemm.csv", [*rows, alone]), "gemm")
    assert frame is not None
    assert series_of("gemm", frame) == ["gemm/vllm/fp8_block/a", "gemm/vllm/fp8_block/b", "gemm/vllm/fp8"]


def test_of_several_libraries_in_a_file_deepep_stays_and_a_file_of_one_is_read_whole(tmp_path: Path) -> None:
    sent = pd.DataFrame({"source": ["deepep_sglang0.5.12", "trtllm_deepep_ll"]})
    for file, rows in (("moe_alltoall.csv", 1), ("moe_alltoall_deepep.csv", 2)):
        sent.to_csv(tmp_path / file, index=False)
        assert len(usable_rows("moe_alltoall_deepep", tmp_path / file)[0]) == rows


def test_a_bad_cell_behind_rows_that_are_left_out_is_named_by_its_line(tmp_path: Path) -> None:
    rows = [{"framework": "vllm", "dtype": dtype, "m": 1, "n": 2, "k": 3} for dtype in ("sq", "fp8")]
    pd.DataFrame(rows).assign(latency_us=["1", "fast"]).to_csv(tmp_path / "gemm.csv", index=False)
    with pytest.raises(InputError, match="line 3, column latency_us"):
        read_table(tmp_path, "gemm")


def test_wider_heads_have_a_table_of_their_own(tmp_path: Path) -> None:
    """A head of 512 in a kernel as slow as any of 128 is not priced at four times that."""
    heads = {"num_heads": 8, "num_kv_heads": 2}
    rows = [
        {"framework": "vllm", "kv_cache_dtype": "fp8", "batch_size": batch, "kv_len": kv_len, **heads}
        | {"head_dim": width, "latency_us": 5 + batch * kv_len / 1e3}
        for batch in (1, 16, 256)
        for kv_len in (256, 4096, 65536)
        for width in (64, 128, 256, 512)
    ]
    frame = read_table(written(tmp_path, "attention_decode.csv", rows), "attention_decode")
    assert frame is not None
    predicted = predict("attention_decode", frame, fit_family("attention_decode", frame))
    widest = (frame.head_dim == 512).to_numpy()
    np.testing.assert_allclose(predicted[widest] / frame.latency_us[widest], 1, atol=0.3)


def test_the_kernels_that_engines_run_are_named_once_each() -> None:
    assert all(len(set(kernels)) == len(kernels) for kernels in EXPERT_KERNELS.values())
