"""`raysearch pools`: prefill and decode on one pool of GPUs or on two."""

from __future__ import annotations

import math
import sys
from typing import Annotated

from raysearch.answers.compared_pools import SWEEPABLE, PoolsResult
from raysearch.base.errors import InputError
from raysearch.cli.commands.options import (
    AnswerOutOption,
    CvOption,
    JsonOption,
    PercentileOption,
    RequestsOption,
    RequestsPerSOption,
    TraceOption,
    exit_unless_feasible,
    show_result,
)
from raysearch.cli.commands.question_options import loaded, takes_question
from raysearch.cli.commands.settings import Setting
from raysearch.deploy.replay.trace_files import trace_file
from raysearch.processes.claim import check_folder
from sim.config.question import Question
from sim.pools.resharding import Host
from sim.pools.traffic import Traffic, TrafficKind


@takes_question
def show_pools(
    question: Question,
    mix: Annotated[
        str | None, Setting("Mix of request lengths: ISL:OSL:SHARE, comma-separated.", "--isl and --osl")
    ] = None,
    requests_per_s: RequestsPerSOption = None,
    sweep: Annotated[
        str | None,
        Setting(
            "Compare several values of isl, gpus, ttft-ms or requests-per-s: NAME=VALUE,VALUE;NAME=VALUE,VALUE.",
            "none",
        ),
    ] = None,
    kv_hidden: Annotated[
        float, Setting("Share of the KV cache's transfer that overlaps with prefill.", least=0.0, most=1.0)
    ] = 0.0,
    resharded: Annotated[
        bool, Setting("Also a pool that re-shards its weights between prefill and decode, which no engine can do yet.")
    ] = False,
    afd: Annotated[
        bool, Setting("Also a decode pool whose attention and experts have GPUs of their own (attention-FFN split).")
    ] = False,
    host_gb: Annotated[float, Setting("Host memory for KV caches per GPU, where a pool re-shards.", least=0.0)] = 200.0,
    host_gb_per_s: Annotated[float, Setting("A GPU's link to host memory, GB/s per direction.", least=1e-3)] = 50.0,
    cv: CvOption = 1.0,
    percentile: PercentileOption = 99.0,
    requests: RequestsOption = 2000,
    trace: TraceOption = None,
    out: AnswerOutOption = None,
    as_json: JsonOption = False,
) -> None:
    """Decide on disaggregation: prefill and decode on one pool of GPUs or on separate ones, each exactly optimised.

    One pool runs continuous batching. Two pools have their own strategies, sizes and numbers of replicas at a common
    rate, and the KV cache is sent between them. Exact over all strategies, batches and numbers of replicas; `recommend`
    answers the same for one set of lengths and limits. Exits with 3 if nothing is feasible.

    \b
    Examples:
      raysearch pools --model llama_3_1_70b --gpus 16 --isl 8000 --osl 500 --tpot-ms 30 --ttft-ms 1000
      raysearch pools --model qwen3_235b_a22b --gpus 32 --set mix=1000:200:7,16000:1000:3 --tpot-ms 50 --ttft-ms 2000
      raysearch pools --model llama_3_1_70b --gpus 32 --osl 500 --tpot-ms 30 \\
          --set "sweep=isl=1000,4000,16000;ttft-ms=300,500,1000,2000,4000" --out results/pools
      raysearch pools --model deepseek_v3 --hardware h200_sxm --gpus 72 --isl 4000 --osl 500 --tpot-ms 30 --set afd
      raysearch pools --model llama_3_1_70b --gpus 64 --isl 8000 --osl 500 --tpot-ms 30 \\
          --set sweep=requests-per-s=0.5,2,8
      raysearch pools --model qwen3_32b --gpus 16 --tpot-ms 30 --ttft-ms 2000 --set trace=conversation_trace.jsonl
    """
    from raysearch.base.progress import telling

    check_folder(out, "pools.json")
    with telling("pools") as tell:
        found = PoolsResult.of(
            question,
            mix=None if mix is None else _mix(mix),
            requests_per_s=requests_per_s,
            sweep=_swept(sweep.split(";") if sweep else []),
            kv_hidden=kv_hidden,
            host=Host(host_gb * 1e9, host_gb_per_s * 1e9) if resharded else None,
            cv=cv,
            percentile=percentile,
            requests=requests,
            trace=trace_file(trace),
            progress=tell,
            afd=afd,
        )
    loaded(found.question)  # which says what is to be known of the model
    if out is not None:
        found.write(out)
    show_result(found, as_json=as_json, written=out)
    if not found.feasible:
        print("Nothing is feasible within the limits: allow more time or GPUs.", file=sys.stderr)
    exit_unless_feasible(found)


def _swept(texts: list[str]) -> dict[str, list[float]]:
    """Values by name of texts such as "isl=1000,8000"."""
    found: dict[str, list[float]] = {}
    for text in texts:
        name, _, values = text.partition("=")
        name = name.replace("-", "_")
        if name not in SWEEPABLE or name in found:
            known = ", ".join(SWEEPABLE).replace("_", "-")
            raise InputError(f"--set sweep: expected NAME=VALUE,VALUE with a NAME of {known}, each once; got {text!r}")
        found[name] = _numbers(f"--set sweep: {name.replace('_', '-')}", values, whole=SWEEPABLE[name])
    return found


def _numbers(option: str, text: str, *, whole: bool) -> list[float]:
    try:
        found = [float(each) for each in text.split(",")]
    except ValueError:
        found = []
    if not found or not all(0 < each < math.inf and not (whole and each % 1) for each in found):
        raise InputError(f"{option}: expected {'whole ' * whole}numbers above 0, comma-separated, got {text!r}")
    return sorted(set(found))


def _mix(text: str) -> list[tuple[int, int, float]]:
    """Kinds of requests of texts such as "1000:200:7,16000:1000:3"."""
    try:
        kinds = [each.split(":") for each in text.split(",")]
        mix = [(int(length), int(out), float(share)) for length, out, share in kinds]
        Traffic.of(TrafficKind(*kind) for kind in mix)
    except ValueError as error:
        form = "ISL:OSL:SHARE, comma-separated, as 1000:200:7,16000:1000:3"
        raise InputError(f"--set mix: expected {form}, got {text!r}") from error
    return mix
