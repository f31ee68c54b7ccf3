"""Randomness that depends on the seed and the number of the call alone."""

from __future__ import annotations

import numpy as np


def call_rng(seed: int, call: int, stream: int = 0) -> np.random.Generator:
    """The generator of one call.

    It is counter-based and leaves nothing to checkpoint: a resumed search draws what an unbroken one draws.

    Args:
        seed: Of the search, >= 0.
        call: Calls before this one.
        stream: Keeps several uses of one call apart.
    """
    return np.random.Generator(np.random.Philox(key=[seed, call], counter=[0, 0, 0, stream]))


def gumbel_noise(rng: np.random.Generator, shape: tuple[int, ...]) -> np.ndarray:
    """Standard Gumbel noise: where log-probabilities plus noise are largest is a draw from them."""
    return rng.gumbel(size=shape).astype(np.float32)
