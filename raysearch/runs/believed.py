"""What a search of a noisy black box has found: not the luckiest answer, but the best by what all answers tell."""

from __future__ import annotations

from typing import TYPE_CHECKING, cast

import numpy as np
from threadpoolctl import threadpool_limits

from envs.calls import parse_dims_text
from envs.space import StrategySpace
from raysearch.base.file_io import as_strategy, strategy_dict
from raysearch.searchers.prior.black_box_belief import Answer, BlackBoxBelief
from raysearch.searchers.prior.network import SHIPPED_PRIOR, read_prior
from raysearch.searchers.prior.simulated_terms import TermSourceName
from sim.json_object import JsonObject

if TYPE_CHECKING:
    import pandas as pd

_DEGREES = ("tp", "ep", "pp", "batch")


def believed_best(
    space: StrategySpace, rows: pd.DataFrame, noise: float, terms: TermSourceName = "simulator"
) -> JsonObject:
    """The strategy of a run, and its tokens/s/GPU, of which most is believed, whatever searcher called it.

    The belief is that of the searcher `prior`: the built-in simulator's expectation, corrected by all answers.

    Args:
        space: That was searched.
        rows: Of the run.
        noise: Standard deviation of the log of an answer.
        terms: What the belief begins with.

    Returns:
        `best` and `strategy`, of a call within all limits; 0 and None if there is none.
    """
    degrees: list[JsonObject] = [dict(zip(_DEGREES, row, strict=True)) for row in rows[[*_DEGREES]].to_numpy().tolist()]
    called = [as_strategy({**each, **parse_dims_text(dims)}) for each, dims in zip(degrees, rows["dims"], strict=True)]
    simulated = cast("list[float]", rows["tokens_per_s_per_gpu"].tolist())
    belief = BlackBoxBelief(read_prior(SHIPPED_PRIOR), space, terms, noise=noise)
    with threadpool_limits(limits=1):  # in the same order on every machine
        belief.note_all(
            np.array([space.encode(strategy) for strategy in called]),
            [
                Answer(tokens if feasible else 0.0, 0.0, tokens)
                for tokens, feasible in zip(simulated, rows["feasible"], strict=True)
            ],
        )
        belief.learn()
        found = belief.believed_best()
    place, tokens = found or (None, 0.0)
    return {"best": tokens, "strategy": None if place is None else strategy_dict(called[place])}
