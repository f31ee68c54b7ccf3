"""Our preset as a whole, on the toy search."""

import itertools
import pickle
from collections import Counter
from collections.abc import Sequence

import numpy as np
import pytest
import torch
from ray.rllib.core.columns import Columns

from raysearch.searchers.interface import Outcome
from raysearch.searchers.ppo.copy_attention import MixturePolicyOutput
from raysearch.searchers.ppo.module import BEHAVIOUR_LOGP, CALL, UNDER_WAY
from raysearch.searchers.ppo.noise import call_rng


def test_no_strategy_is_called_twice_while_new_ones_remain(toy) -> None:
    sizes = (3, 1, 2, 2, 3, 2)
    search = toy.copy_search(budget=80, sizes=sizes).advance(72)
    assert len(set(search.env.actions)) == 72 == np.prod(sizes)
    search.advance(8)
    assert len(search.env.actions) == 80


def proposed(search, numbers: range, under_way: Sequence[np.ndarray] = ()) -> list[np.ndarray]:
    """What the module chooses for calls of these numbers, one after the other, none of them answered."""
    chosen = list(under_way)
    for number in numbers:
        seen = search.module.look(np.empty(0))
        batch = {Columns.OBS: seen[None], CALL: np.array([number]), UNDER_WAY: chosen}
        chosen.append(search.module.forward_exploration(batch)[Columns.ACTIONS][0])
    return chosen[len(under_way) :]


def test_calls_under_way_are_not_proposed_again(toy) -> None:
    search = toy.copy_search(budget=100, sizes=(2, 1, 2, 2, 2))
    actions = {tuple(search.module.as_action(chosen)) for chosen in proposed(search, range(8))}
    assert len(actions) == 8


def test_the_module_alone_goes_on_as_the_search_does(toy) -> None:
    search = toy.copy_search(budget=200).advance(32)
    (chosen,) = proposed(search, range(32, 33))
    search.advance(1)
    assert search.env.actions[-1] == tuple(search.module.as_action(chosen).tolist())


@pytest.mark.parametrize("hopes", [[3.0, 1.0, 2.0, 5.0, 4.0], [3.0, 1.0, 1.0, 5.0, 5.0]])
def test_a_draw_is_taken_as_often_as_its_behaviour_says(toy, monkeypatch, hopes: list[float]) -> None:
    module = toy.copy_search(budget=100, candidates=3).module
    draws = np.array([[place, 0, 0, 0, 0, 0, 0, 0] for place in hopes], np.int64)
    module.critic.trained = True
    monkeypatch.setattr(module.critic, "hopes", lambda drawn: drawn[:, 0].astype(float))
    taken, preferences = Counter(), {}
    for order in itertools.permutations(range(5)):
        place, preference = module.pick(draws[list(order)])
        worth = hopes[order[place]]
        taken[worth] += 1
        preferences[worth] = preference
    for worth, count in taken.items():
        assert count / 120 == pytest.approx(np.exp(preferences[worth]) * hopes.count(worth) / 5)


def test_what_is_filtered_makes_the_other_draws_likelier_than_the_policy_has_them(toy) -> None:
    search = toy.copy_search(budget=200, candidates=1).advance(150)
    batch = {Columns.OBS: search.module.look(np.empty(0))[None], CALL: np.array([150])}
    out = search.module.forward_exploration(batch)
    assert out[BEHAVIOUR_LOGP] > out[Columns.ACTION_LOGP]


@pytest.mark.parametrize("last_first", [False, True])
def test_no_strategy_is_called_twice_with_several_under_way(toy, last_first: bool) -> None:
    search = toy.start(toy.copy_config(budget=100), most=16, last_first=last_first).advance(100)
    assert len(set(search.env.actions)) == 100


def test_it_sees_infeasible_strategies_too(toy) -> None:
    search = toy.copy_search(budget=200).advance(20)
    best = search.env.elites[0][1]
    almost = Outcome(0.0, False, -10.0, search.env.best, search.environment.observation, excess=0.01, simulated=100.0)
    search.module.note(20, np.array([0, *best[1:]]), almost)
    assert search.module.look(np.empty(0))[0, 0] == 0.0


def test_a_mixtures_samples_and_probabilities_agree() -> None:
    rng = np.random.default_rng(0)
    log_probs = np.log(rng.dirichlet(np.ones(3), size=(2, 2)))
    output = MixturePolicyOutput(np.log([0.3, 0.7]), log_probs)
    drawn = output.sample(20_000, call_rng(0, 0))
    for action in np.ndindex(3, 3):
        share = (drawn == action).all(-1).mean()
        assert share == pytest.approx(np.exp(output.log_prob(np.array(action))), abs=0.015)


