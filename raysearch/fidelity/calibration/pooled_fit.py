"""Engines' own times of all machines in one fit: what runs share is fitted together.

Every time of `sim.prices.engine.EngineTimes`, and a time per layer, is a sum of effects on its logarithm: of the
engine, its generation, the machine, the model, its format, and of these together. Each effect has a normal prior around
0, whose width says how far such things differ: a cell of many runs speaks for itself, one of none as its parents do.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import scipy.sparse
from numpy.typing import NDArray

from raysearch.fidelity.calibration.deployments import ServingRun
from raysearch.fidelity.calibration.engines import Steps
from raysearch.fidelity.calibration.robust_fit import damped_descent, huber_loss, huber_weights
from sim.arrays import Floats
from sim.json_object import JsonObject
from sim.prices.engine import EngineTimes, cell_of

_sparse: Any = scipy.sparse  # its stubs do not know that most of its functions return sparse matrices
Bools = NDArray[np.bool_]


class Cell(NamedTuple):
    """What the times of a run depend on, all but its batch and lengths.

    Attributes:
        family: The engine, whatever its version; `engine` is its generation.
        kind: "moe" or "dense".
        weights: Format of the experts, or of all weights.
        drafts: "mtp" where layers of multi-token prediction draft, else "".
        maker: Of the machine, where its file names one; NVIDIA's do not: what most runs share stands for them.
        chip: The same of the chip, which machines with as many multiprocessors of a maker have in common.
    """

    family: str
    engine: str
    system: str
    model: str
    kind: str
    weights: str
    drafts: str
    maker: str = ""
    chip: str = ""


def cell_of_run(run: ServingRun, system: str, maker: str = "", chip: str = "") -> Cell:
    """The cell of a run on a machine, by its name, its maker's and its chip's."""
    kind, drafts = "moe" if run.model.is_moe else "dense", "mtp" if run.speculation else ""
    weights = run.model.expert_dtype or run.weights
    return Cell(run.backend, run.generation, system, run.model.name, kind, weights, drafts, maker, chip)


class Effect(NamedTuple):
    """One of the effects on a time: what it goes by, the width of its prior, and that prior's mean."""

    by: tuple[str, ...]
    width: float
    mean: float = 0.0


_FAMILY, _GENERATION = ("family",), ("engine",)
EFFECTS: Mapping[str, tuple[Effect, ...]] = {
    # [assumed] widths: those under which whole models and workloads held out came out best, of some twenty tried.
    "kernel_factor": (
        Effect(_FAMILY, 0.01),
        Effect(_GENERATION, 0.03),
        Effect(("system",), 0.02),
        Effect(("family", "system"), 0.02),
        Effect(("model",), 0.15),
        Effect(("family", "model"), 0.15),
        Effect(("engine", "model"), 0.08),
        Effect(("family", "model", "system"), 0.08),
        Effect(("family", "model", "system", "weights"), 0.08),
        Effect(("model", "system"), 0.08),
        Effect(("family", "drafts"), 0.2),
        Effect(("maker",), 0.3),
        Effect(("engine", "maker"), 0.2),
        Effect(("maker", "system"), 0.1),
        Effect(("chip",), 0.2),
        Effect(("engine", "chip"), 0.2),
        Effect(("family", "model", "chip"), 0.15),
    ),
    "step_s": (
        Effect(_FAMILY, 0.3, np.log(0.5e-3)),
        Effect(_GENERATION, 0.3),
        Effect(("engine", "maker"), 0.5),
        Effect(("engine", "maker", "system"), 0.4),
        Effect(("engine", "chip"), 0.4),
    ),
    "layer_s": (
        Effect((), 0.1, np.log(5e-6)),
        Effect(_FAMILY, 0.1),
        Effect(("family", "kind"), 0.1),
        Effect(("system",), 0.1),
        Effect(("family", "model"), 0.8),
        Effect(("maker",), 0.3),
        Effect(("engine", "maker"), 0.4),
        Effect(("family", "model", "chip"), 0.5),
    ),
    "sequence_s": (
        Effect(_FAMILY, 0.3, np.log(0.8e-5)),
        Effect(_GENERATION, 0.3),
        Effect(("family", "model"), 0.3),
    ),
    "prompt_factor": (
        Effect(_FAMILY, 0.1, -0.8),
        Effect(("weights",), 0.2),
        Effect(("engine", "system"), 0.02),
        Effect(("engine", "system", "model"), 0.8),
        Effect(("maker",), 0.3),
        Effect(("engine", "maker"), 0.3),
        Effect(("engine", "chip"), 0.3),
        Effect(("engine", "model", "chip"), 0.5),
    ),
    "prefill_share": (Effect(_FAMILY, 0.5, 1.5), Effect(_GENERATION, 0.5)),
}
JUDGED_BY = 40
"""Runs of a machine below which it has no times of its own, but those of a machine that never ran, and their intervals.
Fewer may be a single sweep: that of GB200 falls and rises fourfold as its load grows."""
_SPREAD = 0.06
"""[assumed] Spread of log errors of a cell's own runs, by which priors weigh."""


