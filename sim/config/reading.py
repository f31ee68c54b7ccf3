"""The one door through which files come in: configurations, records and rows, whoever wrote them.

A file is handed over by somebody, who chooses every byte of it. So it is a regular file, of which no more is read than
any of ours has; JSON and TOML nest as deep as ours do, name each key once and hold finite numbers. What stands in them
is then checked by a schema. Nothing that is read here imports or runs anything: see `sim.config.code`.
"""

from __future__ import annotations

import errno
import json
import math
import os
import re
import stat
import tomllib
from collections import Counter
from collections.abc import Generator, Iterator
from contextlib import contextmanager
from io import BufferedReader
from pathlib import Path
from typing import Any, cast

from sim.json_object import JsonObject

MOST_VALUES = 1_000_000
"""[assumed] Commas and brackets of a JSON file: three times those of a study of a hundred thousand runs; in memory each
takes some hundred bytes."""
MOST_LEVELS = 64
"""[assumed] Nesting of JSON: several times that of any record."""
_LONGEST_NUMBER = 64
"""[assumed] Characters of a number: the state of a random generator has 39."""
_MOST_DOTS = 16
"""[assumed] Every table of ours is at most three deep; memory grows with the square of a key's parts."""
_NO_FILE = (errno.ENOENT, errno.ELOOP, errno.ENXIO)
"""[spec] Of open(2): a link to nothing, one to itself, a socket."""
_PART = r"""[A-Za-z0-9_"'-]{1,80}"""
_DEEP_KEY = re.compile(rf"{_PART}(?:[ \t]*\.[ \t]*{_PART}){{{_MOST_DOTS},}}[ \t]*[=\].]")
_BRACKETS = re.compile(rb'"(?:[^"\\]++|\\.)*+(?:"|\Z)|[][{}]', re.DOTALL)
_LONE_SURROGATE = re.compile("[\ud800-\udfff]")


class Unreadable(ValueError):
    """A file is not one of ours; the message says why, without its path."""


@contextmanager
def opened(path: Path) -> Generator[BufferedReader]:
    """A regular file, open for reading.

    Raises:
        OSError: There is none, or it cannot be read.
        Unreadable: It is something else by that name: a pipe would be waited for, a device never ends.
    """
    try:
        # Neither waits for a pipe's other end, nor makes a terminal ours.
        handle = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC)
    except ValueError as error:  # a name with a null byte
        raise Unreadable(f"its name is none: {error}") from error
    except OSError as error:
        if error.errno in _NO_FILE and os.path.lexists(path):
            raise Unreadable("it is no regular file") from error
        raise
    if not stat.S_ISREG(os.fstat(handle).st_mode):
        os.close(handle)
        raise Unreadable("it is no regular file")
    with os.fdopen(handle, "rb") as file:
        yield file


def read_bytes(path: Path, most: int) -> bytes:
    """All of a file that has at most so many bytes.

    Raises:
        OSError, Unreadable: See `opened`; or it is longer.
    """
    with opened(path) as file:
        size = os.fstat(file.fileno()).st_size
        content = file.read(most + 1) if size <= most else b""  # it may grow, or not know its size
    if max(size, len(content)) > most:
        raise Unreadable(f"it is too long: expected at most {most:,} bytes")
    return content


def lines(path: Path, longest: int) -> Iterator[bytes]:
    """A file's lines with their ends, one at a time; the last one may have none.

    Raises:
        OSError, Unreadable: See `opened`; or a line is longer than so many bytes.
    """
    with opened(path) as file:
        while line := file.readline(longest + 1):
            if len(line) > longest:
                raise Unreadable(f"a line is too long: expected at most {longest:,} bytes")
            yield line


