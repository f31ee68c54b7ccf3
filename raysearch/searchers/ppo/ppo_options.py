"""What a study may set about the presets of PPO: what both have, the paper's, and the paper's on another library."""

from __future__ import annotations

from typing import Annotated, Self

from pydantic import Field, model_validator

from raysearch.searchers.interface import NoOptions, RewardOptions

UnitInterval = Annotated[float, Field(ge=0, le=1)]
PositiveInt = Annotated[int, Field(ge=1)]
Width = Annotated[int, Field(ge=1, le=8192)]
"""Of a layer, or how many of a kind. [assumed] Networks for tables of a few dozen choices, on one CPU."""
PositiveFloat = Annotated[float, Field(gt=0)]
AtLeastZero = Annotated[float, Field(ge=0)]


class SharedOptions(NoOptions):
    """What every preset has: PPO's update and the size of the attention network.

    Attributes:
        rollout_calls: Calls between two updates.
        gradient_steps: Passes of each update over the whole rollout, one gradient step each.
        learning_rate: Adam's rate at the first call; it falls to 0 on a cosine over the budget.
        clip_range: PPO's clip range.
        max_gradient_norm: Global norm that gradients are clipped to.
        embedding: Width of the strategy embedding and of the encoder block, d.
        hidden: Width of the hidden layer of the MLPs behind the encoder.
        feed_forward: Width of the encoder block's feed-forward layer.
        attention_heads: Heads of the encoder block; divides `embedding`.
    """

    rollout_calls: PositiveInt
    gradient_steps: PositiveInt
    learning_rate: PositiveFloat
    clip_range: PositiveFloat
    max_gradient_norm: PositiveFloat
    embedding: Width
    hidden: Width
    feed_forward: Width
    attention_heads: Width

    @model_validator(mode="after")
    def _heads_divide_embedding(self) -> Self:
        if self.embedding % self.attention_heads:
            raise ValueError(
                f"attention_heads must divide embedding: {self.embedding} is not a multiple of {self.attention_heads}"
            )
        return self


class Options(SharedOptions, RewardOptions):
    """Hyper-parameters of `ppo_paper`; `configs/searchers/ppo_paper.toml` is the preset.

    Origins: [paper] = Learning to Shard, section 3 and appendix A; [sb3] = default of Stable-Baselines3's
    PPO, which the paper uses; [torch] = default of `torch.nn.TransformerEncoderLayer`; [assumed] = the paper
    is silent.

    Attributes:
        rollout_calls: Calls between two updates [paper: "step size and the rollout buffer size are both 2"].
        gradient_steps: Passes of each update over the whole rollout, one gradient step each [paper: 2].
        learning_rate: Adam's rate at the first call [paper]; it falls to 0 on a cosine over the budget [paper: cosine].
        confidence_threshold: tau: the agent restarts once every head's largest probability reaches it [paper: 0.95].
        chunks: An agent lives for budget / chunks calls at most [paper: 5].
        gamma: Discount [sb3].
        gae_lambda: Lambda of generalised advantage estimation [sb3].
        clip_range: PPO's clip range [sb3].
        value_coefficient: Weight of the value loss, which is not clipped [sb3].
        entropy_coefficient: Weight of the entropy bonus [sb3: 0].
        max_gradient_norm: Global norm that gradients are clipped to [sb3].
        normalize_advantages: Whether a rollout's advantages are shifted and scaled to mean 0 and deviation 1 [sb3].
            With rollouts of 2 only their signs survive: always +0.71 and -0.71, unless both are equal.
        embedding: Width of the strategy embedding and of the encoder block, d [paper: 256].
        hidden: Width of the hidden layer of the policy and of the value MLP [paper: "hidden size" 256].
        feed_forward: Width of the encoder block's feed-forward layer [paper: "hidden size" 256, read as both].
        attention_heads: Heads of the encoder block [assumed]; divides `embedding`.
    """

    rollout_calls: PositiveInt = 2
    gradient_steps: PositiveInt = 2
    learning_rate: PositiveFloat = 1e-3
    confidence_threshold: UnitInterval = 0.95
    chunks: PositiveInt = 5
    gamma: UnitInterval = 0.99
    gae_lambda: UnitInterval = 0.95
    clip_range: PositiveFloat = 0.2
    value_coefficient: AtLeastZero = 0.5
    entropy_coefficient: AtLeastZero = 0.0
    max_gradient_norm: PositiveFloat = 0.5
    normalize_advantages: bool = True
    embedding: Width = 256
    hidden: Width = 256
    feed_forward: Width = 256
    attention_heads: Width = 4


class SB3Options(RewardOptions):
    """Settings of `sb3_ppo`, the same agent on Stable-Baselines3; what is not here has that library's default.

    Attributes:
        rollout_calls: Calls between two updates.
        gradient_steps: Passes of each update over the whole rollout, one gradient step each.
        learning_rate: Of the first call; it falls to 0 on a cosine over the budget.
        confidence_threshold: tau: the agent restarts once every head's largest probability reaches it.
        chunks: An agent lives for budget / chunks calls at most.
        embedding: Width of the strategy embedding, of the encoder block (4 heads) and of the MLPs.
    """

    rollout_calls: Annotated[int, Field(ge=2)]
    gradient_steps: PositiveInt
    learning_rate: PositiveFloat
    confidence_threshold: UnitInterval
    chunks: PositiveInt
    embedding: Annotated[int, Field(ge=1, multiple_of=4)]
