"""Readers of event streams that record events: of answers that can only be replayed, and of prefill's one token.

A replay runs a request again from its start on another engine, and drops what the client has already
(``api.failover_modes``). Answers that can be continued from token ids are read by ``token_recorder``.
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
    """Reader of an answer that can only be replayed: relays its events unchanged, and records them in its ``Position``.

    Of an answer that cannot even be replayed (``Position.lasts`` is false) the usage is recorded, and no text.
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
    """Reader of prefill's own answer, which has one token. ``events``: its events that were read, up to that of the token.

    ``feed`` returns once what the client may see: the events of role and token, with ``finish_reason`` null. It returns
    nothing where decode must send the token instead: it has no text, or the answer ended by anything but its length.
    """

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
    """Return the reader of decode's answer to a request that has not been continued or replayed yet.

    ``position``: the recorder of what the client has; None: nothing is recorded. ``framed``: ``feed`` returns HTTP chunks.
    """
    if position is None:
        return EventStream(framed=framed)
    kind = NotedStream if position.way is FailoverMode.CONTINUE else KeptStream
    return kind(position, framed=framed)
