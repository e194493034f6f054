"""Which stream reads what decode sends: by what is to become of it when its engine dies."""

from __future__ import annotations

from xpyd_sidecar.router.api.failover_modes import Way
from xpyd_sidecar.router.stream.continuation import Going
from xpyd_sidecar.router.stream.events import EventStream
from xpyd_sidecar.router.stream.position import Position
from xpyd_sidecar.router.stream.replay_recorder import KeptStream
from xpyd_sidecar.router.stream.splice import Splicer
from xpyd_sidecar.router.stream.token_recorder import NotedStream


def stream_of(position: Position | None, *, framed: bool) -> EventStream:
    """The first stream of a request."""
    if position is None:
        return EventStream(framed=framed)
    kind = NotedStream if position.way is Way.CONTINUE else KeptStream
    return kind(position, framed=framed)


def spliced(position: Position, going: Going, *, framed: bool) -> NotedStream:
    """A stream that goes on behind what the client has."""
    return NotedStream(position, Splicer(position, going), framed=framed)
