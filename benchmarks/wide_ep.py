"""Published deployments of DeepSeek-V3 with wide expert parallelism beside our predictions.

    python benchmarks/wide_ep.py                      # prints the table of docs/evidence/published.md
    python benchmarks/wide_ep.py --write              # and writes it there

Nothing is fitted to these. Tokens are sent to their experts by DeepEP, copies of experts are placed by EPLB; where a
source names no batch, as many requests run as have room.
"""

from __future__ import annotations

import argparse
import csv
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from sim.config.question import Question
from sim.evaluation import Evaluation
from sim.ops.heuristics import megatron_dims
from sim.simulate import evaluate
from sim.strategy import Strategy
from sim.workload import Workload

FILE = Path(__file__).parents[1] / "configs" / "published" / "wide_ep.csv"
PAGE = Path(__file__).parents[1] / "docs" / "evidence" / "published.md"
_BEGIN, _END = "<!-- wide -->", "<!-- end of wide -->"
_HEAD = (
    "deployment",
    "machine",
    "phase",
    "GPUs",
    "prompt",
    "requests a GPU",
    "formats",
    "measured",
    "predicted",
    "90 %",
)


class Row(NamedTuple):
    """One deployment: measured and predicted tokens/s/GPU, and the interval of these."""

    cells: tuple[str, ...]
    measured: float
    predicted: float
    low: float
    high: float

    def texts(self) -> tuple[str, ...]:
        """As the page has them."""
        error = self.predicted / self.measured - 1
        inside = "" if self.low <= self.measured <= self.high else ", outside"
        ours = f"{self.predicted:,.0f} ({error:+.0%})"
        return (*self.cells, f"{self.measured:,.0f}", ours, f"{self.low:,.0f} to {self.high:,.0f}{inside}")


def rows() -> Iterator[Row]:
    """All of them, predicted."""
    with FILE.open(encoding="utf-8", newline="") as file:
        for stated in csv.DictReader(file):
            yield _predicted(stated)


def _predicted(stated: dict[str, str]) -> Row:
    gpus, phase, drafts = int(stated["gpus"]), stated["phase"], int(stated["draft_tokens"])
    overlap = stated["two_batch_overlap"] == "1"
    workload = Question(
        model="deepseek_v3",
        hardware=stated["hardware"],
        engine=stated["engine"],
        phase=phase,
        isl=int(stated["isl"]),
        osl=int(stated["osl"]),
        gpus=gpus,
        tpot_ms=0,
        ttft_ms=0,
        weights=stated["weights"],
        kv_cache=stated["kv_cache"],
        expert_exchange="all_to_all",
        redundant_experts=int(stated["redundant_experts"]),
        two_batch_overlap=overlap,
        draft_tokens=drafts or None,
        acceptance=stated["acceptance"] or None,
        routing="balanced" if stated["routing"] == "balanced" else "skewed",
    ).load()
    batch = int(stated["requests_per_gpu"]) * gpus if stated["requests_per_gpu"] else most_that_fit(workload, gpus)
    found = _at(workload, gpus, batch)
    rate = found.tokens_per_s_per_gpu
    took_s, (low_s, high_s) = (
        (found.ttft_s, found.ttft_interval_s) if phase == "prefill" else (found.tpot_s, found.tpot_interval_s)
    )
    features = [stated["weights"], *(["two batches"] if overlap else []), *([f"{drafts} draft"] if drafts else [])]
    cells = (
        f"[{stated['deployment']}]({_link(stated['source'])})" if "/" in stated["source"] else stated["deployment"],
        stated["hardware"],
        phase,
        str(gpus),
        stated["isl"],
        f"{batch // gpus}{'' if stated['requests_per_gpu'] else ' (full)'}",
        ", ".join(features),
    )
    return Row(cells, float(stated["tokens_per_s_per_gpu"]), rate, rate * took_s / high_s, rate * took_s / low_s)


def _link(source: str) -> str:
    return "https://" + source.partition(";")[0].partition(" ")[0]


def most_that_fit(workload: Workload, gpus: int) -> int:
    """Requests that have room on so many attention ranks."""
    low, high = 1, 4096
    while low < high:
        each = (low + high + 1) // 2
        crowded = any(limit.kind in ("hbm", "sequences") for limit in _at(workload, gpus, each * gpus).violations)
        low, high = (low, each - 1) if crowded else (each, high)
    return low * gpus


def _at(workload: Workload, gpus: int, batch: int) -> Evaluation:
    return evaluate(workload, Strategy(1, gpus, 1, batch, megatron_dims(workload.model), dp=gpus))


def table(found: list[Row]) -> str:
    """The rows in Markdown."""
    lines = [_HEAD, ("---",) * len(_HEAD), *(row.texts() for row in found)]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def main() -> None:
    """Prints the table; with --write, into the page too."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--write", action="store_true", help="write it into docs/evidence/published.md")
    text = table(list(rows()))
    print(text)
    if parser.parse_args().write:
        head, _, rest = PAGE.read_text(encoding="utf-8").partition(_BEGIN)
        PAGE.write_text(f"{head}{_BEGIN}\n{text}\n{_END}{rest.partition(_END)[2]}", encoding="utf-8")


if __name__ == "__main__":
    main()
