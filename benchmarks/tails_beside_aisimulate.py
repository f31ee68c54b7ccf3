"""Time per token and to the first under random arrivals, by AISimulate's replay and by ours: side by side.

    pip install -e '.[aisimulate]'
    python benchmarks/tails_beside_aisimulate.py            # Qwen3-32B under vLLM on two H100, 2, 2.5 and 3 requests/s
    python benchmarks/tails_beside_aisimulate.py --command OTHER_ENVIRONMENT/bin/aisimulate

Two things can differ: how long steps take, and who is in them. So ours is replayed twice: on its own steps, and on
steps that take as long as AISimulate's do. Those are known from its closed loops: the median time between two tokens
with so many requests at once, and, for steps with prompts, the mean time per token of some clients. Means over seeds;
both have arrivals of their own.
"""

from __future__ import annotations

import argparse
import json
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from sim.config.question import Question
from sim.replay.arrivals import Stream, draw_arrivals
from sim.replay.drive import as_they_come, by_clients
from sim.replay.replica import Deployed
from sim.replay.requests import Lengths, Requests
from sim.replay.step_prices import RankStep, StepPrices
from sim.strategy import Strategy

ISL, OSL, TP, BATCH, CHUNK = 4000, 500, 2, 47, 8192
DIMS = (2, 1, 1, 0, 2, 2, 1, 1, 0, 2)
FIGURES = ("mean_tpot_ms", "p99_tpot_ms", "mean_ttft_ms", "p99_ttft_ms")
AT_ONCE = (1, 12, 24, 47)


def theirs(command: str, load: Mapping[str, object], requests: int) -> dict[str, float]:
    """AISimulate's summary of a replay."""
    worker = {
        "parallelism": {"tensor": TP},
        "scheduler": {"max_batched_tokens": CHUNK, "max_sequences": BATCH},
        "kv_cache": {"prefix_caching": False},
    }
    asked = {
        "traffic": {
            "source": {"type": "synthetic", "input_tokens": ISL, "output_tokens": OSL},
            "load": load,
            "stop": {"requests": requests},
        },
        "engine": {
            "model": "Qwen/Qwen3-32B",
            "hardware": "h100_sxm",
            "backend": "vllm",
            "gemm_quant_mode": "fp8",
            "kvcache_quant_mode": "fp8",
            "workers": {"aggregated": worker},
        },
    }
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "asked.yaml"
        path.write_text(json.dumps(asked))  # JSON is YAML
        words = [command, "predict", "-c", str(path), "--format", "json", "--output-dir", f"{folder}/out"]
        shown = subprocess.run(words, capture_output=True, text=True, check=False)
    found = json.loads(shown.stdout.splitlines()[-1] if shown.stdout else "{}")
    if not found:
        sys.exit(shown.stderr)
    return found


@dataclass(eq=False)
class ScaledSteps(StepPrices):
    """Steps that take other times than the step model says.

    Attributes:
        decode: Factors of steps that only decode, by sequences as `AT_ONCE`.
        prompt: Factor of steps with prompts.
    """

    decode: Sequence[float] = (1.0,) * len(AT_ONCE)
    prompt: float = 1.0

    def __post_init__(self) -> None:
        super().__post_init__()
        self._own = StepPrices(self.workload, self.strategy)

    def decode_line(self, sequences: int, context_tokens: float) -> tuple[float, float, float]:
        """See `StepPrices.decode_line`."""
        factor = float(np.interp(sequences, AT_ONCE, self.decode))
        at_zero, slope, last = super().decode_line(sequences, context_tokens)
        return factor * at_zero, factor * slope, last

    def step_s(self, busiest: RankStep, all_prompt_tokens: int | None = None) -> float:
        """See `StepPrices.step_s`."""
        if not busiest.prompt_tokens:
            return super().step_s(busiest, all_prompt_tokens)
        return self.prompt * self._own.step_s(busiest, all_prompt_tokens)


