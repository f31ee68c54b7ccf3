"""A deployment under traffic."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

from raysearch.answers.evaluated import workload_dict
from raysearch.answers.result import Result
from raysearch.base.errors import InputError
from raysearch.base.file_io import png_of, record_bytes, strategy_dict, write_together
from raysearch.deploy.export.source import read_deployments, stated_question
from raysearch.deploy.replay.deployed_fleets import AggregatedFleet, DeployedFleet, DisaggregatedFleet
from raysearch.deploy.replay.engine_commands import engine_command
from raysearch.deploy.replay.replay_report import (
    METRICS,
    ReplayReport,
    ReplaySetup,
    replay_dict,
    replayed_traffic,
    usual_seeds,
)
from raysearch.deploy.replay.sent_traffic import SentTraffic
from raysearch.deploy.replay.trace_files import read_trace, trace_file, with_lengths_of
from sim.config.question import Question, load_question
from sim.json_object import JsonObject
from sim.layouts import layout_of
from sim.replay.drive import ROUTERS, RouterName
from sim.replay.replica import Deployed
from sim.replay.requests import Lengths, Requests
from sim.serving.phases import SERVE, phase_of
from sim.simulate import evaluate
from sim.strategy import Strategy
from sim.workload import Workload

if TYPE_CHECKING:
    from matplotlib.figure import Figure
    from rich.console import RenderableType

_log = logging.getLogger(__name__)
REPLAY_FILE = "replay.json"
_UNDER_TRAFFIC = ("tpot", "ttft", "hbm")
"""Limits that a replay itself finds kept or broken."""
MOST_REPLICAS = 1000
"""[assumed] As many as one router sees: for each request all of them are looked at."""


@dataclass(frozen=True)
class TrafficOptions:
    """What is sent, as options name it; see `raysearch.api.replay`."""

    requests_per_s: float | None = None
    concurrency: int | None = None
    trace: str | Path | None = None
    cv: float = 1.0
    spread: float = 1.0
    length_cv: float = 0.0
    cached: float = 0.0
    requests: int = 2000

    @cached_property
    def recorded(self) -> Requests | None:
        """The trace, once it is read. Raises: InputError: It cannot be read."""
        path = trace_file(self.trace)
        return None if path is None else read_trace(path, self.requests)

    def sent(self, workload: Workload) -> SentTraffic:
        """The traffic of a workload's lengths.

        Raises:
            InputError: None or several of a rate, clients and a trace are given, or options that contradict these, or
                the trace cannot be read.
        """
        if self.length_cv and self.spread < 1:
            raise InputError("lengths are log-normal or uniform: give --set length_cv or --set spread, not both")
        return SentTraffic(
            Lengths(workload.prompt_tokens, self.spread, self.length_cv),
            Lengths(workload.output_tokens, self.spread, self.length_cv),
            self.requests,
            self.requests_per_s,
            self.cv,
            self.concurrency,
            self.cached,
            self.recorded,
        )


@dataclass(frozen=True, repr=False)
class ReplayResult(Result):
    """What becomes of traffic on replicas of a strategy.

    Attributes:
        question: What was asked, here or in the folder that was replayed; None where nothing says it.
        report: Percentiles over seeds, the probability that the limits hold, and the load at which they break.
    """

    question: Question | None
    report: ReplayReport

    @classmethod
    def of(
        cls,
        question: Question | None,
        deployed: DeployedStrategies,
        traffic: TrafficOptions,
        *,
        replicas: int | None,
        router: str,
        percentile: float,
        seeds: int | None,
        progress: Callable[[str], None],
    ) -> ReplayResult:
        """Replays traffic; see `raysearch.api.replay`."""
        workload = deployed.workload
        if not phase_of(workload).mixes:
            raise InputError(f"--phase={workload.phase}: traffic can only be replayed in phase serve")
        sent = traffic.sent(workload)
        if sent.trace is not None and seeds not in (None, 1):
            raise InputError(f"--set seeds={seeds}: every run of a trace is the same: leave it out")
        runs = seeds or usual_seeds(sent)
        fleet = deployed.fleet(replicas, router)
        setup = ReplaySetup(workload, fleet, sent, percentile, runs, workload.confidence)
        return cls(deployed.question or question, replayed_traffic(setup, progress))

    @property
    def feasible(self) -> bool:
        """Whether the limits hold with the question's confidence, and all requests fit."""
        return self.report.met

    @property
    def probability(self) -> float | None:
        """That the limits hold; None without limits."""
        return self.report.probability

    def to_dict(self) -> JsonObject:
        """The answer as `raysearch replay --json` prints it."""
        setup = self.report.setup
        asked = workload_dict(setup.workload, self.question or Question())
        if self.question is None:
            del asked["question"]
        return {
            **asked,
            **_fleet_dict(setup),
            "feasible": self.feasible,
            **replay_dict(self.report),
        }

    def to_rows(self) -> list[JsonObject]:
        """A row per latency: its mean and percentiles in seconds."""
        report = self.report
        return [
            {
                "metric": metric,
                **{name: report.seconds_of(metric, name).value for name in report.runs[0].seconds[metric]},
            }
            for metric in METRICS
        ]

    def blocks(self) -> Iterator[RenderableType]:
        """What `raysearch replay` prints."""
        from raysearch.deploy.replay.replay_text import replay_blocks

        return replay_blocks(self.report)

    def figure(self) -> Figure:
        """Requests that run and wait over time, and the spread of the latencies."""
        from raysearch.deploy.replay.replay_text import replay_figure

        return replay_figure(self.report)

    def write(self, folder: str | Path) -> None:
        """Writes replay.json and replay.png."""
        from raysearch.processes.claim import check_folder

        check_folder(Path(folder), REPLAY_FILE)
        files = {REPLAY_FILE: record_bytes(self.to_dict()), "replay.png": png_of(self.figure())}
        write_together(Path(folder), files)


