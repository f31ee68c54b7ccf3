"""Fitted times of first tokens: what a client measures beside the steps of a replay, and how sure that is."""

from __future__ import annotations

from functools import cache

from sim.config.files import configs_root, read_json
from sim.json_object import JsonObject
from sim.prices.priced import Interval
from sim.replay.first_token_times import FirstTokenError, FirstTokenTimes
from sim.workload import Workload

FIRST_TOKENS_FILE = "first_tokens.json"


def first_token_error(workload: Workload, *, pools: bool = False) -> FirstTokenError | None:
    """Of a workload's engine on its machine; None where no engine is named, or none of its runs was measured.

    Args:
        workload: Model, machine and engine.
        pools: Whether prompts are computed in a pool of their own.
    """
    whole = _record()
    record = whole and (whole.get("pools") if pools else whole)
    engine, system = workload.engine, workload.hardware.name
    if engine is None or record is None:
        return None
    own = record["engines"].get(engine.runs) or record["engines"].get(engine.family)
    if own is None:
        return None
    known = system in own["of"]
    times = own["of"].get(system, own)
    intervals: dict[str, Interval] = {
        figure: (float(each["low"]), float(each["high"])) for figure, each in record["intervals"].items()
    }
    because = "" if known else f"no first token of {engine.family} was measured on {system}"
    return FirstTokenError(FirstTokenTimes(**{name: times[name] for name in _TIMES}), intervals, because)


_TIMES = ("factor", "request_s", "steps", "burst_s")


@cache
def _record() -> JsonObject | None:
    path = configs_root() / FIRST_TOKENS_FILE
    return read_json(path) if path.is_file() else None
