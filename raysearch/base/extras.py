"""What is installed only by who asks for it: large packages that few commands need, or of special licences."""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping

from raysearch.base.errors import InputError

PACKAGES: Mapping[str, tuple[str, str]] = {
    "aisimulate": ("aisimulate", "AISimulate"),
    "genz": ("GenZ", "GenZ"),
    "measure": ("torch", "PyTorch"),
    "nevergrad": ("nevergrad", "Nevergrad"),
    "pretrain": ("torch ray", "PyTorch and RLlib"),
    "pymoo": ("pymoo", "pymoo"),
    "rllib": ("torch", "RLlib and PyTorch"),
    "sb3": ("stable_baselines3", "Stable-Baselines3"),
    "search": ("ray", "Ray and Optuna"),
}
"""Extra of pyproject.toml -> the modules that it brings, and their title."""


def check_installed(extra: str, who: str, otherwise: str = "") -> None:
    """Refuses to go on without an extra.

    Args:
        extra: Which.
        who: What needs it.
        otherwise: What works without it.

    Raises:
        InputError: It is not installed; says how to, from the checkout or a wheel, since neither is published.
    """
    _, title = PACKAGES[extra]
    if not is_installed(extra):
        how = f"pip install -e '.[{extra}]' in the checkout, or 'FILE.whl[{extra}]'"
        raise InputError(f"{who} needs {title}: {how}" + (f"; without: {otherwise}" if otherwise else ""))


def is_installed(extra: str) -> bool:
    """Whether all modules of an extra are there."""
    return all(importlib.util.find_spec(module) for module in PACKAGES[extra][0].split())
