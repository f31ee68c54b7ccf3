"""The paper's policy as RLlib has it: a network over the elite history, and what a search's policy knows beside it."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Self

import gymnasium
import numpy as np
import torch
import torch.nn.functional as nnf
from ray.rllib.core.columns import Columns
from ray.rllib.core.rl_module.apis.value_function_api import ValueFunctionAPI
from ray.rllib.core.rl_module.torch import TorchRLModule
from torch import Tensor, nn

from envs.actions import Actions
from envs.archive import AddStatus, EliteArchive
from envs.saved_state import SavedState
from raysearch.searchers.interface import Outcome
from raysearch.searchers.ppo.distribution import MultiCategorical, padding_index
from raysearch.searchers.ppo.noise import call_rng, gumbel_noise

CALL = "call"
"""Column of a batch to explore with: numbers of the calls, int64 `[n]`. The noise of a call depends on it alone."""
UNDER_WAY = "under_way"
"""What else may be in it: choices `[m, A]` that were made and not answered yet."""
BEHAVIOUR_LOGP = "behaviour_logp"
"""Column of what was explored: log-probability with which the search chose, whatever filters the policy's draws."""


def encode(layer: nn.TransformerEncoderLayer, x: Tensor, mask: Tensor | None = None) -> Tensor:
    """Returns `layer(x)` for `x` `[N, T, d]` without the overhead of its general case (a fifth of the time).

    Assumes what `EliteAttention` builds: batch first, norm last, ReLU, no dropout. `mask`, broadcast to
    `[N, heads, T, T]`, is added to the attention's scores.
    """
    attention, (rows, elites, d) = layer.self_attn, x.shape
    projected = nnf.linear(x, attention.in_proj_weight, attention.in_proj_bias)
    heads = projected.view(rows, elites, 3, attention.num_heads, -1).permute(2, 0, 3, 1, 4)
    mixed = nnf.scaled_dot_product_attention(heads[0], heads[1], heads[2], mask)
    x = layer.norm1(x + attention.out_proj(mixed.transpose(1, 2).reshape(rows, elites, d)))
    return layer.norm2(x + layer.linear2(nnf.relu(layer.linear1(x))))


def initialise(module: nn.Module, gains: Mapping[nn.Module, float], generator: torch.Generator) -> None:
    """Draws fresh weights for every layer in place: linear ones orthogonal with `gains`, sqrt(2) if not named."""
    for layer in module.modules():
        if isinstance(layer, nn.Linear):
            nn.init.orthogonal_(layer.weight, gains.get(layer, math.sqrt(2)), generator)
            nn.init.zeros_(layer.bias)
        elif isinstance(layer, nn.LayerNorm):
            layer.reset_parameters()
    for layer in module.modules():
        if isinstance(layer, nn.MultiheadAttention):
            nn.init.xavier_uniform_(layer.in_proj_weight, generator=generator)
            nn.init.zeros_(layer.in_proj_bias)


def distinct_rows(observations: Tensor) -> tuple[Tensor, Tensor]:
    """The observations `[n, T, A]` without repetitions `[d, T, A]`, and which of them each one is, int64 `[n]`.

    Elites change seldom, so that a policy mostly sees the same again.
    """
    places: dict[bytes, int] = {}
    seen = [places.setdefault(row.tobytes(), len(places)) for row in observations.detach().cpu().numpy()]
    first = [seen.index(place) for place in range(len(places))]
    return observations[first], torch.tensor(seen, device=observations.device)


@dataclass(frozen=True, eq=False)
class PolicyOutput:
    """What the policy makes of one observation.

    Attributes:
        log_probs: `[H, K]`, as in `MultiCategorical`.
    """

    log_probs: np.ndarray

    @property
    def confidence(self) -> float:
        """Smallest over the heads of their largest probability: min over m of the paper's CS_m."""
        return float(np.exp(self.log_probs.max(-1).min()))

    @property
    def entropy(self) -> float:
        """Sum of the heads' entropies, nats."""
        return float(-(np.exp(self.log_probs) * self.log_probs).sum())

    def log_prob(self, action: np.ndarray) -> float:
        """Log-probability of an action `[H]`."""
        return float(self.log_probs[np.arange(len(action)), action].sum())


