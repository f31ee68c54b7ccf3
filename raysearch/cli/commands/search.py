"""`raysearch search`: one run in this process; only workers need Ray."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated

import typer

from raysearch.answers.searched import SearchResult
from raysearch.base.errors import InputError
from raysearch.base.priced_heading import priced_text
from raysearch.cli.commands.options import (
    BudgetOption,
    CpusPerWorkerSetting,
    GpusPerWorkerSetting,
    JsonOption,
    OnFailureSetting,
    OutOption,
    ReplaySetting,
    ResumeOption,
    RetriesSetting,
    SeedOption,
    SimulatorOption,
    StartSetting,
    TimeoutSetting,
    TrustCodeSetting,
    WorkersSetting,
    print_json,
)
from raysearch.cli.commands.question_options import loaded, takes_question
from raysearch.cli.commands.settings import OtherSettings, settings_of
from raysearch.processes.watcher import can_go_on_with
from raysearch.searchers.registry import searcher_class
from raysearch.simulators.opening import Patience
from sim.config.files import did_you_mean
from sim.config.question import Question

SearcherSettings = Annotated[
    Mapping[str, str] | None,
    OtherSettings("and those of the searcher, of the keys of its file in configs/searchers."),
]


@takes_question
def search_workload(
    question: Question,
    searcher: Annotated[
        str, typer.Option("--searcher", "-s", help="Name (see `raysearch list`), or module:Class of your own.")
    ] = "prior",
    seed: SeedOption = 0,
    budget: BudgetOption = None,
    simulator: SimulatorOption = None,
    workers: WorkersSetting = None,
    timeout_s: TimeoutSetting = Patience.timeout_s,
    retries: RetriesSetting = Patience.retries,
    cpus_per_worker: CpusPerWorkerSetting = Patience.cpus_per_worker,
    gpus_per_worker: GpusPerWorkerSetting = Patience.gpus_per_worker,
    on_failure: OnFailureSetting = "stop",
    out: OutOption = None,
    resume: ResumeOption = False,
    replay: ReplaySetting = None,
    start: StartSetting = None,
    trust_code: TrustCodeSetting = False,
    options: SearcherSettings = None,
    as_json: JsonOption = False,
) -> None:
    """Run one searcher on one workload, scored against the exact optimum.

    Every evaluation is on disk before the next one begins: Ctrl-C loses none, and the same command with --resume
    continues.

    \b
    Examples:
      raysearch search -w gpt_moe_1_2t_16k
      raysearch search -w gpt_moe_1_2t_16k --set policy=none
      raysearch search -w gpt_moe_1_2t_16k -s annealing --set initial_temperature=30
      raysearch search -w gpt_moe_1_2t_16k -s ppo_paper --seed 1 --budget 4000 --out results/ppo --json
      raysearch search -w gpt_moe_1_2t_1m -s annealing --space extended
      raysearch search -w gpt_moe_1_2t_16k -s annealing --engine vllm
      raysearch search -w mine.toml -s annealing --set groups=own --set any_degrees=pp,ep
      raysearch search --model qwen3_32b --isl 4000 --osl 500 --tpot-ms 30 -s annealing
      raysearch search -w mine.toml -s annealing --simulator my_package.cluster:measure --set workers=8
      raysearch search -w mine.toml -s genetic --set start=rule --simulator my_package.cluster:measure
      raysearch search -w gpt_moe_1_2t_16k -s examples.cross_entropy:CrossEntropy
    """
    from raysearch.base.progress import searching, stepping
    from raysearch.cli.commands.report import show_report

    def begun(folder: Path) -> None:
        lacking = [*([] if out else ["--out", str(folder)]), *([] if resume else ["--resume"])]
        can_go_on_with([*sys.argv[1:], *lacking])

    loaded(question)
    _check_names(searcher, options or {})
    found = SearchResult.of(
        question,
        searcher,
        seed=seed,
        budget=budget,
        simulator=simulator,
        workers=workers,
        patience=Patience(timeout_s, retries, cpus_per_worker, gpus_per_worker),
        on_failure=on_failure or "stop",
        out=out,
        resume=resume,
        replay=replay,
        start=start,
        options=options or {},
        trust_code=trust_code,
        begun=begun,
        bars=stepping,
        bar=searching,
    )
    if as_json:
        print_json(found.to_dict())
    else:
        if not found.feasible:
            print(priced_text(found.workload))
        show_report(found.report)
        for text in found.bound_text:
            print(text)


def _check_names(searcher: str, given: Mapping[str, str]) -> None:
    """Raises: InputError: A name is neither a setting of the command nor of the searcher."""
    own = searcher_class(searcher).Options.model_fields
    for name in given:
        if name not in own:
            near = did_you_mean(name, [*settings_of(search_workload), *own])
            raise InputError(f"--set: neither this command nor searcher {searcher!r} has a setting {name!r}: {near}")
