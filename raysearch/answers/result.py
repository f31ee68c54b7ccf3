"""What all results share."""

from __future__ import annotations

import io
from abc import ABC, abstractmethod
from collections.abc import Iterator
from typing import TYPE_CHECKING

from sim.json_object import JsonFields, JsonObject

if TYPE_CHECKING:
    import pandas as pd
    from rich.console import Console, ConsoleOptions, RenderableType

_NOTEBOOK_COLUMNS = 140


class Result(ABC):
    """An answer: print it, display it in a notebook, or use it as data."""

    @property
    @abstractmethod
    def feasible(self) -> bool:
        """Whether anything feasible was found; if not, the command exits with 3."""

    @abstractmethod
    def to_dict(self) -> JsonFields:
        """The answer as `--json` prints it."""

    @abstractmethod
    def to_rows(self) -> list[JsonObject]:
        """Its table, a dictionary per row."""

    @abstractmethod
    def blocks(self) -> Iterator[RenderableType]:
        """What the command prints, block by block."""

    def to_frame(self) -> pd.DataFrame:
        """Its table as a DataFrame."""
        import pandas as pd

        return pd.DataFrame(self.to_rows())

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> Iterator[RenderableType]:
        from rich.text import Text

        for block in self.blocks():
            yield Text(self._in_python(block)) if isinstance(block, str) else block  # brackets are no markup

    def _in_python(self, text: str) -> str:
        """A text of the command, whose options are named as arguments."""
        from raysearch.base.arguments import as_arguments, option_names

        return as_arguments(text, option_names("forms", "replays"))

    def __str__(self) -> str:
        return _rendered(self, html=False)

    def __repr__(self) -> str:
        first = next(iter(self.blocks()), "")
        lines = (first if isinstance(first, str) else _rendered(first, html=False)).strip().split("\n")
        return f"<{type(self).__name__}: {lines[0].strip()}>"

    def _repr_html_(self) -> str:
        return _rendered(self, html=True)


def _rendered(shown: RenderableType, *, html: bool) -> str:
    from raysearch.base.console import InertConsole

    page = io.StringIO()
    console = InertConsole(file=page, record=html, width=_NOTEBOOK_COLUMNS)
    console.print(shown)
    if not html:
        return page.getvalue().rstrip()
    return console.export_html(inline_styles=True, code_format='<pre style="line-height:1.2">{code}</pre>')
