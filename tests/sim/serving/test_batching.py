from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sim.config.catalog import load_calibration, load_model, load_workload
from sim.config.files import CatalogError
from sim.prices.calibration import Calibration
from sim.serving.batching import Engine, prefill_time, serve, steady_work
from sim.serving.deployment import MEMORY_POLICIES, Deployment, cache_bytes, sequence_limit, weight_bytes
from sim.serving.serving_kernels import FittedKernels
from sim.serving.serving_step import Batch, step_parts, step_time

H100_BYTES = 85.5e9
CALIBRATION = load_calibration("h100_sxm")
KERNELS = {engine: FittedKernels(CALIBRATION, engine) for engine in ("trtllm", "vllm", "sglang")}
IDLE = Engine("idle", 0.0, 0.0, 1.0)
LLAMA_8B = Deployment(load_model("llama_3_1_8b"), isl=1024, osl=256, concurrency=32, weights="fp8", kv_cache="fp8")
GPT_OSS = Deployment(load_model("gpt_oss_120b"), 1024, 1024, 64, "bf16", "bf16", attention_tp=4, moe_tp=4)
DEEPSEEK = Deployment(
    load_model("deepseek_v3"), 4000, 100, 1024, "fp8_block", "bf16", attention_tp=1, attention_dp=8, moe_ep=8
)
PUBLISHED_TOTALS = {
    "llama_3_1_8b": (8.03e9, 7.5e9),
    "llama_3_1_70b": (70.55e9, 69.5e9),
    "llama_3_1_405b": (405.85e9, 403.8e9),
    "llama_2_70b": (68.98e9, 68.7e9),
    "mistral_7b": (7.24e9, 7.1e9),
    "mixtral_8x7b": (46.7e9, 12.8e9),
    "mixtral_8x22b": (140.6e9, 39e9),
    "qwen3_32b": (32.76e9, 32e9),
    "qwen3_235b_a22b": (235.1e9, 21.6e9),
    "gpt_oss_120b": (116.83e9, 5.13e9),
    "minimax_m2_5": (229e9, 10.4e9),
    "deepseek_v3": (671e9, 37e9),
    "llama_4_scout": (108e9, 17e9),
    "llama_4_maverick": (400e9, 17e9),
}


def tpot(deployment: Deployment, engine: str = "trtllm", own: Engine = IDLE) -> float:
    return serve(deployment, KERNELS[engine], own, H100_BYTES, MEMORY_POLICIES[engine]).tpot_s


@pytest.mark.parametrize("name", sorted(PUBLISHED_TOTALS))
def test_model_files_have_their_published_parameter_counts(name: str) -> None:
    total, active = PUBLISHED_TOTALS[name]
    model = load_model(name)
    assert model.parameters == pytest.approx(total, rel=0.005)
    assert model.active_parameters == pytest.approx(active, rel=0.06)  # cards differ in what they call active


def test_deepseek_v3_has_671_billion_parameters_by_hand() -> None:
    query = 7168 * 1536 + 1536 * 128 * (128 + 64)
    key_value = 7168 * (512 + 64) + 512 * 128 * (128 + 128)
    attention = query + key_value + 128 * 128 * 7168
    expert, dense = 3 * 7168 * 2048, 3 * 7168 * 18432
    layers = 61 * attention + 58 * (257 * expert + 7168 * 256) + 3 * dense + 61 * 2 * 7168
    assert load_model("deepseek_v3").parameters == layers + 2 * 129280 * 7168 + 7168


def test_models_beyond_the_search_are_refused_with_one_clear_error(tmp_path) -> None:
    path = tmp_path / "workload.toml"
    text = (
        'name = "x"\nmodel = "deepseek_v3"\nhardware = "h100_sxm"\nphase = "decode"\ncontext_tokens = 1\n'
        "tpot_slo_ms = 50.0\nmax_gpus = 8\nload_imbalance = 1.0\n[precisions]\n"
        'weights = "fp8"\nkv_cache = "fp8"\nactivations = "bf16"\ndispatch = "bf16"\n'
        "[degrees]\ntp = [1]\nep = [1]\npp = [1]\nbatch = [1]\n"
    )
    path.write_text(text, encoding="utf-8")
    with pytest.raises(CatalogError, match="'deepseek_v3' cannot be searched yet: it has multi-head latent attention"):
        load_workload(path)


def test_kv_heads_are_replicated_when_there_are_more_gpus_than_heads() -> None:
    heads = {tp: replace(LLAMA_8B, attention_tp=tp) for tp in (1, 8, 16, 32)}
    assert [(d.heads, d.kv_heads) for d in heads.values()] == [(32, 8), (4, 1), (2, 1), (1, 1)]
    # One KV head of 128, keys and values, fp8, 32 layers: 8,192 bytes a token from 8 GPUs on.
    assert cache_bytes(heads[1], 1000) == 8 * cache_bytes(heads[8], 1000) == 8 * 8192 * 1000
    assert cache_bytes(heads[32], 1000) == cache_bytes(heads[8], 1000)


