"""How each family of kernels is fitted: measured rows in, series of coefficients out."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from raysearch.fidelity.calibration.lattice import DEFAULT, Lattice, LatticePart, Robust, fit_terms
from raysearch.fidelity.calibration.measured_tables import MEASURED_FAMILIES, measured_us
from raysearch.fidelity.calibration.mixer_tables import module_shape, state_shape
from raysearch.fidelity.calibration.predict import (
    SHORT_DTYPE,
    library_of,
    moe_routing,
    moe_shape,
    prompts_as_chunks,
    seen_tokens,
    series_of,
)
from sim.arrays import Floats
from sim.json_object import JsonFields, JsonObject
from sim.prices import mixer_terms, terms
from sim.prices.calibration import COMBINE_EACH, DISPATCH_EACH, grid_phi, moe_layer_terms
from sim.prices.machine import Machine
from sim.prices.mixer_shapes import Convolution

Series = dict[str, dict[str, Any]]


def _powers(first: int, last: int, step: int = 1) -> list[float]:
    return [float(2**i) for i in range(first, last + 1, step)]


# --- grids: vertices where libraries switch tiles, coarse lattices where rows are dense enough ------------

_WIDTHS = [*_powers(7, 14), 65536]
_COARSE_WIDTHS = [128, 512, 1536, 4096, 16384, 65536]
_HEADS = [64, 128, 192, 256]
_COARSE_ROWS = [1, 16, 32, 64, 128, 129, 256, 257, 512, 1024, 4096, 16384]
_AREAS = [2.0 ** (half / 2) for half in range(28, 55)]
"""Elements of C, fine enough for a few waves of tiles to show."""
_LENGTHS = [16, 64, 256, 1024, 4096, 16384, 131072]
_STREAM = [[1, 1, 0, 1], [1, 0, 0, 0], [0, 0, 1, 0]]
"""A lattice over (KV elements, streams, group)."""


_WIDER_HEADS = [*_HEADS, 512]
_OF_HEADS = LatticePart([_WIDER_HEADS], (0.0,), (0.005,), combine=[[0, 0, 0, 1]])
"""A kernel of its own for a width of head, which the widths beside it do not tell."""


def _attention(
    group: list[float], coarse_group: list[float], monotone: tuple[int, ...], heads: list[int] = _HEADS
) -> Lattice:
    same = LatticePart(
        [_powers(0, 16, 2), _LENGTHS, coarse_group, heads], (0.02, 0.02, 0.01, 0.002), (0.005, 0.005, 0.0025, 0.0005)
    )
    stream = LatticePart(
        [_powers(10, 26), [1, 16, 128, 1024, 16384], coarse_group], (0.02,) * 3, (0.005,) * 3, combine=_STREAM
    )
    axes = [_powers(0, 17), _powers(4, 17), group, heads]
    beside = [_OF_HEADS] if heads is _WIDER_HEADS else []
    return Lattice(axes, [same, stream, *beside], monotone, (1, 1, 1, 1), iterations=40)


def _wide_attention(heads: list[int]) -> Lattice:
    coarse = [[1, 16, 256, 2048], [16, 256, 2048, 131072], [33, 64, 128], [64, 128, *heads[3:]]]
    parts = [LatticePart(coarse, (0.05,) * 4, (0.01,) * 4)]
    return Lattice(
        [_powers(0, 13), _powers(4, 17), [33, 64, 128], heads], parts, (0, 1, 2), (1, 1, 1, 1), iterations=40
    )


_PROMPTS = [1, 16, 32, 64, 128, 256, 512, 1024, 1536, 2048, 3072, 4096, 8192, 16384]
_GROUPS = [1, 2, 4, 8, 16, 32, 96]
_TOKENS_AND_HEADS = [[0, 1, 0, 0], [0, 0, 0, 1]]
"""A lattice over (tokens, width of a head) behind its first axis, of (queries, tokens, group, width)."""
_PROMPT_ATTENTION = Lattice(
    [_powers(0, 15), _PROMPTS, _GROUPS, _WIDER_HEADS],
    [
        LatticePart(
            [_powers(0, 14, 2), _PROMPTS, _WIDER_HEADS],
            (0.05, 0.1, 0.0),
            (0.01, 0.01, 0.01),
            combine=[[1, 0, 0, 0], *_TOKENS_AND_HEADS],
        ),
        LatticePart(
            [_GROUPS, [1, 64, 1024, 16384], _WIDER_HEADS],
            (0.05, 0.05, 0.0),
            (0.02, 0.02, 0.01),
            combine=[[0, 0, 1, 0], *_TOKENS_AND_HEADS],
        ),
    ],
    (0, 1),
    (1, 1, 1, 1),
    iterations=40,
)
"""An engine has a kernel per width of head, and switches tiles by the length of prompts."""

GRIDS: Mapping[str, Lattice] = {
    "gemm": Lattice(
        [[1, 16, 32, 64, 128, 129, 256, 257, 512, 1024, 2048, 2049, 4096, 8192, 16384], _WIDTHS, _WIDTHS],
        [
            LatticePart([_COARSE_ROWS, _COARSE_WIDTHS, _COARSE_WIDTHS], (0.02,) * 3, (0.005,) * 3),
            LatticePart(  # what C takes in waves of tiles, by the length of the K loop
                [_AREAS, _COARSE_WIDTHS],
                (0.05,) * 2,
                (0.01,) * 2,
                combine=[[1, 1, 0], [0, 0, 1]],
            ),
            LatticePart(
                [_COARSE_ROWS, _powers(14, 32, 2)], (0.05,) * 2, (0.01,) * 2, combine=[[1, 0, 0], [0, 1, 1]]
            ),  # weights
        ],
        (0, 1, 2),
        (1, 1, 1),
    ),
    "attention_gqa": _attention([2, 4, 8, 16, 32], [2, 8, 32], (0, 1, 2)),
    "attention_mha": _attention([1], [1], (0, 1)),
    "attention_wide": _wide_attention(_HEADS),
    "attention_gqa_512": _attention([2, 4, 8, 16, 32], [2, 8, 32], (0, 1, 2), _WIDER_HEADS),
    "attention_mha_512": _attention([1], [1], (0, 1), _WIDER_HEADS),
    "attention_wide_512": _wide_attention(_WIDER_HEADS),
    "attention_prefill": _PROMPT_ATTENTION,
    "mla_decode": Lattice(
        [_powers(0, 11), _powers(0, 18), _powers(0, 7)],
        [
            LatticePart([_powers(0, 11), _powers(0, 18), [1, 4, 16, 64, 128]], (0.02,) * 3, (0.005,) * 3),
            LatticePart(  # what streams, by heads
                [_powers(4, 24), _powers(0, 7)], (0.05,) * 2, (0.01,) * 2, combine=[[1, 1, 0], [0, 0, 1]]
            ),
            LatticePart(  # tiles of queries, by heads
                [_powers(0, 17), _powers(0, 7)], (0.05,) * 2, (0.01,) * 2, combine=[[1, 0, 1], [0, 0, 1]]
            ),
        ],
        (0, 1, 2),
        (1, 1, 1),
        iterations=40,
    ),
    "collectives": Lattice(
        [_powers(7, 30), [2, 4, 8]],
        [LatticePart([_powers(7, 30), [2, 4, 8]], (0.05, 0.015), (0.0, 0.02))],
        (0,),
        (1, 0),
    ),
    "collectives_wide": Lattice(
        [_powers(7, 30), [2, 4, 8, 16]],
        [LatticePart([_powers(7, 30), [2, 4, 8, 16]], (0.05, 0.015), (0.0, 0.02))],
        (0,),
        (1, 0),
    ),
}
"""Tables by name. The time of a collective need not grow with the degree, nor that of attention with the head."""

_FLOOR_SHARE = 0.002
"""Share of measured rows below the launch floor that a table never falls below: none but outliers."""
_GEMM_ROBUST = Robust(rounds=8, cut=1.0)
"""Nearly least absolute deviations: a library's odd choice for one shape says nothing of its neighbours."""
_COLLECTIVE_ROBUST = Robust(rounds=8, cut=4.0, power=2.0)
_VERSION_STIFFNESS = 10.0
"""A version of a library departs little from what its versions have in common."""


