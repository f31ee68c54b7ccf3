"""Deployments that InferenceX says it measures next: its configuration files, read as they are.

Source: SemiAnalysisAI/InferenceX, configs/CONFIGS.md: an entry has scenarios of fixed lengths, each with layouts and
the requests in flight that are tried on them: a list, or doubled from one number to another. `tp` counts the GPUs of a
worker, `ep` those that share the experts; with `dp-attn` each has requests of its own.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any, cast

import yaml

from raysearch.base.errors import InputError
from raysearch.fidelity.calibration.deployments import Skipped
from raysearch.fidelity.calibration.inferencex_results import (
    ENGINES,
    drafts_of,
    machine_named,
    said_of,
    whole_number,
    whole_of,
)
from sim.config.reading import MOST_VALUES, Unreadable, read_bytes
from sim.json_object import JsonObject

SHORT_NAMES: Mapping[str, str] = {
    "dsr1": "deepseek_v3",
    "dsv4": "deepseek_v4_pro",
    "qwen3.5": "qwen3_5_397b_a17b",
    "glm5": "glm_5",
    "glm5.1": "glm_5",
    "glm5.2": "glm_5_2",
    "gptoss": "gpt_oss_120b",
    "kimik2.5": "kimi_k2_5",
    "kimik2.6": "kimi_k2_5",
    "kimik3": "kimi_k3",
    "minimaxm2.5": "minimax_m2_5",
    "minimaxm3": "minimax_m3",
}
"""Its short names of models -> ours of the same shape."""
_FIXED = "fixed-seq-len"
LARGEST_ANNOUNCEMENT_BYTES = 4 * 1024**2
"""[assumed] Ten times InferenceX's own; the pure-Python parser reads a megabyte in some seconds."""
_MOST_POINTS = 100_000
"""[assumed] Of an entry; YAML's aliases could ask for any number in a few lines."""
_NO_YAML = (yaml.YAMLError, ValueError, LookupError, AttributeError, TypeError, RecursionError)
"""What the parser raises, of scalars with a tag that they do not fit, too."""


@dataclass(frozen=True, slots=True)
class Worker:
    """One kind of worker.

    Attributes:
        count: How many of them.
        gpus: Of each.
        ep: GPUs that share the experts.
        dp: Attention ranks.
        pp: Stages of `gpus` each.
    """

    count: int
    gpus: int
    ep: int = 1
    dp: int = 1
    pp: int = 1

    @property
    def all_gpus(self) -> int:
        """GPUs of all of them."""
        return self.count * self.gpus * self.pp


@dataclass(frozen=True, slots=True)
class Announced:
    """One layout at one number of requests in flight.

    Attributes:
        entry: Its name in the file.
        model, machine, engine: Ours.
        framework, precision, image: As the entry has them.
        draft_tokens: Per step by multi-token prediction; 0: none.
        requests: Kept open by clients.
        decode: The workers that decode, or all there are.
        prefill: Those that compute prompts apart; None: the same.
    """

    entry: str
    model: str
    machine: str
    engine: str
    framework: str
    precision: str
    image: str
    isl: int
    osl: int
    draft_tokens: int
    requests: int
    decode: Worker
    prefill: Worker | None = None

    @property
    def gpus(self) -> int:
        """Of all workers."""
        return self.decode.all_gpus + (self.prefill.all_gpus if self.prefill else 0)

    @property
    def workload(self) -> tuple[str, str, str, int, int]:
        """What those have in common that compete: model, machine, precision, lengths."""
        return (self.model, self.machine, self.precision, self.isl, self.osl)

    def record(self) -> JsonObject:
        """As a forecast has it."""
        parts = {"decode": self.decode, **({"prefill": self.prefill} if self.prefill else {})}
        own = ("entry", "model", "machine", "engine", "framework", "precision", "image", "isl", "osl")
        workers = {
            name: {key: getattr(worker, key) for key in ("count", "gpus", "ep", "dp", "pp")}
            for name, worker in parts.items()
        }
        return {
            **{name: getattr(self, name) for name in own},
            "draft_tokens": self.draft_tokens,
            "requests": self.requests,
            "gpus": self.gpus,
            **workers,
        }


def read_entries(path: Path) -> dict[str, JsonObject]:
    """The entries of one file by name. Raises: InputError."""
    try:
        content = _parsed(read_bytes(path, LARGEST_ANNOUNCEMENT_BYTES))
    except (OSError, Unreadable) as error:
        raise InputError(f"{path}: cannot be read: {error}") from error
    except _NO_YAML as error:
        raise InputError(f"{path}: cannot be read as YAML: {' '.join(str(error).split())[:200]}") from error
    if not (isinstance(content, dict) and all(isinstance(entry, dict) for entry in content.values())):
        raise InputError(f"{path}: expected entries by name, as in InferenceX's configs/nvidia-master.yaml")
    return {str(name): entry for name, entry in cast("dict[Any, JsonObject]", content).items()}


