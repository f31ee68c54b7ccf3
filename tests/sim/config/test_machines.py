"""Every shipped machine: what its links make of a collective, and that it evaluates and optimises."""

from __future__ import annotations

import tokenize
from dataclasses import replace
from pathlib import Path

import pytest

import sim
from sim.config.catalog import default_hardware, load_hardware, load_workload
from sim.config.files import CatalogError, config_path, list_names
from sim.ops.heuristics import megatron_dims
from sim.optimum.exact_search import find_best
from sim.optimum.spaces import space_of
from sim.prices.collectives import (
    collective_price,
    expert_all_to_all,
    expert_all_to_all_time_s,
    stage_send_s,
)
from sim.prices.curves import DecodeAttention, Gemm
from sim.prices.mesh import MeshGroup, group, stage_pair
from sim.prices.priced import mean_error
from sim.simulate import evaluate
from sim.strategy import Strategy
from sim.workload import DegreeTables
from tests.sim.modelled import collective_time_s

MACHINES = list_names("hardware")
MEASURED = default_hardware()
MEASURED_IN_PART = [name for name in MACHINES if name != MEASURED and name in list_names("calibration")]
OF_ANOTHER_MAKER = [name for name in MEASURED_IN_PART if load_hardware(name).vendor]
LARGE = 2.0**30


@pytest.mark.parametrize("name", MACHINES)
def test_every_machine_evaluates_and_optimises_the_quickstarts_model(name: str) -> None:
    workload = load_workload("gpt_moe_1_2t_16k", hardware=name)
    tiny = replace(workload, max_gpus=512, tpot_slo_s=10.0, degrees=DegreeTables((8,), (8, 16), (4,), (16, 64)))
    best = find_best(space_of(tiny)).evaluation
    assert best is not None
    assert best.feasible
    heuristic = evaluate(tiny, Strategy(8, 16, 4, 64, megatron_dims(tiny.model)))
    assert best.tokens_per_s_per_gpu >= heuristic.tokens_per_s_per_gpu * heuristic.feasible
    low, high = best.tpot_interval_s
    assert low < best.tpot_s < high


@pytest.mark.parametrize("name", [name for name in MEASURED_IN_PART if name not in OF_ANOTHER_MAKER])
def test_a_machine_with_kernels_of_its_own_lends_only_what_was_not_measured(name: str) -> None:
    workload = load_workload("llama_3_1_405b_8k", hardware=name)
    curves = workload.hardware.curves
    assert curves is not None
    assert curves.other_machine == MEASURED
    evaluation = evaluate(workload, Strategy(4, 1, 2, 64, megatron_dims(workload.model)))
    carried = f"what was not measured here is of {MEASURED}" in evaluation.interval_because
    assert carried == curves.calibration.carries_serving
    kernels = [
        curves.kernel(shape, "bf16", "bf16")
        for shape in (Gemm(64, 4096, 4096), DecodeAttention(32, 4000, 8, 1, 128, False))
    ]
    assert all(priced and not priced.extrapolated for priced in kernels)


@pytest.mark.parametrize("name", OF_ANOTHER_MAKER)
def test_a_tuned_table_prices_gemms_and_what_it_lacks_is_carried_over(name: str) -> None:
    curves = load_hardware(name).curves
    assert curves is not None
    for engine in ("vllm", "sglang"):
        own = curves.under(engine=engine).kernel(Gemm(64, 4096, 4096), "fp8_block", "fp8_block")
        carried = curves.under(engine=engine).kernel(DecodeAttention(32, 4000, 8, 1, 128, False), "bf16", "bf16")
        assert own
        assert not own.extrapolated
        assert carried
        assert f"carried over from {MEASURED}" in carried.extrapolated


