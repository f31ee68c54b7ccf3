"""One categorical per sub-strategy head, computed for all heads at once."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import gymnasium
import numpy as np
import torch
from ray.rllib.core.distribution.distribution import Distribution
from ray.rllib.core.distribution.torch.torch_distribution import TorchDeterministic
from torch import Tensor

IMPOSSIBLE = -1e9
"""Log-probability of the padding. Finite, so that 0 * IMPOSSIBLE is 0 and no gradient turns into NaN."""


def padding_index(head_sizes: Sequence[int]) -> Tensor:
    """Where each cell of a padded `[H * K]` table finds its logit among `sum(head_sizes)` flat ones.

    Args:
        head_sizes: Choices of each of the H heads; K is the largest.

    Returns:
        Indices `[H * K]`; a cell past the end of its head points to one past the last logit.
    """
    width, total = max(head_sizes), sum(head_sizes)
    table = np.full((len(head_sizes), width), total)
    starts = np.cumsum([0, *head_sizes[:-1]])
    for row, start, size in zip(table, starts, head_sizes, strict=True):
        row[:size] = np.arange(start, start + size)
    return torch.from_numpy(table.ravel())


class MultiCategorical(Distribution):
    """Independent categoricals over H heads of different sizes, as one padded log-softmax.

    RLlib's own builds H `torch.distributions` objects a call, which costs more than the network.

    Attributes:
        log_probs: `[..., H, K]`; padded cells hold about `IMPOSSIBLE`.
    """

    def __init__(self, log_probs: Tensor) -> None:
        super().__init__()
        self.log_probs = log_probs

    @classmethod
    def from_logits(cls, logits: Tensor, *, index: Tensor, heads: int, **_: Any) -> MultiCategorical:
        """Splits flat logits `[..., sum(head sizes)]` into heads; `index` comes from `padding_index`."""
        padded = torch.nn.functional.pad(logits, (0, 1), value=IMPOSSIBLE).index_select(-1, index)
        return cls(torch.log_softmax(padded.unflatten(-1, (heads, -1)), -1))

    @property
    def probs(self) -> Tensor:
        """Probabilities `[..., H, K]`; exactly 0 in padded cells."""
        return self.log_probs.exp()

    def logp(self, value: Tensor, **_: Any) -> Tensor:
        """Joint log-probability `[...]` of one choice per head `[..., H]`."""
        return self.log_probs.gather(-1, value.unsqueeze(-1)).sum((-2, -1))

    def entropy(self, **_: Any) -> Tensor:
        """Sum of the heads' entropies `[...]`, nats."""
        return -(self.probs * self.log_probs).sum((-2, -1))

    def kl(self, other: Distribution, **_: Any) -> Tensor:
        """Divergence of `other` from this distribution `[...]`, nats."""
        assert isinstance(other, MultiCategorical)
        return (self.probs * (self.log_probs - other.log_probs)).sum((-2, -1))

    def sample(self, *, noise: Tensor | None = None, **_: Any) -> Tensor:
        """Draws one choice per head `[..., H]` by the Gumbel-max trick.

        Args:
            noise: Standard Gumbel noise `[..., H, K]`; torch's global generator draws it if None.
        """
        if noise is None:
            noise = -torch.empty_like(self.log_probs).exponential_().log()
        return (self.log_probs + noise).argmax(-1)

    def rsample(self, **_: Any) -> Tensor:
        """Raises NotImplementedError: a choice has no gradient."""
        raise NotImplementedError("categorical choices cannot be re-parameterised; use sample()")

    def to_deterministic(self) -> Distribution:
        """Returns the distribution that always picks each head's likeliest choice."""
        return TorchDeterministic(loc=self.log_probs.argmax(-1))

    @staticmethod
    def required_input_dim(space: gymnasium.Space, **_: Any) -> int:
        """Number of flat logits for a `MultiDiscrete` space."""
        assert isinstance(space, gymnasium.spaces.MultiDiscrete)
        return int(space.nvec.sum())
