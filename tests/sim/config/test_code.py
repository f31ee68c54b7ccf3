"""Sources of named functions, which are found and not run."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from sim.config.code import NO_SOURCE, source_digests


@pytest.mark.parametrize("packages", ["", "a", "a b"])
@pytest.mark.parametrize("named", ["", "a", "b", "a b"])
def test_a_module_is_found_in_packages_with_and_without_an_init(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, packages: str, named: str
) -> None:
    monkeypatch.chdir(tmp_path)
    parts = [f"folder_of_code_{each}" for each in packages.split()]
    folder = tmp_path.joinpath(*parts)
    folder.mkdir(parents=True, exist_ok=True)
    for depth, each in enumerate(packages.split(), start=1):
        if each in named.split():
            tmp_path.joinpath(*parts[:depth], "__init__.py").write_text("raise RuntimeError('was run')")
    name = ".".join([*parts, "box_of_code"]) + ":measure"
    assert source_digests(name) == {name: NO_SOURCE}
    (folder / "box_of_code.py").write_text("raise RuntimeError('was run')")
    first = source_digests(name)[name]
    assert first != NO_SOURCE
    (folder / "box_of_code.py").write_text("raise RuntimeError('was run, too')")
    assert source_digests(name)[name] not in (first, NO_SOURCE)
    assert not [module for module in sys.modules if "_of_code" in module]
