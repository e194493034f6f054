"""How many of decode's blocks loads may hold: half of them, so that requests that generate have the other half.

A load holds its blocks for as long as prefill computes, and nothing else can use them. Those that find no room wait in the
scheduler's queue, where they hold none.

Laws
1. Loads together hold at most ``most`` blocks; one alone may hold more, since it would never find room.
2. Who waits is not overtaken for ever: room is kept for the first that waits, for as long as the scheduler asks for it.
3. What a load held is free again once, when it is over.
"""

from __future__ import annotations

from collections import OrderedDict


class LoadRoom:
    """Of one engine. A request is asked for in every step until its load begins."""

    def __init__(self, blocks: int) -> None:
        """``blocks`` of the cache; 0: unknown, and loads are not bounded."""
        self._most = blocks // 2 if blocks else 0
        self._held: dict[str, int] = {}
        self._waiting: OrderedDict[str, int] = OrderedDict()
        """By request, in the order of their first question: the blocks that they want."""
        self._asked: set[str] = set()
        """Of those that wait, in this step or the one before."""
        self._asked_now: set[str] = set()

    @property
    def held(self) -> int:
        """Blocks."""
        return sum(self._held.values())

    @property
    def waiting(self) -> int:
        """Requests."""
        return len(self._waiting)

    def may(self, request: str, blocks: int) -> bool:
        """Whether a load of so many blocks may begin now; if not, it waits."""
        if not self._most:
            return True
        self._asked_now.add(request)
        kept = 0
        for first, wanted in self._waiting.items():
            if first == request:
                break
            if first in self._asked or first in self._asked_now:
                kept = min(wanted, self._most)
                break
        held = self.held
        if held + kept + blocks <= self._most or not (held or kept):
            return True
        self._waiting[request] = blocks
        return False

    def took(self, request: str, blocks: int) -> None:
        """A load has begun."""
        self._waiting.pop(request, None)
        self._held[request] = blocks

    def over(self, request: str) -> None:
        """A load is over: its blocks are no load's any more."""
        self._held.pop(request, None)

    def left(self, request: str) -> None:
        """A request has ended, or does not wait for a load any more. What its load holds, it holds until that is over."""
        self._waiting.pop(request, None)

    def step(self) -> None:
        """A step was planned: who was not asked for in it, nor in the one before, is not waited for."""
        self._asked, self._asked_now = self._asked_now, set()
