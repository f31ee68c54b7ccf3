"""Equal requests stand for a mix: they do the same work."""

from __future__ import annotations

from dataclasses import replace

import pytest

from sim.pools.traffic import Traffic, TrafficKind, requests_per_s, workload_of
from sim.workload import Workload

MIX = Traffic.of([TrafficKind(1000, 100, 3), TrafficKind(5000, 300, 1)])


def test_shares_are_scaled_and_means_are_weighted_by_them() -> None:
    assert [kind.share for kind in MIX.kinds] == [0.75, 0.25]
    assert (MIX.prompt_tokens, MIX.output_tokens) == (2000, 150)


def test_equal_prompts_have_as_many_tokens_and_as_much_attention() -> None:
    length = MIX.typical_prompt_tokens
    assert length == round((0.75 * 1000**2 + 0.25 * 5000**2) / 2000)
    count = MIX.prompt_tokens / length
    assert count * length**2 == pytest.approx(0.75 * 1000**2 + 0.25 * 5000**2)


def test_decoding_sequences_hold_the_mean_context_over_time() -> None:
    # 75 of 150 tokens are the short ones', at 1000 to 1100 of context, 75 the long ones', at 5000 to 5300.
    assert MIX.context_tokens == round((75 * 1050 + 75 * 5150) / 150)


def test_one_pools_requests_keep_context_and_prompt_tokens_per_output_token(toy_dense: Workload) -> None:
    served = workload_of(MIX, toy_dense, "serve")
    assert served.prompt_tokens / served.output_tokens == pytest.approx(2000 / 150, rel=0.01)
    assert served.prompt_tokens + served.output_tokens / 2 == pytest.approx(MIX.context_tokens, rel=0.01)


def test_requests_of_one_length_stand_for_themselves(toy_dense: Workload) -> None:
    alone = Traffic.of([TrafficKind(4000, 333, 0.2)])
    served = workload_of(alone, toy_dense, "serve")
    assert (served.prompt_tokens, served.output_tokens) == (4000, 333)
    assert workload_of(alone, toy_dense, "prefill").prompt_tokens == 4000
    assert workload_of(alone, toy_dense, "decode").context_tokens == round(4000 + 333 / 2)


def test_a_pool_yields_requests_by_its_own_tokens(toy_dense: Workload) -> None:
    assert requests_per_s(MIX, replace(toy_dense, phase="prefill"), 4000) == 2
    assert requests_per_s(MIX, replace(toy_dense, phase="decode"), 300) == 2


@pytest.mark.parametrize(
    "kinds", [[], [TrafficKind(0, 1)], [TrafficKind(1, 0)], [TrafficKind(1, 1, 0.0)], [TrafficKind(1, 1, float("inf"))]]
)
def test_traffic_that_nobody_can_send_is_refused(kinds: list[TrafficKind]) -> None:
    with pytest.raises(ValueError, match="expected"):
        Traffic.of(kinds)
