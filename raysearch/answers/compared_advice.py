"""What another recommender says of the same deployment, by its figures and by ours."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING

from raysearch.base.file_io import degrees_text, strategy_dict
from raysearch.deploy.recommend.demand import Demand
from raysearch.deploy.recommend.recommendation_files import option_figures
from sim.json_object import JsonObject
from sim.simulate import evaluate
from sim.workload import Workload

if TYPE_CHECKING:
    from raysearch.simulators.aisimulate import Recommended


@dataclass(frozen=True, slots=True)
class ComparedAdvice:
    """What NVIDIA's AISimulate would run.

    Attributes:
        workload: What is served.
        theirs: Its answer; None where it finds nothing on one pool that meets the limits.
    """

    workload: Workload
    theirs: Recommended | None

    @classmethod
    def of(cls, demand: Demand) -> ComparedAdvice:
        """Asks it, which takes a minute or two. Raises: InputError: It is not installed, or cannot answer."""
        from raysearch.simulators.aisimulate import recommendation

        return cls(demand.workload, recommendation(demand.workload, demand.gpus))

    def to_dict(self) -> JsonObject | None:
        """Both figures, for JSON."""
        if self.theirs is None:
            return None
        ours = evaluate(self.workload, self.theirs.strategy)
        return {
            **asdict(self.theirs),
            "strategy": strategy_dict(self.theirs.strategy),
            "by_ours": option_figures(self.workload, ours),
            "violations_by_ours": [violation.message for violation in ours.violations],
        }

    def __str__(self) -> str:
        if (theirs := self.theirs) is None:
            return "AISimulate finds nothing on one pool that meets the limits."
        ours = evaluate(self.workload, theirs.strategy)
        broken = "".join(f"; by ours it breaks a limit: {each.message}" for each in ours.violations)
        return (
            f"AISimulate ({theirs.version}): {degrees_text(theirs.strategy)}; {theirs.tokens_per_s_per_gpu:,.1f} "
            f"tokens/s/GPU and {theirs.tpot_s * 1e3:.1f} ms per token by its figures, {ours.tokens_per_s_per_gpu:,.1f} "
            f"and {ours.tpot_s * 1e3:.1f} by ours{broken}"
        )
