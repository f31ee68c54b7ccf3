"""`raysearch optimum`: the exact best of a workload's whole space."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from raysearch.answers.evaluated import evaluation_dict, workload_dict
from raysearch.base.errors import NOTHING_FEASIBLE
from raysearch.base.file_io import degrees_text, strategy_dict
from raysearch.cli.commands.options import JsonOption, print_json
from raysearch.cli.commands.question_options import loaded, takes_question
from raysearch.optima.certificate_files import check_certificate, write_certificate
from raysearch.optima.named_spaces import SPACES, SpaceBest, best_of_space
from raysearch.optima.optimum_cache import CachedOptimum, find_cached_optimum
from sim.config.question import Question
from sim.engines.engine_registry import lacking_formats
from sim.evaluation import Evaluation
from sim.json_object import JsonObject
from sim.layers.heuristics import MEGATRON_NOTE
from sim.layouts import layout_of
from sim.nearness import idle_slos, near_limits
from sim.optimum.exact_search import find_best
from sim.optimum.landscape import can_be_added_up
from sim.optimum.spaces import space_of
from sim.precision import slow_precision
from sim.simulate import evaluate
from sim.strategy import Strategy
from sim.workload import Workload

_BASES = ("megatron", "megatron-sp", "joint")
"""Spaces over whose bests the others' are shown."""


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
    fresh: Annotated[bool, typer.Option("--fresh", help="Search again even if the optimum is in the cache.")] = False,
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
        return
    if compare_spaces:
        bests: dict[str, SpaceBest] = {}
        for name in (*(each for each in SPACES if each != "generated"), *_engine(workload)):  # it takes minutes
            with stepping(f"best of {workload.name}, {name}") as progress:
                bests[name] = best_of_space(workload, name, progress, fresh=fresh)
        _show_spaces(workload, bests, as_json=as_json)
        return
    space = space_of(workload)
    added_up = landscape and can_be_added_up(space)
    found: JsonObject = {}
    best: Strategy | None = None
    if not (added_up and as_json):
        with stepping(f"exact optimum of {workload.name}") as progress:
            space_best = best_of_space(workload, workload.space, progress, fresh=fresh)
        best, found = space_best.strategy, asdict(space_best)
        if not as_json:
            _print_best(workload, best)
    if added_up:
        with stepping(f"landscape of {workload.name}") as progress:
            optimum = find_cached_optimum(workload, progress, fresh=fresh)
        best, found = optimum.strategy, _landscape(optimum)
    evaluation = evaluate(workload, best) if best else None
    found["distinct_size"] = space.distinct_size
    figure = evaluation.tokens_per_s_per_gpu if evaluation else 0.0
    with stepping(f"best of {workload.name} in another format") as progress:
        slow = slow_precision(
            workload,
            figure,
            lambda other: find_best(space_of(other), progress).swept_tokens_per_s_per_gpu,
        )
    warnings = [*lacking_formats(workload), *idle_slos(workload), *([slow] if slow else [])]
    if certificate is not None:
        with stepping(f"certificate of {workload.name}") as progress:
            found["certificate"] = write_certificate(certificate, workload, evaluation, progress)
    if as_json:
        print_json(_as_dict(workload, question, found, evaluation, warnings))
    else:
        _print_beside(workload, found)
        if certificate is not None:
            print(f"Certificate of {found['certificate']:,} ranges of batches: {certificate}")
        for warning in warnings:
            print(f"Warning: {warning}")
    if evaluation is None:
        raise typer.Exit(NOTHING_FEASIBLE)


def _replay(workload: Workload, path: Path, *, as_json: bool) -> None:
    from raysearch.base.progress import stepping

    with stepping(f"certificate of {workload.name}") as progress:
        certificate, tried = check_certificate(path, workload, progress)
    if as_json:
        strategy = strategy_dict(certificate.strategy) if certificate.strategy else None
        told = {"strategy": strategy, "tokens_per_s_per_gpu": certificate.reached, "ranges": len(certificate.leaves)}
        print_json({"workload": workload.name, **told, "evaluated": tried})
        return
    best = degrees_text(certificate.strategy) if certificate.strategy else "nothing feasible"
    print(
        f"Proven: {best}, {certificate.reached:,.2f} tokens/s/GPU, is the best of the space {workload.space!r} of "
        f"{workload.name}; {len(certificate.leaves):,} ranges of batches cover it, {tried:,} strategies were evaluated"
    )


def _engine(workload: Workload) -> tuple[str, ...]:
    """The engine whose space is shown beside the others."""
    return (workload.engine.name.partition("<")[0],) if workload.engine else ()


