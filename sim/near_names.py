"""What to say of an unknown name: the nearest known one, or all that are known."""

from __future__ import annotations

import difflib
from collections.abc import Iterable

_SHOWN = 60


def nearest_name(name: str, known: Iterable[str], *, least: float = 0.5) -> str:
    """A hint at the known name that is closest to an unknown one; "" where none has a similarity of `least`.

    One that begins with it comes first; capitals do not matter.

    >>> nearest_name("vlm", ["sglang", "vllm"])
    "did you mean 'vllm'?"
    >>> nearest_name("qwen3_235b", ["qwen3_32b", "qwen3_235b_a22b"])
    "did you mean 'qwen3_235b_a22b'?"
    >>> nearest_name("FP8", ["bf16", "fp8"])
    "did you mean 'fp8'?"
    """
    lower, known = name.lower(), {each.lower(): each for each in sorted(known)}
    begun = [each for each in known if lower and each.startswith(lower)]
    close = [each for names in (begun, known) for each in difflib.get_close_matches(lower, names, n=1, cutoff=least)]
    return f"did you mean {known[close[0]]!r}?" if close else ""


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """A hint for an unknown name: the closest known one, or all of them; of very many the first."""
    known = sorted(known)
    if hint := nearest_name(name, known):
        return hint
    more = f" and {len(known) - _SHOWN} more" if len(known) > _SHOWN else ""
    return f"known: {', '.join(known[:_SHOWN])}{more}" if known else "none is known"
