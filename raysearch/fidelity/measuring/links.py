"""Collectives and messages among the GPUs of this node, as rows of `collectives.csv` and `p2p_send_recv_vidur.csv`."""

from __future__ import annotations

import json
import os
import signal
import socket
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import distributed
from torch.multiprocessing.spawn import ProcessExitedException, ProcessRaisedException, spawn

from raysearch.base.errors import RunFailed
from raysearch.base.spawning import spawning
from raysearch.fidelity.measuring.gpu_kernels import MeasuredRow, MeasuringPlan
from raysearch.processes.table import Stopped, read_process
from sim.json_object import JsonObject

_ROUNDS = 20
_LOOK_S = 1.0
_STOPPED_S = 20.0
"""[assumed] A process that is stopped for so long stays stopped."""


def collectives(
    plan: MeasuringPlan, gpus: int, *, on_gpus: bool
) -> tuple[list[MeasuredRow], list[MeasuredRow], list[str]]:
    """Rows of collectives and of messages among the first `gpus` GPUs, and what could not be measured.

    Starts a process per GPU: NCCL (or RCCL) on GPUs, gloo on the CPU. One that stays stopped is ended, and one that
    has ended ends the others: they would wait for it.

    Raises:
        RunFailed: A process has ended before its work had.
    """
    with tempfile.TemporaryDirectory() as folder:
        out, port = Path(folder) / "rows.json", _free_port()
        given = (gpus, port, plan.messages, str(out), on_gpus)
        with spawning():
            ranks: Any = spawn(_rank, given, nprocs=gpus, join=False)
        stopped = Stopped(round(_STOPPED_S / _LOOK_S))
        try:
            while not ranks.join(timeout=_LOOK_S):
                for pid in stopped.among({pid: seen for pid in ranks.pids() if (seen := read_process(pid))}):
                    os.kill(pid, signal.SIGKILL)
        except (ProcessExitedException, ProcessRaisedException) as error:
            last_line = str(error).strip().splitlines()[-1]
            raise RunFailed(f"measuring collectives among {gpus} failed: {last_line}") from error
        found: JsonObject = json.loads(out.read_text(encoding="utf-8"))
    return found["collectives"], found["messages"], found["left_out"]


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def _rank(rank: int, gpus: int, port: int, messages: tuple[int, ...], out: str, on_gpus: bool) -> None:
    """What each process does; the first writes what it measured, which every rank waits for."""
    device = torch.device("cuda", rank) if on_gpus else torch.device("cpu")
    if on_gpus:
        torch.cuda.set_device(device)
    else:
        torch.set_num_threads(1)
    store = distributed.TCPStore("127.0.0.1", port, gpus, is_master=rank == 0)  # pyright: ignore[reportPrivateImportUsage]
    distributed.init_process_group("nccl" if on_gpus else "gloo", store=store, rank=rank, world_size=gpus)
    rows: list[MeasuredRow] = []
    left_out: list[str] = []
    for op, make in _OPS.items():
        for size in messages:
            try:
                latency_us = _median_us(make(size // 2 // gpus * gpus, gpus, device), device)
            except (RuntimeError, ValueError, NotImplementedError) as error:  # a backend without this collective
                left_out.append(f"{op} among {gpus}: {str(error).splitlines()[0]}")
                break
            rows.append(
                {
                    "source": _library(on_gpus=on_gpus),
                    "op": op,
                    "dtype": "bfloat16",
                    "num_gpus": gpus,
                    "num_nodes": 1,
                    "message_bytes": size,
                    "latency_us": latency_us,
                }
            )
    pairs = [_message(size, rank, device) for size in messages] if gpus == 2 else []
    if rank == 0:
        Path(out).write_text(
            json.dumps({"collectives": rows, "messages": pairs, "left_out": left_out}), encoding="utf-8"
        )
    distributed.destroy_process_group()


def _library(*, on_gpus: bool) -> str:
    if not on_gpus:
        return "gloo"
    from torch.cuda import nccl

    return f"nccl_{'.'.join(map(str, nccl.version()[:2]))}"


def _buffers(elements: int, device: torch.device) -> torch.Tensor:
    return torch.ones(max(elements, 1), dtype=torch.bfloat16, device=device)


def _all_reduce(elements: int, gpus: int, device: torch.device) -> Callable[[], object]:
    whole = _buffers(elements, device)
    return lambda: distributed.all_reduce(whole)


def _all_gather(elements: int, gpus: int, device: torch.device) -> Callable[[], object]:
    whole, part = _buffers(elements, device), _buffers(elements // gpus, device)
    gather = getattr(distributed, "all_gather_single", None) or distributed.all_gather_into_tensor
    return lambda: gather(whole, part)


def _reduce_scatter(elements: int, gpus: int, device: torch.device) -> Callable[[], object]:
    whole, part = _buffers(elements, device), _buffers(elements // gpus, device)
    scatter = getattr(distributed, "reduce_scatter_single", None) or distributed.reduce_scatter_tensor
    return lambda: scatter(part, whole)


def _all_to_all(elements: int, gpus: int, device: torch.device) -> Callable[[], object]:
    sent, received = _buffers(elements, device), _buffers(elements, device)
    return lambda: distributed.all_to_all_single(received, sent)


_OPS: dict[str, Callable[[int, int, torch.device], Callable[[], object]]] = {
    "all_reduce": _all_reduce,
    "all_gather": _all_gather,
    "reduce_scatter": _reduce_scatter,
    "alltoall": _all_to_all,
}
"""By the largest buffer of a rank, as nccl-tests count: elements, ranks, device -> a call of the collective."""


def _median_us(call: Callable[[], object], device: torch.device) -> float:
    for _ in range(3):
        call()
    times: list[float] = []
    for _ in range(_ROUNDS):
        distributed.barrier()
        _wait(device)
        start_s = time.perf_counter()
        call()
        _wait(device)
        times.append(time.perf_counter() - start_s)
    return round(1e6 * statistics.median(times), 4)


def _message(size: int, rank: int, device: torch.device) -> MeasuredRow:
    """A message from the first GPU to the second and back, halved."""
    buffer = _buffers(size // 2, device)

    def there_and_back() -> None:
        for sender in (0, 1):
            if rank == sender:
                distributed.send(buffer, 1 - rank)
            else:
                distributed.recv(buffer, 1 - rank)

    return {"scope": "intra_node", "message_bytes": size, "median_us": _median_us(there_and_back, device) / 2}


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
