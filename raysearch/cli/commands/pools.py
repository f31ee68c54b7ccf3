"""`raysearch pools`: prefill and decode on one pool of GPUs or on two."""

from __future__ import annotations

import math
import sys
from dataclasses import replace
from typing import Annotated

import typer

from raysearch.base.errors import NOTHING_FEASIBLE, InputError
from raysearch.cli.commands.options import JsonOption, OutOption, print_json
from raysearch.cli.commands.question_options import loaded, takes_question
from raysearch.processes.claim import check_folder
from sim.config.question import Question
from sim.pools.traffic import Traffic, TrafficKind

_BATCHES = tuple(sorted({*(1 << power for power in range(13)), *(3 << power for power in range(11))}))
"""Powers of two and the middle between them. [assumed] the next finer grid, for times per pool of seconds."""


@takes_question
def compare_pools(
    question: Question,
    mix: Annotated[
        str | None,
        typer.Option(help="Requests of several lengths: ISL:OSL:SHARE, comma-separated.", show_default="--isl, --osl"),
    ] = None,
    requests_per_s: Annotated[
        float | None, typer.Option(help="Fewest GPUs for so many requests a second.", show_default="fill --gpus")
    ] = None,
    sweep: Annotated[
        list[str] | None,
        typer.Option(
            help="NAME=VALUE,VALUE,...: compare several values of isl, gpus, ttft-ms or requests-per-s. Repeatable."
        ),
    ] = None,
    kv_hidden: Annotated[
        float,
        typer.Option(help="Share of the KV cache's transfer that overlaps with prefill.", min=0.0, max=1.0),
    ] = 0.0,
    host_gb: Annotated[
        float, typer.Option(help="Memory of the hosts for KV caches, per GPU, where a pool re-shards.", min=0.0)
    ] = 200.0,
    host_gb_per_s: Annotated[float, typer.Option(help="A GPU's link to it, per direction.", min=1e-3)] = 50.0,
    out: OutOption = None,
    as_json: JsonOption = False,
) -> None:
    """Decide on disaggregation: prefill and decode on one pool of GPUs or on separate ones, each exactly optimised.

    One pool runs continuous batching. Two pools have their own strategies, sizes and numbers of replicas at one common
    rate, and the KV cache is sent between them. A pool that re-shards computes prompts with one strategy, moves its
    weights, decodes with another, and so on. Exact over all strategies, batches that are powers of two or half way
    between two, numbers of replicas and lengths of the cycle. Exits with 3 where none is feasible.

    \b
    Examples:
      raysearch pools --model llama_3_1_70b --gpus 16 --isl 8000 --osl 500 --tpot-ms 30 --ttft-ms 1000
      raysearch pools --model qwen3_235b_a22b --gpus 32 --mix 1000:200:7,16000:1000:3 --tpot-ms 50 --ttft-ms 2000
      raysearch pools --model llama_3_1_70b --gpus 32 --osl 500 --tpot-ms 30 --sweep isl=1000,4000,16000 \\
          --sweep ttft-ms=300,500,1000,2000,4000 --out results/pools
      raysearch pools --model llama_3_1_70b --gpus 64 --isl 8000 --osl 500 --tpot-ms 30 --sweep requests-per-s=0.5,2,8
    """
    from raysearch.base.progress import telling
    from raysearch.deploy.pools.pool_comparison import Case, along_traffic
    from raysearch.deploy.pools.pools_files import answers_dict, write_answers
    from sim.pools.matching import Limits
    from sim.pools.resharding import Host

    check_folder(out)
    if question.phase not in (None, "serve"):
        raise InputError(f"--phase {question.phase}: pools are compared in phase serve: leave it out")
    swept = _swept(sweep or [])
    mixes = _mixes(question, swept.get("isl"), mix)
    question = replace(
        question,
        phase="serve",
        isl=max(1, round(mixes[0].prompt_tokens)),
        osl=max(1, round(mixes[0].output_tokens)),
        gpus=int(max(swept["gpus"])) if "gpus" in swept else question.gpus,
    )
    workload = loaded(question)
    workload = replace(workload, degrees=replace(workload.degrees, batch=_BATCHES))
    sizes = [int(size) for size in swept.get("gpus", [workload.max_gpus])]
    ttfts = [each / 1e3 for each in swept["ttft-ms"]] if "ttft-ms" in swept else [workload.ttft_slo_s]
    loads: list[float | None] = [*swept["requests-per-s"]] if "requests-per-s" in swept else [requests_per_s]
    kept = 1 - workload.margin
    limits = [
        Limits(size, workload.tpot_slo_s * kept, ttft * kept, load)
        for size in sizes
        for ttft in ttfts
        for load in loads
    ]
    case = Case(
        replace(workload, tpot_slo_s=math.inf, ttft_slo_s=math.inf),
        mixes[0],
        limits[0],
        kv_hidden,
        Host(host_gb * 1e9, host_gb_per_s * 1e9),
    )
    with telling("pools") as tell:
        found = along_traffic(case, mixes, limits, tell)
    told = write_answers(found, question, out) if out is not None else answers_dict(found, question)
    if as_json:
        print_json(told)
    else:
        from raysearch.deploy.pools.pools_text import show_pools

        show_pools(found)
        if out is not None:
            print(f"Written: {out}")
    if not any(each.winner for each in found):
        print("Nothing is feasible within the limits: allow more time or GPUs.", file=sys.stderr)
        raise typer.Exit(NOTHING_FEASIBLE)


