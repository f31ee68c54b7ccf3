"""What further choices gain, as the tables of docs/concepts/strategy_spaces.md: exact optima, in tokens/s/GPU.

    python benchmarks/collective_choices.py                 # all tables
    python benchmarks/collective_choices.py parts stages    # some: all_reduce, fp8_gather, parts, two_dims, stages

Batches are powers of two; where a format of weights is stated, the KV cache is in fp8 too.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from typing import Any

from sim.config.question import Question
from sim.optimum.exact_search import find_best
from sim.optimum.spaces import Space, joint_space, space_of
from sim.optimum.uneven_stages import best_stages

BARE = {"engine": "none", "batches": "powers_of_two"}
FP8 = {**BARE, "weights": "fp8", "kv_cache": "fp8"}
DECODE = {"phase": "decode", "isl": 4000, "osl": 500}
PROMPTS = {"phase": "prefill", "isl": 8000, "osl": 1}
LLAMA = Question(model="llama_3_1_70b", gpus=8, ttft_ms=500, **PROMPTS, **FP8)
LARGE = Question(model="llama_3_1_405b", gpus=16, ttft_ms=2000, **PROMPTS, **FP8)
MIXTRAL = Question(model="mixtral_8x22b", gpus=32, ttft_ms=300, **PROMPTS, **FP8)
SERVED = Question(model="llama_3_1_70b", gpus=8, tpot_ms=50, **{**DECODE, "phase": "serve"}, **FP8)
DECODED = Question(model="llama_3_1_70b", gpus=8, tpot_ms=20, **DECODE, **FP8)
ON_TPUS = Question(
    model="llama_3_1_405b", hardware="tpu_v5p", gpus=64, tpot_ms=20, phase="decode", isl=8000, osl=1, **BARE
)
DEEPSEEK = Question(model="deepseek_v3", gpus=64, tpot_ms=50, **DECODE, **BARE)
SIX = [f"gpt_moe_{model}_{context}" for model in ("1_2t", "1_6t") for context in ("16k", "32k", "64k")]
SHIPPED = (
    "llama_3_1_405b_8k",
    "mixtral_8x22b_16k_slo20",
    "gpt_moe_1_8t_24k_slo30",
    "gpt_moe_1_2t_1m",
    "qwen3_235b_a22b_16k",
)


def named(*names: str) -> Iterator[Question]:
    """Questions about shipped workloads."""
    return (Question(workload=name) for name in names)


def table(asked: Iterable[Question], key: str, values: Iterable[Any], **more: Any) -> None:
    """Prints the optimum of each question under each value of a setting."""
    values = tuple(values)
    print(f"\n| {key} | {' | '.join(map(str, values))} |\n|{'---|' * (len(values) + 1)}")
    for each in asked:
        spaces = [space_of(replace(each, **more, **{key: value}).load()) for value in values]
        print(f"| {label(each)} | {' | '.join(map(reached, spaces))} |", flush=True)


def label(asked: Question) -> str:
    """A question in few words."""
    limits = [f"{name} {value:g} ms" for name in ("tpot", "ttft") if (value := getattr(asked, f"{name}_ms"))]
    formats = [asked.weights] if asked.weights else []
    return asked.workload or ", ".join(map(str, (asked.model, asked.phase, *formats, *limits, f"{asked.gpus} GPUs")))


def reached(space: Space) -> str:
    """Tokens/s/GPU of the best of a space, and its tp."""
    best = find_best(space).evaluation
    return f"{best.tokens_per_s_per_gpu:,.1f} (tp {best.strategy.tp})" if best else "none"


def stages() -> None:
    """Prints what even stages lose to any number of layers per stage."""
    decoded = {**DECODE, **BARE, "tpot_ms": 50}
    asked = {
        DEEPSEEK: (2, 4, 8),
        Question(model="llama_4_scout", gpus=16, **decoded): (2, 4),
        Question(model="gpt_oss_120b", gpus=8, **decoded): (2, 4),
        Question(model="qwen3_32b", gpus=8, **decoded): (2, 4),
        Question(model="llama_3_1_70b", gpus=8, phase="prefill", isl=4000, osl=500, **BARE): (2, 4),
        Question(workload="gpt_moe_1_2t_16k"): (2, 4, 8),
        replace(DEEPSEEK, engine="vllm", phase="serve"): (1, 2, 4),
    }
    for each, counts in asked.items():
        workload = each.load()
        for count in counts:
            space = replace(joint_space(workload) if workload.rules is None else space_of(workload), pp=(count,))
            best = best_stages(space)
            any_number = f"{best.tokens_per_s_per_gpu:,.1f} ({', '.join(map(str, best.layers))})" if best else "none"
            print(f"| {label(each)} | {count} stages | {reached(space)} | {any_number} |", flush=True)


def two_dims() -> None:
    """Prints the joint space, and both dims of an op at once."""
    asked = [*named(*SIX, *SHIPPED), replace(MIXTRAL, ttft_ms=250), ON_TPUS]
    asked += [replace(ON_TPUS, weights="fp8", kv_cache="fp8")]
    table(asked, "space", ["joint"])
    table(asked, "tp_inner", (2, 4, 8, 16), space="two_dimensional")


ALGORITHMS = ("trtllm", "nccl", "ring", "nvls", "one_shot", "two_shot", "fastest")
TABLES: dict[str, Callable[[], None]] = {
    "all_reduce": lambda: table(
        [DECODED, replace(DECODED, tpot_ms=12), *named("llama_3_1_405b_32k", "gpt_moe_1_2t_16k"), LLAMA],
        "all_reduce",
        ALGORITHMS,
    ),
    "fp8_gather": lambda: table(
        [
            LLAMA,
            LARGE,
            *named("gpt_moe_1_2t_16k", "mixtral_8x22b_8k", "llama_3_1_405b_32k", "qwen3_235b_a22b_16k"),
        ],
        "fp8_gather",
        (False, True),
    ),
    "parts": lambda: table([LLAMA, LARGE, MIXTRAL, SERVED, *named("gpt_moe_1_2t_16k")], "overlap_parts", (1, 2, 4, 8)),
    "two_dims": two_dims,
    "stages": stages,
}

if __name__ == "__main__":
    for name in sys.argv[1:] or TABLES:
        TABLES[name]()
