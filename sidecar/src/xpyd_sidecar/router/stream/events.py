r"""Event streams on their way from decode to a client, relayed as the engine framed them.

A relayed stream stays as the engine framed it. Usually a read is whole chunks of one event each, which costs a few
searches a chunk and no copy; everything else takes the careful way:

    read      1a3\r\n data: {…}\n\n \r\n         chunks of one event each: relayed as they are
              chunk | chunk | half a chunk       whole chunks up to the last whole event; the rest is held
              … "finish_reason":"abort" …        what comes before it; then the stream has failed
              … data: {"error": … (5xx) …        likewise
              … data: [DONE]\n\n …               relayed, and the stream has ended
              : keep-alive\n\n                  a comment: relayed, and says nothing (``only_comments``)

Markers cannot be forged by generated text: inside a JSON string quotes and line ends are escaped, so ``"abort"`` with
bare quotes and ``data:`` at a line's start are the engine's own. Only whole events are ever relayed, so that an error
event can be put behind them at any time.
"""

from __future__ import annotations

import msgspec

from xpyd_sidecar.router.api.faults import FailureKind, FailureReason
from xpyd_sidecar.router.http.wire import Chunks, MalformedMessage, ResponseHead, chunk_of
from xpyd_sidecar.router.relay.fast import PLAIN, Scanner

MAX_EVENT = 32 << 20
ABORT = b'"finish_reason":"abort"'
ERROR = b'data: {"error"'
DONE = b"data: [DONE]"
DONE_CHUNK = b"e\r\ndata: [DONE]\n\n\r\n"
_LAST_CHUNK = b"0\r\n\r\n"
END = DONE_CHUNK + _LAST_CHUNK
_HEX = b"0123456789abcdefABCDEF"
_NONE = FailureReason("")


class EventStream(Scanner):
    """A chunked event stream on its way to a client.

    ``feed`` returns what may be sent on: chunks as they came (``framed``), or their payload for clients that know no
    chunks. ``ended``: [DONE] came. ``failure``: the engine gave up, and why (``kind``, ``reason``); nothing is returned
    from then on. ``client_fault``: the engine said that the request is wrong. ``done``: the HTTP body is over. The last
    chunk is never returned: whoever ends the answer writes it. What ``quick`` took is never fed.
    """

    __slots__ = ("_chunks", "_held", "_open", "client_fault", "done", "ended", "failure", "kind", "reason")
    _simple = PLAIN

    def __init__(self, *, framed: bool) -> None:
        self._framed = framed
        self._way = self._simple
        self._chunks: Chunks | None = None
        """Made where a read is not whole chunks of one event each."""
        self._held: list[bytes] = []
        self._open = b""
        self._clean = True
        """Nothing is held, neither part of a chunk nor of an event."""
        self.done = False
        self.ended = self.client_fault = False
        self.failure = ""
        self.reason = _NONE
        self.kind = FailureKind.ABORTED

    def takes(self, head: ResponseHead) -> bool:
        """Whether it reads the answer with this head; one that it does not is collected whole. Raises MalformedMessage."""
        if head.status != 200 or not head.is_event_stream:
            return False
        if not head.chunked:
            raise MalformedMessage("an event stream that is not chunked")
        return True

    def begins(self, out: bytes) -> bool:
        """Whether an answer begins with what ``feed`` gave: comments alone say only that an engine is at work."""
        at = out.find(b"\n") + 1 if self._framed else 0
        return bool(out) and (out.startswith(b"data: ", at) or not only_comments(out, framed=self._framed))

    def feed(self, data: bytes) -> bytes:
        """What may be relayed of the bytes read."""
        out: list[bytes] = []
        at, size = 0, len(data)
        while at < size and self._clean:
            quick = self.quick(data, at)
            if quick is not None:
                some, at = quick
            else:
                start, end = event_in(data, at)
                if end < 0 or data.startswith(ERROR, start) or data.find(ABORT, start, end) >= 0:
                    break  # mostly the stream's end
                event = data[start:end]
                some = shown = self._event(event)
                if self._framed and shown:
                    some = data[at:end + 2] if shown is event else chunk_of(shown)
                self._clean = not self.failure
                at = end + 2
            out.append(some)
        if at < size:
            out.append(self._feed_end(data[at:]))
        return b"".join(out)

    def _feed_end(self, data: bytes) -> bytes:
        """The same, where the end of the stream may be what was read: engines write [DONE] and the last chunk at once."""
        if self._clean and data in (DONE_CHUNK, END):
            self.ended, self._clean = True, False
            self.done = len(data) == len(END)
            return DONE_CHUNK if self._framed else DONE + b"\n\n"
        if self.ended and data == _LAST_CHUNK and not (self._pending or self._open or self.done):
            self.done = True
            return b""
        return self._feed_carefully(data)

    def _feed_carefully(self, data: bytes) -> bytes:
        out: list[bytes] = []
        try:
            self._feed_chunks(data, out)
        except MalformedMessage as error:  # what came before it is good, and has been noted
            self._fail(FailureKind.BROKEN, "the engine sent what cannot be read", str(error))
        self._clean = not (self._pending or self._open or self.done or self.ended or self.failure)
        return b"".join(out)

    @property
    def _pending(self) -> bool:
        """Whether part of a chunk is held."""
        return self._chunks is not None and self._chunks.pending

    def _split(self, data: bytes) -> list[tuple[bytes, bytes]]:
        """``Chunks.feed``. Raises MalformedMessage."""
        if self._chunks is None:
            self._chunks = Chunks()
        chunks = self._chunks
        chunks.done = self.done
        try:
            return chunks.feed(data)
        finally:
            self.done = chunks.done

    def _feed_chunks(self, data: bytes, out: list[bytes]) -> None:
        for chunk, payload in self._split(data):
            if self.failure or self.ended:
                continue  # the engine's own end after its error, or bytes behind [DONE]
            self._held.append(chunk if self._framed else payload)
            self._open = self._open + payload if self._open else payload
            if len(self._open) > MAX_EVENT:
                raise MalformedMessage(f"an event of more than {MAX_EVENT} bytes")
            if self._open.endswith((b"\n\n", b"\r\n\r\n")):
                out.append(self._release())

    def _release(self) -> bytes:
        events, held = self._open, self._held
        self._open, self._held = b"", []
        if self._plain and ABORT not in events and ERROR not in events and DONE not in events:
            return b"".join(held)
        good: list[bytes] = []
        for given in events.replace(b"\r\n", b"\n").split(b"\n\n"):
            event = given
            if given.startswith(b":") or given.find(b"\n:") >= 0:
                lines = given.split(b"\n")
                event = b"\n".join([line for line in lines if not line.startswith(b":")])
                comments = b"\n".join([line for line in lines if line.startswith(b":")]) + b"\n\n"
                good.append(comments if self._plain else self._seen(comments))
            if not event:
                continue
            if event.startswith(DONE):
                self.ended = True
            elif event.startswith(ERROR):
                words = _engine_failure(event[6:])
                if words is not None:
                    self._fail(FailureKind.ABORTED, "the engine reported an error", words)
                self.client_fault = words is None
            elif event.startswith(b"data:") and ABORT in event:
                self._fail(FailureKind.ABORTED, "the engine aborted the request")
            if not self.failure:
                good.append(event + b"\n\n" if self._plain else self._seen(event + b"\n\n"))
            if self.failure:
                self.ended = False
                break
            if self.ended:
                break
        payload = b"".join(good)
        return chunk_of(payload) if payload and self._framed else payload

    def _fail(self, kind: FailureKind, said: str, more: str = "") -> None:
        self.kind, self.reason = kind, FailureReason(said, more)
        self.failure = self.reason.full

    _plain = True
    """Events go on as they are; otherwise through ``_seen``."""

    def _event(self, event: bytes) -> bytes:
        """As ``_seen``, of the one event of a chunk, which begins with ``data: {"``."""
        return self._seen(event)

    def _seen(self, event: bytes) -> bytes:
        """What goes to the client of an event, which is no failure; may set ``failure``."""
        return event