class EliteModule(TorchRLModule):
    """A policy that explores by call: equal knowledge, weights and numbers give equal choices, wherever it runs.

    It reads every observation of a batch once, and while it acts one by one. What it made of an observation is kept
    until its weights change (`forget`): elites change seldom, so most calls see what an earlier one saw.

    `model_config` holds the sizes of the network, `search_seed` and `elites`.

    Attributes:
        output: What it made of the observation that it last explored with, or None.
    """

    output_class: type = PolicyOutput

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        space: Any = self.action_space
        self.sizes = [int(n) for n in space.nvec]
        self._folded = space.folded if isinstance(space, Actions) else np.asarray
        self._archive = EliteArchive(self.model_config["elites"])
        self._stagnant_calls = 0
        self._outputs: dict[bytes, Any] = {}
        self.output: Any = None

    def train(self, mode: bool = True) -> Self:
        """Does nothing: no layer behaves differently in training, and RLlib walks the whole tree on every step."""
        return self

    def set_state(self, state: Any) -> None:
        """Takes other weights."""
        super().set_state(state)
        self.forget()

    def forget(self) -> None:
        """Drops all outputs: the weights have changed."""
        self._outputs.clear()

    def _forward_train(self, batch: dict[str, Any], **_: Any) -> dict[str, Any]:
        rows, seen = distinct_rows(batch[Columns.OBS])
        return {name: column.index_select(0, seen) for name, column in self._forward({Columns.OBS: rows}).items()}

    def _forward_inference(self, batch: dict[str, Any], **_: Any) -> dict[str, Any]:
        with torch.inference_mode():
            return self.one_by_one(batch[Columns.OBS])

    def _forward_exploration(self, batch: dict[str, Any], **_: Any) -> dict[str, Any]:
        """What the calls of the numbers `CALL` choose `[n, A]`, and how likely policy and search were to."""
        seen = [np.asarray(row, np.float32) for row in batch[Columns.OBS]]
        taken = batch.get(UNDER_WAY, ())
        chosen, log_probs, preferences = [], [], []
        for row, number in zip(seen, batch[CALL], strict=True):
            self.output = self.judge(row)
            choice, preference = self.choose(call_rng(self.model_config["search_seed"], int(number)), taken)
            chosen.append(choice)
            preferences.append(preference)
            log_probs.append(self.output.log_prob(choice))
        return {
            Columns.ACTIONS: np.stack(chosen),
            Columns.ACTION_LOGP: np.array(log_probs),
            BEHAVIOUR_LOGP: np.array(log_probs) + preferences,
        }

    def one_by_one(self, observations: Tensor) -> dict[str, Tensor]:
        """What the network makes of `[n, T, A]`, each distinct observation in a batch of its own."""
        if len(observations) == 1:
            return self._forward({Columns.OBS: observations})
        rows, seen = distinct_rows(observations)
        each = [self._forward({Columns.OBS: row[None].clone()}) for row in rows]
        return {name: torch.cat([out[name] for out in each]).index_select(0, seen) for name in each[0]}

    def judge(self, seen: np.ndarray) -> Any:
        """The policy's output of what is seen, `[T, A]`."""
        key = seen.tobytes()
        if key not in self._outputs:
            # A copy: torch aligns its memory, and on numpy's BLAS may add up in another order.
            made = self.forward_inference({Columns.OBS: torch.tensor(seen[None])})
            with torch.inference_mode():
                self._outputs[key] = self.policy_output(made)
        return self._outputs[key]

    def policy_output(self, out: dict[str, Any]) -> Any:
        """The output behind what the network made of one observation."""
        policy: Any = self.action_dist_cls
        return PolicyOutput(policy.from_logits(out[Columns.ACTION_DIST_INPUTS]).log_probs[0].numpy())

    def choose(self, rng: np.random.Generator, under_way: Sequence[np.ndarray]) -> tuple[np.ndarray, float]:
        """A choice `[A]` from the present output, and log(how likely it was / how likely the policy alone was to)."""
        return (self.output.log_probs + gumbel_noise(rng, self.output.log_probs.shape)).argmax(-1), 0.0

    def look(self, observation: np.ndarray) -> np.ndarray:
        """What the policy gets to see of an environment's observation, a new array."""
        return np.array(observation, dtype=np.float32)

    def as_action(self, chosen: np.ndarray) -> np.ndarray:
        """The environment's action for what the policy chose `[A]`, a new array."""
        return chosen.copy()

    def note(self, number: int, action: np.ndarray, outcome: Outcome) -> float:
        """Takes in a call: its number, its action `[A]` and what came of it.

        Returns:
            What the policy is rewarded with.
        """
        self._stagnant_calls += 1
        if outcome.feasible:
            added = self._archive.add(outcome.raw, tuple(self._folded(action).tolist()))
            self._stagnant_calls *= added != AddStatus.ADDED
        return outcome.reward

    @property
    def stagnant_calls(self) -> int:
        """Calls since there was a new elite, or since the agent began; 0 while there is none."""
        return self._stagnant_calls if self._archive.best else 0

    def learn_from_calls(self) -> None:
        """Learns from all calls so far what is not learned by PPO; nothing here."""

    def start_over(self, next_call: int) -> None:
        """Another agent begins with a call of that number; it inherits the elites."""
        self._stagnant_calls = 0

    def get_memory(self) -> SavedState:
        """All but the weights that `set_memory` needs to go on as if nothing had happened: plain values and arrays."""
        output = vars(self.output) if self.output else None
        return {"elites": self._archive.get_state(), "stagnant_calls": self._stagnant_calls, "output": output}

    def set_memory(self, memory: SavedState) -> None:
        """Goes back to where `get_memory` was called."""
        self._archive.set_state(memory["elites"])
        self._stagnant_calls = memory["stagnant_calls"]
        self.output = self.output_class(**memory["output"]) if memory["output"] else None
        self.forget()


