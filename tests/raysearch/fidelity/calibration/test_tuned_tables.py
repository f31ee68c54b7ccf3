"""AMD's tuned tables become those that a calibration reads, of one chip and in formats that the simulator has."""

from __future__ import annotations

import itertools
import json
import random
from pathlib import Path

import pandas as pd
import pytest
from typer.testing import CliRunner

from raysearch.base.errors import InputError
from raysearch.cli.app import app
from raysearch.fidelity.calibration.measured_tables import read_table
from raysearch.fidelity.calibration.predict import series_of
from raysearch.fidelity.calibration.tuned_tables import is_tuned, write_tuned_tables
from tests.raysearch.forging import WRONG
from tests.raysearch.fuzzing import broken, inputs, tried

GEMM = {"gfx": "gfx950", "cu_num": 256, "libtype": "ck", "q_dtype_w": ""}
EXPERTS = {"cu_num": 256, "model_dim": 7168, "inter_dim": 256, "topk": 8, "q_type": "QuantType.per_1x128"}
EXPERTS |= {"q_dtype_w": "torch.float8_e4m3fn", "use_g1u1": 1}


def published(folder: Path) -> Path:
    """GEMMs of two formats and experts, each with rows that are not meant."""
    folder.mkdir(parents=True)
    shapes = list(itertools.product((1, 64, 1024, 8192), (1024, 4096, 8192), (1024, 4096, 8192)))
    blocks = [GEMM | {"M": m, "N": n, "K": k, "us": 4 + 2 * m * n * k / 1e9} for m, n, k in shapes]
    blocks[0] |= {"libtype": "triton"}
    other = [blocks[0] | {"us": 1.0, "gfx": "gfx1250"}, blocks[0] | {"us": 1.0, "cu_num": 80}, blocks[1] | {"us": -1}]
    other += [blocks[0] | {"M": 1e30}]
    slower = [blocks[5] | {"us": 1e6}]
    pd.DataFrame(blocks + other + slower).to_csv(folder / "a8w8_blockscale_tuned_gemm_ds_v3.csv", index=False)
    integers = [blocks[0] | {"q_dtype_w": "torch.int8"}, blocks[0] | {"q_dtype_w": "torch.float8_e4m3fn"}]
    pd.DataFrame(integers).to_csv(folder / "a8w8_tuned_gemm.csv", index=False)
    pd.DataFrame(blocks[:1]).to_csv(folder / "bf16_tuned_batched_gemm.csv", index=False)
    rows = [EXPERTS | {"token": 64, "expert": 256, "us": 90.0}, EXPERTS | {"token": 64, "expert": 256, "us": 0.0}]
    rows += [rows[0] | {"q_type": "QuantType.per_Tensor", "q_dtype_w": "torch.int8"}]
    pd.DataFrame(rows).to_csv(folder / "tuned_fmoe.csv", index=False)
    (folder / "untuned_gemm.csv").write_text("M,N,K\n1,2,3\n", encoding="utf-8")
    return folder


def test_validate_reads_the_tuned_tables_of_a_chip(raysearch, tmp_path: Path) -> None:
    """As `calibrate` reads them, under their own name and by the coefficients of the machine."""
    asked = ("validate", published(tmp_path / "configs"), "--hardware", "mi355x", "--set", "system=gfx950", "--json")
    gemm = json.loads(raysearch(*asked).stdout)["gemm"]
    assert (gemm["rows"], gemm["unpredicted"], gemm["note"]) == (37, 0, "")
    assert {each["name"] for each in gemm["groups"]} == {"aiter fp8", "aiter fp8_block"}
    wrong = raysearch(*asked[:3], "mi300x", "--set", "system=gfx942")
    assert wrong.returncode == 2
    assert "has no row of gfx942 with 304 compute units" in wrong.stderr
    (broken := tmp_path / "broken").mkdir()
    pd.DataFrame([GEMM | {"M": 1, "N": 2, "K": "x", "us": 1.0}]).to_csv(broken / "a8w8_tuned_gemm.csv", index=False)
    wrong = raysearch("validate", broken, *asked[2:])
    assert "none of its rows of gfx950 with 256 compute units" in wrong.stderr


def test_the_fastest_kernel_of_each_shape_of_a_chip_is_read_in_the_format_of_its_file(tmp_path: Path) -> None:
    tables = tmp_path / "tables"
    tables.mkdir()
    notes = write_tuned_tables(published(tmp_path / "configs"), "gfx950", 256, tables)
    assert notes == ["gemm.csv: 37 shapes", "moe.csv: 1 shapes"]
    gemm, moe = read_table(tables, "gemm"), read_table(tables, "moe")
    assert gemm is not None
    assert moe is not None
    assert gemm.groupby("dtype").size().to_dict() == {"fp8": 1, "fp8_block": 36}
    assert set(series_of("gemm", gemm)) == {"gemm/aiter/fp8", "gemm/aiter/fp8_block"}, "whichever kernel was tuned"
    times = gemm["latency_us"].tolist()
    assert 4 < min(times) < max(times) < 1e4
    assert moe.to_dict("records")[0]["dtype"] == "fp8_block"


def test_broken_tables_are_refused_in_one_line_or_read(tmp_path: Path) -> None:
    gemm = pd.DataFrame([GEMM | {"M": m, "N": 64, "K": 64, "us": 4.0} for m in (1, 2, 3)]).to_csv(index=False)
    experts = pd.DataFrame([EXPERTS | {"token": 64, "expert": 256, "us": 90.0}] * 2).to_csv(index=False)
    folder, tables = tmp_path / "configs", tmp_path / "tables"
    folder.mkdir()
    tables.mkdir()
    for seed in range(inputs(30)):
        rng = random.Random(seed)
        name, whole = rng.choice([("a8w8_tuned.csv", gemm), ("tuned_fmoe.csv", experts)])
        cell = rng.choice(["256", "64", "gfx950", "us", "4.0", "90.0"])
        text = whole.replace(cell, str(rng.choice([*WRONG, "nan", '"\n"', "1e999"])), rng.choice([1, 1, 9]))
        content = text.encode(errors="replace")
        (folder / name).write_bytes(broken(content, rng) if rng.random() < 0.5 else content)
        tried(lambda: write_tuned_tables(folder, "gfx950", 256, tables))
        (folder / name).unlink()


def test_a_chip_that_no_row_is_of_is_refused_with_those_that_there_are(tmp_path: Path) -> None:
    folder = published(tmp_path / "configs")
    with pytest.raises(
        InputError, match=r"no row of gfx950 with 304 compute units, as --hardware has: it has .*gfx950 of 256 units"
    ):
        write_tuned_tables(folder, "gfx950", 304, tmp_path)
    assert is_tuned(folder)
    assert not is_tuned(tmp_path / "nothing")


def test_a_folder_of_tuned_tables_is_calibrated_with_its_licence(
    tmp_path: Path,
) -> None:
    out = tmp_path / "mi355x.json"
    words = ["calibrate", str(published(tmp_path / "configs")), "--out", str(out), "--hardware", "mi355x"]
    result = CliRunner().invoke(app, [*words, "--set", "system=gfx950"], catch_exceptions=False)
    assert result.exit_code == 0, result.output
    content = json.loads(out.read_text(encoding="utf-8"))
    assert "gfx950 of ROCm/aiter's tuned tables (MIT): gemm.csv: 37 shapes" in content["provenance"]["source"]
    assert "gemm/aiter/fp8_block" in content["series"]
