"""Side segments: where the parts of messages lie that are larger than a chunk.

The writer keeps at most ``LANES`` of them and uses them again and again, so that their pages are there already; one is free
again when every live reader has given back the message that lay in it. One that is too small is replaced. So a queue's
memory is bounded by the ring and ``LANES`` times its largest message.
"""

from __future__ import annotations

from typing import Final

from xpyd_sidecar.broadcast import wire
from xpyd_sidecar.broadcast.layout import PAGE
from xpyd_sidecar.broadcast.local import Door
from xpyd_sidecar.broadcast.segment import Segment
from xpyd_sidecar.errors import PeerGone

LANES: Final = 2


class Lane:
    """One side segment. ``number`` names it and is never used again; ``used_by`` is the last message in it."""

    def __init__(self, number: int, segment: Segment) -> None:
        self.number = number
        self.segment = segment
        self.used_by = 0


class Sides:
    """The writer's side segments."""

    def __init__(self, queue: str, door: Door) -> None:
        self._queue = queue
        self._door = door
        self._lanes: list[Lane] = []
        self._made = 0

    def awaited(self) -> int:
        """The message that must be given back before the next one can be placed; 0 where none must."""
        return min(lane.used_by for lane in self._lanes) if len(self._lanes) == LANES else 0

    def place(self, number: int, size: int) -> tuple[Lane, dict[str, str]]:
        """A lane of at least ``size`` bytes for message ``number``, known to every reader; and the readers found gone.

        Raises:
            OSError: no descriptor or no memory is left; nothing has changed.
        """
        old = min(self._lanes, key=lambda lane: lane.used_by) if len(self._lanes) == LANES else None
        gone: dict[str, str] = {}
        if old is None or old.segment.size < size:
            lane = Lane(self._made + 1, Segment.create(f"xpyd-{self._queue}-side", -(-size // PAGE) * PAGE))
            self._made += 1
            if old is not None:
                self._lanes.remove(old)
                old.segment.close()
            self._lanes.append(lane)
            for name, link in self._door.links.items():
                try:
                    link.send(wire.SideSegment(lane.number, old.number if old is not None else 0), lane.segment.fd)
                except PeerGone as error:
                    gone[name] = error.reason
        else:
            lane = old
        lane.used_by = number
        return lane, gone

    def close(self) -> None:
        """Let go of all of them."""
        for lane in self._lanes:
            lane.segment.close()
        self._lanes.clear()
