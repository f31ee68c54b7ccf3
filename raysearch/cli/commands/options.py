"""Options that several commands share, and how all of them print JSON."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import Annotated, Literal

import typer

from raysearch.answers.result import Result
from raysearch.base.errors import NOTHING_FEASIBLE, InputError
from raysearch.base.limits import LONGEST_TIMEOUT_S, MOST_CPUS, MOST_RETRIES, MOST_WORKERS
from raysearch.cli.commands.settings import Setting
from sim.config.question import QUESTION_FIELDS, option_of
from sim.json_object import JsonFields

_ADDRESS = re.compile(r"[A-Za-z][A-Za-z0-9+.-]+:/")


def at_home(path: Path | None) -> Path | None:
    """The path with its ~ expanded, which the shell leaves in `--out=~/x`: pandas would, and other libraries not."""
    if path is None:
        return None
    if found := _ADDRESS.match(str(path)):
        address = str(path).replace(found[0], f"{found[0]}/", 1)
        raise typer.BadParameter(
            f"{address}: expected a path of a file system, not an address; mount it, or copy the results there"
        )
    try:
        return path.expanduser()
    except RuntimeError as error:
        raise typer.BadParameter(f"{path}: {error}") from error


def file_to_write(out: Path | None, ending: str = ".json") -> Path:
    """The file of `--out`, before what goes into it is computed. Raises: InputError."""
    from raysearch.processes.claim import check_folder  # which imports gymnasium

    expected = f"expected the name of the {ending} file to write"
    if out is None:
        raise InputError(f"--out is missing: {expected}")
    if out.suffix != ending:
        raise InputError(f"--out: {expected}, got {str(out)!r}")
    if out.is_dir():
        raise InputError(f"--out: {expected}, got the folder {out}")
    check_folder(out.parent)
    return out


REPLAYS_HELP = (
    "Under random arrivals: strategies to replay at most before stopping the proof that none does better; fewer in "
    "`recommend`, which is to answer in seconds, than in `optimum`."
)
REQUESTS_HELP = "Requests in one simulated run; half as many in `place`, which simulates many placements."
CV_HELP = "Coefficient of variation of the gaps between arrivals; 1 is Poisson."
CvOption = Annotated[float, Setting(CV_HELP, least=0.05, most=20.0)]
PercentileOption = Annotated[
    float, Setting("Percentile of the latencies that must be within the limits.", least=0.001, most=100.0)
]
RequestsOption = Annotated[int, Setting(REQUESTS_HELP, least=10, most=10_000_000)]
TraceOption = Annotated[
    str | None, Setting("A recorded trace: Mooncake or Bailian (JSON lines), Azure or BurstGPT (CSV).", "none")
]
SEEDS_HELP = "Independent simulated runs per figure; twice as many in `place`, whose runs are half as long."
RequestsPerSOption = Annotated[
    float | None, typer.Option(help="Load: requests per second, over all replicas.", show_default="none")
]
ConcurrencyOption = Annotated[
    int | None,
    typer.Option(
        help="Load: concurrent requests, over all replicas; each is followed by the next once it is answered.",
        min=1,
        show_default="none",
    ),
]
AlternativeOption = Annotated[
    int,
    typer.Option(help="Which of a recommendation: 0 is the best, then its alternatives; of `pools`, a point.", min=0),
]
GPUS_HELP = QUESTION_FIELDS["gpus"].help
OUT_HELP = "Folder for the results, new or empty."
ANSWER_OUT_HELP = "Folder for the results; an earlier answer of the command there is replaced."
OutOption = Annotated[
    Path | None,
    typer.Option("--out", "-o", help=OUT_HELP, show_default="results/NAME-UTC TIME", callback=at_home),
]
AnswerOutOption = Annotated[
    Path | None, typer.Option("--out", "-o", help=ANSWER_OUT_HELP, show_default="nothing is written", callback=at_home)
]
ResultsArgument = Annotated[
    Path, typer.Argument(metavar="DIR", help="Folder of a study or of a search.", callback=at_home)
]
SimulatorOption = Annotated[
    str | None,
    typer.Option(
        help="Search another black box: module:function, or an installed entry point.", show_default="the built-in one"
    ),
]
StartSetting = Annotated[
    str | None,
    Setting(
        "Evaluate first: 'rule' (a rule of thumb), 'optimum' (the built-in simulator's), or what a folder or file has.",
        "nothing",
    ),
]
WorkersSetting = Annotated[
    int | None,
    Setting("Worker processes per run.", "by the time of an evaluation", least=0, most=MOST_WORKERS),
]
CpusPerWorkerSetting = Annotated[
    float, Setting("CPUs that Ray reserves for each worker; a fraction or a whole number.", least=0, most=MOST_CPUS)
]
GpusPerWorkerSetting = Annotated[
    float, Setting("GPUs that Ray reserves for each worker; a fraction or a whole number.", least=0, most=MOST_CPUS)
]
ReplaySetting = Annotated[
    Path | None, Setting("Folder of an identical search, whose workers' answers are taken in the same order.")
]
TimeoutSetting = Annotated[
    float,
    Setting(
        "Timeout of one evaluation in seconds; after it the evaluation counts as failed and its process is ended. "
        "Longer in `tune-live`, whose benchmark may start a server.",
        least=0,
        most=LONGEST_TIMEOUT_S,
    ),
]
OnFailureSetting = Annotated[
    Literal["stop", "infeasible"] | None,
    Setting(
        "When a --simulator keeps failing on a strategy: 'stop' the run, or count the strategy as 'infeasible'.", "stop"
    ),
]
RetriesSetting = Annotated[
    int, Setting("Retries of a failing evaluation before the run stops.", least=0, most=MOST_RETRIES)
]
SeedOption = Annotated[int, typer.Option(min=0, help="Random seed: equal seeds give equal evaluations, bit for bit.")]
BudgetOption = Annotated[
    int | None,
    typer.Option(
        "--budget",
        "-b",
        min=1,
        help="Strategies to evaluate, or to measure.",
        show_default="search: 4000, 300 of prior, or a heuristic's whole sweep; tune-live: 50",
    ),
]
ResumeOption = Annotated[bool, typer.Option("--resume", help="Continue what is unfinished in --out.")]
MachineOption = Annotated[str, typer.Option(help=QUESTION_FIELDS["hardware"].help)]
MeasurementsArgument = Annotated[
    Path,
    typer.Argument(
        metavar="PATH",
        help="Folder with CSV files of measurements, or JSON of InferenceX's results; with --set system also "
        "AIConfigurator's wheel or folder, or a folder of ROCm/aiter's tuned tables.",
        callback=at_home,
    ),
]
SYSTEM_HELP = (
    "PATH is a public database: read this machine of AIConfigurator's wheel or folder (b200_sxm), newest versions "
    "only, or of a folder of ROCm/aiter's tuned tables (gfx942, gfx950)."
)
TrustCodeSetting = Annotated[
    bool, Setting("With --resume: continue even though the code of a simulator or searcher has changed.")
]
JsonOption = Annotated[bool, typer.Option("--json", help="Print one JSON object on stdout and nothing else.")]


def print_json(value: JsonFields) -> None:
    """Prints a result for programs."""
    print(json.dumps(value, indent=2, allow_nan=False))


def show_result(result: Result, *, as_json: bool = False, written: Path | None = None) -> None:
    """Prints a result for people, block by block, and where it was written; or for programs."""
    if as_json:
        print_json(result.to_dict())
        return
    from raysearch.base.rich_tables import print_blocks

    print_blocks(result.blocks())
    if written is not None:
        print(f"Written: {written}")


def exit_unless_feasible(result: Result) -> None:
    """Ends the command with 3 where nothing can be run."""
    if not result.feasible:
        asked = getattr(result, "question", None)
        if limits := asked.defaulted_limits if asked else []:
            options = " and ".join(map(option_of, limits))
            print(
                f"note: {options} not given; larger limits than the defaults may be met, and 0 is none", file=sys.stderr
            )
        raise typer.Exit(NOTHING_FEASIBLE)
