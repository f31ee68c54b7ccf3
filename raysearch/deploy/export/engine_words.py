"""The options that each version of an engine has, and a command in that version's words.

The lists in configs/engines/capabilities are made from the engines' own sources by `benchmarks/engine_capabilities.py`.
Exporters write the newest words; `_OLDER_WORDS` has what stood in their place before.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cache

from raysearch.deploy.export.render import Flag, Variable
from sim.config.catalog import read_versions
from sim.config.files import configs_root
from sim.engines.engine_registry import engine_rules
from sim.json_object import JsonObject
from sim.workload import Workload

EngineOptions = Mapping[str, JsonObject]
"""By name: "type" (switch, int, float, choice, json, str), "choices", "default", "deprecated"."""
_OLDER_WORDS: Mapping[tuple[str, str], Callable[[object], tuple[Flag, ...]]] = {
    ("sglang", "--attn-dp-size"): lambda groups: (("--dp-size", int(str(groups))), ("--enable-dp-attention", None)),
    ("vllm", "--quantization"): lambda word: (("--quantization", str(word).removesuffix("_per_tensor")),),
}
"""What an option was before, by engine and newest name, where a version has not the newest."""


@dataclass(frozen=True)
class Capability:
    """The options that a version of an engine has.

    Attributes:
        engine: Its name here.
        version: As its makers count.
        options: Of its command.
        keys: Of options whose value is JSON, the keys that it may have.
        speculative_methods: What may stand as "method" in vLLM's `--speculative-config`.
        environment: Names of environment variables that it reads; of SGLang those that concern a deployment.
        environment_defaults: Values of some, where nothing is set.
        architectures: Model classes that it has.
        servers: Files that start a server.
        options_of: Of a platform, the options that it adds to those of each engine.
        pins: Of a platform, the version of each engine that its images have, and of its router.
    """

    engine: str
    version: str
    options: EngineOptions = field(default_factory=dict)
    keys: Mapping[str, list[str]] = field(default_factory=dict)
    speculative_methods: frozenset[str] = frozenset()
    environment: frozenset[str] = frozenset()
    environment_defaults: Mapping[str, int | str | None] = field(default_factory=dict)
    architectures: frozenset[str] = frozenset()
    servers: frozenset[str] = frozenset()
    options_of: Mapping[str, EngineOptions] = field(default_factory=dict)
    pins: Mapping[str, str] = field(default_factory=dict)

    def refusals(self, flags: Iterable[Flag], environment: Mapping[str, str]) -> list[str]:
        """Why its parser does not take some options, or that it does not read a variable; none if it does."""
        texts = [text for name, value in flags for text in self.refuses(name, value)]
        return texts + [f"it reads no variable {name}" for name in environment if name not in self.environment]

    def refuses(self, name: str, value: object) -> Iterator[str]:
        """Why its parser does not take an option."""
        option = self.options.get(name)
        if option is None:
            yield f"it has no option {name}"
            return
        kind, text = option.get("type", "str"), str(value)
        if (kind == "switch") != (value is None):
            yield f"{name} takes {'no' if kind == 'switch' else 'a'} value"
        elif kind == "choice" and text not in map(str, option["choices"]):
            yield f"{name} has no choice {text}"
        elif kind == "int" and not isinstance(value, int | Variable):
            yield f"{name} is a whole number, not {text}"
        elif name in self.keys:
            given = json.loads(text)
            yield from (f"{name} has no key {key}" for key in given if key not in self.keys[name])
            if "method" in given and given["method"] not in self.speculative_methods:
                yield f"{name} has no method {given['method']}"

    def setting(self, name: str) -> str:
        """The setting of a configuration file that decides on one: itself, or what it lies in and may hold anything."""
        parts = name.split(".")
        above = (".".join(parts[:depth]) for depth in range(len(parts) - 1, 0, -1))
        for each in () if name in self.options else above:
            if each in self.options:
                closed = any(other.startswith(f"{each}.") for other in self.options)
                return name if closed else each
        return name

    def beside(self, platform: Capability) -> Capability:
        """The same as a platform's worker takes it."""
        return replace(self, options={**self.options, **platform.options_of[self.engine]})

    def words(self, flags: Iterable[Flag]) -> tuple[list[Flag], list[str]]:
        """Options in this version's words, and why it has none for some, which are left out."""
        accepted, lost = list[Flag](), list[str]()
        for name, value in flags:
            refused = list(self.refuses(name, value))
            older = _OLDER_WORDS.get((self.engine, name))
            before = older(value) if refused and older else ()
            if before and not self.refusals(before, {}):
                accepted += before
            elif refused:
                lost += [f"{engine_rules(self.engine).title} {self.version}: {text}" for text in refused]
            else:
                accepted.append((name, value))
        return accepted, lost


@cache
def read_capability(engine: str, version: str) -> Capability:
    """The options that a version has.

    Raises:
        FileNotFoundError: Its sources were not read; see `sim.config.catalog.read_versions`.
    """
    path = configs_root() / "engines" / "capabilities" / f"{engine}-{version}.json"
    found = json.loads(path.read_text())
    sets = ("speculative_methods", "environment", "architectures", "servers")
    plain = ("options", "keys", "environment_defaults", "options_of", "pins")
    given = {name: frozenset(found[name]) for name in sets if name in found}
    return Capability(engine, version, **given, **{name: found[name] for name in plain if name in found})


def stated_version(workload: Workload, engine: str) -> str | None:
    """The version of an engine that a question names; None where it names none."""
    charged = workload.engine
    if charged is None or charged.family != engine:
        return None
    if charged.version is None:
        return engine_rules(engine).version if charged.version_stated else None
    return charged.version.number


def unread_settings(engine: str, content: JsonObject) -> tuple[list[str], list[str]]:
    """Of a configuration file what the newest version read does not take, and a note where none was read."""
    read, named = read_versions(engine), dict(_leaves(content))
    title = engine_rules(engine).title
    if not read:
        what = f"no version of {title} was read (benchmarks/engine_capabilities.py reads a checkout of it)"
        return [], [f"none of these {len(named)} settings was compared with {title}'s own list: {what}"]
    known = read_capability(engine, read[-1])
    refused = [text for name, value in named.items() for text in known.refuses(known.setting(name), value)]
    return [f"{title} {read[-1]}: {text}" for text in refused], []


def _leaves(content: JsonObject, under: str = "") -> Iterator[tuple[str, object]]:
    """Settings of a file that hold no others, as "moe_config.backend"."""
    for name, value in content.items():
        if isinstance(value, dict):
            yield from _leaves(value, f"{under}{name}.")
        else:
            yield f"{under}{name}", value


def capability_of(workload: Workload, engine: str) -> tuple[Capability, list[str]]:
    """The options of the version that serves a workload, and a note where another's words stand for it."""
    version, read = stated_version(workload, engine) or engine_rules(engine).version, read_versions(engine)
    if version in read:
        return read_capability(engine, version), []
    nearest = read[-1]
    title = engine_rules(engine).title
    return read_capability(engine, nearest), [
        f"written with the options of {title} {nearest}; those of {version} were not read"
    ]