def _landscape(found: CachedOptimum) -> JsonObject:
    keys = ("space_size", "feasible_count", "feasible_share", "wall_s")
    return {**{key: getattr(found, key) for key in keys}, "quantiles": dict(found.quantiles)}


def _show_spaces(workload: Workload, bests: Mapping[str, SpaceBest], *, as_json: bool) -> None:
    if as_json:
        print_json(
            {"workload": workload.name, "hardware": workload.hardware.name, "spaces": _spaces_dict(workload, bests)}
        )
        return
    from raysearch.base.rich_tables import plain_table, printer

    console = printer()
    if bests:
        ratios = [f"x {name}" for name in _BASES]
        columns = ("space", "best strategy", "strategies", "s", "tok/s/GPU", "error", *ratios)
        title = f"{workload.name}: the exact best of each space"
        console.print(plain_table(title, columns, _space_rows(workload, bests), left=2, wrap=("best strategy",)))
        if workload.model.is_moe:
            console.print(MEGATRON_NOTE)
        return


def _spaces_dict(workload: Workload, bests: Mapping[str, SpaceBest]) -> dict[str, object]:
    return {name: {**asdict(best), **_judged(workload, best.strategy)} for name, best in bests.items()}


def _judged(workload: Workload, strategy: Strategy | None) -> dict[str, object]:
    """A best strategy and how far to trust its figure, for JSON."""
    best = evaluate(workload, strategy) if strategy else None
    return {
        "expected_error": best.expected_error if best else None,
        "extrapolated": list(best.extrapolated) if best else [],
        "near_limits": [asdict(limit) for limit in near_limits(workload, best)] if best else [],
        "strategy": strategy_dict(strategy) if strategy else None,
        "layout": layout_of(strategy) if strategy else None,
    }


def _space_rows(workload: Workload, bests: Mapping[str, SpaceBest]) -> list[tuple[str, ...]]:
    def gain(value: float | None, name: str) -> str:
        base = bests[name].tokens_per_s_per_gpu
        return f"{value / base:.3f}" if value and base else "-"

    rows: list[tuple[str, ...]] = []
    for name, best in bests.items():
        value = best.tokens_per_s_per_gpu
        what = (
            f"{degrees_text(best.strategy)}; {''.join(map(str, best.strategy.dims))}" if best.strategy else "none fits"
        )
        error = f"±{evaluate(workload, best.strategy).expected_error:.0%}" if best.strategy else "-"
        told = (f"{best.space_size:.1e}", f"{best.wall_s:.1f}", f"{value:,.2f}" if value else "-", error)
        rows.append((name, what, *told, *(gain(value, base) for base in _BASES)))
    return rows


def _as_dict(
    workload: Workload,
    question: Question,
    found: JsonObject,
    evaluation: Evaluation | None,
    warnings: Sequence[str],
) -> JsonObject:
    """Everything in JSON; without a feasible strategy its figures are null."""
    told = {
        **workload_dict(workload, question),
        "config_hash": workload.config_hash,
        "feasible": evaluation is not None,
        "tokens_per_s_per_gpu": None,
        "expected_error": None,
        "extrapolated": [],
        "warnings": list(warnings),
    }
    if evaluation is not None:
        told |= evaluation_dict(workload, evaluation)
        told["near_limits"] = [asdict(limit) for limit in near_limits(workload, evaluation)]
    return {**told, **{key: value for key, value in found.items() if key not in ("tokens_per_s_per_gpu", "strategy")}}


def _print_best(workload: Workload, best: Strategy | None) -> None:
    """Prints the best strategy at once, whatever is worked out after it."""
    from raysearch.base.rich_tables import explanation, printer

    if best is None:
        print(f"No strategy of {workload.name} is feasible.", flush=True)
        return
    console = printer()
    console.print(*explanation(workload, evaluate(workload, best)), sep="\n")
    console.file.flush()


def _print_beside(workload: Workload, found: JsonObject) -> None:
    """Prints what the best strategy was found among."""
    from raysearch.base.rich_tables import plain_table, printer

    console = printer()
    if "feasible_count" in found:
        how = f"{found['feasible_count']:,} feasible ({found['feasible_share']:.3%}), all added up"
    else:
        how = f"{found['opened']:,} of {found['tuples']:,} tuples of degrees and batch added up, the others ruled out"
    differ = f"{found['distinct_size']:,} that differ"
    size = f"{found['space_size']:,} strategies of the space {workload.space!r} ({differ})"
    console.print(f"{size}, {how} in {found['wall_s']:.1f} s")
    if quantiles := found.get("quantiles"):
        rows = [(f"{float(share):.4%}", f"{value:,.2f}") for share, value in quantiles.items()]
        console.print(plain_table("Feasible strategies at or below", ("share", "tokens/s/GPU"), rows))
