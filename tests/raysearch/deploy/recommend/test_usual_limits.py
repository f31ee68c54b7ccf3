"""The default limits where no limit on latencies is given."""

from __future__ import annotations

import json

import pytest
from typer.testing import CliRunner

from raysearch.cli.app import app
from raysearch.deploy.recommend import usual_limits
from sim.config.question import Question
from tests.raysearch.deploy.recommend.test_recommend import COARSE, EVEN

RUNNER = CliRunner()
ASKED = (
    "--model",
    "llama_3_1_8b",
    "--isl",
    "1000",
    "--osl",
    "200",
    "--gpus",
    "2",
    "--set",
    "only=aggregated",
    *EVEN,
    *COARSE,
)


def test_no_user_waits_for_ever_where_no_limit_is_given_and_the_answer_says_what_was_taken_for_granted() -> None:
    shown = RUNNER.invoke(app, ["recommend", *ASKED, "--set", "top=1", "--json"], catch_exceptions=False)
    answer = json.loads(shown.stdout)
    assert answer["usual_limits"] == {"tpot_ms": 100.0, "ttft_ms": 11_000.0}
    assert Question.of_record(answer["question"]).tpot_ms == 100.0  # so that an export knows of it
    assert answer["best"]["tpot_s"] <= 0.1
    assert not any("TPOT" in each["change"] for each in answer["sensitivity"])  # nobody asked for it


@pytest.mark.usefixtures("best_alone")
def test_limits_that_nobody_gave_do_not_make_an_answer_infeasible(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(usual_limits, "USUAL_TPOT_MS", 0.5)  # faster than weights are read
    shown = RUNNER.invoke(app, ["recommend", *ASKED, "--set", "top=1", "--json"], catch_exceptions=False)
    answer = json.loads(shown.stdout)
    assert answer["feasible"]
    assert answer["usual_limits"] == {}
