"""Answers that pass through as they come, whatever they are, and what the router reads of them: the lengths that ``usage``
tells; of one in a dialect of its own also its first output and its failure.

    engine ── chunks, or bytes of a known length ──▶ OpaqueAnswer ──▶ client, as they came
                                                          └─▶ AnswerReader: lengths, first output, failure

    stream    data: {"type": …}  data: {"type": …, "usage": …}      event by event, whatever pieces they come in
    whole     {…, "usage": …}                                       kept until it is whole

A whole completion or chat is collected by the router, so that another engine can be asked while the client has nothing of
it; but not above ``MAX_EARLY`` bytes: from there on it passes through, too (``LargeAnswer``), or a few of them would take
all of the router's memory.

An engine says 200 to a stream before it has a token, and some say that they are at work. So what comes of a stream in a
dialect before its first output waits for it, ``MAX_EARLY`` bytes at most: until then nothing is lost with an engine.

Laws
  * Nothing of it is changed, and nothing of it is trusted: what cannot be read stays unknown.
  * Bounded: an event, or a whole answer, of more than ``MAX`` bytes is not read.
"""

from __future__ import annotations

import re

import msgspec

from xpyd_sidecar.router.api.faults import FailureKind
from xpyd_sidecar.router.http.wire import MalformedMessage, ResponseHead
from xpyd_sidecar.router.relay.fast import CAREFUL
from xpyd_sidecar.router.stream.events import ABORT, EventStream

MAX_EARLY = 64 << 10
"""Bytes of an answer that wait for its first output."""
MAX = 1 << 20
_EARLY = frozenset({"response.created", "response.queued", "response.in_progress", "ping"})
"""Events that say only that a request came: an engine sends them before it has computed anything."""
_FAILED = frozenset({"error", "response.failed"})
_USAGE = b'"usage"'
TAIL = 4 << 10
"""Bytes of a whole answer's end that are looked at for ``usage``."""
_COUNT = {name: re.compile(rb'"%b_tokens":\s*([0-9]{1,15})' % name.encode()) for name in ("prompt", "completion")}


class TokenUsage(msgspec.Struct):
    """``usage``: completions and chats have the first two names, dialects the others."""

    prompt_tokens: int | None = None
    completion_tokens: int | None = None
    input_tokens: int = -1
    output_tokens: int = -1
    cache_read_input_tokens: int | None = None
    cache_creation_input_tokens: int | None = None

    @property
    def lengths(self) -> tuple[int, int]:
        """``(prompt tokens, generated tokens)``; -1 where it does not say."""
        if self.input_tokens >= 0 and self.output_tokens >= 0:
            cached = (self.cache_read_input_tokens or 0) + (self.cache_creation_input_tokens or 0)
            return self.input_tokens + cached, self.output_tokens
        return (-1 if self.prompt_tokens is None else self.prompt_tokens,
                -1 if self.completion_tokens is None else self.completion_tokens)

_CACHED = re.compile(rb'"cached_tokens":\s*([0-9]{1,15})')
_PROMPT = re.compile(rb'"prompt_tokens":\s*([0-9]{1,15})')


def cached_tokens(body: bytes) -> int:
    """Of a prompt, as prefill's whole answer says: our connector does, and ``usage`` may; -1: it does not."""
    return _count_at_end(_CACHED, body)


def prompt_tokens(body: bytes) -> int:
    """Of a prompt, as ``usage`` of a whole answer to a completion or chat says; -1: it does not."""
    return _count_at_end(_PROMPT, body)


def _count_at_end(name: re.Pattern[bytes], body: bytes) -> int:
    found = name.search(body, max(0, len(body) - TAIL))
    return -1 if found is None else int(found[1])


class _Response(msgspec.Struct):
    usage: TokenUsage | None = None


class _Event(_Response):
    """Of a stream in a dialect, or a whole answer."""

    type: str = ""
    response: _Response | None = None


_decode = msgspec.json.Decoder(_Event).decode


