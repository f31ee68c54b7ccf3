"""Parts that were tried in the preset `ppo` and are not, or not as such, in it: for `ablations.py` alone."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from gymnasium.spaces import MultiDiscrete
from ray.rllib.core.columns import Columns
from scipy.special import log_softmax
from torch import Tensor, nn

from raysearch.searchers.ppo.advantages import normalize, share_below
from raysearch.searchers.ppo.algorithm import CopyConfig
from raysearch.searchers.ppo.coordinates import Coordinates
from raysearch.searchers.ppo.copy_attention import CopyAttention, MixturePolicyOutput
from raysearch.searchers.ppo.distribution import IMPOSSIBLE, MultiCategorical, padding_index
from raysearch.searchers.ppo.learner import CopyLearner
from raysearch.searchers.ppo.memory import CallMemory
from raysearch.searchers.ppo.mixture import CopyMixture
from raysearch.searchers.ppo.noise import gumbel_noise

_DEGREES = 4
"""tp, ep, pp and batch, the first places of an action."""


class SoftAttention(CopyAttention):
    """One component that copies from the attention-weighted mean of the elites, instead of one elite at a time."""

    def _forward(self, batch: dict[str, Any], **_: Any) -> dict[str, Any]:
        x, present = self.one_hot(batch[Columns.OBS])
        h, pooled = self.attend(x, present)
        weights = torch.softmax(self.score(h).masked_fill(~present, IMPOSSIBLE), -2) * present
        logits = self.policy(pooled) + (weights * self.copied(x)).sum(-2, keepdim=True)
        return {Columns.ACTION_DIST_INPUTS: torch.cat([torch.zeros(*logits.shape[:-1], 1), logits], -1)}


class AbsoluteCoordinates(Coordinates):
    """The batch as it is."""

    def __init__(self, space: MultiDiscrete) -> None:
        super().__init__(space)
        self.sizes = tuple(int(n) for n in space.nvec)

    def inside(self, chosen: np.ndarray) -> np.ndarray:
        """All."""
        return np.ones(chosen.shape[:-1], np.bool_)

    def _shifted(self, actions: np.ndarray, constant: int, sign: int) -> np.ndarray:
        return np.array(actions, np.int64)


class AbsoluteBatch(CopyAttention):
    """The policy chooses the batch by itself, whatever it does to the degrees."""

    coordinates_class = AbsoluteCoordinates


class ScaledInputs(CopyAttention):
    """Elites enter as indices over the largest of their table, as in the paper, instead of one-hot."""

    def setup(self) -> None:
        """Replaces the embedding."""
        super().setup()
        self.embedding = nn.Linear(len(self.starts), self.model_config["embedding"])
        index = torch.arange(len(self.coordinate)) - self.starts[self.coordinate]
        scaled = nn.functional.one_hot(self.coordinate) * (index / self.largest[self.coordinate].clamp(min=1))[:, None]
        self.register_buffer("scaled", scaled, persistent=False)

    def attend(self, x: Tensor, present: Tensor) -> tuple[Tensor, Tensor]:
        """As one-hot elites are, once they are no longer one-hot."""
        return super().attend(x @ self.scaled, present)


class RandomHeads(CopyAttention):
    """The last layer of the logits starts orthogonal with gain 1 instead of zero."""

    def reset_parameters(self, generator: torch.Generator) -> None:
        """Draws it anew."""
        super().reset_parameters(generator)
        nn.init.orthogonal_(self.policy[-1].weight, 1.0, generator)


@dataclass(frozen=True, eq=False)
class AutoregressiveOutput(MixturePolicyOutput):
    """Draws head after head.

    Attributes:
        tables: What a choice of one head adds to the logits of another, `[H, K, H, K]`.
    """

    tables: np.ndarray = field(kw_only=True)

    def log_prob(self, action: np.ndarray) -> float:
        """Log-probability of an action `[H]`, whichever component made it."""
        heads = np.arange(len(action))
        components = log_softmax(self.log_probs + self.tables[heads, action].sum(0), axis=-1)
        return float(np.logaddexp.reduce(self.log_weights + components[:, heads, action].sum(-1)))

    def sample(self, draws: int, rng: np.random.Generator) -> np.ndarray:
        """Actions `[draws, H]`."""
        component = (self.log_weights + gumbel_noise(rng, (draws, len(self.log_weights)))).argmax(-1)
        scores = self.log_probs[component] + gumbel_noise(rng, (draws, *self.log_probs.shape[1:]))
        actions = np.zeros(scores.shape[:2], np.int64)
        for head in range(scores.shape[1]):
            actions[:, head] = scores[:, head].argmax(-1)
            scores = scores + self.tables[head, actions[:, head]]
        return actions


class Autoregressive(CopyAttention):
    """Every head's logits also depend on the choices of the heads before it, by a learned table that starts at zero."""

    output_class = AutoregressiveOutput

    def setup(self) -> None:
        """Adds the table."""
        super().setup()
        self.coupling = nn.Parameter(torch.zeros(len(self.coordinate), len(self.coordinate)))
        earlier = (self.coordinate[:, None] < self.coordinate).float()
        self.register_buffer("earlier", earlier, persistent=False)
        distribution: Any = AutoregressiveMixture
        sizes = self.coordinates_class(self.action_space).sizes
        self.action_dist_cls = distribution.get_partial_dist_cls(
            index=padding_index(sizes), heads=len(sizes), module=self
        )

    def reset_parameters(self, generator: torch.Generator) -> None:
        """Starts without any dependence."""
        super().reset_parameters(generator)
        with torch.no_grad():
            self.coupling.zero_()

    def policy_output(self, out: dict[str, Any]) -> MixturePolicyOutput:
        """The output behind what the network made of one observation."""
        plain = super().policy_output(out)
        tables = self._tables(*plain.log_probs.shape[1:])
        return AutoregressiveOutput(plain.log_weights, plain.log_probs, tables=tables)

    def _tables(self, heads: int, width: int) -> np.ndarray:
        flat = (self.coupling * self.earlier).detach().numpy()
        index = self.coordinate.numpy(), (torch.arange(len(flat)) - self.starts[self.coordinate]).numpy()
        tables = np.zeros((heads, width, heads, width), np.float32)
        tables[index[0][:, None], index[1][:, None], index[0], index[1]] = flat
        return tables