def test_windowed_layers_cache_no_more_than_their_window() -> None:
    each = 2 * 2 * 64 * 2  # keys and values, 2 KV heads of 64 per GPU, bf16
    assert cache_bytes(GPT_OSS, 1000) == each * (18 * 1000 + 18 * 128)
    assert cache_bytes(GPT_OSS, 100) == each * 36 * 100


def test_every_gpu_holds_the_latents_of_all_heads() -> None:
    assert cache_bytes(DEEPSEEK, 1000) == 61 * (512 + 64) * 2 * 1000
    two = replace(DEEPSEEK, attention_tp=2, attention_dp=4)
    assert cache_bytes(two, 1000) == cache_bytes(DEEPSEEK, 1000)


def test_weights_fill_the_gpus_as_published_checkpoints_do() -> None:
    assert weight_bytes(LLAMA_8B) == pytest.approx(8.03e9 + 2 * 128256 * 4096, rel=0.001)  # embeddings in bf16
    assert 4 * weight_bytes(GPT_OSS) == pytest.approx(65.2e9, rel=0.03)  # the checkpoint is 65.2 GB
    # Attention is whole on every data-parallel rank, experts are cut over all eight.
    assert weight_bytes(DEEPSEEK) > 671e9 / 8


def test_a_group_that_does_not_add_up_is_refused() -> None:
    with pytest.raises(ValueError, match=r"\(4 \* 2\) must equal moe_tp \* moe_ep \(4 \* 1\)"):
        replace(GPT_OSS, attention_dp=2)
    with pytest.raises(ValueError, match="concurrency must be at least 1, got 0"):
        replace(LLAMA_8B, concurrency=0)


def test_attention_data_parallelism_of_one_is_plain_tensor_parallelism() -> None:
    plain = replace(GPT_OSS, attention_tp=4, moe_tp=4)
    assert tpot(replace(plain, attention_dp=1), "vllm") == tpot(plain, "vllm")
    parts = step_parts(plain, KERNELS["vllm"], Batch(64, 1536))
    reduce_s = KERNELS["vllm"].all_reduce(64 * 2880 * 2, 4)
    assert parts["communication"] == pytest.approx(2 * 36 * reduce_s)


def test_one_gpu_does_not_communicate_and_dense_replicas_share_nothing() -> None:
    assert step_parts(LLAMA_8B, KERNELS["trtllm"], Batch(32, 1024))["communication"] == 0
    two = replace(LLAMA_8B, attention_dp=2, concurrency=64)
    assert step_parts(two, KERNELS["trtllm"], Batch(32, 1024))["communication"] == 0


def test_data_parallel_ranks_wait_for_each_others_prompts() -> None:
    alone, pair = replace(LLAMA_8B, concurrency=32), replace(LLAMA_8B, concurrency=64, attention_dp=2)
    works = [steady_work(d, KERNELS["trtllm"], H100_BYTES, MEMORY_POLICIES["trtllm"]) for d in (alone, pair)]
    assert works[0].running == works[1].running == 32
    assert works[1].prompts == 2 * works[0].prompts


def test_the_cache_limits_what_runs_at_once() -> None:
    policy = MEMORY_POLICIES["trtllm"]
    big = Deployment(load_model("llama_3_1_70b"), 500, 2000, 10**6, "fp8", "fp8")
    room = policy.share * (H100_BYTES - policy.runtime_bytes - weight_bytes(big))
    assert sequence_limit(big, H100_BYTES, policy) == pytest.approx(room / cache_bytes(big, 2500))
    assert sequence_limit(replace(big, attention_tp=8), H100_BYTES, policy) > 8 * sequence_limit(
        big, H100_BYTES, policy
    )
    tiny = replace(big, isl=1, osl=1)
    assert sequence_limit(replace(tiny, attention_tp=8), H100_BYTES, policy) == policy.max_sequences
    assert sequence_limit(replace(big, isl=10**7), H100_BYTES, policy) == 1  # never nothing


def test_a_second_gpu_more_than_doubles_a_model_that_barely_fits_one() -> None:
    one = Deployment(load_model("llama_3_1_70b"), 500, 2000, 10**6, "fp8", "fp8")
    made = [
        serve(replace(one, attention_tp=tp), KERNELS["trtllm"], IDLE, H100_BYTES, MEMORY_POLICIES["trtllm"])
        for tp in (1, 2)
    ]
    assert 2.5 < made[1].tokens_per_s_per_gpu / made[0].tokens_per_s_per_gpu < 5  # published: 3.2


