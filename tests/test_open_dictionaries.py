"""Where values travel as dictionaries whose keys no type knows: files and records are, little else is."""

from __future__ import annotations

import ast
import re
from collections import Counter
from collections.abc import Iterator

from tests.conftest import CHECKOUT

OPEN = re.compile(r"\bJson(?:Object|Fields)\b|\b(?:dict|Mapping)\[str, (?:Any|object)\]")
READERS_AND_WRITERS = re.compile(
    r"""
    sim/config/.* | sim/json_object | sim/prices/(?:calibration|engine|machine)  # configuration and coefficient files
    | raysearch/base/file_io | raysearch/runs/(?:records|run) | raysearch/processes/claim
    | raysearch/studies/(?:results|damage|study_file|study_status)  # folders of runs
    | raysearch/optima/(?:certificate_files|optimum_cache)
    | raysearch/deploy/(?:export/.* | \w+/\w+_files | live/(?:session|benchmark_tools))  # what engines and tools read
    | raysearch/fidelity/(?:calibration|forecasts|measuring)/.*  # tables of measurements, coefficients, forecasts
    | raysearch/fidelity/validation/(?:published_deployments|replayed_runs|disaggregated|first_token_errors)
    | raysearch/searchers/prior/(?:network|policy)  # headers of their files
    """,
    re.VERBOSE,
)
"""Modules that read or write files."""
READS_OR_WRITES = re.compile(
    r"_?(?:to_dict|\w*_dict|to_rows|\w*_rows?|record|of_record|\w+_record|read_\w+|parse_\w+|write_\w+|print_json)"
    r"|_begun|_repeated|_of_question|summary"
)
"""Functions and fields that do, in other modules: answers as JSON has them, records of runs."""
MOST = 100


def _annotations(node: ast.AST) -> Iterator[tuple[str, str]]:
    """(name, annotation) of a function's arguments, of what it returns, of a variable; aliases too."""
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
        given = node.args
        for each in (*given.posonlyargs, *given.args, *given.kwonlyargs, given.vararg, given.kwarg):
            if each is not None and each.annotation is not None:
                yield each.arg, ast.unparse(each.annotation)
        if node.returns is not None:
            yield node.name, ast.unparse(node.returns)
    elif isinstance(node, ast.AnnAssign):
        yield ast.unparse(node.target), ast.unparse(node.annotation)
    elif isinstance(node, ast.Assign):
        value = node.value
        if isinstance(value, ast.Call) and ast.unparse(value.func) == "cast":
            yield ast.unparse(node.targets[0]), ast.unparse(value.args[0])
        elif isinstance(value, ast.Subscript | ast.Name):
            yield ast.unparse(node.targets[0]), ast.unparse(value)


def _open_uses(tree: ast.AST, inside: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    """The names around each use of an open dictionary, its own last."""
    for child in ast.iter_child_nodes(tree):
        for name, annotation in _annotations(child):
            within = (*inside, child.name) if isinstance(child, ast.FunctionDef) else inside
            yield from [(*within, name)] * len(OPEN.findall(annotation))
        named = isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef)
        yield from _open_uses(child, (*inside, child.name) if named else inside)  # type: ignore[attr-defined]


def test_few_values_are_open_dictionaries_outside_of_what_reads_and_writes_files() -> None:
    by_room: Counter[str] = Counter()
    for room in ("sim", "envs", "raysearch"):
        for path in sorted((CHECKOUT / room).rglob("*.py")):
            module = path.relative_to(CHECKOUT).with_suffix("").as_posix()
            text = path.read_text(encoding="utf-8")
            if READERS_AND_WRITERS.fullmatch(module) or not OPEN.search(text):
                continue
            uses = [names for names in _open_uses(ast.parse(text)) if not _of_a_file(names)]
            by_room["/".join(module.split("/")[:2])] += len(uses)
    assert sum(by_room.values()) <= MOST, by_room.most_common()


def _of_a_file(names: tuple[str, ...]) -> bool:
    return any(READS_OR_WRITES.fullmatch(name) for name in names)