# --- tables ---------------------------------------------------------------------------------------


def _table_fit(
    machine: Machine,
    series: str,
    grid: str,
    points: Floats,
    log_us: Floats,
    shared: Floats | float = 0.0,
    robust: Robust = DEFAULT,
) -> tuple[JsonObject, Floats]:
    """The record of a series, and the log time of its table's vertices; `shared` is a correction to start from."""
    lattice, phi = GRIDS[grid], grid_phi(series, machine)
    residuals = log_us - lattice.above(points)
    coefficients = fit_terms(phi(points), np.exp(log_us), robust)
    floor_us = float(f"{np.exp(np.quantile(log_us, _FLOOR_SHARE)):.4g}")
    at_vertices = phi(lattice.points)
    if (at_vertices @ coefficients).min() <= 0:  # rows so far from small sizes that no term says what those take
        coefficients[0] = floor_us
    base_us = np.log(at_vertices @ coefficients)
    base = base_us + lattice.spread @ np.broadcast_to(shared, lattice.spread.shape[1])
    g = shared + lattice.correction(points, residuals - lattice.rows(points) @ base, base, robust=robust)
    record = {"grid": grid, "terms": rounded(coefficients), "floor_us": floor_us, "g_percent": _percent(g)}
    return record, base_us + lattice.spread @ g


