"""`raysearch validate`: what the simulator predicts, beside what was measured."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from raysearch.commands.options import JsonOption, print_json
from raysearch.errors import InputError

if TYPE_CHECKING:
    from raysearch.validation.figures import Comparison
    from sim.prices.calibration import Calibration

KERNEL_FAMILIES: Mapping[str, str] = {
    "gemm": "gemm",
    "attention_decode": "attention_decode",
    "attention_prefill": "attention_prefill",
    "mla_decode": "mla_decode",
    "moe": "moe",
    "collectives": "collectives",
    "moe_alltoall_deepep": "moe_alltoall_deepep",
    "p2p_send_recv_vidur": "send_recv",
}
"""Key in the report -> key of the calibration's tables."""
SERVING_FAMILIES: Mapping[str, str] = {
    "endtoend_ttft_tpot": "endtoend_ttft_tpot.csv",
    "endtoend": "endtoend.csv",
}


def validate(
    data: Annotated[Path, typer.Option("--data", "-d", help="Folder with CSV files of measurements.")],
    calibration: Annotated[
        str | None,
        typer.Option(
            help="Coefficients to check: name in configs/calibration, or the path of a JSON file.",
            show_default="those that the hardware names",
        ),
    ] = None,
    hardware: Annotated[
        str,
        typer.Option(help="The machine, for its peaks and its memory: name in configs/hardware, or a path."),
    ] = "h100_sxm",
    plots: Annotated[Path | None, typer.Option(help="Folder for a PNG per family, predicted against measured.")] = None,
    held_out: Annotated[
        bool, typer.Option("--held-out", help="Predict each row by a fit of this folder that did not see its shape.")
    ] = False,
    as_json: JsonOption = False,
) -> None:
    """Compare predictions with measured kernels, collectives and serving runs.

    Reads whichever files the folder holds; the others are reported as not checked. Errors are shares of the measured
    value; beside them stands the error of the bare roofline. With --held-out nothing that is predicted was fitted.

    \b
    Examples:
      raysearch validate --data measured/
      raysearch validate --data measured/ --json --plots pictures/
      raysearch validate --data measured/ --held-out
      raysearch validate --data measured/ --hardware my_machine.toml
    """
    from raysearch.progress import telling
    from raysearch.validation.figures import not_checked, report
    from sim.config.catalog import load_calibrated

    if not data.is_dir():
        raise InputError(f"no such folder: {data}")
    loaded, hbm_bytes = load_calibrated(hardware, calibration)
    result: dict[str, dict[str, Any]] = {}
    pictures: list[Path] = []
    with telling("validating") as tell:
        for name, compare in _comparisons(data, loaded, hbm_bytes, held_out=held_out).items():
            tell(name)
            comparison = compare()
            result[name] = not_checked("no such file") if comparison is None else report(comparison)
            if plots is not None and comparison is not None and result[name]["rows"]:
                from raysearch.validation.plots import plot_comparison

                pictures.append(plot_comparison(comparison, plots))
    if as_json:
        print_json(result)
        return
    _print(result, pictures)


def _comparisons(
    data: Path, calibration: Calibration, hbm_bytes: float, *, held_out: bool
) -> dict[str, Callable[[], Comparison | None]]:
    from raysearch.validation.kernels import compare_family
    from raysearch.validation.published import compare_published
    from raysearch.validation.serving import compare_serving

    def kernels(name: str, family: str) -> Callable[[], Comparison | None]:
        return lambda: compare_family(name, family, data, calibration, held_out=held_out)

    return {
        **{name: kernels(name, family) for name, family in KERNEL_FAMILIES.items()},
        "endtoend_ttft_tpot": lambda: compare_serving(data, calibration, hbm_bytes, held_out=held_out),
        "endtoend": lambda: compare_published(data, calibration, hbm_bytes),
    }


def _print(result: Mapping[str, Mapping[str, Any]], pictures: list[Path]) -> None:
    from raysearch.tables import plain_table, printer

    columns = ("family", "rows", "mean", "median", "p90", "bias", "rank", "bare roofline")
    rows: list[tuple[str, ...]] = []
    for name, family in result.items():
        rows.append((name, *_cells(family)) if family["rows"] else (f"{name}: {family['note'] or 'no rows'}",))
        rows += [(f"  {group['name']}", *_cells(group)) for group in family["groups"] if group["rows"]]
    console = printer()
    console.print(plain_table("Predicted against measured, relative errors", columns, rows, wrap=("family",)))
    serving = result["endtoend_ttft_tpot"]
    if serving["rows"]:
        console.print(_serving_lines(serving))
    for path in pictures:
        console.print(f"wrote {path}")


def _cells(figures: Mapping[str, Any]) -> tuple[str, ...]:
    shares = (figures[key] for key in ("mape", "median_ape", "p90_ape", "bias"))
    rank, light = figures["rank_correlation"], figures["roofline_mape"]
    return (
        f"{figures['rows']:,}",
        *(f"{share:.1%}" for share in shares),
        "-" if rank is None else f"{rank:.3f}",
        "-" if light is None else f"{light:.1%}",
    )


def _serving_lines(serving: Mapping[str, Any]) -> str:
    sure, disagg = serving["rows_that_state_their_batch"], serving["disagg"]
    lines = []
    if sure["rows"] and sure["rows"] < serving["rows"]:
        lines.append(
            f"serving, {sure['rows']} runs that state what could run at once: mean error {sure['mape']:.1%}, "
            f"median {sure['median_ape']:.1%}"
        )
    for name, found in serving["rank_correlation_within_workload"].items():
        kept = found["rows_that_state_their_batch"]
        if kept["mean"] is not None:
            lines.append(
                f"rank of tokens/s/GPU within {name.replace('_', ' x ')}: {found['mean']:.3f} over {found['groups']} "
                f"workloads; of those runs alone {kept['mean']:.3f}"
            )
    if disagg["rows"]:
        lines.append(f"{disagg['rows']} disaggregated decode workers: mean error {disagg['mape']:.1%}")
    return "\n".join(lines)
