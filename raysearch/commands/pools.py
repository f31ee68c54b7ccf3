"""`raysearch pools`: prefill and decode on one pool of GPUs or on two."""

from __future__ import annotations

import math
import sys
from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer

from raysearch.commands.options import JsonOption, MarginOption, at_home, print_json
from raysearch.described import workload_of_options
from raysearch.errors import NOTHING_FEASIBLE, InputError
from raysearch.processes.claim import check_folder
from sim.pools.traffic import Kind, Traffic

_BATCHES = tuple(sorted({*(1 << power for power in range(13)), *(3 << power for power in range(11))}))
"""Powers of two and the middle between them. [assumed] the next finer grid, for times per pool of seconds."""


def compare_pools(
    model: Annotated[str, typer.Option(help="Name in configs/models, or the path of a TOML file.")],
    gpus: Annotated[str, typer.Option("--gpus", help="GPUs at hand; several, as 8,16,64, are compared.")],
    isl: Annotated[
        str | None, typer.Option(help="Tokens of a prompt; several, as 1000,8000, are compared.", show_default="--mix")
    ] = None,
    osl: Annotated[int | None, typer.Option(help="Tokens of an answer.", min=1, show_default="--mix")] = None,
    mix: Annotated[
        str | None,
        typer.Option(help="Requests of several lengths: ISL:OSL:SHARE, comma-separated.", show_default="--isl, --osl"),
    ] = None,
    hardware: Annotated[str, typer.Option(help="Name in configs/hardware, or the path of a TOML file.")] = "h100_sxm",
    tpot_ms: Annotated[float | None, typer.Option(help="Longest time per output token.", show_default="any")] = None,
    ttft_ms: Annotated[
        str | None,
        typer.Option(help="Longest time to the first token; several, as 500,1000, are compared.", show_default="any"),
    ] = None,
    requests_per_s: Annotated[
        str | None,
        typer.Option(
            help="Fewest GPUs for so many requests a second; several are compared.", show_default="fill --gpus"
        ),
    ] = None,
    engine: Annotated[
        str | None, typer.Option(help="vllm, sglang, trtllm, megatron_core, or an engine that a package adds.")
    ] = "vllm",
    space: Annotated[
        str | None, typer.Option(help="What may be searched, as of `optimum`.", show_default="the engine's")
    ] = None,
    weights: Annotated[
        str | None,
        typer.Option(
            help="bf16, fp8, fp8_block, mxfp4, nvfp4 or int4.", show_default="its published fp8, if the engine has it"
        ),
    ] = None,
    kv_cache: Annotated[str | None, typer.Option(help="bf16 or fp8.", show_default="fp8 if the engine has it")] = None,
    kv_hidden: Annotated[
        float,
        typer.Option(help="Share of the cache's transfer that hides behind computing the prompt.", min=0.0, max=1.0),
    ] = 0.0,
    host_gb: Annotated[
        float, typer.Option(help="Memory of the hosts for KV caches, per GPU, where a pool re-shards.", min=0.0)
    ] = 200.0,
    host_gb_per_s: Annotated[float, typer.Option(help="A GPU's link to it, per direction.", min=1e-3)] = 50.0,
    margin: MarginOption = None,
    out: Annotated[
        Path | None, typer.Option("--out", "-o", help="Folder for pools.json, pools.csv, pools.png.", callback=at_home)
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Say whether prefill and decode belong on GPUs of their own: the exact best of each way, and which wins.

    One pool runs continuous batching. Two pools have strategies, sizes and numbers of replicas of their own that go at
    one rate, and the KV cache travels between them. A pool that re-shards computes prompts with one strategy, moves its
    weights, decodes with another, and so on. Exact over all strategies, over batches that are powers of two or in the
    middle between two, over numbers of replicas and lengths of the cycle. Exits with 3 where no way is feasible.

    \b
    Examples:
      raysearch pools --model llama_3_1_70b --gpus 16 --isl 8000 --osl 500 --tpot-ms 30 --ttft-ms 1000
      raysearch pools --model qwen3_235b_a22b --gpus 32 --mix 1000:200:7,16000:1000:3 --tpot-ms 50 --ttft-ms 2000
      raysearch pools --model llama_3_1_70b --gpus 32 --isl 1000,4000,16000 --osl 500 --tpot-ms 30 \\
          --ttft-ms 300,500,1000,2000,4000 --out results/pools
      raysearch pools --model llama_3_1_70b --gpus 64 --isl 8000 --osl 500 --tpot-ms 30 --requests-per-s 0.5,2,8
    """
    from raysearch.pools.answer import Question, along_traffic
    from raysearch.pools.record import answers_dict, write_answers
    from raysearch.progress import telling
    from sim.pools.matching import Limits
    from sim.pools.resharding import Host

    check_folder(out)
    mixes = _mixes(isl, osl, mix)
    sizes = [int(each) for each in _numbers("--gpus", gpus, whole=True)]
    ttfts = [each / 1e3 for each in _numbers("--ttft-ms", ttft_ms)] if ttft_ms else [math.inf]
    loads: list[float | None] = [*_numbers("--requests-per-s", requests_per_s)] if requests_per_s else [None]
    said = {
        "model": model,
        "hardware": hardware,
        "phase": "serve",
        "isl": max(1, round(mixes[0].prompt_tokens)),
        "osl": max(1, round(mixes[0].output_tokens)),
        "engine": engine,
        "space": space or engine,
        "weights": weights,
        "kv_cache": kv_cache,
        "max_gpus": max(sizes),
        "margin": margin,
    }
    options = {name: value for name, value in said.items() if value is not None}
    workload = workload_of_options(dict(options))
    workload = replace(workload, degrees=replace(workload.degrees, batch=_BATCHES))
    tpot_s = math.inf if tpot_ms is None else tpot_ms / 1e3
    kept = 1 - workload.margin
    limits = [Limits(size, tpot_s * kept, ttft * kept, load) for size in sizes for ttft in ttfts for load in loads]
    question = Question(workload, mixes[0], limits[0], kv_hidden, Host(host_gb * 1e9, host_gb_per_s * 1e9))
    with telling("pools") as tell:
        found = along_traffic(question, mixes, limits, tell)
    told = write_answers(found, options, out) if out is not None else answers_dict(found, options)
    if as_json:
        print_json(told)
    else:
        from raysearch.pools.show import show

        show(found)
        if out is not None:
            print(f"Written: {out}")
    if not any(each.winner for each in found):
        print("No way keeps the limits: allow more time or GPUs.", file=sys.stderr)
        raise typer.Exit(NOTHING_FEASIBLE)


def _numbers(option: str, text: str, *, whole: bool = False) -> list[float]:
    try:
        found = [float(each) for each in text.split(",")]
    except ValueError:
        found = []
    if not found or not all(0 < each < math.inf and not (whole and each % 1) for each in found):
        raise InputError(f"{option}: expected {'whole ' * whole}numbers above 0, comma-separated, got {text!r}")
    return sorted(set(found))


def _mixes(isl: str | None, osl: int | None, mix: str | None) -> list[Traffic]:
    """One mix per prompt length, or the one of --mix."""
    if mix is None:
        if isl is None or osl is None:
            raise InputError("expected --isl and --osl, or --mix ISL:OSL:SHARE,...")
        return [Traffic.of([Kind(int(length), osl)]) for length in _numbers("--isl", isl, whole=True)]
    if isl is not None or osl is not None:
        raise InputError("give --isl and --osl, or --mix, not both")
    try:
        kinds = [each.split(":") for each in mix.split(",")]
        return [Traffic.of(Kind(int(length), int(out), float(share)) for length, out, share in kinds)]
    except ValueError as error:
        form = "ISL:OSL:SHARE, comma-separated, as 1000:200:7,16000:1000:3"
        raise InputError(f"--mix: expected {form}, got {mix!r}") from error
