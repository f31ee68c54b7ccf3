"""Terms of sparse attention and of states: what they grow with, and what curves make of them."""

from __future__ import annotations

import pytest

from sim.config.catalog import load_calibrated
from sim.prices.curves import Curves
from sim.prices.mixer_shapes import Convolution, SparseKind, StateScan, sparse_shape
from sim.prices.mixer_terms import convolution, sparse_attention, state_scan

CALIBRATION = load_calibrated("b200_sxm")
MACHINE = CALIBRATION.machine


def grows(few: list[float], many: list[float]) -> bool:
    return all(low <= high for low, high in zip(few, many, strict=True))


@pytest.mark.parametrize("kind", ["dsa", "dsa_shared", "csa", "hca", "msa"])
@pytest.mark.parametrize("place", range(4))
def test_sparse_attention_never_takes_less_of_more(kind: SparseKind, place: int) -> None:
    for sizes in ((3.0, 5.0, 100.0, 16.0), (64.0, 1.0, 5000.0, 8.0), (1.0, 4096.0, 0.0, 128.0)):
        more = list(sizes)
        more[place] = 2 * more[place] + 1
        few, many = (
            sparse_attention(
                MACHINE, *sparse_shape(kind, (b, n, cached, heads), fp8=True, prompts=False, topk=2048, index=64)[2:]
            )
            for b, n, cached, heads in (sizes, more)
        )
        assert grows(few, many)


def test_states_never_take_less_of_more() -> None:
    assert grows(convolution(MACHINE, 8, 128, 4096), convolution(MACHINE, 9, 256, 4096))
    assert grows(state_scan(MACHINE, 8, 128, 16, 128, 128, 4096), state_scan(MACHINE, 9, 256, 32, 128, 128, 8192))


def test_beyond_what_is_picked_only_the_scores_grow() -> None:
    near, far = (
        sparse_attention(
            MACHINE, *sparse_shape("dsa", (8, 1, cached, 16), fp8=True, prompts=False, topk=2048, index=64)[2:]
        )
        for cached in (10_000, 100_000)
    )
    assert near[1] == pytest.approx(far[1])  # products of attention
    assert far[4] == pytest.approx(10 * near[4], rel=0.01)  # of the indexer


def test_an_engine_has_its_own_kernels_and_takes_another_s_where_it_has_none() -> None:
    def priced(engine: str, shape: Convolution | StateScan) -> str:
        found = Curves(CALIBRATION, engine, "nccl").kernel(shape, "bf16", "bf16")
        assert found is not None
        return found.extrapolated

    scan = StateScan("gdn", False, 8, 1, 64, 128, 128, 12288)
    assert priced("sglang", scan) == priced("vllm", scan) == ""
    assert "priced as state/vllm/kda_context/scan" in priced(
        "trtllm", scan._replace(kind="kda", prompts=True, tokens=64)
    )
    assert "mamba2 priced as state/vllm/gdn_generation/scan" in priced("vllm", scan._replace(kind="mamba2"))


def test_a_machine_without_modules_has_no_price_for_them() -> None:
    series = {name: each for name, each in CALIBRATION.data["series"].items() if not name.startswith("sparse")}
    bare = type(CALIBRATION)("bare", {**CALIBRATION.data, "series": series})
    shape = sparse_shape("csa", (8, 1, 1000, 16), fp8=True, prompts=False, topk=512, index=64)
    assert Curves(bare, "vllm", "nccl").kernel(shape, "bf16", "fp8") is None
    assert Curves(CALIBRATION, "vllm", "nccl").kernel(shape, "bf16", "fp8") is not None
