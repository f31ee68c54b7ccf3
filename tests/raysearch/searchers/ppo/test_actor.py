import numpy as np
import pytest
import torch

from raysearch.searchers.interface import Outcome


@pytest.fixture
def actor(toy):
    return toy.search(budget=100).agent.actor


def told(actor, reward: float, then: np.ndarray) -> None:
    actor.tell(Outcome(0.0, False, reward, 0.0, then))


def observation(toy, value: float = -1.0) -> np.ndarray:
    return np.full((3, len(toy.sizes)), value, np.float32)


def test_rollout_holds_what_was_seen_done_and_expected(toy, actor):
    seen = [observation(toy, 0.1), observation(toy, 0.5), observation(toy, 0.9)]
    actions = []
    for now, then, reward in [(seen[0], seen[1], 1.0), (seen[1], seen[2], -2.0)]:
        actions.append(actor.act(now))
        told(actor, reward, then)
    outputs = [actor.judge(each) for each in seen]
    rollout = actor.take()
    np.testing.assert_array_equal(rollout.observations, seen)
    np.testing.assert_array_equal(rollout.actions, actions)
    np.testing.assert_array_equal(rollout.rewards, [1.0, -2.0])
    np.testing.assert_allclose(rollout.values, [o.value for o in outputs], rtol=1e-6)
    heads = range(len(toy.sizes))
    logp = [sum(o.log_probs[h, a[h]] for h in heads) for o, a in zip(outputs, actions, strict=False)]
    np.testing.assert_allclose(rollout.log_probs, logp, rtol=1e-6)
    assert (actor.recorded, actor.calls) == (0, 2)


def test_actions_lie_in_the_space(toy, actor):
    for _ in range(200):
        action = actor.act(observation(toy))
        told(actor, 0.0, observation(toy))
        assert action.dtype == np.int64
        assert action.shape == (len(toy.sizes),)
        assert ((action >= 0) & (action < toy.sizes)).all()


def test_the_papers_policy_restarts_after_as_many_calls_without_a_new_elite_as_it_has_patience(toy):
    config = toy.config(budget=200, seed=2, chunks=1)
    config.patience, config.confidence_threshold = 10, 1.1
    search, since, restarts = toy.start(config), 0, 0
    for call in range(1, 201):
        elites = search.env.elites
        search.advance(1)
        since = 0 if search.env.elites != elites else since + 1
        if call % config.round_calls == 0 and since >= 10 and call < 200:
            restarts, since = restarts + 1, 0
        assert search.agent.restarts == restarts, call
    assert restarts >= 3


def test_opinions_follow_the_weights_once_forgotten(toy, actor):
    seen = observation(toy)
    before = actor.judge(seen)
    with torch.no_grad():
        for parameter in actor.module.parameters():
            parameter += 0.1
    assert actor.judge(seen) is before
    actor.forget()
    assert actor.judge(seen).value != before.value


def test_callers_may_reuse_their_arrays(toy, actor):
    seen, after = observation(toy, 0.2), observation(toy, 0.4)
    action = actor.act(seen)
    told(actor, 1.0, after)
    expected = action.copy(), actor.judge(observation(toy, 0.4)).value
    action[:] = 0
    seen[:] = 9.0
    after[:] = 9.0
    rollout = actor.take()
    np.testing.assert_array_equal(rollout.actions[0], expected[0])
    assert (rollout.observations[:1] == np.float32(0.2)).all()
    assert rollout.values[1] == np.float32(expected[1])


def test_actions_in_flight_are_recorded_in_order(toy, actor):
    first, second = actor.act(observation(toy)), actor.act(observation(toy, 0.3))
    told(actor, 1.0, observation(toy))
    told(actor, 2.0, observation(toy, 0.3))
    rollout = actor.take()
    np.testing.assert_array_equal(rollout.actions, [first, second])
    assert not np.array_equal(first, second)


def test_outcome_of_nothing_is_refused(toy, actor):
    with pytest.raises(RuntimeError, match="in flight"):
        told(actor, 1.0, observation(toy))


def test_confidence_and_entropy_of_an_opinion(toy, actor):
    output = actor.judge(observation(toy))
    probs = np.exp(output.log_probs)
    assert output.confidence == pytest.approx(probs.max(-1).min())
    positive = probs[probs > 0]
    assert output.entropy == pytest.approx(-(positive * np.log(positive)).sum(), rel=1e-5)
