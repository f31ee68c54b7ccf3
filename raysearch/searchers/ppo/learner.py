"""PPO's update on RLlib's torch learner, and the same on arrays, without the way through episodes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from ray.rllib.algorithms.ppo.torch.ppo_torch_learner import PPOTorchLearner
from ray.rllib.core import DEFAULT_MODULE_ID
from ray.rllib.core.columns import Columns
from ray.rllib.evaluation.postprocessing import Postprocessing
from ray.rllib.utils.metrics import NUM_ENV_STEPS_SAMPLED_LIFETIME, WEIGHTS_SEQ_NO
from ray.rllib.utils.postprocessing.value_predictions import compute_value_targets
from ray.rllib.utils.torch_utils import clip_gradients
from torch import Tensor

from envs.saved_state import SavedState
from raysearch.searchers.machine_state import check_moments
from raysearch.searchers.ppo.connectors import AddAdvantages
from raysearch.searchers.ppo.rollout import Rollout, normalize
from raysearch.searchers.ppo.schedule import cosine

ADAM_EPSILON = 1e-5
"""[published: Stable-Baselines3's `ActorCriticPolicy`]; torch's own default is 1e-8."""


class EliteLearner(PPOTorchLearner):
    """RLlib's PPO learner with four differences, and a way around the episodes (`update_rollout`).

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
        """Sets the rate for an update after so many calls."""
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

    def update_rollout(self, rollout: Rollout, calls: int) -> float:
        """What `update` does with the episodes of one environment, bit by bit, without them.

        Args:
            rollout: The last calls.
            calls: All calls so far.

        Returns:
            The policy loss of the last gradient step.
        """
        self.before_gradient_based_update(timesteps={NUM_ENV_STEPS_SAMPLED_LIFETIME: calls})
        batch = {DEFAULT_MODULE_ID: self.make_batch(rollout)}
        for _ in range(self.config.num_epochs):
            losses = self.compute_losses(fwd_out=self.module.forward_train(batch), batch=batch)
            self.apply_gradients(self.postprocess_gradients(self.compute_gradients(losses)))
        return float(self._policy_loss)

    def make_batch(self, rollout: Rollout) -> dict[str, Tensor]:
        """The columns that RLlib's pipeline makes of a rollout's episode, and its bootstrap row if there is one."""
        n, extra = len(rollout.rewards), int(self.bootstraps)
        rows = np.minimum(np.arange(n + extra), n - 1)  # the bootstrap row repeats the last one
        mask = np.arange(n + extra) < n
        columns = {
            Columns.REWARDS: np.where(mask, rollout.rewards[rows], np.float32(0)),
            Columns.TERMINATEDS: np.zeros(n + extra, np.bool_),
            Columns.TRUNCATEDS: np.arange(n + extra) == n - 1,
            Columns.LOSS_MASK: mask,
        }
        advantages, targets = self.estimate(columns, rollout.values)
        batch = {
            Columns.OBS: torch.tensor(rollout.observations[: n + extra]),
            Columns.ACTIONS: torch.from_numpy(rollout.actions[rows]),
            Columns.ACTION_LOGP: torch.from_numpy(rollout.log_probs[rows]),
            Postprocessing.ADVANTAGES: torch.from_numpy(advantages.astype(np.float32)),
            Postprocessing.VALUE_TARGETS: torch.from_numpy(targets.astype(np.float32)),
        }
        return batch | ({Columns.LOSS_MASK: torch.from_numpy(mask)} if extra else {})

    def compute_loss_for_module(self, *, module_id: str, config: Any, batch: Any, fwd_out: Any) -> Tensor:
        """RLlib's PPO loss; on the lean path without its metrics and without terms that have no weight.

        Source: Schulman et al. 2017, "Proximal policy optimization algorithms", eq. 7 and 9.
        """
        if not config.lean:
            # RLlib makes a distribution of them for the KL term, which has no weight.
            batch.setdefault(Columns.ACTION_DIST_INPUTS, fwd_out[Columns.ACTION_DIST_INPUTS])
            stock: Any = super().compute_loss_for_module(
                module_id=module_id, config=config, batch=batch, fwd_out=fwd_out
            )
            return stock
        mask = batch.get(Columns.LOSS_MASK)

        def mean(rows: Tensor) -> Tensor:
            return rows.mean() if mask is None else rows[mask].sum() / mask.sum()

        module = self.module[module_id].unwrapped()
        policy = module.action_dist_cls.from_logits(fwd_out[Columns.ACTION_DIST_INPUTS])
        ratio = torch.exp(policy.logp(batch[Columns.ACTIONS]) - batch[Columns.ACTION_LOGP])
        advantages = batch[Postprocessing.ADVANTAGES]
        clipped = torch.clamp(ratio, 1 - config.clip_param, 1 + config.clip_param)
        surrogate = torch.min(advantages * ratio, advantages * clipped)
        loss = -surrogate
        if config.use_critic and config.vf_loss_coeff:
            values = module.compute_values(batch, embeddings=fwd_out[Columns.EMBEDDINGS])
            loss = loss + config.vf_loss_coeff * torch.pow(values - batch[Postprocessing.VALUE_TARGETS], 2.0)
        if config.entropy_coeff:
            loss = loss - config.entropy_coeff * policy.entropy()
        self._policy_loss = -mean(surrogate.detach())
        return mean(loss)

    def compute_gradients(self, loss_per_module: Any, **kwargs: Any) -> dict[Any, Tensor]:
        """Gradients of the loss by parameter, without those that it does not depend on."""
        if not self.config.lean:
            gradients: Any = super().compute_gradients(loss_per_module, **kwargs)
        else:
            parameters: Any = self.get_parameters(self.module[DEFAULT_MODULE_ID])
            for parameter in parameters:
                parameter.grad = None
            loss_per_module[DEFAULT_MODULE_ID].backward()
            gradients = {self.get_param_ref(parameter): parameter.grad for parameter in parameters}
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
        # On the CPU, so that a learner on a GPU starts with the same weights.
        generator = torch.Generator().manual_seed(seed)
        module = self.module[DEFAULT_MODULE_ID].unwrapped()
        device = next(module.parameters()).device
        module.cpu().reset_parameters(generator)
        module.to(device)
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
