"""Which of the prefixes that routers name are in the engine's prefix cache. Pure; the cache's keys are an argument.

A router names a prefix by a key and by its share of the prompt (``contract.prefix_cuts``). With the prompt's length that is
a number of tokens, and with the hashes of its blocks the last full block of it: the prefix is held while that block is in
the cache, in every group of layers; of a group whose layers see a window, also the block in which the window begins.

    waiting   its request has not ended, and it is not in the cache      said neither to be held nor absent
    held      it is in the cache
    absent    it was held, or its request has ended, and it is not there

The engine's thread adds requests and takes their ends; another thread compares with the cache, which changes meanwhile:
one expression over the keys of two dictionaries, which Python does not interrupt.

Bounded: ``most`` prefixes, those that were named longest ago go first. A key is a guess by a share of tokens, ``MARGIN``
short of it, so that what is said to be held is.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Iterable, KeysView, Mapping, Sequence
from typing import Final

from xpyd_sidecar.contract.held_prefixes import MOST, HeldPrefixes
from xpyd_sidecar.contract.prefix_cuts import WHOLE, PromptCut
from xpyd_sidecar.kv.reach import CacheGroup

MARGIN: Final = 0.02
"""By how much a share of bytes may be wrong as a share of tokens: 1.9 % at most in a prompt of 12,000 tokens of text."""

BlockKey = Callable[[bytes, int], bytes]
"""``(hash of a block, vLLM's number of a group)`` → what the cache has the block under."""


def can_compare(groups: Iterable[CacheGroup], block_tokens: int) -> bool:
    """Whether prefixes can be judged by single blocks: no group has states, and all have blocks of ``block_tokens``."""
    return all(one.reach.over != "state" and one.tokens == block_tokens for one in groups)


class PrefixLedger:
    """Prefixes that routers have named to one engine (one DP rank of it)."""

    def __init__(self, groups: Mapping[int, CacheGroup], block_tokens: int, block_key: BlockKey, most: int = MOST) -> None:
        """``groups``: by vLLM's number; ``can_compare`` holds for them. ``block_tokens``: tokens of a block."""
        self._groups = [(number, 0 if one.reach.over == "all" else -(-one.reach.window // block_tokens))
                        for number, one in groups.items()]
        """Number, and of how many blocks before a cut the first must be there as well; 0: of none."""
        self._block_tokens, self._block_key, self._most = block_tokens, block_key, most
        self._lock = threading.Lock()
        self._prefixes: OrderedDict[int, frozenset[bytes]] = OrderedDict()
        """By key, the blocks that must be there; what was named last comes last."""
        self._blocks: dict[bytes, set[int]] = {}
        """By block, the keys of the prefixes that need it."""
        self._waiting: dict[str, tuple[int, ...]] = {}
        """By request that has not ended, keys of its prefixes."""
        self._there: set[bytes] = set()
        """Of the blocks, those that were in the cache when it was looked at last."""
        self._held: set[int] = set()
        self._absent: set[int] = set()

    def __len__(self) -> int:
        """Number of prefixes."""
        return len(self._prefixes)

    def add(self, request: str, cuts: Iterable[PromptCut], tokens: int, hashes: Sequence[bytes]) -> None:
        """A request of ``tokens`` tokens has come whose full blocks have these hashes."""
        named: dict[int, frozenset[bytes]] = {}
        for share, key in cuts:
            full = min(int(tokens * share * (1 - MARGIN)) // (WHOLE * self._block_tokens), len(hashes))
            if full > 0:
                named[key] = frozenset(self._needed(hashes, full))
        with self._lock:
            for key, needed in named.items():
                if self._prefixes.get(key) == needed:
                    self._prefixes.move_to_end(key)
                else:
                    self._remove(key)
                    self._prefixes[key] = needed
                    for block in needed:
                        self._blocks.setdefault(block, set()).add(key)
                    if needed <= self._there:
                        self._held.add(key)
                self._absent.discard(key)
            self._waiting[request] = tuple(named)
            while len(self._prefixes) > self._most:
                self._remove(next(iter(self._prefixes)))

    def end(self, request: str) -> None:
        """A request has ended: what is not in the cache by now will not come there by it."""
        with self._lock:
            for key in self._waiting.pop(request, ()):
                if key in self._prefixes and key not in self._held:
                    self._absent.add(key)

    def compare(self, cached: KeysView[bytes]) -> HeldPrefixes:
        """Which prefixes are held and which are absent, now that the cache has blocks under these keys."""
        with self._lock:
            there = cached & self._blocks.keys()
            changed = there ^ self._there
            self._there = there
            for block in changed:
                for key in self._blocks.get(block, ()):
                    if self._prefixes[key] <= there:
                        self._held.add(key)
                        self._absent.discard(key)
                    elif key in self._held:
                        self._held.remove(key)
                        self._absent.add(key)
            return HeldPrefixes(frozenset(self._held), frozenset(self._absent))

    def _needed(self, hashes: Sequence[bytes], full: int) -> Iterable[bytes]:
        for number, window in self._groups:
            yield self._block_key(hashes[full - 1], number)
            if window:
                yield self._block_key(hashes[max(0, full - window)], number)

    def _remove(self, key: int) -> None:
        for block in self._prefixes.pop(key, ()):
            keys = self._blocks[block]
            keys.discard(key)
            if not keys:
                del self._blocks[block]
                self._there.discard(block)
        self._held.discard(key)
        self._absent.discard(key)
