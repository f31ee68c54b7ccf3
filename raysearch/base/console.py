"""Rich's console, on which nothing but Rich itself moves the cursor or has a meaning."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from rich.console import Console, ConsoleOptions, RenderableType
from rich.segment import Segment

from raysearch.base.terminal import inert


class InertConsole(Console):
    """A console for text in which names of files and of others stand as they are.

    Brackets and colons mean nothing, and what a terminal would obey is escaped.
    """

    def __init__(self, **options: Any) -> None:
        super().__init__(markup=False, emoji=False, highlight=False, **options)

    def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterable[Segment]:
        """The segments of something that is printed."""
        for segment in super().render(renderable, options):
            yield segment if segment.control else segment._replace(text=inert(segment.text))
