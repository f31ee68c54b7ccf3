"""`raysearch calibrate`: fits the simulator's curves to measured kernels."""

from __future__ import annotations

from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Annotated

import typer

from raysearch.cli.commands.options import JsonOption, MachineOption, MeasurementsArgument, at_home, print_json
from raysearch.cli.commands.settings import Setting, takes_settings
from sim.config.catalog import load_machine, load_machine_header
from sim.json_object import JsonObject


@takes_settings
def calibrate(
    path: MeasurementsArgument,
    out: Annotated[Path, typer.Option("--out", "-o", help="File of coefficients to write, .json.", callback=at_home)],
    source: Annotated[str, Setting("Where the rows come from, with version and licence; kept in the file.")] = "",
    hardware: MachineOption = "h100_sxm",
    force: Annotated[bool, Setting("Replace a file with other content.")] = False,
    as_json: JsonOption = False,
) -> None:
    """Fit efficiency curves and the collective model to measured rows, and show their errors on held-out rows.

    \b
    Reads whichever of these files the folder contains; a kernel family without one keeps the hardware file's medians:
      gemm.csv, attention_decode.csv, attention_prefill.csv, mla_decode.csv, moe.csv, collectives.csv,
      moe_alltoall_deepep.csv, p2p_send_recv_vidur.csv

    \b
    Examples:
      raysearch calibrate measured/ --out my_machine.json
      raysearch calibrate measured/ --out mine.json --hardware my_machine.toml --set source="own cluster" --json
    \b
    Then name the file in that hardware file: calibration = "mine.json"
    """
    from raysearch.base.errors import InputError
    from raysearch.base.progress import telling
    from raysearch.fidelity.calibration.coefficients import fit_directory, write_coefficients

    if out.suffix != ".json":
        raise InputError(f"--out takes the name of a .json file, got {str(out)!r}")
    provenance = {"source": source, "date": f"{datetime.now(UTC):%Y-%m-%d}"}
    header = load_machine_header(hardware)
    with telling("calibrating") as tell:
        content = fit_directory(path, provenance, header, partial(load_machine, hardware), tell)
    written = write_coefficients(out, content, force=force)
    if as_json:
        print_json(
            {"out": str(out), "written": written, "families": content["families"], "serving": content.get("serving")}
        )
        return
    _print(content["families"])
    for figures in content["families"].values():
        for name, why in figures.get("series_left_at_defaults", {}).items():
            print(f"{name} left at the defaults: {why}")
    if why := content.get("serving", {}).get("left_at_defaults"):
        print(f"serving left at the defaults: {why}")
    print(f"{'wrote' if written else 'unchanged:'} {out}")


_SHARES = ("mape", "median_ape", "p90_ape", "bias", "bare_roofline_mape")


def _print(families: dict[str, JsonObject]) -> None:
    from raysearch.base.rich_tables import plain_table, printer

    rows = [_row(name, figures) for name, figures in families.items()]
    columns = ("family", "rows", "mean error", "median", "p90", "bias", "bare roofline")
    printer().print(plain_table("Errors on held-out rows", columns, rows, wrap=("mean error",)))


def _row(name: str, figures: JsonObject) -> tuple[str, ...]:
    if "left_at_defaults" in figures:
        return (name, "-", f"left at the defaults: {figures['left_at_defaults']} ({figures['file']})", "", "", "", "")
    shares = (figures[key] for key in _SHARES)
    return (name, f"{figures['rows']:,}", *("-" if share is None else f"{share:.1%}" for share in shares))
