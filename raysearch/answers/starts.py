"""What a search begins with: `--set start=rule|optimum|FOLDER|FILE`."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from envs.space import StrategySpace
from raysearch.base.errors import InputError
from raysearch.base.file_io import as_strategy, strategy_dict
from raysearch.deploy.export.source import read_deployments
from raysearch.optima.named_spaces import best_of_space
from raysearch.runs.records import SUMMARY_FILE
from raysearch.runs.run import finished_summary
from raysearch.searchers.rule_of_thumb import rule_of_thumb
from sim.config.question import Question
from sim.json_object import JsonObject
from sim.strategy import Strategy

_MOST = 100
"""[assumed] Strategies of a folder, the best first; beyond, a search finds better ones."""


def start_strategies(start: str, question: Question, space: StrategySpace) -> list[JsonObject]:
    """The strategies to call first, as JSON writes them.

    Args:
        start: "rule" is an engineer's rule of thumb, "optimum" the optimum as the built-in simulator sees it; else the
            folder of searches or a study (the best of every finished run, the best of all first), or a folder or file
            of any other answer with a strategy.
        question: What is searched.
        space: The strategies of it; others are left out.

    Raises:
        InputError: There are no strategies, or none of this space.
    """
    if start == "rule":
        found = rule_of_thumb(space)
    elif start == "optimum":
        best = best_of_space(space.workload, space.workload.space).strategy
        found = [best] if best else []
    elif Path(start).expanduser().exists():
        found = list(_written(Path(start).expanduser(), question))
    else:
        raise InputError(f"--set start={start}: expected rule, optimum, or a folder or file that is there")
    if not found:
        raise InputError(f"--set start={start}: nothing is feasible there")
    fitting: list[JsonObject] = []
    reason = ""
    for strategy in found:
        try:
            space.encode(strategy)
        except ValueError as error:
            reason = reason or str(error)
        else:
            fitting.append(strategy_dict(strategy))
    if not fitting:
        raise InputError(f"--set start={start}: no strategy there is of the space that is searched: {reason}")
    return fitting[:_MOST]


def _written(path: Path, question: Question) -> Iterator[Strategy]:
    summaries = [finished_summary(each.parent) for each in sorted(path.rglob(SUMMARY_FILE))] if path.is_dir() else []
    if not summaries:
        for each in read_deployments(path, question, 0, None).values():
            yield each.strategy
        return
    for summary in sorted(filter(None, summaries), key=lambda each: -each["best"]):
        if summary["strategy"]:
            yield as_strategy(summary["strategy"])
