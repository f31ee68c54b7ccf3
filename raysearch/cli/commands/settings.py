"""Settings: what `--set NAME=VALUE` changes of a command, for what is seldom changed; declared as options are."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Container, Mapping, Sequence
from dataclasses import dataclass
from types import UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

import typer
from pydantic import Field, TypeAdapter, ValidationError
from typer.models import OptionInfo

from raysearch.base.errors import InputError
from sim.near_names import did_you_mean, nearest_name


@dataclass(frozen=True, slots=True)
class Setting:
    """What a parameter of a command is annotated with that is a setting of its.

    Attributes:
        help: One sentence, with the unit.
        usual: What holds where it is not given, in words; None for the parameter's default.
        least, most: Bounds, both included.
    """

    help: str
    usual: str | None = None
    least: float | None = None
    most: float | None = None


@dataclass(frozen=True, slots=True)
class OtherSettings:
    """What a parameter of a command is annotated with that takes, as texts by name, all settings that none declares.

    Attributes:
        help: One sentence: whose settings they are.
    """

    help: str


@dataclass(frozen=True, slots=True)
class DeclaredSetting:
    """A setting of one command: see `Setting`.

    Attributes:
        kind: Of its values; lists are of texts.
        about: What it means.
        default: What holds where it is not given.
    """

    kind: Any
    about: Setting
    default: Any

    @property
    def usual(self) -> str:
        """What holds where it is not given, for people; "" of a switch that is off."""
        if self.about.usual is not None:
            return self.about.usual
        if self.default is None or self.default is False:
            return ""
        return "yes" if self.default is True else f"{self.default:g}" if self.kind is float else str(self.default)

    @property
    def values(self) -> str:
        """What it may be, for people."""
        if get_origin(self.kind) is Literal:
            *most, last = map(str, get_args(self.kind))
            return f"{', '.join(most)} or {last}" if most else last
        if get_origin(self.kind) is list:
            return "texts, separated by commas"
        least, most = self.about.least, self.about.most
        words = {bool: "yes or no", int: "a whole number", float: "a number", str: "a text"}.get(self.kind, "a text")
        if least is None:
            return words
        return f"{words} from {least:g}" if most is None else f"{words} from {least:g} to {most:,.10g}"

    def value(self, name: str, text: str, *, bare: bool) -> Any:
        """The value that a text means; `bare` of a switch that is named without one. Raises: InputError."""
        if bare and self.kind is not bool:
            raise InputError(f"--set {name}: expected {name}=VALUE")
        given = text.split(",") if get_origin(self.kind) is list else text
        try:
            return True if bare else TypeAdapter(self._bounded()).validate_python(given)
        except ValidationError:
            raise InputError(f"--set {name}: expected {self.values}, got {text!r:.200}{self._nearest(text)}") from None

    def _nearest(self, text: str) -> str:
        known = list(map(str, get_args(self.kind))) if get_origin(self.kind) is Literal else []
        hint = nearest_name(text, known)
        return f": {hint}" if hint else ""

    def _bounded(self) -> Any:
        numeric = self.kind in (int, float)
        return Annotated[self.kind, Field(ge=self.about.least, le=self.about.most)] if numeric else self.kind


def takes_settings(command: Callable[..., None]) -> Callable[..., None]:
    """Gives a command `--set` for those of its parameters that are annotated with a `Setting`."""
    parameters = inspect.signature(command, eval_str=True).parameters.values()
    settings = {each.name: _declared(each) for each in parameters if _about(each)}
    others = {each.name: text for each in parameters if (text := _help_of_others(each))}

    @functools.wraps(command)
    def with_settings(**options: Any) -> None:
        assignments = [_parts(each) for each in options.pop("assignments", None) or ()]
        declared = [each for each in assignments if each[0] in settings or not others]
        _check_each_once(
            [name for name, _ in assignments if name not in settings or get_origin(settings[name].kind) is not list]
        )
        left = {name: "yes" if text is None else text for name, text in assignments if name not in settings}
        command(**options, **_given(settings, declared, flags), **dict.fromkeys(others, left))

    own = [each.replace(kind=each.KEYWORD_ONLY) for each in parameters if each.name not in (*settings, *others)]
    flags = [flag for each in own for flag in _flags(each)]
    annotation = _set_option(settings, list(others.values()))
    own.append(inspect.Parameter("assignments", inspect.Parameter.KEYWORD_ONLY, default=None, annotation=annotation))
    with_settings.__signature__ = inspect.Signature(own)  # type: ignore[attr-defined]
    with_settings.__annotations__ = {each.name: each.annotation for each in own}
    with_settings.__dict__["settings"] = settings
    del with_settings.__wrapped__  # typer would ask it for its own options
    return with_settings


def settings_of(command: Any) -> Mapping[str, DeclaredSetting]:
    """The settings of a command, by name; none of one that takes no `--set`."""
    return getattr(command, "settings", {})


def as_words(given: Mapping[str, object]) -> list[str]:
    """The words of a command line that set what is not None.

    >>> as_words({"workers": 4, "on_failure": None, "trust_code": True})
    ['--set', 'workers=4', '--set', 'trust_code=yes']
    """
    texts = {name: "yes" if value is True else str(value) for name, value in given.items() if value is not None}
    return [word for name, text in texts.items() for word in ("--set", f"{name}={text}")]


def _given(
    settings: Mapping[str, DeclaredSetting], assignments: Sequence[tuple[str, str | None]], flags: Container[str]
) -> dict[str, Any]:
    """Every setting's value, or the default; those of a list add up."""
    found: dict[str, Any] = {}
    for name, text in assignments:
        if name not in settings:
            option = "--" + name.replace("_", "-")
            hint = f"it is an option: {option}" if option in flags else did_you_mean(name, settings)
            raise InputError(f"--set: this command has no setting {name!r}: {hint}")
        value = settings[name].value(name, text or "", bare=text is None)
        found[name] = [*found.get(name, ()), *value] if isinstance(value, list) else value
    return {name: found.get(name, each.default) for name, each in settings.items()}


