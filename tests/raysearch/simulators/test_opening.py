"""What a searcher finds where it searches for a black box."""

from __future__ import annotations

import pytest

from raysearch.simulators.opening import searched_space
from sim.config.question import Question


def test_a_simulator_that_is_not_there_is_named_before_what_it_may_not_know() -> None:
    workload = Question(model="llama_3_1_8b", isl=100, osl=10, engine="vllm", space="vllm").load()
    with pytest.raises(ValueError, match="no_such_package"):
        searched_space(workload, "no_such_package:no", "random")
    with pytest.raises(ValueError, match="knows the paper's strategies only"):
        searched_space(workload, "genz", "random")
