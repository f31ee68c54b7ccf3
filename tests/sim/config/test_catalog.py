"""Configuration files: what ships is what was published, and every mistake ends in one clear message."""

from __future__ import annotations

import dataclasses
import json
import math
import re
import shutil
from pathlib import Path

import pydantic
import pytest

from sim.config.catalog import load_calibration, load_hardware, load_model, load_workload
from sim.config.files import CatalogError, config_path, list_names, read_config
from sim.layers.mixers import GroupedAttention
from sim.layers.model import FeedForward
from sim.simulate import evaluate
from sim.strategy import Strategy
from sim.workload import DegreeTables
from tests.questions import question_about

PAPER = [f"gpt_moe_{size}_{context}" for size in ("1_2t", "1_6t") for context in ("16k", "32k", "64k")]


# --- what ships -----------------------------------------------------------------------------------------


def test_the_named_workloads_models_and_hardware_ship() -> None:
    assert set(PAPER) <= set(list_names("workloads"))
    assert {"gpt_moe_1_2t", "gpt_moe_1_6t", "gpt_moe_1_8t", "llama_3_1_405b"} <= set(list_names("models"))
    assert "h100_sxm" in list_names("hardware")


@pytest.mark.parametrize("name", list_names("workloads"))
def test_every_shipped_workload_loads_and_evaluates(name: str) -> None:
    workload = load_workload(name)
    assert workload.name == name
    dims = (2,) * (12 if workload.model.is_moe else 10)
    degrees = workload.degrees
    assert evaluate(workload, Strategy(degrees.tp[-1], degrees.ep[-1], degrees.pp[-1], degrees.batch[-1], dims))


@pytest.mark.parametrize("name", list_names("models"))
def test_every_shipped_model_is_named_after_its_file(name: str) -> None:
    assert load_model(name).name == name


def test_gpt_moe_1_2t_has_1189_billion_parameters_by_hand() -> None:
    model = load_model("gpt_moe_1_2t")
    attention = 16384 * (128 + 8 + 8) * 128 + 128 * 128 * 16384  # q, k and v; o
    expert = 16384 * 2 * 30720 + 30720 * 16384  # gate and up; down
    layer = attention + 16 * expert + 16384 * 16 + 2 * 16384  # router, two norms
    assert model.parameters == 48 * layer + 2 * 51200 * 16384 + 16384
    active = attention + 2 * expert + 16384 * 16 + 2 * 16384
    assert model.active_parameters == 48 * active + 51200 * 16384 + 16384


@pytest.mark.parametrize(
    ("name", "total", "active", "tolerance"),
    [
        ("gpt_moe_1_2t", 1.189e12, 173e9, 0.001),
        ("gpt_moe_1_6t", 1.584e12, 231e9, 0.001),
        ("llama_3_1_405b", 405e9, 405e9, 0.01),  # active: without the embedding
        ("qwen3_235b_a22b", 235e9, 22e9, 0.01),
        ("mixtral_8x22b", 141e9, 39e9, 0.01),
        ("deepseek_v3", 671e9, 37e9, 0.001),
        ("qwen3_5_397b_a17b", 397e9, 17e9, 0.002),
        ("glm_5", 744e9, 40e9, 0.001),
        ("kimi_k2_5", 1.03e12, 32e9, 0.005),
        ("gpt_oss_120b", 116.8e9, 5.1e9, 0.001),  # arXiv 2508.10925, table 1
        ("llama_4_maverick", 400e9, 17e9, 0.01),
        ("llama_4_scout", 109e9, 17e9, 0.015),
        ("minimax_m2_5", 229e9, 10e9, 0.01),
    ],
)
def test_models_have_their_published_parameter_counts(name: str, total: float, active: float, tolerance: float) -> None:
    model = load_model(name)
    assert model.parameters == pytest.approx(total, rel=tolerance)
    assert model.active_parameters == pytest.approx(active, rel=0.055)  # some count the embedding


