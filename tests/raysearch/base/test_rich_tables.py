"""Tables on terminals of any width."""

from __future__ import annotations

import io

import pytest

from raysearch.base.console import InertConsole
from raysearch.base.rich_tables import plain_table, printer

ROWS = [("0", "TEP2 PP4, batch 102 (attention TP2, experts EP2)", "321.2", "requests at once: " + 7 * "many ")]


def shown(width: int) -> str:
    page = io.StringIO()
    columns = ("", "strategy", "tok/s/GPU", "limit")
    InertConsole(file=page, width=width).print(plain_table("What to run", columns, ROWS, left=2, wrap=("limit",)))
    return page.getvalue()


def test_a_table_that_a_narrow_terminal_has_no_room_for_is_lines_that_lose_no_figure() -> None:
    narrow, wide = shown(80), shown(120)
    assert max(map(len, narrow.splitlines())) <= 80
    assert narrow.splitlines()[1].rstrip() == "0  " + ROWS[0][1]
    assert "tok/s/GPU 321.2; limit requests at once" in narrow
    assert "321.2  " in wide
    assert "tok/s/GPU 321.2" not in wide


def test_what_is_piped_has_the_width_that_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    assert printer().width == 80
    monkeypatch.delenv("COLUMNS")
    assert printer().width == 120
