"""One call as a row: its columns, and their form in JSON and in words."""

from __future__ import annotations

import json
import re
from typing import TYPE_CHECKING, Any, NamedTuple

from envs.chain import chained_line

if TYPE_CHECKING:
    from sim.evaluation import Evaluation
    from sim.strategy import Strategy


_DIMS = re.compile(r"[0-9]{1,2}(?:,[0-9]{1,2})*(?:;cp=[1-9][0-9]{0,9};dp=[1-9][0-9]{0,9})?")


class CallRow(NamedTuple):
    """One call. No clock, so that a rerun writes the same bytes.

    Attributes:
        run_id: Which run.
        call: Number of the call, from 1, in the order in which answers arrived.
        asked: Number of its proposal, from 1: the order in which calls were decided. It differs where several are under
            way, and makes the run repeatable.
        tp, ep, pp, batch: The strategy's degrees.
        dims: Its choices, "2,1,..."; beyond the paper's space with attention's degrees behind them, ";cp=2;dp=16".
        tokens_per_s_per_gpu: As simulated, of infeasible strategies too.
        tpot_s: Time per output token.
        memory_bytes: Of the fullest GPU, all kinds.
        feasible: Whether no limit is broken.
        violations: Kinds of the broken limits, "hbm;tpot".
        reward: The environment's reward.
        best_so_far: Best feasible tokens/s/GPU, this call included, 0.0 if none.
    """

    run_id: str
    call: int
    asked: int
    tp: int
    ep: int
    pp: int
    batch: int
    dims: str
    tokens_per_s_per_gpu: float
    tpot_s: float
    memory_bytes: float
    feasible: bool
    violations: str
    reward: float
    best_so_far: float

    @classmethod
    def of(
        cls, evaluation: Evaluation, *, run_id: str, call: int, asked: int, reward: float, best_so_far: float
    ) -> CallRow:
        """The row of one evaluation."""
        strategy = evaluation.strategy
        return cls(
            run_id=run_id,
            call=call,
            asked=asked,
            tp=strategy.tp,
            ep=strategy.ep,
            pp=strategy.pp,
            batch=strategy.batch,
            dims=dims_text(strategy),
            # A plugged-in simulator may return numpy scalars, whose text depends on numpy's version.
            tokens_per_s_per_gpu=float(evaluation.tokens_per_s_per_gpu),
            tpot_s=float(evaluation.tpot_s),
            memory_bytes=float(evaluation.memory_bytes.total),
            feasible=bool(evaluation.feasible),
            violations=";".join(violation.kind for violation in evaluation.violations),
            reward=reward,
            best_so_far=best_so_far,
        )

    def to_json(self, digest: str) -> tuple[bytes, str]:
        """One line of the JSON Lines file, and its digest, which is chained to that of the line before."""
        _, *rest = self._asdict().items()
        return chained_line(run_head(self.run_id), json.dumps(dict(rest))[1:-1].encode(), digest)


def run_head(run_id: str) -> bytes:
    """The beginning of each line of a run."""
    return json.dumps({"run_id": run_id})[:-1].encode()


def dims_text(strategy: Strategy) -> str:
    """What of a strategy the columns of its degrees do not say; see `CallRow`."""
    dims = ",".join(map(str, strategy.dims))
    return f"{dims};cp={strategy.cp};dp={strategy.attention_dp}" if strategy.extended else dims


def parse_dims_text(text: str) -> dict[str, Any]:
    """The fields of a strategy that `dims_text` wrote. Raises: ValueError, if it did not.

    >>> parse_dims_text("2,1,0;cp=4;dp=2")
    {'dims': [2, 1, 0], 'cp': 4, 'dp': 2}
    """
    if not _DIMS.fullmatch(text):
        raise ValueError(f"expected choices as 2,1,0 or 2,1,0;cp=4;dp=2, got {text[:40]!r}")
    dims, *own = text.split(";")
    fields = (part.split("=") for part in own)
    return {"dims": [int(choice) for choice in dims.split(",")], **{name: int(value) for name, value in fields}}
