"""Strategy spaces of a workload: the paper's, the joint one around it, the extended one, and those of heuristics.

A space is a product of tables, one per degree, and of choices, one tuple per fused op.

- `paper`: "Learning to Shard", footnote 4, shards attention's ops on heads and hidden, the MLP's on hidden and
  feed-forward; no op is sharded over tokens or requests. One mesh for attention and experts.
- `joint`: the same with tokens and requests: both dims of each fused op, or none.
- `extended`: the joint space, widened by:

  - "context": attention cuts the context over cp (Helix); the experts' group grows by the same factor.
  - "degrees": attention has a data-parallel degree of its own, so `tp * dp * cp = moe_tp * ep` and nothing more.
  - "tokens": GEMMs may keep their weight whole and share out tokens.
  - "gathered": GEMMs may keep their weight sharded and gather it at use, replicated or sharing out tokens.
  - "declared": choices that somebody declared, none as delivered: see `sim.layers.choices.declare_choice`. Those of a
    function that a workload file names belong to the workloads that name it.

>>> from sim.config.catalog import load_workload
>>> workload = load_workload("gpt_moe_1_2t_16k")
>>> for space in (paper_space, joint_space, extended_space):
...     print(f"{space(workload).size:,}")
107,827,200
2,763,493,200
2,476,089,907,200
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace

import numpy as np

from sim.canonical import canonical, dims_matter
from sim.engines.engine_registry import engine_rules_of, in_space
from sim.engines.engine_rules import EngineRules
from sim.layers.declared import declared_choices
from sim.layers.ops import FusedOp, choices_by_rule
from sim.ops.dims import Dim, dims_of
from sim.ops.vocabulary import vocabulary_ops
from sim.simulate import mesh_violations
from sim.strategy import (
    CHOICES,
    ENGINES_VOCABULARY,
    FIRST_DECLARED,
    GATHERED,
    GATHERED_TOKENS,
    NONE,
    TOKENS,
    VOCABULARY_OPS,
    Strategy,
)
from sim.workload import TWO_DIMENSIONAL, Workload

EXTENSIONS = ("context", "degrees", "tokens", "gathered")
DECLARED = "declared"
CONTEXT_DEGREES = (1, 2, 4, 8, 16, 32, 64)
"""Searched cp. [assumed] Helix searches up to 64 GPUs."""
DATA_DEGREES = (1, 2, 4, 8, 16, 32, 64, 128)
"""Searched dp of attention. [assumed]"""
_TOKEN_LABELS = frozenset("tc")
"""Labels of rows: tokens (of a decode step: requests), and their copies for experts."""


@dataclass(frozen=True, slots=True)
class Coordinate:
    """One thing that a search chooses.

    Attributes:
        name: Of a degree ("tp", "batch", ...), or of a fused op.
        values: What it may be; ascending where they are ordered.
        ordered: Whether values have an order, as degrees do; an op's choices have none.
    """

    name: str
    values: tuple[int, ...]
    ordered: bool


@dataclass(frozen=True, slots=True)
class Space:
    """A product of tables, or what an engine can run of one.

    Attributes:
        tp, cp, ep, pp, batch: Values of each degree, ascending.
        dp: Values of attention's data-parallel degree; empty where it is ep.
        choices: Values per entry of `Strategy.dims`, by its name: a fused op's, or with its group's before it.
        engine: Whose rules cut the product down; None for all of it.
        vocabulary: Values of embedding, LM head and sampling, by name; empty where they are as the workload has them.
    """

    workload: Workload
    tp: tuple[int, ...]
    cp: tuple[int, ...]
    dp: tuple[int, ...]
    ep: tuple[int, ...]
    pp: tuple[int, ...]
    batch: tuple[int, ...]
    choices: Mapping[str, tuple[int, ...]]
    engine: EngineRules | None = None
    vocabulary: Mapping[str, tuple[int, ...]] = field(default_factory=dict[str, tuple[int, ...]])

    def parts(self) -> tuple[Space, ...]:
        """The space as products of tables: itself, or of an engine's space one per plan of the engine."""
        if self.engine is None:
            return (self,)
        dims = [plan.dims for plan in self.engine.plans_of(self.workload)]
        tables = [{name: (choice,) for name, choice in zip(self.choices, each, strict=True)} for each in dims]
        return tuple(replace(self, choices=table) for table in tables if self._has(table))

    def _has(self, table: Mapping[str, tuple[int, ...]]) -> bool:
        return all(set(values) <= set(self.choices[name]) for name, values in table.items())

    @property
    def size(self) -> int:
        """Strategies, feasible or not; of an engine's space those that the engine runs."""
        if self.engine is not None:
            stages = sum(len(part.stages(mesh)) for part in self.parts() for mesh in part.meshes())
            return stages * len(self.batch)
        tables = (self.tp, self.cp, self.dp or (0,), self.ep, self.pp, self.batch, *self._tables)
        return math.prod(map(len, tables))

    @property
    def distinct_size(self) -> int:
        """Strategies that differ in what they do: see `sim.canonical`. Meshes that fit no GPUs count as they are."""
        if self.engine is not None:
            found = {
                canonical(Strategy(tp, ep, pp, 1, part.only_dims, cp, dp))
                for part in self.parts()
                for tp, cp, dp, ep in part.meshes()
                for pp in part.stages((tp, cp, dp, ep))
            }
            return len(found) * len(self.batch)
        meshes = [
            Strategy(tp, ep, 1, 1, (), cp, dp or ep)
            for tp, cp, ep in itertools.product(self.tp, self.cp, self.ep)
            for dp in self.dp or (0,)
        ]
        dims = math.prod(map(len, self._tables))
        alike = math.prod(sum(choice < FIRST_DECLARED for choice in table) for table in self._tables)
        kinds = sum(dims if dims_matter(mesh) else dims - alike + min(alike, 1) for mesh in meshes)
        return kinds * len(self.pp) * len(self.batch)

    @property
    def _tables(self) -> tuple[tuple[int, ...], ...]:
        """Of all ops."""
        return *self.choices.values(), *self.vocabulary.values()

    @property
    def coordinates(self) -> tuple[Coordinate, ...]:
        """What a strategy is made of, in the order of a search's actions."""
        degrees = {"tp": self.tp, "ep": self.ep, "pp": self.pp, "batch": self.batch}
        own = {} if self.one_mesh else {"cp": self.cp, "dp": self.dp or (0,)}
        return (
            *(Coordinate(name, values, ordered=True) for name, values in degrees.items()),
            *(Coordinate(name, values, ordered=False) for name, values in self.choices.items()),
            *(Coordinate(name, values, ordered=True) for name, values in own.items()),
            *(Coordinate(name, values, ordered=False) for name, values in self.vocabulary.items()),
        )

    @property
    def one_mesh(self) -> bool:
        """Whether attention lies on the experts' mesh: no cp, and dp is ep."""
        return self.cp == (1,) and not self.dp

    def layouts(self) -> Iterator[tuple[int, int, int, int]]:
        """(tp, cp, dp, ep) that can be laid on the same GPUs, whether or not the engine runs them."""
        for tp, cp, ep in itertools.product(self.tp, self.cp, self.ep):
            for dp in self.dp or (ep,):
                if not mesh_violations(self.workload, tp, cp, dp, ep):
                    yield tp, cp, dp, ep

    def meshes(self) -> Iterator[tuple[int, int, int, int]]:
        """(tp, cp, dp, ep) that can be laid on the same GPUs, and that the engine runs."""
        return (mesh for mesh in self.layouts() if self.stages(mesh))

    def stages(self, mesh: tuple[int, int, int, int]) -> tuple[int, ...]:
        """Pipeline degrees that go with a mesh (tp, cp, dp, ep)."""
        if self.engine is None:
            return self.pp
        tp, cp, dp, ep = mesh
        runs = [Strategy(tp, ep, pp, 1, part.only_dims, cp, dp) for part in self.parts() for pp in self.pp]
        allowed = {each.pp for each in runs if not self.engine.refusals(self.workload, each)}
        return tuple(pp for pp in self.pp if pp in allowed)

    @property
    def only_dims(self) -> tuple[int, ...]:
        """The dims of a part of an engine's space, which has one choice per op."""
        return tuple(table[0] for table in self.choices.values())

    def plain(self, strategy: Strategy) -> Strategy:
        """The strategy of the space that stands for all that do the same: see `sim.canonical`."""
        if all(NONE in table for table in self.choices.values()):
            return canonical(strategy)
        return strategy

    def outside(self, strategy: Strategy) -> list[str]:
        """What keeps a strategy out of the space, one text per degree or op; none if it is inside."""
        dp = self.dp or (strategy.ep,)
        values = {
            "tp": (strategy.tp, self.tp),
            "ep": (strategy.ep, self.ep),
            "pp": (strategy.pp, self.pp),
            "batch": (strategy.batch, self.batch),
            "cp": (strategy.cp, self.cp),
            "dp": (strategy.attention_dp, dp),
        }
        values |= {
            name: (choice, table) for choice, (name, table) in zip(strategy.dims, self.choices.items(), strict=True)
        }
        own = zip(VOCABULARY_OPS, strategy.vocabulary or ENGINES_VOCABULARY, ENGINES_VOCABULARY, strict=True)
        values |= {name: (choice, self.vocabulary.get(name, (engines,))) for name, choice, engines in own}
        missing = [
            f"{name} is {value}, not one of {_shortened(table)}"
            for name, (value, table) in values.items()
            if value not in table
        ]
        if self.engine is None:
            return missing
        refused = self.engine.refusals(self.workload, strategy)
        degrees = [text for text in missing if text.partition(" ")[0] not in self.choices]
        return refused + degrees  # the engine's plans decide about every op

    def sample(self, rng: np.random.Generator) -> Strategy:
        """A strategy, every one equally likely; of an engine's space one of its tables', run or not."""
        tables = (self.tp, self.ep, self.pp, self.batch, self.cp, self.dp or (0,), *self._tables)
        tp, ep, pp, batch, cp, dp, *dims = (table[rng.integers(len(table))] for table in tables)
        ops = len(self.choices)
        return Strategy(tp, ep, pp, batch, tuple(dims[:ops]), cp, dp or ep, tuple(dims[ops:]))


