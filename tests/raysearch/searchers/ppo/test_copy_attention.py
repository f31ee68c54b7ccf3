import gymnasium
import numpy as np
import pytest
import torch
from ray.rllib.core.columns import Columns

from raysearch.searchers.ppo.coordinates import Coordinates
from raysearch.searchers.ppo.copy_attention import CopyAttention
from tests.envs.fakes import toy_actions

ACTIONS = [5, 6, 4, 9] + [3] * 12
SIZES = list(Coordinates(toy_actions(ACTIONS)).sizes)
LARGEST = np.array(SIZES, np.float32) - 1
SMALL = {"embedding": 16, "hidden": 16, "feed_forward": 16, "attention_heads": 2}


def make_module(**starts) -> CopyAttention:
    module = CopyAttention(
        observation_space=gymnasium.spaces.Box(-1.0, 1.0, (1, len(SIZES)), np.float32),
        action_space=toy_actions(ACTIONS),
        model_config={"preset": {**SMALL, **starts}, "elites": 3, "search_seed": 0, "budget": 100},
    )
    module.reset_parameters(torch.Generator().manual_seed(0))
    return module


def policy_of(module: CopyAttention, *elites: np.ndarray, padding: int = 0):
    rows = [elite / LARGEST for elite in elites] + [np.full(len(SIZES), -1.0)] * padding
    out = module.forward_inference({Columns.OBS: torch.tensor(np.array(rows, np.float32)[None])})
    return module.action_dist_cls.from_logits(out[Columns.ACTION_DIST_INPUTS])


def some_elites(count: int) -> list[np.ndarray]:
    rng = np.random.default_rng(1)
    return [rng.integers(SIZES) for _ in range(count)]


def learned(module: CopyAttention) -> CopyAttention:
    """The module after some training, as it were: no weight is where it began."""
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter += 0.1 * torch.randn(parameter.shape, generator=generator)
    return module


def test_a_policy_that_only_copies_repeats_its_elites_and_nothing_else() -> None:
    module = make_module(copy_choice=60.0, copy_degree=60.0)
    with torch.no_grad():
        module.explore.fill_(-60.0)
    elites = some_elites(3)
    policy = policy_of(module, *elites, padding=1)
    for elite in elites:
        assert policy.logp(torch.from_numpy(elite)[None]).exp().item() == pytest.approx(1 / 3, rel=1e-4)


def test_the_first_policy_points_at_each_elite_and_at_exploration_alike() -> None:
    policy = policy_of(make_module(), *some_elites(3))
    np.testing.assert_allclose(policy.log_weights.exp(), np.full((1, 4), 0.25), rtol=1e-5)


def test_without_elites_the_first_policy_is_uniform() -> None:
    policy = policy_of(make_module(), padding=3)
    np.testing.assert_allclose(policy.log_weights.exp(), [[0, 0, 0, 1]], atol=1e-6)
    action = torch.from_numpy(some_elites(1)[0])[None]
    assert policy.logp(action).item() == pytest.approx(-np.log(SIZES).sum(), rel=1e-5)


def test_copied_degrees_fade_with_every_step_and_copied_choices_do_not() -> None:
    elite = some_elites(1)[0]
    log_probs = policy_of(make_module(), elite).components.log_probs[0, 0]
    degree, choice = 3, 7
    steps = np.abs(np.arange(SIZES[degree]) - elite[degree])
    expected = np.where(steps == 0, 1.5, 0.0) - steps
    np.testing.assert_allclose(log_probs[degree] - log_probs[degree, elite[degree]], expected - 1.5, atol=1e-5)
    others = [value for value in range(3) if value != elite[choice]]
    np.testing.assert_allclose(log_probs[choice, others] - log_probs[choice, elite[choice]], [-3.0, -3.0], atol=1e-5)


def test_padding_changes_nothing() -> None:
    module, elites = learned(make_module()), some_elites(2)
    action = torch.from_numpy(some_elites(3)[2])[None]
    bare, padded = policy_of(module, *elites), policy_of(module, *elites, padding=3)
    torch.testing.assert_close(bare.logp(action), padded.logp(action), atol=1e-4, rtol=1e-5)


def policy_parameters(module) -> dict[str, torch.nn.Parameter]:
    """All but the critic's, which learns from calls and outlives restarts."""
    return {name: each for name, each in module.named_parameters() if not name.startswith("critic_ensemble")}


def test_every_parameter_learns() -> None:
    module = learned(make_module())
    out = module.forward_train({Columns.OBS: torch.tensor(np.array([some_elites(3)]) / LARGEST, dtype=torch.float32)})
    trained = module.action_dist_cls.from_logits(out[Columns.ACTION_DIST_INPUTS])
    trained.logp(torch.from_numpy(some_elites(4)[3])[None]).sum().backward()
    for name, parameter in policy_parameters(module).items():
        assert parameter.grad is not None, name
        assert torch.isfinite(parameter.grad).all(), name
        assert parameter.grad.abs().sum() > 0, name


def test_reset_is_in_place_and_reproducible() -> None:
    module = make_module()
    before = [(p, p.detach().clone()) for p in policy_parameters(module).values()]
    learned(module).reset_parameters(torch.Generator().manual_seed(0))
    after = list(policy_parameters(module).values())
    assert all(p is q and torch.equal(q, value) for (p, value), q in zip(before, after, strict=True))
