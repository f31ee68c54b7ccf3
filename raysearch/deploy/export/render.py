"""What exporters build, as text: a command for a shell, words and variables of a container, YAML, a Python file.

Nowhere else does a value enter a text that something reads again: each form has one function, and a library's quoting.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

import yaml

from sim.json_object import JsonFields


@dataclass(frozen=True)
class Variable:
    """A word that is known where a command runs: the value of an environment variable, and what stands around it."""

    name: str
    suffix: str = ""
    prefix: str = ""

    def __str__(self) -> str:
        return f"{self.prefix}${self.name}{self.suffix}"


Argument = str | Variable
Flag = tuple[str, Argument | int | float | None]
"""An option and its value; None for a switch."""


def words(flags: Iterable[Flag]) -> list[Argument]:
    """Options and values, one word each."""
    found = (word for flag in flags for word in flag if word is not None)
    return [word if isinstance(word, Variable) else str(word) for word in found]


@dataclass(frozen=True)
class Command:
    """What starts something.

    Attributes:
        program: The program, and what stands before the options.
        flags: The options.
        environment: Variables that it finds set beside those of whoever starts it.
    """

    program: tuple[Argument, ...]
    flags: tuple[Flag, ...] = ()
    environment: Mapping[str, str] = field(default_factory=dict)

    @property
    def words(self) -> list[Argument]:
        """All arguments, the program first."""
        return [*self.program, *words(self.flags)]


def shell_text(command: Command) -> str:
    r"""A command as one would type it, an option per line; it ends where a variable that it takes is not set.

    >>> print(shell_text(Command(("vllm", "serve", "a b"), (("--host", Variable("HOST")),), {"A": "1 2"})))
    A='1 2' vllm serve 'a b' \
      --host "${HOST:?}"
    """
    set_before = [f"{name}={shlex.quote(value)}" for name, value in command.environment.items()]
    lines = [[*set_before, *map(_quoted, command.program)], *([*map(_quoted, words([flag]))] for flag in command.flags)]
    return " \\\n  ".join(map(" ".join, lines))


def _quoted(word: Argument) -> str:
    if isinstance(word, Variable):
        before, after = (shlex.quote(part) if part else "" for part in (word.prefix, word.suffix))
        return f'{before}"${{{word.name}:?}}"{after}'
    return shlex.quote(word)


def container_words(found: Iterable[Argument]) -> list[str]:
    """Words of a container's command: Kubernetes puts variables in the place of $(NAME), and takes $$ for $.

    >>> container_words(["--host", Variable("HOST"), "$(HOST)"])
    ['--host', '$(HOST)', '$$(HOST)']
    """
    return [
        f"{_plain(word.prefix)}$({word.name}){_plain(word.suffix)}" if isinstance(word, Variable) else _plain(word)
        for word in found
    ]


def _plain(text: str) -> str:
    return text.replace("$", "$$")


def container_environment(environment: Mapping[str, str]) -> list[dict[str, str]]:
    """Variables of a container, whose values Kubernetes reads as it does words."""
    return [{"name": name, "value": container_words([value])[0]} for name, value in environment.items()]


class _Dumper(yaml.SafeDumper):
    """Quotes what either version of YAML would take for a number: of 1e3 and 0o17 PyYAML knows 1.1's reading alone.

    What occurs twice is written twice.
    """

    def ignore_aliases(self, data: object) -> bool:
        return True


_Dumper.add_implicit_resolver(
    "tag:yaml.org,2002:float",
    re.compile(r"[-+]?(0o[0-7]+|0x[0-9a-fA-F]+|(\.[0-9]+|[0-9]+(\.[0-9]*)?)([eE][-+]?[0-9]+)?)$"),
    [*"-+.0123456789"],
)
_Dumper.add_representer(
    str, lambda dumper, text: dumper.represent_scalar("tag:yaml.org,2002:str", text, "|" if "\n" in text else None)
)


def yaml_text(value: JsonFields) -> str:
    """A value as YAML, in its own order.

    >>> print(yaml_text({"name": "1e3", "on": "yes"}), end="")
    name: '1e3'
    'on': 'yes'
    """
    return yaml.dump(value, Dumper=_Dumper, sort_keys=False)


@dataclass(frozen=True, repr=False)
class SourceName:
    """A name of an exported Python file; its `repr` is the code."""

    name: str

    def __repr__(self) -> str:
        return self.name


@dataclass(frozen=True, repr=False)
class Call:
    """A call in an exported Python file; its `repr` is the code.

    >>> Call("P", (("ep", "tp"), None), {"local": SourceName("YES")})
    P(('ep', 'tp'), None, local=YES)
    """

    function: str
    arguments: tuple[object, ...] = ()
    named: Mapping[str, object] = field(default_factory=dict)

    def __repr__(self) -> str:
        given = [*map(repr, self.arguments), *(f"{name}={value!r}" for name, value in self.named.items())]
        return f"{self.function}({', '.join(given)})"


def python_text(head: str, constants: Mapping[str, object], tail: str) -> str:
    """A Python file: a docstring and imports, constants, functions.

    Args:
        head: Code before the constants, the same in every file.
        constants: By name; what a dictionary or a tuple holds stands on a line each.
        tail: Code behind them, the same in every file.
    """
    lines = "\n".join(f"{name} = {_literal(value)}" for name, value in constants.items())
    return f"{head.strip()}\n\n{lines}\n\n\n{tail.strip()}\n"


def _literal(value: object) -> str:
    if isinstance(value, Mapping) and value:
        return "\n".join(["{", *(f"    {key!r}: {each!r}," for key, each in value.items()), "}"])
    if isinstance(value, tuple) and value and all(isinstance(each, str) for each in value):
        return "\n".join(["(", *(f"    {each!r}," for each in value), ")"])
    return repr(value)