def _percent(g: Floats) -> list[int]:
    return np.round(g * 100).astype(int).tolist()


def rounded(coefficients: Floats) -> list[float]:
    """Four significant digits: far below the error of any fit."""
    return [float(f"{value:.4g}") for value in coefficients]


def fit_gemm(frame: pd.DataFrame, machine: Machine) -> Series:
    """One table per engine and dtype; bf16 is cuBLAS under all engines, so its correction is pooled first."""
    points, log_us = np.log(frame[["m", "n", "k"]].to_numpy(dtype=float)), np.log(measured_us(frame))
    names, fitted = np.array(series_of("gemm", frame)), {}
    shared = _pooled(machine, [names == name for name in sorted(set(names)) if name.endswith("/bf16")], points, log_us)
    for name in sorted(set(names)):
        start = shared if name.endswith("/bf16") else 0.0
        rows = names == name
        fitted[name], _ = _table_fit(machine, name, "gemm", points[rows], log_us[rows], start, _GEMM_ROBUST)
    return fitted


def _pooled(machine: Machine, masks: list[NDArray[np.bool_]], points: Floats, log_us: Floats) -> Floats | float:
    """The correction that several series of bf16 GEMMs have in common."""
    if not masks:
        return 0.0
    lattice, phi, residuals = GRIDS["gemm"], grid_phi("gemm/any/bf16", machine), []
    for mask in masks:
        coefficients = fit_terms(phi(points[mask]), np.exp(log_us[mask]))
        base = np.log(phi(lattice.points) @ coefficients)
        residuals.append(log_us[mask] - lattice.above(points[mask]) - lattice.rows(points[mask]) @ base)
    together = np.concatenate([points[mask] for mask in masks])
    return lattice.correction(together, np.concatenate(residuals), robust=_GEMM_ROBUST)


def fit_attention_decode(frame: pd.DataFrame, machine: Machine) -> Series:
    """One table per engine, KV dtype and kernel variant (by query heads per KV head), and that of sliding windows."""
    streams, group = frame.batch_size * frame.num_kv_heads, frame.num_heads / frame.num_kv_heads
    seen = [seen_tokens(row) for row in frame.itertuples(index=False)]
    points = np.log(np.column_stack([streams, seen, group, frame.head_dim]).astype(float))
    wider = "_512" if (frame.head_dim > max(_HEADS)).any() else ""
    names = series_of("attention_decode", frame)
    return _with_windows(machine, names, points, frame, lambda name: f"attention_{name.split('/')[3]}{wider}")


