"""Workers of rows with separate pools, and what these rows leave out: how many, their attention ranks, what is drafted.

Rows of InferenceX under TensorRT-LLM on other machines than H100 state the GPUs of a worker and all requests together.
Its configuration files name the rest for each number of requests; those of earlier releases are in its history.
"""

from __future__ import annotations

import csv
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
import pandas as pd

from raysearch.fidelity.calibration.deployments import ServingRun, Skipped, disagg_worker, known_model
from sim.config.files import configs_root
from sim.json_object import JsonFields


class Recipe(NamedTuple):
    """Workers of a deployment, as its configuration has them.

    Attributes:
        prefill_gpus, decode_gpus: Of a worker.
        prefill_attention_dp, decode_attention_dp: Whether each of these is an attention rank of its own.
        decode_ep: Ranks that share the experts.
        draft_tokens: Of multi-token prediction, per step of a decode worker.
        expert_slots: For experts and copies that are dealt by their loads to a decode worker's ranks; 0 for none.
    """

    prefill_workers: int
    prefill_gpus: int
    prefill_attention_dp: int
    decode_workers: int
    decode_gpus: int
    decode_ep: int
    decode_attention_dp: int
    draft_tokens: int
    expert_slots: int

    @property
    def quickens(self) -> tuple[bool, int]:
        """What shortens its time per token: drafts, and workers among which the requests are dealt."""
        return self.draft_tokens > 0, self.decode_workers


StatedDeployment = tuple[str, str, str, str, int, int, int, int]
"""Machine, model, precision, release, prompt and output tokens, requests, GPUs of a decode worker."""


@cache
def recipes() -> dict[StatedDeployment, set[Recipe]]:
    """Published deployments by what a row states; their release is "" where they are those of several.

    [published] SemiAnalysisAI/InferenceX, configs/nvidia-master.yaml and configs/deprecated/nvidia-1k1k-master.yaml,
    dsr1-*-dynamo-trt, August 2026; .github/configs/nvidia-master.yaml at a075f2e7c (7 January 2026),
    gptoss-fp4-gb200-dynamo-trt, and at 84320a0aa (19 December 2025), dsr1-fp4-gb200-dynamo-trt. On H200 and in December
    requests are per worker there; on H200 a single one is sent to a fifth more.
    """
    found: dict[StatedDeployment, set[Recipe]] = {}
    with (configs_root() / "published" / "disaggregated.csv").open(encoding="utf-8", newline="") as file:
        for row in csv.DictReader(file):
            recipe = Recipe(*(int(row[name]) for name in Recipe._fields))
            isl, osl, requests = (int(row[name]) for name in ("isl", "osl", "requests"))
            names = (row["machine"], row["model"], row["precision"], row["release"])
            key = (*names, isl, osl, requests, recipe.decode_gpus)
            found.setdefault(key, set()).add(recipe)
    return found


@cache
def _decode_batches() -> tuple[dict[str, str], ...]:
    """Published deployments of DeepSeek-R1 under TensorRT-LLM with what a rank of a decode worker runs at once.

    [published] SemiAnalysisAI/InferenceX, configs/nvidia-master.yaml and configs/deprecated/nvidia-1k1k-master.yaml,
    dsr1-*-dynamo-trt, November 2026, and .github/configs/nvidia-master.yaml at c4cde0370 (25 December 2025), 8fe499ff4
    (10 February 2026) and 12ba0ae07 (25 March 2026): `max_batch_size` stands in the names of the recipes.
    """
    with (configs_root() / "published" / "decode_batches.csv").open(encoding="utf-8", newline="") as file:
        return tuple(csv.DictReader(file))


def decode_places(row: JsonFields) -> int | None:
    """Requests that all decode workers of a row run at once; None where no deployment like it is published, or several.

    Clients often open a fifth to all as many again, so that some always wait for an answer to end.
    """
    published = str(row.get("source", "")).startswith(("db-dump", "InferenceX"))
    model = known_model(str(row["model_path"])) if published and row.get("backend") == "trtllm" else None
    if model is None or model[0].name != "deepseek_v3":
        return None
    stated = {
        "machine": str(row.get("system") or "").partition("_")[0],
        "precision": str(row.get("precision") or ""),
        "isl": str(_whole(row["isl"])),
        "osl": str(_whole(row["osl"])),
        "requests": str(_whole(row["concurrency"])),
        "drafts": "" if pd.isna(row.get("draft_tokens", math.nan)) else str(int(_whole(row["draft_tokens"]) > 0)),
    }
    for phase in ("prefill", "decode"):
        ranks = _whole(row[f"{phase}_attention_dp_size"])
        stated[f"{phase}_workers"] = str(_whole(row[f"{phase}_num_workers"]))
        stated[f"{phase}_gpus"] = str(_whole(row[f"{phase}_tp_size"]) * ranks)
    stated["decode_attention_dp"] = str(int(_whole(row["decode_attention_dp_size"]) > 1))
    alike = [each for each in _decode_batches() if all(each[name] == value for name, value in stated.items() if value)]
    found = {
        int(each["decode_workers"])
        * int(each["decode_batch"])
        * (int(each["decode_gpus"]) if each["decode_attention_dp"] == "1" else 1)
        for each in alike
    }
    return found.pop() if len(found) == 1 else None


