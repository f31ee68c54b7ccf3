"""Which of the models that are deployed can be priced: InferenceX's entries, and config.json of whole collections.

    python benchmarks/known_models.py nvidia-master.yaml amd-master.yaml configs/ other/config.json

A YAML file is InferenceX's, whose entries name models by their short names; a folder or JSON file is read as
`raysearch evaluate --model` reads it. Without arguments: the configurations of aiconfigurator-core, if it is installed.
With --transformers: every type of causal model of an installed transformers (5.24: `pip install transformers torch`) by
its default configuration, whose parameters are counted by its own code, too.
"""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import json
import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from raysearch.fidelity.forecasts.announced_deployments import SHORT_NAMES, read_entries
from sim.config.catalog import CatalogError, load_model
from sim.config.huggingface.keys import CannotImport
from sim.config.huggingface.model_import import import_model
from sim.config.schemas import ModelFile


def main() -> None:
    """Prints a line per file or folder, and every model that is refused with the reason."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("paths", nargs="*", type=Path)
    parser.add_argument("--transformers", action="store_true")
    options = parser.parse_args()
    if options.transformers:
        _transformers()
        return
    for path in options.paths or [_bundled()]:
        known, refused = _entries(path) if path.suffix in (".yaml", ".yml") else _configurations(path)
        if not known and not refused:
            print(f"{path}: expected files called *config.json, found none: name others one by one")
            continue
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


def _transformers() -> None:
    """Prints how many types are read, those whose parameters differ, and the others with the reason."""
    logging.disable(logging.CRITICAL)
    auto: Any = importlib.import_module("transformers.models.auto.modeling_auto")
    configurations: Any = importlib.import_module("transformers.models.auto.configuration_auto").CONFIG_MAPPING
    names = [name for name in auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES if name in configurations]
    read, counted, lines = 0, 0, list[str]()
    for name in names:
        try:
            configuration = configurations[name]()
        except Exception as error:  # by whatever class of its own it says that its defaults are none
            lines.append(f"{name}: no default configuration: {' '.join(str(error).split())[:80]}")
            continue
        try:
            content = json.loads(json.dumps(configuration.to_dict(), default=str))
            ours = ModelFile.model_validate(import_model(content, name).content).to_si().parameters
        except (CannotImport, TypeError, ValueError) as error:
            lines.append(f"{name}: {' '.join(str(error).split())[:100]}")
            continue
        read += 1
        try:
            theirs = _parameters(configuration)
        except (AttributeError, TypeError, ValueError, RuntimeError) as error:  # defaults that it cannot build itself
            lines.append(f"{name}: {ours / 1e9:.3f}, not counted there: {str(error)[:80]}")
            continue
        counted += (alike := abs(ours / theirs - 1) <= _ALIKE)
        if not alike:
            lines.append(f"{name}: {ours / 1e9:.3f} billion parameters, {theirs / 1e9:.3f} there")
    print(
        f"transformers: {read} of {len(names)} types, {counted} with its own number of parameters within {_ALIKE:.0%}"
    )
    for line in lines:
        print(f"  {line}")


def _parameters(configuration: Any) -> int:
    torch: Any = importlib.import_module("torch")
    transformers: Any = importlib.import_module("transformers")
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(configuration)
    return sum(each.numel() for each in {id(each): each for each in model.parameters()}.values())


_ALIKE = 0.01


if __name__ == "__main__":
    main()
