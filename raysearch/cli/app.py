"""The commands, joined into one application. One file per subcommand in raysearch.cli.commands; this one judges errors.

Nothing imported here may import Ray, torch, pandas or matplotlib: most commands need none of them and start at once.
"""

from __future__ import annotations

import os
import re
import sys
from functools import cache
from importlib import import_module
from itertools import pairwise
from typing import Annotated, Any

import typer
from pydantic import ValidationError

from raysearch.base.errors import FAILURE, INPUT_ERROR, InputError, RunFailed
from raysearch.base.plot_settings import pass_over_local_settings
from raysearch.base.terminal import inert_output
from sim.config.files import CatalogError
from sim.config.mistakes import expectation
from sim.strategy_checks import StrategyError

_ArgumentError: Any = typer.BadParameter.__base__  # of all mistakes on the command line; typer exports this one only

_SURROGATE = re.compile("[\ud800-\udfff]")
"""Bytes that are no text, as Python has them in arguments."""
_SHOWN = 1000
_LONG_WORD = re.compile(rf"\S{{{_SHOWN + 1},}}")
"""No path that can be had is as long, but for the rarest; an error repeats so much of it."""


def _tell_version(asked: bool) -> None:
    if asked:
        from raysearch.base.version import __version__

        print(f"raysearch {__version__}")
        raise typer.Exit


def _of_all_commands(
    version: Annotated[
        bool, typer.Option("--version", help="Show the version and exit.", is_eager=True, callback=_tell_version)
    ] = False,
) -> None:
    pass


_COMMANDS = {
    "list": ("listing", "list_configurations"),
    "evaluate": ("evaluate", "evaluate_strategy"),
    "explain": ("explain", "explain_strategy"),
    "optimum": ("optimum", "show_optimum"),
    "complete": ("complete", "complete"),
    "export": ("export", "export_strategy"),
    "search": ("search", "search_workload"),
    "study": ("study", "run"),
    "status": ("status", "show_status"),
    "recommend": ("recommend", "recommend"),
    "place": ("place", "place"),
    "replay": ("replay", "replay_traffic"),
    "pools": ("pools", "show_pools"),
    "report": ("report", "report_results"),
    "measure": ("measure", "measure"),
    "calibrate": ("calibrate", "calibrate"),
    "forecast": ("forecasting", "forecast_deployments"),
    "pretrain": ("pretrain", "pretrain"),
    "validate": ("validate", "validate"),
    "tune-live": ("tune_live", "tune_live"),
    "verify": ("verify", "verify_results"),
    "verify-rules": ("verify_rules", "verify_rules"),
    "matmul": ("matmul", "matmul"),
}
"""Module in raysearch.cli.commands and function of each, in the order of --help."""


@cache
def application(*names: str) -> typer.Typer:
    """The application with some of its commands, whose modules alone are imported: all of them take a second."""
    made = typer.Typer(
        help="Find the fastest way to serve a large language model on many GPUs.",
        no_args_is_help=True,
        add_completion=False,
        pretty_exceptions_enable=False,
        rich_markup_mode="rich",
        context_settings={"help_option_names": ["-h", "--help"]},
    )
    made.callback()(_of_all_commands)
    for name in names:
        module, function = _COMMANDS[name]
        made.command(name)(getattr(import_module(f"raysearch.cli.commands.{module}"), function))
    return made


def __getattr__(name: str) -> typer.Typer:
    """`app`, the application with all commands, once it is asked for."""
    if name != "app":
        raise AttributeError(name)
    return application(*_COMMANDS)


def run_command() -> int:
    """Runs the command that sys.argv names and returns the exit code; an error is one line on stderr.

    All that is printed meanwhile is escaped: see `raysearch.base.terminal`.
    """
    with inert_output():
        pass_over_local_settings()
        return _run()