@pytest.mark.parametrize("name", [name for name in MACHINES if name not in (MEASURED, *MEASURED_IN_PART)])
def test_what_was_not_measured_says_whose_efficiencies_it_has_and_to_which_side_they_err(name: str) -> None:
    workloads = [load_workload("gpt_moe_1_2t_16k", hardware=machine) for machine in (MEASURED, name)]
    strategy = Strategy(8, 16, 2, 64, megatron_dims(workloads[0].model))
    measured, carried_over = (evaluate(workload, strategy) for workload in workloads)
    assert any(f"carried over from {MEASURED}, " in what for what in carried_over.extrapolated)
    assert any("probably too" in what or "to either side" in what for what in carried_over.extrapolated)
    curves = workloads[1].hardware.curves
    assert curves is not None
    low, high = curves.carried_over.interval
    shortest, longest = (bound / carried_over.tpot_s for bound in carried_over.tpot_interval_s)
    assert shortest < low
    assert high < longest
    assert f"those of {MEASURED}, not of {name}" in carried_over.interval_because
    assert carried_over.expected_error >= max(measured.expected_error, mean_error((low, high)))


# --- a mesh without a switch ---------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["all_gather", "reduce_scatter", "all_reduce", "all_to_all"])
def test_a_group_in_a_mesh_uses_the_links_between_its_members_alone(kind: str) -> None:
    """By hand: of V bytes each pair of n exchanges V / n over its one link, so n GPUs have n - 1 of 7 links."""
    mesh = load_hardware("mi300x")
    switch = replace(mesh, collectives=replace(mesh.collectives, mesh_peers=0))
    for priced in (collective_time_s, lambda *args: collective_price(*args).time_s):
        assert priced(mesh, kind, MeshGroup(8, 8), LARGE) == priced(switch, kind, MeshGroup(8, 8), LARGE)
    for gpus in (2, 4):
        many = [collective_time_s(machine, kind, MeshGroup(gpus, gpus), 1e3 * LARGE) for machine in (mesh, switch)]
        assert many[0] / many[1] == pytest.approx(7 / (gpus - 1), rel=1e-3)
        found = collective_price(mesh, kind, MeshGroup(gpus, gpus), LARGE).time_s
        share = (2 if kind == "all_reduce" else 1 / gpus if kind == "all_to_all" else 1) / gpus
        assert found >= LARGE * share / 64e9  # one link carries this much and no peak is beaten
    assert collective_price(mesh, kind, MeshGroup(2, 2), 1.0).time_s == pytest.approx(
        collective_price(switch, kind, MeshGroup(2, 2), 1.0).time_s, rel=0.05
    )


def test_two_gpus_of_a_mesh_exchange_over_one_link() -> None:
    mesh = load_hardware("mi300x")
    assert stage_send_s(mesh, MeshGroup(2, 2), LARGE) >= LARGE / 64e9
    model = mesh.collectives
    times = [expert_all_to_all_time_s(model, "dispatch", MeshGroup(n, n), LARGE * (n - 1)) for n in (2, 4, 8)]
    assert times == pytest.approx([times[0]] * 3, rel=1e-3)  # as many bytes over each link


# --- more than two tiers -------------------------------------------------------------------------------


def test_a_rack_holds_the_groups_that_fit_into_it() -> None:
    assert group(1, 2, 2, 8) == MeshGroup(2, 2)
    assert group(1, 8, 2, 8) == MeshGroup(8, 2, racked=True)
    assert group(2, 4, 2, 8) == MeshGroup(4, 1, racked=True)
    assert group(1, 16, 2, 8) == MeshGroup(16, 2)
    assert group(1, 6, 2, 8) == MeshGroup(6, 2)  # the second group lies on GPUs 6 to 11
    assert [stage_pair(1, 1, pp, 2, 8).racked for pp in (2, 4, 8, 16)] == [False, True, True, False]
    assert not group(1, 8, 8, 0).racked


