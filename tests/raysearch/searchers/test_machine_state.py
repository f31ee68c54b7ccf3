import numpy as np
import pytest
import torch

from raysearch.searchers.machine_state import check_moments, checked_mersenne


def test_moments_of_another_shape_than_their_weights_are_refused() -> None:
    weight = torch.nn.Parameter(torch.zeros(100_000))
    optimizer = torch.optim.Adam([weight], fused=True)
    check_moments(optimizer)
    weight.grad = torch.ones_like(weight)
    optimizer.step()
    check_moments(optimizer)
    for name, forged in (("exp_avg", torch.zeros(0)), ("exp_avg_sq", torch.zeros(1)), ("step", torch.zeros(2))):
        state = optimizer.state_dict()
        state["state"] = {0: {**state["state"][0], name: forged}}
        other = torch.optim.Adam([weight], fused=True)
        other.load_state_dict(state)
        with pytest.raises(ValueError, match=f"expected {name} of shape"):
            check_moments(other)


@pytest.mark.parametrize("position", [-1, 625, 10**9])
def test_a_twister_that_would_read_beside_its_key_is_refused(position: int) -> None:
    twister = np.random.RandomState(0)
    kind, key, *rest = twister.get_state()
    twister.set_state(checked_mersenne((kind, key, *rest)))
    with pytest.raises(ValueError, match="expected a position of 0 to 624"):
        checked_mersenne((kind, key, position, *rest[1:]))
    state = twister.get_state(legacy=False)
    state["state"]["pos"] = position
    with pytest.raises(ValueError, match="expected a position"):
        checked_mersenne(state)
