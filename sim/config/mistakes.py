"""What is wrong with a value or a file, on one line: what was expected, what was given, and the nearest known name.

pydantic finds the mistakes; its words ("Input should be less than or equal to 64") become ours ("expected at most 64").
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import TYPE_CHECKING, get_args

from pydantic import BaseModel, ValidationError

from sim.near_names import did_you_mean, nearest_name

if TYPE_CHECKING:
    from pydantic_core import ErrorDetails

_MOST_MISTAKES = 8
_LONGEST_VALUE = 200
FILE_NAME_PATTERN = r"^[A-Za-z0-9_][A-Za-z0-9_.-]*$"
"""Names become file names and parts of run ids."""
LABEL_PATTERN = r"^[A-Za-z0-9_.-]+$"
REPOSITORY_PATTERN = r"^[^-\s]\S*$"
VERSION_PATTERN = r"^[A-Za-z0-9_][A-Za-z0-9_.+-]*$"
STAGES_PATTERN = r"^(\d{1,4}(,\d{1,4})*)?$"
_FORMS = {
    FILE_NAME_PATTERN: "a name of letters, digits, '_', '.' and '-' that starts with none of the last two",
    LABEL_PATTERN: "a name of letters, digits, '_', '.' and '-'",
    REPOSITORY_PATTERN: "a repository such as Qwen/Qwen3-32B, without spaces",
    VERSION_PATTERN: "a version such as 0.12.0",
    STAGES_PATTERN: "numbers of layers separated by commas, such as 14,16,16,15",
}
"""Texts of a certain form, in words."""
_WORDS = (
    (r"Value error, '.*' is not one of (.*)\.", r"expected one of \1"),
    (r"Value error, (.*)", r"\1"),
    (r"Input should be less than or equal to (.*)", r"expected at most \1"),
    (r"Input should be greater than or equal to (.*)", r"expected at least \1"),
    (r"Input should be (greater|less) than (.*)", r"expected a number \1 than \2"),
    (r"Input should be a valid integer.*", "expected a whole number"),
    (r"Input should be a valid number.*", "expected a number"),
    (r"Input should be a valid string", "expected text"),
    (r"Input should be a valid boolean.*", "expected true or false"),
    (r"Input should be a valid (?:list|tuple|array)", "expected a list"),
    (r"Input should be (?:an object|a valid dictionary).*", "expected a table"),
    (r"Input should be (.*)", r"expected \1"),
    (r"String should have at (least|most) (.*)", r"expected text of at \1 \2"),
    (r"String should match pattern '(.*)'", r"expected text of the form \1"),
    (r"\w+ should have at (least|most) (\d+) item(s?) after validation.*", r"expected a list of at \1 \2 value\3"),
    (r"(?s:(.*))", r"\1"),
)


def expectation(mistake: ErrorDetails) -> str:
    """What was expected of a value and what was given, without its key.

    >>> from pydantic import TypeAdapter
    >>> try:
    ...     TypeAdapter(int).validate_python("x")
    ... except ValidationError as error:
    ...     expectation(error.errors()[0])
    "expected a whole number, got 'x'"
    """
    context, value = mistake.get("ctx", {}), mistake["input"]
    form = _FORMS.get(str(context.get("pattern")))
    text = f"expected {form}" if form else _in_our_words(mistake["msg"])
    if re.search(r"\bgot\b", text) or isinstance(value, dict | BaseModel):
        return text
    given = repr(value)
    if len(given) > _LONGEST_VALUE:
        given = f"{given[:_LONGEST_VALUE]}..."
    if given in text:  # as in "unknown phase 'serv': did you mean 'serve'?"
        return text
    near = nearest_name(value, re.findall(r"'([^']*)'", text)) if isinstance(value, str) else ""
    return f"{text}, got {given}" + (f": {near}" if near else "")


def first_error_text(
    error: ValidationError, schema: type[BaseModel], name_of: Callable[[str], str] | None = None
) -> str:
    """What is wrong with a file or options: key, expectation and value of the first mistakes, on one line.

    Args:
        error: What pydantic found.
        schema: What it compared with; unknown keys are compared with its keys.
        name_of: What the reader calls a key, where that is not its name in the file.
    """
    lines: list[str] = []
    mistakes = [item for item in error.errors() if _is_of_its_kind(item)]
    for item in mistakes[:_MOST_MISTAKES]:
        location = tuple(part for part in item["loc"] if not _names_a_type(part))
        key = ".".join(str(part) for part in location)
        if item["type"] == "extra_forbidden":
            text = f"unknown key; {did_you_mean(str(location[-1]), _known_keys(schema, location[:-1]))}"
        else:
            text = "missing" if item["type"] == "missing" else expectation(item)
        lines.append(f"{name_of(key) if name_of else key}: {text}" if key else text)
    more = len(mistakes) - len(lines)
    return "; ".join(lines) + (f"; and {more} more" if more else "")


def _in_our_words(message: str) -> str:
    pattern, words = next(each for each in _WORDS if re.fullmatch(each[0], message))
    return re.sub(pattern, words, message, count=1)


def _known_keys(schema: type[BaseModel], location: tuple[str | int, ...]) -> list[str]:
    for part in location:
        if isinstance(part, int):
            continue  # one of a list of tables, which are all alike
        field = schema.model_fields.get(str(part))
        candidates = (field.annotation, *get_args(field.annotation)) if field else ()
        nested = [c for c in candidates if isinstance(c, type) and issubclass(c, BaseModel)]
        if not nested:
            return []
        schema = nested[0]
    return list(schema.model_fields)


def _names_a_type(part: int | str) -> bool:
    """Whether a part of a location is pydantic's name of one type that a key may have, and no key."""
    return isinstance(part, str) and "[" in part


def _is_of_its_kind(item: ErrorDetails) -> bool:
    """Where a key takes numbers or a name: of a text only what is wrong with the name, of numbers what is with them."""
    types = [part for part in item["loc"] if _names_a_type(part)]
    if not types:
        return True
    text = isinstance(item["input"], str) and _names_a_type(item["loc"][-1])
    return text == str(types[-1]).startswith("literal[")