def _softplus(values: Floats) -> Floats:
    return np.logaddexp(0.0, 4 * values) / 4


def _logistic(values: Floats) -> Floats:
    return 1 / (1 + np.exp(-values))


_LINKS: Mapping[str, Callable[[Floats], Floats]] = {
    **dict.fromkeys(("kernel_factor", "step_s", "layer_s", "sequence_s"), np.exp),
    "prompt_factor": lambda values: 1 + _softplus(values),
    "prefill_share": _logistic,
}


@dataclass(frozen=True, slots=True)
class Pool:
    """Measured runs of several machines.

    Attributes:
        cells: [runs] what they depend on.
        layers: [runs] of their models.
        steps: Their steps.
        measured_s: [runs] seconds per output token.
        weights: [runs] how much each counts in a fit; 0 for one that is only predicted.
    """

    cells: Sequence[Cell]
    layers: Floats
    steps: Steps
    measured_s: Floats
    weights: Floats

    def __getitem__(self, rows: Bools) -> Pool:
        at = np.flatnonzero(rows)
        return Pool(
            [self.cells[i] for i in at.tolist()], self.layers[at], self.steps[at], self.measured_s[at], self.weights[at]
        )


class PooledTimes:
    """Times of every cell, known or not, after a fit, which begins at that of much the same runs where one is given."""

    def __init__(self, pool: Pool, near: PooledTimes | None = None) -> None:
        cells = dict.fromkeys(pool.cells)
        keys = dict.fromkeys(key for cell in cells for name in EFFECTS for key, _ in _effects_of(name, cell))
        self._place = {key: place for place, key in enumerate(keys)}
        priors = {(name, effect.by): effect for name, effects in EFFECTS.items() for effect in effects}
        self._mean, self._width = (
            np.array([getattr(priors[key[0], key[1]], part) for key in keys], dtype=float) for part in ("mean", "width")
        )
        start = self._mean.copy()
        if near is not None:
            start[:] = [near._found[near._place[key]] for key in keys]
        self._found = _fitted(self, pool, start)

    def matrix(self, name: str, cells: Sequence[Cell]) -> Any:
        """[cells, effects], sparse: which effects make up a time's logarithm."""
        of_cell = {
            cell: [self._place[key] for key, _ in _effects_of(name, cell) if key in self._place] for cell in set(cells)
        }
        columns = [of_cell[cell] for cell in cells]
        starts = np.cumsum([0, *map(len, columns)])
        places = np.concatenate(columns).astype(int)
        return _sparse.csr_matrix((np.ones(len(places)), places, starts), shape=(len(cells), len(self._place)))

    @property
    def prior(self) -> tuple[Floats, Floats]:
        """[effects] means and widths."""
        return self._mean, self._width

    def parts(self, cell: Cell) -> dict[str, float]:
        """The times of a cell; an effect that no run has seen is its prior's mean."""
        found: dict[str, float] = {}
        for name in EFFECTS:
            value = sum(
                (self._found[self._place[key]] if key in self._place else effect.mean)
                for key, effect in _effects_of(name, cell)
            )
            found[name] = float(_LINKS[name](np.array(value)))
        return found

    def times(self, cell: Cell, layers: float) -> EngineTimes:
        """The same for a model of so many layers."""
        parts = self.parts(cell)
        step_s = parts["step_s"] + layers * parts["layer_s"]
        rest = ("sequence_s", "prefill_share", "kernel_factor", "prompt_factor")
        return EngineTimes(step_s, *(parts[name] for name in rest))

    def record(self, system: str, cells: Sequence[Cell]) -> JsonObject:
        """Times of each engine on a machine, as calibrations store them.

        Args:
            system: The machine.
            cells: Of all runs, of this and of other machines.
        """
        found: JsonObject = {}
        own = [cell for cell in cells if cell.system == system]
        maker, chip = (own[0].maker, own[0].chip) if own else ("", "")
        machine = system if len(own) >= JUDGED_BY else ""
        for family, engine in sorted({(cell.family, cell.engine) for cell in cells}):
            plain = Cell(family, engine, machine, "", "dense", "", "", maker, chip)
            known = {cell[3:7] for cell in cells if cell.family == family}
            known = sorted(known | {(model, kind, "", "") for model, kind, *_ in known})
            each = {
                cell_of(model, weights, drafts=bool(drafts)) if weights else model: self._rounded(
                    plain._replace(model=model, kind=kind, weights=weights, drafts=drafts)
                )
                for model, kind, weights, drafts in known
            }
            found[engine] = {
                **self._rounded(plain),
                "models": sorted({c.model for c in cells if c.family == family and c.system == system}),
                "of": {"moe": self._rounded(plain._replace(kind="moe")), **each},
            }
        return found

    def _rounded(self, cell: Cell) -> JsonObject:
        return {name: float(f"{value:.4g}") for name, value in self.parts(cell).items()}


