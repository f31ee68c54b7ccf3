"""Tokens/s/GPU of pipelines: the step model's steady state beside a replay of clients whose answers differ in length.

    python benchmarks/pipelines.py

"Always busy" is what stages would give that never wait for another microbatch's prompts. Every row has as many requests
in flight on as many GPUs, the first of a model without a pipeline.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

import raysearch as rs
from sim.replay.drive import by_clients
from sim.replay.replica import Deployed
from sim.replay.requests import Lengths, Requests
from sim.serving.phases import batching
from sim.simulate import steady_state
from sim.strategy import Strategy
from sim.workload import Workload

SPREAD = 0.5
"""Shortest answer over the longest."""
WAVES = 12
"""Requests per client; those of the first and last two are not counted."""


class Case(NamedTuple):
    """A question and the degrees (tp, pp) of layouts of as many GPUs."""

    model: str
    hardware: str
    engine: str
    isl: int
    osl: int
    in_flight: int
    layouts: tuple[tuple[int, int], ...]


CASES = (
    Case("qwen3_32b", "h100_sxm", "vllm", 4000, 500, 64, ((4, 1), (2, 2), (1, 4))),
    Case("qwen3_32b", "h100_sxm", "vllm", 200, 500, 512, ((4, 1), (2, 2), (1, 4))),
    Case("qwen3_32b", "h100_sxm", "sglang", 1000, 1000, 256, ((4, 1), (2, 2), (1, 4))),
    Case("gpt_oss_120b", "h100_sxm", "vllm", 215, 196, 1000, ((2, 1), (1, 2))),
    Case("deepseek_v3", "h200_sxm", "vllm", 4000, 500, 192, ((8, 1), (4, 2), (1, 8))),
)


def main() -> None:
    """Prints the table in Markdown."""
    print("| model, engine, tokens in and out | layout | always busy | evaluate | replay |\n|---|---|---|---|---|")
    for case, tp, pp in [(each, *degrees) for each in CASES for degrees in each.layouts]:
        question = rs.question(
            model=case.model,
            hardware=case.hardware,
            engine=case.engine,
            isl=case.isl,
            osl=case.osl,
            gpus=16,
            kv_cache="fp8",
        )
        found = rs.evaluate(question, batch=case.in_flight // pp, tp=tp, pp=pp)
        busy, played = always_busy(found.workload, found.strategy), replayed(found.workload, found.strategy, case)
        layout = f"TP{tp}" + f" PP{pp}" * (pp > 1)
        print(
            f"| {case.model}, {case.engine}, {case.isl:,} and {case.osl:,} | {layout} | {busy:,.0f} | "
            f"{found.evaluation.tokens_per_s_per_gpu:,.0f} | {played:,.0f} |",
            flush=True,
        )


def always_busy(workload: Workload, strategy: Strategy) -> float:
    """Tokens/s/GPU if no microbatch ever waited for another's prompts, nor for the engine on each stage."""
    priced, alone = steady_state(workload, strategy), batching(workload, strategy.batch, strategy.attention_dp)
    steps = alone.steps(priced.decode_s, priced.mixed_s)
    return alone.tokens * strategy.pp / (steps.step_s * strategy.gpus)


def replayed(workload: Workload, strategy: Strategy, case: Case) -> float:
    """Tokens/s/GPU of clients who begin one after the other."""
    count, ends = WAVES * case.in_flight, 2 * case.in_flight
    sent = Requests.drawn(
        np.zeros(count), Lengths(case.isl), Lengths(round(2 * case.osl / (1 + SPREAD)), SPREAD), seed=0
    )
    done, steady = (
        by_clients(Deployed.of(workload, strategy), sent, case.in_flight, staggered=True),
        slice(ends, count - ends),
    )
    spent_s = done.sent_s[steady][-1] - done.sent_s[steady][0]
    return float(sent.output_tokens[steady].sum() / spent_s / strategy.gpus)


if __name__ == "__main__":
    main()
