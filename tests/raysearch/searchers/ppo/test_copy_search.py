"""Our preset as a whole, on the toy search."""

import pickle

import numpy as np
import pytest
import torch

from raysearch.searchers.interface import Outcome
from raysearch.searchers.ppo.actor import Proposal
from raysearch.searchers.ppo.copy_actor import MixturePolicyOutput
from raysearch.searchers.ppo.noise import call_rng


def test_no_strategy_is_called_twice_while_new_ones_remain(toy) -> None:
    sizes = (3, 1, 2, 2, 3, 2)
    search = toy.copy_search(budget=80, sizes=sizes).advance(72)
    assert len(set(search.env.actions)) == 72 == np.prod(sizes)
    search.advance(8)
    assert len(search.env.actions) == 80


def test_proposals_in_flight_are_not_proposed_again(toy) -> None:
    runner = toy.copy_search(budget=100, sizes=(2, 1, 2, 2, 2)).agent.actor
    actions = {tuple(runner.act(np.zeros((3, 5)))) for _ in range(8)}
    assert len(actions) == 8


def test_it_sees_infeasible_strategies_too(toy) -> None:
    search = toy.copy_search(budget=200).advance(20)
    best = search.env.elites[0][1]
    runner = search.agent.actor
    infeasible = runner.coordinates.encode(np.array([0, *best[1:]]))
    runner._in_flight.append(Proposal(runner.next_call, search.observation, infeasible, 0.0, 0.0))
    runner.tell(Outcome(0.0, False, -10.0, search.env.best, search.observation, excess=0.01, simulated=100.0))
    assert runner.look(search.observation)[0, 0] == 0.0


def test_a_mixtures_samples_and_probabilities_agree() -> None:
    rng = np.random.default_rng(0)
    log_probs = np.log(rng.dirichlet(np.ones(3), size=(2, 2)))
    output = MixturePolicyOutput(np.log([0.3, 0.7]), log_probs)
    drawn = output.sample(20_000, call_rng(0, 0))
    for action in np.ndindex(3, 3):
        share = (drawn == action).all(-1).mean()
        assert share == pytest.approx(np.exp(output.log_prob(np.array(action))), abs=0.015)


def test_rollouts_hold_the_probabilities_that_the_learner_computes(toy) -> None:
    search = toy.copy_search(budget=200, rollout_calls=64).advance(40)
    rollout = search.agent.actor.take()
    batch = search.agent.learner.make_batch(rollout)
    module = search.agent.actor.module
    policy = module.action_dist_cls.from_logits(module.forward_train(batch)["action_dist_inputs"])
    torch.testing.assert_close(policy.logp(batch["actions"]), batch["action_logp"], atol=1e-4, rtol=1e-4)


def test_learning_makes_the_best_calls_of_a_rollout_likelier(toy) -> None:
    search = toy.copy_search(budget=200, rollout_calls=64, learning_rate=1e-2).advance(63)
    runner, learner = search.agent.actor, search.agent.learner
    rollout = runner.take()
    learner.update_rollout(rollout, 0)
    batch = learner.make_batch(rollout)
    policy = runner.module.action_dist_cls.from_logits(runner.module.forward_train(batch)["action_dist_inputs"])
    gained = (policy.logp(batch["actions"]) - batch["action_logp"]).detach().numpy()
    top = rollout.rewards >= np.quantile(rollout.rewards, 0.9)
    assert gained[top].mean() > max(gained[~top].mean(), 0.0)


def test_the_policy_restarts_after_as_many_calls_without_a_better_elite_as_it_has_patience(toy) -> None:
    search = toy.copy_search(budget=400, patience=24, rollout_calls=8)
    restarts = []
    for call in range(1, 401):
        before = search.agent.restarts
        search.advance(1)
        merits = search.agent.actor.memory.merits[restarts[-1] if restarts else 0 :]
        due = call % 8 == 0 and call < 400 and len(merits) - 1 - int(merits.argmax()) >= 24
        assert (search.agent.restarts > before) == due
        if due:
            restarts.append(call)
    assert len(restarts) >= 4


def test_a_restart_renews_the_policy_and_its_elites_and_keeps_calls_and_critic(toy) -> None:
    search = toy.copy_search(budget=400)
    runner, agent = search.agent.actor, search.agent
    search.advance(50)
    calls, critic = runner.memory.calls, pickle.dumps(runner.critic.get_state())
    weights = search.weights
    agent.restart()
    assert not all(np.array_equal(a, b) for a, b in zip(weights, search.weights, strict=True))
    assert (runner.look(search.observation) == -1).all()
    assert runner.memory.calls == calls
    assert pickle.dumps(runner.critic.get_state()) == critic
    assert all(runner.memory.is_new(runner.act(search.observation)) for _ in range(20))


def test_proposals_in_flight_at_a_restart_are_no_elites_of_the_next_policy(toy) -> None:
    search = toy.copy_search(budget=400).advance(50)
    runner, best = search.agent.actor, search.env.best
    proposed = [runner.act(search.observation) for _ in range(3)]
    search.agent.restart()
    for _ in proposed:
        runner.tell(Outcome(best, True, best, best, search.observation, excess=0.0, simulated=best))
    assert (runner.look(search.observation) == -1).all()
    assert not any(runner.memory.is_new(action) for action in proposed)


@pytest.mark.parametrize("calls", [0, 5, 16, 77])
def test_a_resumed_search_goes_on_bit_identically(toy, calls) -> None:
    def fingerprint(search):
        return search.env.actions, [w.tobytes() for w in search.weights], search.agent.figures()

    unbroken = toy.copy_search(budget=100, seed=3, patience=16).advance(100)
    search = toy.copy_search(budget=100, seed=3, patience=16).advance(calls)
    state = pickle.dumps(search.get_state())
    assert fingerprint(search.advance(100 - calls)) == fingerprint(unbroken)
    assert fingerprint(search.set_state(pickle.loads(state)).advance(100 - calls)) == fingerprint(unbroken)
    fresh = toy.copy_search(budget=100, seed=3, patience=16).set_state(pickle.loads(state))
    assert fingerprint(fresh.advance(100 - calls)) == fingerprint(unbroken)


@pytest.mark.slow
def test_it_finds_the_best_strategy_of_a_separable_search(toy) -> None:
    sizes = (5, 6, 4, 9) + (3,) * 12
    for seed in range(3):
        search = toy.copy_search(budget=1500, seed=seed, sizes=sizes, rollout_calls=32).advance(1500)
        weights = search.env.weights
        optimum = np.prod([w[1:].max() if head == 0 else w.max() for head, w in enumerate(weights)])
        assert search.env.best > 0.9 * optimum
