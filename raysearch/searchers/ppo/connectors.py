"""What stands between environments, policy and learner: RLlib's connectors of a search."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from ray.rllib.connectors.connector_v2 import ConnectorV2
from ray.rllib.core.columns import Columns
from ray.rllib.core.rl_module.apis.value_function_api import ValueFunctionAPI
from ray.rllib.evaluation.postprocessing import Postprocessing
from ray.rllib.utils.numpy import convert_to_numpy

from raysearch.searchers.interface import Outcome
from raysearch.searchers.ppo.actor import EliteActor

ValueEstimate = Callable[[Mapping[str, np.ndarray], np.ndarray | None], tuple[np.ndarray, np.ndarray]]


class ShowElites(ConnectorV2):
    """Env-to-module: tells each environment's actor what came of its call, and shows the policy what the actor sees.

    What an actor sees and what it is rewarded with replace the environment's in the episode, so that the learner gets
    the same. For `ppo_paper` both are the environment's own. It makes the policy's batch `[num_envs, T, A]` in one
    piece, so that none of RLlib's own connectors need go through the episodes again.
    """

    def __init__(self, actors: Sequence[EliteActor] = ()) -> None:
        super().__init__()
        self.actors = actors

    def get_ctor_args_and_kwargs(self) -> tuple[tuple, dict[str, Any]]:
        """Nothing: the env runner makes it anew, with its own actors."""
        return (), {}

    def __call__(self, *, episodes: list[Any], batch: Any, rewards: Any = None, **_: Any) -> Any:
        """Changes the last observations, and after a step the last rewards, in the episodes; adds what is seen."""
        seen = []
        for actor, episode in zip(self.actors, episodes, strict=True):
            observation = episode.get_observations(-1)
            if rewards is not None and episode.t > 0:  # at 0 it was reset, not stepped
                outcome = Outcome.of(observation, episode.get_rewards(-1), episode.get_infos(-1))
                episode.set_rewards(new_data=actor.tell(outcome), at_indices=-1)
            seen.append(actor.look(observation))
            episode.set_observations(new_data=seen[-1], at_indices=-1)
        batch[Columns.OBS] = torch.from_numpy(np.stack(seen))
        return batch


class ChooseActions(ConnectorV2):
    """Module-to-env: each environment's actor chooses by its own noise; RLlib would draw from a global generator.

    Attributes:
        actors: One per environment.
        alike: Whether all environments that share the search know the same for the next step alone, so that each can
            tell what those before it are about to do, and does something else.
        lanes_before: How many of them other runners step.
    """

    def __init__(self, actors: Sequence[EliteActor] = ()) -> None:
        super().__init__()
        self.actors = actors
        self.alike, self.lanes_before = False, 0

    def get_ctor_args_and_kwargs(self) -> tuple[tuple, dict[str, Any]]:
        """Nothing: the env runner makes it anew, with its own actors."""
        return (), {}

    def __call__(self, *, episodes: list[Any], batch: dict[str, Any], **_: Any) -> dict[str, Any]:
        """Actions as the policy and as the environment has them, their log-probabilities, and what they came from.

        All are arrays with a row for each environment, as RLlib's own connectors would leave them.
        """
        if Columns.ACTIONS in batch:  # the algorithm has decided
            taken = [actor.as_action(action) for actor, action in zip(self.actors, batch[Columns.ACTIONS], strict=True)]
            return {**batch, Columns.ACTIONS_FOR_ENV: np.stack(taken)}
        inputs = batch[Columns.ACTION_DIST_INPUTS]
        chosen, actions, log_probs = [], [], []
        alike, self.alike = self.alike, False
        claimed: list[np.ndarray] | None = None
        for index, (actor, episode) in enumerate(zip(self.actors, episodes, strict=True)):
            if not episode.is_reset:  # over; the environment starts anew instead of taking the action
                chosen.append(np.zeros(actor.heads, np.int64))
                actions.append(np.zeros(actor.heads, np.int64))
                log_probs.append(0.0)
                continue
            seen = np.array(episode.get_observations(-1))
            output = actor.judge(seen, {Columns.ACTION_DIST_INPUTS: inputs[index : index + 1]})
            if alike and claimed is None:
                claimed = actor.foresee(output, range(actor.next_call - self.lanes_before, actor.next_call))
            actor.claimed = claimed or []
            proposal = actor.propose(seen, output)
            chosen.append(proposal.action)
            actions.append(actor.as_action(proposal.action))
            if claimed is not None:
                claimed.append(actions[-1])
            log_probs.append(proposal.log_prob)
        return {
            Columns.ACTIONS: np.stack(chosen),
            Columns.ACTIONS_FOR_ENV: np.stack(actions),
            Columns.ACTION_LOGP: np.array(log_probs, np.float32),
            Columns.ACTION_DIST_INPUTS: inputs.cpu().numpy(),
        }


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
