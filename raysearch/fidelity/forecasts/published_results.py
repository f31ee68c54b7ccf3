"""Published results of InferenceX beside what was announced of them."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from raysearch.base.errors import InputError
from raysearch.fidelity.calibration.inferencex_results import (
    flag,
    machine_named,
    number,
    published_records,
    said_of,
    whole_number,
    whole_of,
)
from raysearch.fidelity.forecasts.announced_deployments import SHORT_NAMES
from sim.json_object import JsonObject

_NEEDED = ("hardware", "framework", "precision", "isl", "osl", "conc")
_LEAST_RATE = 1e-3
"""[assumed] Tokens per second and GPU; a run with fewer measured nothing, and errors are shares of it."""
_LEAST_TPOT_S = 1e-7
"""[assumed] No machine makes ten million tokens a second of one answer: a shorter time is a mistake."""
_MODELS: tuple[tuple[str, str], ...] = (
    (r"v4", "deepseek_v4_pro"),
    (r"deepseek-?r1|dsr1", "deepseek_v3"),
    (r"qwen3\.5", "qwen3_5_397b_a17b"),
    (r"glm-?5\.2", "glm_5_2"),
    (r"glm-?5", "glm_5"),
    (r"gpt-?oss", "gpt_oss_120b"),
    (r"kimi-?k3", "kimi_k3"),
    (r"kimi-?k2", "kimi_k2_5"),
    (r"minimax-?m3", "minimax_m3"),
    (r"minimax-?m2", "minimax_m2_5"),
)

Key = tuple[Any, ...]
"""What a run and an announced one have in common: model, machine, framework, precision, whether tokens are drafted,
lengths, requests, and (GPUs, ep, attention ranks) of the workers that decode, with how many of them there are."""


@dataclass(frozen=True, slots=True)
class PublishedResult:
    """A measured run.

    Attributes:
        key: See `Key`.
        date: Of the run, "" if unknown.
        tpot_s: Mean seconds per token, or their median where no mean is stated.
        tokens_per_s_per_gpu: Output tokens of all GPUs; None if unknown.
    """

    key: Key
    date: str
    tpot_s: float
    tokens_per_s_per_gpu: float | None


def read_results(path: Path) -> list[PublishedResult]:
    """The runs of a file, of the same runs the latest.

    Raises:
        InputError: The file cannot be read, or holds no run.
    """
    latest: dict[Key, PublishedResult] = {}
    for line, record in enumerate(published_records(path), 1):
        try:
            result = _result(record)
        except (KeyError, TypeError, ValueError) as error:
            raise InputError(f"{path}: run {line} is none of InferenceX: {said_of(error)}") from error
        if result and (result.key not in latest or latest[result.key].date <= result.date):
            latest[result.key] = result
    if not latest:
        raise InputError(f"{path}: no run with {', '.join(_NEEDED)} and a time per token of a model that we know")
    return list(latest.values())


def _result(fields: JsonObject) -> PublishedResult | None:
    model = SHORT_NAMES.get(str(fields.get("model", "")))
    model = model or next(
        (ours for name, ours in _MODELS if re.search(name, str(fields.get("model", "")).lower())), None
    )
    machine = machine_named(fields["hardware"])
    tpot_s = number(fields, "mean_tpot") or number(fields, "median_tpot")
    if not (model and machine and tpot_s and tpot_s > _LEAST_TPOT_S):
        return None
    disagg = flag(fields, "disagg")
    count = whole_number(number(fields, "decode_num_workers") or 1) if disagg else 1
    gpus, ep = (whole_number(number(fields, f"decode_{each}") or number(fields, each) or 1) for each in ("tp", "ep"))
    dp = gpus if flag(fields, "decode_dp_attention") or flag(fields, "dp_attention") else 1
    rate = number(fields, "output_tput_per_gpu")
    if rate and disagg:  # stated per GPU that decodes
        into, out = (number(fields, f"num_{each}_gpu") or 0.0 for each in ("prefill", "decode"))
        rate = rate * out / (into + out) if out > 0 and into >= 0 else None
    key = (
        model,
        machine,
        str(fields["framework"]),
        str(fields["precision"]),
        str(fields.get("spec_method") or "none") != "none",
        whole_of(fields, "isl"),
        whole_of(fields, "osl"),
        whole_of(fields, "conc"),
        disagg,
        (count, gpus, ep, dp),
    )
    return PublishedResult(key, str(fields.get("date") or ""), tpot_s, rate if rate and rate > _LEAST_RATE else None)


def key_of(prediction: JsonObject) -> Key:
    """The key of a prediction, as a forecast has it."""
    decode = prediction["decode"]
    return (
        prediction["model"],
        prediction["machine"],
        prediction["framework"],
        prediction["precision"],
        bool(prediction["draft_tokens"]),
        prediction["isl"],
        prediction["osl"],
        prediction["requests"],
        "prefill" in prediction,
        tuple(decode[name] for name in ("count", "gpus", "ep", "dp")),
    )


def entry_of(key: Key) -> Key:
    """What all runs of one entry have in common: all but the requests and the layout."""
    return (*key[:7], key[8])
