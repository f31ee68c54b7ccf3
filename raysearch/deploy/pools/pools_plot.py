"""Goodput per GPU of each way along what was varied."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from raysearch.deploy.pools.pool_comparison import WAYS, PoolComparison

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_AXES: tuple[tuple[str, Callable[[PoolComparison], float]], ...] = (
    ("limit on the time to the first token (s)", lambda each: each.case.limits.ttft_s),
    ("load (requests/s)", lambda each: each.case.limits.requests_per_s or math.nan),
    ("GPUs", lambda each: each.case.limits.gpus),
)


def pools_figure(found: Sequence[PoolComparison]) -> Figure:
    """A panel per prompt length, in each a line per way along the limit that varies."""
    from matplotlib.figure import Figure

    lengths = sorted({each.case.traffic.prompt_tokens for each in found})
    label, value = next(((name, of) for name, of in _AXES if len({of(each) for each in found}) > 1), _AXES[0])
    columns = min(3, len(lengths))
    lines = math.ceil(len(lengths) / columns)
    figure = Figure(figsize=(4.4 * columns, 3.4 * lines), layout="constrained")
    panels = figure.subplots(lines, columns, squeeze=False).flat
    for axes, length in zip(panels, lengths, strict=False):
        here = sorted((each for each in found if each.case.traffic.prompt_tokens == length), key=value)
        for name in here[0].ways:
            axes.plot(
                [value(each) for each in here],
                [each.goodput_per_gpu(name) for each in here],
                marker="o",
                markersize=4,
                label=WAYS[name],
            )
        axes.set(title=f"prompts of {length:,.0f} tokens", xlabel=label, ylabel="requests/s per GPU")
        axes.set_ylim(bottom=0)
        if len(here) > 1 and value(here[-1]) / value(here[0]) >= 4:
            axes.set_xscale("log")
            axes.set_xticks([value(each) for each in here], labels=[f"{value(each):g}" for each in here])
            axes.minorticks_off()
    for axes in list(panels):
        axes.set_visible(False)
    figure.axes[0].legend(fontsize=8)
    case = found[0].case
    figure.suptitle(f"{case.workload.model.name}, {case.workload.space} on {case.workload.hardware.name}")
    return figure