@pytest.mark.parametrize("kind", ["all_gather", "reduce_scatter", "all_reduce", "all_to_all"])
def test_a_racks_links_lie_between_the_nodes_and_the_networks(kind: str) -> None:
    bridged = load_hardware("h100_nvl")
    assert bridged.tiers == (2, 8, False)
    inside, racked, across = (
        [collective_price(bridged, kind, members, size).time_s for size in (1e4, LARGE)]
        for members in (MeshGroup(2, 2), MeshGroup(4, 2, racked=True), MeshGroup(4, 2))
    )
    assert inside[0] < racked[0] < across[0]
    assert inside[1] < racked[1] < across[1]
    pairs = MeshGroup(2, 2), MeshGroup(2, 1, racked=True), MeshGroup(2, 1)
    assert sorted(times := [stage_send_s(bridged, pair, LARGE) for pair in pairs]) == times
    experts = [expert_all_to_all_time_s(bridged.collectives, "combine", pair, LARGE) for pair in pairs]
    assert sorted(experts) == experts


def test_a_rack_of_72_is_one_domain_and_pays_the_network_only_beyond() -> None:
    nvl72, hgx = load_hardware("gb200_nvl72"), load_hardware("b200_sxm")
    for gpus in (16, 64, 72):
        times = [collective_price(m, "all_gather", group(1, gpus, *m.tiers), LARGE).time_s for m in (nvl72, hgx)]
        assert times[0] < times[1] / 1.5
    inside, beyond = (collective_price(nvl72, "all_gather", group(1, n, *nvl72.tiers), LARGE).time_s for n in (72, 144))
    assert beyond > 1.2 * inside
    assert [group(1, gpus, *nvl72.tiers).nodes for gpus in (16, 32, 48, 64, 72, 144)] == [1, 1, 1, 1, 1, 2]
    assert stage_pair(4, 4, 2, *nvl72.tiers).nodes == 1


def test_gpus_that_share_network_ports_share_their_rate(tmp_path: Path) -> None:
    text = config_path("hardware", "h20_sxm").read_text(encoding="utf-8")
    path = tmp_path / "few_ports.toml"
    path.write_text(text.replace("[expected_error]", "nics = 2\n\n[expected_error]"), encoding="utf-8")
    all_ports, few = (load_hardware(name).collectives for name in ("h20_sxm", path))
    assert few.nic_bandwidth_bytes_per_s == pytest.approx(all_ports.nic_bandwidth_bytes_per_s / 4)
    assert few.all_to_all.inter_bandwidth_bytes_per_s == pytest.approx(
        all_ports.all_to_all.inter_bandwidth_bytes_per_s / 4
    )
    assert few.all_reduce_bandwidth_bytes_per_s == all_ports.all_reduce_bandwidth_bytes_per_s


# --- what a file may not say ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("machine", "old", "new", "expected"),
    [
        ("h100_nvl", "gpus = 8 ", "gpus = 9 ", "links.rack.gpus (9) must be several nodes of 2 GPUs"),
        ("mi300x", "node_gpus = 8 ", "node_gpus = 2 ", "a mesh has at least 3 GPUs, got node_gpus = 2"),
        ("mi300x", '"mesh"', '"ring"', "links.topology: expected 'switched', 'mesh' or 'torus'"),
        ("mi300x", '"mesh"', '"torus"', "the table links.torus belong together"),
        ("mi300x", 'scaled_from = "h100_sxm"', "", "efficiency: missing, and no scaled_from names a machine"),
        ("mi300x", "[0.6, 2.5]", "[1.2, 2.5]", "carried_over must be factors around 1"),
        ("h100_sxm", "[links]", "[links]\nachieved_share = 0.9", "links.achieved_share belongs to scaled_from"),
    ],
)
def test_a_machine_that_cannot_be_is_refused(machine: str, old: str, new: str, expected: str, tmp_path: Path) -> None:
    text = config_path("hardware", machine).read_text(encoding="utf-8")
    assert old in text
    path = tmp_path / "odd.toml"
    path.write_text(text.replace(old, new, 1), encoding="utf-8")
    with pytest.raises(CatalogError) as caught:
        load_hardware(path)
    assert expected in str(caught.value)


def test_tensor_cores_without_fp8_take_its_weights_at_the_rate_of_bf16() -> None:
    rates = load_hardware("a100_80_sxm").peak_flop_per_s
    assert rates["fp8"] == rates["bf16"] == 312e12


