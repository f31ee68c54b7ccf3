import gymnasium
import numpy as np
import pytest
import torch
from ray.rllib.core.columns import Columns
from torch import nn

from raysearch.searchers.ppo.module import BEHAVIOUR_LOGP, CALL, EliteAttention, encode

SIZES = [5, 6, 4, 9] + [3] * 12
PAPER = {"embedding": 256, "hidden": 256, "feed_forward": 256, "attention_heads": 4}


def make_module(**config) -> EliteAttention:
    module = EliteAttention(
        observation_space=gymnasium.spaces.Box(-1.0, 1.0, (3, len(SIZES)), np.float32),
        action_space=gymnasium.spaces.MultiDiscrete(SIZES),
        model_config={**PAPER, "elites": 3, "search_seed": 0, **config},
    )
    module.reset_parameters(torch.Generator().manual_seed(0))
    return module


@pytest.mark.parametrize(("rows", "elites"), [(1, 1), (1, 3), (5, 3), (2, 8)])
def test_lean_encoder_equals_torchs(rows, elites):
    layer = nn.TransformerEncoderLayer(32, 4, 48, dropout=0.0, batch_first=True)
    for parameter in layer.parameters():
        nn.init.normal_(parameter, std=0.3, generator=torch.Generator().manual_seed(parameter.numel()))
    x = torch.randn(rows, elites, 32, generator=torch.Generator().manual_seed(0)).requires_grad_()
    torch.testing.assert_close(encode(layer, x), layer(x), atol=1e-5, rtol=1e-5)
    (lean,) = torch.autograd.grad(encode(layer, x).square().sum(), x)
    (torchs,) = torch.autograd.grad(layer(x).square().sum(), x)
    torch.testing.assert_close(lean, torchs, atol=1e-4, rtol=1e-4)


def test_parameters_of_the_papers_network():
    d, a, logits = 256, len(SIZES), sum(SIZES)
    embedding = a * d + d
    attention = 4 * (d * d + d)
    feed_forward = 2 * (d * d + d)
    norms = 2 * 2 * d
    policy = (d * d + d) + (d * logits + logits)
    value = (d * d + d) + (d + 1)
    expected = embedding + attention + feed_forward + norms + policy + value
    assert sum(p.numel() for p in make_module().parameters()) == expected


def test_fresh_policy_is_nearly_uniform():
    module = make_module()
    out = module.forward_inference({Columns.OBS: torch.full((1, 3, len(SIZES)), -1.0)})
    policy = module.action_dist_cls.from_logits(out[Columns.ACTION_DIST_INPUTS])
    assert policy.entropy().item() == pytest.approx(np.log(SIZES).sum(), rel=1e-2)


def test_reset_is_in_place_and_reproducible():
    module = make_module()
    before = [(p, p.detach().clone()) for p in module.parameters()]
    with torch.no_grad():
        for parameter in module.parameters():
            parameter += 1.0
    module.reset_parameters(torch.Generator().manual_seed(0))
    after = list(module.parameters())
    assert all(p is q and torch.equal(q, value) for (p, value), q in zip(before, after, strict=True))
    module.reset_parameters(torch.Generator().manual_seed(1))
    assert not torch.equal(module.embedding.weight, before[0][1])


def test_reset_leaves_torchs_global_generator_alone():
    module = make_module()
    state = torch.get_rng_state()
    module.reset_parameters(torch.Generator().manual_seed(0))
    assert torch.equal(torch.get_rng_state(), state)


def test_any_number_of_elites_is_accepted_and_their_order_does_not_matter():
    module = make_module()
    x = torch.rand(2, 5, len(SIZES), generator=torch.Generator().manual_seed(0))
    torch.testing.assert_close(module.features(x), module.features(x.flip(1)))


def test_values_do_not_depend_on_whether_features_are_given():
    module = make_module()
    batch = {Columns.OBS: torch.rand(2, 3, len(SIZES))}
    out = module.forward_train(batch)
    torch.testing.assert_close(
        module.compute_values(batch), module.compute_values(batch, embeddings=out[Columns.EMBEDDINGS])
    )


def explored(module: EliteAttention, number: int, value: float = -1.0) -> dict:
    seen = np.full((1, 3, len(SIZES)), value, np.float32)
    return module.forward_exploration({Columns.OBS: seen, CALL: np.array([number])})


def test_choices_follow_number_seed_and_weights_and_say_how_likely_they_were():
    small = {"embedding": 16, "hidden": 16, "feed_forward": 16}
    module, same, other = make_module(**small), make_module(**small), make_module(**small, search_seed=1)
    first = explored(module, 7)
    np.testing.assert_array_equal(first[Columns.ACTIONS], explored(same, 7)[Columns.ACTIONS])
    assert not np.array_equal(first[Columns.ACTIONS], explored(module, 8)[Columns.ACTIONS])
    assert not np.array_equal(first[Columns.ACTIONS], explored(other, 7)[Columns.ACTIONS])
    (choice,) = first[Columns.ACTIONS]
    assert ((choice >= 0) & (choice < SIZES)).all()
    policy = module.action_dist_cls.from_logits(
        module.forward_inference({Columns.OBS: torch.full((1, 3, len(SIZES)), -1.0)})[Columns.ACTION_DIST_INPUTS]
    )
    expected = policy.logp(torch.from_numpy(choice)[None]).item()
    assert first[Columns.ACTION_LOGP][0] == pytest.approx(expected, rel=1e-5)
    assert first[BEHAVIOUR_LOGP] == first[Columns.ACTION_LOGP]


def test_a_module_that_explores_reads_an_observation_anew_once_it_has_other_weights():
    module, other = make_module(embedding=16, hidden=16), make_module(embedding=16, hidden=16)
    before = explored(module, 0)[Columns.ACTIONS][0]
    with torch.no_grad():
        other.policy[-1].bias[: SIZES[0]] += 50.0 * (torch.arange(SIZES[0]) == (before[0] + 1) % SIZES[0])
    module.set_state(other.get_state())
    assert explored(module, 0)[Columns.ACTIONS][0][0] == (before[0] + 1) % SIZES[0]


def test_confidence_and_entropy_of_an_output():
    output = make_module().judge(np.full((3, len(SIZES)), -1.0, np.float32))
    probs = np.exp(output.log_probs)
    assert output.confidence == pytest.approx(probs.max(-1).min())
    positive = probs[probs > 0]
    assert output.entropy == pytest.approx(-(positive * np.log(positive)).sum(), rel=1e-5)
