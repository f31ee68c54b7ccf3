"""Our best prefill and decode pools beside published ones, on as many GPUs and with no token later.

    python benchmarks/disaggregated.py                # prints the table of docs/evidence/published.md
    python benchmarks/disaggregated.py --write        # and writes it there

Of InferenceX's deployments under TensorRT-LLM (`configs/published/disaggregated.csv`) the middle one, by requests, of
each machine, format and way to draft, for prompts of 8k tokens. Both are priced by our own figures; ours is the best of
what the engine supports over batches that are powers of two and half way between.
"""

from __future__ import annotations

import argparse
import csv
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

from sim.config.question import Question
from sim.layouts import layout_of
from sim.ops.heuristics import megatron_dims
from sim.pools.best_pair import best_pair
from sim.pools.candidates import Replica, replica_of
from sim.pools.matching import Limits
from sim.pools.traffic import Traffic, TrafficKind, workload_of
from sim.simulate import evaluate
from sim.strategy import Strategy
from sim.workload import EVEN_ODDS, PhaseName, Workload, coarse_steps

FILE = Path(__file__).parents[1] / "configs" / "published" / "disaggregated.csv"
PAGE = Path(__file__).parents[1] / "docs" / "evidence" / "published.md"
MACHINES = {"h200": "h200_sxm", "b200": "b200_sxm", "b300": "b300_sxm", "gb200": "gb200_nvl72", "gb300": "gb300_nvl72"}
ISL, OSL = 8192, 1024
_BEGIN, _END = "<!-- pools -->", "<!-- end of pools -->"
_HEAD = ("machine", "experts", "drafts", "GPUs", "requests", "theirs", "ours", "ms a token", "gain")
Recipe = dict[str, str]


class Row(NamedTuple):
    """One published deployment, and ours."""

    cells: tuple[str, ...]
    gain: float

    def texts(self) -> tuple[str, ...]:
        """As the page has them."""
        return (*self.cells, f"{self.gain:.2f}")


def chosen() -> list[Recipe]:
    """The deployments of the table."""
    groups: dict[tuple[str, ...], list[Recipe]] = defaultdict(list)
    with FILE.open(encoding="utf-8", newline="") as file:
        for recipe in csv.DictReader(file):
            if int(recipe["isl"]) == ISL and recipe["model"] == "deepseek_v3":
                groups[recipe["machine"], recipe["precision"], str(recipe["draft_tokens"] != "0")].append(recipe)
    return [sorted(group, key=lambda each: int(each["requests"]))[len(group) // 2] for group in groups.values()]


def rows(machines: tuple[str, ...] = tuple(MACHINES)) -> Iterator[Row]:
    """The rows of some machines."""
    for recipe in chosen():
        if recipe["machine"] in machines and (found := row(recipe)):
            yield found


def row(recipe: Recipe) -> Row | None:
    """Theirs and ours; None where theirs has no room by our figures."""
    phases: tuple[PhaseName, ...] = ("prefill", "decode")
    counts = [int(recipe[f"{phase}_workers"]) for phase in phases]
    gpus = sum(count * int(recipe[f"{phase}_gpus"]) for count, phase in zip(counts, phases, strict=True))
    requests = int(recipe["requests"]) * (counts[1] if recipe["machine"] == "h200" else 1)  # there they are per worker
    workload, traffic = workload_of_recipe(recipe, gpus, requests // counts[1]), Traffic.of([TrafficKind(ISL, OSL)])
    prefills = [replica(workload, traffic, recipe, "prefill", batch) for batch in (1, 2, 4, 8)]
    decode = replica(workload, traffic, recipe, "decode", max(1, requests // counts[1]))
    able = [each for each in prefills if each]
    if not able or decode is None:
        return None
    prefill = max(able, key=lambda each: each.requests_per_s)
    theirs = min(counts[0] * prefill.requests_per_s, counts[1] * decode.requests_per_s)
    begin = prefill.evaluation.strategy, decode.evaluation.strategy
    ours = best_pair(workload, traffic, Limits(gpus, tpot_s=decode.latency_s), begin=begin)
    text = f"{counts[0]} x {_name(prefill)}; {counts[1]} x {_name(decode)}"
    if ours is None:
        return None
    cells = (
        workload.hardware.name,
        recipe["precision"],
        recipe["draft_tokens"],
        str(gpus),
        str(requests),
        f"{text}, {theirs * OSL / gpus:,.0f}",
        f"{ours.prefills} x {_name(ours.prefill)}; {ours.decodes} x {_name(ours.decode)}",
        f"{decode.latency_s * 1e3:.1f}, {ours.tpot_s * 1e3:.1f}",
    )
    return Row(cells, ours.requests_per_s / theirs)


def workload_of_recipe(recipe: Recipe, gpus: int, requests: int) -> Workload:
    """What is served, over few batches and that of the recipe."""
    drafts = int(recipe["draft_tokens"])
    workload = Question(
        model=recipe["model"],
        hardware=MACHINES[recipe["machine"]],
        engine="trtllm",
        isl=ISL,
        osl=OSL,
        gpus=gpus,
        tpot_ms=0,
        ttft_ms=0,
        weights="bf16" if recipe["precision"] == "fp4" else "fp8_block",
        kv_cache="fp8",
        confidence=EVEN_ODDS,
        **({"draft_tokens": drafts, "draft": "mtp"} if drafts else {}),
    ).load()
    if recipe["precision"] == "fp4":
        workload = replace(workload, model=replace(workload.model, expert_dtype="nvfp4"))
    dp = int(recipe["decode_gpus"]) if recipe["decode_attention_dp"] == "1" else 1
    few = {*coarse_steps(16384), max(1, requests // dp) * dp} & {*workload.degrees.batch}
    return replace(workload, degrees=replace(workload.degrees, batch=tuple(sorted(few))))


def replica(workload: Workload, traffic: Traffic, recipe: Recipe, phase: PhaseName, batch: int) -> Replica | None:
    """A worker of a pool with so many requests (of a prefill pool: on a rank); None where they have no room."""
    gpus, ep = int(recipe[f"{phase}_gpus"]), int(recipe.get(f"{phase}_ep", recipe[f"{phase}_gpus"]))
    dp = gpus if recipe[f"{phase}_attention_dp"] == "1" else 1
    whole = batch * dp if phase == "prefill" else max(1, batch // dp) * dp
    own = workload_of(traffic, replace(workload, tpot_slo_s=float("inf"), ttft_slo_s=float("inf")), phase)
    found = evaluate(own, Strategy(gpus // dp, ep, 1, whole, megatron_dims(own.model), dp=dp))
    return replica_of(own, traffic, found) if found.feasible else None


def _name(each: Replica) -> str:
    strategy = each.evaluation.strategy
    mixed = f"DP{strategy.attention_dp} TP{strategy.tp} EP{strategy.ep}" + f" PP{strategy.pp}" * (strategy.pp > 1)
    return layout_of(strategy) or mixed


def table(found: list[Row]) -> str:
    """The rows in Markdown."""
    lines = [_HEAD, ("---",) * len(_HEAD), *(each.texts() for each in found)]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def main() -> None:
    """Prints the table; with --write, into the page too."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", action="store_true", help="write it into docs/evidence/published.md")
    text = table(list(rows()))
    print(text)
    if parser.parse_args().write:
        head, _, rest = PAGE.read_text(encoding="utf-8").partition(_BEGIN)
        PAGE.write_text(f"{head}{_BEGIN}\n{text}\n{_END}{rest.partition(_END)[2]}", encoding="utf-8")


if __name__ == "__main__":
    main()
