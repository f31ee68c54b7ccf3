"""`raysearch forecast`: predictions of what is to be measured, sealed, and their score afterwards."""

from __future__ import annotations

import json
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from raysearch.cli.commands.options import JsonOption, at_home, file_to_write, print_json
from raysearch.cli.commands.settings import Setting, takes_settings

if TYPE_CHECKING:
    from raysearch.fidelity.forecasts.forecast_score import ForecastScore
    from sim.json_object import JsonObject


@takes_settings
def forecast_deployments(
    path: Annotated[
        list[Path],
        typer.Argument(
            metavar="FILE...",
            help="Files of announced runs, such as InferenceX's configs/nvidia-master.yaml; or a forecast to score.",
        ),
    ],
    out: Annotated[
        Path | None, typer.Option("--out", "-o", help="File of the forecast to write, .json.", callback=at_home)
    ] = None,
    score: Annotated[
        Path | None,
        typer.Option("--score", help="Published results to score a forecast against, .json or .csv.", callback=at_home),
    ] = None,
    known: Annotated[
        list[str] | None,
        Setting("Files of published results; runs that they contain are left out, since they are known already."),
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Predict the performance of announced deployments before anyone measures them, or score such a forecast.

    Predictions have 90 % intervals. The file has the version, the date, digests of its sources, and a digest of itself
    that exposes any change. What cannot be predicted is listed with the reason. Where AISimulate is installed, a score
    has its predictions, too.

    \b
    Examples:
      raysearch forecast nvidia-master.yaml amd-master.yaml --out forecast.json
      raysearch forecast nvidia-master.yaml --out forecast.json --set known=results.json
      raysearch forecast forecast.json --score results.json
    """
    from raysearch.base.errors import InputError
    from raysearch.base.file_io import SEAL, record_bytes, write_bytes
    from raysearch.base.progress import telling
    from raysearch.fidelity.forecasts import forecast_score, sealed_forecast
    from raysearch.fidelity.forecasts.published_results import entry_of, key_of, read_results

    if score is not None:
        if len(path) != 1 or out is not None:
            raise InputError("--score: expected one forecast file, and no --out")
        forecast, results = sealed_forecast.read_forecast(path[0]), read_results(score)
        with telling("asking AISimulate") as tell:
            found = forecast_score.score_of(forecast, results, _incumbent(tell))
        print_json(found) if as_json else _print_score(found)
        return
    out = file_to_write(out)
    measured = {entry_of(result.key) for file in known or () for result in read_results(Path(file))}
    with telling("forecasting") as tell:
        today = f"{datetime.now(UTC):%Y-%m-%d}"
        found = sealed_forecast.forecast_of(
            path, today, lambda point: entry_of(key_of(point.record())) in measured, tell
        )
    content = record_bytes(found)
    write_bytes(out, content)
    if as_json:
        print_json(found)
        return
    print(f"{len(found['predictions']):,} predictions; wrote {out}")
    for reason, entries in found["not_predicted"].items():
        print(f"not predicted, {len(entries)} entries: {reason}")
    print(f"{SEAL} {json.loads(content)[SEAL]}")


def _incumbent(tell: Callable[[str], object]) -> Callable[[JsonObject], float | None] | None:
    """AISimulate's time per token of a deployment, where it is installed."""
    from raysearch.base.extras import is_installed
    from raysearch.simulators.aisimulate import forecast_tpot_ms

    def asked(prediction: JsonObject) -> float | None:
        tell(f"{prediction['entry']}, {prediction['requests']} requests")
        return forecast_tpot_ms(prediction)

    return asked if is_installed("aisimulate") else None


def _print_score(found: ForecastScore) -> None:
    print(f"{found['measured']:,} of {found['predictions']:,} predictions of {found['date']} have been measured since")
    for name, title in (("time_per_token", "time per token"), ("tokens_per_s_per_gpu", "tokens/s/GPU")):
        if figures := found[name]:
            print(
                f"{title}: mean error {figures['mape']:.1%}, median {figures['median_ape']:.1%}, bias "
                f"{figures['bias']:+.1%}; {figures['inside']:.0%} in the 90 % interval, x{figures['width']:.2f} wide"
            )
    regret = found["regret"]
    rank = "-" if found["rank"] is None else f"{found['rank']:.3f}"
    lost = "" if regret["mean"] is None else f"; the others lose {regret['mean']:.1%} to the best measured"
    if beside := found["beside"]:
        ours, theirs = beside["ours"], beside["theirs"]
        print(
            f"AISimulate has a figure of {theirs['rows']} of them: mean error {theirs['mape']:.1%}, median "
            f"{theirs['median_ape']:.1%}, bias {theirs['bias']:+.1%}; ours on these {ours['mape']:.1%}, "
            f"{ours['median_ape']:.1%}, {ours['bias']:+.1%}"
        )
    print(f"rank correlation {rank}; of {regret['picks']} picks {regret['missed_the_limit']} miss their limit{lost}")
