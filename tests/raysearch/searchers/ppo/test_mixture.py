import itertools
import math

import numpy as np
import pytest
import torch

from raysearch.searchers.ppo.distribution import padding_index
from raysearch.searchers.ppo.mixture import CopyMixture

SIZES = [2, 3, 1]
ALL = torch.tensor(list(itertools.product(*map(range, SIZES))))


@pytest.fixture
def mixture() -> CopyMixture:
    logits = torch.randn(2, 1 + sum(SIZES), generator=torch.Generator().manual_seed(0))
    return CopyMixture.from_logits(logits, index=padding_index(SIZES), heads=len(SIZES))


def test_probabilities_sum_to_one_and_are_those_of_the_components(mixture: CopyMixture) -> None:
    probabilities = torch.stack([mixture.logp(action).exp() for action in ALL])
    assert probabilities.sum().item() == pytest.approx(1.0)
    weights = mixture.log_weights.exp()
    for action, probability in zip(ALL, probabilities, strict=True):
        each = [math.prod(mixture.components.probs[c, h, a].item() for h, a in enumerate(action)) for c in (0, 1)]
        assert probability.item() == pytest.approx(weights[0].item() * each[0] + weights[1].item() * each[1])


def test_samples_follow_the_probabilities(mixture: CopyMixture) -> None:
    torch.manual_seed(0)
    batch = CopyMixture(
        mixture.log_weights.expand(20_000, -1),
        type(mixture.components)(mixture.components.log_probs.expand(20_000, -1, -1, -1)),
    )
    drawn = batch.sample()
    for action in ALL:
        share = (drawn == action).all(-1).float().mean().item()
        assert share == pytest.approx(mixture.logp(action).exp().item(), abs=4 * 0.5 / np.sqrt(20_000))


def test_the_deterministic_choice_is_the_likeliest_of_the_likeliest_component(mixture: CopyMixture) -> None:
    best = mixture.components.log_probs[mixture.log_weights.argmax()].argmax(-1)
    torch.testing.assert_close(mixture.to_deterministic().sample(), best)
