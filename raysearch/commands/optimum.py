"""`raysearch optimum`: the exact best of a workload's whole space."""

from __future__ import annotations

from typing import Annotated

import typer

from raysearch.commands.options import HardwareOption, JsonOption, WorkloadOption, print_json
from raysearch.files import strategy_dict
from raysearch.yardstick import Yardstick, find_yardstick
from sim.catalog import load_workload
from sim.simulate import evaluate
from sim.types import Workload


def show_optimum(
    workload: WorkloadOption,
    hardware: HardwareOption = None,
    fresh: Annotated[bool, typer.Option("--fresh", help="Search again even if the optimum is in the cache.")] = False,
    as_json: JsonOption = False,
) -> None:
    """Find the exact optimum over every strategy of a workload, and how its landscape lies.

    \b
    Examples:
      raysearch optimum -w gpt_moe_1_2t_16k
      raysearch optimum -w my_workload.toml --hardware h100_sxm --json
    """
    from raysearch.progress import stepping

    loaded = load_workload(workload, hardware)
    with stepping(f"exact optimum of {loaded.name}") as progress:
        found = find_yardstick(loaded, progress, fresh=fresh)
    if as_json:
        print_json(_as_dict(loaded, found))
    else:
        _print(loaded, found)


def _as_dict(workload: Workload, found: Yardstick) -> dict[str, object]:
    best = evaluate(workload, found.strategy) if found.strategy else None
    return {
        "workload": workload.name,
        "hardware": workload.hardware.name,
        "config_hash": workload.config_hash,
        "tokens_per_s_per_gpu": found.tokens_per_s_per_gpu,
        "expected_error": best.expected_error if best else None,
        "extrapolated": list(best.extrapolated) if best else [],
        "strategy": strategy_dict(found.strategy) if found.strategy else None,
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
        f"{found.space_size:,} strategies, {found.feasible_count:,} feasible ({found.feasible_share:.3%}), "
        f"searched in {found.wall_s:.1f} s"
    )
    if found.strategy is None:
        console.print(f"No strategy of {workload.name} is feasible.")
        return
    rows = [(f"{float(share):.4%}", f"{value:,.2f}") for share, value in found.quantiles.items()]
    console.print(plain_table("Feasible strategies at or below", ("share", "tokens/s/GPU"), rows))
    console.print(*explanation(workload, evaluate(workload, found.strategy)), sep="\n")