def _parsed(content: bytes) -> Any:
    """What YAML says. Raises: One of `_NO_YAML`, also where its aliases stand for more values than any file has."""
    loader = yaml.SafeLoader(content)
    try:
        root = loader.get_single_node()
        if root is not None and _values_of(root, {}) > MOST_VALUES:
            raise ValueError(f"its aliases stand for more than {MOST_VALUES:,} values")
        return root and loader.construct_document(root)
    finally:
        loader.dispose()


def _values_of(node: yaml.Node, known: dict[yaml.Node, int]) -> int:
    """How many values it has where each alias is written out."""
    if isinstance(node, yaml.ScalarNode):
        return 1
    if node not in known:
        known[node] = MOST_VALUES  # what contains itself has no end
        parts = chain.from_iterable(node.value) if isinstance(node, yaml.MappingNode) else node.value
        known[node] = 1 + sum(_values_of(each, known) for each in parts)
    return known[node]


def announced(name: str, entry: JsonObject, path: Path) -> Iterator[Announced | Skipped]:
    """The points of an entry, or why it or a part of it is none of ours.

    Raises:
        InputError: A part that is no configuration.
    """
    try:
        for number, point in enumerate(_announced(name, entry), 1):
            if number > _MOST_POINTS:
                raise ValueError(f"it has more than {_MOST_POINTS:,} points")
            yield point
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise InputError(f"{path}: entry {name!r:.80} is no configuration of a benchmark: {said_of(error)}") from error


def _announced(name: str, entry: JsonObject) -> Iterator[Announced | Skipped]:
    model, framework = SHORT_NAMES.get(str(entry["model-prefix"])), str(entry["framework"])
    machine = machine_named(entry["runner"])
    engine = ENGINES.get(framework)
    for known, what in ((model, "model-prefix"), (machine, "runner"), (engine, "framework")):
        if known is None:
            yield Skipped(f"{what} {entry[what]!r} is none that we price")
            return
    assert model
    assert machine
    assert engine
    for kind, scenarios in entry["scenarios"].items():
        if kind != _FIXED:
            yield Skipped(f"its requests replay sessions ({kind}), whose lengths are not in the file")
            continue
        for scenario in scenarios:
            for layout in scenario["search-space"]:
                decode, prefill = _workers(layout)
                drafts = _drafts(layout, model, engine, decode)
                for requests in _requests(layout):
                    yield Announced(
                        name,
                        model,
                        machine,
                        engine,
                        framework,
                        str(entry["precision"]),
                        str(entry["image"]),
                        whole_of(scenario, "isl"),
                        whole_of(scenario, "osl"),
                        drafts,
                        requests,
                        decode,
                        prefill,
                    )


def _requests(layout: JsonObject) -> list[int]:
    if "conc-list" in layout:
        return [whole_number(each) for each in layout["conc-list"]]
    low, high = whole_of(layout, "conc-start"), whole_of(layout, "conc-end")
    if low > high:
        raise ValueError(f"conc-start {low} and conc-end {high} are no range")
    return [low << power for power in range((high // low).bit_length())]


def _workers(layout: JsonObject) -> tuple[Worker, Worker | None]:
    if "decode" in layout and whole_of(layout["decode"], "num-worker", least=0):
        return _worker(layout["decode"]), _worker(layout["prefill"])
    return _worker(layout.get("prefill", layout)), None


def _worker(stated: JsonObject) -> Worker:
    gpus = whole_of(stated, "tp")
    dp = gpus if stated.get("dp-attn") else 1
    return Worker(
        whole_number(stated.get("num-worker", 1)),
        gpus,
        whole_number(stated.get("ep", 1)),
        dp,
        whole_number(stated.get("pp", 1)),
    )


def _drafts(layout: JsonObject, model: str, engine: str, decode: Worker) -> int:
    """Tokens drafted per step: named by the entry's settings or its recipe, else by its script."""
    if layout.get("spec-decoding", "none") == "none":
        return 0
    settings = [
        text for worker in ("prefill", "decode") for text in layout.get(worker, {}).get("additional-settings", [])
    ]
    for text in settings:
        if found := re.search(r"DECODE_MTP_SIZE=(\d+)|mtp(\d)", str(text)):
            return int(found[1] or found[2])
    return drafts_of(engine, decode.dp, deepseek=model == "deepseek_v3")
