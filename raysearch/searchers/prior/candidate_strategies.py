"""Strategies worth a look: those that the workload's own rules allow, and neighbours of good ones.

The rules are known before the first call: the device budget, which meshes fit the same GPUs, what an engine refuses.
None of them needs a simulation.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import final

import numpy as np

from envs.space import Action, StrategySpace
from sim.arrays import Flags, Ints
from sim.ops.dims import dims_of, spread_choices
from sim.ops.heuristics import megatron_dims, megatron_sp_dims
from sim.optimum.spaces import space_of
from sim.serving.phases import most_sequences
from sim.simulate import mesh_violations
from sim.strategy import NONE, Strategy


@final
class CandidateStrategies:
    """Draws actions of a space.

    Args:
        space: To choose from.
        pool: Choices by op that were good elsewhere, the best first; ops that one does not name follow Megatron-LM.

    Attributes:
        bases: Degrees that the rules allow, `[D, A]`, with the first batch and the first dims; of an engine with each
            of the dims that it runs.
        dims: Indices of the dims to begin with, `[P, ops]`.
        batch: Place of the batch.
    """

    def __init__(self, space: StrategySpace, pool: Sequence[Mapping[str, int]]) -> None:
        self.space = space
        self._sizes = np.array(space.sizes, np.int64)
        self._degrees = [
            place for place, each in enumerate(space.coordinates) if each.name in ("tp", "ep", "pp", "cp", "dp")
        ]
        self.batch = space.names.index("batch")
        degrees = {*self._degrees, self.batch}
        self._dims = [place for place, each in enumerate(space.coordinates) if not each.ordered]
        # How replicas serve together, of which neither rules nor the belief know anything.
        self._served = [place for place in range(len(space.sizes)) if place not in {*degrees, *self._dims}]
        self._engine = space_of(space.workload).engine is not None and not space.degrees_only
        self.bases = self._meshes()
        self.dims = self._pool(pool)
        if self._engine:
            self.bases = self._runnable(self.bases)
        else:
            self.bases[:, self._dims] = self.dims[0]
        self._codes = np.unique(self._code(self.bases))
        values = np.array(space.coordinates[self.batch].values)
        self._most_batch = np.array([most_sequences(space.workload, dp) for dp in self._dp(self.bases)])
        self._batches = values
        self._doublings = np.unique(np.searchsorted(values, 2 ** np.arange(int(values[-1]).bit_length()), "right") - 1)
        self._doublings = self._doublings[self._doublings >= 0]

    # --- what the rules allow ------------------------------------------------------------------

    def _meshes(self) -> Action:
        """Degrees that the workload allows, as actions whose batch and dims are the first, `[D, A]`."""
        space, workload = self.space, self.space.workload
        tables = [np.array(space.coordinates[place].values) for place in self._degrees]
        grid = np.stack(np.meshgrid(*(np.arange(len(table)) for table in tables), indexing="ij"), -1)
        grid = grid.reshape(-1, len(tables))
        found = np.zeros((len(grid), len(self._sizes)), np.int64)
        found[:, self._degrees] = grid
        tp, ep, pp, cp, dp = self._mesh(found)
        copies = workload.model.experts + workload.redundant_experts
        keep = (tp * cp * dp * pp <= workload.max_gpus) & (np.ceil(tp * cp * dp / ep) * ep * pp <= workload.max_gpus)
        keep &= (pp <= workload.model.layers) & (ep <= copies) & ((tp * cp * dp) % ep == 0)
        found = found[keep]
        if not space.degrees_only and len(self._degrees) > 3:
            tp, ep, _, cp, dp = self._mesh(found)
            keys = np.stack([tp, cp, dp, ep], 1)
            meshes, which = np.unique(keys, axis=0, return_inverse=True)
            fits = np.array([not mesh_violations(workload, *map(int, mesh)) for mesh in meshes])
            found = found[fits[which.reshape(-1)]]
        return found if len(found) else np.zeros((1, len(self._sizes)), np.int64)

    def _mesh(self, actions: Action) -> list[Ints]:
        """tp, ep, pp, cp, dp of actions `[n, A]`."""
        space, found = self.space, {}
        for place in self._degrees:
            found[space.names[place]] = np.array(space.coordinates[place].values)[actions[:, place]]
        ones = np.ones(len(actions), np.int64)
        cp, dp = found.get("cp", ones), found.get("dp", found["ep"])
        return [found["tp"], found["ep"], found["pp"], cp, np.where(dp == 0, found["ep"], dp)]

    def _dp(self, actions: Action) -> Ints:
        return self._mesh(actions)[4]

    def _runnable(self, tuples: Action) -> Action:
        """Those of an engine's space: degrees with the dims of a plan that the engine runs under them."""
        workload, rules = self.space.workload, space_of(self.space.workload).engine
        assert rules is not None
        found: list[Action] = []
        seen: dict[tuple[int, ...], bool] = {}
        for row, degrees in zip(tuples, np.stack(self._mesh(tuples), 1).tolist(), strict=True):
            tp, ep, pp, cp, dp = degrees
            for choice in self.dims:
                values = tuple(self._values(choice))
                key = (tp, ep, pp, cp, dp, *values)
                if key not in seen:
                    strategy = Strategy(tp, ep, pp, 1, values, cp, None if (cp, dp) == (1, ep) else dp)
                    seen[key] = not rules.refusals(workload, strategy)
                if seen[key]:
                    whole = row.copy()
                    whole[self._dims] = choice
                    found.append(whole)
        return np.array(found) if found else tuples[:1]

    def _values(self, choice: Action) -> list[int]:
        return [self.space.coordinates[place].values[index] for place, index in zip(self._dims, choice, strict=True)]

    def _pool(self, pool: Sequence[Mapping[str, int]]) -> Action:
        """Indices of the dims to begin with, `[P, ops]`: Megatron-LM's, then the pool's; of an engine its plans'."""
        space, workload = self.space, self.space.workload
        if not self._dims:
            return np.zeros((1, 0), np.int64)
        tables = [space.coordinates[place].values for place in self._dims]
        own = space_of(workload)
        if self._engine:
            wanted = [part.only_dims for part in own.parts()]
        else:
            heuristics = [spread_choices(workload, of(workload.model)) for of in (megatron_sp_dims, megatron_dims)]
            names = [dim.op.name for dim in dims_of(workload)]
            others = [
                tuple(each.get(name, choice) for name, choice in zip(names, heuristics[0], strict=True))
                for each in pool
            ]
            wanted = [*heuristics, *others]
        rows = [
            [
                table.index(choice) if choice in table else table.index(NONE) if NONE in table else 0
                for choice, table in zip(dims, tables, strict=True)
            ]
            for dims in wanted
        ]
        return np.array(list(dict.fromkeys(map(tuple, rows))), np.int64)

    def allowed(self, actions: Action) -> Flags:
        """Which of some actions `[n, A]` the rules allow, on the GPUs that there are."""
        return np.isin(self._code(actions), self._codes) & self._affordable(actions)

    def _affordable(self, actions: Action) -> Flags:
        """Which of some actions `[n, A]` need no more GPUs than there are, of all replicas and of both pools."""
        if not self._served or not len(actions):
            return np.ones(len(actions), np.bool_)
        _, first, which = np.unique(
            actions[:, [*self._degrees, *self._served]], axis=0, return_index=True, return_inverse=True
        )
        strategies = [self.space.decode(action) for action in actions[first]]
        most = self.space.workload.max_gpus
        return np.array([each.served.gpus(each.gpus) <= most for each in strategies])[which.reshape(-1)]

    def _code(self, actions: Action) -> Ints:
        code = np.zeros(len(actions), np.int64)
        for place in [*self._degrees, *(self._dims if self._engine else [])]:
            code = code * self._sizes[place] + actions[:, place]
        return code

    # --- draws -----------------------------------------------------------------------------------

    def spread(self, count: int, rng: np.random.Generator) -> Action:
        """About so many actions, `[n, A]`, over all degrees and doublings of the batch, with the first dims."""
        pairs = len(self.bases) * len(self._doublings)
        picked = np.arange(pairs) if pairs <= count else np.sort(rng.choice(pairs, count, replace=False))
        found = self.bases[picked // len(self._doublings)]
        found[:, self.batch] = self._doublings[picked % len(self._doublings)]
        if self._served:
            found[:, self._served] = rng.integers(self._sizes[self._served], size=(len(found), len(self._served)))
        runs = self._batches[found[:, self.batch]] <= self._most_batch[picked // len(self._doublings)]
        runs &= self._affordable(found)
        return found[runs] if runs.any() else found

    def with_dims(self, actions: Action) -> Action:
        """Each action `[n, A]` with each of the dims to begin with, `[n * P, A]`."""
        if self._engine or not self._dims:
            return actions
        found = np.repeat(actions, len(self.dims), axis=0)
        found[:, self._dims] = np.tile(self.dims, (len(actions), 1))
        return found

    def mutated(self, parents: Action, count: int, rng: np.random.Generator) -> Action:
        """Up to `count` neighbours of some actions `[n, A]`: a degree, the batch, a few dims, or some of each."""
        found = parents[rng.integers(len(parents), size=count)]
        for place in [*self._degrees, self.batch, *self._served]:
            long = place == self.batch and self._sizes[place] > 32
            reach = 2 ** rng.integers(0, int(self._sizes[place]).bit_length(), size=count) if long else 1
            step = rng.choice((-1, 0, 1), p=(0.12, 0.76, 0.12), size=count) * reach
            found[:, place] = np.clip(found[:, place] + step, 0, self._sizes[place] - 1)
        if self._engine:
            jump = rng.random(count) < 0.3
            drawn = self.bases[rng.integers(len(self.bases), size=count)]
            kept = [self.batch, *self._served]
            drawn[:, kept] = found[:, kept]
            found[jump] = drawn[jump]
        elif self._dims:
            share = rng.choice((0.0, 1 / len(self._dims), 2.5 / len(self._dims)), size=(count, 1))
            dims = found[:, self._dims]
            drawn = rng.integers(self._sizes[self._dims], size=dims.shape)
            found[:, self._dims] = np.where(rng.random(dims.shape) < share, drawn, dims)
            swapped = np.flatnonzero(rng.random(count) < 0.1)
            found[swapped[:, None], self._dims] = self.dims[rng.integers(len(self.dims), size=len(swapped))]
        return found[self.allowed(found)]

    def elsewhere(self, parents: Action, count: int, rng: np.random.Generator) -> Action:
        """About so many actions of any degrees and batch, with the dims of some actions `[n, A]`, each as it is."""
        found = self.spread(count, rng)
        if not self._engine and self._dims:
            dims = np.concatenate([parents[:, self._dims], self.dims])
            found[:, self._dims] = dims[rng.integers(len(dims), size=len(found))]
        return found

    def neighbours(self, action: Action) -> Action:
        """Every action that differs in one coordinate, by one step where it is ordered, `[n, A]`."""
        found: list[Action] = []
        for place, each in enumerate(self.space.coordinates):
            here = int(action[place])
            values = (here - 1, here + 1) if each.ordered else range(len(each.values))
            for index in values:
                if index != here and 0 <= index < len(each.values):
                    moved = action.copy()
                    moved[place] = index
                    found.append(moved)
        moved = np.array(found, np.int64).reshape(-1, len(self._sizes))
        return moved[self.allowed(moved)]