_SWEPT = {"isl": True, "gpus": True, "ttft-ms": False, "requests-per-s": False}
"""What may be swept, and whether it is whole."""


def _swept(texts: list[str]) -> dict[str, list[float]]:
    """Values by name of texts such as "isl=1000,8000"."""
    found: dict[str, list[float]] = {}
    for text in texts:
        name, _, values = text.partition("=")
        name = name.replace("_", "-")
        if name not in _SWEPT or name in found:
            known = ", ".join(_SWEPT)
            raise InputError(f"--sweep: expected NAME=VALUE,VALUE,... with a NAME of {known}, each once; got {text!r}")
        found[name] = _numbers(f"--sweep {name}", values, whole=_SWEPT[name])
    return found


def _numbers(option: str, text: str, *, whole: bool) -> list[float]:
    try:
        found = [float(each) for each in text.split(",")]
    except ValueError:
        found = []
    if not found or not all(0 < each < math.inf and not (whole and each % 1) for each in found):
        raise InputError(f"{option}: expected {'whole ' * whole}numbers above 0, comma-separated, got {text!r}")
    return sorted(set(found))


def _mixes(question: Question, lengths: list[float] | None, mix: str | None) -> list[Traffic]:
    """One mix per prompt length, or the one of --mix."""
    if mix is None:
        lengths = lengths or ([question.isl] if question.isl is not None else None)
        if question.workload is not None and lengths is None and question.osl is None:
            file = question.load()
            return [Traffic.of([TrafficKind(file.prompt_tokens, file.output_tokens)])]
        if lengths is None or question.osl is None:
            raise InputError("expected --isl and --osl, or --mix ISL:OSL:SHARE,...")
        return [Traffic.of([TrafficKind(int(length), question.osl)]) for length in lengths]
    if question.isl is not None or question.osl is not None or lengths is not None:
        raise InputError("give --isl and --osl, or --mix, not both")
    try:
        kinds = [each.split(":") for each in mix.split(",")]
        return [Traffic.of(TrafficKind(int(length), int(out), float(share)) for length, out, share in kinds)]
    except ValueError as error:
        form = "ISL:OSL:SHARE, comma-separated, as 1000:200:7,16000:1000:3"
        raise InputError(f"--mix: expected {form}, got {mix!r}") from error
