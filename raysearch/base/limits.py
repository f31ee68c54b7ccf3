"""Bounds beyond which nothing could ever run: what is larger is a slip, and is refused before anything begins."""

from __future__ import annotations

from raysearch.base.errors import InputError

LARGEST_BUDGET = 10**9
"""[assumed] 300 bytes and 0.2 ms a call make 300 GB and two days of the fastest searcher."""
LARGEST_SEED = 2**63 - 1
"""What tables and PyTorch take as an integer."""
MOST_WORKERS = 10_000
"""[assumed] Processes of one run; Ray is tested up to some 40,000 in a whole cluster."""
MOST_CPUS = 10_000
"""[assumed] More than any machine has."""
LONGEST_TIMEOUT_S = 30 * 86400.0
"""[assumed] Nobody waits for one strategy for more than a month; Ray's clocks end at some 10^9 s."""
MOST_RETRIES = 1000
"""[assumed] A call that fails more often always fails."""
MOST_GPUS = 10**9
"""[assumed] More than there are."""
LARGEST_RATE_PER_S = 1e9
"""[assumed] A request of everybody every ten seconds."""


def check_rate(requests_per_s: float | None) -> None:
    """Makes sure that requests may come as often, if it is known how often. Raises: InputError."""
    if requests_per_s is not None and not 1 / LARGEST_RATE_PER_S <= requests_per_s <= LARGEST_RATE_PER_S:
        raise InputError(
            f"--requests-per-s: expected a number above 0, from {1 / LARGEST_RATE_PER_S:g} to {LARGEST_RATE_PER_S:g}, "
            f"got {requests_per_s:g}"
        )
