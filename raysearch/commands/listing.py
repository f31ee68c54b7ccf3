"""`raysearch list`: what can be named on the command line and in study files."""

from __future__ import annotations

from raysearch.commands.options import JsonOption, print_json
from raysearch.registry import searcher_names, searcher_summary
from sim.config.files import list_names


def list_configurations(as_json: JsonOption = False) -> None:
    """List hardware, models, workloads, studies and searchers.

    \b
    Examples:
      raysearch list
      raysearch list --json
    """
    names = {kind: list_names(kind) for kind in ("hardware", "models", "workloads", "studies")}
    searchers = {name: searcher_summary(name) for name in searcher_names()}
    if as_json:
        print_json({**names, "searchers": list(searchers)})
        return
    from raysearch.tables import plain_table, printer

    rows = [(kind, ", ".join(of_kind)) for kind, of_kind in names.items()]
    printer().print(plain_table(None, ("kind", "names"), rows, left=2, wrap=("names",)))
    printer().print(plain_table(None, ("searcher", "what it does"), searchers.items(), left=2, wrap=("what it does",)))
