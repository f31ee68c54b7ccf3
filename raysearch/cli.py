"""The `raysearch` command. One file per subcommand in raysearch.commands; this one joins them and judges errors.

Nothing imported here may import Ray, torch, pandas or matplotlib: most commands need none of them and start at once.
"""

from __future__ import annotations

import signal
import sys
from typing import Any, NoReturn

import typer

from raysearch.commands import (
    calibrate,
    evaluate,
    explain,
    listing,
    optimum,
    report,
    search,
    study,
    validate,
    verify_rules,
)
from raysearch.errors import InputError, Interrupted, RunFailed
from sim.catalog import CatalogError
from sim.validate import StrategyError

INPUT_ERROR = 2
"""Exit code of a caller's mistake, as of a wrong option."""
FAILURE = 1
"""Exit code of a run that broke down."""

app = typer.Typer(
    help="Search for the fastest way to shard a large language model over many GPUs.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
)
app.command("list")(listing.list_configurations)
app.command("evaluate")(evaluate.evaluate_strategy)
app.command("explain")(explain.explain_strategy)
app.command("optimum")(optimum.show_optimum)
app.command("calibrate")(calibrate.calibrate)
app.command("validate")(validate.validate)
app.command("search")(search.search_workload)
app.command("study")(study.run)
app.command("report")(report.report_results)
app.command("verify-rules")(verify_rules.verify_rules)


def main() -> None:
    """Runs the command line; what the caller can mend is one line on stderr, never a traceback.

    Exit codes: 0 done, 1 a run failed, 2 a mistake in what was given, 128 + n stopped by signal n.
    """
    for signum in (signal.SIGINT, signal.SIGTERM):
        signal.signal(signum, _stop)
    try:
        app(prog_name="raysearch")
    except (InputError, CatalogError, StrategyError) as error:
        _fail(f"error: {error}", INPUT_ERROR)
    except RunFailed as error:
        _fail(f"error: {error}", FAILURE)
    except Interrupted as stop:
        _fail(str(stop), stop.exit_code)


def _stop(signum: int, _frame: Any) -> NoReturn:
    raise Interrupted(signum)


def _fail(message: str, code: int) -> NoReturn:
    print(message, file=sys.stderr)
    sys.exit(code)
