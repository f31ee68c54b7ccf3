"""`raysearch evaluate`: one strategy, explained op by op."""

from __future__ import annotations

from raysearch.answers.evaluated import EvaluationResult
from raysearch.answers.strategy_text import strategy_of
from raysearch.cli.commands.options import JsonOption, exit_unless_feasible, show_result
from raysearch.cli.commands.question_options import loaded, takes_question
from raysearch.cli.commands.strategy_options import (
    BatchOption,
    CpOption,
    DimsOption,
    DpOption,
    EpOption,
    LayoutOption,
    PpOption,
    TpOption,
    VocabularyOption,
)
from sim.config.question import Question
from sim.replay.goodput import evaluate_in_phase


@takes_question
def evaluate_strategy(
    question: Question,
    tp: TpOption = None,
    batch: BatchOption = None,
    ep: EpOption = None,
    pp: PpOption = 1,
    dims: DimsOption = "megatron",
    cp: CpOption = 1,
    dp: DpOption = None,
    layout: LayoutOption = None,
    vocabulary: VocabularyOption = None,
    as_json: JsonOption = False,
) -> None:
    """Evaluate one strategy: speed, memory, violations and a breakdown per op.

    If it breaks a limit, or the engine does not support it, that comes before the figures, and the exit code is 3.

    \b
    Examples:
      raysearch evaluate -w gpt_moe_1_2t_16k --tp 8 --ep 16 --pp 2 --batch 512 --dims megatron
      raysearch evaluate -w gpt_moe_1_2t_16k --tp 8 --ep 16 --pp 2 --batch 512 --dims 2,1,1,0,2,2,2,2,1,1,0,2 --json
      raysearch evaluate -w gpt_moe_1_2t_1m --tp 2 --cp 4 --dp 16 --ep 16 --pp 1 --batch 64 --dims megatron
      raysearch evaluate --model qwen3_32b --isl 4000 --osl 500 --tp 4 --batch 32
      raysearch evaluate --model deepseek_v3 --engine sglang --isl 8000 --osl 1000 --layout dep16 --batch 512
      raysearch evaluate --model deepseek_v3 --isl 8000 --osl 1000 --layout tep16 --batch 64 --draft-tokens 1 --acceptance 0.85
    """  # noqa: E501
    workload = loaded(question, warned=True)
    strategy = strategy_of(workload, tp, ep, pp, batch, dims, cp, dp, layout, vocabulary)
    found = EvaluationResult(question, workload, evaluate_in_phase(workload, strategy))
    show_result(found, as_json=as_json)
    exit_unless_feasible(found)
