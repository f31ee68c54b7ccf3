"""`raysearch verify`: whether results are what was written, and whether a certificate proves what it says."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, NamedTuple

import typer

from raysearch.base.errors import InputError, RunFailed
from raysearch.cli.commands.options import JsonOption, at_home, print_json
from sim.config.question import QUESTION_FIELDS
from sim.json_object import JsonFields

if TYPE_CHECKING:
    from sim.replay.goodput_search import BestGoodput


def verify_results(
    path: Annotated[
        Path,
        typer.Argument(metavar="PATH", help="Folder of results, certificate, or forecast.", callback=at_home),
    ],
    workload: Annotated[str | None, typer.Option("--workload", "-w", help=QUESTION_FIELDS["workload"].help)] = None,
    as_json: JsonOption = False,
) -> None:
    """Verify a study, a search, a tuning or an answer: every digest, every row, and each summary against its rows.

    Where answers are noisy, the best is a belief: that its strategy was called and kept all limits is checked.
    The certificate of an optimum is checked without a search, a forecast against its seal. Exits with 1 if anything
    cannot be trusted. No record runs code: name the workload of a certificate whose file declares choices of ops.

    \b
    Examples:
      raysearch verify results/smoke
      raysearch verify best.json
      raysearch verify best.json -w mine.toml
    """
    from raysearch.base.file_io import Damaged

    if workload is not None and not path.is_file():
        raise InputError(f"--workload is for the certificate of an optimum, and {path} is none")
    try:
        found = _file(path, workload) if path.is_file() else _folder(path)
    except Damaged as damage:
        raise RunFailed(str(damage)) from damage
    if as_json:
        print_json(found.fields)
    else:
        print(found.text)
    if damaged := found.fields.get("damaged"):
        raise RunFailed("; ".join(damaged.values()))


class _Checked(NamedTuple):
    """What was checked, in words and for programs."""

    text: str
    fields: JsonFields


def _folder(folder: Path) -> _Checked:
    """What was checked of a folder."""
    from raysearch.base.file_io import counted
    from raysearch.deploy.export.source import verified_answers
    from raysearch.deploy.live.session import is_tuning, verify_tuning
    from raysearch.studies.results import verify

    answers = verified_answers(folder)
    if is_tuning(folder):
        measurements = verify_tuning(folder)
        fields = {"folder": str(folder), "measurements": measurements, "damaged": {}}
        return _Checked(f"{counted(measurements, 'measurement')} verified: unchanged", fields)
    if answers:
        fields = {"folder": str(folder), "answers": answers, "damaged": {}}
        return _Checked(f"Unchanged: {', '.join(answers)}", fields)
    found = verify(folder)
    calls = sum(run["calls"] for run in found.runs)
    noisy = sum(bool(run.get("noise")) for run in found.runs)
    fields = {"folder": str(folder), "runs": len(found.runs), "calls": calls, "noisy": noisy, "damaged": found.damaged}
    text = f"{counted(len(found.runs), 'run')} with {counted(calls, 'call')} verified: unchanged"
    if noisy:
        text += f"; answers of {noisy} are noisy: their best was called and kept all limits, what is believed of it"
        text += " is not worked out again"
    return _Checked(text, fields)


def _file(path: Path, workload: str | None) -> _Checked:
    """What was checked of a file."""
    from raysearch.fidelity.forecasts.sealed_forecast import is_forecast, read_forecast

    if not is_forecast(path):
        return _certificate(path, workload)
    sealed = read_forecast(path)
    predictions = len(sealed["predictions"])
    fields = {"file": str(path), "date": sealed["date"], "predictions": predictions, "damaged": {}}
    return _Checked(f"{predictions:,} predictions are as they were sealed on {sealed['date']}", fields)


def _certificate(path: Path, workload_name: str | None) -> _Checked:
    """What a certificate proves."""
    from raysearch.base.file_io import degrees_text, strategy_dict
    from raysearch.base.progress import stepping
    from raysearch.optima.certificate_files import check_certificate

    with stepping(f"certificate {path}") as progress:
        checked = check_certificate(path, progress, named=workload_name)
    proof, workload = checked.proof, checked.workload
    fields = {
        "workload": workload.name,
        "question": checked.question.record(),
        "strategy": strategy_dict(proof.strategy) if proof.strategy else None,
        "tokens_per_s_per_gpu": proof.reached,
        "ranges": len(proof.leaves),
        "evaluated": checked.evaluated,
        **({"goodput": _goodput(checked.traffic).fields} if checked.traffic else {}),
    }
    best = degrees_text(proof.strategy) if proof.strategy else "nothing feasible"
    asked = ", ".join(f"{name} {value}" for name, value in fields["question"].items())
    text = (
        f"Proven: {best}, {proof.reached:,.2f} tokens/s/GPU, is the best of the space {workload.space!r} of "
        f"{workload.name} ({asked}); {len(proof.leaves):,} ranges of batches cover it, {checked.evaluated:,} "
        "strategies were evaluated"
    )
    if checked.traffic:
        text += (
            f". That is the steady state of a replica with whole prompts, no goodput. {_goodput(checked.traffic).text}"
        )
    return _Checked(text, fields)


def _goodput(traffic: BestGoodput) -> _Checked:
    """What was found again of the best goodput."""
    from raysearch.base.file_io import degrees_text, strategy_dict

    strategy = traffic.best.steady_state.strategy if traffic.best else None
    fields = {
        "strategy": strategy_dict(strategy) if strategy else None,
        "tokens_per_s_per_gpu": traffic.tokens_per_s_per_gpu,
        "bound_tokens_per_s_per_gpu": traffic.bound,
        "gap": traffic.gap,
        "proven": traffic.proven,
        "replayed": traffic.replayed,
    }
    best = f"{degrees_text(strategy)}, {traffic.tokens_per_s_per_gpu:,.2f} tokens/s/GPU" if strategy else "none"
    known = "proven: none has more" if traffic.proven else f"no other has more than {traffic.bound:,.2f}"
    text = f"Best goodput: {best}, {known} ({traffic.replayed:,} replays and the exact search repeated)"
    return _Checked(text, fields)
