"""Models whose steps take what a test says, not what a step model does."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from sim.config.catalog import load_workload
from sim.prices.engine import SchedulerPolicy
from sim.replay.replica import Deployed
from sim.replay.scheduler import Scheduler
from sim.replay.step_prices import RankStep, StepPrices
from sim.strategy import Strategy


@dataclass(eq=False)
class StatedPrices(StepPrices):
    """Seconds of a step: so much for each prompt's token, or for a token of each of 1, 2, ... that decode.

    Attributes:
        prompt_s: Of a token of a prompt, through all stages.
        decode_s: Of a step, by how many decode.
    """

    prompt_s: float = 1.0
    decode_s: Sequence[float] = ()

    def step_s(self, busiest: RankStep, all_prompt_tokens: int | None = None) -> float:
        """As stated."""
        return self.prompt_s * busiest.prompt_tokens if busiest.prompt_tokens else self._decode_s(busiest.sequences)

    def decode_line(self, sequences: int, context_tokens: float) -> tuple[float, float, float]:
        """As stated, whatever the context."""
        return self._decode_s(sequences), 0.0, 1e9

    def engine_s(self, sequences: int) -> float:
        """Nothing."""
        return 0.0

    def _decode_s(self, sequences: int) -> float:
        return self.decode_s[sequences - 1] if self.decode_s else 0.0


def stated(prompt_s: float, stages: int = 1, decode_s: Sequence[float] = (), room_tokens: float = 1e9) -> Deployed:
    """A model that takes prompts of a token one by one, before those that decode."""
    prices = StatedPrices(_WORKLOAD, Strategy(1, 1, stages, 1, ()), prompt_s=prompt_s, decode_s=decode_s)
    policy = SchedulerPolicy(mixes=False, step_tokens=1, block_tokens=1)
    return Deployed(prices, Scheduler(policy, 10**6, reserves_output=True), room_tokens, 0.0)


_WORKLOAD = replace(load_workload("gpt_moe_1_2t_16k"), engine=None)
