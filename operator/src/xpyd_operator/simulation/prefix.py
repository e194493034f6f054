"""The prefix cache of one instance: which blocks of prompts it still has the KV of.

A trace tells prompts by the hashes of their blocks, each of which stands for the whole beginning up to its end. The least
recently used blocks go first, of one prompt the last ones first, as engines free them.
"""

from __future__ import annotations

from collections import OrderedDict

BLOCK = 512
"""Tokens of a block of a trace."""
Hashes = tuple[int, ...]


class PrefixCache:
    """Blocks, the least recently used first; ``capacity`` is in tokens."""

    __slots__ = ("_blocks", "_most")

    def __init__(self, capacity: int) -> None:
        self._most = capacity // BLOCK
        self._blocks: OrderedDict[int, None] = OrderedDict()

    def __len__(self) -> int:
        return len(self._blocks)

    def match(self, hashes: Hashes, prompt: int) -> int:
        """How many tokens of a prompt are there; never all of them, as the last one has to be computed."""
        count = 0
        blocks = self._blocks
        for each in hashes:
            if each not in blocks:
                break
            count += 1
        return min(count * BLOCK, prompt - 1)

    def insert(self, hashes: Hashes) -> None:
        """The KV of a prompt is there, or will be in a moment."""
        blocks = self._blocks
        for each in reversed(hashes[: self._most]):
            blocks[each] = None
            blocks.move_to_end(each)
        while len(blocks) > self._most:
            blocks.popitem(last=False)

    def clear(self) -> None:
        """Nothing is there any more."""
        self._blocks.clear()
