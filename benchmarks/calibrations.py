"""The shipped calibrations, made anew by the commands that made them, and where they say something else.

    python benchmarks/calibrations.py DATA                        # compares all of them
    python benchmarks/calibrations.py DATA l40s mi300x --write    # replaces two

DATA holds the folders of measured rows (`FOLDERS`). A machine's kernels come first, then, where it or its maker has
serving runs, the times of its engines by the kernels that are shipped: after a change of kernels, write these first.
A machine's kernels take a CPU minute, its engines some more (`--kernels`: not these). The H100's attention, and with
it its engines, are kept as they are (docs/evidence/fidelity.md says why), so they differ; and so are experts, mixers
(but GB300's) and modules of machines with serving runs, whose sums have no terms of waves and of the L2 cache.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from contextlib import redirect_stdout
from io import StringIO
from pathlib import Path
from tempfile import TemporaryDirectory

from raysearch.cli.app import app
from raysearch.fidelity.calibration.coefficients import write_coefficients
from sim.config.files import config_path
from sim.json_object import JsonObject

_DATABASE = ": aiconfigurator-core 0.12.0 (Apache-2.0), AIConfigurator performance database, a half of its rows"
_AMD = "ROCm/aiter, aiter/configs on 2026-08-22 (MIT), half of its rows"
_H100 = (
    "NVIDIA H100 80GB HBM3 (SXM): AIConfigurator performance database 0.12.0 (aiconfigurator-core, Apache-2.0); send "
    "and receive: Vidur, data/profiling/network/h100_dgx at 7d475133 (MIT); experts of 4 bits and SGLang's attention "
    "of prompts: H200 SXM's kernels, of the same chip"
)
FOLDERS: dict[str, tuple[tuple[str, ...], str, tuple[str, ...]]] = {
    "h200_sxm": (("h200_sxm_measured",), "NVIDIA H200 SXM" + _DATABASE, ()),
    "h100_sxm": (("h100_measured", "h100_sxm_more"), _H100, ("sister=h200_sxm",)),
    "b200_sxm": (("b200_sxm_measured",), "NVIDIA B200 SXM" + _DATABASE, ()),
    "b300_sxm": (("b300_sxm_measured",), "NVIDIA B300 SXM" + _DATABASE, ()),
    "gb200_nvl72": (("gb200_measured",), "NVIDIA GB200 NVL72" + _DATABASE, ()),
    "gb300_nvl72": (("gb300_measured",), "NVIDIA GB300 NVL72" + _DATABASE, ()),
    "a100_80_sxm": (("a100_sxm_measured",), "NVIDIA A100-SXM4-80GB" + _DATABASE, ()),
    "l40s": (("l40s_measured",), "NVIDIA L40S" + _DATABASE, ()),
    "rtx_pro_6000_server": (
        ("rtx_pro_6000_server_measured",),
        "NVIDIA RTX PRO 6000 Blackwell Server Edition" + _DATABASE,
        (),
    ),
    "mi300x": (("amd_measured",), _AMD, ("system=gfx942",)),
    "mi325x": (("amd_measured",), _AMD, ("system=gfx942",)),
    "mi355x": (("amd_measured",), _AMD, ("system=gfx950",)),
}
"""Folders of a machine's rows, where these come from, and settings of `raysearch calibrate`."""
SERVED = ("h200_sxm", "b200_sxm", "b300_sxm", "gb200_nvl72", "gb300_nvl72", "mi300x", "mi325x", "mi355x")
"""Machines whose engines are fitted to all runs together; the H100's have a fit of their own, beside its kernels."""
RUNS = ("serving_measured", "h100_sxm=h100_measured", "inferencex_runs/runs.csv")


def main() -> None:
    """Says of each machine which parts differ from what is shipped; with --write, replaces it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("data", type=Path)
    parser.add_argument("machines", nargs="*", help=f"of {', '.join(FOLDERS)}; all, if none is named")
    parser.add_argument("--kernels", action="store_true", help="leave the engines' times as they are")
    parser.add_argument("--write", action="store_true", help="replace configs/calibration")
    options = parser.parse_args()
    if unknown := set(options.machines) - set(FOLDERS):
        parser.error(f"no such machine: {', '.join(sorted(unknown))}")
    for machine in options.machines or FOLDERS:
        parts: list[tuple[str, Callable[[Path, str, Path], JsonObject]]] = [("kernels", _kernels)]
        if machine in SERVED and not options.kernels:
            parts.append(("engines", _engines))
        for part, fitted in parts:
            path = config_path("calibration", machine)
            shipped = json.loads(path.read_text(encoding="utf-8"))
            with TemporaryDirectory() as folder:
                anew = shipped | fitted(options.data, machine, Path(folder))
            print(f"{machine}, {part}: {', '.join(differing(shipped, anew)) or 'as shipped'}", flush=True)
            if options.write:
                write_coefficients(path, anew, force=True)


def _kernels(data: Path, machine: str, folder: Path) -> JsonObject:
    """All that `raysearch calibrate FOLDER` says."""
    names, source, settings = FOLDERS[machine]
    rows = data / names[0]
    if len(names) > 1:
        rows = folder / "rows"
        rows.mkdir()
        for path in sorted(path for name in names for path in (data / name).glob("*.csv")):
            (rows / path.name).symlink_to(path.resolve())
    return _calibrated(folder, rows, machine, *settings, f"source={source}")


def _engines(data: Path, machine: str, folder: Path) -> JsonObject:
    """The engines' times that `raysearch calibrate RUNS --set runs` says."""
    first, *rest = (f"{name}{data / path}" for name, path in _named(RUNS))
    found = _calibrated(folder, Path(first), machine, "runs", *(f"beside={each}" for each in rest))
    return {"serving": found["serving"]}


def _named(folders: tuple[str, ...]) -> list[tuple[str, str]]:
    parts = [text.rpartition("=") for text in folders]
    return [(f"{name}{sign}", path) for name, sign, path in parts]


def _calibrated(folder: Path, rows: Path, machine: str, *settings: str) -> JsonObject:
    out = folder / f"{machine}.json"
    chosen = [part for setting in settings for part in ("--set", setting)]
    with redirect_stdout(StringIO()):
        app(["calibrate", str(rows), "--hardware", machine, "--out", str(out), *chosen], standalone_mode=False)
    return json.loads(out.read_text(encoding="utf-8"))


def differing(shipped: JsonObject, anew: JsonObject) -> list[str]:
    """Families of kernels and parts of two calibrations that say something else, but for the day of the fit."""
    found = []
    for family in sorted({*shipped["families"], *anew["families"]}):
        records = [(each["families"].get(family), _of(each["series"], family)) for each in (shipped, anew)]
        if records[0] != records[1]:
            before, after = (record.get("mape") if record else None for record, _ in records)
            found.append(f"{family} ({before} -> {after})")
    return found + [
        part for part in ("serving", "grids", "machine", "speed_of_light") if shipped.get(part) != anew.get(part)
    ]


def _of(series: JsonObject, family: str) -> JsonObject:
    return {name: record for name, record in series.items() if name.split("/")[0] == family}


if __name__ == "__main__":
    main()
