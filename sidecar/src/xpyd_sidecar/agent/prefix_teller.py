"""What an agent tells one router of its engine's cache of prefixes: what has changed since the last beat. Pure.

    agent   ──beat n──▶ ──changes 7, 8──▶                 ──beat n + 1──▶ …
    router                ◀──ack of n: it has taken 6──     ◀──ack of n + 1: it has taken 8──

A router that has taken another number than it was told until then has lost some, or has begun anew: all is told anew, from
a message that says so. At most ``MOST_MESSAGES`` go with a beat; what is left goes with the next.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import islice
from typing import Final

from xpyd_sidecar.contract import held_prefixes
from xpyd_sidecar.contract.held_prefixes import HeldPrefixes
from xpyd_sidecar.contract.membership import MAX_PREFIXES, Heartbeat, PrefixChanges

MOST_MESSAGES: Final = 4
"""With one beat: 8,000 keys, which cost a router two milliseconds."""
MOST_BEATS: Final = 16
"""Beats whose acknowledgements are waited for."""


class PrefixTeller:
    """Remembers what one router has been told."""

    def __init__(self) -> None:
        self._takes = False
        """The router says that it takes such messages."""
        self._anew = True
        """All is to be told with the next message."""
        self._seq = 0
        """Of the last message."""
        self._seq_at: dict[int, int] = {}
        """What ``_seq`` was when a beat was sent, by the beat's."""
        self._held: set[int] = set()
        """Keys that the router was told to be held."""
        self._absent: set[int] = set()
        """That it was told to be absent, and are still."""
        self._finished: HeldPrefixes | None = None
        """What it was told all of: the same object again has nothing new."""

    def on_ack(self, beat_seq: int, taken_seq: int) -> None:
        """The router acknowledges a beat and says which message it has taken last; -1: it takes none."""
        self._takes = taken_seq >= 0
        told = self._seq_at.pop(beat_seq, None)
        self._anew |= told is not None and told != taken_seq

    def on_lost(self) -> None:
        """A message that ``changes`` returned could not be sent."""
        self._anew = True

    def changes(self, beat: Heartbeat, now: HeldPrefixes) -> list[PrefixChanges]:
        """What goes behind ``beat``, where ``now`` is what the engine's cache has."""
        self._seq_at[beat.seq] = self._seq
        while len(self._seq_at) > MOST_BEATS:
            del self._seq_at[next(iter(self._seq_at))]
        if not self._takes or not beat.incarnation:
            return []
        whole, self._anew = self._anew, False
        if now is self._finished and not whole:
            return []
        if whole:
            self._held, self._absent = set(), set()
            self._seq_at.clear()  # acknowledgements of beats before say nothing of it
        self._absent &= now.absent
        added, removed = now.held - self._held, (self._held - now.held) | (now.absent - self._absent)
        found = list(islice(self._messages(beat, added, removed, whole=whole), MOST_MESSAGES))
        self._finished = now if len(found) < MOST_MESSAGES else None
        return found

    def _messages(self, beat: Heartbeat, added: Iterable[int], removed: Iterable[int], *, whole: bool
                  ) -> Iterator[PrefixChanges]:
        added, removed = iter(added), iter(removed)
        while True:
            more, fewer = list(islice(added, MAX_PREFIXES)), list(islice(removed, MAX_PREFIXES))
            if not (more or fewer or whole):
                return
            self._seq += 1
            self._held.update(more)
            self._held.difference_update(fewer)
            self._absent.update(fewer)
            yield PrefixChanges(beat.v, beat.service, beat.instance, beat.agent, beat.incarnation, self._seq, whole,
                                held_prefixes.pack(more), held_prefixes.pack(fewer))
            whole = False
