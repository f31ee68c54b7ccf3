"""`raysearch optimum`: the exact best of a workload's whole space."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from typing import Annotated

import typer

from raysearch.commands.options import HardwareOption, JsonOption, MarginOption, SpaceOption, WorkloadOption, print_json
from raysearch.files import degrees_text, strategy_dict
from raysearch.spaces import SPACES, SpaceBest, best_of_space
from raysearch.yardstick import Yardstick, find_yardstick
from sim.config.catalog import load_workload
from sim.layers.heuristics import MEGATRON_NOTE
from sim.nearness import near_limits
from sim.simulate import evaluate
from sim.strategy import Strategy
from sim.workload import Workload

_BASES = ("megatron", "megatron-sp", "joint")
"""Spaces over whose bests the others' are shown."""


def show_optimum(
    workload: WorkloadOption,
    hardware: HardwareOption = None,
    space: SpaceOption = None,
    margin: MarginOption = None,
    against: Annotated[
        bool, typer.Option("--against", help="Compare heuristics, the paper's and the joint space, and each extension.")
    ] = False,
    fresh: Annotated[bool, typer.Option("--fresh", help="Search again even if the optimum is in the cache.")] = False,
    as_json: JsonOption = False,
) -> None:
    """Find the exact optimum over every strategy of a workload, and how its landscape lies.

    \b
    Examples:
      raysearch optimum -w gpt_moe_1_2t_16k
      raysearch optimum -w my_workload.toml --hardware h100_sxm --json
      raysearch optimum -w gpt_moe_1_2t_16k --space paper --margin 0.05
      raysearch optimum -w gpt_moe_1_2t_1m --space extended
      raysearch optimum -w gpt_moe_1_2t_1m --against
    """
    from raysearch.progress import stepping

    loaded = load_workload(workload, hardware, margin=margin)
    wanted = space.value if space else loaded.space
    if against or wanted == "extended":
        names = list(SPACES) if against else ["extended"]
        bests: dict[str, SpaceBest] = {}
        for name in names:
            with stepping(f"best of {loaded.name}, {name}") as progress:
                bests[name] = best_of_space(loaded, name, progress, fresh=fresh)
        _show_spaces(loaded, bests, as_json=as_json)
        return
    loaded = load_workload(workload, hardware, wanted, margin)
    with stepping(f"exact optimum of {loaded.name}") as progress:
        found = find_yardstick(loaded, progress, fresh=fresh)
    if as_json:
        print_json(_as_dict(loaded, found))
    else:
        _print(loaded, found)


def _show_spaces(workload: Workload, bests: Mapping[str, SpaceBest], *, as_json: bool) -> None:
    if as_json:
        print_json(
            {"workload": workload.name, "hardware": workload.hardware.name, "spaces": _spaces_dict(workload, bests)}
        )
        return
    from raysearch.tables import explanation, plain_table, printer

    console = printer()
    if len(bests) > 1:
        ratios = [f"x {name}" for name in _BASES]
        columns = ("space", "best strategy", "strategies", "s", "tok/s/GPU", "error", *ratios)
        title = f"{workload.name}: the exact best of each space"
        console.print(plain_table(title, columns, _space_rows(workload, bests), left=2, wrap=("best strategy",)))
        if workload.model.is_moe:
            console.print(MEGATRON_NOTE)
        return
    ((name, best),) = bests.items()
    console.print(
        f"{best.space_size:,} strategies of the space {name!r}; "
        f"{best.opened:,} of {best.tuples:,} tuples of degrees and batch added up, "
        f"the others ruled out by their bounds, in {best.wall_s:.1f} s"
    )
    if best.strategy is None:
        console.print(f"No strategy of {workload.name} is feasible.")
        return
    console.print(*explanation(workload, evaluate(workload, best.strategy)), sep="\n")


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


def _as_dict(workload: Workload, found: Yardstick) -> dict[str, object]:
    return {
        "workload": workload.name,
        "hardware": workload.hardware.name,
        "config_hash": workload.config_hash,
        "space": workload.space,
        "tokens_per_s_per_gpu": found.tokens_per_s_per_gpu,
        **_judged(workload, found.strategy),
        "space_size": found.space_size,
        "feasible_count": found.feasible_count,
        "feasible_share": found.feasible_share,
        "quantiles": dict(found.quantiles),
        "wall_s": found.wall_s,
    }


def _print(workload: Workload, found: Yardstick) -> None:
    from raysearch.tables import explanation, plain_table, printer

    console = printer()
    console.print(
        f"{found.space_size:,} strategies of the space {workload.space!r}, "
        f"{found.feasible_count:,} feasible ({found.feasible_share:.3%}), "
        f"searched in {found.wall_s:.1f} s"
    )
    if found.strategy is None:
        console.print(f"No strategy of {workload.name} is feasible.")
        return
    rows = [(f"{float(share):.4%}", f"{value:,.2f}") for share, value in found.quantiles.items()]
    console.print(plain_table("Feasible strategies at or below", ("share", "tokens/s/GPU"), rows))
    console.print(*explanation(workload, evaluate(workload, found.strategy)), sep="\n")
