"""What is sent to a deployment: at random at a rate, as a trace has it, or by clients who wait for their answers."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from raysearch.base.errors import InputError
from raysearch.base.limits import check_rate
from sim.pools.traffic import Traffic
from sim.replay.arrivals import Stream, draw_arrivals
from sim.replay.requests import Lengths, Requests


@dataclass(frozen=True, slots=True)
class SentTraffic:
    """What is sent; exactly one of a rate, clients or a trace decides when.

    Attributes:
        prompts, answers: Lengths, where neither a trace nor a mix has them.
        count: Requests of a run, on average.
        requests_per_s: Mean rate of all replicas; of a trace, to which its times are stretched.
        cv: Coefficient of variation of the times between requests: 1 is a Poisson process, more comes in bursts.
        clients: Of all replicas, who send when they are answered, all from the start.
        cached_share: Share of each prompt that is cached already; not of a trace, whose blocks decide.
        trace: Recorded requests.
        mix: Requests of several lengths, each as often as its share; None of one length.
    """

    prompts: Lengths
    answers: Lengths
    count: int = 2000
    requests_per_s: float | None = None
    cv: float = 1.0
    clients: int | None = None
    cached_share: float = 0.0
    trace: Requests | None = None
    mix: Traffic | None = None

    def __post_init__(self) -> None:
        if self.clients is not None and (self.requests_per_s is not None or self.trace is not None):
            raise InputError(
                f"--concurrency={self.clients}: clients wait for their answers: give neither a rate nor a trace with it"
            )
        if self.clients is None and self.requests_per_s is None and self.trace is None:
            raise InputError("expected the traffic: --requests-per-s, --concurrency, or --set trace")
        if self.cv != 1.0 and (self.trace is not None or self.clients is not None):
            raise InputError(f"--set cv={self.cv:g}: only for requests that come at random, at a rate: leave it out")
        if self.trace is not None:
            for lengths in (self.prompts, self.answers):
                if lengths.least_share < 1 or lengths.cv:
                    name, value = ("length_cv", lengths.cv) if lengths.cv else ("spread", lengths.least_share)
                    raise InputError(f"--set {name}={value:g}: a trace has lengths of its own: leave it out")
            if self.cached_share:
                raise InputError(
                    f"--set cached={self.cached_share:g}: a trace's hashes say what is cached: leave it out"
                )
        check_rate(self.requests_per_s)
        if self.requests_per_s is not None and self.trace is not None and not self.trace.arrival_s[-1]:
            raise InputError(
                f"--requests-per-s={self.requests_per_s:g}: the trace's requests all come at once: no rate changes that"
            )

    @property
    def rate_per_s(self) -> float | None:
        """Mean rate of all replicas; None of clients, and of a trace whose requests all come at once."""
        if self.requests_per_s is not None or self.trace is None:
            return self.requests_per_s
        span_s = float(self.trace.arrival_s[-1])
        return (len(self.trace) - 1) / span_s if span_s else None

    @property
    def arrivals_text(self) -> str:
        """How requests come."""
        return "under random arrivals" if self.trace is None else "as in the trace"

    @property
    def mean_tokens(self) -> tuple[float, float]:
        """Of a prompt and of an answer."""
        if self.trace is None:
            mix = self.mix
            return (mix.prompt_tokens, mix.output_tokens) if mix else (self.prompts.mean, self.answers.mean)
        return float(self.trace.prompt_tokens.mean()), float(self.trace.output_tokens.mean())

    @property
    def cached(self) -> bool:
        """Whether prompts, or parts of them, may be cached."""
        return self.cached_share > 0 if self.trace is None else self.trace.blocks is not None

    def at(self, requests_per_s: float) -> SentTraffic:
        """The same requests at another rate: their lengths and the shape of their gaps stay."""
        return replace(self, requests_per_s=requests_per_s)

    def draw(self, seed: int) -> Requests:
        """The requests of a seed; of a trace they are the same for all."""
        if self.trace is not None:
            rate = self.rate_per_s
            recorded = replace(self, requests_per_s=None).rate_per_s
            stretched = recorded / rate if rate and recorded else 1.0
            return replace(self.trace, arrival_s=self.trace.arrival_s * stretched)
        if self.requests_per_s is None:
            times_s = np.zeros(self.count)
        else:
            stream = Stream(self.requests_per_s, self.cv)
            times_s = draw_arrivals([stream], self.count / self.requests_per_s, seed).times_s
        if self.mix:
            kinds = self.mix.kinds
            rng, shares = np.random.default_rng([seed, 1]), [kind.share for kind in kinds]
            lengths = np.array([(kind.prompt_tokens, kind.output_tokens) for kind in kinds], dtype=np.int64)
            prompts, answers = lengths[rng.choice(len(kinds), len(times_s), p=shares)].T
            return Requests(times_s, prompts, answers, cached_share=self.cached_share)
        return Requests.drawn(times_s, self.prompts, self.answers, seed, self.cached_share)
