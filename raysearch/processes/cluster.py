"""What a study asks of a cluster before it starts: room for a run, and one results folder that all nodes see."""

from __future__ import annotations

from pathlib import Path
from uuid import uuid4

import ray
from ray.exceptions import GetTimeoutError, NodeDiedError, RayError, TaskUnschedulableError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from raysearch.base.errors import InputError

PROBE_TIMEOUT_S = 120.0
"""[assumed] A node that has not started a process and read a file within it never will."""


def check_room(cpus_per_run: int, workers: int = 0, cpus_per_worker: float = 1.0) -> None:
    """Refuses a study that would wait for ever.

    Nodes without CPUs say nothing: where there are no others, those with CPUs are still to be started.

    Args:
        cpus_per_run: Of the searching part of a run, on one node.
        workers: Processes that evaluate for a run, on any node.
        cpus_per_worker: Of each.

    Raises:
        InputError: No run fits.
    """
    cpus = [int(node["Resources"].get("CPU", 0)) for node in _alive()]
    largest, total = max(cpus, default=0), sum(cpus)
    evaluating = workers * cpus_per_worker
    if 0 < total < cpus_per_run + evaluating and largest >= cpus_per_run:
        fit = int((total - cpus_per_run) / cpus_per_worker)
        mend = f"run with --set workers={fit}" if fit else "give Ray more CPUs"
        raise InputError(
            f"every run needs {cpus_per_run + evaluating:g} CPUs "
            f"({cpus_per_run} to search, {evaluating:g} to evaluate), "
            f"the cluster has {total}: {mend}"
        )
    if 0 < largest < cpus_per_run:
        raise InputError(
            f"every run asks for {cpus_per_run} CPUs, but the largest node of this Ray has {largest}: "
            f"lower cpus_per_run in the study, or give Ray more CPUs"
        )


def check_shared(folder: Path) -> None:
    """Has every node read a file from the folder and put one there; leaves nothing behind.

    Args:
        folder: Of the study; there already.

    Raises:
        InputError: A node does not see what the driver sees, or cannot answer.
    """
    nodes = {node["NodeID"]: node["NodeManagerAddress"] for node in _alive()}
    if len(nodes) == 1:
        return
    probe = folder.resolve() / f".probe-{uuid4().hex}"
    probe.touch()
    try:
        answers = {node: _answer_on(node, probe) for node in nodes}
        for node, answer in answers.items():
            if reason := _wrong_with(answer, probe, node):
                raise InputError(
                    f"node {nodes[node]} cannot use the results folder {folder}: {reason}; "
                    f"on a cluster, --out must be a folder that all nodes share (an NFS mount, say)"
                )
    finally:
        for path in folder.glob(f"{probe.name}*"):
            path.unlink(missing_ok=True)


def _alive() -> list[dict]:
    return [node for node in ray.nodes() if node["Alive"]]


def _answer_on(node: str, probe: Path) -> ray.ObjectRef:
    here = NodeAffinitySchedulingStrategy(node, soft=False)
    return ray.remote(_answer).options(num_cpus=0, max_retries=0, scheduling_strategy=here).remote(str(probe), node)


def _answer(probe: str, node: str) -> str:
    """Puts a file beside the probe; returns what keeps it from doing so, or nothing."""
    if not Path(probe).is_file():
        return "it does not see what the driver put there"
    try:
        Path(f"{probe}-{node}").touch()
    except OSError as error:
        return f"it cannot write there: {error.strerror}"
    return ""


def _wrong_with(answer: ray.ObjectRef, probe: Path, node: str) -> str:
    try:
        reason = ray.get(answer, timeout=PROBE_TIMEOUT_S)
    except (NodeDiedError, TaskUnschedulableError):
        return ""  # it has gone, so no run will go there
    except GetTimeoutError:
        return f"it did not answer within {PROBE_TIMEOUT_S:.0f} s"
    except RayError as error:
        return str(error).strip().splitlines()[-1]
    return reason or ("" if Path(f"{probe}-{node}").is_file() else "the driver does not see what it put there")
