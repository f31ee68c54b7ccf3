"""configs/pretraining/*.toml: which workloads a prior is trained on, and how."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, field_validator

from raysearch.base.file_io import counted

ShareOfAll = Annotated[float, Field(ge=0, le=1)]
Mixer = Literal["grouped", "latent", "window", "linear", "sparse"]


_LEAST_TABLES = 16


class _Table(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)


class Distribution(_Table):
    """[distribution]: what workloads are drawn from.

    Attributes:
        hardware: Measured machines whose rates and efficiencies are perturbed.
        measured_share: Of the workloads, those on one of them as it was measured; every other has a machine of its own.
        engines: Whose own time and memory policy are charged in phase serve.
        mixers: How often each kind of token mixer is drawn, as weights.
        serve_share, extended_share: Of the workloads, those in phase serve, and those in the extended space.
        rate_spread: A machine's published rates lie within factors of e to plus and minus this.
        efficiency_spread: Standard deviation of the log of the factor of a family of kernels or messages, on the
            machines that say how far a black box may be from what was trained on.
        measured_spread: The same on a machine that was measured.
    """

    hardware: tuple[str, ...] = ("h100_sxm",)
    measured_share: ShareOfAll = 0.3
    engines: tuple[str, ...] = ("vllm",)
    mixers: dict[Mixer, Annotated[float, Field(ge=0)]] = Field(
        default_factory=lambda: {"grouped": 6.0, "latent": 2.0, "window": 1.5, "linear": 0.5, "sparse": 0.5}
    )
    serve_share: ShareOfAll = 0.2
    extended_share: ShareOfAll = 0.35
    rate_spread: Annotated[float, Field(ge=0, le=2)] = 1.2
    efficiency_spread: Annotated[float, Field(ge=0, le=1)] = 0.25
    measured_spread: Annotated[float, Field(ge=0, le=1)] = 0.0

    def __hash__(self) -> int:
        return hash(self.model_dump_json())


class Network(_Table):
    """[network]: what learns, and for how long.

    Attributes:
        width: Of each of three layers.
        steps: Of gradient descent, on `batch` strategies each.
        learning_rate: The largest; it rises in the first steps and falls on a cosine.
        jitter: Standard deviation of what is added, in training, to inputs that all strategies of a workload share, in
            units of how much they vary between workloads.
    """

    width: Annotated[int, Field(ge=4, le=2048)] = 160
    steps: Annotated[int, Field(ge=1)] = 12000
    batch: Annotated[int, Field(ge=1)] = 1024
    learning_rate: Annotated[float, Field(gt=0, le=1)] = 2e-3
    jitter: Annotated[float, Field(ge=0, le=10)] = 0.3


_STRATEGY_S, _ROW_S, _TABLE_S, _STATE_S = 4.6e-4, 1.2e-5, 1.3, 2.5e-3
"""CPU seconds of a strategy, of a row that the network learns from, of a black box and of a state that the policy
learns from. [fitted] to the shipped files' pre-training, docs/evidence/learning.md."""


class PolicySettings(_Table):
    """[policy]: the policy that chooses calls, what it is trained on and for how long.

    Attributes:
        tables: Workloads whose strategies it learns to search, one in eight of which is kept to judge it by; 0 trains
            no policy.
        efficiency_spread, measured_spread: As of the distribution, of their machines.
        tight_share: Of the tables, those with a limit that hardly any strategy keeps.
        calls: Of a search.
        searches: Of each table, whose states it imitates the best choice in.
        width, depth: Of a token, and layers of attention.
        steps, batch, learning_rate: Of the imitation.
        iterations, calls_per_iteration, ppo_learning_rate, discount: Of PPO.
    """

    tables: Annotated[int, Field(ge=0, le=1_000_000)] = 0
    efficiency_spread: Annotated[float, Field(ge=0, le=1)] = 0.3
    measured_spread: Annotated[float, Field(ge=0, le=1)] = 0.08
    tight_share: ShareOfAll = 0.0
    calls: Annotated[int, Field(ge=2, le=128)] = 16
    searches: Annotated[int, Field(ge=1, le=1000)] = 4
    width: Annotated[int, Field(ge=8, le=1024, multiple_of=4)] = 64
    depth: Annotated[int, Field(ge=1, le=16)] = 2
    steps: Annotated[int, Field(ge=1)] = 800
    batch: Annotated[int, Field(ge=1)] = 64
    learning_rate: Annotated[float, Field(gt=0, le=1)] = 5e-4
    iterations: Annotated[int, Field(ge=0)] = 8
    calls_per_iteration: Annotated[int, Field(ge=2)] = 1024
    ppo_learning_rate: Annotated[float, Field(gt=0, le=1)] = 1e-4
    discount: Annotated[float, Field(ge=0, le=1)] = 0.9

    @field_validator("tables")
    @classmethod
    def _enough(cls, tables: int) -> int:
        if 0 < tables < _LEAST_TABLES:
            raise ValueError(f"expected 0, or at least {_LEAST_TABLES}: one in eight is kept, not all can be solved")
        return tables


class PretrainingFile(_Table):
    """A whole file.

    Attributes:
        seed: Of workloads, weights and their order.
        workloads: To draw; one in twenty is kept from training to see how far the network errs.
        strategies: Evaluated of each, about.
    """

    seed: Annotated[int, Field(ge=0)] = 0
    workloads: Annotated[int, Field(ge=20, le=1_000_000)]
    strategies: Annotated[int, Field(ge=40, le=100_000)] = 360
    distribution: Distribution = Distribution()
    network: Network = Network()
    policy: PolicySettings = PolicySettings()

    @property
    def work(self) -> str:
        """What is made of it, and about how long that takes, as a clause."""
        network, policy = self.network, self.policy
        seconds = self.workloads * self.strategies * _STRATEGY_S + network.steps * network.batch * _ROW_S
        made = f"{self.workloads:,} workloads of some {self.strategies} strategies, {network.steps:,} steps of training"
        if policy.tables:
            seconds += policy.tables * _TABLE_S + policy.steps * policy.batch * _STATE_S
            made += f"; {policy.tables:,} black boxes for the policy, {policy.steps:,} steps of imitation"
            made += f", {policy.iterations} iterations of PPO, whose time is not known" if policy.iterations else ""
        return f"{made}; about {counted(max(round(seconds / 60), 1), 'minute')} of a core"
