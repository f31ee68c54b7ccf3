"""`raysearch recommend`: from a model, GPUs and a service-level objective to what to run."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from typing import TYPE_CHECKING, Annotated, Literal

from raysearch.cli.commands.options import (
    REPLAYS_HELP,
    AnswerOutOption,
    ConcurrencyOption,
    CvOption,
    JsonOption,
    PercentileOption,
    RequestsOption,
    RequestsPerSOption,
    TraceOption,
    exit_unless_feasible,
    print_json,
)
from raysearch.cli.commands.question_options import loaded, takes_question
from raysearch.cli.commands.settings import Setting
from raysearch.deploy.recommend.demand import FormName, Without
from raysearch.deploy.recommend.forms_compared import FormsCompared
from raysearch.deploy.replay.trace_files import trace_file
from raysearch.processes.claim import check_folder
from sim.config.question import ANY_FORMAT, Question

if TYPE_CHECKING:
    from rich.console import RenderableType


@takes_question
def recommend(
    question: Question,
    requests_per_s: RequestsPerSOption = None,
    concurrency: ConcurrencyOption = None,
    price: Annotated[
        float | None, Setting("Price of one GPU for one hour, in your currency.", "none", least=0.0)
    ] = None,
    compare_with: Annotated[
        Literal["aisimulate"] | None,
        Setting("'aisimulate': also show what NVIDIA's AISimulate recommends (takes a minute or two)."),
    ] = None,
    top: Annotated[int, Setting("How many strategies to show.", least=1)] = 5,
    cv: CvOption = 1.0,
    percentile: PercentileOption = 99.0,
    requests: RequestsOption = 2000,
    trace: TraceOption = None,
    only: Annotated[
        FormName | None,
        Setting(
            "'aggregated': replicas do both prefill and decode; 'disaggregated': each has a pool of its own.",
            "whichever serves more",
        ),
    ] = None,
    forms: Annotated[
        FormsCompared,
        Setting(
            "'all': also try drafts, DeepEP, redundant experts and two-batch overlap for models with multi-token "
            "prediction; 'eagle3': and drafts for models with a public EAGLE-3 head; 'usual': only the engine's "
            "defaults."
        ),
    ] = "all",
    without: Annotated[
        Without | None,
        Setting("'pp': no pipelines; 'ep': no expert parallelism; 'pp,ep': neither.", "none"),
    ] = None,
    replays: Annotated[
        int,
        Setting(
            REPLAYS_HELP,
            least=0,
            most=10_000,
        ),
    ] = 60,
    out: AnswerOutOption = None,
    as_json: JsonOption = False,
) -> None:
    """Recommend a deployment: the best strategy the engine supports, its performance, alternatives and limiting factor.

    The exact optimum over every strategy that the engine supports and every batch size, with whole or chunked prompts,
    aggregated or disaggregated; it meets the latency limits with 90 % confidence. The best is printed as soon as it is
    known. If nothing is feasible, prints the nearest miss and what would make it fit, and exits with 3.

    \b
    Examples:
      raysearch recommend --model qwen3_235b_a22b --gpus 32 --isl 8000 --osl 1000 --tpot-ms 50 --ttft-ms 2000
      raysearch recommend --model deepseek_v3 --gpus 64 --isl 4000 --osl 1000 --engine sglang --out results/v3
      raysearch recommend --model qwen3_235b_a22b --gpus 32 --isl 8000 --osl 1000 --set compare_with=aisimulate
      raysearch recommend --model qwen3_32b --gpus 8 --isl 4000 --osl 500 --tpot-ms 30 --weights any
      raysearch recommend --model qwen3_32b --gpus 16 --isl 2000 --osl 300 --requests-per-s 5 --set price=2.5
      raysearch recommend --model qwen3_32b --gpus 16 --tpot-ms 30 --ttft-ms 2000 --set trace=conversation_trace.jsonl
    """
    check_folder(out, "recommendation.json")
    path = trace_file(trace)
    if question.weights != ANY_FORMAT and path is None:
        loaded(question, warned=True)
    from raysearch.answers.recommended import RecommendationResult
    from raysearch.base.rich_tables import print_blocks
    from raysearch.deploy.recommend.recommendation_files import write_recommendation
    from raysearch.deploy.recommend.recommendation_text import begun_lines, best_blocks

    def shown(blocks: Iterable[RenderableType]) -> None:
        try:
            print_blocks(blocks)
        except SystemExit as end:  # Rich's own, where the reader of a pipe has gone; the folder is asked for still
            if out is None or not isinstance(end.__context__, BrokenPipeError):
                raise

    found = RecommendationResult.of(
        question,
        requests_per_s=requests_per_s,
        concurrency=concurrency,
        price=price,
        top=top,
        cv=cv,
        percentile=percentile,
        requests=requests,
        only=only,
        replays=replays,
        trace=path,
        forms=forms,
        without=without,
        compare_with=compare_with,
        progress=_note if sys.stderr.isatty() else lambda _: None,
        found=lambda so_far: None if as_json else shown(best_blocks(so_far)),
        early=None if as_json else lambda so_far: shown(begun_lines(so_far)),
        parallel=True,
    )
    if out is not None:
        write_recommendation(found.answer, out)
    if as_json:
        print_json(found.to_dict())
    else:
        print_blocks(found.rest())
        if out is not None:
            print(f"Written: {out}")
    exit_unless_feasible(found)


def _note(what: str) -> None:
    print(f"... {what}", file=sys.stderr)
