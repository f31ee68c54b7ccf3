"""`raysearch tune-live`: the real machine has the last word, in as few measurements as possible."""

from __future__ import annotations

import sys
from dataclasses import asdict, replace
from typing import TYPE_CHECKING, Annotated, Any

import typer

from raysearch.base.errors import NOTHING_FEASIBLE, InputError, Interrupted, RunFailed
from raysearch.base.file_io import degrees_text, results_folder, strategy_dict, write_record
from raysearch.base.priced_heading import priced_dict, priced_text
from raysearch.cli.commands.options import (
    BudgetOption,
    JsonOption,
    OutOption,
    ResumeOption,
    RetriesSetting,
    SeedOption,
    TimeoutSetting,
    print_json,
)
from raysearch.cli.commands.question_options import loaded, takes_question
from raysearch.cli.commands.settings import Setting
from raysearch.processes.claim import claimed
from sim.config.question import Question
from sim.json_object import JsonObject

if TYPE_CHECKING:
    from raysearch.deploy.live.decide import Decision, Measured
    from raysearch.deploy.live.deployment_candidates import Candidates
    from raysearch.deploy.live.session import Settings


_BUDGET = 50
_TIMEOUT_S = 3600.0
"""[assumed] An engine that starts, warms up and is measured fits."""


def _share(text: str) -> float:
    """A share given as 0.02, 2% or 2 %."""
    try:
        value = float(text.rstrip("% ")) / (100 if text.rstrip().endswith("%") else 1)
    except ValueError:
        value = -1.0
    if not 0 < value < 1:
        raise typer.BadParameter(f"expected a share such as 0.02 or 2%, got {text!r}")
    return value


@takes_question
def tune_live(
    question: Question,
    benchmark: Annotated[
        str,
        typer.Option(
            "--benchmark",
            help="module:function that takes (workload, strategy) and returns a Measurement, a folder of `export "
            "--benchmark TOOL`, or a shell command whose last line is JSON; {tp}, {batch}, ... are filled in",
        ),
    ],
    within: Annotated[str, Setting("Acceptable loss against the best, as 2% or 0.02.")] = "2%",
    certainty: Annotated[
        float, Setting("Stop once the best found is within `within` with this probability.", least=0.5, most=0.999)
    ] = 0.9,
    noise: Annotated[str, Setting("Relative standard deviation of repeated measurements.")] = "1%",
    budget: BudgetOption = None,
    timeout_s: TimeoutSetting = _TIMEOUT_S,
    retries: RetriesSetting = 1,
    seed: SeedOption = 0,
    out: OutOption = None,
    resume: ResumeOption = False,
    as_json: JsonOption = False,
) -> None:
    """Measure strategies on a real machine until the best is known, starting from the simulator's exact ranking.

    Each measurement also updates what is expected of similar strategies, and is on disk before the next one begins:
    Ctrl-C loses none, and the same command with --resume continues. With --model, batches are powers of two unless
    --set batches=any is given. Exits with 3 if nothing runs within the limits.

    \b
    Examples:
      raysearch tune-live -w mine.toml --benchmark my_cluster:measure
      raysearch tune-live --model qwen3_32b --isl 4000 --osl 500 --gpus 8 \\
        --tpot-ms 30 --benchmark './bench.sh --tp {tp} --pp {pp} --concurrency {batch}' --out tuning
      raysearch export results/qwen --to vllm --benchmark aiperf --out bench
      raysearch tune-live --model qwen3_32b --isl 4000 --osl 500 --gpus 8 --tpot-ms 30 --benchmark bench
      raysearch tune-live -w mine.toml --benchmark my_cluster:measure --set within=1% --set certainty=0.95 --json
      raysearch tune-live -w mine.toml --benchmark my_cluster:measure --out tuning --resume
    """
    from raysearch.base.progress import stepping, telling
    from raysearch.deploy.export.source import TUNED_FILE
    from raysearch.deploy.live.benchmark import opened_benchmark
    from raysearch.deploy.live.deployment_candidates import candidates_of
    from raysearch.deploy.live.session import Folder, Settings, patient, tune
    from raysearch.processes.deadline import Patience
    from raysearch.processes.watcher import can_go_on_with, got_on
    from sim.optimum.spaces import space_of

    if question.model is not None and question.batches is None:
        question = replace(question, batches="powers_of_two")  # neighbours of a batch are not worth a measurement each
    workload = loaded(question)
    if resume and out is None:
        raise InputError("--resume needs --out, the folder of the tuning to continue")
    settings = Settings(_share(within), certainty, _share(noise), seed)
    patience = Patience(timeout_s, retries)
    path = results_folder(out, f"{workload.name}-tune-live")
    with (
        claimed(path, resume=resume),
        opened_benchmark(benchmark, workload, patience.timeout_s, path) as measure,
    ):
        with stepping(f"candidates of {workload.name}") as progress:
            candidates = candidates_of(space_of(workload), progress)
        if not len(candidates):
            raise InputError(
                f"no strategy of {workload.name} fits into memory and may keep the limits: see `raysearch optimum`"
            )
        folder = Folder(path, candidates, settings)
        seen = folder.resume() if resume else folder.begin()
        going_on = [] if resume else ["--resume"] if out else ["--out", str(path), "--resume"]
        can_go_on_with([*sys.argv[1:], *going_on])
        try:
            with telling(f"tuning {workload.name}") as tell:
                run = patient(measure, patience.retries, tell)

                def measured(index: int) -> Any:
                    strategy = candidates.strategies[index]
                    tell(f"measurement {len(seen) + 1}: {degrees_text(strategy)}")
                    answer = run(strategy)
                    folder.keep(index, answer)
                    got_on(len(seen) + 1)
                    return answer

                decisions = [step.decision for step in tune(candidates, settings, measured, seen, budget or _BUDGET)]
        except Interrupted as stop:
            raise Interrupted(stop.signum, f"{stop}; {_kept(len(seen), path)}") from None
        except RunFailed as failure:
            raise RunFailed(f"{failure}; {_kept(len(seen), path)}") from failure
        answer = _as_dict(candidates, settings, seen, decisions[-1]) | {"folder": str(path)}
        write_record(path / TUNED_FILE, {"question": question.record(), "best": answer["best"]})
    if as_json:
        print_json(answer)
    else:
        _print(candidates, answer)
    if decisions[-1].incumbent is None:
        raise typer.Exit(NOTHING_FEASIBLE)


