"""Time per token and to the first under random arrivals, by AISimulate's replay and by ours: side by side.

    pip install -e '.[aisimulate]'
    python benchmarks/tails_beside_aisimulate.py            # Qwen3-32B under vLLM on two H100, 2, 2.5 and 3 requests/s
    python benchmarks/tails_beside_aisimulate.py --command OTHER_ENVIRONMENT/bin/aisimulate

Both get the same requests at the same times, as a trace. Two things can differ: how long steps take, and who is in
them. So ours is replayed twice: on its own steps, and on steps that take as long as AISimulate's do. Those are known
from its closed loops: the median time between two tokens with so many requests at once; of a step with one prompt, the
first token of a client alone; of one with two, the mean time per token of some clients. A prompt that comes while
others decode takes a whole decode step longer in AISimulate (at an even rate of 0.5/s, 196.5 ms between two tokens and
184.7 ms for a prompt alone), where our steps read the weights once for both. Means over seeds, and how far single
seeds differ. The last lines are of four such replicas, ours alone: the share of requests within both limits, with
steps as predicted and 10 % longer.
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

from sim.arrays import Floats
from sim.config.question import Question
from sim.replay.arrivals import Stream, draw_arrivals
from sim.replay.drive import as_they_come, by_clients
from sim.replay.goodput import settled
from sim.replay.replica import Deployed
from sim.replay.requests import Lengths, Requests
from sim.replay.step_prices import RankStep, StepPrices
from sim.strategy import Strategy

ISL, OSL, TP, BATCH, CHUNK = 4000, 500, 2, 47, 8192
DIMS = (2, 1, 1, 0, 2, 2, 1, 1, 0, 2)
FIGURES = ("request_throughput_rps", "mean_tpot_ms", "p99_tpot_ms", "mean_ttft_ms", "p99_ttft_ms")
AT_ONCE = (1, 6, 12, 18, 24, 32, 40, 47)
FLEET, FLEET_RATES, TTFT_S, TPOT_S = 4, (8.0, 12.0), 0.5, 0.03
CROWD = 24
"""Clients whose mean time per token tells how long steps with two prompts take."""


def theirs(command: str, traffic: Mapping[str, object]) -> dict[str, float]:
    """AISimulate's summary of a replay."""
    worker = {
        "parallelism": {"tensor": TP},
        "scheduler": {"max_batched_tokens": CHUNK, "max_sequences": BATCH},
        "kv_cache": {"prefix_caching": False},
    }
    asked = {
        "traffic": traffic,
        "execution": {"resources": {"initialization_timeout_seconds": 600.0}},
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


def loop_of_theirs(command: str, clients: int) -> dict[str, float]:
    """Of a closed loop."""
    source = {"type": "synthetic", "input_tokens": ISL, "output_tokens": OSL}
    load = {"type": "concurrency", "concurrency": clients}
    return theirs(command, {"source": source, "load": load, "stop": {"requests": 4 * clients}})


def trace_of_theirs(command: str, times_s: Floats) -> list[float]:
    """Its figures of requests at these times, in the format of Mooncake's traces; no two share a block."""
    blocks = -(-ISL // 512)
    with tempfile.NamedTemporaryFile("w", suffix=".jsonl") as file:
        for number, time_s in enumerate(times_s.tolist()):
            hashes = list(range(blocks * number, blocks * (number + 1)))
            line = {"timestamp": 1e3 * time_s, "input_length": ISL, "output_length": OSL, "hash_ids": hashes}
            file.write(json.dumps(line) + "\n")
        file.flush()
        source = {"type": "trace", "paths": [file.name]}
        found = theirs(command, {"source": source, "load": {"type": "trace_timestamps"}})
    return [found[name] for name in FIGURES]


@dataclass(eq=False)
class ScaledSteps(StepPrices):
    """Steps that take other times than the step model says: prompts and decoding one after the other.

    Attributes:
        decode: Factors of steps that only decode, by sequences as `AT_ONCE`.
        prompt: Factors of steps with one prompt, and of those with as many tokens as there may be.
    """

    decode: Sequence[float] = (1.0,) * len(AT_ONCE)
    prompt: tuple[float, float] = (1.0, 1.0)

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
        factor = float(np.interp(busiest.prompt_tokens, (ISL, CHUNK), self.prompt))
        prompts = RankStep(0, 0.0, busiest.prompt_tokens, busiest.seen_tokens)
        decoding = RankStep(busiest.sequences, busiest.context_tokens)
        beside_s = super().step_s(decoding) if busiest.sequences else 0.0
        return factor * self._own.step_s(prompts, all_prompt_tokens) + beside_s


def sent_at_s(rate: float, requests: int, seed: int) -> Floats:
    """When requests come."""
    return draw_arrivals([Stream(rate)], 1.2 * requests / rate, seed).times_s[:requests]


def ours(deployed: Deployed, times_s: Floats) -> list[float]:
    """The same figures of our replay."""
    outcome = as_they_come(deployed, Requests.drawn(times_s, Lengths(ISL), Lengths(OSL), 0))
    latencies_ms = [
        1e3 * float(found)
        for values in (outcome.tpot_s, outcome.ttft_s)
        for found in (values.mean(), np.percentile(values, 99))
    ]
    return [len(times_s) / outcome.end_s, *latencies_ms]


def in_time(deployed: Deployed, times_s: Floats) -> float:
    """Share of requests to a fleet that keep both limits; who would be late for sure is refused, as `place` does."""
    prompt_s = deployed.slower * loop_s(replace(deployed, slower=1.0), 1)[2]
    impatient = replace(deployed, patience_s=TTFT_S - prompt_s)
    outcome = as_they_come(impatient, Requests.drawn(times_s, Lengths(ISL), Lengths(OSL), 0), FLEET)
    kept = (outcome.ttft_s <= TTFT_S) & (outcome.tpot_s <= TPOT_S)
    return float(kept[settled(times_s)].mean())


def loop_s(deployed: Deployed, clients: int) -> tuple[float, float, float]:
    """(median time between two tokens, mean time per token, median to the first) of a closed loop."""
    sent = Requests.drawn(np.zeros(4 * clients), Lengths(ISL), Lengths(OSL), 0)
    outcome = by_clients(deployed, sent, clients)
    order = np.argsort(outcome.gap_s)
    counts = np.cumsum(outcome.gap_counts[order])
    median_s = float(outcome.gap_s[order][np.searchsorted(counts, counts[-1] / 2)])
    return median_s, float(outcome.tpot_s.mean()), float(np.median(outcome.ttft_s))


def on_its_steps(
    own: Deployed, loops: Mapping[int, Mapping[str, float]]
) -> tuple[Deployed, list[float], tuple[float, float]]:
    """(ours on steps as long as theirs, factors of decode steps by `AT_ONCE`, of steps with prompts)."""
    decode = [loops[each]["median_itl_ms"] / 1e3 / loop_s(own, each)[0] for each in AT_ONCE]
    alone = loops[1]["median_ttft_ms"] / 1e3 / loop_s(own, 1)[2]

    def scaled(crowded: float) -> Deployed:
        steps = ScaledSteps(own.prices.workload, own.prices.strategy, decode=decode, prompt=(alone, crowded))
        return replace(own, prices=steps)

    low, high = 0.5, 2.0
    for _ in range(8):
        middle = (low + high) / 2
        more = loop_s(scaled(middle), CROWD)[1] < loops[CROWD]["mean_tpot_ms"] / 1e3
        low, high = (middle, high) if more else (low, middle)
    return scaled(low), decode, (alone, low)


def main() -> None:
    """Prints a line per rate and replay."""
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--command", default=shutil.which("aisimulate"), help="AISimulate's command")
    options.add_argument("--rates", nargs="*", type=float, default=[2.0, 2.5, 3.0])
    options.add_argument("--requests", type=int, default=400)
    options.add_argument("--seeds", type=int, default=8)
    asked = options.parse_args()
    question = Question(model="qwen3_32b", isl=ISL, osl=OSL, engine="vllm", kv_cache="fp8", weights="fp8", gpus=TP)
    workload, strategy = replace(question.load(), chunk_tokens=CHUNK), Strategy(TP, 1, 1, BATCH, DIMS)
    own, scaled = Deployed.of(workload, strategy), None
    if asked.command is None:
        print("aisimulate is not installed (pip install -e '.[aisimulate]', or --command where it is): ours alone")
    else:
        loops = {each: loop_of_theirs(asked.command, each) for each in AT_ONCE}
        scaled, decode, prompt = on_its_steps(own, loops)
        print(f"their decode steps with {AT_ONCE} requests: {', '.join(f'{each:.2f}' for each in decode)} times ours")
        print(f"their steps with one prompt: {prompt[0]:.2f} times ours; with two: {prompt[1]:.2f}")
    print(f"requests/s; {', '.join(FIGURES)}: mean [lowest, highest] of the seeds")
    for rate in asked.rates:
        sent_s = [sent_at_s(rate, asked.requests, seed) for seed in range(1, asked.seeds + 1)]
        rows = {"ours": np.array([ours(own, each) for each in sent_s])}
        if asked.command and scaled:
            rows["AISimulate"] = np.array([trace_of_theirs(asked.command, each) for each in sent_s])
            rows["ours on its steps"] = np.array([ours(scaled, each) for each in sent_s])
        for name, found in rows.items():
            each = zip(found.mean(0), found.min(0), found.max(0), strict=True)
            text = ", ".join(f"{mean:,.1f} [{low:,.1f}, {high:,.1f}]" for mean, low, high in each)
            print(f"{rate}: {name}: {text}", flush=True)
        if scaled:
            off = np.median(rows["ours on its steps"] / rows["AISimulate"] - 1, axis=0)
            print(f"{rate}: the last off by {', '.join(f'{each:+.1%}' for each in off)} (median)", flush=True)
    for rate in FLEET_RATES:
        sent_s = [sent_at_s(rate, FLEET * asked.requests, seed) for seed in range(1, asked.seeds + 1)]
        for slower in (1.0, 1.1):
            found = np.array([in_time(replace(own, slower=slower), each) for each in sent_s])
            text = f"{found.mean():.0%} [{found.min():.0%}, {found.max():.0%}]"
            print(f"{FLEET} replicas, {rate:g} requests/s, steps {slower:g} times as long: {text} in time", flush=True)


if __name__ == "__main__":
    main()