def fit_attention_prefill(frame: pd.DataFrame, machine: Machine) -> Series:
    """One table per engine and formats, and that of sliding windows, as chunks that see as many pairs."""
    sequences, tokens = np.array([prompts_as_chunks(row) for row in frame.itertuples(index=False)], dtype=float).T
    sizes = (sequences * frame.num_heads, tokens, frame.num_heads / frame.num_kv_heads, frame.head_dim)
    points = np.log(np.column_stack(sizes).astype(float))
    names = series_of("attention_prefill", frame)
    return _with_windows(machine, names, points, frame, lambda _: "attention_prefill")


def fit_latent_decode(frame: pd.DataFrame, machine: Machine) -> Series:
    """One table per engine and format of the cache."""
    points = np.log(frame[["batch_size", "kv_len", "num_heads"]].to_numpy(dtype=float))
    log_us, names = np.log(measured_us(frame)), np.array(series_of("mla_decode", frame))
    return {
        name: _table_fit(machine, name, "mla_decode", points[names == name], log_us[names == name])[0]
        for name in sorted(set(names))
    }


def _with_windows(
    machine: Machine, series: list[str], points: Floats, frame: pd.DataFrame, grid: Callable[[str], str]
) -> Series:
    """A table per series; kernels under a window depart from those of the same engine over the whole context."""
    log_us, names, fitted = np.log(measured_us(frame)), np.array(series), Series()
    for parent in sorted({name for name in series if not name.endswith("/window")}):
        rows = names == parent
        fitted[parent], heights = _table_fit(machine, parent, grid(parent), points[rows], log_us[rows])
        if (rows := names == f"{parent}/window").any():
            lattice = GRIDS[grid(parent)]
            residuals = log_us[rows] - lattice.above(points[rows]) - lattice.rows(points[rows]) @ heights
            g = lattice.correction(points[rows], residuals, heights)
            fitted[f"{parent}/window"] = {"grid": grid(parent), "parent": parent, "g_percent": _percent(g)}
    return fitted


def fit_collectives(frame: pd.DataFrame, machine: Machine) -> Series:
    """One table per op and library; each version of NCCL and dtype departs from the library's."""
    points = np.log(frame[["message_bytes", "num_gpus"]].to_numpy(dtype=float))
    grid = "collectives" if frame.num_gpus.max() <= 8 else "collectives_wide"
    log_us, lattice, fitted = np.log(measured_us(frame)), GRIDS[grid], {}
    own = np.array(series_of("collectives", frame))
    library = np.array([f"collectives/{op}/{library_of(s)}" for op, s in zip(frame.op, frame.source, strict=True)])
    for name in sorted(set(library)):
        mask = library == name
        fitted[name], heights = _table_fit(machine, name, grid, points[mask], log_us[mask], robust=_COLLECTIVE_ROBUST)
        for version in sorted(set(own[mask]) - {name}):
            rows = own == version
            residuals = log_us[rows] - lattice.rows(points[rows]) @ heights
            g = lattice.correction(
                points[rows], residuals, heights, robust=_COLLECTIVE_ROBUST, stiffness=_VERSION_STIFFNESS
            )
            fitted[version] = {"grid": grid, "parent": name, "g_percent": _percent(g)}
    return fitted


# --- plain sums of terms ----------------------------------------------------------------------------


def _moe(machine: Machine, row: Any) -> list[float]:
    series = f"{row.kernel_source}/{SHORT_DTYPE[row.dtype]}"
    return moe_layer_terms(machine, series, *moe_shape(row), **moe_routing(row))


