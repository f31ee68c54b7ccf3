"""A public name, and a module's name, stands for one thing in the whole project."""

import re
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parent.parent
PACKAGES = ("sim", "envs", "raysearch")
EVERY_EXPORTER = {"export", "export_pools", "engine_flags", "environment"}
"""What each exporter of `raysearch.deploy.export` has under the same name."""
EVERY_SIMULATOR = {"measure"}
COMMANDS = {"evaluate", "measure", "place", "pretrain", "recommend"}
"""What a command, Python and the code beneath call the same."""
ENGINES = {"megatron_core", "sglang", "trtllm", "vllm"}
"""Rules of an engine in `sim.engines`, and its exporter."""


def _modules() -> Iterator[Path]:
    for package in PACKAGES:
        yield from (ROOT / package).rglob("*.py")


def _public_names(module: Path) -> Iterator[str]:
    """Of classes, functions and variables: what begins a line outside of a text."""
    text = re.sub(r'"""(?:.|\n)*?"""', '""', module.read_text(encoding="utf-8"))
    yield from (
        kind or value for kind, value in re.findall(r"^(?:class|def) (\w+)|^(\w+)(?: =|:) ", text, re.MULTILINE)
    )


def test_a_public_name_is_defined_in_one_module() -> None:
    defined: defaultdict[str, set[Path]] = defaultdict(set)
    for module in _modules():
        for name in _public_names(module):
            if not name.startswith("_"):
                defined[name].add(module.relative_to(ROOT))
    twice = {name: sorted(map(str, where)) for name, where in defined.items() if len(where) > 1}
    assert twice.keys() <= EVERY_EXPORTER | EVERY_SIMULATOR | COMMANDS, twice


def test_a_module_s_name_stands_once() -> None:
    named: defaultdict[str, list[Path]] = defaultdict(list)
    for module in _modules():
        named[module.stem].append(module.relative_to(ROOT))
    twice = {name for name, where in named.items() if len(where) > 1} - {"__init__", "__main__"}
    assert twice <= ENGINES