def _run() -> int:
    for before, word in pairwise(("", *sys.argv)):
        if not word.isascii() and _SURROGATE.search(word):
            return _fail(f"{word!r}: expected text in UTF-8", INPUT_ERROR)
        if "\n" in word and "--benchmark" not in (before, word.partition("=")[0]):  # it would read as our own lines
            return _fail(f"{word!r}: expected one line", INPUT_ERROR)
    try:
        named = sys.argv[1:2] if sys.argv[1:2] and sys.argv[1] in _COMMANDS else _COMMANDS
        code = application(*named)(prog_name="raysearch", standalone_mode=False)  # of a `typer.Exit`, or None
        sys.stdout.flush()  # now, while a full disk can still be reported
    except _ArgumentError as error:
        return _fail(_moved(error) or _expected(error) or _missing(error) or error.format_message(), INPUT_ERROR)
    except (InputError, CatalogError, StrategyError) as error:
        return _fail(error, INPUT_ERROR)
    except RunFailed as error:
        return _fail(error, FAILURE)
    except SystemExit as end:
        if isinstance(end.__context__, OSError):  # Typer's own, where the reader of its help has gone
            _give_up_stdout()
            return FAILURE
        return _fail("code that the command called exited", FAILURE)
    except OSError as error:
        _give_up_stdout()
        return _fail("" if isinstance(error, BrokenPipeError) else error, FAILURE)
    return code or 0


_RENAMED = {
    "--certificate": "--out FILE",
    "--check": "`raysearch verify FILE`, which needs no other option",
    "--command": "--benchmark",
    "--data": "the folder's name alone: `raysearch calibrate DIR`, `raysearch validate DIR`",
    "--from-aiconfigurator": "the argument itself: `raysearch calibrate WHEEL --set system=b200_sxm`",
    "--from-aiter": "the argument itself: `raysearch calibrate aiter/configs --set system=gfx950`",
    "--from-inferencex": "the argument itself: `raysearch calibrate results.json --set runs`",
    "--held-out": "`raysearch validate DIR --set held_out`; `calibrate` always prints held-out errors",
    "--max-gpus": "--gpus",
    "--max-measurements": "--budget",
    "--moe-ep": "--ep",
    "--moe-tp": "--dp: tp * dp * cp / ep GPUs share an expert",
    "--plots": "--out DIR",
    "--svg": "--out FILE",
}
"""What took the place of options that are gone or looked for; those that became settings are found by their names."""


def _moved(error: Any) -> str | None:
    """Where an option has gone that is not known any more, or None."""
    option, command = getattr(error, "option_name", ""), error.ctx and error.ctx.command
    setting = option.removeprefix("--").removeprefix("no-").replace("-", "_")
    settings = getattr(command and command.callback, "settings", {})
    if setting in settings:
        switch = settings[setting].kind is bool
        value = ("=no" if option.startswith("--no-") else "") if switch else "=VALUE"
        return f"{option} is now --set {setting}{value}"
    if option in _RENAMED:
        return f"{option} is now {_RENAMED[option]}"
    return _of_a_fleet(option) if command and command.name == "place" else None


def _of_a_fleet(option: str) -> str | None:
    """Where `place` has an option of a question, or None of another."""
    from raysearch.deploy.place.fleet_file import place_in_fleet
    from sim.config.question import option_names

    name = option_names().get(option.removeprefix("--"))
    return f"{option}: {place_in_fleet(name)}" if name else None


def _expected(error: Any) -> str | None:
    """What an option's value should have been, where Typer's schema refused it, or None."""
    cause, parameter = error.__cause__, getattr(error, "param", None)
    if not isinstance(cause, ValidationError) or parameter is None:
        return None
    return f"{_name_of(error)}: {expectation(cause.errors()[0])}"


def _missing(error: Any) -> str | None:
    """Which option or argument was not given, or None."""
    if type(error).__name__ != "MissingParameter" or error.param is None:
        return None
    return f"{_name_of(error)} is missing: {error.param.help}"


def _name_of(error: Any) -> str:
    """What a command line calls the option or argument of a mistake."""
    parameter = error.param
    return max(parameter.opts, key=len) if parameter.param_type_name == "option" else parameter.metavar


def _fail(message: object, code: int) -> int:
    if text := _LONG_WORD.sub(_shortened, str(message)):  # none: the reader of a pipe has gone, or help was shown
        print(f"error: {text}", file=sys.stderr)
    return code


def _shortened(word: re.Match[str]) -> str:
    return f"{word[0][:_SHOWN]}... ({len(word[0]):,} characters)"


def _give_up_stdout() -> None:
    """Drops what stdout cannot take, or the interpreter would fail once more at exit."""
    try:
        sys.stdout.flush()
    except OSError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
