"""`raysearch calibrate`: fits the simulator's curves to measured kernels."""

from __future__ import annotations

from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated

import typer

from raysearch.cli.commands.options import (
    SYSTEM_HELP,
    JsonOption,
    MachineOption,
    MeasurementsArgument,
    at_home,
    file_to_write,
    print_json,
)
from raysearch.cli.commands.settings import Setting, takes_settings
from sim.config.catalog import load_calibrated, load_machine, load_machine_header
from sim.json_object import JsonObject


@takes_settings
def calibrate(
    path: MeasurementsArgument,
    out: Annotated[Path, typer.Option("--out", "-o", help="File of coefficients to write, .json.", callback=at_home)],
    source: Annotated[str, Setting("Where the rows come from, with version and licence; kept in the file.")] = "",
    hardware: MachineOption = "h100_sxm",
    runs: Annotated[
        bool,
        Setting("Keep the kernels; fit the engines' own times alone, to the serving runs of all machines together."),
    ] = False,
    anchor: Annotated[
        bool, Setting("With runs: correct the machine's engine times by the folder's few runs, per model.")
    ] = False,
    first_tokens: Annotated[
        bool,
        Setting("Write configs/first_tokens.json: what clients measure beside the steps of a replay, on all machines."),
    ] = False,
    beside: Annotated[
        list[str] | None, Setting("More folders of runs; NAME=FOLDER gives the machine for files that do not name one.")
    ] = None,
    system: Annotated[
        str,
        Setting(SYSTEM_HELP),
    ] = "",
    sister: Annotated[
        str,
        Setting(
            "A machine with the same chip, whose kernels fill in for formats that the folder lacks; with anchor, any "
            "machine, whose engine times are corrected."
        ),
    ] = "",
    force: Annotated[bool, Setting("Replace a file with other content.")] = False,
    as_json: JsonOption = False,
) -> None:
    """Fit efficiency curves and the collective model to measured rows, and show their errors on held-out rows.

    \b
    Reads whichever of these files the folder contains; kernels without a file keep the hardware file's medians:
      gemm.csv, attention_decode.csv, attention_prefill.csv, mla_decode.csv, modules.csv, linear_attention.csv, moe.csv,
      collectives.csv, moe_alltoall_deepep.csv, p2p_send_recv_vidur.csv

    \b
    With --set runs the machine's kernels stay, and its engines' times and intervals are fitted to the aggregated runs
    of all folders and machines together (endtoend_ttft_tpot.csv, or runs.csv with a column "system"). With --set anchor
    they are instead corrected by a few runs of your own. Either accepts a file of InferenceX's published results (the
    JSON of its dashboards) in place of a folder.

    \b
    Examples:
      raysearch calibrate measured/ --out my_machine.json
      raysearch calibrate mine/ --out mine.json --hardware b200_sxm --set runs --set anchor
      raysearch calibrate published.json --out m.json --hardware mi355x --set runs --set anchor --set sister=b200_sxm
      raysearch calibrate runs/ --out b200.json --hardware b200_sxm --set runs --set beside=h100_sxm=h100_runs/
      raysearch calibrate runs/ --out first_tokens.json --set first_tokens --set beside=h100_sxm=h100_runs/
      raysearch calibrate measured/ --out mine.json --hardware my_machine.toml --set source="own cluster" --json
      raysearch calibrate aiconfigurator_core.whl --out b200.json --hardware b200_sxm --set system=b200_sxm
      raysearch calibrate aiter/configs --out mi355x.json --hardware mi355x --set system=gfx950
    \b
    Then name the file in the hardware file: calibration = "mine.json"
    """
    from raysearch.base.progress import telling
    from raysearch.fidelity.calibration.coefficients import fit_directory, write_coefficients
    from raysearch.fidelity.calibration.public_database import public_tables

    file_to_write(out)
    if first_tokens:
        record = _first_tokens(path, beside or [], hardware)
        written = write_coefficients(out, record, force=force)
        if as_json:
            print_json({"out": str(out), "written": written, **record})
            return
        for figure, each in record["intervals"].items():
            held_out = each["held_out"]
            print(
                f"{figure}: {each['low']:.2f} to {each['high']:.2f} times the prediction, {held_out['inside']:.0%} of "
                f"{held_out['runs']:,} runs inside by those of other {held_out['by']}s"
            )
        print(f"{'wrote' if written else 'unchanged:'} {out}")
        return
    if runs:
        serving = _serving(path, beside or [], hardware, anchor=anchor, sister=sister)
        kernels = _kernels(hardware, source or path.name)
        written = write_coefficients(out, {**kernels, "serving": serving}, force=force)
        if as_json:
            print_json({"out": str(out), "written": written, "serving": serving})
            return
        own = serving.get("anchored_to", {})
        print(f"{own.get('runs', serving['rows'])} runs of {hardware}; {serving['source']}")
        whose = f"all runs of {sister or hardware}, " if own else ""
        print(f"error of {whose}workloads held out: mean {serving['mape']:.1%}, median {serving['median_ape']:.1%}")
        if own.get("runs"):
            print(
                f"error of your runs: {own['before']:.1%} before, {own['after']:.1%} corrected by all of them, "
                f"{own['held_out']:.1%} where each is corrected by those of other configurations alone"
            )
        print(f"{'wrote' if written else 'unchanged:'} {out}")
        return
    provenance = {"source": source, "date": f"{datetime.now(UTC):%Y-%m-%d}"}
    header = load_machine_header(hardware)
    with telling("calibrating") as tell, TemporaryDirectory() as tables:
        folder = path
        if system:
            folder = Path(tables)
            own = public_tables(path, system, int(header["machine"]["sms"]), folder)
            provenance["source"] = f"{source}; {own}" if source else own
        of_sister = load_calibrated(sister) if sister else None
        content = fit_directory(folder, provenance, header, partial(load_machine, hardware), tell, of_sister)
    kept = None if "serving" in content else (_own_coefficients(hardware) or {}).get("serving")
    if kept:
        content["serving"] = kept
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
    if kept:
        print(f"no serving runs: engines keep the times of {hardware}, fitted beside its former kernels")
    elif why := content.get("serving", {}).get("left_at_defaults"):
        print(f"serving left at the defaults: {why}")
    print(f"{'wrote' if written else 'unchanged:'} {out}")


