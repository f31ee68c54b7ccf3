"""What a study may set about our preset of PPO; docs/evidence/ablations.md has what was compared."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from raysearch.searchers.ppo.ppo_options import AtLeastZero, PositiveFloat, PositiveInt, SharedOptions, Width


class CopyOptions(SharedOptions):
    """Hyper-parameters of `ppo`; `configs/searchers/ppo.toml` is the preset, `SharedOptions` has the others.

    Attributes:
        elites: T, the most strategies that the policy copies from.
        excess_penalty: What an infeasible strategy loses in merit per factor of e that it misses its limits by.
        copy_choice: Logit that an elite's own choice starts with.
        copy_degree: Logit that an elite's own degree starts with.
        degree_step: What a degree's logit loses at the start per table step away from the elite's.
        patience: Calls without a better elite after which the policy and its elites restart.
        candidates: New strategies drawn from the policy per call, of which the critic picks one; 1: no critic.
        behaviour_correction: Whether advantages are weighed by how much likelier the policy alone was to make a call
            than the search, which calls nothing twice and listens to the critic.
        critic_members: MLPs in the critic's ensemble, whose deviation is its doubt.
        critic_hidden: Width of their two hidden layers.
        critic_learning_rate: Adam's rate.
        critic_steps: Gradient steps after every rollout.
        critic_batch: Calls per step and member, drawn from all of the search.
        critic_optimism: Deviations of the ensemble that are added to its mean when candidates are compared.
    """

    rollout_calls: PositiveInt = 16
    gradient_steps: PositiveInt = 2
    learning_rate: PositiveFloat = 3e-4
    clip_range: PositiveFloat = 0.2
    max_gradient_norm: PositiveFloat = 0.5
    embedding: Width = 64
    hidden: Width = 64
    feed_forward: Width = 64
    attention_heads: Width = 4
    elites: Width = 3
    excess_penalty: Annotated[float, Field(gt=1)] = 8.0
    copy_choice: float = 3.0
    copy_degree: float = 1.5
    degree_step: AtLeastZero = 1.0
    patience: PositiveInt = 200
    candidates: PositiveInt = 3
    behaviour_correction: bool = False
    critic_members: Annotated[Width, Field(ge=2)] = 4
    critic_hidden: Width = 64
    critic_learning_rate: PositiveFloat = 3e-3
    critic_steps: PositiveInt = 8
    critic_batch: PositiveInt = 128
    critic_optimism: float = 1.0
