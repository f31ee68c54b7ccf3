"""What rows with separate workers leave out: how many there are, which of them have attention ranks, what is drafted.

Rows of InferenceX's DeepSeek-R1 under TensorRT-LLM on other machines than H100 state the GPUs of a worker and all
requests together. Its configuration files name the rest for each number of requests.
"""

from __future__ import annotations

import csv
import math
from functools import cache
from typing import Any, NamedTuple

import pandas as pd

from raysearch.fidelity.calibration.deployments import Skipped
from sim.config.files import configs_root
from sim.json_object import JsonFields


class Recipe(NamedTuple):
    """Workers of a deployment, as its configuration has them.

    Attributes:
        prefill_gpus, decode_gpus: Of a worker.
        prefill_attention_dp, decode_attention_dp: Whether each of these is an attention rank of its own.
        decode_ep: Ranks that share the experts.
        draft_tokens: Of multi-token prediction, per step of a decode worker.
    """

    prefill_workers: int
    prefill_gpus: int
    prefill_attention_dp: int
    decode_workers: int
    decode_gpus: int
    decode_ep: int
    decode_attention_dp: int
    draft_tokens: int


StatedDeployment = tuple[str, str, int, int, int, int]
"""Machine, precision, prompt and output tokens, requests, GPUs of a decode worker."""


@cache
def recipes() -> dict[StatedDeployment, set[Recipe]]:
    """Published deployments by what a row states.

    [published] SemiAnalysisAI/InferenceX, configs/nvidia-master.yaml and configs/deprecated/nvidia-1k1k-master.yaml,
    dsr1-*-dynamo-trt, August 2026. On H200 requests are per worker there, and a single one is sent to a fifth more.
    """
    found: dict[StatedDeployment, set[Recipe]] = {}
    with (configs_root() / "published" / "disaggregated.csv").open(encoding="utf-8", newline="") as file:
        for row in csv.DictReader(file):
            recipe = Recipe(*(int(row[name]) for name in Recipe._fields))
            isl, osl, requests = (int(row[name]) for name in ("isl", "osl", "requests"))
            key = (row["machine"], row["precision"], isl, osl, requests, recipe.decode_gpus)
            found.setdefault(key, set()).add(recipe)
    return found


def completed(row: JsonFields) -> dict[str, Any] | Skipped:
    """A row with the workers of its published deployment; as it is where it states its own, or none is published.

    Returns:
        The row with `draft_tokens` beside its columns; or why it cannot be priced: there are several, which differ.
    """
    fields = dict(row)
    stated = row.get("decode_num_workers")
    open_rows = row.get("backend") == "trtllm" and str(row.get("source", "")).startswith("InferenceX export")
    if not open_rows or not (stated is None or stated == "" or pd.isna(stated)):
        return fields
    isl, osl, requests, gpus = (_whole(row[name]) for name in ("isl", "osl", "concurrency", "decode_tp_size"))
    machine, precision = str(row.get("system", "")).removesuffix("_sxm"), str(row.get("precision", ""))
    known = recipes().get((machine, precision, isl, osl, requests, gpus), set())
    if len(known) > 1:
        some_draft = len({each.draft_tokens > 0 for each in known}) > 1
        what = "with and without drafted tokens" if some_draft else "with other workers"
        return Skipped(f"it does not state its workers, and deployments of as many requests are published {what}")
    if not known:
        return Skipped("it does not state its workers, and no deployment of as many requests is published")
    (recipe,) = known
    for phase, workers, gpus, ranks, ep in (
        ("prefill", recipe.prefill_workers, recipe.prefill_gpus, recipe.prefill_attention_dp, recipe.prefill_gpus),
        ("decode", recipe.decode_workers, recipe.decode_gpus, recipe.decode_attention_dp, recipe.decode_ep),
    ):
        fields |= {
            f"{phase}_num_workers": workers,
            f"{phase}_tp_size": 1 if ranks else gpus,
            f"{phase}_attention_dp_size": gpus if ranks else 1,
            f"{phase}_moe_tp_size": gpus // ep,
            f"{phase}_moe_ep_size": ep,
        }
    return fields | {"draft_tokens": recipe.draft_tokens}


def _whole(value: Any) -> int:
    return 0 if value == "" or pd.isna(value) else math.floor(float(value))
