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


class LoadAdmission:
    """Limits how many KV blocks of one decode engine loads may hold at a time.

    The scheduler asks ``may_begin`` for a request in every step until its load begins.
    """

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
    def held_blocks(self) -> int:
        """Number of blocks that loads hold."""
        return sum(self._held.values())

    @property
    def waiting_requests(self) -> int:
        """Number of requests that wait for blocks."""
        return len(self._waiting)

    def may_begin(self, request: str, blocks: int) -> bool:
        """Whether a load of ``blocks`` blocks may begin now; if not, the request waits in the queue."""
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
        held = self.held_blocks
        if held + kept + blocks <= self._most or not (held or kept):
            return True
        self._waiting[request] = blocks
        return False

    def on_load_begun(self, request: str, blocks: int) -> None:
        """A load of ``blocks`` blocks has begun: the request holds them and waits no longer."""
        self._waiting.pop(request, None)
        self._held[request] = blocks

    def on_load_over(self, request: str) -> None:
        """The load of a request has ended, well or badly: its blocks are free for other loads."""
        self._held.pop(request, None)

    def on_request_left(self, request: str) -> None:
        """A request does not wait for a load any more. Blocks that its load holds stay held until ``on_load_over``."""
        self._waiting.pop(request, None)

    def on_step(self) -> None:
        """The scheduler has planned a step: a request not asked for in it, nor in the one before, reserves no blocks."""
        self._asked, self._asked_now = self._asked_now, set()
