"""A made-up machine: GEMMs and messages whose times follow a formula, and its CSV files."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from sim.arrays import Floats


def gemm_us(m: Floats, n: Floats, k: Floats) -> Floats:
    """Launch, FLOP and bytes of a machine that reaches 70 % of the peaks."""
    return 4 + 2 * m * n * k / 1979e6 / 0.7 + (m * k + n * k + 2 * m * n) / 3.35e6 / 0.7


@pytest.fixture(scope="module")
def gemms() -> pd.DataFrame:
    """Rows of gemm.csv: 300 shapes with 2 % noise, and ten of them measured ten times too slow."""
    rng = np.random.default_rng(0)
    m, n, k = (2.0 ** rng.integers(low, high, 300) for low, high in ((0, 13), (8, 15), (8, 15)))
    time = gemm_us(m, n, k) * np.exp(rng.normal(0, 0.02, 300))
    time[:10] *= 10
    shapes = {"m": m.astype(int), "n": n.astype(int), "k": k.astype(int)}
    return pd.DataFrame({"framework": "trtllm", "dtype": "fp8", **shapes, "latency_us": time})


@pytest.fixture
def measured(tmp_path: Path, gemms: pd.DataFrame) -> Path:
    """A folder with that file alone."""
    folder = tmp_path / "measured"
    folder.mkdir()
    gemms.to_csv(folder / "gemm.csv", index=False)
    return folder
