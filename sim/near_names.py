"""What to say of an unknown name: the nearest known one, or all that are known."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


def nearest_name(name: str, known: Iterable[str], *, least: float = 0.5) -> str:
    """A hint at the known name that is closest to an unknown one; "" where none has a similarity of `least`.

    >>> nearest_name("vlm", ["sglang", "vllm"])
    "did you mean 'vllm'?"
    """
    close = difflib.get_close_matches(name, sorted(known), n=1, cutoff=least)
    return f"did you mean {close[0]!r}?" if close else ""


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """A hint for an unknown name: the closest known one, or all of them."""
    known = sorted(known)
    if hint := nearest_name(name, known):
        return hint
    return f"known: {', '.join(known)}" if known else "none is known"
