"""One call as a row: its columns, and their form in JSON and in words."""

from __future__ import annotations

import json
import re
from typing import TYPE_CHECKING, Any, NamedTuple

from envs.chain import chained_line
from sim.strategy import ONE_REPLICA, ReplicaSet

if TYPE_CHECKING:
    from sim.evaluation import Evaluation
    from sim.strategy import Strategy


_MESH = r"(?:;cp=[1-9][0-9]{0,9};dp=[1-9][0-9]{0,9})?"
_PREFILL = r"(?:,(?P<prefill>[0-9]{1,10}(?:\.[0-9]{1,10}){6,4096}))?"
_DIMS = re.compile(
    rf"(?P<dims>[0-9]{{1,2}}(?:,[0-9]{{1,2}})*)(?P<mesh>{_MESH})"
    rf"(?:;served=(?P<served>[0-9]{{1,7}},[0-9]{{1,7}},[0-9]{{1,7}}){_PREFILL})?"
)


class CallRow(NamedTuple):
    """One call. No clock, so that a rerun writes the same bytes.

    Attributes:
        run_id: Which run.
        call: Number of the call, from 1, in the order in which answers arrived.
        asked: Number of its proposal, from 1: the order in which calls were decided. It differs where several are under
            way, and makes the run repeatable.
        tp, ep, pp, batch: The strategy's degrees.
        dims: Its choices, "2,1,..."; beyond the paper's space with attention's degrees behind them, ";cp=2;dp=16"; in
            phase traffic with how replicas serve, unless it is one alone: ";served=" and replicas, tokens of a chunk
            and prefill replicas, the last with tp, ep, pp, batch, cp, dp and choices: "2,0,1,4.1.1.8.1.1.2.1.0".
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
    mesh = f";cp={strategy.cp};dp={strategy.attention_dp}" if strategy.extended else ""
    return f"{dims}{mesh}{_served_text(strategy.served)}"


def _served_text(served: ReplicaSet) -> str:
    if served == ONE_REPLICA:
        return ""
    figures = [f";served={served.replicas}", str(served.chunk_tokens), str(served.prefills)]
    if (pool := served.prefill) is not None:
        own = pool.tp, pool.ep, pool.pp, pool.batch, pool.cp, pool.attention_dp, *pool.dims
        figures.append(".".join(map(str, own)))
    return ",".join(figures)


def parse_dims_text(text: str) -> dict[str, Any]:
    """The fields of a strategy that `dims_text` wrote. Raises: ValueError, if it did not.

    >>> parse_dims_text("2,1,0;cp=4;dp=2")
    {'dims': [2, 1, 0], 'cp': 4, 'dp': 2}
    >>> parse_dims_text("2;served=4,512,0")
    {'dims': [2], 'served': {'replicas': 4, 'chunk_tokens': 512, 'prefills': 0}}
    """
    if not (found := _DIMS.fullmatch(text)):
        raise ValueError(f"expected choices as 2,1,0 or 2,1,0;cp=4;dp=2, got {text[:40]!r}")
    mesh = (part.split("=") for part in found["mesh"].split(";")[1:])
    fields: dict[str, Any] = {"dims": [int(choice) for choice in found["dims"].split(",")]}
    fields |= {name: int(value) for name, value in mesh}
    if not found["served"]:
        return fields
    replicas, chunk_tokens, prefills = map(int, found["served"].split(","))
    served: dict[str, Any] = {"replicas": replicas, "chunk_tokens": chunk_tokens, "prefills": prefills}
    if found["prefill"]:
        *degrees, cp, dp = (numbers := [int(part) for part in found["prefill"].split(".")])[:6]
        own = dict(zip(("tp", "ep", "pp", "batch"), degrees, strict=True))
        served["prefill"] = {**own, "dims": numbers[6:], **({} if (cp, dp) == (1, own["ep"]) else {"cp": cp, "dp": dp})}
    return {**fields, "served": served}
