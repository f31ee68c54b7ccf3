"""The pools that an answer of `pools` runs, as deployments: one, or one for prompts and one for answers."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

from raysearch.described import imported_from, workload_of_options
from raysearch.errors import InputError
from raysearch.export.deployment import Deployment
from raysearch.export.models import repository
from raysearch.files import as_strategy
from sim.pools.traffic import Kind, Traffic, workload_of
from sim.workload import Phase

POOLS_FILE = "pools.json"
_POOLS: dict[str, dict[str, Phase]] = {"one": {"pool": "serve"}, "apart": {"prefill": "prefill", "decode": "decode"}}
"""Way -> its pools, by their key in the file, and what each does."""


def pool_deployments(path: Path, told: dict[str, Any], number: int, served_model: str | None) -> dict[str, Deployment]:
    """The pools of the way that wins, by name; one pool has the name "".

    Args:
        path: Where it was read, for errors.
        told: What pools.json holds.
        number: Which of its points, from 0.
        served_model: In place of the model's own repository.

    Raises:
        InputError: There is no such point, nothing is feasible in it, or no engine can be told what wins.
    """
    points = told["points"]
    if number >= len(points):
        raise InputError(f"{path} has no point {number}: it has {len(points)}, from 0")
    if "options" not in told:
        raise InputError(f"{path} does not say of which workload it is: make it anew with this version of `pools`")
    point = points[number]
    if point["winner"] is None:
        raise InputError(f"point {number} of {path} has no strategy: nothing was feasible")
    if point["winner"] not in _POOLS:
        raise InputError(
            f"point {number} of {path}: a pool that re-shards between prompts and answers wins, and no engine can move "
            "weights and caches to another layout while it runs: take a point that another way wins (--alternative N), "
            "or ask `recommend` for one pool"
        )
    way, traffic = point["ways"][point["winner"]], Traffic.of(Kind(**kind) for kind in point["kinds"])
    workload = workload_of_options(dict(told["options"]))
    served_model = served_model or repository(workload, imported_from())
    longest = max(kind.prompt_tokens + kind.output_tokens for kind in traffic.kinds)
    found: dict[str, Deployment] = {}
    for name, phase in _POOLS[point["winner"]].items():
        served = workload_of(traffic, workload, phase)
        if phase == "serve":
            served = replace(served, chunk_tokens=way["chunk_tokens"])
        replicas = (way if phase == "serve" else way[name])["replicas"]
        deployment = Deployment(served, as_strategy(way[name]["strategy"]), served_model, replicas)
        found["" if phase == "serve" else name] = replace(deployment, longest_request=longest)
    return found
