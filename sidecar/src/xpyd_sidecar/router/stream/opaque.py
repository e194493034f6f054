"""An answer that passes through as it comes, whatever it is.

    engine ── chunks, or bytes of a known length ──▶ OpaqueAnswer ──▶ client, as they came
                                                          └─▶ Answer (``stream.answers``): lengths, first output, failure

An engine says 200 to a stream before it has a token, and some say that they are at work. So what comes of a stream in a
dialect before its first output waits for it, ``MAX_EARLY`` bytes at most: until then nothing is lost with an engine.
"""

from __future__ import annotations

from xpyd_sidecar.router.http.wire import Malformed, ResponseHead
from xpyd_sidecar.router.relay.fast import CAREFUL
from xpyd_sidecar.router.stream.answers import AnswerReader
from xpyd_sidecar.router.stream.events import EventStream

MAX_EARLY = 64 << 10
"""Bytes of an answer that wait for its first output."""


class OpaqueAnswer(EventStream):
    """The body of one answer, without any marker that would end it or fail it. ``ended``: it is whole.

    Errors of an engine, and bodies without length or chunks (which end with the connection), are not taken: they are
    collected whole.
    """

    __slots__ = ("_early", "_early_size", "_left", "_sized", "_waits", "_wanted", "answer")
    _simple = CAREFUL

    def __init__(self, *, framed: bool, wanted: bool, answer: AnswerReader | None) -> None:
        """``framed``: the client takes chunks. ``wanted``: it wants a body (no HEAD). ``answer``: if it generates."""
        super().__init__(framed=framed)
        self.answer = answer
        self._wanted = wanted
        self._sized = False
        self._left = 0
        self._waits = answer is not None
        self._early: list[bytes] = []
        self._early_size = 0

    def takes(self, head: ResponseHead) -> bool:
        """See the base class."""
        if head.status >= 400 or not self._wanted or head.length == 0 or not (head.chunked or head.length):
            return False
        self._sized, self._left = not head.chunked, head.length or 0
        return True

    def begins(self, out: bytes) -> bool:  # noqa: ARG002 (the base class's name)
        """Always: what looks like a comment may be anything here."""
        return True

    def feed(self, data: bytes) -> bytes:
        """What may be sent on: whole chunks, or bytes where the length is known or the client knows no chunks.

        Raises Malformed: the framing is broken.
        """
        if self._sized:
            if len(data) > self._left:
                raise Malformed("bytes after the end of the body")
            self._left -= len(data)
            body = out = data
            self.done = not self._left
        else:
            found = self._chunks.feed(data)
            body = b"".join([payload for _, payload in found])
            out = b"".join([chunk for chunk, _ in found]) if self._framed else body
            self.done = self._chunks.done
        self.ended = self.done
        return out if self.answer is None else self._read(self.answer, body, out)

    def _read(self, answer: AnswerReader, body: bytes, out: bytes) -> bytes:
        answer.take(body)
        if self.done:
            answer.end()
        if self._waits:
            self._early.append(out)
            self._early_size += len(out)
            self._waits = not (self.done or answer.begun) and self._early_size <= MAX_EARLY
            if self._waits:
                return b""
            out = b"".join(self._early)
            self._early.clear()
        return out