def space_of(workload: Workload) -> Space:
    """The space that a search of the workload has: a named one, or that of an engine.

    Raises:
        UnknownEngine: There is none of that name.
    """
    if rules := engine_rules_of(workload):
        return engine_space(workload, rules)
    named = {
        "paper": paper_space,
        "joint": joint_space,
        "extended": extended_space,
        "generated": generated_space,
        TWO_DIMENSIONAL: two_dimensional_space,
    }
    return named[workload.space](workload)


def space_of_batches(workload: Workload, strategy: Strategy, batches: tuple[int, ...]) -> Space:
    """A strategy with any of some batches."""
    return Space(
        workload,
        tp=(strategy.tp,),
        cp=(strategy.cp,),
        dp=() if strategy.dp is None else (strategy.dp,),
        ep=(strategy.ep,),
        pp=(strategy.pp,),
        batch=batches,
        choices={dim.name: (choice,) for dim, choice in zip(dims_of(workload), strategy.dims, strict=True)},
        vocabulary={op: (choice,) for op, choice in zip(VOCABULARY_OPS, strategy.vocabulary, strict=False)},
    )


def paper_space(workload: Workload) -> Space:
    """The space of "Learning to Shard": one mesh, and no op sharded over tokens or requests.

    Source: "Learning to Shard", footnote 4. Its size there, some 10^9, counts three choices for each op.
    """
    joint = joint_space(workload)
    choices = {
        dim.name: tuple(choice for choice in joint.choices[dim.name] if not _shards_tokens(dim.op, choice))
        for dim in dims_of(workload)
    }
    return replace(joint, choices=choices)


