"""Whether limits are kept with steps of every length under every seed, told from few replays."""

import numpy as np
import pytest

from raysearch.deploy.replay.step_errors import STEP_ERRORS, KeptLimits


@pytest.mark.parametrize("confidence", [0.02, 0.5, 0.87, 0.9, 0.99, 1.0])
def test_what_reaches_a_confidence_has_that_probability_and_each_replay_is_made_once(confidence: float) -> None:
    rng = np.random.default_rng(0)
    for _ in range(200):
        seeds = int(rng.integers(1, 7))
        centre = rng.uniform(-0.1, 1.1)
        longest = centre + rng.uniform(-0.15, 0.15, seeds)  # steps up to which each seed keeps the limits
        asked = list[tuple[float, int]]()

        def kept(sure: float, seed: int, longest: np.ndarray = longest, asked: list[tuple[float, int]] = asked) -> bool:
            asked.append((sure, seed))
            return bool(sure < longest[seed])

        known = KeptLimits(kept, seeds)
        probability = np.mean([[sure < each for each in longest] for sure in STEP_ERRORS])
        beyond = confidence <= STEP_ERRORS[-1] or bool((confidence < longest).all())
        assert known.reaches(confidence) == (probability >= confidence - 1e-9 and beyond)
        few = len(asked)
        assert sum(known.counts) == round(probability * seeds * len(STEP_ERRORS))
        assert len(asked) == len({*asked}) <= 6 * seeds
        assert few <= 4 * seeds


def test_what_misses_by_far_is_told_from_the_first_seed() -> None:
    asked = list[int]()
    known = KeptLimits(lambda _sure, seed: bool(asked.append(seed)), 5)
    assert not known.reaches(0.9)
    assert asked == [0, 0]


def test_a_heavier_load_tells_what_a_lighter_one_keeps() -> None:
    light, heavy = (KeptLimits(lambda sure, _seed, most=most: sure < most, 2) for most in (0.7, 0.4))
    assert heavy.counts == [2] * 4 + [0] * 6
    light.learn(heavy, heavier=True)
    assert light.by_first_seed(0.4)
    again = KeptLimits(lambda *_: pytest.fail("all is known"), 2)
    again.learn(heavy, heavier=True)
    again.learn(heavy, heavier=False)
    assert again.counts == heavy.counts
    assert light.counts == [2] * 7 + [0] * 3
