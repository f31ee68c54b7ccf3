from __future__ import annotations

import math
import re
import sys
from pathlib import Path
from typing import Any

import pytest

from raysearch.base.errors import InputError
from raysearch.simulators.measurement import Measurement, as_evaluation
from raysearch.simulators.opening import searched_space
from raysearch.simulators.plugin import load_plugin
from sim.config.catalog import load_workload
from sim.ops.heuristics import megatron_dims
from sim.simulate import evaluate
from sim.strategy import Strategy
from tests.raysearch.simulators.boxes import scattered

BOXES = "tests.raysearch.simulators.boxes:"
WORKLOAD = load_workload("gpt_moe_1_2t_16k")
STRATEGY = Strategy(8, 2, 4, 64, (0,) * 12)


def test_a_measurement_is_kept_against_the_limits_of_the_workload() -> None:
    hbm_bytes = WORKLOAD.hardware.hbm_bytes
    allowed = Measurement(500.0, tpot_s=0.05, gpus=WORKLOAD.max_gpus, memory_bytes=hbm_bytes)
    assert as_evaluation(WORKLOAD, STRATEGY, allowed).feasible
    for broken, kind in (
        (Measurement(500.0, tpot_s=0.0501), "tpot"),
        (Measurement(500.0, gpus=WORKLOAD.max_gpus + 1), "gpus"),
        (Measurement(500.0, memory_bytes=hbm_bytes + 1), "hbm"),
        (Measurement(unsupported="no such kernel", excess=3.0), "unsupported"),
    ):
        (violation,) = as_evaluation(WORKLOAD, STRATEGY, broken).violations
        assert violation.kind == kind
        assert violation.needed > violation.allowed


def test_without_a_figure_for_the_devices_the_degrees_give_it() -> None:
    assert as_evaluation(WORKLOAD, STRATEGY, Measurement(500.0)).gpus == 8 * 2 * 4


def test_an_evaluation_passes_as_it_is() -> None:
    own = evaluate(WORKLOAD, STRATEGY)
    assert as_evaluation(WORKLOAD, STRATEGY, own) is own


@pytest.mark.parametrize(
    "answer", [3.0, None, Measurement(math.nan), Measurement(math.inf), Measurement(-1.0), Measurement(1.0, math.nan)]
)
def test_what_is_no_measurement_is_refused(answer: object) -> None:
    with pytest.raises(ValueError, match="expected"):
        as_evaluation(WORKLOAD, STRATEGY, answer)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("nowhere:f", "cannot import nowhere: ModuleNotFoundError"),
        (BOXES + "hily", "has no 'hily'; did you mean 'hilly'"),
        (BOXES + "one_argument", "its signature is"),
        (BOXES + "not_callable", "expected a function of a workload and a strategy"),
        ("no_entry_point", "unknown simulator 'no_entry_point'"),
    ],
)
def test_a_simulator_that_cannot_be_used_is_one_clear_error(name: str, message: str) -> None:
    with pytest.raises(InputError, match=message.replace("(", r"\(")):
        load_plugin(name)


