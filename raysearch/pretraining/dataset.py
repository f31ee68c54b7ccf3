"""What the simulator says of random workloads' strategies: the rows that the network of a prior learns from."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from envs.space import Action, StrategySpace
from raysearch.pretraining.array_files import PER_FILE, UNREADABLE, ArrayFiles, read_array_file, write_array_file
from raysearch.pretraining.pretraining_file import PretrainingFile
from raysearch.pretraining.random_workloads import random_workload
from raysearch.searchers.prior.candidate_strategies import CandidateStrategies
from raysearch.searchers.prior.network import FACTOR_COUNT
from raysearch.searchers.prior.simulated_terms import as_prediction, carried_over, simulated
from raysearch.searchers.prior.strategy_features import OPS, SHARES, Features, Reals, WorkloadFeatures
from sim.arrays import Flags, Ints
from sim.batched import Evaluations, evaluate_many
from sim.config.reading import parse_object
from sim.ops.dims import dims_of
from sim.serving.phases import phase_of
from sim.workload import Workload

NETWORK_TARGETS = ("step", "tpot", "ttft", "memory")
"""Logs of what the simulator says over what the roofline says: see `targets`."""


class Rows(NamedTuple):
    """Of [n] strategies.

    Attributes:
        inputs: Of the network, `[n, F]`.
        targets: `[n, 4]`; see `NETWORK_TARGETS`.
        broken: Whether a limit of the choices is broken, `[n]`.
        weights: How near the workload's best they lie, `[n]`.
        workload: Index of the workload, `[n]`.
        known: Whether it is on a measured machine, `[n]`.
        shares: Of a step's time, as the simulator expects them of a machine that nobody measured, see `SHARES`;
            `[n, FACTOR_COUNT]`, of workloads kept from training alone.
        missed: By how much the log of a step's time is more than expected so, `[n]`; see `shares`.
    """

    inputs: Reals
    targets: Reals
    broken: Flags
    weights: Reals
    workload: Ints
    known: Flags
    shares: Reals
    missed: Reals

    def at(self, which: Ints) -> Rows:
        """Some of them."""
        columns: Any = (each[which] for each in self)
        return Rows(*columns)

    def as_simulated(self) -> Rows:
        """The same with `shares` in the place of the roofline's."""
        inputs = self.inputs.astype(np.float32)
        inputs[:, SHARES] = self.shares
        return self._replace(inputs=inputs)


def kept_out(workload: Ints) -> Flags:
    """Which workloads are kept from training, by their indices: the last of each file."""
    return workload % PER_FILE == PER_FILE - 1


def targets(workload: Workload, features: Features, evaluated: Evaluations) -> tuple[Reals, Flags]:
    """What the network is to say `[n, 4]`, and whether a limit of the choices is broken `[n]`."""
    predicted = as_prediction(workload, features, evaluated)
    nothing = np.zeros(len(evaluated))
    found = [
        predicted.log_step_s - features.log_step_s,
        predicted.log_tpot_s - predicted.log_step_s if (evaluated.tpot_s > 0).all() else nothing,
        predicted.log_ttft_s - features.log_ttft_s if (evaluated.ttft_s > 0).all() else nothing,
        predicted.log_memory - features.log_memory,
    ]
    return np.stack(found, 1), predicted.kept < 0


