"""Streams whose events are kept: those that can only be run again, and prefill's stream of one token.

Which stream reads what decode sends depends on what is to become of it when its engine dies (``stream_of``).
"""

from __future__ import annotations

from xpyd_sidecar.router.api.failover_modes import FailoverMode
from xpyd_sidecar.router.relay.fast import CAREFUL
from xpyd_sidecar.router.stream.events import EventStream
from xpyd_sidecar.router.stream.position import FOLD_BYTES, Position, StreamEvent, split_prompt
from xpyd_sidecar.router.stream.token_recorder import NO_IDS, TOKEN_IDS, NotedStream, ReadStream

_NO_CHOICES = b'"choices":[]'
"""Of an event that tells the usage."""


class KeptStream(ReadStream):
    """A stream that can only be run again: its events are kept, and relayed as they are. Of one that cannot be run again
    only the usage is read.
    """

    __slots__ = ("_position",)
    _simple = CAREFUL

    def __init__(self, position: Position, *, framed: bool) -> None:
        super().__init__(framed=framed)
        self._position = position
        self._clean = False  # the first event says the stream's id

    def _event(self, event: bytes) -> bytes:
        position, choices = self._position, event.find(b'"choices":')
        if choices < 0 or not event.startswith(b'data: {"id":') or event.startswith(_NO_CHOICES, choices):
            return self._seen(event)
        if position.lasts:
            position.pending.append(event[choices:])
            position.pending_bytes += len(event) - choices
            if position.pending_bytes > FOLD_BYTES:
                position.fold()
        return event

    def _seen(self, event: bytes) -> bytes:
        if event.startswith(b"data: {"):
            self._position.fold()
            noted = self._read(event)
            if noted is None:
                return b""
            self._position.note(noted)
        return event


class FirstToken(ReadStream):
    """Prefill's own stream of one token: what of it a client may see is returned once, and left in ``events``."""

    __slots__ = ("_before", "events", "prompt")
    _simple = CAREFUL

    def __init__(self, *, framed: bool) -> None:
        super().__init__(framed=framed)
        self._clean = False
        self._before: list[bytes] = []
        self.events: list[StreamEvent] = []
        """Noted by whoever relays them."""
        self.prompt = b""
        """Its token ids, as JSON without brackets."""

    def _feed_end(self, data: bytes) -> bytes:
        return self._feed_carefully(data)  # its [DONE] is not the client's

    def _seen(self, event: bytes) -> bytes:
        if not event.startswith(b"data: {"):
            return b""
        prompt, event = split_prompt(event)
        self.prompt = self.prompt or prompt
        noted = self._read(event)
        if noted is None:
            return b""
        choice = noted.choices[0] if len(noted.choices) == 1 else None
        if choice is None or (self.events and self.events[-1].choices[0].token_ids):
            return b""
        self.events.append(noted)
        shown = TOKEN_IDS.sub(NO_IDS, event)
        if choice.delta is not None and choice.delta.role:
            self._before.append(shown)
            return b""
        content = choice.text if choice.delta is None else choice.delta.content
        # It is finished by its length alone; with any other reason, or another channel, decode says it.
        if not content or len(choice.token_ids or ()) != 1 or choice.finish_reason != "length":
            return b""
        choice.finish_reason = None
        return b"".join([*self._before, shown.replace(b'"finish_reason":"length"', b'"finish_reason":null', 1)])


def stream_of(position: Position | None, *, framed: bool) -> EventStream:
    """The first stream of a request."""
    if position is None:
        return EventStream(framed=framed)
    kind = NotedStream if position.way is FailoverMode.CONTINUE else KeptStream
    return kind(position, framed=framed)
