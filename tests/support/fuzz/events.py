"""Events as they come (``_fast.c``) against Python's reader: what is scanned, learned, and relayed by a leg.

The two flags of an input that are its own say what becomes of the stream: noted, nothing, replayed; with both, it is noted
and goes from a leg to a client's outlet.
"""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any
from unittest.mock import patch

from fuzz import reads
from fuzz.reads import IDS, ONE, TWO, UNFRAMED, Given
from xpyd_sidecar.router.api.failover_modes import FailoverMode
from xpyd_sidecar.router.relay import fast, plain
from xpyd_sidecar.router.stream import token_recorder
from xpyd_sidecar.router.stream.events import EventStream
from xpyd_sidecar.router.stream.position import Position
from xpyd_sidecar.router.stream.replay_recorder import stream_of

MODULES = ("xpyd_sidecar.router.relay._fast",)
TOKENS = reads.TOKENS
seeds = reads.seeds
WAYS = {0: FailoverMode.CONTINUE, ONE: None, TWO: FailoverMode.REPLAY, ONE | TWO: FailoverMode.CONTINUE}


class Kept:
    """A transport that keeps what it is given."""

    def __init__(self) -> None:
        self.data = b""

    def write(self, data: bytes) -> None:
        """Keep it."""
        self.data += data


class Engine(fast.UpstreamReceiver):
    """A leg that leaves to its stream what no shortcut took."""

    def __init__(self, stream: EventStream, outlet: fast.Outlet) -> None:
        self.last_at = 0.0
        self._stream = stream
        self._outlet = outlet

    def on_bytes(self, data: bytes) -> None:
        """What a leg does with it in Python."""
        self._outlet.write(self._stream.feed(data))


def check(data: bytes) -> Hashable:
    """The same bytes to the client, the same log, the same end, whatever comes and however it is cut."""
    given = reads.given(data)
    learn(given)
    with patch.object(token_recorder, "take", plain.take):
        with patch.object(EventStream, "quick", lambda *_: None):
            expected, seen, _ = read(given, by_leg=False)
        found, seen_too, short = read(given, by_leg=given.flags & (ONE | TWO) == ONE | TWO)
    if "cannot be read" in expected[3] or any(one is not None and isinstance(one[-1], str) for one in (seen, seen_too)):
        return None  # events that are no JSON, but like others outside of their text: what is noted of it cannot be read
    assert (found, seen_too) == (expected, seen), f"by shortcuts {found, seen_too}, without {expected, seen}"
    return min(short, 3), expected[1:3], bool(expected[3])


def read(given: Given, *, by_leg: bool) -> tuple[tuple[Any, ...], tuple[Any, ...] | None, int]:
    """What the client gets and how the stream ends; what is known of it; reads that a shortcut took whole."""
    reads.forget()
    way = WAYS[given.flags & (ONE | TWO)]
    position = None if way is None else Position(given.api, way, asked_ids=bool(given.flags & IDS))
    stream = stream_of(position, framed=not given.flags & UNFRAMED)
    client, outlet = Kept(), fast.Outlet()
    outlet.open(client, -1)
    leg = Engine(stream, outlet)
    leg.relay(stream, outlet)
    short = 0
    for data in given.reads:
        if stream.failure or stream.done:
            break
        if by_leg:
            outlet.relayed = 0
            leg.data_received(data)
            short += outlet.relayed > 0
        else:
            some, end = stream.quick(data) or (b"", 0)
            short += end == len(data)
            outlet.write(some)
            if end < len(data):
                outlet.write(stream.feed(data[end:]))
    ends = client.data, stream.ended, stream.done, stream.failure, stream.kind
    return ends, None if position is None else reads.known(position), short


def learn(given: Given) -> None:
    """A scanner learns what there is to learn of an event that the router gives it: one that ``take`` found. Of any
    other it may learn anything, and reads nothing beyond it.
    """
    raw, chat = b"".join(given.reads), given.api == "chat"
    taken = fast.take(raw, chat, "", 0, bytearray())
    if taken is not None and taken[10] and taken[4]:
        at, to = taken[9:11]
        says, expected = reads.to_learn(given.api, raw[at:to], None)
        scanner = fast.Scanner()
        found = scanner.learn(raw, at, to, chat, bytearray())
        if says is not None:  # else it is guessed by streams before
            assert found
            assert tuple(getattr(scanner, name) for name in reads.LEARNED) == expected, raw[at:to]
    for start, end in ((len(raw) * n // 7, len(raw) * m // 7) for n in range(7) for m in (n + 1, 7)):
        fast.Scanner().learn(raw, start, end, chat, bytearray())