def seen_by_learner(search) -> dict:
    """The columns of the round that the learner gets, once it is full."""
    batches = []
    compute = search.learner.compute_loss_for_module

    def noting(**given):
        batches.append(given["batch"])
        return compute(**given)

    search.learner.compute_loss_for_module = noting
    search.advance(64)
    search.learner.compute_loss_for_module = compute
    return batches[0]


def test_rounds_hold_the_probabilities_that_the_learner_computes(toy) -> None:
    search = toy.copy_search(budget=200, rollout_calls=64)
    search.learner.apply_gradients = lambda gradients: None
    batch = seen_by_learner(search)
    policy = search.module.action_dist_cls.from_logits(search.module.forward_train(batch)["action_dist_inputs"])
    torch.testing.assert_close(policy.logp(batch["actions"]), batch["action_logp"], atol=1e-4, rtol=1e-4)


def test_learning_makes_the_best_calls_of_a_round_likelier(toy) -> None:
    search = toy.copy_search(budget=200, rollout_calls=64, learning_rate=1e-2)
    batch = seen_by_learner(search)
    policy = search.module.action_dist_cls.from_logits(search.module.forward_train(batch)["action_dist_inputs"])
    gained = (policy.logp(batch["actions"]) - batch["action_logp"]).detach().numpy()
    rewards = batch["rewards"].numpy()
    top = rewards >= np.quantile(rewards, 0.9)
    assert gained[top].mean() > max(gained[~top].mean(), 0.0)


def test_the_policy_restarts_after_as_many_calls_without_a_better_elite_as_it_has_patience(toy) -> None:
    search = toy.copy_search(budget=240, patience=24, rollout_calls=8)
    restarts = []
    for call in range(1, 241):
        before = search.progress.restarts
        search.advance(1)
        merits = search.module.memory.merits[restarts[-1] if restarts else 0 :]
        due = call % 8 == 0 and call < 240 and len(merits) - 1 - int(merits.argmax()) >= 24
        assert (search.progress.restarts > before) == due
        if due:
            restarts.append(call)
    assert len(restarts) >= 2


def test_a_restart_renews_the_policy_and_its_elites_and_keeps_calls_and_critic(toy) -> None:
    search = toy.copy_search(budget=400, patience=1000).advance(63)
    module, weights = search.module, search.weights
    search.agent.config._is_frozen = False
    search.agent.config.patience = 0
    search.advance(1)  # fills a round
    assert search.progress.restarts == 1
    assert not np.array_equal(weights[0], search.weights[0])
    assert (module.look(np.empty(0)) == -1).all()
    assert module.memory.calls == 64
    assert module.critic.trained
    assert all(module.memory.is_new(module.as_action(chosen)) for chosen in proposed(search, range(64, 84)))


def test_calls_under_way_at_a_restart_are_no_elites_of_the_next_policy(toy) -> None:
    search = toy.copy_search(budget=400).advance(50)
    module, best = search.module, search.env.best
    under_way = [module.as_action(chosen) for chosen in proposed(search, range(50, 53))]
    module.start_over(53)
    for number, action in enumerate(under_way, start=50):
        module.note(number, action, Outcome(best, True, best, best, np.empty(0), excess=0.0, simulated=best))
    assert (module.look(np.empty(0)) == -1).all()
    assert not any(module.memory.is_new(action) for action in under_way)


def test_a_search_resumed_at_any_moment_goes_on_bit_identically(toy) -> None:
    def fingerprint(search):
        return search.env.actions, [w.tobytes() for w in search.weights], search.agent.figures()

    def made():
        return toy.copy_search(budget=60, seed=3, patience=16)

    unbroken, search, states = fingerprint(made().advance(60)), made(), {}
    for calls in (5, 16, 45):
        search.advance(calls - max(states, default=0))
        states[calls] = pickle.dumps(search.get_state())
    assert fingerprint(search.advance(15)) == unbroken
    for calls, state in states.items():
        assert fingerprint(made().set_state(pickle.loads(state)).advance(60 - calls)) == unbroken
    assert fingerprint(search.set_state(pickle.loads(states[16])).advance(44)) == unbroken  # one that is used already


@pytest.mark.slow
def test_it_finds_the_best_strategy_of_a_separable_search(toy) -> None:
    sizes = (5, 6, 4, 9) + (3,) * 12
    for seed in range(2):
        search = toy.copy_search(budget=1500, seed=seed, sizes=sizes, rollout_calls=32).advance(1500)
        weights = search.env.weights
        optimum = np.prod([w[1:].max() if head == 0 else w.max() for head, w in enumerate(weights)])
        assert search.env.best > 0.9 * optimum
