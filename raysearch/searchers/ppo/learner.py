"""PPO's update on RLlib's torch learner."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from typing import Any

import numpy as np
import torch
from ray.rllib.algorithms.ppo.torch.ppo_torch_learner import PPOTorchLearner
from ray.rllib.connectors.connector_v2 import ConnectorV2
from ray.rllib.core import DEFAULT_MODULE_ID
from ray.rllib.core.columns import Columns
from ray.rllib.core.rl_module.apis.value_function_api import ValueFunctionAPI
from ray.rllib.evaluation.postprocessing import Postprocessing
from ray.rllib.utils.metrics import NUM_ENV_STEPS_SAMPLED_LIFETIME, WEIGHTS_SEQ_NO
from ray.rllib.utils.numpy import convert_to_numpy
from ray.rllib.utils.postprocessing.value_predictions import compute_value_targets
from ray.rllib.utils.torch_utils import clip_gradients
from torch import Tensor

from envs.saved_state import SavedState
from raysearch.searchers.machine_state import check_moments
from raysearch.searchers.ppo.advantages import normalize, rank_advantages
from raysearch.searchers.ppo.module import BEHAVIOUR_LOGP
from raysearch.searchers.ppo.schedule import cosine

ADAM_EPSILON = 1e-5
"""[published: Stable-Baselines3's `ActorCriticPolicy`]; torch's own default is 1e-8."""
_LARGEST_WEIGHT = 8.0
"""[assumed] Of a call that the search was far less likely to make than its policy."""


ValueEstimate = Callable[[Mapping[str, np.ndarray], np.ndarray | None], tuple[np.ndarray, np.ndarray]]


class AddAdvantages(ConnectorV2):
    """Learner: advantages and value targets from rewards and the value network, if the module has one.

    Args:
        estimate: From columns and expected returns, each `[n]`, to both, `[n]`.
    """

    def __init__(self, estimate: ValueEstimate) -> None:
        super().__init__()
        self._estimate = estimate

    def __call__(self, *, rl_module: Any, batch: dict[str, Any], episodes: Any, **_: Any) -> dict[str, Any]:
        """Adds two columns to each module's batch, which is complete otherwise."""
        for module_id, columns in batch.items():
            module = rl_module[module_id].unwrapped()
            has_values = isinstance(module, ValueFunctionAPI)
            values: Any = convert_to_numpy(module.compute_values(columns)) if has_values else None
            device = columns[Columns.OBS].device
            arrays: Any = convert_to_numpy(dict(columns))
            advantages, targets = self._estimate(arrays, values)
            for name, column in ((Postprocessing.ADVANTAGES, advantages), (Postprocessing.VALUE_TARGETS, targets)):
                columns[name] = torch.from_numpy(column.astype(np.float32)).to(device)
        return batch


class EliteLearner(PPOTorchLearner):
    """RLlib's PPO learner with four differences.

    - advantages by `estimate`, a learner connector in place of RLlib's `GeneralAdvantageEstimation`: the same targets,
      but they are only standardised if the options say so, and never over the bootstrap rows;
    - the learning rate falls on a cosine, which RLlib's piecewise linear schedules only approximate;
    - one fused Adam, and gradients that are not finite stop the search;
    - `reset_agent` draws fresh weights in place.
    """

    config: Any  # a LearnToShardConfig
    module: Any  # RLlib's dict of modules; the only one is an EliteModule
    bootstraps = True
    """Whether rollouts are extended by the observation that they led to, for its value."""

    def build(self) -> None:
        """Builds RLlib's learner and puts our advantages into its pipeline."""
        super().build()
        pipeline: Any = self._learner_connector
        pipeline.remove("GeneralAdvantageEstimation")
        if not self.bootstraps:
            pipeline.remove("AddOneTsToEpisodesAndTruncate")
        pipeline.append(AddAdvantages(self.estimate))

    def configure_optimizers_for_module(self, module_id: str, config: Any = None) -> None:
        """Registers one fused Adam for all parameters, without a schedule: its rate is set before each update."""
        parameters: Any = self.get_parameters(self.module[module_id])
        optimizer = torch.optim.Adam(parameters, lr=config.lr, eps=ADAM_EPSILON, fused=True)
        self.register_optimizer(module_id=module_id, optimizer=optimizer, params=parameters)

    def before_gradient_based_update(self, *, timesteps: Mapping[str, Any]) -> None:
        """Sets the rate for an update after so many calls, and lets the module learn what is not PPO's."""
        self.module[DEFAULT_MODULE_ID].unwrapped().learn_from_calls()
        super().before_gradient_based_update(timesteps=dict(timesteps))
        rate = self.config.lr * cosine(timesteps[NUM_ENV_STEPS_SAMPLED_LIFETIME] / self.config.budget)
        for optimizer in self._optimizers():
            for group in optimizer.param_groups:
                group["lr"] = rate

    def _optimizers(self) -> list[torch.optim.Optimizer]:
        named: Any = self.get_optimizers_for_module(DEFAULT_MODULE_ID)
        return [optimizer for _, optimizer in named]

    def estimate(self, columns: Mapping[str, np.ndarray], values: np.ndarray | None) -> tuple[np.ndarray, np.ndarray]:
        """Advantages `[n]` of a batch's rows, and what the value network is to say of them `[n]`.

        Args:
            columns: Rewards, terminateds, truncateds and the loss mask, `[n]`.
            values: Expected returns `[n]`.

        Source: Schulman et al. 2016, "High-dimensional continuous control using generalized advantage estimation".
        """
        assert values is not None
        names = (Columns.REWARDS, Columns.TERMINATEDS, Columns.TRUNCATEDS)
        rewards, terminateds, truncateds = (columns[name] for name in names)
        config = self.config
        targets = compute_value_targets(values, rewards, terminateds, truncateds, config.gamma, config.lambda_)
        advantages, mask = targets - values, columns[Columns.LOSS_MASK]
        if config.normalize_advantages:
            advantages[mask] = normalize(advantages[mask])
        return advantages, targets

    def compute_loss_for_module(self, *, module_id: str, config: Any, batch: Any, fwd_out: Any) -> Tensor:
        """RLlib's PPO loss. Source: Schulman et al. 2017, "Proximal policy optimization algorithms", eq. 7 and 9."""
        # RLlib makes a distribution of them for the KL term, which has no weight.
        batch.setdefault(Columns.ACTION_DIST_INPUTS, fwd_out[Columns.ACTION_DIST_INPUTS])
        # Of one row RLlib has no variance, which it warns of.
        quiet = warnings.catch_warnings(action="ignore") if len(batch[Columns.ACTIONS]) < 2 else nullcontext()
        with quiet:
            loss: Any = super().compute_loss_for_module(
                module_id=module_id, config=config, batch=batch, fwd_out=fwd_out
            )
        return loss

    def compute_gradients(self, loss_per_module: Any, **kwargs: Any) -> dict[Any, Tensor]:
        """Gradients of the loss by parameter, without those that it does not depend on."""
        gradients: Any = super().compute_gradients(loss_per_module, **kwargs)
        return {reference: gradient for reference, gradient in gradients.items() if gradient is not None}

    def postprocess_gradients(self, gradients_dict: Any) -> Any:
        """Clips in place, the global norm without RLlib: `torch.nn.utils.clip_grad_norm_` costs 3 % more per call.

        Raises:
            RuntimeError: A gradient is NaN or infinite: a reward was, or the learning rate is far too high.
        """
        gradients = gradients_dict.values()
        norm = torch.stack([torch.linalg.vector_norm(gradient) for gradient in gradients]).norm()
        if not norm.isfinite():
            raise RuntimeError(f"expected finite gradients, got a norm of {norm}; a lower learning rate may help")
        limit, by = self.config.grad_clip, self.config.grad_clip_by
        if limit is not None and by == "global_norm":
            shrink = (limit / (norm + 1e-6)).clamp(max=1.0)
            for gradient in gradients:
                gradient.mul_(shrink)
        elif limit is not None:
            clipped = dict(gradients_dict)
            clip_gradients(clipped, grad_clip=limit, grad_clip_by=by)
            for reference, gradient in gradients_dict.items():
                gradient.copy_(clipped[reference])
        return gradients_dict

    def apply_gradients(self, gradients_dict: Any) -> None:
        """Steps the optimiser; `postprocess_gradients` has checked the gradients already."""
        for optimizer in self._optimizers():
            optimizer.step()

    def reset_agent(self, seed: int) -> None:
        """Draws fresh weights and forgets Adam's moments, both in place."""
        self.module[DEFAULT_MODULE_ID].unwrapped().reset_parameters(torch.Generator().manual_seed(seed))
        for optimizer in self._optimizers():
            optimizer.state.clear()

    def get_state(self, *args: Any, **kwargs: Any) -> SavedState:
        """As RLlib, but for the number of updates, by which others would tell whether they are behind.

        With 0 they take the weights in any case: a restarted agent has others without an update, as a restored search.
        """
        return {**super().get_state(*args, **kwargs), WEIGHTS_SEQ_NO: 0}

    def set_state(self, state: SavedState) -> None:
        """As RLlib, but it takes the weights even if its own are newer: a restored search goes back."""
        super().set_state({**state, WEIGHTS_SEQ_NO: 0})
        for optimizer in self._optimizers():
            check_moments(optimizer)


class CopyLearner(EliteLearner):
    """An `EliteLearner` of a policy whose calls are judged against each other; see `rank_advantages`."""

    bootstraps = False

    @classmethod
    def rl_module_required_apis(cls) -> list[type]:
        """None: RLlib's PPO would ask for a value network."""
        return []

    def estimate(self, columns: Mapping[str, np.ndarray], values: np.ndarray | None) -> tuple[np.ndarray, np.ndarray]:
        """Advantages `[n]` by rank, and zeros for the targets of a value network.

        Source: Hilton et al. 2022, "Batch size-invariance for policy optimization": the ratio that is clipped is that
        of the policy before and after; that of the policy and the behaviour weighs the advantages.
        """
        advantages = rank_advantages(columns[Columns.REWARDS])
        if self.config.corrects_behaviour:
            weights = np.exp(columns[Columns.ACTION_LOGP] - columns[BEHAVIOUR_LOGP]).clip(max=_LARGEST_WEIGHT)
            weights /= weights.mean()
            advantages = weights * (advantages - (weights * advantages).mean())
        return advantages, np.zeros_like(advantages)
