import numpy as np
import pytest

from raysearch.searchers.ppo.noise import call_rng, gumbel_noise


def test_noise_depends_on_seed_call_and_stream_alone():
    a = call_rng(3, 17).random(40)
    call_rng(4, 1).random(4)
    np.testing.assert_array_equal(a, call_rng(3, 17).random(40))
    for other in (call_rng(3, 18), call_rng(4, 17), call_rng(3, 17, stream=1)):
        assert not np.isin(other.random(40), a).any()


def test_noise_is_standard_gumbel():
    noise = gumbel_noise(call_rng(0, 0), (200_000,))
    assert noise.mean() == pytest.approx(np.euler_gamma, abs=0.01)
    assert noise.std() == pytest.approx(np.pi / np.sqrt(6), abs=0.01)