def _fleet_dict(setup: ReplaySetup) -> JsonObject:
    fleet, chunk_tokens = setup.fleet, setup.workload.chunk_tokens
    if isinstance(fleet, AggregatedFleet):
        strategy = fleet.strategy
        return {"strategy": strategy_dict(strategy), "layout": layout_of(strategy), "chunk_tokens": chunk_tokens}
    pools = fleet.pools
    return {
        name: {"strategy": strategy_dict(each.strategy), "layout": layout_of(each.strategy), "replicas": count}
        for name, each, count in (("prefill", pools.prefill, pools.prefills), ("decode", pools.decode, pools.decodes))
    }


@dataclass(frozen=True, slots=True)
class DeployedStrategies:
    """What is to be replayed.

    Attributes:
        workload: That all of it serves, with the limits.
        pools: By name: what each serves, its strategy, how many replicas; "" of a single one.
        capped: A single one's replica with caps of its own; None for those that exported commands have.
        question: That the source states; None where it states none.
    """

    workload: Workload
    pools: Mapping[str, tuple[Workload, Strategy, int]]
    capped: Deployed | None = None
    question: Question | None = None

    def fleet(self, replicas: int | None, router: str) -> DeployedFleet:
        """As a fleet, with so many replicas if a number is given.

        Raises:
            InputError: There is no such router, or too many replicas are asked for, or any of two pools.
        """
        names: dict[str, RouterName] = {name: name for name in ROUTERS}
        if router not in names:
            raise InputError(f"--set router: expected {', '.join(ROUTERS)}, got {router!r}")
        if "" not in self.pools:
            if replicas is not None or router != "least_loaded":
                raise InputError(
                    "two pools have replicas of their own and the router least_loaded: leave out --set replicas and "
                    "--set router"
                )
            return DisaggregatedFleet.of(self.pools["prefill"], self.pools["decode"])
        workload, strategy, copies = self.pools[""]
        if not 1 <= (copies := replicas or copies) <= MOST_REPLICAS:
            raise InputError(f"--set replicas: expected 1 to {MOST_REPLICAS:,}, got {copies:,}")
        return AggregatedFleet(self.capped or Deployed.of(workload, strategy), copies, names[router])


def deployed_in(
    path: Path, question: Question | None, alternative: int, recorded: Requests | None = None
) -> DeployedStrategies:
    """What an answer's folder or file says to run, or a file with a command that starts a server.

    Such a command is for requests as long as a trace's on average, where the question says no lengths.

    Raises:
        InputError: It holds none.
    """
    if command := engine_command(path):
        asked = command.asked(with_lengths_of(question or Question(), recorded))
        workload = load_question(asked)
        strategy, copies = command.strategy(workload)
        if command.unread:
            _log.warning("note: %s: not read: %s", path, ", ".join(command.unread))
        plain = deployed_strategy(workload, strategy)
        pools = {"": (workload, strategy, copies)}
        return replace(plain, pools=pools, capped=command.deployed(workload, strategy), question=asked)
    found = read_deployments(path, question, alternative, None)
    pools = {name: (each.workload, each.strategy, each.replicas) for name, each in found.items()}
    served = next(iter(found.values())).workload
    if "" not in found:
        served = replace(served, phase=SERVE.name, output_tokens=found["decode"].workload.output_tokens)
    return DeployedStrategies(served, pools, question=question or stated_question(path))


def deployed_strategy(workload: Workload, strategy: Strategy) -> DeployedStrategies:
    """One replica of a strategy.

    Raises:
        InputError: Nobody can run it, however slow or full it may be: see `evaluate`.
    """
    broken = [each for each in evaluate(workload, strategy).violations if each.kind not in _UNDER_TRAFFIC]
    if broken:
        raise InputError(f"cannot be replayed: {broken[0].message}")
    return DeployedStrategies(workload, {"": (workload, strategy, 1)})