def test_h100_has_its_published_figures_in_si_units() -> None:
    hardware = load_hardware("h100_sxm")
    assert dict(hardware.peak_flop_per_s) == {
        "bf16": 989e12,
        "fp8": 1979e12,
        "fp8_block": 1979e12,
        "mxfp4": 989e12,
        "nvfp4": 989e12,
        "int4": 989e12,
    }
    assert (hardware.hbm_bytes, hardware.hbm_bandwidth_bytes_per_s) == (85.52e9, 3.35e12)
    assert hardware.overhead_bytes == 4e9
    assert hardware.node_gpus == 8
    collectives = hardware.collectives
    assert 46e9 <= collectives.nic_bandwidth_bytes_per_s <= 48e9
    assert collectives.all_reduce_bandwidth_bytes_per_s == 445e9
    assert collectives.gather_bandwidth_bytes_per_s == pytest.approx(335e9, rel=0.01)
    assert [protocol.ring_base_s * 1e6 for protocol in collectives.protocols] == pytest.approx([6.6, 14.0, 8.4])
    assert [protocol.ring_intra_step_s * 1e6 for protocol in collectives.protocols] == pytest.approx([0.6, 1.9, 3.4])
    assert [protocol.ring_inter_step_s * 1e6 for protocol in collectives.protocols] == pytest.approx([2.7, 4.0, 14.0])
    assert [protocol.tree_base_s * 1e6 for protocol in collectives.protocols] == pytest.approx([6.8, 14.0, 8.4])


@pytest.mark.parametrize("name", PAPER)
def test_the_workloads_of_the_paper_have_its_limits_and_tables(name: str) -> None:
    workload = load_workload(name)
    assert workload.tpot_slo_s == pytest.approx(0.050)
    assert workload.max_gpus == 24576
    assert workload.context_tokens == {"16k": 16384, "32k": 32768, "64k": 65536}[name.rsplit("_", 1)[1]]
    precisions = workload.precisions
    assert (precisions.weights, precisions.kv_cache, precisions.activations) == ("fp8", "fp8", "bf16")
    stages = (1, 2, 3, 4, 6, 8, 12, 16, 24, 48) if "1_2t" in name else (1, 2, 4, 8, 16, 32, 64)
    assert workload.degrees == DegreeTables(
        tp=(1, 2, 4, 8, 16, 32, 64, 128),
        ep=(1, 2, 4, 8, 16),
        pp=stages,
        batch=tuple(2**exponent for exponent in range(13)),
    )
    (group,) = workload.model.groups
    assert (workload.model.hidden, workload.model.vocab) == (16384, 51200)
    assert group.attention == GroupedAttention(heads=128, kv_heads=8, head_dim=128)
    assert group.feed_forward == FeedForward(30720, experts=16, experts_per_token=2, gated=True)


# --- a user's own files ---------------------------------------------------------------------------------

HARDWARE = config_path("hardware", "h100_sxm").read_text(encoding="utf-8")
MODEL = config_path("models", "mixtral_8x22b").read_text(encoding="utf-8")
WORKLOAD = config_path("workloads", "mixtral_8x22b_8k").read_text(encoding="utf-8")


def written(path: Path, text: str, old: str = "", new: str = "") -> Path:
    """A copy of a shipped file with one passage changed."""
    assert old in text
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text.replace(old, new, 1) if old else text, encoding="utf-8")
    return path


def test_a_workload_of_ones_own_names_model_and_hardware_files_beside_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    monkeypatch.chdir(elsewhere)
    written(tmp_path / "mine" / "parts" / "big.toml", HARDWARE, "capacity_gb = 85.52", "capacity_gb = 141.0")
    written(tmp_path / "mine" / "small.toml", MODEL, "layers = 56", "layers = 28")
    text = WORKLOAD.replace('"mixtral_8x22b"', '"small.toml"').replace('"h100_sxm"', '"parts/big.toml"')
    path = written(tmp_path / "mine" / "workload.toml", text)
    for spelling in (path, str(path), "../mine/workload.toml"):
        workload = load_workload(spelling)
        assert workload.model.layers == 28
        assert workload.hardware.hbm_bytes == 141e9


