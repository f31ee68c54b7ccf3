"""The distribution of a policy that follows one of several templates at a time."""

from __future__ import annotations

from typing import Any

import torch
from ray.rllib.core.distribution.distribution import Distribution
from ray.rllib.core.distribution.torch.torch_distribution import TorchDeterministic
from torch import Tensor

from raysearch.searchers.ppo.distribution import MultiCategorical


class CopyMixture(Distribution):
    """A mixture of C `MultiCategorical`s: first a component is drawn, then every head from that one.

    Attributes:
        log_weights: Of the components, `[..., C]`.
        components: Their distributions, `[..., C]`.
    """

    def __init__(self, log_weights: Tensor, components: MultiCategorical) -> None:
        super().__init__()
        self.log_weights = log_weights
        self.components = components

    @classmethod
    def from_logits(cls, logits: Tensor, *, index: Tensor, heads: int, **_: Any) -> CopyMixture:
        """Splits `[..., C, 1 + sum(head sizes)]`: each component's own logit, then those of its heads."""
        components = MultiCategorical.from_logits(logits[..., 1:], index=index, heads=heads)
        return cls(torch.log_softmax(logits[..., 0], -1), components)

    def logp(self, value: Tensor, **_: Any) -> Tensor:
        """Log-probability `[...]` of one choice per head `[..., H]`, whichever component made it."""
        each = self.components.logp(value.unsqueeze(-2).expand(*self.log_weights.shape, -1))
        return torch.logsumexp(self.log_weights + each, -1)

    def entropy(self, **_: Any) -> Tensor:
        """A bound from below `[...]`, nats: the components' entropies, weighted. A mixture's has no closed form."""
        return (self.log_weights.exp() * self.components.entropy()).sum(-1)

    def sample(self, **_: Any) -> Tensor:
        """Draws one choice per head `[..., H]` with torch's global generator."""
        noise = -torch.empty_like(self.log_weights).exponential_().log()
        return self._of((self.log_weights + noise).argmax(-1), self.components.sample())

    def to_deterministic(self) -> Distribution:
        """Always the likeliest choices of the likeliest component."""
        likeliest = self.components.log_probs.argmax(-1)
        return TorchDeterministic(loc=self._of(self.log_weights.argmax(-1), likeliest))

    @staticmethod
    def _of(component: Tensor, actions: Tensor) -> Tensor:
        """The actions `[..., H]` of one component `[...]` among those of all `[..., C, H]`."""
        return actions.take_along_dim(component[..., None, None], -2).squeeze(-2)

    def kl(self, other: Distribution, **_: Any) -> Tensor:
        """Raises NotImplementedError: it has no closed form."""
        raise NotImplementedError("a mixture's divergence has no closed form; PPO's clip needs none")

    def rsample(self, **_: Any) -> Tensor:
        """Raises NotImplementedError: a choice has no gradient."""
        raise NotImplementedError("categorical choices cannot be re-parameterised; use sample()")

    @staticmethod
    def required_input_dim(space: Any, **_: Any) -> int:
        """Raises NotImplementedError: it depends on the number of components too."""
        raise NotImplementedError("the number of inputs depends on the number of components")