@given(st.sampled_from([LLAMA_8B, GPT_OSS, DEEPSEEK]), st.integers(1, 4096), st.integers(1, 4096))
def test_more_concurrency_never_makes_tokens_come_faster(base: Deployment, first: int, second: int) -> None:
    few, many = (replace(base, concurrency=c) for c in sorted((first, second)))
    for own in (IDLE, Engine("host", 1e-3, 1e-5, 0.5, 5e-4)):
        assert tpot(few, "vllm", own) <= tpot(many, "vllm", own) * (1 + 1e-9)


@given(st.integers(1, 100_000), st.integers(1, 100_000))
def test_longer_contexts_never_take_less(first: int, second: int) -> None:
    short, long = sorted((first, second))
    for base in (LLAMA_8B, GPT_OSS, DEEPSEEK):
        times = [step_time(base, KERNELS["vllm"], Batch(16, context)) for context in (short, long)]
        assert times[0] <= times[1] * (1 + 1e-9)


@given(st.floats(1, 1e5), st.floats(1, 1e5))
def test_more_tokens_never_take_less(first: float, second: float) -> None:
    few, many = sorted((first, second))
    for engine, base in (("trtllm", LLAMA_8B), ("vllm", GPT_OSS), ("sglang", DEEPSEEK)):
        for sequences in (few, many):
            assert step_time(base, KERNELS[engine], Batch(sequences, 2048)) > 0
        assert step_time(base, KERNELS[engine], Batch(few, 2048)) <= step_time(
            base, KERNELS[engine], Batch(many, 2048)
        ) * (1 + 1e-9)
        assert prefill_time(base, KERNELS[engine], few) <= prefill_time(base, KERNELS[engine], many) * (1 + 1e-9)


def test_a_faster_memory_never_slows_activations() -> None:
    light = CALIBRATION.data["speed_of_light"]
    machines = [
        Calibration("x", CALIBRATION.data | {"speed_of_light": light | {"hbm_gb_per_s": r}}) for r in (3e3, 6e3)
    ]
    slow, fast = (FittedKernels(machine, "vllm") for machine in machines)
    for size in (1.0, 1e6, 1e9):
        assert fast.elementwise(size) <= slow.elementwise(size)
    batch = Batch(256, 4096)
    assert step_time(LLAMA_8B, fast, batch) <= step_time(LLAMA_8B, slow, batch)


def test_overlap_hides_communication_but_no_more_than_that() -> None:
    spread = replace(DEEPSEEK, attention_dp=72, moe_ep=72, all_to_all=True)
    batch = Batch(256, 2000)
    plain = step_time(spread, KERNELS["sglang"], batch)
    hidden = step_time(replace(spread, overlap=True), KERNELS["sglang"], batch)
    communication = step_parts(spread, KERNELS["sglang"], batch)["communication"]
    assert plain - communication < hidden < plain


def test_messages_between_nodes_cost_more_than_inside_one() -> None:
    for kernels in KERNELS.values():
        for size in (1e4, 1e6, 1e8):
            assert kernels.all_reduce(size, 1) == kernels.exchange(size, 1) == 0
            assert kernels.all_reduce(size, 8) < kernels.all_reduce(size, 16)
            assert kernels.exchange(size, 8) < kernels.exchange(size, 16)


def test_an_engine_adds_its_own_time_and_its_share_of_prompts() -> None:
    base, policy = KERNELS["trtllm"], MEMORY_POLICIES["trtllm"]
    work = steady_work(LLAMA_8B, base, H100_BYTES, policy)
    busy = serve(LLAMA_8B, base, Engine("busy", 1e-3, 1e-5, 0.5), H100_BYTES, policy)
    assert busy.tpot_s == pytest.approx(work.decode_s + 1e-3 + 32e-5 + 0.5 * 31 / 256 * work.prompt_s)
    hosted = serve(LLAMA_8B, base, Engine("host", 0.0, 0.0, 0.0, 1.0), H100_BYTES, policy)
    assert hosted.tpot_s == pytest.approx(work.decode_s + 31 / 256 * (32 * 1.0 - work.decode_s))
    hidden = serve(LLAMA_8B, base, Engine("host", 0.0, 0.0, 0.0, work.decode_s / 32), H100_BYTES, policy)
    assert hidden.tpot_s == pytest.approx(work.decode_s)  # launched while the step before runs
    single = steady_work(replace(LLAMA_8B, concurrency=1), base, H100_BYTES, policy)
    assert single.others_prompts == 0


def test_published_quantised_experts_are_priced_at_their_bytes() -> None:
    plain = replace(GPT_OSS, model=replace(GPT_OSS.model, expert_bits=0.0))
    model, wide = GPT_OSS.model, plain.model
    narrow_s = KERNELS["vllm"].experts(64, model, 4, 1, "bf16")
    assert 0 < narrow_s < KERNELS["vllm"].experts(64, wide, 4, 1, "bf16")