def parse_json(content: bytes, most_values: int = MOST_VALUES, *, infinite: bool = False) -> Any:
    """What JSON in UTF-8 says.

    Args:
        content: The JSON.
        most_values: Values that it may have.
        infinite: Whether Infinity and NaN are numbers.

    Raises:
        Unreadable: It is no JSON, or holds what none of our files does: keys that stand twice in an object, numbers
            that are not finite or longer than any of ours, more nesting or values than any has.

    >>> parse_json(b'{"a": [1, 2.5]}')
    {'a': [1, 2.5]}
    """
    values = content.count(b",") + (brackets := content.count(b"[") + content.count(b"{"))
    if values > most_values:
        raise Unreadable(f"it has more than {most_values:,} values")
    if brackets > MOST_LEVELS and _depth(content) > MOST_LEVELS:
        raise Unreadable(f"it is nested too deeply: expected at most {MOST_LEVELS} levels")
    try:
        found = (_ANY_JSON if infinite else _JSON).decode(content.decode())
    except RecursionError as error:
        raise Unreadable("it is nested too deeply") from error
    except ValueError as error:
        raise Unreadable(f"it is not valid JSON: {error}") from error
    if b"\\u" in content:
        _check_text(found)
    return found


def parse_object(content: bytes, most_values: int = MOST_VALUES, *, infinite: bool = False) -> JsonObject:
    """The same of an object. Raises: Unreadable."""
    found = parse_json(content, most_values, infinite=infinite)
    if not isinstance(found, dict):
        raise Unreadable(f"expected a JSON object, got {type(found).__name__}")
    return cast("dict[str, Any]", found)


def parse_toml(content: bytes) -> JsonObject:
    """What TOML in UTF-8 says. Raises: Unreadable."""
    try:
        text = content.decode()
    except UnicodeDecodeError as error:
        raise Unreadable(f"it is not valid TOML: {error}") from error
    if _DEEP_KEY.search(text):
        raise Unreadable(f"a key has more than {_MOST_DOTS} parts; no configuration is nested so deeply")
    try:
        return tomllib.loads(text)
    except RecursionError as error:
        raise Unreadable("it is nested too deeply") from error
    except ValueError as error:  # TOMLDecodeError, or an integer of more digits than Python reads
        raise Unreadable(f"it is not valid TOML: {error}") from error


def _depth(content: bytes) -> int:
    depth = deepest = 0
    for token in _BRACKETS.finditer(content):
        mark = token[0]
        if mark in (b"[", b"{"):
            depth += 1
            deepest = max(deepest, depth)
        elif mark in (b"]", b"}"):
            depth -= 1
    return deepest


def _once_each(pairs: list[tuple[str, Any]]) -> JsonObject:
    """An object whose keys stand once; Python takes the last of equal ones without a word. Raises: ValueError."""
    content = dict(pairs)
    if len(content) < len(pairs):
        (repeated, _), *_ = Counter(key for key, _ in pairs).most_common(1)
        raise ValueError(f"{repeated!r} stands more than once in one object")
    return content


def _whole_number(text: str) -> int:
    if len(text) > _LONGEST_NUMBER:
        raise ValueError(f"a number has {len(text):,} digits")
    return int(text)


def _finite_number(text: str) -> float:
    value = float(text)
    if not math.isfinite(value):
        raise ValueError(f"expected finite numbers, got {text[:_LONGEST_NUMBER]}")
    return value


_JSON = json.JSONDecoder(
    object_pairs_hook=_once_each,
    parse_int=_whole_number,
    parse_float=_finite_number,
    parse_constant=_finite_number,
)
_ANY_JSON = json.JSONDecoder(object_pairs_hook=_once_each, parse_int=_whole_number)


def _check_text(value: Any) -> None:
    """Half of a pair of UTF-16 can neither be printed nor written. Raises: Unreadable."""
    if isinstance(value, str):
        if _LONE_SURROGATE.search(value):
            raise Unreadable(f"it is not valid JSON: {value!r:.80} contains half a character")
    elif isinstance(value, dict):
        for pair in cast("dict[str, Any]", value).items():
            _check_text(pair[0])
            _check_text(pair[1])
    elif isinstance(value, list):
        for item in cast("list[Any]", value):
            _check_text(item)
