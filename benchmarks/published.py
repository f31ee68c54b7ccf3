"""Our optimum beside deployments that others tuned on the machine, on as many GPUs and with as many requests in flight.

    python benchmarks/published.py                    # prints the tables of docs/evidence/published.md
    python benchmarks/published.py --write            # and writes them there, all points into published.csv

Nothing is fitted to these: for each published layout, the exact best of what the engine supports is found on as many
GPUs at the same concurrency, and both are priced by our own figures.
"""

from __future__ import annotations

import argparse
import csv
import tomllib
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

from sim.config.question import Question
from sim.evaluation import Evaluation
from sim.layouts import layout_of
from sim.optimum.exact_search import find_best
from sim.optimum.spaces import Space, space_of
from sim.strategy import Strategy
from sim.workload import Workload

CONFIGS = Path(__file__).parents[1] / "configs" / "published"
PAGE = Path(__file__).parents[1] / "docs" / "evidence" / "published.md"
EVERY_POINT = PAGE.with_suffix(".csv")
HEADER = ("entry", "prompt/answer", "GPUs", "in flight", "theirs", "ours", "gain")
_BEGIN, _END = "<!-- table -->", "<!-- end of table -->"
_LAYOUTS = ("TP", "TEP", "DEP")
_LOADS = {"1 to 16": range(17), "17 to 64": range(17, 65), "more": range(65, 1 << 20)}
_FAR = 1.10


class Row(NamedTuple):
    """One published layout at one concurrency."""

    entry: str
    lengths: str
    gpus: int
    concurrency: int
    theirs: str
    ours: str
    gain: float | None

    def cells(self) -> list[str]:
        """As the page and the file have them."""
        gain = "" if self.gain is None else f"{self.gain:.2f}"
        return [self.entry, self.lengths, str(self.gpus), str(self.concurrency), self.theirs, self.ours, gain]


