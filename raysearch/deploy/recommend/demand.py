"""A question about a deployment, with the load that its replicas are to carry together."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from raysearch.base.errors import InputError
from raysearch.base.limits import check_rate
from raysearch.deploy.replay.sent_traffic import SentTraffic
from raysearch.deploy.replay.trace_files import recorded_per_s
from sim.config.fields import LARGEST_FIELD
from sim.config.question import Question
from sim.engines.engine_registry import engine_rules_of
from sim.evaluation import Evaluation
from sim.pools.best_pools import CHUNKS, chunked
from sim.pools.traffic import Traffic
from sim.replay.requests import Lengths, Requests
from sim.serving.confidence import slower
from sim.serving.phases import phase_of
from sim.workload import EVEN_ODDS, Workload, coarse_steps

FormName = Literal["aggregated", "disaggregated"]
"""Replicas that do both, or separate prefill and decode pools."""

Without = Literal["pp", "ep", "pp,ep"]
"""Degrees that are to stay 1: pipelines, expert parallelism."""

_MOST_COUNTED = 256
"""Replicas up to which the batch of requests at once is counted; of more, one less changes it by less. [assumed]"""


@dataclass(frozen=True)
class Demand:
    """A workload, the GPUs at hand and the load.

    Attributes:
        workload: What is served; its space is the engine's, its budget the GPUs.
        gpus: GPUs at hand.
        question: The workload's, for records; None where it was made otherwise.
        top: How many strategies to list.
        requests_per_s: Load to carry with the fewest GPUs, or None to fill all; the trace's own where one is given.
        concurrency: Requests at once to carry with the fewest GPUs, or None.
        cv: How bursty the load comes: coefficient of variation of the gaps, 1 for a Poisson process.
        percentile: Of the latencies that the limits are about under a load.
        confidence: Probability with which the limits are to hold: the workload's, unless it is given. Where requests
            queue it is kept by replays with longer steps, and latencies of the steady state count as predicted.
        requests: Of a replay under a load.
        trace: Recorded requests in place of random ones.
        mix: Several lengths of random ones, of which `workload` has what is like them all; None of one length.
        price_per_gpu_hour: What a GPU costs, or None.
        largest_replica: Most GPUs of a replica.
        only: The one form of deployment to look at; None for all.
        replays: Most strategies to replay beside the listed ones, to prove that none carries the load on fewer GPUs.
        chunks: Prompt tokens of a step to choose from, None for whole prompts; the workload's alone where it has some.
    """

    workload: Workload
    gpus: int
    question: Question | None = None
    top: int = 5
    requests_per_s: float | None = None
    concurrency: int | None = None
    price_per_gpu_hour: float | None = None
    cv: float = 1.0
    percentile: float = 99.0
    confidence: float = 0.0
    requests: int = 2000
    trace: Requests | None = None
    mix: Traffic | None = None
    largest_replica: float = math.inf
    only: FormName | None = None
    replays: int = 60
    chunks: Sequence[int | None] = CHUNKS

    def __post_init__(self) -> None:
        if self.trace is not None and self.concurrency is None:
            rate = recorded_per_s(self.trace) if self.requests_per_s is None else self.sent.rate_per_s
            object.__setattr__(self, "requests_per_s", rate)
        confidence = self.confidence or self.workload.confidence
        steady = EVEN_ODDS if self.under_traffic else confidence
        object.__setattr__(self, "confidence", confidence)
        if self.workload.confidence != steady:
            object.__setattr__(self, "workload", replace(self.workload, confidence=steady))
        if self.requests_per_s is not None and self.concurrency is not None:
            raise InputError("give --requests-per-s or --concurrency, not both")
        if self.trace is not None and self.concurrency is not None:
            raise InputError("--set trace: its requests come at times of their own: leave --concurrency out")
        if self.trace is not None and not phase_of(self.workload).mixes:
            raise InputError(f"--phase={self.workload.phase}: a trace can only be replayed in phase serve")
        if self.concurrency is not None and not 1 <= self.concurrency <= LARGEST_FIELD:
            raise InputError(f"--concurrency: expected a number from 1 to {LARGEST_FIELD:,}, got {self.concurrency}")
        check_rate(self.requests_per_s)
        if self.only == "disaggregated" and not self.chooses_form:
            raise InputError(
                "--set only=disaggregated: expected an engine that joins pools of prompts and answers, two GPUs, and "
                "phase serve: leave it out"
            )
        if self.price_per_gpu_hour is not None and not 0 <= self.price_per_gpu_hour < math.inf:
            raise InputError(f"--set price: expected a number from 0, got {self.price_per_gpu_hour:g}")

    @property
    def loaded(self) -> bool:
        """Whether it is asked how few GPUs carry a load."""
        return self.requests_per_s is not None or self.concurrency is not None

    @property
    def sent(self) -> SentTraffic:
        """What comes at a rate, or as the trace has it."""
        prompts, answers = (Lengths(each) for each in (self.workload.prompt_tokens, self.workload.output_tokens))
        load = self.requests_per_s, self.cv
        return SentTraffic(prompts, answers, self.requests, *load, trace=self.trace, mix=self.mix)

    @property
    def unlike(self) -> bool:
        """Whether requests have lengths of their own, or share prefixes: the steady state is no bound of these."""
        return self.trace is not None or self.mix is not None

    @property
    def under_traffic(self) -> bool:
        """Whether requests come at a rate, so that they queue."""
        return self.requests_per_s is not None and phase_of(self.workload).mixes

    @property
    def chooses_form(self) -> bool:
        """Whether prompts and answers may have pools of their own: of engines that send caches between them."""
        rules, workload = engine_rules_of(self.workload), self.workload
        joined = rules is not None and rules.disaggregates and phase_of(workload).mixes and workload.output_tokens > 1
        return joined and self.gpus > 1 and self.only != "aggregated"

    @property
    def sure(self) -> float:
        """Probability with which a strategy's latencies keep the limits in the steady state."""
        return self.workload.confidence

    @property
    def asked(self) -> Workload:
        """The workload with the confidence that was asked for."""
        return replace(self.workload, confidence=self.confidence)

    @property
    def guarded(self) -> bool:
        """Whether latencies are to stay below their limits by what that takes."""
        return slower(self.workload).guarded

    @property
    def at_even_odds(self) -> Demand:
        """The same demand of latencies as predicted, which are as often longer as shorter."""
        return replace(self, confidence=EVEN_ODDS)

    def guarded_as(self, pick: Evaluation) -> Demand:
        """The same demand of latencies as predicted, with limits shorter by what a strategy's confidence takes."""
        shares = {"tpot_slo_s": _share(pick.tpot_s, pick.tpot_at_s(self.sure))}
        shares |= {"ttft_slo_s": _share(pick.ttft_s, pick.ttft_at_s(self.sure))}
        limits = {name: share * getattr(self.workload, name) for name, share in shares.items()}
        return self.at_even_odds.under(**limits)

    @property
    def unloaded(self) -> Demand:
        """The same demand without its load: how to fill the GPUs at hand."""
        return replace(self, requests_per_s=None, concurrency=None, trace=None, mix=None)

    @property
    def in_chunks(self) -> list[Demand]:
        """The same demand with prompts whole, and in the chunks that may be chosen; alone where they may not be."""
        if not engine_rules_of(self.workload) or not phase_of(self.workload).mixes:
            return [self]
        return [replace(self, workload=each) for each in chunked(self.workload, self.chunks)]

    @property
    def ranked(self) -> Demand:
        """The demand by whose worth strategies are listed: of unlike requests the steady state is no bound."""
        return self.unloaded if self.unlike else self

    @property
    def over_few_batches(self) -> Demand:
        """The same over batches that are powers of two and half way between them; requests at once have theirs."""
        if self.concurrency is not None:
            return self
        degrees = self.workload.degrees
        few = tuple(batch for batch in coarse_steps(4096) if batch in degrees.batch)
        return self.under(degrees=replace(degrees, batch=few)) if few else self

    @property
    def over_batches_at_once(self) -> Demand:
        """The same over the batches that its requests at once make on a number of replicas, and few smaller ones."""
        degrees, most = self.workload.degrees, self.concurrency or 1
        counts = range(1, min(self.gpus, _MOST_COUNTED) + 1)
        parts = {math.ceil(most / (replicas * pp)) for replicas in counts for pp in degrees.pp}
        wanted = {each for each in {*parts, *coarse_steps(most)} if each <= degrees.batch[-1]}
        batches = sorted({degrees.batch[bisect_left(degrees.batch, each)] for each in wanted})
        return self.under(degrees=replace(degrees, batch=tuple(batches)))

    def under(self, **changes: Any) -> Demand:
        """The same demand of a workload with other fields."""
        return replace(self, workload=replace(self.workload, **changes))


def chunks_of(question: Question) -> Sequence[int | None]:
    """Prompt tokens of a step that may be chosen: whole prompts alone where the question asks for these."""
    return (None,) if question.chunk_tokens == 0 else CHUNKS


def check_traffic(cv: float, percentile: float, trace: object, *, loaded: bool) -> None:
    """Raises: InputError: How requests come, or a percentile, is given where they do not."""
    if (trace is not None or not loaded) and cv != 1.0:
        raise InputError(f"--set cv={cv:g}: only for requests that come at random: give --requests-per-s, and no trace")
    if not loaded and percentile != 99.0:
        raise InputError(
            f"--set percentile={percentile:g}: of requests that come at a rate: give --requests-per-s, or a trace"
        )


def _share(predicted_s: float, surely_s: float) -> float:
    return predicted_s / surely_s if surely_s else 1.0
