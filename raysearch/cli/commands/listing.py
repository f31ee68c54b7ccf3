"""`raysearch list`: what can be named on the command line and in study files, and what is known of it."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING

from raysearch.cli.commands.options import JsonOption, print_json
from raysearch.searchers.registry import searcher_names, searcher_summary
from sim.config.files import list_names

if TYPE_CHECKING:
    from raysearch.cli.capabilities import MachineFacts


def list_configurations(as_json: JsonOption = False) -> None:
    """List workloads, studies, fleets, searchers, exports, machines and models, and what of these was measured.

    \b
    Every machine and model can be evaluated, optimised and searched. Kernels were
      measured      on the machine itself, and fitted;
      carried over  from that one, at the peak rates of another: the interval is wider, and the bias is named;
      assumed       where nothing like them was measured: the roofline, at a median efficiency.

    \b
    Examples:
      raysearch list
      raysearch list --json
    """
    from raysearch.cli.capabilities import machine_facts, model_facts
    from raysearch.deploy.export.formats import exporter_names, exporter_summary

    names = {kind: list_names(kind) for kind in ("hardware", "models", "workloads", "studies", "fleets")}
    searchers = {name: searcher_summary(name) for name in searcher_names()}
    exports = {name: exporter_summary(name) for name in exporter_names()}
    machines = {name: machine_facts(name) for name in names["hardware"]}
    models = {name: model_facts(name) for name in names["models"]}
    if as_json:
        facts = {
            kind: {name: asdict(each) for name, each in of_kind.items()}
            for kind, of_kind in (("hardware", machines), ("models", models))
        }
        print_json({**names, "searchers": list(searchers), "exports": list(exports), "facts": facts})
        return
    from raysearch.base.rich_tables import plain_table, printer

    rows = [(kind, ", ".join(names[kind])) for kind in ("workloads", "studies", "fleets")]
    printer().print(plain_table(None, ("kind", "names"), rows, left=2, wrap=("names",)))
    printer().print(plain_table(None, ("searcher", "what it does"), searchers.items(), left=2, wrap=("what it does",)))
    printer().print(
        plain_table(None, ("export --to", "what it writes"), exports.items(), left=2, wrap=("what it writes",))
    )
    rows = [(name, _tiers(facts), _sure(facts)) for name, facts in machines.items()]
    columns = ("hardware", "node", "kernels' efficiencies")
    printer().print(plain_table(None, columns, rows, left=3, wrap=columns[2:]))
    columns = ("model", "parameters", "active", "serving measured under", "assumed, of a layer's time when serving")
    rows = [
        (
            name,
            f"{facts.parameters / 1e9:,.1f}B",
            f"{facts.active_parameters / 1e9:,.1f}B",
            ", ".join(facts.serving_measured_under) or "-",
            "; ".join(facts.assumed) or "-",
        )
        for name, facts in models.items()
    ]
    printer().print(plain_table(None, columns, rows, left=5, wrap=columns[3:]))


def _tiers(facts: MachineFacts) -> str:
    rack = f" in racks of {facts.rack_gpus}" if facts.rack_gpus else ""
    return f"{facts.node_gpus} {facts.topology}{rack}"


def _sure(facts: MachineFacts) -> str:
    if not facts.bias:
        return facts.efficiencies
    low, high = facts.interval
    return f"{facts.efficiencies}, x {low:g} to {high:g}, {facts.bias}"
