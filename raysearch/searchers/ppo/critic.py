"""What a strategy may be worth, learned off-policy from every call of the search, feasible or not."""

from __future__ import annotations

import copy
import math
from typing import Any, final

import numpy as np
import torch
import torch.nn.functional as nnf
from gymnasium.spaces import MultiDiscrete
from ray.rllib.utils.numpy import convert_to_numpy
from ray.rllib.utils.torch_utils import convert_to_torch_tensor
from scipy.special import ndtri
from torch import Tensor, nn

from envs.actions import ordered_places
from envs.saved_state import SavedState
from raysearch.searchers.machine_state import check_moments
from raysearch.searchers.ppo.advantages import share_below
from raysearch.searchers.ppo.copy_options import CopyOptions
from raysearch.searchers.ppo.features import value_features, value_starts
from raysearch.searchers.ppo.memory import CallMemory
from raysearch.searchers.ppo.noise import call_rng

_STREAM = 1
"""Keeps the draws of training calls apart from the noise of the calls themselves."""


class Ensemble(nn.Module):
    """M small MLPs side by side: `[n, F]` or `[M, n, F]` to scores `[M, n]`; where they differ, little is known."""

    def __init__(self, features: int, members: int, hidden: int) -> None:
        super().__init__()
        shapes = [(features, hidden), (hidden, hidden), (hidden, 1)]
        self.weights = nn.ParameterList(nn.Parameter(torch.zeros(members, *shape)) for shape in shapes)
        self.biases = nn.ParameterList(nn.Parameter(torch.zeros(members, 1, shape[1])) for shape in shapes)
        self.members = members

    def reset_parameters(self, generator: torch.Generator, active: int) -> None:
        """Draws fresh weights in place for inputs of which about `active` are on."""
        fans = (active, *(weight.shape[1] for weight in list(self.weights)[1:]))
        for weight, fan_in, gain in zip(self.weights, fans, (0.5, 1.0, 0.5), strict=True):
            nn.init.normal_(weight, 0.0, gain / math.sqrt(fan_in), generator=generator)

    def forward(self, x: Tensor) -> Tensor:
        """Scores `[M, n]`."""
        x = x if x.dim() == 3 else x.expand(self.members, *x.shape)
        first, *others = zip(self.weights, self.biases, strict=True)
        x = torch.baddbmm(first[1], x, first[0])
        for weight, bias in others:
            x = torch.baddbmm(bias, nnf.relu(x), weight)
        return x.squeeze(-1)


@final
class Critic:
    """Learns how all calls rank, and picks the most promising of a few strategies.

    Targets are the ranks of the merits as normal quantiles: free of unit and outliers, and infeasible calls say how
    far from feasible they are. Nothing in it depends on the policy that made the calls, so it outlives restarts.
    """

    def __init__(self, action_space: MultiDiscrete, seed: int, options: CopyOptions) -> None:
        self._seed, self._options = seed, options
        sizes = [int(n) for n in action_space.nvec]
        self._starts = value_starts(sizes)
        self._features = value_features(sizes, ordered_places(action_space))
        self.ensemble = Ensemble(self._features.shape[1], options.critic_members, options.critic_hidden)
        generator = torch.Generator().manual_seed(int(call_rng(seed, 0, _STREAM).integers(2**63)))
        self.ensemble.reset_parameters(generator, active=len(sizes))
        self._optimizer = torch.optim.Adam(self.ensemble.parameters(), lr=options.critic_learning_rate, fused=True)
        self._inputs = torch.zeros(0, self._features.shape[1])
        self.trained = False

    def hopes(self, candidates: np.ndarray) -> np.ndarray:
        """What candidates `[n, A]` may be worth `[n]`: mean plus optimism."""
        with torch.inference_mode():
            scores = self.ensemble(self._rows(candidates))
            return (scores.mean(0) + self._options.critic_optimism * scores.std(0)).numpy()

    def learn(self, memory: CallMemory) -> None:
        """Takes some gradient steps, every member on random calls of its own from all of the search."""
        options, calls = self._options, memory.calls
        inputs = torch.cat([self._inputs, self._rows(memory.actions[len(self._inputs) :])])
        self._inputs = inputs[: memory.settled]  # calls before others that are not known yet change their place
        quantiles = torch.from_numpy(ndtri(share_below(memory.merits)).astype(np.float32))
        rng = call_rng(self._seed, calls, _STREAM)
        shape = (options.critic_steps, options.critic_members, min(options.critic_batch, calls))
        for index in torch.from_numpy(rng.integers(calls, size=shape)):
            errors = self.ensemble(inputs[index]) - quantiles[index]
            self._optimizer.zero_grad()
            errors.square().mean(1).sum().backward()
            self._optimizer.step()
        self.trained = True

    def _rows(self, actions: np.ndarray) -> Tensor:
        """Features `[..., F]` of actions `[..., A]`."""
        return torch.from_numpy(self._features[actions + self._starts].sum(-2))

    def get_state(self) -> SavedState:
        """Weights and moments, as copies; the inputs follow from the calls."""
        state = {"weights": self.ensemble.state_dict(), "moments": self._optimizer.state_dict()["state"]}
        return {"trained": self.trained, "tensors": copy.deepcopy(convert_to_numpy(state))}

    def set_state(self, state: SavedState) -> None:
        """Goes back to a snapshot. Raises whatever it stumbles over in one of somebody else's."""
        self.trained = state["trained"]
        self._inputs = self._inputs[:0]
        # Copies: torch would go on to write into the snapshot's own arrays.
        tensors: Any = convert_to_torch_tensor(copy.deepcopy(state["tensors"]))
        self.ensemble.load_state_dict(tensors["weights"])
        self._optimizer.load_state_dict({**self._optimizer.state_dict(), "state": tensors["moments"]})
        check_moments(self._optimizer)
