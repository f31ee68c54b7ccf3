"""`raysearch validate`: what the simulator predicts, beside what was measured."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Annotated, cast

import typer

from raysearch.base.errors import InputError
from raysearch.cli.commands.options import (
    SYSTEM_HELP,
    JsonOption,
    MachineOption,
    MeasurementsArgument,
    at_home,
    print_json,
)
from raysearch.cli.commands.settings import Setting, takes_settings
from raysearch.processes.claim import check_folder

if TYPE_CHECKING:
    from raysearch.fidelity.calibration.deployments import MeasuredMachine
    from raysearch.fidelity.calibration.intervals import Coverage
    from raysearch.fidelity.validation.error_figures import (
        Comparison,
        ErrorFigures,
        FamilyErrors,
        PartErrors,
        ServingErrors,
    )
    from sim.json_object import JsonFields
    from sim.prices.calibration import Calibration

KERNEL_FAMILIES: Mapping[str, str] = {
    "gemm": "gemm",
    "attention_decode": "attention_decode",
    "attention_prefill": "attention_prefill",
    "attention_window_decode": "attention_decode",
    "attention_window_prefill": "attention_prefill",
    "mla_decode": "mla_decode",
    "modules": "sparse_attention",
    "linear_attention": "state",
    "moe": "moe",
    "collectives": "collectives",
    "moe_alltoall_deepep": "moe_alltoall_deepep",
    "p2p_send_recv_vidur": "send_recv",
}
"""Key in the report -> key of the calibration's tables."""


_SHOWN = 3
"""Rows that a line about what was skipped names; --json has all."""


@takes_settings
def validate(
    path: MeasurementsArgument,
    calibration: Annotated[
        str | None,
        Setting(
            "Coefficients to check: name in configs/calibration, or the path of a JSON file.",
            "the hardware file's",
        ),
    ] = None,
    hardware: MachineOption = "h100_sxm",
    out: Annotated[
        Path | None,
        typer.Option("--out", "-o", help="Folder for a PNG per family, predicted against measured.", callback=at_home),
    ] = None,
    system: Annotated[str, Setting(SYSTEM_HELP)] = "",
    held_out: Annotated[bool, Setting("Predict each row by a fit to this folder that has not seen its shape.")] = False,
    as_json: JsonOption = False,
) -> None:
    """Compare predictions with measured kernels, collectives and serving runs.

    Reads whichever files the folder contains; the others are reported as not checked. Errors are relative to the
    measured value; the bare roofline's are shown for comparison. With --set held_out, no row is predicted by a fit that
    has seen it. Serving runs are predicted by the function that searches use; rows that it cannot predict are listed
    with the reason. A file of InferenceX's published results can replace the folder.

    \b
    Examples:
      raysearch validate measured/
      raysearch validate measured/ --json --out pictures/
      raysearch validate measured/ --set held_out
      raysearch validate measured/ --hardware my_machine.toml
      raysearch validate published.json --hardware mi355x
      raysearch validate aiter/configs --hardware mi355x --set system=gfx950
    """
    from raysearch.base.progress import telling
    from raysearch.fidelity.calibration.public_database import public_tables
    from raysearch.fidelity.validation.error_figures import error_report, not_checked
    from sim.config.catalog import load_calibrated, load_machine, load_machine_header, measured_machine

    if not path.exists():
        raise InputError(f"no such file or folder: {path}")
    check_folder(out)
    loaded = load_calibrated(hardware, calibration)
    machine = load_machine(hardware, loaded) if calibration else measured_machine(hardware)
    result: dict[str, FamilyErrors] = {}
    with telling("validating") as tell, TemporaryDirectory() as tables:
        folder = path
        if system:
            folder = Path(tables)
            public_tables(path, system, int(load_machine_header(hardware)["machine"]["sms"]), folder)
        for name, compare in _comparisons(folder, loaded, machine, held_out=held_out).items():
            tell(name)
            comparison = compare()
            result[name] = not_checked("no such file") if comparison is None else error_report(comparison)
            if out is not None and comparison is not None and result[name]["rows"]:
                from raysearch.fidelity.validation.plots import plot_comparison

                result[name]["picture"] = str(plot_comparison(comparison, out))
    if as_json:
        print_json(result)
    else:
        _print(result, "" if held_out else _in_sample(loaded.data.get("serving", {})))


def _comparisons(
    data: Path, calibration: Calibration, machine: MeasuredMachine, *, held_out: bool
) -> dict[str, Callable[[], Comparison | None]]:
    from raysearch.fidelity.validation.kernel_errors import compare_family
    from raysearch.fidelity.validation.published_deployments import compare_published
    from raysearch.fidelity.validation.serving_errors import compare_serving

    def kernels(name: str, family: str) -> Callable[[], Comparison | None]:
        return lambda: compare_family(name, family, data, calibration, held_out=held_out)

    return {
        **{name: kernels(name, family) for name, family in KERNEL_FAMILIES.items()},
        "endtoend_ttft_tpot": lambda: compare_serving(data, calibration, machine, held_out=held_out),
        "endtoend": lambda: compare_published(data, calibration, machine),
    }