def _kept(count: int, path: object) -> str:
    return f"{count} measurements, all kept in {path}; the same command with --out {path} --resume continues"


def _as_dict(candidates: Candidates, settings: Settings, seen: list[Measured], decision: Decision) -> JsonObject:
    incumbent = decision.incumbent
    low, middle, high = decision.tokens_per_s_per_gpu
    return {
        "workload": candidates.workload.name,
        **priced_dict(candidates.workload),
        "settings": asdict(settings),
        "candidates": len(candidates),
        "left_out": candidates.left_out,
        "best": None
        if incumbent is None
        else {
            "strategy": strategy_dict(candidates.strategies[incumbent]),
            "rank_by_simulator": incumbent + 1,
            "tokens_per_s_per_gpu": middle,
            "interval": [low, high],
            "confidence": decision.confidence,
        },
        "known": decision.confidence >= settings.confidence,
        "ended_because": _ending(settings, decision),
        "scale": decision.scale,
        "measurements": [
            {
                "strategy": strategy_dict(candidates.strategies[each.candidate]),
                "rank_by_simulator": each.candidate + 1,
                "predicted_tokens_per_s_per_gpu": candidates.evaluations[each.candidate].tokens_per_s_per_gpu,
                "predicted_tpot_s": candidates.evaluations[each.candidate].tpot_s,
                **asdict(each.measurement),
            }
            for each in seen
        ],
    }


def _ending(settings: Settings, decision: Decision) -> str:
    """Why nothing more was measured."""
    if decision.incumbent is not None and decision.confidence >= settings.confidence:
        return "the best is known"
    if decision.following is None:
        return "no candidate is left to measure"
    return "--budget was reached"


def _print(candidates: Candidates, answer: JsonObject) -> None:
    from raysearch.base.file_io import as_strategy
    from raysearch.base.rich_tables import plain_table, printer

    console = printer()
    console.print(priced_text(candidates.workload))
    rows = [
        (
            str(number),
            degrees_text(as_strategy(row["strategy"])),
            str(row["rank_by_simulator"]),
            f"{row['predicted_tokens_per_s_per_gpu']:,.1f}",
            row["unsupported"] or f"{row['tokens_per_s_per_gpu']:,.1f}",
            f"{row['predicted_tpot_s'] * 1e3:.1f}",
            f"{row['tpot_s'] * 1e3:.1f}" if row["tpot_s"] else "-",
        )
        for number, row in enumerate(answer["measurements"], start=1)
    ]
    columns = ("", "strategy", "rank", "predicted tok/s/GPU", "measured", "predicted ms/token", "measured")
    console.print(plain_table(f"Measurements of {answer['workload']}", columns, rows, left=2))
    left_out = f"; {answer['left_out']:,} far slower ones left out" if answer["left_out"] else ""
    console.print(f"{answer['candidates']:,} candidates{left_out}")
    if answer["best"] is None:
        console.print(f"Nothing that was measured runs within the limits; {answer['ended_because']}.")
        return
    best, settings = answer["best"], answer["settings"]
    low, high = best["interval"]
    console.print(
        f"Best: {degrees_text(as_strategy(best['strategy']))}, rank {best['rank_by_simulator']} by the simulator"
    )
    console.print(f"  {best['tokens_per_s_per_gpu']:,.1f} tokens/s/GPU, {low:,.1f} to {high:,.1f} at 90%")
    sure = f"within {settings['within']:.1%} of the best with probability {best['confidence']:.2f}"
    more = "" if answer["known"] else f"; {settings['confidence']:g} was requested: {answer['ended_because']}"
    console.print(f"  {sure}{more}")
    console.print(f"The simulator's errors here are {answer['scale']:.2f} times those that its intervals state.")
    console.print(f"Kept in {answer['folder']}")
