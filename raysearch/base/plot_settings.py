"""matplotlib takes a `matplotlibrc` of the working directory, which somebody else may have made, before all others.

What it says may start LaTeX, by its own preamble, import a backend, or ask for a picture of gigabytes.
"""

from __future__ import annotations

import os

_SETTINGS = "matplotlibrc"


def pass_over_local_settings() -> None:
    """Has matplotlib read no settings of the working directory; the user's own count, where matplotlib keeps those."""
    if not os.path.lexists(_SETTINGS):
        return
    here = os.getcwd()
    os.chdir(os.path.dirname(__file__))  # where there are none: it looks once, when it is imported
    try:
        import matplotlib as _  # noqa: F401
    finally:
        os.chdir(here)
