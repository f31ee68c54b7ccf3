"""A rate of requests that nobody could mean is refused by all that take one."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

import raysearch as rs
from raysearch.base.errors import InputError
from sim.config.files import CatalogError

QUESTION = rs.question(model="llama_3_1_8b", isl=500, osl=50, engine="vllm", gpus=2)
FLEET = """
hardware = "h100_sxm"
gpus = 2
[[models]]
model = "llama_3_1_8b"
requests_per_s = {rate}
isl = 500
osl = 50
ttft_ms = 1000.0
"""


def placed(rate: float, folder: Path) -> object:
    (path := folder / "fleet.toml").write_text(FLEET.format(rate=rate))
    return rs.place(str(path))


ASKED: dict[str, Callable[[float, Path], object]] = {
    "recommend": lambda rate, _: rs.recommend(QUESTION, requests_per_s=rate),
    "replay": lambda rate, _: rs.replay(QUESTION, tp=1, batch=8, requests_per_s=rate),
    "pools": lambda rate, _: rs.pools(QUESTION, requests_per_s=rate),
    "pools' sweep": lambda rate, _: rs.pools(QUESTION, sweep={"requests_per_s": [1.0, rate]}),
    "place": placed,
}


@pytest.mark.parametrize("rate", [1e300, 1.1e9, 1e-300, 0.0, -1.0, float("nan"), float("inf")])
@pytest.mark.parametrize("name", ASKED)
def test_a_rate_that_nobody_means_is_one_clear_error(tmp_path: Path, name: str, rate: float) -> None:
    with pytest.raises((InputError, CatalogError), match=r"requests.per.s: expected") as raised:
        ASKED[name](rate, tmp_path)
    assert "\n" not in str(raised.value)
