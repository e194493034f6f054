"""What the legs of one request ask their engines, and what reads decode's stream.

    Serving ──leg──▶ (request id, body), or later where the leg needs prefill's answer ──held──▶ (request id, body)
            ──stream──▶ what reads decode's answer, by what the client has of it (``position``)

Belongs here: which of the ways of asking a leg gets, and how that changes when a stream goes on elsewhere. Does not belong
here: bodies (``routing.bodies``), how a stream goes on (``routing.continuation``), calls and records (``serving``).
"""

from __future__ import annotations

from collections.abc import Iterable
from uuid import uuid4

from xpyd_sidecar.contract.ids import Role
from xpyd_sidecar.contract.launch import RouterConfig
from xpyd_sidecar.proxy.events import EventStream
from xpyd_sidecar.proxy.kept import FirstToken
from xpyd_sidecar.proxy.noted import NotedStream
from xpyd_sidecar.proxy.streams import spliced, stream_of
from xpyd_sidecar.routing import bodies, continuation
from xpyd_sidecar.routing import moves as mv
from xpyd_sidecar.routing.p2p import PairedById
from xpyd_sidecar.routing.pick import Target
from xpyd_sidecar.routing.position import Position
from xpyd_sidecar.routing.splice import Splicer


class Asking:
    """Of one request; also what its exchange wants to know of the client's stream (``exchange.Course``)."""

    __slots__ = ("_asked", "_going", "_paired", "_request", "position", "speaks")

    def __init__(self, request: bodies.Request, config: RouterConfig) -> None:
        self._request = request
        self._asked: bodies.Request | None = None
        self._going: continuation.Going | None = None
        self._paired = PairedById()
        """Legs to older engines."""
        self.position: Position | None = (continuation.position_of(request, goes_on=config.failover == "continue")
                                          if request.shape is None else request.shape.position())
        """What the client has of a stream that can go on elsewhere."""
        first = config.first_token
        self.speaks = first == "prefill" and continuation.speaks_first(request, self.position)
        """The client gets prefill's token."""

    @property
    def goes_on(self) -> bool:
        """Whether the client's stream can go on elsewhere."""
        return self.position is not None and self.position.goes_on

    def tail(self) -> bytes | None:
        """What is missing of the client's stream, where no engine is needed for it."""
        return None if self.position is None else self.position.tail()

    @property
    def _now(self) -> bodies.Request:
        """What legs ask now."""
        if self._asked is None:
            self._asked = continuation.first_request(self._request, self.position)
        return self._asked

    def leg(self, send: mv.Send, request_id: bytes, *, speaks: bool) -> tuple[bytes, bytes] | None:
        """The request id and the body of a leg; None: ``held`` has them, when ``prefilled`` was called.

        ``speaks``: prefill's token goes to the client.
        """
        params, target, shape = send.params, send.target, self._request.shape
        if target.p2p:
            if send.role is Role.DECODE:
                return None
            assert params is not None
            assert params.peer is not None
            body = self._paired.prefill(self._now, target, params.peer.control, uuid4().hex)
            return self._paired.request_id, body
        if params is not None and speaks:
            return request_id, bodies.first_token_body(self._now, params)
        if params is not None and shape is not None and self._going is None:
            return request_id, shape.body(params, self._request.slots)
        return request_id, bodies.body_of(self._now, send.role, params)

    def prefilled(self, body: bytes) -> None:
        """An older prefill engine has answered."""
        self._paired.answered(body)

    def held(self, target: Target) -> tuple[bytes, bytes]:
        """The request id and the body of the leg to an older decode engine."""
        return self._paired.request_id, self._paired.decode(self._now, target)

    def stream(self, *, framed: bool) -> EventStream:
        """What reads the stream of the next decode leg."""
        if self._going is None or self.position is None:
            if self.position is not None and self.position.id:  # of a leg that gave nothing to the client
                self.position = continuation.position_of(self._request, goes_on=True)
            return stream_of(self.position, framed=framed)
        return spliced(self.position, self._going, framed=framed)

    def refused(self) -> None:
        """An engine answered 4xx: where a stream goes on it does not take token ids."""
        if self._going is not None and self.position is not None:
            self.position.forgets = True

    def resume(self) -> tuple[str, int]:
        """The stream goes on elsewhere: in which way, and how many tokens the client has."""
        position = self.position
        assert position is not None, "a stream goes on that cannot"
        if self._paired.request_id:
            position.forgets = True  # an older engine knows nothing of ids in place of a prompt
        self._going = continuation.go_on(self._request, position)
        self._asked = self._going.request
        return ("continue" if self._going.keep else "replay"), position.tokens

    def spoken(self, token: FirstToken, streams: Iterable[EventStream | None]) -> None:
        """Prefill's token goes to the client: decode's stream goes on behind it."""
        position = self.position
        assert position is not None
        position.prompt = token.prompt
        for event in token.events:
            position.note(event)
        going = continuation.again(self._request, position)
        for stream in streams:
            if isinstance(stream, NotedStream):
                stream.splice(Splicer(position, going))
