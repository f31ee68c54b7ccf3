"""PPO's update on a rollout of a few calls, on RLlib's torch learner without its per-update overhead."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from ray.rllib.algorithms.ppo.torch.ppo_torch_learner import PPOTorchLearner
from ray.rllib.core import DEFAULT_MODULE_ID
from ray.rllib.core.columns import Columns
from ray.rllib.evaluation.postprocessing import Postprocessing
from torch import Tensor

from raysearch.ppo.rollout import Rollout, estimate_advantages, normalize

ADAM_EPSILON = 1e-5
"""[published: Stable-Baselines3's `ActorCriticPolicy`]; torch's own default is 1e-8."""


class EliteLearner(PPOTorchLearner):
    """RLlib's PPO learner, updated by whole rollouts (`update_round`) and re-initialised in place (`reset_agent`).

    `update()`, RLlib's entry point for episodes and minibatches, is not used: its connectors append a bootstrap row
    that minibatches then train on, and they cost several times the gradient step itself.
    """

    config: Any  # a LearnToShardConfig
    module: Any  # RLlib's dict of modules; the only one is an EliteAttention

    def configure_optimizers_for_module(self, module_id: str, config: Any = None) -> None:
        """Registers one fused Adam for all parameters; `update_round` sets its rate."""
        parameters: Any = self.get_parameters(self.module[module_id])
        optimizer = torch.optim.Adam(parameters, lr=config.lr, eps=ADAM_EPSILON, fused=True)
        self.register_optimizer(
            module_id=module_id, optimizer=optimizer, params=parameters, lr_or_lr_schedule=config.lr
        )

    def update_round(self, rollout: Rollout, learning_rate: float) -> float:
        """Takes `config.num_epochs` gradient steps, each on the whole rollout.

        Returns:
            The policy loss of the last step.
        """
        batch = {DEFAULT_MODULE_ID: self.make_batch(rollout)}
        distinct, seen = map(torch.tensor, rollout.distinct_observations())
        for optimizer in self._named_optimizers.values():
            self._set_optimizer_lr(optimizer, learning_rate)
        for _ in range(self.config.num_epochs):
            losses = self.compute_losses(fwd_out=self._forward(distinct, seen), batch=batch)
            self.apply_gradients(self.postprocess_gradients(self.compute_gradients(losses)))
        self._weights_seq_no += 1
        return float(self._policy_loss)

    def _forward(self, distinct: Tensor, seen: Tensor) -> dict[str, Any]:
        """What the network makes of every call, though it reads each of the `distinct` observations only once."""
        out = self.module.forward_train({DEFAULT_MODULE_ID: {Columns.OBS: distinct}})[DEFAULT_MODULE_ID]
        return {DEFAULT_MODULE_ID: {name: rows.index_select(0, seen) for name, rows in out.items()}}

    def make_batch(self, rollout: Rollout) -> dict[str, Tensor]:
        """The columns that `compute_loss_for_module` reads, one row a call."""
        advantages, targets = self.estimate(rollout)
        return {
            Columns.OBS: torch.tensor(rollout.observations),
            Columns.ACTIONS: torch.from_numpy(rollout.actions),
            Columns.ACTION_LOGP: torch.from_numpy(rollout.log_probs),
            Postprocessing.ADVANTAGES: torch.from_numpy(advantages.astype(np.float32)),
            Postprocessing.VALUE_TARGETS: torch.from_numpy(targets.astype(np.float32)),
        }

    def estimate(self, rollout: Rollout) -> tuple[np.ndarray, np.ndarray]:
        """Advantages `[n]` of a rollout's calls, and what the value network is to say of them `[n]`."""
        config = self.config
        advantages = estimate_advantages(rollout.rewards, rollout.values, config.gamma, config.lambda_)
        targets = advantages + rollout.values[:-1]
        return normalize(advantages) if config.normalize_advantages else advantages, targets

    def compute_loss_for_module(self, *, module_id: str, config: Any, batch: Any, fwd_out: Any) -> Tensor:
        """RLlib's PPO loss with neither KL term nor value clipping, and without its metrics.

        A value network is not needed where its loss has no weight.

        Source: Schulman et al. 2017, "Proximal policy optimization algorithms", eq. 7 and 9.
        """
        module = self.module[module_id].unwrapped()
        policy = module.action_dist_cls.from_logits(fwd_out[Columns.ACTION_DIST_INPUTS])
        ratio = torch.exp(policy.logp(batch[Columns.ACTIONS]) - batch[Columns.ACTION_LOGP])
        clipped = ratio.clamp(1 - config.clip_param, 1 + config.clip_param)
        advantages = batch[Postprocessing.ADVANTAGES]
        policy_loss = -torch.min(advantages * ratio, advantages * clipped).mean()
        loss = policy_loss
        if config.vf_loss_coeff:
            values = module.compute_values(batch, embeddings=fwd_out[Columns.EMBEDDINGS])
            value_loss = (values - batch[Postprocessing.VALUE_TARGETS]).square().mean()
            loss = loss + config.vf_loss_coeff * value_loss
        if config.entropy_coeff:
            loss = loss - config.entropy_coeff * policy.entropy().mean()
        self._policy_loss = policy_loss.detach()
        return loss

    def compute_gradients(self, loss_per_module: Any, **_: Any) -> dict[Any, Tensor]:
        """Gradients of the module's loss by parameter, without those that it does not depend on."""
        parameters: dict[Any, Any] = self._params
        for parameter in parameters.values():
            parameter.grad = None
        loss_per_module[DEFAULT_MODULE_ID].backward()
        gradients = {reference: parameter.grad for reference, parameter in parameters.items()}
        return {reference: gradient for reference, gradient in gradients.items() if gradient is not None}

    def postprocess_gradients(self, gradients_dict: Any) -> Any:
        """Clips the global norm in place; `torch.nn.utils.clip_grad_norm_` does the same at 3 % more per call.

        Raises:
            RuntimeError: A gradient is NaN or infinite: a reward was, or the learning rate is far too high.
        """
        gradients = gradients_dict.values()
        norm = torch.stack([torch.linalg.vector_norm(gradient) for gradient in gradients]).norm()
        if not norm.isfinite():
            raise RuntimeError(f"expected finite gradients, got a norm of {norm}; a lower learning rate may help")
        shrink = (self.config.grad_clip / (norm + 1e-6)).clamp(max=1.0)
        for gradient in gradients:
            gradient.mul_(shrink)
        return gradients_dict

    def apply_gradients(self, gradients_dict: Any) -> None:
        """Steps the optimiser; `postprocess_gradients` has checked the gradients already."""
        for optimizer in self._named_optimizers.values():
            optimizer.step()

    def reset_agent(self, generator: torch.Generator) -> None:
        """Draws fresh weights from `generator` and forgets Adam's moments, both in place."""
        self.module[DEFAULT_MODULE_ID].unwrapped().reset_parameters(generator)
        for optimizer in self._named_optimizers.values():
            optimizer.state.clear()
        self._weights_seq_no += 1
