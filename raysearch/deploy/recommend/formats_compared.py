"""What each format would give that a checkpoint is published in and its engine runs; quality is the user's to judge."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from rich.table import Table

from raysearch.base.errors import InputError
from raysearch.base.rich_tables import plain_table
from raysearch.deploy.recommend.demand import Demand
from raysearch.deploy.recommend.recommendation import Recommendation, best_alone
from sim.config.question import Question
from sim.engines.engine_registry import charged_rules
from sim.json_object import JsonObject


@dataclass(frozen=True)
class FormatChoice:
    """One pair of formats.

    Attributes:
        question: With these formats.
        answer: The best of each form under them, and nothing beside it.
    """

    question: Question
    answer: Recommendation

    def to_dict(self) -> JsonObject:
        """As JSON has it."""
        return {
            "weights": self.question.weights,
            "kv_cache": self.question.kv_cache,
            "form": self.answer.winner,
            "tokens_per_s": self.answer.tokens_per_s,
            "strategy": self.answer.strategy_text,
        }


def compared_formats(
    question: Question, asked: Callable[[Question], Demand], progress: Callable[[str], None]
) -> list[FormatChoice]:
    """Formats of weights that the checkpoint is published in, and of the KV cache that its engine has, the best first.

    Args:
        question: Whose weights are `ANY_FORMAT`; a KV cache that it names stays.
        asked: What is asked of a question.
        progress: Called with what is being computed.

    Raises:
        InputError: No format is published.
    """
    usual = asked(replace(question, weights=None))
    workload, rules = usual.workload, charged_rules(usual.workload)
    published = [each for each in workload.model.published.repositories if not rules or each in rules.weights]
    if not published:
        raise InputError(f"no checkpoint of {workload.model.name} is known: name its format with --weights")
    caches = [question.kv_cache] if question.kv_cache else list(rules.kv_cache if rules else ("bf16", "fp8"))
    found: list[FormatChoice] = []
    for weights in published:
        for kv_cache in caches:
            progress(f"weights {weights}, KV cache {kv_cache}")
            other = replace(question, weights=weights, kv_cache=kv_cache)
            found.append(FormatChoice(other, best_alone(asked(other))))
    return sorted(found, key=lambda each: -each.answer.tokens_per_s)


def formats_table(choices: Sequence[FormatChoice]) -> Table:
    """All of them beside each other."""
    best, gpus = choices[0].answer.tokens_per_s, choices[0].answer.demand.gpus
    rows = [
        (
            f"{each.question.weights}",
            f"{each.question.kv_cache}",
            f"{each.answer.tokens_per_s / gpus:,.1f}",
            f"{each.answer.tokens_per_s / best - 1:+.1%}" if best else "-",
            each.answer.strategy_text,
        )
        for each in choices
    ]
    columns = ("weights", "KV cache", "tok/s/GPU at hand", "against the best", "strategy")
    return plain_table("Published formats (their quality is yours to judge)", columns, rows, left=2, wrap=("strategy",))
