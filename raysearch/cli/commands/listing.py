"""`raysearch list`: what can be named on the command line and in study files, and what is known of it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import typer

from raysearch.base.named_code import declared_points
from raysearch.cli.commands.options import JsonOption, print_json
from raysearch.cli.commands.settings import DeclaredSetting, settings_of
from raysearch.deploy.export.formats import EXPORTERS_GROUP, exporter_names, exporter_summary
from raysearch.searchers.registry import SEARCHERS_GROUP, searcher_names, searcher_summary
from raysearch.simulators.plugin import SIMULATORS_GROUP
from sim.config.catalog import engine_versions
from sim.config.files import list_names
from sim.config.question import QUESTION_FIELDS
from sim.engines.engine_registry import ENGINES_GROUP, SHIPPED, engine_rules

if TYPE_CHECKING:
    from raysearch.cli.capabilities import MachineFacts

_PLUGIN_GROUPS = {
    "engine": ENGINES_GROUP,
    "exporter": EXPORTERS_GROUP,
    "searcher": SEARCHERS_GROUP,
    "simulator": SIMULATORS_GROUP,
}


def list_configurations(as_json: JsonOption = False) -> None:
    """List workloads, machines, models, engines, searchers, exporters, plugins and settings, and what was measured.

    \b
    Every machine and model can be evaluated, optimised and searched. Kernel times and, separately, serving times are
      measured      on the machine itself, and fitted;
      carried over  from another machine, at this one's peak rates: the interval is wider, and the bias is stated;
      assumed       where nothing similar was measured: the roofline at a median efficiency.

    \b
    Examples:
      raysearch list
      raysearch list --json
    """
    from raysearch.cli.capabilities import machine_facts, model_facts

    names = {kind: list_names(kind) for kind in ("hardware", "models", "workloads", "studies", "fleets")}
    searchers = {name: searcher_summary(name) for name in searcher_names()}
    exports = {name: exporter_summary(name) for name in exporter_names()}
    engines = {name: engine_rules(name) for name in SHIPPED}
    plugins = {kind: _installed(group) for kind, group in _PLUGIN_GROUPS.items()}
    machines = {name: machine_facts(name) for name in names["hardware"]}
    models = {name: model_facts(name) for name in names["models"]}
    settings = _settings()
    if as_json:
        facts = {
            kind: {name: asdict(each) for name, each in of_kind.items()}
            for kind, of_kind in (("hardware", machines), ("models", models))
        }
        plugged = {"engines": list(engines), "searchers": list(searchers), "exports": list(exports), "plugins": plugins}
        print_json({**names, **plugged, "settings": settings, "facts": facts})
        return
    from raysearch.base.rich_tables import plain_table, printer

    rows = [(kind, ", ".join(names[kind])) for kind in ("workloads", "studies", "fleets")]
    printer().print(plain_table(None, ("kind", "names"), rows, left=2, wrap=("names",)))
    rows = [(name, f"{rules.title} {', '.join(engine_versions(name))}") for name, rules in engines.items()]
    printer().print(plain_table(None, ("engine", "versions, the first by default"), rows, left=2))
    printer().print(plain_table(None, ("searcher", "what it does"), searchers.items(), left=2, wrap=("what it does",)))
    printer().print(
        plain_table(None, ("export --to", "what it writes"), exports.items(), left=2, wrap=("what it writes",))
    )
    rows = [(kind, name, where) for kind, found in plugins.items() for name, where in found.items()]
    printer().print(plain_table(None, ("plugin", "name", "module:attribute, package"), rows, left=3))
    rows = [
        (name, ", ".join(each["commands"]), each["values"], each["default"], each["help"])
        for name, each in settings.items()
    ]
    columns = ("--set", "of", "values", "default", "meaning")
    printer().print(plain_table(None, columns, rows, left=5, wrap=columns[1:]))
    rows = [(name, _tiers(facts), facts.serving, _sure(facts)) for name, facts in machines.items()]
    columns = ("hardware", "node", "serving", "kernels' efficiencies")
    printer().print(plain_table(None, columns, rows, left=4, wrap=columns[3:]))
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


def _settings() -> dict[str, dict[str, Any]]:
    """Every setting of a command by its name, which means the same in all; "every question" has those of `Question`."""
    from raysearch.cli.app import app

    commands: dict[str, Any] = vars(typer.main.get_command(app))["commands"]
    of: dict[str, dict[str, DeclaredSetting]] = {}
    for command, about in sorted(commands.items()):
        for name, each in settings_of(about.callback).items():
            of.setdefault(name, {})["every question" if name in QUESTION_FIELDS else command] = each
    return {
        name: {
            "commands": list(found),
            "values": _apart({command: each.values for command, each in found.items()}),
            "default": _apart({command: each.usual for command, each in found.items()}),
            "help": next(iter(found.values())).about.help,
        }
        for name, found in sorted(of.items())
    }


def _apart(texts: Mapping[str, str]) -> str:
    """A text that commands share, or each command's own."""
    if len(set(texts.values())) == 1:
        return next(iter(texts.values()))
    return "; ".join(f"{command}: {text}" for command, text in texts.items())


def _installed(group: str) -> dict[str, str]:
    """What installed packages add, by name: its code, which is not imported, and its package."""
    return {
        name: f"{point.value}, {point.dist.name if point.dist else 'unknown'}"
        for name, point in declared_points(group).items()
    }


def _tiers(facts: MachineFacts) -> str:
    rack = f" in racks of {facts.rack_gpus}" if facts.rack_gpus else ""
    return f"{facts.node_gpus} {facts.topology}{rack}"


def _sure(facts: MachineFacts) -> str:
    if not facts.bias:
        return facts.efficiencies
    low, high = facts.interval
    return f"{facts.efficiencies}, x {low:g} to {high:g}, {facts.bias}"
