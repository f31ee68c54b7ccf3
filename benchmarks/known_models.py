"""Which of the models that are deployed can be priced: InferenceX's entries, and config.json of whole collections.

    python benchmarks/known_models.py nvidia-master.yaml amd-master.yaml configs/ other/config.json

A YAML file is InferenceX's, whose entries name models by their short names; a folder or JSON file is read as
`raysearch evaluate --model` reads it. Without arguments: the configurations of aiconfigurator-core, if it is installed.
"""

from __future__ import annotations

import argparse
import importlib.util
from collections.abc import Iterator
from pathlib import Path

from raysearch.fidelity.forecasts.announced_deployments import SHORT_NAMES, read_entries
from sim.config.catalog import CatalogError, load_model


def main() -> None:
    """Prints a line per file or folder, and every model that is refused with the reason."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("paths", nargs="*", type=Path)
    for path in parser.parse_args().paths or [_bundled()]:
        known, refused = _entries(path) if path.suffix in (".yaml", ".yml") else _configurations(path)
        print(f"{path.name}: {known} of {known + len(refused)}")
        for line in refused:
            print(f"  {line}")


def _bundled() -> Path:
    found = importlib.util.find_spec("aiconfigurator_core")
    if found is None or found.origin is None:
        raise SystemExit("expected paths: aiconfigurator-core, whose configurations are read by default, is missing")
    return Path(found.origin).parent / "model_configs"


def _entries(path: Path) -> tuple[int, list[str]]:
    """Entries whose model is known, and the others."""
    names = {name: str(entry.get("model-prefix")) for name, entry in read_entries(path).items()}
    refused = [f"{name}: unknown model {model!r}" for name, model in names.items() if model not in SHORT_NAMES]
    return len(names) - len(refused), refused


def _configurations(path: Path) -> tuple[int, list[str]]:
    """Configurations that load, and why the others do not."""
    known, refused = 0, list[str]()
    for each in _files(path):
        try:
            load_model(each)
            known += 1
        except CatalogError as error:
            refused.append(f"{each.name}: {error}")
    return known, refused


def _files(path: Path) -> Iterator[Path]:
    every = sorted(path.glob("**/*config.json")) if path.is_dir() else [path]
    return (each for each in every if "quant" not in each.name)


if __name__ == "__main__":
    main()
