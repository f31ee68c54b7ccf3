"""Black boxes that a policy learns to search: strategies of random workloads with all that the simulator says of them.

Each is on a machine whose efficiencies are out by factors, so that the network errs as it will on a machine that it
never saw, and some have a limit that hardly any strategy keeps. A search of a table needs no simulator, so one table is
searched many times.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from envs.space import Action, StrategySpace
from raysearch.pretraining.array_files import PER_FILE, UNREADABLE, ArrayFiles, read_array_file, write_array_file
from raysearch.pretraining.pretraining_file import PretrainingFile
from raysearch.pretraining.random_workloads import random_workload
from raysearch.searchers.prior.black_box_belief import BlackBoxBelief
from raysearch.searchers.prior.candidate_pool import first_pool
from raysearch.searchers.prior.candidate_strategies import CandidateStrategies
from raysearch.searchers.prior.network import read_prior
from raysearch.searchers.prior.simulated_terms import TermSourceName
from raysearch.searchers.prior.strategy_features import Reals
from sim.arrays import Flags
from sim.batched import evaluate_many
from sim.workload import Workload

_FOREMOST, _REST, _ANYWHERE, _BETTER, _ROUNDS = 200, 60, 60, 60, 2
"""Strategies of a table: the best and some others of those that a search looks at first, some drawn anywhere, and, as a
search would come to, mutations of the truly best, twice. [assumed]"""
_ABOVE_SHORTEST, _NO_TIME_S = (1.03, 1.6), 1e-6
"""A tight limit over the shortest time, and one that nothing keeps, so that the fastest are looked at. [assumed]"""
BLIND: TermSourceName = "carried"
"""What searches of tables expect: nothing of what was measured of the machines."""
_SPREADS = {"efficiency_spread", "measured_spread"}
_SEEDS_APART = 1 << 40
"""Added to the seed, so that no table is of a workload that the network was trained on."""


class SearchTable(NamedTuple):
    """What a search may call.

    Attributes:
        index, tpot_slo_s: Of the workload, see `table_workload`.
        actions: `[n, A]`.
        simulated: Tokens/s/GPU `[n]`, of infeasible ones too.
        excess: By how much limits are missed `[n]`; 0 if feasible.
    """

    index: int
    tpot_slo_s: float
    actions: Action
    simulated: Reals
    excess: Reals

    @property
    def raw(self) -> Reals:
        """Tokens/s/GPU `[n]`, 0 if infeasible."""
        return np.where(self.excess <= 0, self.simulated, 0.0)


def table_workload(pretraining: PretrainingFile, index: int, tpot_slo_s: float = 0.0) -> Workload:
    """The workload of a table, with its own limit of a token's time unless one is given."""
    policy = pretraining.policy
    distribution = pretraining.distribution.model_copy(update=policy.model_dump(include=_SPREADS))
    drawn = random_workload(distribution, pretraining.seed + _SEEDS_APART, index)[0]
    return _limited(drawn, tpot_slo_s) if tpot_slo_s else drawn


def _limited(workload: Workload, tpot_slo_s: float) -> Workload:
    return replace(workload, tpot_slo_s=tpot_slo_s, config_hash=f"{workload.name}-{tpot_slo_s!r}")


def kept_tables(tables: Sequence[SearchTable]) -> Flags:
    """Which tables a policy is judged by, and not trained on: one in eight."""
    return np.array([table.index % 8 == 7 for table in tables], np.bool_)


def made_table(pretraining: PretrainingFile, prior: Path, index: int) -> SearchTable:
    """The table of one workload."""
    workload, rng = table_workload(pretraining, index), np.random.default_rng([pretraining.seed, 1 << 24, index])
    if rng.random() < pretraining.policy.tight_share:
        workload = _limited(workload, _shortest_s(workload, prior, rng) * float(rng.uniform(*_ABOVE_SHORTEST)))
    space = StrategySpace(workload)
    candidates = CandidateStrategies(space, read_prior(prior).header.pool)
    pool = _looked_at(space, candidates, prior, rng)
    some = rng.permutation(np.arange(min(_FOREMOST, len(pool)), len(pool)))[:_REST]
    anywhere = candidates.mutated(candidates.spread(_ANYWHERE, rng), _ANYWHERE, rng)
    actions = np.unique(space.folded(np.concatenate([pool[:_FOREMOST], pool[some], anywhere])), axis=0)
    simulated, excess = _answers(workload, space, actions)
    for _ in range(_ROUNDS):
        best = np.argsort(-np.where(excess <= 0, np.log(simulated), -excess - 50), kind="stable")[:10]
        more = space.folded(candidates.mutated(actions[best], _BETTER * 2, rng))[:_BETTER]
        known = {row.tobytes() for row in actions}
        more = np.array([row for row in np.unique(more, axis=0) if row.tobytes() not in known], np.int64)
        if len(more):
            beside = _answers(workload, space, more)
            actions = np.concatenate([actions, more])
            simulated, excess = np.r_[simulated, beside[0]], np.r_[excess, beside[1]]
    return SearchTable(index, workload.tpot_slo_s, actions, simulated, excess)


