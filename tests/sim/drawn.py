"""Random workloads and strategies over models, phases, engines, spaces, exchanges and groups of layers."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np

from sim.config.catalog import load_workload
from sim.engines.engine_registry import BARE_MACHINE, SHIPPED
from sim.optimum.spaces import extended_space, joint_space, paper_space, space_of
from sim.strategy import Strategy
from sim.workload import Workload
from tests.questions import question_about

MODELS = (
    "mixtral_8x7b",
    "deepseek_v3",
    "llama_3_1_8b",
    "qwen3_32b",
    "gpt_oss_120b",
    "llama_4_scout",
    "qwen3_5_397b_a17b",
    "minimax_m2_5",
    "qwen3_235b_a22b",
    "glm_5",
)


def drawn_workload(rng: np.random.Generator) -> Workload:
    """One of a few shipped ones, or any that a command line may describe."""
    if rng.random() < 0.1:
        return load_workload(str(rng.choice(["gpt_moe_1_2t_16k", "gpt_moe_1_2t_1m_extended", "llama_3_1_405b_8k"])))
    phase = str(rng.choice(["decode", "serve", "prefill"]))
    engine = str(rng.choice([*SHIPPED])) if rng.random() < 0.5 else BARE_MACHINE
    own = rng.random() < 0.5
    asked = question_about(
        str(rng.choice(MODELS)),
        phase=phase,
        isl=int(rng.choice([37, 500, 1000, 4096, 8000])),
        osl=int(rng.choice([1, 50, 333, 1000])),
        engine=engine,
        gpus=int(rng.choice([8, 32, 64])),
        chunk_tokens=int(rng.choice([64, 512, 2048])) if phase == "serve" and rng.random() < 0.5 else None,
    )
    more: dict[str, Any] = {"groups": "own" if own else "shared"}
    gathered = rng.random() < 0.3
    balanced = rng.random() < 0.3
    if phase == "serve" and engine == BARE_MACHINE and rng.random() < 0.5:
        more["prompt_wait_steps"] = int(rng.choice([1, 8]))
    workload = replace(asked, **more).load()
    if gathered:
        workload = replace(workload, expert_exchange="all_gather")
    return replace(workload, routing="balanced") if balanced else workload


def drawn_strategy(workload: Workload, rng: np.random.Generator, *, fits: bool = True) -> Strategy:
    """Of one of the spaces, its degrees any, its batch any or a power of two; `fits`: both meshes on the same GPUs."""
    space = (paper_space, joint_space, extended_space, space_of)[rng.integers(4)](workload)
    while True:
        found = space.sample(rng)
        if rng.random() < 0.5:
            found = Strategy(found.tp, found.ep, found.pp, int(rng.integers(1, 600)), found.dims, found.cp, found.dp)
        gpus, group = found.stage_gpus, found.tp * found.cp
        if not fits or (gpus % found.ep == 0 and (found.moe_tp % group == 0 or group % found.moe_tp == 0)):
            return found
