"""`raysearch verify-rules`: every sharding rule, proved with numbers."""

from __future__ import annotations

import difflib
from typing import Annotated

from raysearch.base.errors import InputError, RunFailed
from raysearch.base.foreign import foreign
from raysearch.cli.commands.options import JsonOption, print_json
from raysearch.cli.commands.settings import Setting, takes_settings
from sim.config.code import import_module
from sim.json_object import JsonObject
from sim.ops.layers import all_operations
from sim.sharding.rule_check import Verdict, check_operation
from sim.sharding.rules import Operation


@takes_settings
def verify_rules(
    op: Annotated[str | None, Setting("Check only this operation.")] = None,
    module: Annotated[
        list[str] | None,
        Setting("Python modules to import first, comma-separated, with your own placements and rules."),
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
    """
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
        near = difflib.get_close_matches(op, operations, n=1)
        hint = f": did you mean {near[0]!r}?" if near else ""
        raise InputError(f"unknown operation {op!r}{hint} (known: {', '.join(operations)})")
    return {op: operations[op]}


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