def _looked_at(space: StrategySpace, candidates: CandidateStrategies, prior: Path, rng: np.random.Generator) -> Action:
    return first_pool(BlackBoxBelief(read_prior(prior), space, BLIND), space, candidates, rng).actions


def _shortest_s(workload: Workload, prior: Path, rng: np.random.Generator) -> float:
    """About the shortest time per token of any strategy that keeps the other limits; if none does, the limit."""
    space, free = StrategySpace(_limited(workload, _NO_TIME_S)), _limited(workload, math.inf)
    candidates = CandidateStrategies(space, read_prior(prior).header.pool)
    evaluated = evaluate_many(free, space.strategies(_looked_at(space, candidates, prior, rng)[:_FOREMOST]))
    return float(evaluated.tpot_s[evaluated.feasible].min(initial=workload.tpot_slo_s))


def _answers(workload: Workload, space: StrategySpace, actions: Action) -> tuple[Reals, Reals]:
    evaluated = evaluate_many(workload, space.strategies(actions))
    return evaluated.tokens_per_s_per_gpu, np.where(evaluated.feasible, 0.0, np.maximum(evaluated.excess, 1e-9))


def table_files(pretraining: PretrainingFile, prior: Path) -> ArrayFiles:
    """The files of all tables of a run."""
    return ArrayFiles("tables", pretraining.policy.tables, _write_tables, (pretraining, str(prior)))


def _write_tables(pretraining: PretrainingFile, prior: str, indices: range, path: Path) -> None:
    arrays: dict[str, NDArray[Any]] = {"asked": np.frombuffer(_asked(pretraining), np.uint8)}
    for index in indices:
        table = made_table(pretraining, Path(prior), index)
        arrays |= {
            f"slo{index}": np.array(table.tpot_slo_s),
            f"actions{index}": table.actions.astype(np.int32),
            f"answers{index}": np.stack([table.simulated, table.excess], 1),
        }
    write_array_file(path, arrays)


def _asked(pretraining: PretrainingFile) -> bytes:
    """What decides what is in a file, but for the prior, which is of the same folder."""
    words = pretraining.model_dump(mode="json", include={"seed", "distribution"})
    return json.dumps(words | pretraining.policy.model_dump(include={*_SPREADS, "tight_share"})).encode()


def read_tables(paths: Sequence[Path], pretraining: PretrainingFile) -> list[SearchTable]:
    """All tables with a feasible strategy.

    Raises:
        ValueError: A file is damaged, or was made for another configuration.
    """
    found: list[SearchTable] = []
    for number, path in enumerate(paths):
        try:
            arrays = read_array_file(path)
            asked = arrays["asked"].tobytes()
            indices = range(number * PER_FILE, min((number + 1) * PER_FILE, pretraining.policy.tables))
            for index in indices:
                actions, answers = arrays[f"actions{index}"].astype(np.int64), arrays[f"answers{index}"]
                if answers.shape != (len(actions), 2) or actions.ndim != 2 or not np.isfinite(answers).all():
                    raise ValueError("expected finite answers, two of each action")
                if not (slo_s := float(arrays[f"slo{index}"])) > 0:
                    raise ValueError(f"expected a limit of the time above 0, got {slo_s}")
                found.append(SearchTable(index, slo_s, actions, answers[:, 0], answers[:, 1]))
        except UNREADABLE as error:
            raise ValueError(f"{path} is damaged: {error}; delete it, and the same command makes it again") from error
        if asked != _asked(pretraining):
            raise ValueError(f"{path} holds other workloads than the configuration asks for: choose another folder")
    return [table for table in found if table.raw.any()]