def _own_coefficients(hardware: str) -> JsonObject | None:
    """What a machine's calibration has; None where all is carried over from another."""
    from sim.config.catalog import read_config
    from sim.config.files import config_path
    from sim.config.hardware_file import HardwareFile

    if read_config(config_path("hardware", hardware), HardwareFile).calibration is None:
        return None
    return dict(load_calibrated(hardware).data)


def _kernels(hardware: str, source: str) -> JsonObject:
    """Coefficients of a machine's kernels; none where all are carried over from another."""
    if (own := _own_coefficients(hardware)) is not None:
        return own
    provenance = {"source": source, "date": f"{datetime.now(UTC):%Y-%m-%d}"}
    return {
        "format": 2,
        "provenance": provenance,
        "families": {},
        **load_machine_header(hardware),
        "grids": {},
        "series": {},
    }


def _serving(path: Path, beside: list[str], hardware: str, *, anchor: bool, sister: str) -> JsonObject:
    """The key "serving" of a machine's coefficients, from the runs in some folders; see `calibrate`."""
    from raysearch.base.progress import telling
    from raysearch.fidelity.calibration.serving_pool import anchored_serving, measured_runs, pooled_serving
    from sim.config.catalog import load_hardware, measured_machine

    folders = _folders(path, beside, hardware)
    with telling("calibrating") as tell:
        tell("pricing runs")
        measured = measured_runs(folders, measured_machine)
        tell(f"fitting {len(measured.runs):,} runs")
        if not anchor:
            return pooled_serving(measured, hardware)
        whole = load_hardware(sister or hardware).curves
        return anchored_serving(whole.calibration.data.get("serving", {}) if whole else {}, measured, hardware)


def _first_tokens(path: Path, beside: list[str], hardware: str) -> JsonObject:
    """What configs/first_tokens.json holds, from the runs in some folders."""
    from raysearch.base.progress import stepping
    from raysearch.fidelity.validation.first_token_errors import first_token_record, first_token_runs

    with stepping("replaying runs") as step:
        return first_token_record(first_token_runs(_folders(path, beside, hardware), step))


def _folders(path: Path, beside: list[str], hardware: str) -> list[tuple[Path, str]]:
    """Each folder with a machine whose runs it has.

    Raises:
        InputError: There is no such folder.
    """
    from raysearch.base.errors import InputError
    from raysearch.fidelity.calibration.serving_fit import names_machines
    from sim.config.files import list_names

    folders: list[tuple[Path, str]] = []
    for text in [str(path), *beside]:
        name, _, folder = text.rpartition("=")
        if not Path(folder).exists():
            raise InputError(f"no such file or folder: {folder}")
        named = list_names("hardware") if names_machines(Path(folder)) else [hardware]
        folders += [(Path(folder), each) for each in ([name] if name else named)]
    return folders


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
