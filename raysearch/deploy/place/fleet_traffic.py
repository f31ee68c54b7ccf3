"""What is sent to the models of a fleet: at random, or as a trace has it, all models together in one order."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from raysearch.base.errors import InputError
from raysearch.deploy.place.model_placement import Cluster, Tenant
from sim.arrays import Floats
from sim.replay.arrivals import draw_arrivals
from sim.replay.requests import Blocks, Integers, Requests


@dataclass(frozen=True, slots=True, eq=False)
class FleetRequests:
    """Requests of all models in one run.

    Attributes:
        requests: In the order in which they come.
        models: Whose each is, [n].
        horizon_s: Until when they arrive.
    """

    requests: Requests
    models: Integers
    horizon_s: float

    def __len__(self) -> int:
        return len(self.models)

    @property
    def times_s(self) -> Floats:
        """When each comes, [n]."""
        return self.requests.arrival_s


@dataclass(frozen=True, slots=True)
class SampledTraffic:
    """What requests are drawn.

    Attributes:
        requests: Mean number of a seed, of all models.
        seeds: Each an independent run.
    """

    requests: int
    seeds: tuple[int, ...]

    def draw(self, cluster: Cluster) -> list[FleetRequests]:
        """The requests of each seed."""
        streams = [tenant.stream for tenant in cluster.tenants]
        horizon_s = self.requests / sum(stream.requests_per_s for stream in streams)
        found: list[FleetRequests] = []
        for seed in self.seeds:
            drawn = draw_arrivals(streams, horizon_s, seed)
            parts = [
                _at_times(tenant, drawn.times_s[drawn.models == number])
                if tenant.recorded is None
                else _from_anywhere(tenant.recorded, tenant.stream.requests_per_s, horizon_s, [seed, number])
                for number, tenant in enumerate(cluster.tenants)
            ]
            found.append(_together(parts, horizon_s))
        return found


def _at_times(tenant: Tenant, times_s: Floats) -> Requests:
    asked, count = tenant.objective, len(times_s)
    return Requests(times_s, np.full(count, asked.prompt_tokens), np.full(count, asked.output_tokens))


_APART = 1 << 80
"""Added to the hashes of blocks when a trace restarts: the same prompts would be found in the cache."""


def _from_anywhere(recorded: Requests, rate_per_s: float, horizon_s: float, seed: Sequence[int]) -> Requests:
    """A trace at a mean rate, begun at a random place; it is a circle, and may go round more than once."""
    count = len(recorded)
    period_s = count / rate_per_s
    times_s = recorded.arrival_s * ((count - 1) / rate_per_s / recorded.arrival_s[-1])
    after_s = (times_s - np.random.default_rng(seed).random() * period_s) % period_s
    order = np.argsort(after_s, kind="stable")
    rounds = int(np.ceil(horizon_s / period_s))
    rows, laps = np.tile(order, rounds), np.repeat(np.arange(rounds), count)
    sent_s: Floats = after_s[rows] + laps * period_s
    comes = sent_s < horizon_s
    sent = recorded.of_rows(rows[comes], sent_s[comes])
    if sent.blocks is None:
        return sent
    added = [_APART * lap for lap in laps[comes].tolist()]
    blocks = [tuple(block + apart for block in each) for each, apart in zip(sent.blocks, added, strict=True)]
    return replace(sent, blocks=blocks)


def _together(parts: Sequence[Requests], horizon_s: float) -> FleetRequests:
    """Requests of each model in the order in which they come.

    Raises:
        InputError: Traces with blocks of several sizes.
    """
    times_s = np.concatenate([part.arrival_s for part in parts])
    order = np.argsort(times_s, kind="stable")
    models = np.repeat(np.arange(len(parts)), [len(part) for part in parts])[order]
    prompts, answers = (
        np.concatenate(each)[order]
        for each in ([part.prompt_tokens for part in parts], [part.output_tokens for part in parts])
    )
    sizes = {part.block_tokens for part in parts if part.blocks is not None}
    if len(sizes) > 1:
        raise InputError(f"expected traces whose blocks are equally long, got {' and '.join(map(str, sorted(sizes)))}")
    if not sizes:
        return FleetRequests(Requests(times_s[order], prompts, answers), models, horizon_s)
    every: list[Blocks] = []
    for part in parts:
        every += [()] * len(part) if part.blocks is None else part.blocks
    requests = Requests(times_s[order], prompts, answers, [every[at] for at in order.tolist()], sizes.pop())
    return FleetRequests(requests, models, horizon_s)
