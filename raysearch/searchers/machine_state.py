"""States that machine code takes as they are, and would read or write beyond: they are checked where they come in.

A checkpoint may be anybody's: see `sim.config.reading`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch.optim import Optimizer

_MERSENNE_WORDS = 624
"""[published: Matsumoto and Nishimura 1998] Words of the state of MT19937."""


def check_moments(optimizer: Optimizer) -> None:
    """Makes sure that the moments of each weight have its shape: fused Adam writes as many values as the weight has.

    Raises:
        ValueError: Some have another.
    """
    for weight in (weight for group in optimizer.param_groups for weight in group["params"]):
        for name, moment in optimizer.state.get(weight, {}).items():
            expected, shape = () if name == "step" else tuple(weight.shape), tuple(getattr(moment, "shape", (0,)))
            if shape != expected:
                raise ValueError(f"expected {name} of shape {expected}, got {shape}")


def checked_mersenne(state: Any) -> Any:
    """The state of a Mersenne Twister as `RandomState.get_state` has it, whose position lies in its key.

    Raises:
        ValueError: NumPy would read beside the key.
    """
    position = state["state"]["pos"] if isinstance(state, dict) else state[2]
    if not 0 <= position <= _MERSENNE_WORDS:
        raise ValueError(f"expected a position of 0 to {_MERSENNE_WORDS}, got {position!r:.80}")
    return state
