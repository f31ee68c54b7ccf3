from dataclasses import asdict

import pytest
from pydantic import TypeAdapter, ValidationError

from raysearch.base.file_io import as_strategy, strategy_dict
from raysearch.runs.records import RunSpec, StoredStrategy
from sim.strategy import Strategy


@pytest.mark.parametrize(
    "strategy",
    [
        Strategy(2, 1, 1, 64, (0, 1, 2)),
        Strategy(2, 4, 1, 64, (0, 1, 2), cp=2, dp=4),
        Strategy(2, 1, 1, 64, (0, 1, 2), vocabulary=(0, 4, 1)),
    ],
    ids=["joint", "extended", "generated"],
)
def test_a_strategy_of_every_space_is_read_as_it_was_written(strategy: Strategy) -> None:
    written = strategy_dict(strategy)
    StoredStrategy.model_validate(written)
    assert as_strategy(written) == strategy


def test_a_spec_of_a_newer_version_is_no_spec_of_ours() -> None:
    fields = asdict(RunSpec("w", "random", 0, 10))
    assert TypeAdapter(RunSpec).validate_python(fields) == RunSpec("w", "random", 0, 10)
    with pytest.raises(ValidationError, match="newer"):
        TypeAdapter(RunSpec).validate_python({**fields, "newer": 1})
