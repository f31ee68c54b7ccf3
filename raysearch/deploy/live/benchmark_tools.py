"""Programs that measure a server: what starts each, and what its results say.

    python -m raysearch.deploy.live.benchmark_tools aiperf results 8

prints, of results on 8 GPUs, the line of JSON that `raysearch tune-live` reads.

Source: `aiperf profile --help` of 0.13.0 and its export_models.py; GuideLLM 0.8.1's schemas; vllm/benchmarks/serve.py
of 0.33.0; GenAI-Perf 0.0.16, whose options and results AIPerf kept.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from raysearch.base.errors import InputError, RunFailed
from raysearch.deploy.export.render import Argument, Command, Flag, Variable
from raysearch.simulators.measurement import Measurement
from sim.config.reading import Unreadable, parse_object, read_bytes
from sim.json_object import JsonObject
from sim.near_names import did_you_mean

RESULTS = "results"
"""Folder that a tool writes to, relative to where it runs."""
LONGEST_RESULTS_BYTES = 1 << 28
"""[assumed] GuideLLM keeps every request."""
_LARGEST = 1e12
"""[assumed] No tokens/s and no milliseconds reach it."""
_ROUNDS = 5
"""[assumed] Requests per place in the batch: one round to fill it, and four until it drains."""


@dataclass(frozen=True)
class BenchmarkLoad:
    """What a tool sends.

    Attributes:
        model: As the server names it.
        url: Of the server.
        prompt_tokens, output_tokens: Of every request.
        concurrency: Requests at once.
    """

    model: Argument
    url: Argument
    prompt_tokens: int
    output_tokens: int
    concurrency: int

    @property
    def requests(self) -> int:
        """Requests in all."""
        return _ROUNDS * self.concurrency


@dataclass(frozen=True)
class Tool:
    """A program that measures a server.

    Attributes:
        command: What starts it, results going to `RESULTS`.
        file: The results, below that folder.
        figures: (output tokens/s, ms per output token, ms to the first token) that they have, means.
    """

    command: Callable[[BenchmarkLoad], Command]
    file: str
    figures: Callable[[JsonObject], tuple[float, float, float]]


def _aiperf(load: BenchmarkLoad) -> Command:
    flags: tuple[Flag, ...] = (
        ("--model", load.model),
        ("--url", load.url),
        ("--endpoint-type", "chat"),
        ("--streaming", None),
        ("--isl", load.prompt_tokens),
        ("--osl", load.output_tokens),
        ("--extra-inputs", "ignore_eos:true"),
        ("--concurrency", load.concurrency),
        ("--warmup-request-count", load.concurrency),
        ("--request-count", load.requests),
        ("--output-artifact-dir", RESULTS),
    )
    return Command(("aiperf", "profile"), flags)


def _genai_perf(load: BenchmarkLoad) -> Command:
    flags: tuple[Flag, ...] = (
        ("--model", load.model),
        ("--url", load.url),
        ("--endpoint-type", "chat"),
        ("--streaming", None),
        ("--synthetic-input-tokens-mean", load.prompt_tokens),
        ("--synthetic-input-tokens-stddev", 0),
        ("--output-tokens-mean", load.output_tokens),
        ("--output-tokens-stddev", 0),
        ("--extra-inputs", "ignore_eos:true"),
        ("--concurrency", load.concurrency),
        ("--warmup-request-count", load.concurrency),
        ("--request-count", load.requests),
        ("--artifact-dir", RESULTS),
    )
    return Command(("genai-perf", "profile"), flags)


def _guidellm(load: BenchmarkLoad) -> Command:
    named = {} if isinstance(load.model, Variable) else {"model": load.model}
    backend = json.dumps({"kind": "openai_http", **named, "target": "" if isinstance(load.url, Variable) else load.url})
    target = backend
    if isinstance(load.url, Variable):
        target = replace(load.url, prefix=backend.removesuffix('"}'), suffix='"}')
    lengths = {"prompt_tokens": load.prompt_tokens, "output_tokens": load.output_tokens}
    flags: tuple[Flag, ...] = (
        ("--backend", target),
        ("--profile", json.dumps({"kind": "concurrent", "streams": [load.concurrency]})),
        ("--data", json.dumps({"kind": "synthetic_text", **lengths})),
        ("--constraint", json.dumps({"kind": "max_requests", "count": load.requests})),
        ("--output", json.dumps({"kind": "json", "path": f"{RESULTS}/benchmarks.json"})),
    )
    return Command(("guidellm", "run"), flags)


def _vllm_bench(load: BenchmarkLoad) -> Command:
    flags: tuple[Flag, ...] = (
        ("--model", load.model),
        ("--base-url", load.url),
        ("--dataset-name", "random"),
        ("--random-input-len", load.prompt_tokens),
        ("--random-output-len", load.output_tokens),
        ("--ignore-eos", None),
        ("--max-concurrency", load.concurrency),
        ("--num-prompts", load.requests),
        ("--percentile-metrics", "ttft,tpot,itl,e2el"),
        ("--save-result", None),
        ("--result-dir", RESULTS),
        ("--result-filename", "bench.json"),
    )
    return Command(("vllm", "bench", "serve"), flags)


def _of_profile(found: JsonObject) -> tuple[float, float, float]:
    """AIPerf's and GenAI-Perf's, milliseconds and tokens per second."""
    names = ("output_token_throughput", "inter_token_latency", "time_to_first_token")
    rate, tpot_ms, ttft_ms = (found[name]["avg"] for name in names)
    return rate, tpot_ms, ttft_ms


def _of_guidellm(found: JsonObject) -> tuple[float, float, float]:
    metrics = found["benchmarks"][-1]["metrics"]
    names = ("output_tokens_per_second", "inter_token_latency_ms", "time_to_first_token_ms")
    rate, tpot_ms, ttft_ms = (metrics[name]["successful"]["mean"] for name in names)
    return rate, tpot_ms, ttft_ms


def _of_vllm_bench(found: JsonObject) -> tuple[float, float, float]:
    return found["output_throughput"], found["mean_tpot_ms"], found["mean_ttft_ms"]


_TOOLS: Mapping[str, Tool] = {
    "aiperf": Tool(_aiperf, "profile_export_aiperf.json", _of_profile),
    "vllm-bench": Tool(_vllm_bench, "bench.json", _of_vllm_bench),
    "genai-perf": Tool(_genai_perf, "profile_export_genai_perf.json", _of_profile),
    "guidellm": Tool(_guidellm, "benchmarks.json", _of_guidellm),
}


def benchmark_tool(name: str) -> Tool:
    """The program of that name.

    Raises:
        InputError: There is none.
    """
    if name not in _TOOLS:
        raise InputError(f"unknown benchmark {name!r}: {did_you_mean(name, _TOOLS)}")
    return _TOOLS[name]


def measurement_of(tool: Tool, results: Path, gpus: int) -> Measurement:
    """What results say of a deployment on some GPUs.

    Raises:
        RunFailed: There are none, or they lack a figure.
    """
    path = results / tool.file
    try:
        rate, tpot_ms, ttft_ms = map(_positive, tool.figures(parse_object(read_bytes(path, LONGEST_RESULTS_BYTES))))
    except (OSError, Unreadable) as error:
        raise RunFailed(f"no results in {path}: {error}") from error
    except (KeyError, IndexError, TypeError, ValueError) as error:
        raise RunFailed(f"{path} lacks a figure: {error}") from error
    return Measurement(rate / gpus, tpot_ms / 1e3, gpus, ttft_s=ttft_ms / 1e3)


def _positive(figure: object) -> float:
    if isinstance(figure, bool) or not isinstance(figure, int | float) or not 0 < figure < _LARGEST:
        raise ValueError(f"expected a number above 0, got {figure!r:.80}")
    return float(figure)


def _main() -> None:
    """Prints what a tool's results say, as a benchmark of `raysearch tune-live` must."""
    try:
        name, results, gpus = sys.argv[1:]
        count = int(gpus)
    except ValueError:
        sys.exit(f"error: expected a tool ({', '.join(_TOOLS)}), the folder of its results and a number of GPUs")
    try:
        print(json.dumps(asdict(measurement_of(benchmark_tool(name), Path(results), count))))
    except (InputError, RunFailed) as error:
        sys.exit(f"error: {error}")


if __name__ == "__main__":
    _main()