def lengths(body: bytes) -> tuple[int, int]:
    """``TokenUsage.lengths`` of a whole completion or chat."""
    try:
        return (_decode(body).usage or TokenUsage()).lengths
    except (msgspec.DecodeError, UnicodeDecodeError):
        return TokenUsage().lengths


class AnswerReader:
    """Follows one answer."""

    def __init__(self, *, stream: bool) -> None:
        self._stream = stream
        self._rest: list[bytes] = []
        self._size = 0
        self.begun = False
        self.failed = False
        """The engine says that it failed, in an event."""
        self.prompt_tokens = -1
        """-1: not known."""
        self.tokens = -1

    def take(self, data: bytes) -> None:
        """The next bytes of the body."""
        first, *lines = data.split(b"\n") if self._stream else [data]
        self.begun = self.begun or not self._stream
        self._keep(first)
        for line in lines:
            self._line(self._kept())
            self._keep(line)

    def end(self) -> None:
        """That was all."""
        (self._line if self._stream else self._read)(self._kept())

    def _keep(self, data: bytes) -> None:
        self._size += len(data)
        if self._size <= MAX:
            self._rest.append(data)
        else:
            self._rest.clear()  # and what still comes of it is not kept
            self.begun = True

    def _kept(self) -> bytes:
        kept = b"".join(self._rest)
        self._rest.clear()
        self._size = 0
        return kept

    def _line(self, line: bytes) -> None:
        if line.startswith(b"data:") and (not self.begun or _USAGE in line or b'"error"' in line or b".failed" in line):
            event = self._read(line[5:])
            self.begun = self.begun or event not in _EARLY
            self.failed = self.failed or event in _FAILED

    def _read(self, text: bytes) -> str:
        """Note what it says of lengths. Returns its type; none where it is no event."""
        try:
            event = _decode(text)
        except (msgspec.DecodeError, UnicodeDecodeError):
            return ""
        usage = event.usage or (event.response.usage if event.response is not None else None)
        if usage is not None:
            self.prompt_tokens, self.tokens = usage.lengths
        return event.type


class TailReader(AnswerReader):
    """Follows one whole completion or chat of any size: keeps no more of it than its end, where ``usage`` stands."""

    def __init__(self) -> None:
        super().__init__(stream=False)
        self._tail = b""

    def take(self, data: bytes) -> None:
        """The next bytes of the body."""
        seen = self._tail + data
        self.failed = self.failed or seen.find(ABORT) >= 0
        self._tail = seen[-TAIL:]

    def end(self) -> None:
        """That was all."""
        at = self._tail.rfind(_USAGE)
        found = [_COUNT[name].search(self._tail, at) for name in ("prompt", "completion")] if at >= 0 else [None, None]
        self.prompt_tokens, self.tokens = (-1 if each is None else int(each[1]) for each in found)


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

        Raises MalformedMessage: the framing is broken.
        """
        if self._sized:
            if len(data) > self._left:
                raise MalformedMessage("bytes after the end of the body")
            self._left -= len(data)
            body = out = data
            self.done = not self._left
        else:
            found = self._split(data)
            body = b"".join([payload for _, payload in found])
            out = b"".join([chunk for chunk, _ in found]) if self._framed else body
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


class LargeAnswer(OpaqueAnswer):
    """A whole completion or chat of more than ``MAX_EARLY`` bytes; smaller ones, and errors, are collected whole.

    Where the engine aborts it, it fails, and what is behind that is not sent on: so that its client, which has part of it,
    sees by its framing that it is not whole.
    """

    __slots__ = ("taken",)
    answer: TailReader

    def __init__(self, *, framed: bool) -> None:
        super().__init__(framed=framed, wanted=True, answer=TailReader())
        self.taken = False
        """It is one."""

    def takes(self, head: ResponseHead) -> bool:
        """See the base class."""
        self.taken = (head.chunked or (head.length or 0) > MAX_EARLY) and head.status < 300 and super().takes(head)
        return self.taken

    def feed(self, data: bytes) -> bytes:
        """See the base class."""
        out = super().feed(data)
        if not self.answer.failed:
            return out
        self._fail(FailureKind.ABORTED, "the engine aborted the request")
        return b""