_AS_FAST = 1.03
"""[assumed] Ratio of times per token within which runs repeat one deployment: repeats differ by 0.5 % (median)."""


def recipes_by_time(rows: Sequence[JsonFields]) -> list[Recipe | None]:
    """[rows] the deployment of each row that fits several, where the rows themselves say which one it is.

    Where as many different times were measured as deployments are published, and of any two deployments one drafts or
    has more workers and lacks nothing, it is the faster one.
    """
    stated: dict[StatedDeployment, list[int]] = {}
    for number, row in enumerate(rows):
        if (key := _stated(row)) is not None:
            stated.setdefault(key, []).append(number)
    found: list[Recipe | None] = [None] * len(rows)
    for key, numbers in stated.items():
        slow_first = sorted(_published(key), key=lambda recipe: recipe.quickens)
        ordered = all(
            one.quickens != two.quickens and all(a <= b for a, b in zip(one.quickens, two.quickens, strict=True))
            for one, two in pairwise(slow_first)
        )
        times = {number: float(rows[number]["silicon_tpot_ms"]) for number in numbers}
        places = dict(zip(times, _distinct(list(times.values())), strict=True))
        if len(slow_first) > 1 and ordered and len(set(places.values())) == len(slow_first):
            for number, place in places.items():
                found[number] = slow_first[place]
    return found


def _distinct(times: Sequence[float]) -> list[int]:
    """[times] which of the different times each is, the longest first."""
    place, places = 0, [0] * len(times)
    order = sorted(range(len(times)), key=lambda number: -times[number])
    for before, number in pairwise(order):
        place += times[before] > times[number] * _AS_FAST
        places[number] = place
    return places


def _stated(row: JsonFields) -> StatedDeployment | None:
    """What a row that leaves its workers open says of them; None for any other row."""
    workers = row.get("decode_num_workers")
    open_rows = row.get("backend") == "trtllm" and str(row.get("source", "")).startswith("InferenceX export")
    known = known_model(str(row["model_path"])) if open_rows else None
    if known is None or not (workers is None or workers == "" or pd.isna(workers)):
        return None
    isl, osl, requests, gpus = (_whole(row[name]) for name in ("isl", "osl", "concurrency", "decode_tp_size"))
    machine, precision = str(row.get("system", "")).removesuffix("_sxm"), str(row.get("precision", ""))
    return machine, known[0].name, precision, str(row.get("backend_version", "")), isl, osl, requests, gpus


def _published(key: StatedDeployment) -> set[Recipe]:
    """The deployments of its release, else those of any."""
    return recipes().get(key) or recipes().get((*key[:3], "", *key[4:]), set())


def completed(row: JsonFields, recipe: Recipe | None = None) -> dict[str, Any] | Skipped:
    """A row with the workers of its published deployment; as it is where it states its own, or none is published.

    Args:
        row: By column.
        recipe: Its deployment, where `recipes_by_time` knows it.

    Returns:
        The row with `draft_tokens` and `expert_slots` beside its columns; or why it cannot be priced: there are
        several, which differ.
    """
    fields = dict(row)
    stated = _stated(row)
    if stated is None:
        return fields
    known = {recipe} if recipe else _published(stated)
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
    return fields | {"draft_tokens": recipe.draft_tokens, "expert_slots": recipe.expert_slots}


def _whole(value: Any) -> int:
    return 0 if value == "" or pd.isna(value) else math.floor(float(value))


@dataclass(frozen=True)
class PoolPair:
    """The workers of a row.

    Attributes:
        prefill, decode: A worker of each kind.
        prefills, decodes: How many.
        open_requests: That clients keep open.
        places: Requests that all decode workers run at once by their settings.
    """

    prefill: ServingRun
    decode: ServingRun
    prefills: int
    decodes: int
    open_requests: int
    places: int


def pair_of(row: JsonFields, recipe: Recipe | None = None) -> PoolPair | Skipped:
    """The workers of a row, or why they cannot be priced; its deployment is given where the other rows tell it."""
    whole = completed(row, recipe)
    if isinstance(whole, Skipped):
        return whole
    row = whole
    prefill, decode = disagg_worker(row, "prefill"), disagg_worker(row, "decode")
    if isinstance(decode, Skipped):
        return decode
    if isinstance(prefill, Skipped):
        return prefill
    prefills, decodes, sent = (
        int(np.nan_to_num(row.get(name) or 0)) for name in ("prefill_num_workers", "decode_num_workers", "concurrency")
    )
    decodes *= decode.replicas  # attention ranks of a dense model share nothing
    decodes, prefills = max(1, decodes or decode.replicas), max(1, prefills) * prefill.replicas
    stated = decodes * decode.strategy.batch
    known = decode_places(row)
    if known is not None and known < stated:
        how = f"{known} requests decode at once by its published recipe, not {stated}"
        decode = replace(decode, reread=(*decode.reread, how))
    return PoolPair(prefill, decode, prefills, decodes, sent or stated, min(known or stated, stated))
