"""`raysearch measure`: kernels and collectives of one's own GPUs."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import typer

from raysearch.base.errors import InputError
from raysearch.base.extras import check_installed
from raysearch.cli.commands.options import GPUS_HELP, OUT_HELP, JsonOption, at_home, print_json
from raysearch.cli.commands.settings import Setting, takes_settings
from raysearch.processes.claim import check_folder
from sim.json_object import JsonObject


@takes_settings
def measure(
    out: Annotated[Path, typer.Option("--out", "-o", help=OUT_HELP, callback=at_home)],
    framework: Annotated[
        Literal["vllm", "sglang", "trtllm"], Setting("Engine whose kernels the rows stand for: vllm, sglang or trtllm.")
    ] = "vllm",
    tiny: Annotated[bool, Setting("Measure a few small shapes only, to test the installation.")] = False,
    cpu: Annotated[bool, Setting("Measure on the CPU, with gloo, to try it out.")] = False,
    gpus: Annotated[int | None, typer.Option(min=1, help=GPUS_HELP, show_default="all of this host")] = None,
    as_json: JsonOption = False,
) -> None:
    """Measure GEMMs, attention and collectives of this host's GPUs through PyTorch, for `raysearch calibrate`.

    \b
    The GPUs should be otherwise idle. Writes gemm.csv, attention_decode.csv, attention_prefill.csv and, with
    several GPUs, collectives.csv and p2p_send_recv_vidur.csv. What PyTorch has no kernel of (an engine's experts,
    latent attention, DeepEP) is left out: docs/guides/calibrating.md has the columns of all files.

    \b
    Examples:
      raysearch measure --out measured/
      raysearch measure --out /tmp/try --gpus 2 --set tiny --set cpu
    """
    if out.exists() and any(out.iterdir()):
        raise InputError(f"--out: {out} is not empty; give a new folder")
    check_folder(out)
    check_installed("measure", "measure")
    import torch

    if not cpu and not torch.cuda.is_available():
        raise InputError("PyTorch sees no GPU here; --set cpu measures the CPU, to try it out")
    counts, left_out = _measure(out, framework, gpus, tiny=tiny, on_cpu=cpu)
    if as_json:
        print_json({"out": str(out), "rows": counts, "left_out": left_out})
        return
    for name, rows in counts.items():
        print(f"{out / name}: {rows:,} rows")
    for what in left_out:
        print(f"left out: {what}")


def _measure(
    out: Path, framework: str, gpus: int | None, *, tiny: bool, on_cpu: bool
) -> tuple[dict[str, int], list[str]]:
    import pandas as pd
    import torch

    from raysearch.base.progress import telling
    from raysearch.fidelity.calibration.measured_tables import MEASURED_FAMILIES
    from raysearch.fidelity.measuring.gpu_kernels import (
        TINY,
        MeasuringPlan,
        gemms,
        measure_attention_decode,
        measure_attention_prefill,
    )
    from raysearch.fidelity.measuring.links import collectives

    plan = TINY if tiny else MeasuringPlan()
    device = torch.device("cpu" if on_cpu else "cuda")
    if on_cpu:
        torch.set_num_threads(1)
    most = gpus or (1 if on_cpu else torch.cuda.device_count())
    tables: dict[str, list[JsonObject]] = {}
    left_out: list[str] = []
    with telling("measuring") as tell:
        kernels = (
            ("gemm", gemms),
            ("attention_decode", measure_attention_decode),
            ("attention_prefill", measure_attention_prefill),
        )
        for family, rows_of in kernels:
            tell(f"measuring {family}")
            tables[family] = list(rows_of(plan, device, framework))
        for members in (n for n in (2, 4, 8) if n <= most):
            tell(f"measuring collectives among {members}")
            rows, messages, missing = collectives(plan, members, on_gpus=not on_cpu)
            tables.setdefault("collectives", []).extend(rows)
            tables.setdefault("send_recv", []).extend(messages)
            left_out += missing
    out.mkdir(parents=True, exist_ok=True)
    counts: dict[str, int] = {}
    for family, rows in tables.items():
        if rows:
            name = MEASURED_FAMILIES[family].file
            pd.DataFrame(rows).to_csv(out / name, index=False)
            counts[name] = len(rows)
    return counts, left_out
