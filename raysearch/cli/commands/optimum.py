"""`raysearch optimum`: the exact best of a workload's whole space."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from raysearch.answers.optimal import USUAL_REPLAYS, OptimumResult, SpacesResult
from raysearch.base.errors import InputError
from raysearch.cli.commands.options import (
    REPLAYS_HELP,
    JsonOption,
    at_home,
    exit_unless_feasible,
    file_to_write,
    print_json,
    show_result,
)
from raysearch.cli.commands.question_options import loaded, takes_question
from raysearch.cli.commands.settings import Setting
from sim.config.question import Question


@takes_question
def show_optimum(
    question: Question,
    compare_spaces: Annotated[
        bool, Setting("Compare the heuristics, the paper's and the joint space, and each extension.")
    ] = False,
    landscape: Annotated[
        bool, Setting("Also count the feasible strategies, with quantiles, where they can be enumerated.")
    ] = True,
    uneven_stages: Annotated[
        bool,
        Setting(
            "Also find the best pipeline whose stages may have any number of layers: minutes over every batch, "
            "seconds over batches=powers_of_two."
        ),
    ] = False,
    replays: Annotated[
        int,
        Setting(
            REPLAYS_HELP,
            least=1,
            most=1_000_000,
        ),
    ] = USUAL_REPLAYS,
    fresh: Annotated[bool, Setting("Search again even if the optimum is in the cache on disk.")] = False,
    out: Annotated[
        Path | None,
        typer.Option(
            "--out",
            "-o",
            help="File of the optimum and a certificate that nothing is better to write, .json; `verify` checks it.",
            callback=at_home,
        ),
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Find the exact optimum over every strategy of a workload, and the distribution of the feasible ones.

    The best strategy is printed as soon as it is known. Exits with 3 if nothing is feasible.

    \b
    Examples:
      raysearch optimum -w gpt_moe_1_2t_16k
      raysearch optimum -w my_workload.toml --hardware h100_sxm --set landscape=no --json
      raysearch optimum -w gpt_moe_1_2t_16k --space paper --set batches=any
      raysearch optimum -w gpt_moe_1_2t_16k --out best.json
      raysearch optimum -w gpt_moe_1_2t_1m --space extended
      raysearch optimum -w gpt_moe_1_2t_1m --set compare_spaces
      raysearch optimum --model deepseek_v3 --isl 4000 --osl 500 --phase decode --engine none \\
        --set uneven_stages --set batches=powers_of_two
      raysearch optimum -w gpt_moe_1_2t_16k --space vllm --gpus 64 --tpot-ms 30
      raysearch optimum --model qwen3_32b --isl 4000 --osl 500 --tpot-ms 30 --gpus 8
      raysearch optimum --model qwen3_32b --isl 4000 --osl 500 --tpot-ms 30 --ttft-ms 500 --gpus 8 --phase traffic
    """
    from raysearch.base.progress import stepping
    from raysearch.optima.certificate_files import certified_space

    workload = loaded(question, warned=True)
    if out is not None:
        if compare_spaces:
            raise InputError("--out is for the certificate of one space: leave it out, or --set compare_spaces")
        file_to_write(out)
        certified_space(workload)  # or it is refused before the search
    if compare_spaces:
        show_result(SpacesResult.of(workload, fresh=fresh, bars=stepping), as_json=as_json)
    else:
        found = OptimumResult(
            question, workload, landscape, fresh, stepping, uneven_stages=uneven_stages, replays=replays
        )
        if not as_json:
            show_result(found)
        written = {"certificate": found.write_certificate(out)} if out is not None else {}
        if as_json:
            print_json({**found.to_dict(), **written})
        elif written:
            print(f"Certificate of {written['certificate']:,} ranges of batches: {out}")
        exit_unless_feasible(found)
