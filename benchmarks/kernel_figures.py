"""The tables of kernels in docs/evidence/fidelity.md: errors on rows held out, as the shipped calibrations state them.

    python benchmarks/kernel_figures.py                # prints them
    python benchmarks/kernel_figures.py --write        # and writes them into the page

Mean and median of a family are those of `raysearch validate FOLDER --hardware MACHINE --set held_out`, which computes
them again from the rows; here they are read from `configs/calibration/`.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping
from pathlib import Path

from sim.config.catalog import load_calibration
from sim.json_object import JsonFields

PAGE = Path(__file__).parents[1] / "docs" / "evidence" / "fidelity.md"
MACHINES = {
    "h100_sxm": "H100 SXM",
    "h200_sxm": "H200 SXM",
    "b200_sxm": "B200 SXM",
    "b300_sxm": "B300 SXM",
    "gb200_nvl72": "GB200 NVL72",
    "gb300_nvl72": "GB300 NVL72",
    "a100_80_sxm": "A100 80 GB SXM",
    "l40s": "L40S",
    "rtx_pro_6000_server": "RTX PRO 6000 Server",
    "mi300x": "MI300X, MI325X",
    "mi355x": "MI355X",
}
FAMILIES = {
    "gemm": "GEMM",
    "attention_decode": "decode attention",
    "attention_prefill": "prompt attention",
    "mla_decode": "latent decode",
    "sparse_attention": "modules",
    "state": "linear mixers",
    "moe": "MoE layer",
    "collectives": "collectives",
    "moe_alltoall_deepep": "expert all-to-all",
}
_ENGINES = {"trtllm": "TensorRT-LLM", "vllm": "vLLM", "sglang": "SGLang"}
_KINDS: Mapping[str, Callable[[str], bool]] = {
    "DSA decode": lambda kind: kind.startswith("dsa") and kind.endswith("generation"),
    "DSA prompts": lambda kind: kind.startswith("dsa") and kind.endswith("context"),
    "V4 decode": lambda kind: kind[:3] in ("csa", "hca") and kind.endswith("generation"),
    "V4 prompts": lambda kind: kind[:3] in ("csa", "hca") and kind.endswith("context"),
    "MSA": lambda kind: kind.startswith("msa"),
}


def tables() -> dict[str, str]:
    """Each table of the page, by the name in its marks."""
    families, attention, modules = list[list[str]](), list[list[str]](), list[list[str]]()
    for name, title in MACHINES.items():
        data = load_calibration(name).data
        families.append([title, *(_family(data["families"].get(family, {})) for family in FAMILIES)])
        found = [[title], [title]]
        for at, whole in ((0, "attention_prefill"), (1, "sparse_attention")):
            if data["families"].get(whole, {}).get("rows"):
                found[at] += _attention(data["series"]) if at == 0 else _modules(data["series"])
        attention += [row for row in found[:1] if len(row) > 1]
        modules += [row for row in found[1:] if len(row) > 1]
    heads = (*_ENGINES.values(), "windows, decode", *(f"windows, prompts: {each}" for each in _ENGINES.values()))
    return {
        "kernels": _table(["machine", *FAMILIES.values()], families),
        "prompts": _table(["machine", *(f"prompts: {heads[0]}", *heads[1:])], attention),
        "modules": _table(["machine", *_KINDS], modules),
    }


def _family(record: JsonFields) -> str:
    if not record.get("rows"):
        return "-"
    return f"{record['mape']:.1%} / {record['median_ape']:.1%} of {record['rows']:,}"


def _mean(series: Mapping[str, JsonFields], wanted: Callable[[list[str]], bool], *, count: bool = False) -> str:
    """Mean error of the series whose name's parts are wanted; rows held out weigh alike."""
    names = [name for name in series if wanted(name.split("/")) and "measured_on" not in series[name]]
    rows = sum(series[name]["rows"] for name in names)
    if not rows:
        return "-"
    mean = sum(series[name]["rows"] * series[name]["mape"] for name in names) / rows
    return f"{mean:.1%} of {rows:,}" if count else f"{mean:.1%}"


def _attention(series: Mapping[str, JsonFields]) -> list[str]:
    def prompts(engine: str, *, windowed: bool) -> str:
        return _mean(
            series, lambda parts: parts[:2] == ["attention_prefill", engine] and (parts[-1] == "window") == windowed
        )

    windows = _mean(series, lambda parts: parts[0] == "attention_decode" and parts[-1] == "window", count=True)
    whole, under = ([prompts(engine, windowed=windowed) for engine in _ENGINES] for windowed in (False, True))
    return [*whole, windows, *under]


def _modules(series: Mapping[str, JsonFields]) -> list[str]:
    return [
        _mean(series, lambda parts, of=of: parts[0] == "sparse_attention" and of(parts[2]), count=True)
        for of in _KINDS.values()
    ]


def _table(heads: list[str], rows: list[list[str]]) -> str:
    lines = [heads, ["---"] * len(heads), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def written(page: str) -> str:
    """The page with today's tables between their marks."""
    for name, table in tables().items():
        head, begin, rest = page.partition(f"<!-- {name} -->\n")
        _, end, tail = rest.partition(f"\n<!-- end of {name} -->")
        if not (begin and end):
            raise SystemExit(f"{PAGE} has no marks of the table {name!r}")
        page = f"{head}{begin}{table}{end}{tail}"
    return page


def main() -> None:
    """Prints the tables; with --write, into the page too."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", action="store_true", help="write them into docs/evidence/fidelity.md")
    if parser.parse_args().write:
        PAGE.write_text(written(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
    for table in tables().values():
        print(table, end="\n\n")


if __name__ == "__main__":
    main()
