import hashlib
import math
import pickle
import random

import numpy as np
import pytest
import torch

CHECKPOINTS = [1, 10, 33]  # mid-rollout, between rollouts, mid-rollout after a restart


def agents_of(search, budget: int) -> list[int]:
    """Calls after which the agent restarted."""
    starts, restarts = [], search.progress.restarts
    while search.progress.calls < budget:
        search.advance(1)
        if search.progress.restarts > restarts:
            starts.append(search.progress.calls)
            restarts = search.progress.restarts
    return starts


def test_learning_rate_falls_on_a_cosine_over_the_whole_budget(toy):
    search = toy.search(budget=40, learning_rate=0.01)
    rates = [search.agent.learning_rate]
    for _ in range(40):
        rates.append(search.advance(1).agent.learning_rate)
    np.testing.assert_allclose(rates, [0.005 * (1 + math.cos(math.pi * k / 40)) for k in range(41)], atol=1e-15)


def test_optimiser_gets_the_rate_of_the_call_it_learns_after(toy):
    search = toy.search(budget=40, learning_rate=0.01).advance(10)
    (optimizer,) = search.learner._named_optimizers.values()
    assert optimizer.param_groups[0]["lr"] == 0.005 * (1 + math.cos(math.pi / 4))


def test_agent_learns_when_the_rollout_is_full(toy):
    search = toy.search(budget=40, rollout_calls=3)
    fresh = search.weights
    search.advance(2)
    assert all(np.array_equal(a, b) for a, b in zip(search.weights, fresh, strict=True))
    search.advance(1)
    assert not all(np.array_equal(a, b) for a, b in zip(search.weights, fresh, strict=True))


def test_agent_restarts_after_each_chunk_but_not_at_the_end(toy):
    assert agents_of(toy.search(budget=50), 50) == [10, 20, 30, 40]


def test_chunk_that_ends_within_a_rollout_ends_with_it(toy):
    assert agents_of(toy.search(budget=46), 46) == [10, 20, 30, 40]


def test_early_exit_restarts_and_gives_the_next_agent_a_whole_chunk(toy):
    search = toy.search(budget=50).advance(4)
    make_confident(search)
    search.advance(2)
    assert search.progress.restarts == 1
    assert search.module.output.confidence >= 0.95
    assert agents_of(search, 50) == [16, 26, 36, 46]


def test_one_uncertain_head_prevents_the_early_exit(toy):
    search = toy.search(budget=50).advance(4)
    make_confident(search, heads=len(toy.sizes) - 1)
    search.advance(2)
    assert search.progress.restarts == 0


def test_threshold_1_is_never_reached_by_an_untrained_policy(toy):
    assert agents_of(toy.search(budget=30, confidence_threshold=1.0, chunks=1), 30) == []


def make_confident(search, heads: int | None = None) -> None:
    """Biases the policy to the first choice of its first `heads` heads."""
    sizes = list(search.env.action_space.nvec)
    with torch.no_grad():
        bias = search.module.policy[-1].bias
        for start in np.cumsum([0, *sizes[:-1]])[:heads]:
            bias[int(start)] += 20.0
    search.module.forget()


def test_restart_renews_weights_and_optimiser_and_keeps_elites_and_best(toy):
    search = toy.search(budget=50).advance(9)
    parameters = list(search.module.parameters())
    (optimizer,) = search.learner._named_optimizers.values()
    elites = list(search.env.elites)
    assert optimizer.state
    assert elites
    search.advance(1)
    assert search.progress.restarts == 1
    assert not optimizer.state
    assert all(p is q for p, q in zip(parameters, search.module.parameters(), strict=True))
    assert (np.abs(search.module.policy[-1].weight.detach().numpy()) < 0.011).all()
    assert search.env.elites[0] <= elites[0]
    search.advance(2)
    assert {int(state["step"]) for state in optimizer.state.values()} == {2}


def test_each_agent_starts_with_other_weights(toy):
    search = toy.search(budget=20, chunks=2)
    first = search.weights
    search.advance(10)
    assert search.progress.restarts == 1
    assert not np.array_equal(first[0], search.weights[0])