def ours(deployed: Deployed, rate: float, requests: int, seed: int) -> list[float]:
    """The same figures of our replay."""
    times_s = draw_arrivals([Stream(rate)], 1.2 * requests / rate, seed).times_s[:requests]
    outcome = as_they_come(deployed, Requests.drawn(times_s, Lengths(ISL), Lengths(OSL), seed))
    return [
        1e3 * float(found)
        for values in (outcome.tpot_s, outcome.ttft_s)
        for found in (values.mean(), np.percentile(values, 99))
    ]


def loop_s(deployed: Deployed, clients: int) -> tuple[float, float]:
    """(median time between two tokens, mean time per token) of a closed loop."""
    sent = Requests.drawn(np.zeros(4 * clients), Lengths(ISL), Lengths(OSL), 0)
    outcome = by_clients(deployed, sent, clients)
    order = np.argsort(outcome.gap_s)
    counts = np.cumsum(outcome.gap_counts[order])
    return float(outcome.gap_s[order][np.searchsorted(counts, counts[-1] / 2)]), float(outcome.tpot_s.mean())


def on_its_steps(own: Deployed, loops: Sequence[Mapping[str, float]]) -> tuple[Deployed, list[float], float]:
    """(ours on steps as long as theirs, factors of decode steps by `AT_ONCE`, factor of steps with prompts)."""
    gaps_s = [loop_s(own, each)[0] for each in AT_ONCE]
    decode = [loop["median_itl_ms"] / 1e3 / gap_s for loop, gap_s in zip(loops, gaps_s, strict=True)]

    def scaled(prompt: float) -> Deployed:
        steps = ScaledSteps(own.prices.workload, own.prices.strategy, decode=decode, prompt=prompt)
        return replace(own, prices=steps)

    low, high = 0.5, 2.0
    for _ in range(8):
        middle = (low + high) / 2
        more = loop_s(scaled(middle), AT_ONCE[2])[1] < loops[2]["mean_tpot_ms"] / 1e3
        low, high = (middle, high) if more else (low, middle)
    return scaled(low), decode, low


def main() -> None:
    """Prints a line per rate and replay."""
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--command", default=shutil.which("aisimulate"), help="AISimulate's command")
    options.add_argument("--rates", nargs="*", type=float, default=[2.0, 2.5, 3.0])
    options.add_argument("--requests", type=int, default=400)
    options.add_argument("--seeds", type=int, default=2)
    asked = options.parse_args()
    if asked.command is None:
        sys.exit("aisimulate is not installed: pip install -e '.[aisimulate]', or --command where it is")
    question = Question(model="qwen3_32b", isl=ISL, osl=OSL, engine="vllm", kv_cache="fp8", weights="fp8", gpus=TP)
    workload, strategy = replace(question.load(), chunk_tokens=CHUNK), Strategy(TP, 1, 1, BATCH, DIMS)
    own = Deployed.of(workload, strategy)
    loops = [theirs(asked.command, {"type": "concurrency", "concurrency": each}, 4 * each) for each in AT_ONCE]
    scaled, decode, prompt = on_its_steps(own, loops)
    print(f"their decode steps with {AT_ONCE} requests: {', '.join(f'{each:.2f}' for each in decode)} times ours")
    print(f"their steps with prompts: {prompt:.2f} times ours")
    print(f"requests/s; {', '.join(FIGURES)}")
    for rate in asked.rates:
        seeds = range(1, asked.seeds + 1)
        load = {"type": "poisson", "requests_per_second": rate}
        there = [
            [theirs(asked.command, {**load, "seed": seed}, asked.requests)[name] for name in FIGURES] for seed in seeds
        ]
        rows = {
            "AISimulate": there,
            "ours": [ours(own, rate, asked.requests, seed) for seed in range(20)],
            "ours on its steps": [ours(scaled, rate, asked.requests, seed) for seed in range(20)],
        }
        for name, found in rows.items():
            print(f"{rate}: {name}: {', '.join(f'{each:,.1f}' for each in np.mean(found, axis=0))}", flush=True)


if __name__ == "__main__":
    main()
