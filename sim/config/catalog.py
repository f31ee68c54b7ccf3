"""Loads calibrations, hardware, models and workloads: files in human units in, frozen SI values out."""

from __future__ import annotations

import hashlib
import json
from functools import lru_cache
from pathlib import Path

from pydantic import ValidationError

from sim.config.files import CatalogError, config_path, explain, read_config
from sim.config.schemas import HardwareFile, ModelFile, WorkloadFile
from sim.layers.model import Model
from sim.prices.calibration import Calibration
from sim.prices.calibration_file import CalibrationFile
from sim.prices.hardware import Hardware
from sim.workload import DegreeTables, Precisions, SpaceName, Workload


def load_calibration(name_or_path: str | Path, *, beside: Path | None = None) -> Calibration:
    """The fitted coefficients of a shipped name or of a file that `raysearch calibrate` wrote.

    Raises:
        CatalogError: No such file, or not one of coefficients.

    >>> "gemm/trtllm/fp8" in load_calibration("h100_sxm").series
    True
    """
    path = config_path("calibration", name_or_path, beside=beside)
    try:
        return _read_calibration(path.stem, path.read_bytes())
    except (OSError, UnicodeDecodeError) as error:
        raise CatalogError(f"cannot read {path}: {error}") from error
    except ValidationError as error:
        raise CatalogError(f"{path}: {explain(error, CalibrationFile)}") from error
    except (ValueError, RecursionError) as error:  # no JSON, NaN, too many digits, too deep
        raise CatalogError(f"{path} is not valid JSON: {error}") from error


@lru_cache(maxsize=8)
def _read_calibration(name: str, content: bytes) -> Calibration:
    data = json.loads(content, parse_constant=_refuse)
    CalibrationFile.model_validate(data)
    return Calibration(name, data, hashlib.sha256(content).hexdigest()[:16])


def _refuse(constant: str) -> float:
    raise ValueError(f"expected finite numbers, got {constant}")


def load_hardware(name_or_path: str | Path, *, beside: Path | None = None) -> Hardware:
    """The hardware of a shipped name or a file. Raises: CatalogError."""
    path = config_path("hardware", name_or_path, beside=beside)
    return _with_curves(read_config(path, HardwareFile), path)


def _with_curves(file: HardwareFile, path: Path) -> Hardware:
    if file.calibration is None:
        return file.to_si(None)
    calibration = load_calibration(file.calibration, beside=path.parent)
    file.check_same_machine(calibration)
    return file.to_si(calibration)


def load_speed_of_light(name_or_path: str | Path) -> dict[str, float]:
    """The peak rates of a hardware file, whose calibration need not exist yet. Raises: CatalogError."""
    return read_config(config_path("hardware", name_or_path), HardwareFile).speed_of_light()


def load_memory_bytes(name_or_path: str | Path) -> float:
    """The HBM of one GPU of a hardware file, whose calibration need not exist yet. Raises: CatalogError."""
    return read_config(config_path("hardware", name_or_path), HardwareFile).hbm.capacity_gb * 1e9


def load_calibrated(hardware: str | Path, calibration: str | Path | None = None) -> tuple[Calibration, float]:
    """The coefficients that a hardware file names, or others for the same machine, and its bytes of HBM per GPU.

    Raises:
        CatalogError: An unknown name, a bad file, or coefficients of a machine with other peak rates.
    """
    path = config_path("hardware", hardware)
    file = read_config(path, HardwareFile)
    if calibration is None and file.calibration is None:
        raise CatalogError(f"hardware {file.name!r} names no calibration: say which coefficients to use")
    loaded = load_calibration(calibration or file.calibration or "", beside=None if calibration else path.parent)
    file.check_same_machine(loaded)
    return loaded, file.hbm.capacity_gb * 1e9


def load_model(name_or_path: str | Path, *, beside: Path | None = None) -> Model:
    """The model of a shipped name or a file. Raises: CatalogError."""
    return read_config(config_path("models", name_or_path, beside=beside), ModelFile).to_si()


def load_workload(
    name_or_path: str | Path,
    hardware: str | Path | None = None,
    space: SpaceName | None = None,
    margin: float | None = None,
) -> Workload:
    """A workload with its model and hardware.

    Args:
        name_or_path: A name in configs/workloads or the path of a TOML file.
        hardware: Replaces the hardware that the file names.
        space: Replaces the strategy space that the file names; see `sim.optimum.spaces`.
        margin: Replaces the share of SLO and memory that the file keeps free.

    Raises:
        CatalogError: An unknown name or an unusable file.

    >>> load_workload("gpt_moe_1_2t_16k").context_tokens
    16384
    """
    path = config_path("workloads", name_or_path)
    file = read_config(path, WorkloadFile)
    instead = {"space": space, "margin": margin}
    file = file.model_copy(update={key: value for key, value in instead.items() if value is not None})
    model_file = read_config(config_path("models", file.model, beside=path.parent), ModelFile)
    model = model_file.to_si()
    if model.beyond_search:
        raise CatalogError(
            f"model {model.name!r} cannot be searched yet: it has {', '.join(model.beyond_search)}, "
            f"which the search's fused ops do not describe (`raysearch validate` prices it)"
        )
    # A --hardware path is the caller's, so it is relative to the working directory, not to the workload.
    hardware_path = (
        config_path("hardware", file.hardware, beside=path.parent)
        if hardware is None
        else config_path("hardware", hardware)
    )
    chosen = {key: value for key in ("engine", "all_reduce") if (value := getattr(file, key)) is not None}
    hardware_file = read_config(hardware_path, HardwareFile).model_copy(update=chosen)
    si_hardware = _with_curves(hardware_file, hardware_path)
    digest = hashlib.sha256()
    if si_hardware.curves:
        digest.update(si_hardware.curves.calibration.digest.encode())
    nameless = (
        file.model_copy(update={"model": "", "hardware": ""}),
        model_file,
        hardware_file.model_copy(update={"calibration": None}),
    )
    usual = {"space": "joint", "margin": 0.0}
    unsaid = {key for key, value in usual.items() if getattr(file, key) == value}  # as before there was a choice
    for part in nameless:
        digest.update(json.dumps(part.model_dump(mode="json", exclude=unsaid), sort_keys=True).encode())
    return Workload(
        name=file.name,
        model=model,
        hardware=si_hardware,
        phase=file.phase,
        context_tokens=file.context_tokens,
        tpot_slo_s=file.tpot_slo_ms * 1e-3,
        max_gpus=file.max_gpus,
        precisions=Precisions(**file.precisions.model_dump()),
        load_imbalance=file.load_imbalance,
        degrees=DegreeTables(**file.degrees.model_dump()),
        config_hash=digest.hexdigest()[:16],
        space=file.space,
        margin=file.margin,
    )