def _check_each_once(names: Sequence[str]) -> None:
    """Raises: InputError: A setting has two values."""
    if twice := [name for name in names if names.count(name) > 1]:
        raise InputError(f"--set {twice[0]}: given {names.count(twice[0])} times: leave all but one out")


def _parts(assignment: str) -> tuple[str, str | None]:
    """Name and value; None where there is none."""
    name, sign, text = assignment.partition("=")
    return name.strip().replace("-", "_"), text.strip() if sign else None


def _about(parameter: inspect.Parameter) -> Setting | None:
    return next((each for each in get_args(parameter.annotation)[1:] if isinstance(each, Setting)), None)


def _flags(parameter: inspect.Parameter) -> list[str]:
    """What a command line calls an option; typer has the first as its default until it is resolved."""
    about = next((each for each in get_args(parameter.annotation)[1:] if isinstance(each, OptionInfo)), None)
    return [] if about is None else [each for each in (about.default, *(about.param_decls or ())) if each]


def _help_of_others(parameter: inspect.Parameter) -> str | None:
    return next((each.help for each in get_args(parameter.annotation)[1:] if isinstance(each, OtherSettings)), None)


def _declared(parameter: inspect.Parameter) -> DeclaredSetting:
    hint, about = get_args(parameter.annotation)[0], _about(parameter)
    assert about is not None
    kinds = get_args(hint) if get_origin(hint) in (Union, UnionType) else (hint,)
    (kind,) = [each for each in kinds if each is not type(None)]
    return DeclaredSetting(kind, about, parameter.default)


def _set_option(settings: Mapping[str, DeclaredSetting], others: Sequence[str]) -> Any:
    """The option's annotation, whose help has a line for each setting, and for those that others declare."""
    lines = [
        f"[bold]{name}[/bold]: {each.about.help}{f' (default: {each.usual})' * bool(each.usual)}"
        for name, each in settings.items()
    ]
    text = "\n\n".join(["Change a setting; may be repeated.", *lines, *others])
    return Annotated[
        list[str] | None,
        typer.Option("--set", metavar="NAME=VALUE", help=text, rich_help_panel="Settings", show_default=False),
    ]
