"""What terminals obey is escaped in all that is printed, whoever chose a name that stands in it.

Imports next to nothing, as `raysearch.cli.main` does.
"""

from __future__ import annotations

import io
import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, TextIO

_OBEYED = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069]")
"""[spec] Control characters but for tabs and ends of lines, and what turns the direction of Unicode's text."""


def inert(text: str) -> str:
    r"""The text with escapes in place of what terminals obey; ends of lines and tabs stay.

    >>> print(inert("a\x1b[2Jb"))
    a\x1b[2Jb
    """
    return _OBEYED.sub(lambda found: ascii(found[0])[1:-1], text)


class _Inert:
    """A stream whose text does nothing to a terminal.

    Attributes:
        rich_proxied_file: The stream itself, to which Rich's consoles write: they have sequences of their own between
            texts that `raysearch.base.console` has escaped.
    """

    def __init__(self, stream: TextIO) -> None:
        self.rich_proxied_file = stream

    def write(self, text: str) -> int:
        self.rich_proxied_file.write(inert(text))
        return len(text)

    def writelines(self, texts: Iterator[str]) -> None:
        for text in texts:
            self.write(text)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.rich_proxied_file, name)


@contextmanager
def inert_output() -> Iterator[None]:
    """Has everything that is printed meanwhile escaped."""
    streams = sys.stdout, sys.stderr
    for stream in streams:
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")  # the name of a file may hold bytes that are no text
    # A stream that was closed is None.
    sys.stdout, sys.stderr = (each and _Inert(each) for each in streams)  # pyright: ignore[reportAttributeAccessIssue]
    try:
        yield
    finally:
        sys.stdout, sys.stderr = streams


def verbatim(stream: TextIO) -> TextIO:
    """The stream as it is where a program or a file takes its text; a terminal's is escaped all the same."""
    return stream if stream.isatty() else getattr(stream, "rich_proxied_file", stream)