def test_a_hardware_of_the_callers_replaces_that_of_the_workload(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    written(tmp_path / "mine.toml", HARDWARE, "capacity_gb = 85.52", "capacity_gb = 96.0")
    assert load_workload("gpt_moe_1_2t_16k", hardware="mine.toml").hardware.hbm_bytes == 96e9
    assert load_workload("gpt_moe_1_2t_16k", hardware="h100_sxm") is not None


def test_a_hardware_without_custom_all_reduce_uses_nccl_alone(tmp_path: Path) -> None:
    head, tail = HARDWARE.split("[collectives.custom_all_reduce]")
    path = written(tmp_path / "plain.toml", head + tail[tail.index("[collectives.all_to_all]") :])
    assert load_hardware(path).collectives.custom_all_reduce is None


def test_the_config_hash_follows_the_content_and_nothing_else(tmp_path: Path) -> None:
    shipped = load_workload("mixtral_8x22b_8k")
    same = load_workload(written(tmp_path / "a.toml", WORKLOAD))
    commented = load_workload(written(tmp_path / "b.toml", WORKLOAD + "\n# a comment\n"))
    other = load_workload(written(tmp_path / "c.toml", WORKLOAD, "tpot_slo_ms = 50.0", "tpot_slo_ms = 51.0"))
    wider = written(tmp_path / "d.toml", HARDWARE, "capacity_gb = 85.52", "capacity_gb = 96.0")
    assert shipped.config_hash == same.config_hash == commented.config_hash
    assert len({shipped.config_hash, other.config_hash, load_workload("mixtral_8x22b_8k", wider).config_hash}) == 3


# --- mistakes -------------------------------------------------------------------------------------------


def message_of(load: object, *arguments: object) -> str:
    """The one line that a mistake ends in."""
    with pytest.raises(CatalogError) as caught:
        load(*arguments)  # type: ignore[operator]
    message = str(caught.value)
    assert "\n" not in message
    assert message
    return message


@pytest.mark.parametrize(
    ("load", "name", "expected"),
    [
        (load_hardware, "h10", "unknown hardware 'h10': did you mean 'h100_sxm'?"),
        (load_model, "mixtral", "unknown model 'mixtral': did you mean 'mixtral_8x7b'?"),
        (load_workload, "gpt_moe_1_2t_16", "unknown workload 'gpt_moe_1_2t_16': did you mean 'gpt_moe_1_2t_16k'?"),
        (load_hardware, "zzz", "unknown hardware 'zzz': known: a100_40_sxm"),
        (load_model, "nowhere.toml", "no such model file: nowhere.toml"),
        (load_hardware, "../models/mixtral_8x22b", "unknown hardware"),
        (load_hardware, "", "unknown hardware ''"),
    ],
)
def test_an_unknown_name_is_met_with_the_closest_known_one(load: object, name: str, expected: str) -> None:
    assert message_of(load, name).startswith(expected)


def test_a_folder_that_holds_no_model_is_not_an_unknown_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine").mkdir()
    assert message_of(load_model, "mine") == "no config.json in the folder mine"


def test_an_unknown_hardware_beside_a_good_workload_is_reported() -> None:
    assert "did you mean 'h100_sxm'?" in message_of(load_workload, "gpt_moe_1_2t_16k", "h100")


@pytest.mark.parametrize(("key", "wrong"), [("model", "mixtral_8x2b"), ("hardware", "h100_sxn")])
def test_a_workload_that_names_an_unknown_part_is_reported(tmp_path: Path, key: str, wrong: str) -> None:
    shipped = {"model": "mixtral_8x22b", "hardware": "h100_sxm"}[key]
    path = written(tmp_path / "w.toml", WORKLOAD, f'{key} = "{shipped}"', f'{key} = "{wrong}"')
    assert f"unknown {key} {wrong!r}: did you mean {shipped!r}?" in message_of(load_workload, path)


@pytest.mark.parametrize(
    ("old", "new", "expected"),
    [
        # a typo, a wrong unit, a table that does not exist
        ("node_gpus = 8", "nodegpus = 8", "nodegpus: unknown key; did you mean 'node_gpus'?"),
        ("capacity_gb = 85.52", "capacity_gib = 85.52", "hbm.capacity_gib: unknown key; did you mean 'capacity_gb'?"),
        ("bandwidth_gb_per_s = 3350.0", "bandwidth_tb_per_s = 3.35", "did you mean 'bandwidth_gb_per_s'?"),
        ("bf16_tflops = 989.0", "bf16_pflops = 0.989", "did you mean 'bf16_tflops'?"),
        ("floor_us = 4.0", "floor_ms = 0.004", "efficiency.gemm.floor_ms: unknown key; did you mean 'floor_us'?"),
        ("[collectives.dispatch]", "[collectives.dispatsch]", "did you mean 'dispatch'?"),
        ("intra_latency_us = 5.0", "intra_latency = 5.0", "collectives.send_recv.intra_latency: unknown key"),
        ("node_gpus = 8", "", "node_gpus: missing"),
        # figures that cannot be
        ("bf16_tflops = 989.0", "bf16_tflops = nan", "compute.bf16_tflops: "),
        ("bf16_tflops = 989.0", "bf16_tflops = inf", "compute.bf16_tflops: "),
        ("bf16_tflops = 989.0", "bf16_tflops = -989.0", "compute.bf16_tflops: "),
        ("bf16_tflops = 989.0", "bf16_tflops = 0.0", "compute.bf16_tflops: "),
        ("capacity_gb = 85.52", "capacity_gb = -80.0", "hbm.capacity_gb: "),
        ("capacity_gb = 85.52", "capacity_gb = 80e9", "hbm.capacity_gb: "),
        ("capacity_gb = 85.52", "capacity_gb = nan", "hbm.capacity_gb: "),
        ("overhead_gb = 4.0", "overhead_gb = 90.0", "overhead_gb (90.0) must stay below capacity_gb (85.52)"),
        ("overhead_gb = 4.0", "overhead_gb = nan", "hbm.overhead_gb: "),
        ("bandwidth_gb_per_s = 3350.0", "bandwidth_gb_per_s = nan", "hbm.bandwidth_gb_per_s: "),
        ("bf16 = 0.78", "bf16 = 1.1", "efficiency.gemm.compute.bf16: "),
        ("bf16 = 0.78", "bf16 = 0.0", "efficiency.gemm.compute.bf16: "),
        ("bf16 = 0.78", "bf16 = nan", "efficiency.gemm.compute.bf16: "),
        ("bf16 = 0.78, fp8 = 0.58", "bf16 = 0.78", "compute lacks a value for fp8"),
        ("floor_us = 4.0", "floor_us = nan", "efficiency.gemm.floor_us: "),
        ("floor_us = 4.0", "floor_us = -4.0", "efficiency.gemm.floor_us: "),
        ("node_gpus = 8", "node_gpus = 8.5", "node_gpus: "),
        ("node_gpus = 8", "node_gpus = 0", "node_gpus: "),
        ("nic_gb_per_s = 48.0", "nic_gb_per_s = inf", "collectives.nic_gb_per_s: "),
        ("[14.0, 20.8", "[14.0, 10.8", "latency_us must not fall with the number of nodes"),
        ("[14.0, 20.8, 25.9, 28.5]", "[]", "collectives.dispatch.latency_us: "),
        ("bf16_tflops = 989.0", "bf16_tflops = '989'", "compute.bf16_tflops: "),
        ("bf16_tflops = 989.0", "bf16_tflops = true", "compute.bf16_tflops: "),
        ("[hbm]", "[hbm", "is not valid TOML"),
    ],
)
def test_a_mistake_in_a_hardware_file_names_file_and_key(tmp_path: Path, old: str, new: str, expected: str) -> None:
    path = written(tmp_path / "mine.toml", HARDWARE, old, new)
    message = message_of(load_hardware, path)
    assert expected in message
    assert str(path) in message


@pytest.mark.parametrize(
    ("old", "new", "expected"),
    [
        ("kv_heads = 8", "kv_heads = 7", "kv_heads (num_key_value_heads, 7) must divide heads (48)"),
        ("experts_per_token = 2", "experts_per_token = 9", "experts_per_token (9) exceeds experts (8)"),
        ("layers = 56", "layers = 0", "layers: "),
        ("layers = 56", "layers = 56.0", "layers: "),
        ("layers = 56", "layers = 10_000_000", "at most 4096, got 10000000"),
        ("gated = true", "gated = 'perhaps'", "gated: "),
        ("hidden = 6144", "hiden = 6144", "hiden: unknown key; did you mean 'hidden'?"),
    ],
)
def test_a_mistake_in_a_model_file_names_file_and_key(tmp_path: Path, old: str, new: str, expected: str) -> None:
    path = written(tmp_path / "mine.toml", MODEL, f"\n{old}", f"\n{new}")
    message = message_of(load_model, path)
    assert expected in message
    assert str(path) in message


EP = "ep = [1, 2, 4, 8]"


@pytest.mark.parametrize(
    ("old", "new", "expected"),
    [
        ("tpot_slo_ms = 50.0", "tpot_slo_s = 0.05", "tpot_slo_s: unknown key; did you mean 'tpot_slo_ms'?"),
        ("tpot_slo_ms = 50.0", "tpot_slo_ms = nan", "tpot_slo_ms: "),
        ("tpot_slo_ms = 50.0", "tpot_slo_ms = 1e-9", "tpot_slo_ms: "),
        ("tpot_slo_ms = 50.0", "tpot_slo_ms = '50'", "tpot_slo_ms: "),
        ("max_gpus = 1024", "max_gpus = 0", "max_gpus: "),
        ("load_imbalance = 1.0", "load_imbalance = 0.9", "load_imbalance: "),
        ('weights = "fp8"', 'weights = "fp4"', "precisions.weights: "),
        ('phase = "decode"', 'phase = "train"', "phase: "),
        ("tp = [1, 2, 4, 8, 16]", "tp = [1, 4, 2]", "degrees.tp: expected ascending values without repeats"),
        ("tp = [1, 2, 4, 8, 16]", "tp = [1, 1, 2]", "degrees.tp: expected ascending values without repeats"),
        ("tp = [1, 2, 4, 8, 16]", "tp = [0, 1]", "degrees.tp.0: "),
        ("tp = [1, 2, 4, 8, 16]", "tp = []", "degrees.tp: "),
        ("tp = [1, 2, 4, 8, 16]", "dp = [1, 2, 4, 8, 16]", "degrees.dp: unknown key"),
        (EP, "ep = 'all'", "mine.toml: degrees.ep: expected 'any', got 'all'"),
        (EP, "ep = [4, 2]", "mine.toml: degrees.ep: expected ascending values without repeats, got [4, 2]"),
        ('weights = "fp8"', 'weights = "fp8"\n[speculation]', "speculation.draft_tokens: missing"),
        ("[degrees]", "[degrees.tp]", "degrees.tp"),
    ],
)
def test_a_mistake_in_a_workload_file_names_file_and_key(tmp_path: Path, old: str, new: str, expected: str) -> None:
    path = written(tmp_path / "mine.toml", WORKLOAD, old, new)
    message = message_of(load_workload, path)
    assert expected in message
    assert str(path) in message


def test_a_file_that_cannot_be_read_is_reported(tmp_path: Path) -> None:
    binary = tmp_path / "binary.toml"
    binary.write_bytes(b"\xff\xfe\x00")
    assert f"{binary}: it is not valid TOML" in message_of(load_hardware, binary)
    folder = tmp_path / "folder.toml"
    folder.mkdir()
    assert "no such hardware file" in message_of(load_hardware, folder)


def test_any_schema_can_be_read_with_the_same_messages(tmp_path: Path) -> None:
    class Study(pydantic.BaseModel):
        model_config = pydantic.ConfigDict(extra="forbid")
        seeds: list[int]

    assert read_config(written(tmp_path / "good.toml", "seeds = [1, 2]"), Study).seeds == [1, 2]
    bad = written(tmp_path / "bad.toml", "seed = [1, 2]")
    assert "seed: unknown key; did you mean 'seeds'?" in message_of(read_config, bad, Study)


def test_loaded_values_are_frozen() -> None:
    workload = load_workload("gpt_moe_1_2t_16k")
    with pytest.raises(dataclasses.FrozenInstanceError):
        workload.max_gpus = 1  # type: ignore[misc]
    assert all(math.isfinite(value) for value in workload.hardware.peak_flop_per_s.values())


def _damage(path: tuple[str, ...], value: object) -> str:
    """The shipped coefficients with one entry replaced; None takes it away, "cut" its last number."""
    data = json.loads(config_path("calibration", "h100_sxm").read_text(encoding="utf-8"))
    few = (GEMM[1], VERSION[1], data["series"][VERSION[1]]["parent"], "send_recv/inter")
    data["series"] = {name: data["series"][name] for name in few}
    *above, last = path
    entry = data
    for key in above:
        entry = entry[key]
    if value is None:
        del entry[last]
    else:
        entry[last] = entry[last][:-1] if value == "cut" else value
    return json.dumps(data)


GEMM = ("series", "gemm/trtllm/fp8")
VERSION = ("series", "collectives/all_gather/nccl/nccl_2.23/half")


@pytest.mark.parametrize(
    ("path", "value", "message"),
    [
        ((*GEMM, "g_percent"), "cut", "expected 714 values in g_percent, got 713"),
        ((*GEMM, "g_percent"), None, "g_percent"),
        ((*GEMM, "g_percent"), [10**7] * 432, "at most 1000"),
        ((*GEMM, "terms"), "abc", "terms"),
        ((*GEMM, "terms"), None, "expected 14 terms"),
        ((*GEMM, "terms"), "cut", "expected 14 terms"),
        ((*GEMM, "terms"), [0.0] * 14, "not all of them 0"),
        ((*GEMM, "terms"), [math.nan] * 14, "NaN"),
        ((*GEMM, "terms"), [-1.0] * 14, "at least 0"),
        ((*GEMM, "terms"), [1e300] * 14, "less than"),
        ((*GEMM, "floor_us"), -1.0, "floor_us"),
        ((*GEMM, "floor_us"), math.inf, "Infinity"),
        ((*GEMM, "grid"), "gem", "did you mean 'gemm'"),
        ((*GEMM, "grid"), "collectives", "axes"),
        ((*GEMM, "grid"), None, "series 'gemm/trtllm/fp8'"),
        ((*GEMM, "mape"), "small", "mape"),
        ((*GEMM, "range"), {"m": [1]}, "range"),
        ((*VERSION, "parent"), "collectives/nothing", "parent"),
        ((*VERSION, "parent"), "gemm/trtllm/fp8", "parent"),
        ((*VERSION, "parent"), VERSION[1], "parent"),
        (("series", "gemm/trtllm/fp3"), {"grid": "gemm", "terms": [1.0] * 14}, "gemm/trtllm/fp3"),
        (("series", "moe/x"), {"terms": [1.0] * 20}, "unknown series"),
        (("series", "send_recv/inter", "terms"), "cut", "expected 5 terms"),
        (("grids", "gemm", "axes"), [[1, 2]], "gemm"),
        (("grids", "gemm", "slopes"), "cut", "slopes"),
        (("grids", "gemm", "monotone"), [7], "monotone"),
        (("grids", "gemm", "parts"), [], "parts"),
        (("speed_of_light", "hbm_gb_per_s"), None, "hbm_gb_per_s: missing"),
        (("serving", "engines"), {"vllm": {"step_s": -1}}, "step_s"),
        (("series",), [], "series"),
    ],
)
def test_a_damaged_calibration_is_one_clear_error(
    tmp_path: Path, path: tuple[str, ...], value: object, message: str
) -> None:
    file = tmp_path / "mine.json"
    file.write_text(_damage(path, value), encoding="utf-8")
    with pytest.raises(CatalogError, match=re.escape(message)) as caught:
        load_calibration(file)
    assert str(file) in str(caught.value)
    assert len(str(caught.value)) < 1000


def test_a_hardware_file_may_name_a_calibration_beside_it(tmp_path: Path) -> None:
    shipped = config_path("hardware", "h100_sxm").read_text(encoding="utf-8")
    assert 'calibration = "h100_sxm"' in shipped
    mine = tmp_path / "mine.toml"
    mine.write_text(shipped.replace('calibration = "h100_sxm"', 'calibration = "fits/own.json"'), encoding="utf-8")
    (tmp_path / "fits").mkdir()
    shutil.copy(config_path("calibration", "h100_sxm"), tmp_path / "fits" / "own.json")
    curves = load_hardware(mine).curves
    assert curves is not None
    assert curves.calibration.name == "own"


def test_a_workload_chooses_engine_and_library_over_its_hardware(tmp_path: Path) -> None:
    text = config_path("workloads", "mixtral_8x22b_8k").read_text(encoding="utf-8")
    path = tmp_path / "mine.toml"
    path.write_text(text.replace("phase =", 'engine = "vllm"\nall_reduce = "nccl"\nphase ='), encoding="utf-8")
    plain, chosen = load_workload("mixtral_8x22b_8k"), load_workload(path)
    assert plain.hardware.collectives.custom_all_reduce is not None
    assert chosen.hardware.collectives.custom_all_reduce is None
    assert plain.hardware.curves is not None
    assert chosen.hardware.curves is not None
    assert (plain.hardware.curves.engine, chosen.hardware.curves.engine) == ("trtllm", "vllm")
    assert plain.config_hash != chosen.config_hash


@pytest.mark.parametrize("model", ["gpt_oss_120b", "kimi_k2_5"])
def test_weights_beside_experts_of_their_own_format_are_as_published(model: str) -> None:
    precisions = question_about(model, isl=1024, osl=256).load().precisions
    assert precisions.weights == "bf16"
    assert question_about(model, isl=1024, osl=256, weights="fp8").load().precisions.weights == "fp8"


def test_a_folder_of_the_working_directory_is_not_taken_for_a_shipped_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "llama_3_1_8b").mkdir()
    (tmp_path / "llama_3_1_8b" / "config.json").write_text("{}")
    monkeypatch.chdir(tmp_path)
    assert config_path("models", "llama_3_1_8b").suffix == ".toml"
    assert config_path("models", "./llama_3_1_8b") == Path("llama_3_1_8b/config.json")
