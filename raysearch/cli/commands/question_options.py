"""The options of a question, derived from its fields: every command that prices a deployment has all of them."""

from __future__ import annotations

import functools
import inspect
import sys
from collections.abc import Callable, Mapping
from enum import StrEnum
from types import UnionType
from typing import Annotated, Any, Literal, get_args, get_origin, get_type_hints

import typer

from raysearch.cli.commands.settings import Setting, takes_settings
from raysearch.deploy.contexts import context_warnings
from sim.config.files import config_path
from sim.config.question import QUESTION_FIELDS, About, Panel, Question, load_question, option_of
from sim.workload import Workload

_PANELS: Mapping[Panel, str] = {
    "named": "Deployment by name or file",
    "deployment": "Deployment",
    "limits": "Limits",
    "search": "Strategies to search",
}
_SHORT = {"workload": "-w"}


def takes_question(command: Callable[..., None]) -> Callable[..., None]:
    """Gives a command the options of a question and `--set`, and passes it the question as `question`.

    A command whose `question` has a default gets that where none of the options is given.
    """
    signature = inspect.signature(command, eval_str=True).parameters
    own, needed = [p for p in signature.values() if p.name != "question"], signature["question"]

    @functools.wraps(command)
    def with_options(**options: Any) -> None:
        given = {name: _plain(options.pop(name, None)) for name in QUESTION_FIELDS}
        if needed.default is not needed.empty and all(value is None for value in given.values()):
            command(question=needed.default, **options)
        else:
            command(question=Question(**given), **options)

    keyword = inspect.Parameter.KEYWORD_ONLY
    parameters = [parameter.replace(kind=keyword) for parameter in own]
    parameters += [
        inspect.Parameter(name, keyword, default=None, annotation=annotation) for name, annotation in _OPTIONS.items()
    ]
    with_options.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    with_options.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    del with_options.__wrapped__  # typer would ask it for its own options
    return takes_settings(with_options)


def loaded(question: Question, *, warned: bool = False) -> Workload:
    """The workload of a question; stderr has what was read of a Hugging Face configuration, and what it warns of.

    Args:
        question: What is asked.
        warned: Whether the answer has the warnings itself.

    Raises:
        CatalogError: See `load_question`.
    """
    _show_import(question)
    workload = load_question(question)
    for text in () if warned else context_warnings(question, workload):
        print(f"warning: {text}", file=sys.stderr)
    return workload


def _show_import(question: Question) -> None:
    imported = question.model_import() if question.workload is None else None
    if imported is None or question.model is None:
        return
    formats = imported.formats
    experts = f", experts in {formats.experts}" if formats.experts else ""
    path = config_path("models", question.model)
    print(f"{path}: {imported.family}, weights in {formats.weights or 'a format not known'}{experts}", file=sys.stderr)
    for note in imported.notes:
        print(f"  {note}", file=sys.stderr)
    if imported.unread:
        from envs.strategy_env import brief  # with gymnasium, which takes as long as a search

        print(f"  not understood: {brief(', '.join(imported.unread))}", file=sys.stderr)


def _plain(value: Any) -> Any:
    return value.value if isinstance(value, StrEnum) else value


def _annotation(name: str, hint: Any, about: About) -> Any:
    """The annotation from which typer makes an option, or that of a setting."""
    kinds = get_args(hint) if get_origin(hint) is UnionType else (hint,)
    (kind,) = (str,) if str in kinds else [each for each in kinds if each is not type(None)]
    if about.rare:
        return Annotated[kind | None, Setting(about.help, about.usual, about.least, about.most)]
    if get_origin(kind) is Literal:
        kind = StrEnum(name, {each: each for each in get_args(kind)})
    option = typer.Option(
        option_of(name),
        *([_SHORT[name]] if name in _SHORT else []),
        help=about.help,
        rich_help_panel=_PANELS[about.panel],
        show_default=about.usual,
        min=about.least,
        max=about.most,
    )
    return Annotated[kind | None, option]


_HINTS = get_type_hints(Question)
_OPTIONS = {name: _annotation(name, _HINTS[name], about) for name, about in QUESTION_FIELDS.items()}
