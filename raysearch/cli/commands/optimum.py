"""`raysearch optimum`: the exact best of a workload's whole space."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from raysearch.answers.optimal import OptimumResult, SpacesResult
from raysearch.base.file_io import degrees_text, strategy_dict
from raysearch.cli.commands.options import JsonOption, exit_unless_feasible, print_json, show_result
from raysearch.cli.commands.question_options import loaded, takes_question
from raysearch.optima.certificate_files import check_certificate
from sim.config.question import Question
from sim.workload import Workload


@takes_question
def show_optimum(
    question: Question,
    compare_spaces: Annotated[
        bool,
        typer.Option(
            "--compare-spaces", help="Compare heuristics, the paper's and the joint space, and each extension."
        ),
    ] = False,
    landscape: Annotated[
        bool,
        typer.Option(help="Also count the feasible strategies, with quantiles, where they can be enumerated."),
    ] = True,
    certificate: Annotated[
        Path | None, typer.Option(help="Also write a certificate that nothing is better, which --check verifies.")
    ] = None,
    check: Annotated[
        Path | None, typer.Option(help="Verify a certificate of this workload's space, without a search.")
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Find the exact optimum over every strategy of a workload, and the distribution of the feasible ones.

    The best strategy is printed as soon as it is known, the rest after it. Exits with 3 where nothing is
    feasible.

    \b
    Examples:
      raysearch optimum -w gpt_moe_1_2t_16k
      raysearch optimum -w my_workload.toml --hardware h100_sxm --no-landscape --json
      raysearch optimum -w gpt_moe_1_2t_16k --space paper --batches any
      raysearch optimum -w gpt_moe_1_2t_16k --certificate best.json
      raysearch optimum -w gpt_moe_1_2t_16k --check best.json
      raysearch optimum -w gpt_moe_1_2t_1m --space extended
      raysearch optimum -w gpt_moe_1_2t_1m --compare-spaces
      raysearch optimum -w gpt_moe_1_2t_16k --space vllm --gpus 64 --tpot-ms 30
      raysearch optimum --model qwen3_32b --isl 4000 --osl 500 --tpot-ms 30 --gpus 8
    """
    from raysearch.base.progress import stepping

    workload = loaded(question)
    if check is not None:
        _replay(workload, check, as_json=as_json)
    elif compare_spaces:
        show_result(SpacesResult.of(workload, bars=stepping), as_json=as_json)
    else:
        found = OptimumResult(question, workload, landscape, bars=stepping)
        if not as_json:
            show_result(found)
        written = {"certificate": found.write_certificate(certificate)} if certificate is not None else {}
        if as_json:
            print_json({**found.to_dict(), **written})
        elif written:
            print(f"Certificate of {written['certificate']:,} ranges of batches: {certificate}")
        exit_unless_feasible(found)


def _replay(workload: Workload, path: Path, *, as_json: bool) -> None:
    from raysearch.base.progress import stepping

    with stepping(f"certificate of {workload.name}") as progress:
        certificate, tried = check_certificate(path, workload, progress)
    if as_json:
        strategy = strategy_dict(certificate.strategy) if certificate.strategy else None
        shown = {"strategy": strategy, "tokens_per_s_per_gpu": certificate.reached, "ranges": len(certificate.leaves)}
        print_json({"workload": workload.name, **shown, "evaluated": tried})
        return
    best = degrees_text(certificate.strategy) if certificate.strategy else "nothing feasible"
    print(
        f"Proven: {best}, {certificate.reached:,.2f} tokens/s/GPU, is the best of the space {workload.space!r} of "
        f"{workload.name}; {len(certificate.leaves):,} ranges of batches cover it, {tried:,} strategies were evaluated"
    )
