"""The engines by name: four shipped ones, and whatever an installed package adds.

A package adds one by an entry point of the group "raysearch.engines" whose object is an `EngineRules`; a script by
`register_engine`. Its name is then good for `--engine`, for `--space` and in workload files.

>>> engine_rules("vllm").version
'0.33.0'
>>> engine_rules("vllm<0.14").name
'vllm'
"""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from importlib.metadata import EntryPoint, entry_points

from sim.engines.engine_rules import EngineRules
from sim.engines.megatron_core import MEGATRON_CORE
from sim.engines.sglang import SGLANG
from sim.engines.trtllm import TRTLLM
from sim.engines.vllm import VLLM
from sim.near_names import did_you_mean
from sim.workload import OWN_SPACES, Workload

ENGINES_GROUP = "raysearch.engines"
SHIPPED = ("vllm", "sglang", "trtllm", "megatron_core")
_ENGINES: dict[str, EngineRules] = {each.name: each for each in (VLLM, SGLANG, TRTLLM, MEGATRON_CORE)}
BARE_MACHINE = "none"
"""Named in an engine's place: kernels and collectives alone, without an engine's time and memory policy."""


class UnknownEngine(ValueError):
    """No engine has that name; the message suggests one."""


def register_engine(rules: EngineRules) -> None:
    """Adds an engine.

    Raises:
        ValueError: The name is taken, or is that of another space.
    """
    if rules.name in _ENGINES or rules.name in (*OWN_SPACES, BARE_MACHINE):
        raise ValueError(f"there is an engine or space {rules.name!r} already: give yours another name")
    _ENGINES[rules.name] = rules


def withdraw_engine(name: str) -> None:
    """Takes a registered engine out again, as a test does with its own.

    Raises:
        ValueError: It is a shipped one, or there is none.
    """
    if name in SHIPPED or name not in _ENGINES:
        raise ValueError(f"expected an engine that was registered, got {name!r}")
    del _ENGINES[name]


def engine_names() -> tuple[str, ...]:
    """All names, shipped ones first."""
    _load_installed()
    return tuple(_ENGINES)


def engine_rules(name: str) -> EngineRules:
    """The rules of an engine, whatever version "<" names.

    Raises:
        UnknownEngine: There is none of that name.
    """
    if not isinstance(name, str):  # pyright: ignore[reportUnnecessaryIsInstance]  # it may stand in a file
        raise UnknownEngine(f"expected the name of an engine, got {name!r}")
    wanted = name.partition("<")[0]
    if wanted not in _ENGINES:
        _load_installed()
    if wanted not in _ENGINES:
        raise UnknownEngine(f"unknown engine {name!r}: {did_you_mean(wanted, _ENGINES)}")
    return _ENGINES[wanted]


def in_space(workload: Workload, name: str) -> Workload:
    """The workload whose strategies are those of a space: one of `OWN_SPACES`, or what an engine supports.

    A workload may be charged an engine's time and memory and still be asked in a space that is no engine's, or
    another's. An engine's rules are those of the version that is charged.

    Raises:
        UnknownEngine: There is no such space.

    >>> from sim.config.catalog import load_workload, under_engine
    >>> served = under_engine(load_workload("gpt_moe_1_2t_16k"), "vllm")
    >>> engine_rules_of(served).title, engine_rules_of(in_space(served, "extended"))
    ('vLLM', None)
    """
    if name in OWN_SPACES:
        return replace(workload, space=name)
    rules, charged = engine_rules(name), workload.engine
    if charged and charged.family == rules.name:
        rules = rules.of_version(charged.version)
    return replace(workload, space=rules.name, rules=rules)


def engine_rules_of(workload: Workload) -> EngineRules | None:
    """The rules that strategies of a workload's space obey, an engine's; None where hardware and model alone judge."""
    assert workload.rules is None or isinstance(workload.rules, EngineRules)
    return workload.rules


def charged_rules(workload: Workload) -> EngineRules | None:
    """The rules of the engine whose own time is charged, in its version; None on the bare machine."""
    engine = workload.engine
    return engine_rules(engine.name).of_version(engine.version) if engine else None


def lacking_formats(workload: Workload) -> list[str]:
    """Which of a workload's formats its engine has not: figures are of a machine that has them."""
    rules = charged_rules(workload)
    return rules.lacks_formats(workload.precisions) if rules else []


@cache
def _installed() -> tuple[EntryPoint, ...]:
    """What installed packages declare, looked for once: every package's metadata is read."""
    return tuple(entry_points(group=ENGINES_GROUP))


def _load_installed() -> None:
    for found in _installed():
        rules = found.load()
        if not isinstance(rules, EngineRules):
            raise TypeError(
                f"entry point {found.name!r} of {ENGINES_GROUP}: expected an EngineRules, got {type(rules).__name__}"
            )
        if _ENGINES.setdefault(rules.name, rules) is not rules:
            raise ValueError(
                f"entry point {found.name!r} of {ENGINES_GROUP}: there is an engine {rules.name!r} already"
            )
