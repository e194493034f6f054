"""What a rank notes of its transfers for ``xpyd trace``: a few marks and spans each, packed when the transfer has ended.

``TransferTrace`` belongs to one thread. Nothing grows: open transfers are at most ``OPEN_MOST`` (the oldest are
forgotten), and of one there are at most ``MOST`` spans, of which neighbours are merged where one more would come.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterable
from typing import Final, NamedTuple

import msgspec

from xpyd_sidecar.contract.timeline import First, Span, TransferSide
from xpyd_sidecar.kv.keys import Key, Recent

OPEN_MOST: Final = 1024
MOST: Final = 64


class Pieces:
    """Spans in the order in which they ended. Sizes and counts add up to what was added, the earliest beginning and the
    latest end stay.
    """

    def __init__(self) -> None:
        self._spans: list[Span] = []

    def __len__(self) -> int:
        return len(self._spans)

    def add(self, at: float, until: float, size: int, link: str = "") -> None:
        """Add the piece that took from ``at`` until ``until`` (monotonic seconds) and had ``size`` bytes."""
        if len(self._spans) == MOST:
            spans = self._spans
            self._spans = [_joined(one, other) for one, other in zip(spans[::2], spans[1::2], strict=True)]
        self._spans.append(Span(at, until, size, 1, link))

    def take(self) -> list[Span]:
        """The spans, in the order in which they ended."""
        return self._spans


def _joined(one: Span, other: Span) -> Span:
    link = one.link if other.link in {one.link, ""} else other.link if not one.link else "several"
    return Span(min(one.at, other.at), max(one.until, other.until), one.size + other.size, one.count + other.count, link)


class TransferNote(NamedTuple):
    """What a rank has noted of a transfer that has ended: its marks and pieces."""

    key: Key
    marks: dict[str, float]
    pieces: list[Span]


class TransferTrace:
    """Open transfers of one side of a rank."""

    def __init__(self) -> None:
        self._open: Recent[Key, tuple[dict[str, float], Pieces]] = Recent(OPEN_MOST)

    def mark(self, key: Key, name: str) -> None:
        """Something has happened now; the first time counts."""
        self._open.get_or_make(key, _nothing)[0].setdefault(name, time.monotonic())

    def piece(self, key: Key, at: float, until: float, size: int, link: str) -> None:
        """Note a piece of ``size`` bytes that moved from ``at`` until ``until``, in monotonic seconds."""
        self._open.get_or_make(key, _nothing)[1].add(at, until, size, link)

    def end(self, key: Key) -> TransferNote | None:
        """Forget a transfer. Returns what was noted of it; None where nothing was."""
        found = self._open.pop(key)
        return None if found is None else TransferNote(key, found[0], found[1].take())


class Forwards:
    """When forwards ran, and for which transfers; used on the engine's thread alone."""

    def __init__(self) -> None:
        self._began = 0.0
        self._last: deque[Span] = deque(maxlen=MOST)
        self._pushed: Recent[Key, Pieces] = Recent(OPEN_MOST)

    def begin(self) -> None:
        """Note that a step begins now."""
        self._began = time.monotonic()

    def end(self, tokens: int, pushes: Iterable[Key]) -> Span:
        """The forward of the step has ended. Returns its span; ``pushes``: transfers that push what it has made."""
        span = Span(self._began, time.monotonic(), tokens)
        self._last.append(span)
        for key in pushes:
            self._pushed.get_or_make(key, Pieces).add(span.at, span.until, tokens)
        return span

    def take_pushing_spans(self, key: Key) -> list[Span]:
        """Forget a transfer. Returns the forwards that made the blocks which it has pushed."""
        found = self._pushed.pop(key)
        return found.take() if found is not None else []

    def spans_since(self, at: float) -> list[Span]:
        """The last forwards that ended after ``at``, in monotonic seconds."""
        return [span for span in self._last if span.until > at]


def _nothing() -> tuple[dict[str, float], Pieces]:
    return {}, Pieces()


def pack_note(rank: int, noted: TransferNote, forwards: list[Span]) -> bytes:
    """A note as msgpack, as it goes to the scheduler side. ``forwards``: those that made what was pushed."""
    return msgspec.msgpack.encode(TransferSide(rank, noted.marks, noted.pieces, forwards, clock()))


def pack_first(forward: Span) -> bytes:
    """The first forward of a request as msgpack, as it goes to the scheduler side."""
    return msgspec.msgpack.encode(First(forward, clock()))


def clock() -> float:
    """Wall clock minus monotonic clock: how clocks of ranks on other hosts are told apart from those here."""
    return time.time() - time.monotonic()