def _shards_tokens(op: FusedOp, choice: int) -> bool:
    return op.label(choice) in _TOKEN_LABELS


def joint_space(workload: Workload) -> Space:
    """Both dims of each op or none, on one mesh: the paper's space and sharding over tokens and requests."""
    return extended_space(workload, ())


def two_dimensional_space(workload: Workload) -> Space:
    """The joint space, in which an op may also shard both its dims, over two sub-axes of tp = a x b.

    b is the workload's `tp_inner`. Of the op that leaves the residual stream to the next layer both dims, too.
    """
    workload = in_space(workload, TWO_DIMENSIONAL)
    joint = joint_space(workload)
    choices = {dim.name: joint.choices[dim.name] + dim.grid for dim in dims_of(workload)}
    return replace(joint, choices=choices)


def extended_space(workload: Workload, extensions: Iterable[str] = (*EXTENSIONS, DECLARED)) -> Space:
    """The joint space with some extensions, all by default.

    Raises:
        ValueError: An unknown extension.
    """
    wanted, whole = set(extensions), generated_space(workload)
    if unknown := wanted - {*EXTENSIONS, DECLARED}:
        known = ", ".join((*EXTENSIONS, DECLARED))
        raise ValueError(f"unknown extension {sorted(unknown)[0]!r}; expected some of {known}")
    kept = (*CHOICES, *((TOKENS,) if "tokens" in wanted else ()))
    kept += (GATHERED_TOKENS, GATHERED) if "gathered" in wanted else ()
    return replace(
        whole,
        cp=whole.cp if "context" in wanted else (1,),
        dp=whole.dp if "degrees" in wanted else (),
        choices={
            name: tuple(
                choice for choice in table if choice in kept or (choice >= FIRST_DECLARED and DECLARED in wanted)
            )
            for name, table in whole.choices.items()
        },
        vocabulary={},
    )


