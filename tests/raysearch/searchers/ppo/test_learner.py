from dataclasses import dataclass, replace

import numpy as np
import pytest
import torch
from ray.rllib.core import DEFAULT_MODULE_ID
from ray.rllib.utils.metrics import NUM_ENV_STEPS_SAMPLED_LIFETIME
from torch.distributions import Categorical

from raysearch.searchers.ppo.env_runner import Answered, Proposal, episode_of
from raysearch.searchers.ppo.schedule import cosine


@pytest.fixture
def learner(toy):
    return toy.search(budget=100).learner


@dataclass(frozen=True)
class Rollout:
    """`n` consecutive calls, and what was seen before each and after the last one."""

    observations: np.ndarray
    actions: np.ndarray
    log_probs: np.ndarray
    rewards: np.ndarray


def random_rollout(toy, calls: int = 2, seed: int = 0) -> Rollout:
    rng = np.random.default_rng(seed)
    return Rollout(
        observations=rng.random((calls + 1, 3, len(toy.sizes)), np.float32),
        actions=np.stack([rng.integers(toy.sizes) for _ in range(calls)]),
        log_probs=rng.uniform(-8, -6, calls).astype(np.float32),
        rewards=rng.normal(size=calls).astype(np.float32),
    )


def update(learner, rollout: Rollout, calls: int = 0) -> float:
    """Has the learner learn from an episode; the policy loss of the last gradient step."""
    calls_of = zip(rollout.observations, rollout.actions, rollout.log_probs, rollout.rewards, strict=False)
    answered = [
        Answered(Proposal(number, seen, action, float(log_prob), 0.0), float(reward))
        for number, (seen, action, log_prob, reward) in enumerate(calls_of)
    ]
    steps = {NUM_ENV_STEPS_SAMPLED_LIFETIME: calls}
    episodes = [episode_of(answered, rollout.observations[-1])]
    learner.update(episodes=episodes, timesteps=steps, num_epochs=learner.config.num_epochs, _no_metrics_reduce=True)
    return float(learner.metrics.peek((DEFAULT_MODULE_ID, "policy_loss")).detach())


def parameters_of(learner) -> dict[str, torch.Tensor]:
    return {name: p.detach().clone() for name, p in learner.module[DEFAULT_MODULE_ID].named_parameters()}


@pytest.mark.parametrize("seen", [[0, 1, 2], [0, 0, 0], [0, 1, 1]])
def test_update_equals_two_plain_torch_steps_on_the_whole_rollout(toy, learner, seen):
    rollout = random_rollout(toy)
    rollout = replace(rollout, observations=rollout.observations[seen])
    network = learner.module[DEFAULT_MODULE_ID]
    before = parameters_of(learner)
    policy_loss = update(learner, rollout, calls=20)
    after = parameters_of(learner)
    network.load_state_dict(before)
    expected_loss = plain_ppo(network, rollout, toy.sizes, steps=2, learning_rate=learner.config.lr * cosine(0.2))
    assert policy_loss == pytest.approx(expected_loss, abs=1e-5)
    for name, parameter in network.named_parameters():
        torch.testing.assert_close(after[name], parameter.detach(), atol=1e-5, rtol=1e-4, msg=name)


def plain_ppo(network, rollout: Rollout, sizes, *, steps: int, learning_rate: float) -> float:
    """PPO as in a text book, on the same parameters, with torch's own encoder, distributions, norm and Adam."""
    with torch.no_grad():
        pooled = network.encoder(network.embedding(torch.from_numpy(rollout.observations))).mean(1)
        r, v = rollout.rewards, network.value(pooled)[:, 0].numpy()
    second = r[1] + 0.99 * v[2] - v[1]
    first = r[0] + 0.99 * v[1] - v[0] + 0.99 * 0.95 * second
    returns = torch.tensor([first + v[0], second + v[1]], dtype=torch.float64)
    advantages = torch.tensor([first, second])
    advantages = (advantages - advantages.mean()) / (advantages.std() + 1e-8)
    optimizer = torch.optim.Adam(network.parameters(), lr=learning_rate, eps=1e-5)
    actions = torch.from_numpy(rollout.actions)
    loss_of_policy = torch.tensor(0.0)
    for _ in range(steps):
        h = network.encoder(network.embedding(torch.from_numpy(rollout.observations[:2]))).mean(1)
        heads = [Categorical(logits=part) for part in network.policy(h).split(list(sizes), -1)]
        log_prob = torch.stack([head.log_prob(actions[:, i]) for i, head in enumerate(heads)]).sum(0)
        ratio = (log_prob - torch.from_numpy(rollout.log_probs)).exp()
        loss_of_policy = -torch.min(ratio * advantages, ratio.clamp(0.8, 1.2) * advantages).mean()
        loss = loss_of_policy + 0.5 * torch.nn.functional.mse_loss(network.value(h)[:, 0].double(), returns)
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(network.parameters(), 0.5)
        optimizer.step()
    return loss_of_policy.item()


@pytest.mark.parametrize("gradient_steps", [1, 2, 5])
def test_each_update_takes_the_configured_gradient_steps(toy, gradient_steps):
    learner = toy.search(budget=100, gradient_steps=gradient_steps).learner
    update(learner, random_rollout(toy))
    update(learner, random_rollout(toy))
    (optimizer,) = learner._named_optimizers.values()
    assert {int(state["step"]) for state in optimizer.state.values()} == {2 * gradient_steps}


def test_a_value_network_without_weight_in_the_loss_is_left_alone(toy):
    learner = toy.search(budget=100, value_coefficient=0.0).learner
    before = parameters_of(learner)
    update(learner, random_rollout(toy))
    changed = {name for name, weights in parameters_of(learner).items() if not torch.equal(weights, before[name])}
    assert changed == {name for name in before if not name.startswith("value.")}


def test_a_rollout_of_one_call_can_be_learned_from(toy, learner):
    before = parameters_of(learner)
    assert np.isfinite(update(learner, random_rollout(toy, calls=1)))
    assert not torch.equal(parameters_of(learner)["embedding.weight"], before["embedding.weight"])


def test_nan_reward_stops_the_search(toy, learner):
    rollout = random_rollout(toy)
    rollout.rewards[0] = np.nan
    with pytest.raises(RuntimeError, match="expected finite gradients, got a norm of nan"):
        update(learner, rollout)


def test_reset_forgets_weights_and_moments_but_keeps_the_objects(toy, learner):
    fresh = parameters_of(learner)
    (optimizer,) = learner._named_optimizers.values()
    objects = list(learner.module[DEFAULT_MODULE_ID].parameters())
    update(learner, random_rollout(toy))
    learner.reset_agent(7)
    assert not optimizer.state
    assert all(p is q for p, q in zip(objects, learner.module[DEFAULT_MODULE_ID].parameters(), strict=True))
    assert all(p is q for p, q in zip(objects, optimizer.param_groups[0]["params"], strict=True))
    assert not torch.equal(parameters_of(learner)["embedding.weight"], fresh["embedding.weight"])
    reset = parameters_of(learner)
    learner.reset_agent(7)
    assert all(torch.equal(value, reset[name]) for name, value in parameters_of(learner).items())