class AutoregressiveMixture(CopyMixture):
    """A `CopyMixture` whose components know the heads before; it keeps the flat logits to add to."""

    @classmethod
    def from_logits(cls, logits: Tensor, *, index: Tensor, heads: int, module: Any, **_: Any) -> AutoregressiveMixture:
        """Notes what `logp` needs."""
        mixture = super().from_logits(logits, index=index, heads=heads)
        mixture.flat, mixture.index, mixture.heads, mixture.module = logits[..., 1:], index, heads, module
        return mixture

    def logp(self, value: Tensor, **_: Any) -> Tensor:
        """Log-probability `[...]`."""
        module = self.module
        chosen = torch.zeros(*value.shape[:-1], len(module.coordinate)).scatter_(-1, value + module.starts, 1.0)
        shift = (chosen @ (module.coupling * module.earlier)).unsqueeze(-2)
        components = MultiCategorical.from_logits(self.flat + shift, index=self.index, heads=self.heads)
        each = components.logp(value.unsqueeze(-2).expand(*self.log_weights.shape, -1))
        return torch.logsumexp(self.log_weights + each, -1)


class Repeating(CopyAttention):
    """May call a strategy again."""

    def is_new(self, action: np.ndarray, taken: set[int]) -> bool:
        """Always."""
        return True


class DistinctMemory(CallMemory):
    """Elites are the best calls with different degrees."""

    def add(self, number: int, action: np.ndarray, merit: float) -> None:
        """Leaves only the best elite of each combination of degrees."""
        super().add(number, action, merit)
        best: dict[bytes, int] = {}
        for call in self.best:
            best.setdefault(self.actions[call, :_DEGREES].tobytes(), call)
        self.best = list(best.values())


class DistinctElites(CopyAttention):
    """Copies from elites that differ in their degrees."""

    def setup(self) -> None:
        """Replaces the memory."""
        super().setup()
        sizes = [int(n) for n in self.action_space.nvec]
        self.memory = DistinctMemory(self.model_config["budget"], sizes, self.options.elites)


class StandardAdvantages(CopyLearner):
    """Merits shifted and scaled to mean 0 and deviation 1 within the rollout, instead of ranks."""

    def estimate(self, columns: Mapping[str, np.ndarray], values: Any) -> tuple[np.ndarray, np.ndarray]:
        """Advantages `[n]`."""
        advantages = normalize(columns[Columns.REWARDS])
        return advantages, np.zeros_like(advantages)


class TopAdvantages(CopyLearner):
    """Only the best eighth of a rollout counts, from 0 to 2 by rank: Petersen et al. 2021, eq. 5, on ranks."""

    def estimate(self, columns: Mapping[str, np.ndarray], values: Any) -> tuple[np.ndarray, np.ndarray]:
        """Advantages `[n]`."""
        advantages = np.maximum(share_below(columns[Columns.REWARDS]) - 0.875, 0.0) * 16
        return advantages, np.zeros_like(advantages)


class SelfImitation(CopyLearner):
    """Also raises the likelihood of the present elites, with a weight of 0.1."""

    def compute_loss_for_module(self, *, module_id: str, config: Any, batch: Any, fwd_out: Any) -> Tensor:
        """PPO's loss and the elites'."""
        loss = super().compute_loss_for_module(module_id=module_id, config=config, batch=batch, fwd_out=fwd_out)
        module = self.module[module_id].unwrapped()
        last = batch[Columns.OBS][-1]
        elites = last[last[:, 0] >= 0]
        if not len(elites):
            return loss
        policy = module.action_dist_cls.from_logits(
            fwd_out[Columns.ACTION_DIST_INPUTS][-1:].expand(len(elites), -1, -1)
        )
        return loss - 0.1 * policy.logp((elites * module.largest).round().long()).mean()


def config_with(**classes: type) -> type[CopyConfig]:
    """A `CopyConfig` made of other classes: `module_class`, `learner_class`."""
    return type("AblatedConfig", (CopyConfig,), classes)