@pytest.mark.parametrize(
    "message",
    [
        "def __getattr__(name): sys.exit(0)",
        "def __getattr__(name): raise KeyboardInterrupt",
        "def __getattr__(name): raise ValueError(name)",
        "class Box:\n    __signature__ = property(lambda self: sys.exit(0))\n    __call__ = print\nbox = Box()",
        "class Box:\n    degrees_only = property(lambda self: 1 / 0)\n    def __call__(self, w, s): pass\nbox = Box()",
        "def box(w, s): pass\nclass Exits:\n    __str__ = lambda self: sys.exit(0)\nbox.fingerprint = Exits()",
        "def box(w, s): pass\nbox.packages = 7",
    ],
)
def test_a_module_that_misbehaves_when_it_is_looked_at_is_one_clear_error(
    message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> None:
    name = f"looked_at_{abs(hash(request.node.name))}"
    (tmp_path / f"{name}.py").write_text(f"import sys\n{message}\n")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(InputError, match=rf"simulator '{name}:box': cannot [^\n]*$"):
        assert load_plugin(f"{name}:box").fingerprint


@pytest.mark.parametrize("noise", [-0.1, 1.5, math.nan, math.inf])
def test_a_noise_that_is_none_is_one_error(noise: float, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scattered, "noise", noise)
    with pytest.raises(InputError, match=r"expected noise from 0 to 1\.0, the standard deviation of the log"):
        load_plugin(BOXES + "scattered")


@pytest.mark.parametrize(
    ("name", "package", "workload"),
    [("aisimulate", "aisimulate", "qwen3_235b_a22b_16k"), ("genz", "GenZ", "mixtral_8x22b_8k")],
)
def test_the_shipped_black_boxes_are_found_by_name_and_say_what_to_install(
    name: str, package: str, workload: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, package, None)  # as where it is not installed
    box = load_plugin(name)
    assert box.degrees_only
    with pytest.raises(InputError, match=re.escape(f"pip install -e '.[{name}]'")):
        box(load_workload(workload), Strategy(2, 2, 1, 64, ()))


def test_aisimulate_measures_a_decode_step() -> None:
    pytest.importorskip("aisimulate", reason="needs the extra aisimulate")
    from raysearch.simulators.aisimulate import measure

    workload = load_workload("qwen3_235b_a22b_16k")
    small, large = (measure(workload, Strategy(2, 4, 2, batch, ())) for batch in (64, 256))
    for measured in (small, large):
        assert not measured.unsupported
        assert measured.gpus == 16
        assert 0.001 < measured.tpot_s < 1
        assert 1e9 < (measured.memory_bytes or 0) < 85e9
    assert large.tpot_s > small.tpot_s
    assert large.tokens_per_s_per_gpu > small.tokens_per_s_per_gpu
    assert measure(workload, Strategy(1, 3, 1, 64, ())).unsupported


def test_a_simulator_of_degrees_only_is_searched_over_degrees_only() -> None:
    space = searched_space(WORKLOAD, BOXES + "by_degrees", "random")
    tables = WORKLOAD.degrees
    assert space.size == len(tables.tp) * len(tables.ep) * len(tables.pp) * len(tables.batch)
    strategy = space.decode(space.nvec - 1)
    assert strategy.dims == megatron_dims(WORKLOAD.model)
    assert space.encode(strategy).tolist() == (space.nvec - 1).tolist()
    with pytest.raises(ValueError, match="not searched here"):
        space.encode(STRATEGY)


def test_answers_differ_by_the_source_of_the_simulator(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    source = "def measure(workload, strategy): return {}\n"
    (tmp_path / "mine_a.py").write_text(source.format(1), encoding="utf-8")
    (tmp_path / "mine_b.py").write_text(source.format(2), encoding="utf-8")
    kept = load_plugin("mine_a:measure").fingerprint
    assert kept == load_plugin("mine_a:measure").fingerprint
    assert kept != load_plugin("mine_b:measure").fingerprint


@pytest.mark.parametrize(
    "figures",
    [
        *({"gpus": -7}, {"gpus": 2.5}, {"gpus": 10**400}, {"gpus": True}, {"tokens_per_s_per_gpu": True}),
        *({"excess": "much"}, {"excess": 1.0}, {"tpot_s": math.nan}, {"memory_bytes": "all"}),
    ],
)
def test_an_answer_is_checked_whole(figures: dict[str, Any]) -> None:
    workload, strategy = load_workload("gpt_moe_1_2t_16k"), Strategy(8, 1, 1, 64, (0,) * 12)
    with pytest.raises(ValueError, match=f"expected .*{next(iter(figures))}"):
        as_evaluation(workload, strategy, Measurement(**figures))


def test_answers_are_distinguished_by_the_versions_of_the_packages_that_they_come_from(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(tmp_path))
    (tmp_path / "their_box.py").write_text("def measure(workload, strategy): ...\n", encoding="utf-8")
    found: set[str] = set()
    for version in ("1.0", "1.1"):
        info = tmp_path / "their_boxes-1.dist-info"
        info.mkdir(exist_ok=True)
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: their-boxes\nVersion: {version}\n")
        (info / "RECORD").write_text("their_box.py,,\n")
        found.add(load_plugin("their_box:measure").fingerprint)
    assert len(found) == 2


def test_a_long_or_broken_text_of_a_black_box_becomes_one_line() -> None:
    output = as_evaluation(WORKLOAD, STRATEGY, Measurement(unsupported="no\n" * 10**6)).violations[0].message
    assert "\n" not in output
    assert len(output) < 600