def test_tensor_cores_with_fp4_multiply_it_at_its_own_rate_and_others_widen_it() -> None:
    new, old = (load_hardware(name).peak_flop_per_s for name in ("b200_sxm", MEASURED))
    assert (new["nvfp4"], new["mxfp4"], new["int4"]) == (9000e12, 4500e12, 2250e12)
    assert {old[dtype] for dtype in ("nvfp4", "mxfp4", "int4")} == {989e12}


def test_messages_of_experts_and_stages_take_as_much_less_as_links_are_faster() -> None:
    fast, slow = load_hardware("gb200_nvl72"), load_hardware(MEASURED)
    size = 1e9
    for pair, times in ((MeshGroup(2, 2), 900 / 450), (MeshGroup(2, 1), 100 / 50)):
        assert stage_send_s(slow, pair, size) / stage_send_s(fast, pair, size) == pytest.approx(times, rel=0.05)
    shape = (1024, 7168 * 64, 2.0, 256, 8)
    found = [expert_all_to_all(machine, "combine", MeshGroup(8, 8), *shape).time_s for machine in (slow, fast)]
    assert 1.5 < found[0] / found[1] < 3


def test_no_code_of_the_simulator_names_a_machine() -> None:
    root = Path(sim.__file__).parent
    names, rates = ("h100", "sxm", "mi300"), ("132", "989", "1979")
    for path in (*root.glob("*.py"), *root.glob("*/*.py")):
        if not any(text in path.read_text(encoding="utf-8").lower() for text in (*names, *rates)):
            continue
        with path.open("rb") as file:
            for token in tokenize.tokenize(file.readline):
                if token.type == tokenize.COMMENT or token.string.startswith('"""'):
                    continue
                assert not any(name in token.string.lower() for name in names), (path, token)
                assert token.string not in rates, (path, token)


# --- memory ----------------------------------------------------------------------------------------------

_AICONFIGURATOR = "aiconfigurator-core 0.12.0, systems/*.yaml"
_PUBLIC = "nvidia-smi tables that users published"
DRIVER_REPORTED_MIB = {
    "a100_40_sxm": (40_960, "github.com/bottlerocket-os/bottlerocket-core-kit/pull/834"),
    "a100_80_sxm": (81_920, "github.com/modal-labs/modal-client/pull/2797"),
    "b200_sxm": (183_359, "github.com/NVIDIA/TensorRT-LLM/issues/10278"),
    "b300_sxm": (275_040, _AICONFIGURATOR),
    "gb200_nvl72": (189_471, _AICONFIGURATOR),
    "gb300_nvl72": (284_208, _AICONFIGURATOR),
    "h100_nvl": (95_830, _PUBLIC),
    "h100_pcie": (81_559, _PUBLIC),
    "h100_sxm": (81_559, "github.com/NVIDIA/nccl/issues/1264"),
    "h200_sxm": (143_771, "github.com/sgl-project/sglang/issues/3196"),
    "h20_sxm": (97_871, _PUBLIC),
    "h800_sxm": (81_559, "[assumed] as the H100's: none was found"),
    "l40s": (46_068, "github.com/akash-network/provider-configs/pull/99"),
    "mi300x": (196_592, "github.com/ROCm/legacy-rocm-build/issues/4750: 206,141,652,992 bytes"),
    "mi325x": (262_128, "amd-smi tables that users published"),
    "mi355x": (294_896, "amd-smi tables that users published"),
    "rtx_pro_6000_server": (97_887, _AICONFIGURATOR),
    "tpu_v5p": (90_599, "cloud.google.com/tpu/docs/v5p: 95 GB; no figure of the runtime was found"),
}
"""Memory as the driver reports it, and where: what an engine's share of the memory is a share of."""


@pytest.mark.parametrize("name", MACHINES)
def test_a_machine_has_the_memory_that_its_driver_reports(name: str) -> None:
    mib, source = DRIVER_REPORTED_MIB[name]
    assert source
    assert load_hardware(name).hbm_bytes / 1e9 == pytest.approx(mib * 2**20 / 1e9, abs=0.005)  # GB, two decimals