_Key = tuple[str, tuple[str, ...], tuple[str, ...]]


def _effects_of(name: str, cell: Cell) -> list[tuple[_Key, Effect]]:
    """The effects on a time in a cell, by keys: those of all that is known of it."""
    return [
        ((name, effect.by, tuple(getattr(cell, part) for part in effect.by)), effect)
        for effect in EFFECTS[name]
        if all(getattr(cell, part) for part in effect.by)
    ]


def _log_tpot(pool: Pool, values: Mapping[str, Floats]) -> tuple[Floats, dict[str, Floats]]:
    """[runs] log seconds per output token, and its derivative by each time's sum of effects."""
    part = {name: _LINKS[name](values[name]) for name in EFFECTS}
    pace, factor, share = pool.steps.pace, part["kernel_factor"], part["prefill_share"]
    others = pace.mixed_share * pace.others_share
    seen, decode_s = others * share, factor * pool.steps.decode_s
    mixed_s = factor * part["prompt_factor"] * pool.steps.mixed_s
    kernels_s = (1 - seen) * decode_s + seen * mixed_s
    own = {
        "step_s": part["step_s"],
        "layer_s": part["layer_s"] * pool.layers,
        "sequence_s": part["sequence_s"] * pace.sequences,
    }
    total_s = kernels_s + sum(own.values())
    slopes = {
        "kernel_factor": kernels_s,
        **own,
        "prompt_factor": seen * factor * pool.steps.mixed_s * _logistic(4 * values["prompt_factor"]),
        "prefill_share": others * share * (1 - share) * (mixed_s - decode_s),
    }
    return np.log(total_s / pace.gained), {name: slope / total_s for name, slope in slopes.items()}


def _fitted(times: PooledTimes, pool: Pool, start: Floats) -> Floats:
    """[effects] the most likely ones, by Huber's loss and the priors, from [effects] where to start."""
    mean, width = times.prior
    designs = {name: times.matrix(name, pool.cells) for name in EFFECTS}
    wanted = np.log(pool.measured_s)

    def look(effects: Floats) -> tuple[float, Floats, dict[str, Floats]]:
        log_s, slopes = _log_tpot(pool, {name: design @ effects for name, design in designs.items()})
        off = (log_s - wanted) / _SPREAD
        return float(pool.weights @ huber_loss(off) + (((effects - mean) / width) ** 2).sum() / 2), off, slopes

    def equations(effects: Floats, off: Floats, slopes: dict[str, Floats]) -> tuple[Floats, Floats]:
        kept = pool.weights * huber_weights(off)
        jacobian: Any = sum(_sparse.diags(slopes[name] / _SPREAD) @ designs[name] for name in EFFECTS)
        jacobian = jacobian.tocsr()
        normal = (jacobian.T @ _sparse.diags(kept) @ jacobian).toarray() + np.diag(width**-2)
        return normal, -(jacobian.T @ (kept * off) + (effects - mean) / width**2)

    return damped_descent(look, equations, start)


def held_out(pool: Pool, groups: Sequence[Hashable], folds: int) -> list[EngineTimes]:
    """[runs] the times of each, fitted without the groups of runs that share its fold.

    Args:
        pool: All runs.
        groups: [runs] what must not lie on both sides of a fold.
        folds: Parts that the groups are dealt into; more than there are hold out one group at a time.
    """
    labels = np.array([str(group) for group in groups])
    known = np.unique(labels)
    dealt = dict(zip(known, np.random.default_rng(0).permutation(len(known)) % folds, strict=True))
    fold = np.array([dealt[label] for label in labels])
    found: dict[int, EngineTimes] = {}
    all_of_them = PooledTimes(pool[pool.weights > 0])
    for part in np.unique(fold):
        fitted = PooledTimes(pool[(fold != part) & (pool.weights > 0)], near=all_of_them)
        rows = np.flatnonzero(fold == part).tolist()
        found |= {i: fitted.times(pool.cells[i], float(pool.layers[i])) for i in rows}
    return [found[row] for row in range(len(labels))]
