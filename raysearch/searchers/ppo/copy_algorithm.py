"""Our preset of PPO as an RLlib configuration and, for Tune, as an algorithm of its own."""

from __future__ import annotations

import math
from typing import Self

from raysearch.searchers.ppo.algorithm import LearnToShard
from raysearch.searchers.ppo.config import LearnToShardConfig
from raysearch.searchers.ppo.copy_actor import CopyActor
from raysearch.searchers.ppo.copy_attention import CopyAttention
from raysearch.searchers.ppo.copy_learner import CopyLearner
from raysearch.searchers.ppo.copy_options import CopyOptions


class CopyConfig(LearnToShardConfig):
    """RLlib configuration of a search with the copying policy.

    Attributes:
        preset: Everything that `CopyOptions` has.
    """

    actor_class = CopyActor
    learner_class = CopyLearner
    module_class = CopyAttention
    has_critic = False

    def __init__(self, algo_class: type | None = None) -> None:
        super().__init__(algo_class=algo_class or CopyLearnToShard)

    def search(
        self,
        *,
        budget: int,
        seed: int = 0,
        options: CopyOptions | None = None,
        asynchronous: bool = False,
        ahead: int = 0,
    ) -> Self:
        """Sets the budget in calls, the seed, and every hyper-parameter of `options`; see `LearnToShardConfig`."""
        self.preset, self.asynchronous, self.ahead = options or CopyOptions(), asynchronous, ahead
        # One agent after another only where the search stands still: neither chunks nor early exits.
        self.chunks, self.confidence_threshold = 1, math.inf
        self.patience = self.preset.patience
        self.training(vf_loss_coeff=0.0, use_critic=False)
        starts = self.preset.model_dump(include={"copy_choice", "copy_degree", "degree_step"})
        return self.share(budget, seed, self.preset, starts)


class CopyLearnToShard(LearnToShard):
    """`LearnToShard` with this preset: `Tuner(CopyLearnToShard, param_space=CopyConfig()...)`.

    Tune hands a configuration on as a dictionary, which says nothing of its class; the algorithm does.
    """

    @classmethod
    def get_default_config(cls) -> CopyConfig:
        """A config with our preset."""
        return CopyConfig()