def _print(result: Mapping[str, FamilyErrors], in_sample: str) -> None:
    from raysearch.base.rich_tables import plain_table, printer

    columns = ("family", "rows", "mean", "median", "p90", "bias", "rank", "in 90 %", "bare roofline")
    rows: list[tuple[str, ...]] = []
    for name, family in result.items():
        rows.append((name, *_cells(family)) if family["rows"] else (f"{name}: {family['note'] or 'no rows'}",))
        rows += [(f"  {group['name']}", *_cells(group)) for group in family["groups"] if group["rows"]]
    console = printer()
    console.print(plain_table("Predicted against measured, relative errors", columns, rows, wrap=("family",)))
    for part in result["moe"].get("by_expert_parallel_degree", ()):
        console.print(
            f"moe, expert-parallel degree {part['degree']}: {part['rows']:,} rows, bias {part['bias']:+.1%}, "
            f"{part['coverage']:.0%} inside their 90 % interval"
        )
    serving = result["endtoend_ttft_tpot"]
    if serving["rows"] or serving.get("disagg", {}).get("rows"):
        console.print(_serving_lines(cast("ServingErrors", serving)))
    if serving["rows"] and in_sample:
        console.print(in_sample)
    for line in _lines(result):
        console.print(line, highlight=False, markup=False, soft_wrap=True)
    for family in result.values():
        if "picture" in family:
            console.print(f"wrote {family['picture']}")


def _in_sample(serving: JsonFields) -> str:
    """That a machine's engine times have seen such runs, and what they err by where they have not; "" if none has."""
    from raysearch.fidelity.calibration.pooled_fit import JUDGED_BY

    if not serving.get("mape"):
        return ""
    errors = f"mean error {serving['mape']:.1%}, median {serving['median_ape']:.1%}"
    where = "with their workload held out"
    if "fitted together" in serving["source"] and serving["rows"] < JUDGED_BY:
        where = "of machines with more runs, each held out whole, as this one has few"
    return (
        f"serving: engines' times were fitted to such runs ({serving['rows']:,} of this machine); {where}: {errors} "
        "(docs/evidence/fidelity.md)"
    )


def _lines(result: Mapping[str, FamilyErrors]) -> Iterator[str]:
    """What was not predicted and what was read otherwise than stated, a line per reason."""
    parts = {name: (part["skipped"], part["reread"]) for name, part in result.items()}
    if disagg := result["endtoend_ttft_tpot"].get("disagg"):
        parts["disaggregated runs"] = disagg["skipped"], disagg["reread"]
    for name, (skipped, reread) in parts.items():
        for heading, found in (("rows not predicted", skipped), ("rows reinterpreted", reread)):
            for reason, rows in found.items():
                names = ", ".join(rows[:_SHOWN]) + ", ..." * (len(rows) > _SHOWN)
                yield f"{name}, {len(rows)} {heading}: {reason} ({names})"
        if name in KERNEL_FAMILIES and result[name]["rows"] and result[name]["note"]:
            yield f"{name}: {result[name]['note']}"


def _cells(figures: PartErrors) -> tuple[str, ...]:
    shares = (figures[key] for key in ("mape", "median_ape", "p90_ape", "bias"))
    light, coverage = figures["roofline_mape"], figures.get("coverage")
    return (
        f"{figures['rows']:,}",
        *(f"{share:.1%}" for share in shares),
        _rank(figures),
        "-" if coverage is None else f"{coverage:.0%}",
        "-" if light is None else f"{light:.1%}",
    )


def _serving_lines(serving: ServingErrors) -> str:
    sure, disagg = serving["rows_that_state_their_batch"], serving["disagg"]
    lines = []
    if sure["rows"] and sure["rows"] < serving["rows"]:
        lines.append(
            f"serving, {sure['rows']} runs that state their maximum batch: mean error {sure['mape']:.1%}, "
            f"median {sure['median_ape']:.1%}"
        )
    for name, found in serving["rank_correlation_within_workload"].items():
        kept = found["rows_that_state_their_batch"]
        if kept["mean"] is not None:
            lines.append(
                f"rank of tokens/s/GPU within {name.replace('_', ' x ')}: {found['mean']:.3f} over {found['groups']} "
                f"workloads; of those runs alone {kept['mean']:.3f}"
            )
    for kind, covered in serving["interval"].items():
        lines.append(_coverage_line(kind, covered))
    if disagg["rows"]:
        parts = ", ".join(f"{name} {part['mape']:.0%}" for name, part in disagg["by_engine"].items() if part["rows"])
        lines.append(
            f"disaggregated runs, {disagg['rows']} of {disagg['rows'] + disagg['unpredicted']} predicted: "
            f"mean error of the time per token {disagg['mape']:.0%}, bias {disagg['bias']:+.0%} ({parts})"
        )
    for what, first in (
        (", without the queues that measured runs had", serving["ttft"]),
        (" of disaggregated runs, with their queues", disagg["ttft"]),
    ):
        if first["rows"]:
            lines.append(
                f"time to the first token{what}: {first['rows']} rows, "
                f"mean error {first['mape']:.0%}, median {first['median_ape']:.0%}, rank {_rank(first)}"
            )
    return "\n".join(lines)


_INTERVALS = {
    "stated": "90 % interval of the time per token as stated",
    "measured": "90 % interval of the time per token, held out by shape",
    "unmeasured": "the same where the model was never measured, held out by model",
    "bare": "the same without an engine's own times, held out by model",
}


def _coverage_line(kind: str, covered: Coverage) -> str:
    parts = {"dense": covered["dense"], "MoE": covered["moe"]}
    parts |= {f"{bounds} of the time for prompts": share for bounds, share in covered["by_share_of_prompts"].items()}
    by_part = ", ".join(f"{name} {share:.0%}" for name, share in parts.items() if share is not None)
    return f"{_INTERVALS[kind]}: {covered['all']:.0%} of {covered['rows']} rows inside ({by_part})"


def _rank(figures: ErrorFigures) -> str:
    rank = figures["rank_correlation"]
    return "-" if rank is None else f"{rank:.3f}"
