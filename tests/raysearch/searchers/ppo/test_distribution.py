import gymnasium
import numpy as np
import pytest
import torch
from ray.rllib.core.distribution.torch.torch_distribution import TorchCategorical, TorchMultiCategorical
from torch.distributions import Categorical, kl_divergence

from raysearch.searchers.ppo.distribution import MultiCategorical, padding_index

SIZES = [7, 1, 4, 3, 3]


def random_logits(seed: int, batch: tuple[int, ...] = (6,), scale: float = 4.0) -> torch.Tensor:
    return scale * torch.randn((*batch, sum(SIZES)), generator=torch.Generator().manual_seed(seed))


def ours(logits: torch.Tensor) -> MultiCategorical:
    return MultiCategorical.from_logits(logits, index=padding_index(SIZES), heads=len(SIZES))


def reference(logits: torch.Tensor) -> list[Categorical]:
    return [Categorical(logits=part) for part in logits.split(SIZES, -1)]


def test_padding_index_points_past_the_last_logit():
    assert padding_index([2, 1, 3]).tolist() == [0, 1, 6, 2, 6, 6, 3, 4, 5]


@pytest.mark.parametrize("seed", range(3))
def test_equals_one_torch_categorical_per_head(seed):
    logits, others = random_logits(seed), random_logits(seed + 100)
    policy, heads = ours(logits), reference(logits)
    action = policy.sample()
    logp = sum(head.log_prob(action[:, i]) for i, head in enumerate(heads))
    kl = sum(kl_divergence(p, q) for p, q in zip(heads, reference(others), strict=True))
    torch.testing.assert_close(policy.logp(action), logp)
    torch.testing.assert_close(policy.entropy(), sum(head.entropy() for head in heads))
    torch.testing.assert_close(policy.kl(ours(others)), kl)


def test_equals_rllibs_own_on_the_same_flat_logits():
    logits = random_logits(1)
    rllibs = TorchMultiCategorical([TorchCategorical(logits=part) for part in logits.split(SIZES, -1)])
    action = ours(logits).sample()
    torch.testing.assert_close(ours(logits).logp(action), rllibs.logp(action))
    torch.testing.assert_close(ours(logits).entropy(), rllibs.entropy())


def test_padding_has_no_probability_and_is_never_drawn():
    policy = ours(random_logits(0, (4000,), scale=0.1))
    sizes = torch.tensor(SIZES)
    padded = torch.arange(max(SIZES)) >= sizes[:, None]
    assert (policy.probs[:, padded] == 0).all()
    assert (policy.sample() < sizes).all()
    torch.testing.assert_close(policy.probs.sum(-1), torch.ones(4000, len(SIZES)))


def test_samples_follow_the_probabilities():
    logits = random_logits(0, (), scale=1.0).expand(20000, -1)
    torch.manual_seed(0)
    drawn = ours(logits).sample()[:, 0]
    shares = torch.bincount(drawn, minlength=SIZES[0]) / len(drawn)
    torch.testing.assert_close(shares, ours(logits).probs[0, 0], atol=0.02, rtol=0)


def test_given_noise_decides_the_sample():
    policy = ours(random_logits(0))
    noise = torch.from_numpy(np.random.default_rng(0).gumbel(size=policy.log_probs.shape))
    assert torch.equal(policy.sample(noise=noise), (policy.log_probs + noise).argmax(-1))


def test_extreme_logits_give_finite_gradients():
    logits = random_logits(0, scale=1e4).requires_grad_()
    policy = ours(logits)
    (policy.entropy() + policy.logp(policy.sample()) + policy.kl(ours(random_logits(1)))).sum().backward()
    assert logits.grad is not None
    assert logits.grad.isfinite().all()


def test_partial_class_knows_its_heads():
    partial = MultiCategorical.get_partial_dist_cls(index=padding_index(SIZES), heads=len(SIZES))
    logits = random_logits(0)
    assert torch.equal(partial.from_logits(logits).log_probs, ours(logits).log_probs)


def test_deterministic_form_picks_the_likeliest_choice():
    policy = ours(random_logits(0))
    assert torch.equal(policy.to_deterministic().sample(), policy.probs.argmax(-1))


def test_required_inputs_are_all_choices():
    assert MultiCategorical.required_input_dim(gymnasium.spaces.MultiDiscrete(SIZES)) == sum(SIZES)


def test_reparameterised_samples_are_refused():
    with pytest.raises(NotImplementedError):
        ours(random_logits(0)).rsample()
