"""The Python interface: what `import raysearch as rs` offers, as the commands answer it."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest
from typer.testing import CliRunner

import raysearch as rs
from raysearch.answers.recommended import RecommendationResult
from raysearch.cli.app import app

RUNNER = CliRunner()
WORDS = ("--model", "llama_3_1_8b", "--isl", "1000", "--osl", "100", "--gpus", "2", "--tpot-ms", "20")
QUESTION = rs.question(model="llama_3_1_8b", isl=1000, osl=100, gpus=2, tpot_ms=20)


@pytest.fixture(scope="module")
def recommended() -> RecommendationResult:
    return rs.recommend(QUESTION, top=2)


def test_nothing_else_is_public() -> None:
    assert dir(rs) == ["__version__", "evaluate", "question", "recommend"]
    with pytest.raises(AttributeError, match="no attribute 'valuate'"):
        _ = rs.valuate  # type: ignore[attr-defined]


def test_an_engineer_s_question_starts_neither_ray_nor_torch() -> None:
    code = (
        "import sys, raysearch as rs; q = rs.question(model='llama_3_1_8b', isl=1000, osl=100, gpus=1, tpot_ms=9); "
        "rs.recommend(q, top=1); rs.evaluate(q, tp=1, batch=4); print(sorted({'ray', 'torch'} & sys.modules.keys()))"
    )
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "[]\n"


def test_an_evaluation_is_the_command_s() -> None:
    found = rs.evaluate(QUESTION, tp=2, batch=64)
    shown = RUNNER.invoke(app, ["evaluate", *WORDS, "--tp", "2", "--batch", "64", "--json"], catch_exceptions=False)
    assert json.loads(json.dumps(found.to_dict())) == json.loads(shown.stdout)
    assert (found.feasible, found.broken) == (True, [])
    assert not rs.evaluate(QUESTION, tp=2, batch=4096).feasible
    frame = found.to_frame()
    assert list(frame["name"]) == [op.name for op in found.evaluation.ops]
    assert found.figure().axes[0].get_xlabel() == "us of one layer"


def test_a_recommendation_is_the_command_s(recommended: RecommendationResult) -> None:
    shown = RUNNER.invoke(app, ["recommend", *WORDS, "--top", "2", "--json"], catch_exceptions=False)
    assert json.loads(json.dumps(recommended.to_dict())) == json.loads(shown.stdout)
    assert recommended.strategy is not None
    assert list(recommended.to_frame()["layout"]) == [row["layout"] for row in recommended.to_rows()]
    assert len(recommended.figure().axes[0].lines) > 0


def test_results_show_themselves_in_a_terminal_and_in_a_notebook(recommended: RecommendationResult) -> None:
    text = str(recommended)
    assert "tokens/s/GPU [" in text  # brackets are no markup
    assert "What to run, and what else" in text
    assert recommended._repr_html_().startswith("<pre")


def test_what_cannot_be_met_is_a_result(recommended: RecommendationResult) -> None:
    impossible = rs.recommend(rs.question(model="llama_3_1_8b", isl=1000, osl=100, gpus=1, tpot_ms=0.01), top=1)
    assert (impossible.feasible, impossible.best) == (False, None)
    assert "Nothing is feasible" in str(impossible)
