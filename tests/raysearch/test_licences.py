"""What is installed by default is under licences that everybody can take, and docs/evidence/licences.md lists them.

`python -m tests.raysearch.test_licences` writes the page's table anew.
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterable
from functools import cache
from importlib.metadata import distribution
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

CHECKOUT = Path(__file__).resolve().parents[2]
PAGE = CHECKOUT / "docs" / "evidence" / "licences.md"
PROJECT = tomllib.loads((CHECKOUT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
EXTRAS = PROJECT["optional-dependencies"]
DEFAULT = (*PROJECT["dependencies"], *EXTRAS["search"], *EXTRAS["rllib"])
"""What `make setup` installs."""
WHERE = {"python_version": "3.11", "python_full_version": "3.11.9", "sys_platform": "linux", "platform_system": "Linux"}
"""Of which the page is."""
CUDA = re.compile(r"nvidia-|cuda-|triton$")
"""What PyTorch's build for CUDA brings, by NVIDIA's own terms; no other build has it."""
COPYLEFT = re.compile(r"GPL|General Public|Affero|MPL|Mozilla|EUPL|CDDL|EPL|Eclipse|OSL|SSPL|CeCILL|CC-BY-SA", re.I)
SHARED = re.compile(
    r"(lib(gfortran|quadmath|gomp|gmp|mpfr|iconv|intl|readline|fribidi|raqm|glib|unistring|av(codec|format|util)))\b.*\.so"
)
"""Libraries under copyleft that wheels are known to hold."""
BY_FILE = {"certifi", "tqdm"}
"""Under the Mozilla Public License, which asks for changes of its own files alone; Ray and Optuna need them."""


@cache
def needed(requirements: tuple[str, ...]) -> set[str]:
    """Names of packages and of all that they need."""
    found: dict[str, frozenset[str]] = {}
    below = [Requirement(text) for text in requirements]
    while below:
        requirement = below.pop()
        name, extras = canonicalize_name(requirement.name), frozenset({"", *requirement.extras})
        if CUDA.match(name) or extras <= found.get(name, frozenset()):
            continue
        found[name] = found.get(name, frozenset()) | extras
        for text in distribution(name).requires or []:
            each = Requirement(text)
            if each.marker is None or any(each.marker.evaluate({**WHERE, "extra": extra}) for extra in extras):
                below.append(each)
    return {*found}


@cache
def licence(name: str) -> str:
    """As the package's metadata says it; "" where they do not."""
    metadata = distribution(name).metadata.json
    classes = [text for text in metadata.get("classifier", ()) if text.startswith("License ::")]
    named = " or ".join(text.rpartition(" :: ")[2] for text in classes)
    return str(metadata.get("license_expression") or named or str(metadata.get("license", "")).partition("\n")[0])


def table(names: Iterable[str]) -> str:
    rows = [f"| {name} | {licence(name)} |" for name in sorted(names)]
    return "\n".join(["| package | licence |", "|---|---|", *rows]) + "\n"


def copyleft(names: Iterable[str]) -> set[str]:
    return {name for name in names if COPYLEFT.search(licence(name))}


def test_no_default_dependency_is_under_copyleft() -> None:
    default = needed(DEFAULT)
    assert copyleft(default) == BY_FILE
    assert all(licence(name) for name in default)
    assert {"nevergrad", "pymoo", "directsearch", "moocore"}.isdisjoint(default)


def test_the_page_lists_the_licence_of_every_default_dependency() -> None:
    assert PAGE.read_text(encoding="utf-8").endswith(table(needed(DEFAULT)))


def test_the_page_names_the_libraries_under_copyleft_that_wheels_hold() -> None:
    kept: dict[str, set[str]] = {}
    for name in needed(DEFAULT):
        for library in filter(None, (SHARED.match(path.name) for path in distribution(name).files or ())):
            kept.setdefault(library[1], set()).add(name)
    rows = re.findall(r"^\| `(lib\w+)` \| ([\w, ]+) \|", PAGE.read_text(encoding="utf-8"), re.M)
    assert kept == {library: {*names.split(", ")} for library, names in rows}


def test_the_page_names_what_extras_bring_under_copyleft() -> None:
    page, default = PAGE.read_text(encoding="utf-8"), needed(DEFAULT)
    for extra in ("nevergrad", "pymoo", "sb3", "jax"):
        brought = copyleft(needed(tuple(EXTRAS[extra])) - default)
        assert brought == {"nevergrad": {"directsearch"}, "pymoo": {"moocore"}}.get(extra, set())
        assert all(f"`{name}` ({licence(name)})" in page for name in brought)


if __name__ == "__main__":
    head = PAGE.read_text(encoding="utf-8").partition("| package |")[0]
    PAGE.write_text(head + table(needed(DEFAULT)), encoding="utf-8")
