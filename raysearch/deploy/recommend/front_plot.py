"""The front between tokens/s/GPU and tokens/s/user, as a picture."""

from __future__ import annotations

from typing import TYPE_CHECKING

from raysearch.deploy.recommend.recommendation import Recommendation

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def front_figure(answer: Recommendation) -> Figure:
    """The front, its intervals, and the strategies that are recommended."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 4.5), layout="constrained")
    axes = figure.subplots()
    users = [point.tokens_per_s_per_user for point in answer.front]
    found = [point.evaluation for point in answer.front]
    values = [each.tokens_per_s_per_gpu for each in found]
    lows = [each.tokens_per_s_per_gpu * each.tpot_s / each.tpot_interval_s[1] for each in found]
    highs = [each.tokens_per_s_per_gpu * each.tpot_s / each.tpot_interval_s[0] for each in found]
    axes.fill_between(users, lows, highs, alpha=0.2, linewidth=0, label="90 % of measured runs")
    axes.plot(users, values, marker="o", label="front (batches: powers of two)")
    for user, each in zip(users, found, strict=True):
        axes.annotate(
            f"{each.gpus} GPUs",
            (user, each.tokens_per_s_per_gpu),
            fontsize=7,
            xytext=(4, 4),
            textcoords="offset points",
        )
    evaluations = [option.evaluation for option in answer.options]
    axes.scatter(
        [1 / each.tpot_s for each in evaluations],
        [each.tokens_per_s_per_gpu for each in evaluations],
        marker="x",
        color="black",
        zorder=3,
        label="recommended and alternatives",
    )
    workload = answer.demand.workload
    if workload.tpot_slo_s < float("inf"):
        axes.axvline(1 / workload.tpot_slo_s, linestyle=":", color="grey", label="TPOT allowed")
    axes.set(
        xlabel="tokens/s per user",
        ylabel="tokens/s per GPU",
        title=f"{workload.model.name}, {workload.space} on {workload.hardware.name}",
    )
    axes.legend(fontsize=8)
    return figure