class EliteAttention(EliteModule, ValueFunctionAPI):
    """Policy and value over the elite history X: linear embedding, one encoder block, mean over T, two MLPs.

    Observations are `[N, T, A]`, actions `[N, A]`; the logits of all heads lie flat, `[N, sum(nvec)]`.
    The rows of X carry no position: they differ by content alone [assumed; the paper names none].
    `model_config` holds `embedding`, `hidden`, `feed_forward` and `attention_heads`.

    Source: Learning to Shard, section 3 (Policy Network) and appendix A; the value MLP is Stable-Baselines3's way
    of sharing a feature extractor between policy and value.
    """

    def setup(self) -> None:
        """Builds the layers; called by RLlib's constructor."""
        assert isinstance(self.action_space, gymnasium.spaces.MultiDiscrete)
        assert self.observation_space.shape is not None
        sizes = [int(n) for n in self.action_space.nvec]
        # RLlib knows no default distribution for MultiDiscrete without a catalog.
        distribution: Any = MultiCategorical
        self.action_dist_cls = distribution.get_partial_dist_cls(index=padding_index(sizes), heads=len(sizes))
        config = self.model_config
        d, hidden, heads = config["embedding"], config["hidden"], config["attention_heads"]
        self.embedding = nn.Linear(self.observation_space.shape[-1], d)
        self.encoder = nn.TransformerEncoderLayer(d, heads, config["feed_forward"], dropout=0.0, batch_first=True)
        self.policy = nn.Sequential(nn.Linear(d, hidden), nn.Tanh(), nn.Linear(hidden, sum(sizes)))
        self.value = nn.Sequential(nn.Linear(d, hidden), nn.Tanh(), nn.Linear(hidden, 1))

    def reset_parameters(self, generator: torch.Generator) -> None:
        """Draws fresh weights in place, so that optimisers and shared references stay valid.

        Source: Stable-Baselines3's `ActorCriticPolicy`: orthogonal with gain sqrt(2), 0.01 for the logits (a nearly
        uniform start) and 1 for the value; biases 0. Attention's input projection keeps torch's Xavier.
        """
        initialise(self, {self.policy[-1]: 0.01, self.value[-1]: 1.0}, generator)

    def features(self, observations: Tensor) -> Tensor:
        """Summary of the elite history: `[N, T, A]` to h, `[N, d]`."""
        return encode(self.encoder, self.embedding(observations)).mean(-2)

    def _forward(self, batch: dict[str, Any], **_: Any) -> dict[str, Any]:
        features = self.features(batch[Columns.OBS])
        return {Columns.ACTION_DIST_INPUTS: self.policy(features), Columns.EMBEDDINGS: features}

    def compute_values(self, batch: dict[str, Any], embeddings: Tensor | None = None) -> Tensor:
        """Expected return `[N]` of each observation: by `embeddings` `[N, d]`, or as seen while acting, one by one."""
        if embeddings is not None:
            return self.value(embeddings).squeeze(-1)
        with torch.inference_mode():
            rows, seen = distinct_rows(batch[Columns.OBS])
            each = [self.value(self.features(row[None].clone())).squeeze(-1) for row in rows]
            return torch.cat(each).index_select(0, seen)
