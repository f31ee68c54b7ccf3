"""`--set NAME=VALUE`: values by their kinds, mistakes in one line, and where options of earlier versions have gone."""

from __future__ import annotations

from typing import Annotated, Any, Literal

import pytest
import typer
from typer import Typer
from typer.testing import CliRunner

from raysearch.base.errors import InputError
from raysearch.cli import app
from raysearch.cli.commands.settings import OtherSettings, Setting, takes_settings

SEEN: dict[str, Any] = {}


@takes_settings
def command(
    runs: Annotated[int, Setting("Runs.", least=1, most=9)] = 3,
    share: Annotated[float | None, Setting("A share.", "all")] = None,
    quick: Annotated[bool, Setting("Less of all.")] = False,
    out_dir: Annotated[str, typer.Option("--out-dir")] = "",
    ending: Annotated[Literal["stop", "go_on"], Setting("What then.")] = "stop",
    ops: Annotated[list[str] | None, Setting("Some ops.")] = None,
) -> None:
    """A command."""
    SEEN.update(runs=runs, share=share, quick=quick, ending=ending, ops=ops)


@takes_settings
def command_of_others(
    runs: Annotated[int, Setting("Runs.", least=1, most=9)] = 3,
    others: Annotated[dict[str, str] | None, OtherSettings("and those of others.")] = None,
) -> None:
    """A command."""
    SEEN.update(runs=runs, others=others)


ALONE = Typer()
ALONE.command()(command)
DEFAULTS = {"runs": 3, "share": None, "quick": False, "ending": "stop", "ops": None}


@pytest.mark.parametrize(
    ("assignments", "changed"),
    [
        ([], {}),
        (["runs=5", "share=0.5"], {"runs": 5, "share": 0.5}),
        (["quick"], {"quick": True}),
        (["quick=no"], {}),
        (["quick = yes", "ending=go_on"], {"quick": True, "ending": "go_on"}),
        (["ops=norm,matmul"], {"ops": ["norm", "matmul"]}),
        (["ops=norm,matmul", "ops=softmax"], {"ops": ["norm", "matmul", "softmax"]}),
    ],
)
def test_a_setting_has_its_value_or_the_default_and_a_list_all(assignments: list[str], changed: dict[str, Any]) -> None:
    words = [word for assignment in assignments for word in ("--set", assignment)]
    assert CliRunner().invoke(ALONE, words, catch_exceptions=False).exit_code == 0
    assert DEFAULTS | changed == SEEN


@pytest.mark.parametrize(
    ("assignment", "message"),
    [
        ("rums=5", "this command has no setting 'rums': did you mean 'runs'?"),
        ("out_dir=x", "this command has no setting 'out_dir': it is an option: --out-dir$"),
        ("runs", "--set runs: expected runs=VALUE"),
        ("runs=ten", "--set runs: expected a whole number .*'ten'"),
        ("runs=10", "--set runs: expected .* to 9, got '10'"),
        ("ending=later", "--set ending: expected stop or go_on, got 'later'"),
        ("quick=perhaps", "--set quick: expected yes or no, got 'perhaps'"),
    ],
)
def test_a_wrong_setting_is_one_message(assignment: str, message: str) -> None:
    with pytest.raises(InputError, match=message):
        CliRunner().invoke(ALONE, ["--set", assignment], catch_exceptions=False)


@pytest.mark.parametrize(("command", "name"), [(command, "runs"), (command_of_others, "first_call")])
def test_a_setting_with_two_values_is_refused(command: Any, name: str) -> None:
    app = Typer()
    app.command()(command)
    words = ["--set", f"{name}=5", "--set", f"{name}=6"]
    with pytest.raises(InputError, match=f"--set {name}: given 2 times: leave all but one out"):
        CliRunner().invoke(app, words, catch_exceptions=False)


def test_a_command_may_take_the_settings_of_others() -> None:
    app = Typer()
    app.command()(command_of_others)
    words = ["--set", "runs=4", "--set", "first-call = last", "--set", "slow"]
    assert CliRunner().invoke(app, words, catch_exceptions=False).exit_code == 0
    assert SEEN["runs"] == 4
    assert SEEN["others"] == {"first_call": "last", "slow": "yes"}


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("pools --kv-hidden 0.5", "--kv-hidden is now --set kv_hidden=VALUE"),
        ("optimum --no-landscape", "--no-landscape is now --set landscape=no"),
        ("search -w x --any-degrees pp", "--any-degrees is now --set any_degrees=VALUE"),
        ("study smoke --trust-code", "--trust-code is now --set trust_code"),
        ("optimum --check best.json", "--check is now `raysearch verify FILE`"),
        ("evaluate --max-gpus 8", "--max-gpus is now --gpus"),
        (
            "calibrate --from-aiter x",
            "--from-aiter is now the argument itself: `raysearch calibrate aiter/configs --set ",
        ),
        ("place bursty_qwens --engine vllm", "--engine: stands in the fleet file: engine = VALUE"),
        (
            "place bursty_qwens --expert-exchange x",
            "--expert-exchange: stands in the fleet file: expert_exchange = VALUE in the table [[models]] of a model",
        ),
        ("calibrate x --system b200_sxm", "--system is now --set system=VALUE"),
    ],
)
def test_an_option_of_an_earlier_version_is_reported_with_its_new_form(
    words: str, message: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.argv", ["raysearch", *words.split()])
    assert app.run_command() == 2
    assert capsys.readouterr().err.startswith(f"error: {message}")
