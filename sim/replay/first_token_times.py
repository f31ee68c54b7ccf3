"""What a measured first token takes beside the steps that a replay has: the request's way through client and server.

Benchmarks measure from sending to the first chunk. Beside queue and steps that holds connection, tokenising and
scheduling of the request, the steps after which an engine that overlaps its own work hands a token over, and of the
first requests to a server what it does but once.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from sim.prices.priced import Interval


@dataclass(frozen=True, slots=True)
class FirstTokenTimes:
    """Of an engine on a machine. [fitted] to serving runs.

    Attributes:
        factor: Measured over replayed time of queues and prompts.
        request_s: Of every request, beside.
        steps: The same in times per output token.
        burst_s: Of the first requests of a benchmark's clients, who all begin at once.
    """

    factor: float
    request_s: float
    steps: float
    burst_s: float

    def measured_s(self, replayed_s: float, token_s: float, *, bursts: float = 0.0) -> float:
        """A time to the first token as clients measure it.

        Args:
            replayed_s: Of a replay, or of the steady state.
            token_s: Time per output token.
            bursts: How much of `burst_s` is in the figure: 1 in a 99th percentile of clients who send ten requests
                each, a tenth in their mean, nothing in their median.
        """
        return self.factor * replayed_s + self.request_s + self.steps * token_s + bursts * self.burst_s


@dataclass(frozen=True, slots=True)
class FirstTokenError:
    """Times as they are measured, and how far measured ones lie from them.

    Attributes:
        times: See `FirstTokenTimes`.
        intervals: By figure ("p50", "mean", "p99" of a replay; "steady": a median against the steady state): factors
            between which nine of ten runs lie whose model the fit has not seen.
        because: What makes them unsure beyond that; "" for nothing.
    """

    times: FirstTokenTimes
    intervals: Mapping[str, Interval]
    because: str = ""

    def measured_s(
        self, figure: str, replayed_s: float, token_s: float, *, bursts: float = 0.0
    ) -> tuple[float, float, float]:
        """(expected, lowest, highest) seconds of a run in nine of ten cases; see `FirstTokenTimes.measured_s`."""
        expected_s = self.times.measured_s(replayed_s, token_s, bursts=bursts)
        low, high = self.intervals[figure]
        return expected_s, low * expected_s, high * expected_s
