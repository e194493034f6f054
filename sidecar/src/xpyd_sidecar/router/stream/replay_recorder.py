"""Streams whose events are kept: those that can only be run again, and prefill's stream of one token.

Belongs here: reading them. Does not belong here: streams that go on from token ids (``token_recorder``).
"""

from __future__ import annotations

import msgspec

from xpyd_sidecar.router.relay.fast import CAREFUL
from xpyd_sidecar.router.stream.events import ABORT, EventStream, size_of
from xpyd_sidecar.router.stream.failures import Kind
from xpyd_sidecar.router.stream.position import FOLD_BYTES, Event, Position, split_prompt
from xpyd_sidecar.router.stream.token_recorder import NO_IDS, TOKEN_IDS, decode

_NO_CHOICES = b'"choices":[]'
"""Of an event that tells the usage."""


class KeptStream(EventStream):
    """A stream that can only be run again: its events are kept, and relayed as they are. Of one that cannot be run again
    only the usage is read.
    """

    __slots__ = ("_position",)
    _plain = False
    _simple = CAREFUL

    def __init__(self, position: Position, *, framed: bool) -> None:
        super().__init__(framed=framed)
        self._position = position
        self._clean = False  # the first event says the stream's id

    def feed(self, data: bytes) -> bytes:
        """What may be relayed of the bytes read."""
        if not self._clean or data.find(ABORT) >= 0:
            return self._feed_carefully(data)
        at, size = 0, len(data)
        position = self._position
        payloads: list[bytes] = []
        while at < size:
            start = data.find(b"\r\n", at + 1, at + 9) + 2
            end = start + size_of(data[at:start - 2]) if start > 2 else -1
            choices = data.find(b'"choices":', start, end) if end > 0 else -1
            if (choices < 0 or data.find(b"\n", start) != end - 2 or data[end - 2:end + 2] != b"\n\n\r\n"
                    or not data.startswith(b'data: {"id":', start) or data.startswith(_NO_CHOICES, choices)):
                rest = self._feed_carefully(data[at:])
                return (data[:at] if self._framed else b"".join(payloads)) + rest
            if position.lasts:
                position.pending.append(data[choices:end])
                position.pending_bytes += end - choices
            if not self._framed:
                payloads.append(data[start:end])
            at = end + 2
        if position.pending_bytes > FOLD_BYTES:
            position.fold()
        return data if self._framed else b"".join(payloads)

    def _seen(self, event: bytes) -> bytes:
        if event.startswith(b"data: {"):
            self._position.fold()
            try:
                self._position.note(decode(event[6:]))
            except (msgspec.DecodeError, UnicodeDecodeError) as error:
                self._fail(Kind.BROKEN, "the engine sent an event that cannot be read", str(error))
                return b""
        return event


class FirstToken(EventStream):
    """Prefill's own stream of one token: what of it a client may see is returned once, and left in ``events``."""

    __slots__ = ("_before", "events", "prompt")
    _plain = False
    _simple = CAREFUL

    def __init__(self, *, framed: bool) -> None:
        super().__init__(framed=framed)
        self._clean = False
        self._before: list[bytes] = []
        self.events: list[Event] = []
        """Noted by whoever relays them."""
        self.prompt = b""
        """Its token ids, as JSON without brackets."""

    def feed(self, data: bytes) -> bytes:
        """The token, when it is there and can be shown."""
        return self._feed_carefully(data)

    def _seen(self, event: bytes) -> bytes:
        if not event.startswith(b"data: {"):
            return b""
        prompt, event = split_prompt(event)
        self.prompt = self.prompt or prompt
        try:
            noted = decode(event[6:])
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            self._fail(Kind.BROKEN, "prefill sent an event that cannot be read", str(error))
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