def generated_space(workload: Workload) -> Space:
    """All that proven rules allow, for the embedding, the LM head and sampling, too.

    Every op has the choices that `sim.layers.ops.choices_by_rule` numbers; the other spaces are cut out of this one.

    >>> from sim.config.catalog import load_workload
    >>> dict(generated_space(load_workload("gpt_moe_1_2t_16k")).vocabulary)
    {'embedding': (0, 1, 2, 3), 'lm_head': (0, 1, 2, 3, 4, 5), 'sampling': (0, 1, 2)}
    """
    degrees = workload.degrees
    return Space(
        workload,
        tp=degrees.tp,
        cp=CONTEXT_DEGREES,
        dp=tuple(sorted({*DATA_DEGREES, *degrees.ep})),
        ep=degrees.ep,
        pp=degrees.pp,
        batch=degrees.batch,
        choices={dim.name: choices_by_rule(dim.op) + _declared(dim, workload) for dim in dims_of(workload)},
        vocabulary={op.name: choices_by_rule(op) for op in vocabulary_ops()},
    )


def _declared(dim: Dim, workload: Workload) -> tuple[int, ...]:
    sources, declared = (None, workload.declarations), declared_choices(dim.op.key)
    return tuple(choice for choice in dim.choices if choice in declared and declared[choice].source in sources)


def engine_space(workload: Workload, engine: EngineRules) -> Space:
    """What an engine supports, of the meshes of the extended space and the engine's own plans.

    >>> from sim.config.catalog import load_workload
    >>> from sim.engines.engine_registry import engine_rules
    >>> space = engine_space(load_workload("gpt_moe_1_2t_16k"), engine_rules("vllm"))
    >>> space.outside(Strategy(4, 4, 1, 64, space.only_dims, dp=16))[0].partition(" (")[0]
    'vLLM 0.33.0: expert parallelism is all or nothing'
    """
    degrees, plans = workload.degrees, engine.plans_of(workload)
    return Space(
        workload,
        tp=degrees.tp,
        cp=CONTEXT_DEGREES if engine.cuts_context(workload) else (1,),
        dp=tuple(sorted({*DATA_DEGREES, *degrees.ep})) if workload.model.is_moe else (1,),
        ep=degrees.ep,
        pp=degrees.pp,
        batch=degrees.batch,
        choices={
            dim.name: tuple(sorted({plan.dims[at] for plan in plans})) for at, dim in enumerate(dims_of(workload))
        },
        engine=engine,
    )


def heuristic_space(workload: Workload, *, sequence_parallel: bool) -> Space:
    """Megatron-LM, with or without sequence parallelism, at all degrees of the joint space."""
    choices = {dim.name: (dim.op.megatron[sequence_parallel],) for dim in dims_of(workload)}
    return replace(joint_space(workload), choices=choices)


def _shortened(table: tuple[int, ...]) -> str:
    if len(table) > 12:
        return f"{len(table)} values from {table[0]} to {table[-1]}"
    return ", ".join(map(str, table))
