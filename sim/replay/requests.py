"""What is sent: when each request comes, how long its prompt and answer are, and what of the prompt may be cached."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from sim.arrays import Floats

Integers = NDArray[np.int64]
Blocks = tuple[int, ...]
"""Hashes of a prompt's blocks in order; two prompts begin alike as far as their hashes do."""


@dataclass(frozen=True, slots=True)
class Lengths:
    """Tokens of prompts or of answers: all equal, evenly spread, or log-normal.

    Attributes:
        tokens: The length; where they are evenly spread, the longest; where log-normal, the mean.
        least_share: Evenly spread from this share of the longest on; 1 for equal ones. InferenceX sends 0.8.
        cv: Coefficient of variation of log-normal ones; 0 for none.

    >>> Lengths(1000).draw(3, np.random.default_rng(0)).tolist()
    [1000, 1000, 1000]
    >>> Lengths(1000, least_share=0.8).mean
    900.0
    """

    tokens: int
    least_share: float = 1.0
    cv: float = 0.0

    def __post_init__(self) -> None:
        if self.tokens < 1 or not 0 < self.least_share <= 1 or not self.cv >= 0:
            raise ValueError(f"expected at least 1 token, a share in (0, 1] and a variation of at least 0, got {self}")
        if self.cv and self.least_share < 1:
            raise ValueError("expected lengths that are evenly spread or log-normal, got both")

    @property
    def mean(self) -> float:
        """Expected tokens."""
        return self.tokens * (1 + self.least_share) / 2

    def draw(self, count: int, rng: np.random.Generator) -> Integers:
        """[count] lengths, each at least 1."""
        if self.cv:
            spread = np.log1p(self.cv**2)
            drawn = self.tokens * np.exp(np.sqrt(spread) * rng.standard_normal(count) - spread / 2)
            return np.maximum(1, np.rint(drawn)).astype(np.int64)
        least = max(1, round(self.tokens * self.least_share))
        return rng.integers(least, self.tokens, count, endpoint=True)


@dataclass(frozen=True, slots=True, eq=False)
class Requests:
    """Requests in the order in which they come.

    Attributes:
        arrival_s: Ascending, [n]; of a closed loop, in which clients send when they are answered, all 0.
        prompt_tokens, output_tokens: At least 1, [n].
        blocks: Of each prompt, whose first tokens may be cached from earlier ones; None where nothing is known.
        block_tokens: Of a block.
        cached_share: Of each prompt, the share that is cached already where `blocks` is None, in [0, 1].
    """

    arrival_s: Floats
    prompt_tokens: Integers
    output_tokens: Integers
    blocks: Sequence[Blocks] | None = None
    block_tokens: int = 16
    cached_share: float = 0.0

    def __post_init__(self) -> None:
        count = len(self.arrival_s)
        if not count == len(self.prompt_tokens) == len(self.output_tokens):
            raise ValueError("expected as many arrivals as prompts and answers")
        if count and (np.diff(self.arrival_s) < 0).any():
            raise ValueError("expected requests in the order in which they come")
        if count and min(self.prompt_tokens.min(), self.output_tokens.min()) < 1:
            raise ValueError("expected prompts and answers of at least 1 token")
        if not 0 <= self.cached_share <= 1:
            raise ValueError(f"expected a cached share in [0, 1], got {self.cached_share}")

    def __len__(self) -> int:
        return len(self.arrival_s)

    @property
    def mean_tokens(self) -> tuple[int, int]:
        """Of a prompt and of an answer, rounded."""
        prompt, answer = (max(1, round(float(each.mean()))) for each in (self.prompt_tokens, self.output_tokens))
        return prompt, answer

    @property
    def longest(self) -> int:
        """Tokens of the longest one, prompt and answer."""
        return int((self.prompt_tokens + self.output_tokens).max())

    def of_rows(self, rows: Integers, arrival_s: Floats | None = None) -> Requests:
        """Some of them, at their own times or at others."""
        return replace(
            self,
            arrival_s=self.arrival_s[rows] if arrival_s is None else arrival_s,
            prompt_tokens=self.prompt_tokens[rows],
            output_tokens=self.output_tokens[rows],
            blocks=None if self.blocks is None else [self.blocks[row] for row in rows.tolist()],
        )

    @classmethod
    def drawn(
        cls, arrival_s: Floats, prompts: Lengths, answers: Lengths, seed: int, cached_share: float = 0.0
    ) -> Requests:
        """Requests at given times, their lengths drawn."""
        rng = np.random.default_rng([seed, 1])
        count = len(arrival_s)
        return cls(arrival_s, prompts.draw(count, rng), answers.draw(count, rng), cached_share=cached_share)
