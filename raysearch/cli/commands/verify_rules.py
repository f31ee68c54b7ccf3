"""`raysearch verify-rules`: every sharding rule, proved with numbers."""

from __future__ import annotations

import math
import re
from typing import Annotated

from raysearch.base.errors import InputError, RunFailed
from raysearch.base.foreign import foreign
from raysearch.cli.commands.options import JsonOption, print_json
from raysearch.cli.commands.settings import Setting, takes_settings
from sim.config.code import import_module
from sim.json_object import JsonObject
from sim.near_names import nearest_name
from sim.ops.layers import all_operations
from sim.sharding.placement import PlacementError, Shard
from sim.sharding.rule_check import Verdict, check_operation
from sim.sharding.rules import Operation
from sim.sharding.views import PROVED_ELEMENTS, View, placed_after


@takes_settings
def verify_rules(
    op: Annotated[str | None, Setting("Check only this operation.")] = None,
    module: Annotated[
        list[str] | None,
        Setting("Python modules to import first, comma-separated, with your own placements and rules."),
    ] = None,
    view: Annotated[
        str | None,
        Setting("Shapes before and after a view, as in 4,8,6->32,6: say where each shard then lies on four ranks."),
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Prove every registered sharding rule numerically, and list correct ones that are missing.

    Every combination of operand and result placements is executed on four ranks. Exits with 1 if a rule is wrong or
    missing.

    \b
    Examples:
      raysearch verify-rules
      raysearch verify-rules --set op=matmul --json
      raysearch verify-rules --set "view=4,8,6->32,6"
    """
    if view is not None:
        if op or module:
            raise InputError("--set view: a view has no rules of its own: leave out --set op and --set module")
        _show_view(_view_of(view), as_json=as_json)
        return
    for name in module or ():
        with foreign(f"cannot import the module {name}", InputError):
            import_module(name)
    verdicts = [check_operation(name, operation) for name, operation in _chosen(op).items()]
    if as_json:
        print_json({"proved": all(verdict.proved for verdict in verdicts), "ops": [*map(_as_dict, verdicts)]})
    else:
        _print(verdicts)
    if failed := [verdict.name for verdict in verdicts if not verdict.proved]:
        raise RunFailed(f"wrong or missing rules: {', '.join(failed)}")


def _chosen(op: str | None) -> dict[str, Operation]:
    operations = all_operations()
    if op is None:
        return operations
    if op not in operations:
        hint = nearest_name(op, operations)
        raise InputError(f"unknown operation {op!r}{hint and f': {hint}'} (known: {', '.join(operations)})")
    return {op: operations[op]}


_SHAPES = re.compile(r"\s*(\d{1,9}(?:\s*,\s*\d{1,9}){0,7})\s*->\s*(\d{1,9}(?:\s*,\s*\d{1,9}){0,7})\s*", re.ASCII)
_RANKS = 4


def _view_of(text: str) -> View:
    found = _SHAPES.fullmatch(text)
    if found is None:
        raise InputError(f"--set view: expected two shapes of at most eight dims, as in 4,8,6->32,6, got {text!r}")
    source, target = (tuple(int(size) for size in shape.split(",")) for shape in found.groups())
    try:
        return View(source, target)
    except PlacementError as error:
        raise InputError(f"--set view: {error}") from None


def _show_view(view: View, *, as_json: bool) -> None:
    from raysearch.base.rich_tables import plain_table, printer

    shards = [Shard(dim) for dim in range(len(view.source))]
    after = {str(shard): placed_after(view, shard, _RANKS) for shard in shards}
    executed = math.prod(view.source) <= PROVED_ELEMENTS
    if as_json:
        placed = {before: found and str(found) for before, found in after.items()}
        print_json({"source": view.source, "target": view.target, "executed": executed, "placements": placed})
        return
    rows = [(before, str(found) if found else "gathered first") for before, found in after.items()]
    printer().print(plain_table(None, ("before", "after"), rows, left=2))
    printer().print("executed on four ranks" if executed else "by its divisors; too large to be executed")


def _as_dict(verdict: Verdict) -> JsonObject:
    return {
        "name": verdict.name,
        "equation": verdict.equation,
        "combinations": verdict.combinations,
        "rules": [str(rule) for rule in verdict.rules],
        "wrong": [str(found) for found in verdict.wrong],
        "missing": [str(rule) for rule in verdict.missing],
    }


def _print(verdicts: list[Verdict]) -> None:
    from raysearch.base.rich_tables import plain_table, printer

    console = printer()
    rows = [
        (v.name, v.equation, f"{len(v.rules)}", f"{v.combinations:,}", f"{len(v.wrong)}", f"{len(v.missing)}")
        for v in verdicts
    ]
    console.print(
        plain_table(None, ("operation", "equation", "rules", "combinations", "wrong", "missing"), rows, left=2)
    )
    for verdict in verdicts:
        for rule in verdict.rules if len(verdicts) == 1 else ():
            console.print(f"  {rule}")
        for found in verdict.wrong:
            console.print(f"wrong    {verdict.name}: {found}")
        for rule in verdict.missing:
            console.print(f"missing  {verdict.name}: {rule}")
    rules, combinations = sum(len(v.rules) for v in verdicts), sum(v.combinations for v in verdicts)
    console.print(
        f"{rules} rules of {len(verdicts)} operations checked against {combinations:,} combinations of placements"
    )