def only_comments(out: bytes, *, framed: bool) -> bool:
    """Whether what a stream gave is comments alone. They say that an engine is at work, and begin no answer."""
    at = out.find(b"\n") + 1 if framed else 0
    if not out.startswith((b":", b"\n", b"\r"), at):
        return False
    payload = b"".join([payload for _, payload in Chunks().feed(out)]) if framed else out
    return all(line[:1] in {b"", b":", b"\r"} for line in payload.split(b"\n"))


def event_in(data: bytes, at: int) -> tuple[int, int]:
    """Where the one event stands that a whole chunk at ``at`` holds, with its empty line; end is -1 where there is none."""
    start = data.find(b"\r\n", at + 1, at + 9) + 2
    end = start + size_of(data[at:start - 2]) if start > 2 else -1
    whole = end > 0 and data.find(b"\n", start) == end - 2 and data[end - 2:end + 2] == b"\n\n\r\n"
    return start, end if whole and data.startswith(b'data: {"', start) else -1


def size_of(digits: bytes) -> int:
    """A chunk's size; far negative where these are no hexadecimal digits, so that the careful way finds out.

    RFC 9112, 7.1: digits alone, while int() takes signs, 0x, underscores and spaces.
    """
    return int(digits, 16) if digits and not digits.strip(_HEX) else -(1 << 40)


def _engine_failure(raw: bytes) -> str | None:
    """What an engine's error event says; None where the client is at fault, so that it goes on as any other event."""
    try:
        error = msgspec.json.decode(raw, type=dict[str, dict[str, object]])["error"]
    except (msgspec.DecodeError, UnicodeDecodeError, KeyError):
        return "in an event that is not JSON"
    code = error.get("code")
    if isinstance(code, int) and 400 <= code < 500:
        return None
    return str(error.get("message", ""))[:500]