def rows(path: Path) -> Iterator[Row]:
    """The rows of one entry."""
    entry = tomllib.loads(path.read_text(encoding="utf-8"))
    for layout in entry["layouts"]:
        gpus, ep = layout["gpus"], layout["ep"]
        dp = gpus if layout["attention_dp"] else 1
        for concurrency in layout["concurrency"]:
            workload = Question(
                model=entry["model"],
                hardware=entry["hardware"],
                isl=entry["isl"],
                osl=entry["osl"],
                engine=entry["engine"],
                weights=entry["weights"],
                kv_cache="fp8",
                gpus=gpus,
                tpot_ms=0,
                ttft_ms=0,
                batches="powers_of_two",
                prompt_wait_steps=entry.get("prompt_wait_steps", 0),
                **_speculation(layout.get("draft_tokens", 0)),
            ).load()
            if workload.engine and "memory_share" in layout:
                memory = replace(workload.engine.memory, share=layout["memory_share"])
                workload = replace(workload, engine=replace(workload.engine, memory=memory))
            if experts := entry.get("expert_weights"):
                workload = replace(workload, model=replace(workload.model, expert_dtype=experts))
            theirs = best_of(workload, [(gpus // dp, dp, ep, 1)], concurrency)
            ours = best_of(workload, list(meshes(gpus)), concurrency)
            yield Row(
                entry["entry"],
                f"{entry['isl'] // 1024}k/{entry['osl'] // 1024}k",
                gpus,
                concurrency,
                name(gpus // dp, dp, ep, 1) + ("" if theirs else ", does not fit"),
                _name_of(ours.strategy) if ours else "nothing fits",
                round(ours.tokens_per_s_per_gpu / theirs.tokens_per_s_per_gpu, 2) if ours and theirs else None,
            )


def _speculation(tokens: int) -> dict[str, Any]:
    """Fields of a question with so many tokens drafted per step by multi-token prediction."""
    return {"draft_tokens": tokens, "draft": "mtp"} if tokens else {}


def meshes(gpus: int) -> Iterator[tuple[int, int, int, int]]:
    """(tp, dp, ep, pp) of so many GPUs, powers of two, experts all or nothing or shared by some."""
    powers = [1 << power for power in range(gpus.bit_length())]
    for pp in powers:
        stage = gpus // pp
        for tp in powers:
            if stage % tp == 0:
                yield from ((tp, stage // tp, ep, pp) for ep in powers if stage % ep == 0)


def best_of(workload: Workload, shapes: list[tuple[int, int, int, int]], concurrency: int) -> Evaluation | None:
    """The best feasible strategy on exactly these meshes at a concurrency of one replica, or None."""
    space, found = space_of(workload), []
    for tp, dp, ep, pp in shapes:
        if concurrency % pp or concurrency < pp:
            continue
        part = _only(space, tp, dp, ep, pp, concurrency // pp)
        evaluation = find_best(part).evaluation if part.size else None
        if evaluation is not None and evaluation.feasible:
            found.append(evaluation)
    return max(found, key=lambda each: each.tokens_per_s_per_gpu, default=None)


def _only(space: Space, tp: int, dp: int, ep: int, pp: int, batch: int) -> Space:
    return replace(space, tp=(tp,), cp=(1,), dp=(dp,), ep=(ep,), pp=(pp,), batch=(batch,))


def name(tp: int, dp: int, ep: int, pp: int) -> str:
    """The name of a layout as operators know it; degrees where it has none."""
    named = layout_of(Strategy(tp, ep, pp, 1, (), dp=dp))
    return named or (f"TP{tp} EP{ep}" if dp == 1 else f"DP{dp} TP{tp} EP{ep}") + (f" PP{pp}" if pp > 1 else "")


def _name_of(strategy: Strategy) -> str:
    return name(strategy.tp, strategy.attention_dp, strategy.ep, strategy.pp)


def read_rows() -> list[Row]:
    """Every point as it was written."""
    with EVERY_POINT.open(encoding="utf-8", newline="") as file:
        lines = list(csv.reader(file))[1:]
    return [
        Row(entry, lengths, int(gpus), int(concurrency), theirs, ours, float(gain) if gain else None)
        for entry, lengths, gpus, concurrency, theirs, ours, gain in lines
    ]


def summary(found: list[Row]) -> str:
    """How near their layouts are to our optima, by layout and load, and the points where they are not, in Markdown."""
    compared = [row for row in found if row.gain is not None]
    far = sorted((row for row in compared if _gain(row) >= _FAR), key=_gain, reverse=True)
    same = sum(row.theirs == row.ours for row in compared)
    pipelines = sum(" PP" in row.ours for row in compared)
    nowhere = sum(row.ours == "nothing fits" for row in found)
    return f"""\
Of {len(found)} published points {len(compared)} fit into memory by our figures. On {same} of these our optimum is the
published layout, on {sum(map(_close, compared))} it is less than 5 % faster, at {pipelines} it has a pipeline.
{len(found) - len(compared)} do not fit, {nowhere} of them in any layout. Points at which ours is less than 5 % faster,
by their layout and the requests in flight:

{_markdown([("layout", *_LOADS), *(_shares(compared, layout) for layout in _LAYOUTS)])}

The {len(far)} at which it is at least {_FAR - 1:.0%} faster:

{_markdown([HEADER, *(row.cells() for row in far)])}"""


def _gain(row: Row) -> float:
    return row.gain or 0.0


def _close(row: Row) -> bool:
    return _gain(row) < 1.05


def _shares(compared: list[Row], layout: str) -> list[str]:
    with_it = [row for row in compared if _layout(row) == layout]
    loads = [[row for row in with_it if row.concurrency in load] for load in _LOADS.values()]
    return [layout, *(f"{sum(map(_close, each))} of {len(each)}" if each else "-" for each in loads)]


def _layout(row: Row) -> str:
    return next(each for each in reversed(_LAYOUTS) if row.theirs.startswith(each))


def _markdown(lines: list[Sequence[str]]) -> str:
    head, *rest = lines
    return "\n".join("| " + " | ".join(cells) + " |" for cells in (head, ["---"] * len(head), *rest))


def main() -> None:
    """Prints the tables, or writes them into the page."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", action="store_true", help="write docs/evidence/published.md and published.csv")
    write = parser.parse_args().write
    found = [row for path in sorted(CONFIGS.glob("*.toml")) for row in rows(path)]
    text = summary(found)
    print(text)
    if write:
        with EVERY_POINT.open("w", encoding="utf-8", newline="") as file:
            csv.writer(file, lineterminator="\n").writerows([HEADER, *(row.cells() for row in found)])
        page = PAGE.read_text(encoding="utf-8")
        before, after = page.split(_BEGIN)[0], page.split(_END)[1]
        PAGE.write_text(f"{before}{_BEGIN}\n{text}\n{_END}{after}", encoding="utf-8")


if __name__ == "__main__":
    main()