def _evaluated(pretraining: PretrainingFile, index: int) -> tuple[Rows, dict[str, int] | None]:
    """The rows of one workload, and the choices by op of its best strategy if one is feasible.

    What is trained on has the efficiencies of a measured machine at whatever rates: a function that can be learned
    without noise. Only workloads kept for the errors are on machines whose efficiencies are out by factors.
    """
    distribution, is_kept = pretraining.distribution, bool(kept_out(np.array(index)))
    if not is_kept:
        distribution = distribution.model_copy(update={"efficiency_spread": 0.0})
    workload, known = random_workload(distribution, pretraining.seed, index)
    rng = np.random.default_rng([pretraining.seed, 1 << 21, index])
    space = StrategySpace(workload)
    candidates, features = CandidateStrategies(space, ()), WorkloadFeatures(workload)
    of_a_kind = 8 if workload.space == "joint" and not phase_of(workload).prefills else 20
    kinds = max(2, pretraining.strategies // 2 // of_a_kind)
    spread = candidates.spread(20 * kinds, rng)
    crude = features.of(space.strategies(spread))
    # Half of them where a bare roofline sees room, half anywhere.
    bare = crude.log_tokens - crude.log_step_s - 3 * np.maximum(crude.log_memory, 0)
    bare -= 3 * np.maximum(crude.log_step_s - np.log(workload.tpot_limit_s), 0)
    best = np.argsort(-bare)[: 4 * kinds]
    kinds = min(kinds, len(spread))
    some = np.unique(np.r_[rng.permutation(best)[: kinds - kinds // 3], rng.integers(len(spread), size=kinds // 3)])
    # Each as the one that stands for all that do the same, as a search describes it.
    actions = [space.folded(_dims_at_random(candidates, spread[np.repeat(some, of_a_kind)], rng))]
    evaluated: list[Evaluations] = []
    for round_ in range(3):
        evaluated.append(evaluate_many(workload, space.strategies(actions[-1])))
        if round_ < 2:
            values = np.concatenate([np.log(each.tokens_per_s_per_gpu) - 3 * each.excess for each in evaluated])
            top = np.concatenate(actions)[np.argsort(-values)[:10]]
            mutated = space.folded(candidates.mutated(top, pretraining.strategies // 4, rng))
            if of_a_kind > 8 and len(mutated):  # degrees that were priced already: others' tables take long
                same = top[rng.integers(len(top), size=len(mutated))]
                keep = rng.random(len(mutated)) < 0.8
                for place in range(len(space.sizes)):
                    if space.coordinates[place].ordered:
                        mutated[keep, place] = same[keep, place]
                mutated = mutated[candidates.allowed(mutated)]
            actions.append(mutated if len(mutated) >= 5 else np.repeat(top, 5, axis=0))
    found = np.concatenate(actions)
    found_features = features.of(space.strategies(found))
    parts = [
        targets(workload, features.of(space.strategies(each)), figures)
        for each, figures in zip(actions, evaluated, strict=True)
    ]
    wanted, broken = (np.concatenate(column) for column in zip(*parts, strict=True))
    log_tokens = np.concatenate([np.log(each.tokens_per_s_per_gpu) for each in evaluated])
    excess, feasible = (np.concatenate([getattr(each, name) for each in evaluated]) for name in ("excess", "feasible"))
    merit = log_tokens - 2 * excess
    top = merit[feasible].max() if feasible.any() else merit.max()
    weights = 0.1 + np.exp(-np.clip(np.abs(top - merit), 0, 20))
    shares, missed = np.zeros((len(found), FACTOR_COUNT)), np.zeros(len(found))
    if is_kept:
        expected, predicted = simulated(carried_over(workload), space.strategies(found), found_features)
        shares = expected.inputs[:, SHARES]
        missed = found_features.log_step_s + wanted[:, 0] - predicted.log_step_s
    about = np.full(len(found), index), np.full(len(found), known)
    rows = Rows(found_features.inputs, wanted, broken, weights, *about, shares, missed)
    choices = None
    if feasible.any():
        dims = space.strategies(found[[np.where(feasible, log_tokens, -np.inf).argmax()]]).dims[0].tolist()
        choices = {dim.op.name: choice for dim, choice in zip(dims_of(workload), dims, strict=True)}
    return rows, choices


def _dims_at_random(candidates: CandidateStrategies, actions: Action, rng: np.random.Generator) -> Action:
    """Megatron-LM's dims, some of them changed, or all."""
    dims = [place for place, each in enumerate(candidates.space.coordinates) if not each.ordered]
    kind = rng.choice(len(candidates.dims), size=len(actions))
    drawn = candidates.dims[kind]
    any_of = rng.integers(np.array(candidates.space.sizes)[dims], size=drawn.shape)
    share = rng.choice((0.0, 0.1, 0.3, 1.0), p=(0.15, 0.35, 0.35, 0.15), size=(len(actions), 1))
    actions[:, dims] = np.where(rng.random(drawn.shape) < share, any_of, drawn)
    return actions


def row_files(pretraining: PretrainingFile) -> ArrayFiles:
    """The files of all rows of a run."""
    return ArrayFiles("rows", pretraining.workloads, _write_rows, (pretraining,))


def _write_rows(pretraining: PretrainingFile, indices: range, path: Path) -> None:
    rows: list[Rows] = []
    choices: list[dict[str, int]] = []
    for index in indices:
        found, best = _evaluated(pretraining, index)
        rows.append(found)
        choices += [best] if best else []
    joined = Rows(*(np.concatenate(columns) for columns in zip(*rows, strict=True)))
    arrays = {
        "inputs": joined.inputs.astype(np.float16),
        "targets": joined.targets.astype(np.float32),
        "broken": joined.broken.astype(bool),
        "weights": joined.weights.astype(np.float32),
        "workload": joined.workload.astype(np.int64),
        "known": joined.known.astype(bool),
        "shares": joined.shares.astype(np.float16),
        "missed": joined.missed.astype(np.float32),
        "choices": np.array([[best.get(op, -1) for op in OPS] for best in choices], np.int8).reshape(-1, len(OPS)),
        "asked": np.frombuffer(json.dumps(_asked(pretraining)).encode(), np.uint8),
    }
    write_array_file(path, arrays)


def _asked(pretraining: PretrainingFile) -> dict[str, object]:
    """What decides what is in a file."""
    return pretraining.model_dump(mode="json", include={"seed", "strategies", "distribution"})


def _read_file(path: Path) -> tuple[dict[str, object], Rows, Reals]:
    """What `_write_rows` wrote. Raises: One of `UNREADABLE`."""
    arrays = read_array_file(path)
    asked = parse_object(arrays["asked"].tobytes())
    rows, choices = Rows(*(arrays[name] for name in Rows._fields)), arrays["choices"]
    count, width = rows.inputs.shape
    shapes = [(count, width), (count, len(NETWORK_TARGETS)), *[(count,)] * 4, (count, FACTOR_COUNT), (count,)]
    shapes.append((choices.shape[0], len(OPS)))
    kinds = ["f", "f", "b", "f", "i", "b", "f", "f", "i"]
    for array, shape, kind in zip((*rows, choices), shapes, kinds, strict=True):
        if array.shape != shape or array.dtype.kind != kind or not np.isfinite(array).all():
            raise ValueError(f"expected finite numbers of shape {shape}, got {array.dtype} of shape {array.shape}")
    return asked, rows, choices


def read_files(paths: Sequence[Path], pretraining: PretrainingFile) -> tuple[Rows, Iterator[dict[str, int]]]:
    """All rows, and the best choices of every workload that has a feasible strategy.

    Raises:
        ValueError: A file is damaged, or was made for another configuration.
    """
    parts: list[Rows] = []
    choices: list[Reals] = []
    for path in paths:
        try:
            asked, rows, best = _read_file(path)
        except UNREADABLE as error:
            raise ValueError(f"{path} is damaged: {error}; delete it, and the same command makes it again") from error
        if asked != _asked(pretraining):
            raise ValueError(f"{path} holds other workloads than the configuration asks for: choose another folder")
        parts.append(rows)
        choices.append(best)
    joined = Rows(*(np.concatenate(columns) for columns in zip(*parts, strict=True)))
    known = (
        {op: int(choice) for op, choice in zip(OPS, row, strict=True) if choice >= 0} for row in np.concatenate(choices)
    )
    return joined, known
