"""What users send: requests of several lengths, and the equal ones that stand for them.

A `Workload` serves equal requests. Those that stand for a mix do the same work in each phase: as many tokens and as
much attention. Decode steps are linear in the context, so its mean over time does. A prompt's attention grows with its
square, so prompts as long as the mean token's own prompt do, in a smaller number. Continuous batching keeps both the
mean context and the prompt tokens per output token.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, replace

from sim.serving.phases import phase_named, phase_of
from sim.workload import PhaseName, Workload


@dataclass(frozen=True, slots=True)
class TrafficKind:
    """Requests of one length.

    Attributes:
        prompt_tokens, output_tokens: Of each.
        share: Of all requests; shares need not add up to 1.
    """

    prompt_tokens: int
    output_tokens: int
    share: float = 1.0


@dataclass(frozen=True, slots=True)
class Traffic:
    """A mix of requests; the shares add up to 1.

    >>> Traffic.of([TrafficKind(1000, 100, 3), TrafficKind(5000, 100)]).prompt_tokens
    2000.0
    """

    kinds: tuple[TrafficKind, ...]

    @classmethod
    def of(cls, kinds: Iterable[TrafficKind]) -> Traffic:
        """A mix, its shares scaled to add up to 1.

        Raises:
            ValueError: No kind, or a length or share that is not above 0.
        """
        found = tuple(kinds)
        if not found:
            raise ValueError("expected at least one kind of request")
        for kind in found:
            if kind.prompt_tokens < 1 or kind.output_tokens < 1 or not 0 < kind.share < math.inf:
                raise ValueError(f"expected lengths of at least 1 token and a share above 0, got {kind}")
        total = math.fsum(kind.share for kind in found)
        return cls(tuple(replace(kind, share=kind.share / total) for kind in found))

    @property
    def prompt_tokens(self) -> float:
        """Of a request, on average."""
        return math.fsum(kind.share * kind.prompt_tokens for kind in self.kinds)

    @property
    def output_tokens(self) -> float:
        """Of a request, on average."""
        return math.fsum(kind.share * kind.output_tokens for kind in self.kinds)

    @property
    def context_tokens(self) -> int:
        """Cached tokens of a decoding sequence, on average over the time that it runs."""
        cached = math.fsum(
            kind.share * kind.output_tokens * (kind.prompt_tokens + kind.output_tokens / 2) for kind in self.kinds
        )
        return max(1, round(cached / self.output_tokens))

    @property
    def typical_prompt_tokens(self) -> int:
        """Length of the equal prompts that stand for all: that of the prompt in which an average token lies."""
        squares = math.fsum(kind.share * kind.prompt_tokens**2 for kind in self.kinds)
        return max(1, round(squares / self.prompt_tokens))


def workload_of(traffic: Traffic, workload: Workload, phase: PhaseName) -> Workload:
    """The workload with the equal requests that stand for the traffic in a phase, and no latency limits but serve's.

    Args:
        traffic: What is sent.
        workload: Model, hardware, engine and limits.
        phase: Of a prefill or decode pool, or "serve" for one pool.
    """
    kind = phase_named(phase)
    if not kind.decodes:
        whole = {"prompt_tokens": traffic.typical_prompt_tokens, "chunk_tokens": None}  # chunks gain nothing there
        return replace(workload, phase=phase, output_tokens=1, **whole)
    if not kind.prefills:
        return replace(workload, phase=phase, context_tokens=traffic.context_tokens, chunk_tokens=None)
    if len(traffic.kinds) == 1:
        prompt, output = traffic.kinds[0].prompt_tokens, traffic.kinds[0].output_tokens
    else:
        per_output = traffic.prompt_tokens / traffic.output_tokens
        output = max(1, round(traffic.context_tokens / (per_output + 0.5)))
        prompt = max(1, round(per_output * output))
    context = prompt + output // 2
    return replace(workload, phase=phase, prompt_tokens=prompt, output_tokens=output, context_tokens=context)


def requests_per_s(traffic: Traffic, workload: Workload, tokens_per_s: float) -> float:
    """Requests a second of a pool that yields so many tokens a second: those that its phase counts."""
    return tokens_per_s / phase_of(workload).counted_tokens(traffic.prompt_tokens, traffic.output_tokens)