def _expert(machine: Machine, row: Any) -> list[float]:
    width = row.hidden * (DISPATCH_EACH if row.side == "dispatch" else COMBINE_EACH)
    shape = (row.tokens_per_rank, width, row.num_experts, row.topk, row.num_nodes)
    return terms.expert_all_to_all_terms(machine, *shape, low_latency=row.mode == "low_latency")


Fit = Callable[[pd.DataFrame, Machine], Series]


def _sum_fit(family: str, phi: Callable[[Machine, Any], list[float]], robust: Robust) -> Fit:
    def fit(frame: pd.DataFrame, machine: Machine) -> Series:
        names, fitted = np.array(series_of(family, frame)), {}
        for name in sorted(set(names)):
            rows = frame.loc[names == name]
            design = np.array([phi(machine, row) for row in rows.itertuples(index=False)])
            fitted[name] = {"terms": rounded(fit_terms(design, measured_us(rows), robust))}
        return fitted

    return fit


def _state(machine: Machine, row: Any) -> list[float]:
    shape = state_shape(row)
    if isinstance(shape, Convolution):
        return mixer_terms.convolution(machine, *shape[2:])
    return mixer_terms.state_scan(machine, *shape[2:])


def fit_sparse_attention(frame: pd.DataFrame, machine: Machine) -> Series:
    """What modules take beside their projections, which `projections_us` of the frame has where GEMMs price them."""
    frame = frame.loc[frame["projections_us"].notna()]
    names, fitted = np.array(series_of("sparse_attention", frame)), {}
    for name in sorted(set(names)):
        rows = frame.loc[names == name]
        design = np.array(
            [mixer_terms.sparse_attention(machine, *module_shape(row)[2:]) for row in rows.itertuples(index=False)]
        )
        beside = rows["projections_us"].to_numpy(dtype=float)
        fitted[name] = {"terms": rounded(fit_terms(design, measured_us(rows), Robust(rounds=5, cut=2.0), beside))}
    return fitted


FITS: Mapping[str, Fit] = {
    "gemm": fit_gemm,
    "attention_decode": fit_attention_decode,
    "collectives": fit_collectives,
    "attention_prefill": fit_attention_prefill,
    "mla_decode": fit_latent_decode,
    "sparse_attention": fit_sparse_attention,
    "state": _sum_fit("state", _state, DEFAULT),
    "moe": _sum_fit("moe", _moe, Robust(rounds=6, cut=1.5)),
    "moe_alltoall_deepep": _sum_fit("moe_alltoall_deepep", _expert, Robust(rounds=8)),
    "send_recv": _sum_fit("send_recv", lambda _, row: terms.send_recv(row.message_bytes), DEFAULT),
}


def ranges(family: str, frame: pd.DataFrame) -> dict[str, dict[str, list[float]]]:
    """Smallest and largest of each size that a series was fitted to."""
    sizes = list(MEASURED_FAMILIES[family].sizes)
    if family == "moe":  # what one grouped GEMM sees
        rows, width = frame.num_tokens * frame.topk / frame.moe_ep_size, frame.inter_size / frame.moe_tp_size
        frame = frame.assign(
            rows=rows,
            area=frame.hidden_size * width,
            local=frame.num_experts / frame.moe_ep_size,
            hidden=frame.hidden_size,
            width=width,
            width_per_hidden=width / frame.hidden_size,
        )
        sizes = ["rows", "area", "local", "hidden", "width", "width_per_hidden"]
    spans: dict[str, dict[str, list[float]]] = {}
    for name, rows in frame.groupby(np.array(series_of(family, frame))):
        spans[str(name)] = {
            size: [float(np.min(rows[size].to_numpy())), float(np.max(rows[size].to_numpy()))] for size in sizes
        }
    return spans


def grids_of(series: Iterable[JsonFields]) -> JsonObject:
    """The grids that some series lie on, as they stand in a file of coefficients."""
    names = sorted({record["grid"] for record in series if "grid" in record})
    return {name: GRIDS[name].record() for name in names}
