"""Blocks of prompts that stay cached: shared by those that begin alike, given up least recently used first."""

from __future__ import annotations

from collections import OrderedDict

from sim.replay.requests import Blocks


class PrefixCache:
    """The cached blocks of one attention rank.

    Blocks that a running request holds stay; the others do as long as there is room.

    Attributes:
        referenced_tokens: Of blocks that someone holds, each counted once.
    """

    def __init__(self, block_tokens: int) -> None:
        self.referenced_tokens = 0
        self._block_tokens = block_tokens
        self._holders: dict[int, int] = {}
        self._left: OrderedDict[int, None] = OrderedDict()  # that nobody holds, least recently used first

    @property
    def kept_tokens(self) -> int:
        """Of blocks that nobody holds."""
        return len(self._left) * self._block_tokens

    def known(self, blocks: Blocks) -> int:
        """How many of a prompt's first blocks are cached."""
        for count, block in enumerate(blocks):
            if block not in self._holders and block not in self._left:
                return count
        return len(blocks)

    def would_hold(self, blocks: Blocks) -> int:
        """Tokens by which `referenced_tokens` grows with a request of these blocks."""
        return sum(block not in self._holders for block in blocks) * self._block_tokens

    def hold(self, blocks: Blocks) -> None:
        """A request holds its prompt's blocks."""
        for block in blocks:
            count = self._holders.get(block, 0)
            self._holders[block] = count + 1
            if not count:
                self.referenced_tokens += self._block_tokens
                self._left.pop(block, None)

    def release(self, blocks: Blocks) -> None:
        """It holds them no longer; the last ones are the first to go."""
        for block in reversed(blocks):
            count = self._holders[block] - 1
            if count:
                self._holders[block] = count
            else:
                del self._holders[block]
                self.referenced_tokens -= self._block_tokens
                self._left[block] = None

    def shrink(self, most_kept_tokens: float) -> None:
        """Gives up blocks that nobody holds, until no more than so many tokens are kept."""
        while self._left and self.kept_tokens > most_kept_tokens:
            self._left.popitem(last=False)