def test_odd_last_call_is_learned_from_alone(toy):
    search = toy.search(budget=7, chunks=1).advance(6)
    (optimizer,) = search.learner._named_optimizers.values()
    assert {int(state["step"]) for state in optimizer.state.values()} == {6}
    search.advance(1)
    assert {int(state["step"]) for state in optimizer.state.values()} == {8}
    assert search.progress.calls_left == search.progress.restarts == 0


@pytest.mark.parametrize("budget", [1, 2, 3, 4, 5])
def test_tiny_budgets_are_spent_exactly(toy, budget):
    search = toy.search(budget=budget).advance(budget)
    assert search.progress.calls == len(search.env.actions) == budget


def test_global_random_state_is_neither_used_nor_seeded(toy):
    actions = []
    for seed in (1, 2):
        torch.manual_seed(seed)
        np.random.seed(seed)  # noqa: NPY002
        random.seed(seed)
        expected = random.Random(seed).random(), np.random.RandomState(seed).random()
        actions.append(toy.search(budget=20).advance(20).env.actions)
        assert (random.random(), np.random.random()) == expected  # noqa: NPY002
    assert actions[0] == actions[1]


def fingerprint(search) -> str:
    digest = hashlib.sha256(repr(search.env.actions).encode())
    for weights in search.weights:
        digest.update(weights.tobytes())
    return digest.hexdigest()


def test_a_search_resumed_at_any_checkpoint_goes_on_bit_identically(toy):
    def made():
        return toy.search(budget=45, seed=3)

    unbroken, search, states = fingerprint(made().advance(45)), made(), {}
    for calls in CHECKPOINTS:
        search.advance(calls - max(states, default=0))
        states[calls] = pickle.dumps(search.get_state())
    assert fingerprint(search.advance(45 - max(CHECKPOINTS))) == unbroken
    for calls, state in states.items():
        assert fingerprint(made().set_state(pickle.loads(state)).advance(45 - calls)) == unbroken
    again = CHECKPOINTS[len(CHECKPOINTS) // 2]
    assert fingerprint(search.set_state(pickle.loads(states[again])).advance(45 - again)) == unbroken  # used already


def test_state_does_not_change_with_what_its_giver_or_its_taker_does_later(toy):
    search = toy.search(budget=45).advance(7)
    state = search.get_state()
    before = pickle.dumps(state)
    search.advance(2)
    assert pickle.dumps(state) == before
    toy.search(budget=45).set_state(state).advance(2)
    assert pickle.dumps(state) == before


@pytest.mark.parametrize("last_first", [False, True])
def test_calls_under_way_are_learned_from_as_they_are_answered_and_kept_in_the_state(toy, last_first):
    def start():
        return toy.start(toy.config(budget=45, seed=3), most=5, last_first=last_first)

    search = start().advance(21)
    assert search.environment.under_way == 4
    other = start().set_state(pickle.loads(pickle.dumps(search.get_state())))
    assert fingerprint(search.advance(24)) == fingerprint(other.advance(24))
    assert len(search.env.actions) == 45


def test_metrics_grow_with_what_is_known(toy):
    search = toy.search(budget=45)
    assert search.agent.figures() == {"restarts": 0.0, "learning_rate": 1e-3}
    search.advance(1)
    assert search.agent.figures().keys() == {"restarts", "learning_rate", "confidence", "entropy"}
    search.advance(1)
    metrics = search.agent.figures()
    assert metrics.keys() == {"restarts", "learning_rate", "confidence", "entropy", "policy_loss"}
    assert all(isinstance(value, float) and math.isfinite(value) for value in metrics.values())


@pytest.mark.slow
def test_agent_finds_better_than_random_sampling_at_equal_calls(toy):
    sizes, calls = (5, 6, 4, 9) + (3,) * 12, 500
    network = {"embedding": 64, "hidden": 64, "feed_forward": 64, "attention_heads": 4}
    learned, sampled = [], []
    for seed in range(2):
        search = toy.search(budget=calls, seed=seed, sizes=sizes, chunks=1, **network)
        learned.append(search.advance(calls).env.best)
        env, rng = toy.Env({"sizes": sizes}), np.random.default_rng(seed)
        for _ in range(calls):
            env.step(rng.integers(sizes))
        sampled.append(env.best)
    assert np.mean(learned) > 2 * np.mean(sampled)
