"""Trains the policy: first on the true regret of every candidate, then by PPO on whole searches, with RLlib."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import torch
from numpy.typing import NDArray
from safetensors import SafetensorError
from safetensors.torch import load_file, save

from raysearch.base.errors import InputError
from raysearch.base.file_io import write_bytes
from raysearch.pretraining.descent import Descent, Loss, TrainingLog, TrainingProgress, blurred, descend
from raysearch.pretraining.policy_module import PolicyModule, PolicyNetwork
from raysearch.pretraining.pretraining_file import PretrainingFile
from raysearch.pretraining.search_episodes import SearchEpisodes, Searches, TableSearch
from raysearch.searchers.prior.policy import SHOWN, Policy, PolicyHeader
from raysearch.searchers.prior.strategy_features import Reals

_TEMPERATURE = 0.05
"""[assumed] Regret that is as bad as a nat of entropy."""
_LEAST_GAIN = 0.05
"""[assumed] Added to the largest gain of a state, in whose units all are: so late states count, too, and hopeless ones
do not."""
_SAVE_EVERY = 200
_RLLIBS_ENV = "rllib-single-agent-env-v0"
"""Under which RLlib registers the environment of any algorithm."""
_JUDGED_AFTER = (1, 3, 5, 10, 15)
Chooser = Callable[[TableSearch, np.random.Generator], int]
States = tuple[NDArray[np.float16], NDArray[np.float16]]
"""Observations `[n, size]` and what their candidates would gain `[n, SHOWN]`."""


def by_improvement(search: TableSearch, rng: np.random.Generator) -> int:
    """The candidate with the largest expected improvement."""
    return int(np.argmax(search.improvement))


def by_chance(search: TableSearch, rng: np.random.Generator) -> int:
    """Half of the time that, else any of the dozen that come next, or any at all: so that many states are seen."""
    kind, count = rng.random(), len(search.rows)
    if kind < 0.5:
        return by_improvement(search, rng)
    few = np.argsort(-search.improvement, kind="stable")[: 12 if kind < 0.8 else count]
    return int(rng.choice(few))


def by_policy(policy: Policy) -> Chooser:
    """What a policy prefers."""
    return lambda search, rng: int(np.argmax(policy.preferences(search.tokens)))


def judged(searches: Searches, choose: Chooser, seed: int, calls: int) -> dict[int, float]:
    """Mean f/f* over the tables after so many calls, without noise."""
    curves: list[list[float]] = []
    for number in range(len(searches.tables)):
        rng = np.random.default_rng([seed, 1 << 26, number])
        search = searches.begin(number, rng, noise=0.0)
        curves.append([])
        for _ in range(calls):
            search.call(choose(search, rng))
            curves[-1].append(search.best)
    means = np.mean(curves, axis=0)
    return {after: float(means[after - 1]) for after in _JUDGED_AFTER if after <= calls}


def states(searches: Searches, pretraining: PretrainingFile, progress: TrainingProgress) -> States:
    """Observations `[n, size]` of searches of the tables, and the true gains of their candidates `[n, SHOWN]`."""
    policy, layout = pretraining.policy, searches.layout
    count = len(searches.tables) * policy.searches * policy.calls
    seen, gains = np.zeros((count, layout.size), np.float16), np.zeros((count, SHOWN), np.float16)
    row = 0
    for number in range(len(searches.tables)):
        for turn in range(policy.searches):
            rng = np.random.default_rng([pretraining.seed, 1 << 25, number, turn])
            search = searches.begin(number, rng)
            for _ in range(policy.calls):
                seen[row], gains[row, : len(search.rows)] = layout.packed(search.tokens), search.gains
                row += 1
                search.call(by_chance(search, rng))
        progress(number + 1, len(searches.tables))
    return seen, gains


def imitated(
    network: PolicyNetwork,
    shown_states: Callable[[], States],
    pretraining: PretrainingFile,
    checkpoint: Path,
    progress: TrainingProgress,
    log: TrainingLog,
) -> None:
    """Trains a network in place to choose what truly gains most: its expected gain is known, and so is its gradient.

    Args:
        network: To train, or to go on with from a checkpoint.
        shown_states: Gives the states that it learns from; not asked where all steps were taken before.
        pretraining: The configuration.
        checkpoint: See `raysearch.pretraining.descent.Descent`.
        progress: See `raysearch.pretraining.descent`.
        log: See `raysearch.pretraining.descent`.
    """
    policy, constants = pretraining.policy, torch.arange(network.layout.constants)

    def ready() -> Loss:
        seen, gains = shown_states()

        def loss_of(rng: np.random.Generator) -> torch.Tensor:
            picked = rng.integers(len(seen), size=min(policy.batch, len(seen)))
            each, gain = torch.from_numpy(seen[picked]).float(), torch.from_numpy(gains[picked]).float()
            logits, _ = network(blurred(each, constants, pretraining.network.jitter, rng))
            chances = torch.softmax(logits, 1)
            worth = gain / (gain.max(1, keepdim=True).values + _LEAST_GAIN)
            entropy = -(chances * torch.log(chances.clamp_min(1e-9))).sum(1)
            return -((chances * worth).sum(1) + _TEMPERATURE * entropy).mean()

        return loss_of

    rate, seed = policy.learning_rate, (pretraining.seed, 1 << 27)
    steps = Descent("imitation", policy.steps, rate, 1e-2, seed, checkpoint, _SAVE_EVERY)
    descend(network, ready, steps, progress, log)


def reinforced(
    network: PolicyNetwork,
    pretraining: PretrainingFile,
    paths: Sequence[Path],
    prior: Path,
    folder: Path,
    processes: int,
    progress: TrainingProgress,
    log: TrainingLog,
) -> Iterable[PolicyNetwork]:
    """Trains a network in place by PPO on whole searches; yields it after every iteration.

    Each iteration begins with the weights of the one before and nothing else, its optimiser's moments anew: so a run
    that was stopped ends as one that never was.

    Args:
        network: As it was imitated.
        pretraining: The configuration.
        paths: Of the tables.
        prior: File of the network that the searches begin with.
        folder: For the weights after each iteration.
        processes: RLlib's env runners; one searches in this process.
        progress: Called with (iterations done, iterations).
        log: Called with (name, value, iteration).

    Raises:
        InputError: The weights of an iteration cannot be read.
    """
    from ray.rllib.algorithms.ppo import PPOConfig
    from ray.rllib.core import DEFAULT_MODULE_ID
    from ray.rllib.core.rl_module.rl_module import RLModuleSpec

    logging.getLogger("ray.rllib").setLevel(logging.ERROR)  # it tells everybody that its API is new

    policy = pretraining.policy
    done = max((n + 1 for n in range(policy.iterations) if _weights(folder, n + 1).is_file()), default=0)
    if not done:
        _write_weights(_weights(folder, 0), network)
    for number in range(1, done + 1):
        _read_weights(_weights(folder, number), network)
        yield network
    if done == policy.iterations:
        return
    words = json.loads(pretraining.model_dump_json())
    given = {"pretraining": words, "prior": str(prior), "tables": [str(path) for path in paths]}
    shape = {"layout": list(network.layout), "width": policy.width, "depth": policy.depth}
    config = (
        PPOConfig()
        .environment(SearchEpisodes, env_config=given)
        .env_runners(num_env_runners=processes if processes > 1 else 0, batch_mode="complete_episodes")
        .learners(num_learners=0, num_gpus_per_learner=int(torch.cuda.is_available()))
        .training(
            lr=policy.ppo_learning_rate,
            gamma=policy.discount,
            lambda_=0.95,
            clip_param=0.2,
            use_kl_loss=False,
            entropy_coeff=0.003,
            vf_loss_coeff=0.5,
            vf_clip_param=float("inf"),
            grad_clip=1.0,
            train_batch_size_per_learner=policy.calls_per_iteration,
            minibatch_size=min(128, policy.calls_per_iteration),
            num_epochs=3,
        )
    )
    for number in range(done + 1, policy.iterations + 1):
        begun = {**shape, "weights": str(_weights(folder, number - 1))}
        spec = RLModuleSpec(module_class=PolicyModule, model_config=begun)
        own = config.copy(copy_frozen=False).rl_module(rl_module_spec=spec)
        gymnasium.registry.pop(_RLLIBS_ENV, None)  # or the second would say that it takes the first one's name
        algorithm = own.debugging(seed=pretraining.seed + number - 1).build_algo()
        try:
            result = algorithm.train()
            log("return", float(result["env_runners"]["episode_return_mean"]), number)
            trained: Any = algorithm.get_module(DEFAULT_MODULE_ID)
            group: Any = algorithm.learner_group
            learned = group.get_weights([DEFAULT_MODULE_ID])[DEFAULT_MODULE_ID]
            trained.set_state(learned)
            network.load_state_dict(trained.network.state_dict())
        finally:
            algorithm.stop()
        _write_weights(_weights(folder, number), network)
        progress(number, policy.iterations)
        yield network


def _weights(folder: Path, iteration: int) -> Path:
    return folder / f"policy-{iteration:04d}.safetensors"


def _read_weights(path: Path, network: PolicyNetwork) -> None:
    try:
        network.load_state_dict(load_file(path))
    except (SafetensorError, OSError, RuntimeError) as error:
        words = " ".join(str(error).split())
        raise InputError(
            f"{path} is damaged, or of another network: {words:.200}; delete it, and the same command trains again"
        ) from error


def _write_weights(path: Path, network: PolicyNetwork) -> None:
    write_bytes(path, save({name: tensor.contiguous() for name, tensor in network.state_dict().items()}))


def as_policy(network: PolicyNetwork) -> Policy:
    """The network as a search has it."""
    arrays: dict[str, Reals] = network.arrays()
    return Policy(PolicyHeader(format="", command="", data={}, figures={}, chosen=""), arrays)
