"""Questions as tests ask them: of the bare machine, in phase decode, over powers of two, as predicted, unless they
say otherwise.
"""

from __future__ import annotations

from typing import Any

from sim.config.question import Question


def question_about(model: str, hardware: str | None = None, phase: Any = "decode", **more: Any) -> Question:
    """A question about a model; `isl`, `osl` and others as `Question` has them."""
    usual = {"engine": "none", "batches": "powers_of_two", "confidence": 0.5}
    return Question(model=model, hardware=hardware, phase=phase, **(usual | more))
