"""What the router reads of an answer: the lengths that ``usage`` tells. Of one in a dialect of its own, while it passes,
also its first output and its failure.

    stream    data: {"type": …}  data: {"type": …, "usage": …}      event by event, whatever pieces they come in
    whole     {…, "usage": …}                                       kept until it is whole

Laws
  * Nothing of it is changed, and nothing of it is trusted: what cannot be read stays unknown.
  * Bounded: an event, or a whole answer, of more than ``MAX`` bytes is not read.
"""

from __future__ import annotations

import msgspec

MAX = 1 << 20
_EARLY = frozenset({"response.created", "response.queued", "response.in_progress", "ping"})
"""Events that say only that a request came: an engine sends them before it has computed anything."""
_FAILED = frozenset({"error", "response.failed"})
_USAGE = b'"usage"'


class _Usage(msgspec.Struct):
    input_tokens: int
    output_tokens: int
    cache_read_input_tokens: int | None = None
    cache_creation_input_tokens: int | None = None

    @property
    def lengths(self) -> tuple[int, int]:
        """As ``Spent.lengths``."""
        cached = (self.cache_read_input_tokens or 0) + (self.cache_creation_input_tokens or 0)
        return self.input_tokens + cached, self.output_tokens


class _Response(msgspec.Struct):
    usage: _Usage | None = None


class _Event(msgspec.Struct):
    type: str = ""
    usage: _Usage | None = None
    response: _Response | None = None


_decode = msgspec.json.Decoder(_Event).decode


class Spent(msgspec.Struct):
    """``usage`` of completions and chats."""

    prompt_tokens: int | None = None
    completion_tokens: int | None = None

    @property
    def lengths(self) -> tuple[int, int]:
        """``(prompt tokens, generated tokens)``; -1 where it does not say."""
        return (-1 if self.prompt_tokens is None else self.prompt_tokens,
                -1 if self.completion_tokens is None else self.completion_tokens)


class _Whole(msgspec.Struct):
    usage: Spent | None = None


_whole = msgspec.json.Decoder(_Whole).decode


def lengths(body: bytes) -> tuple[int, int]:
    """``Spent.lengths`` of a whole completion or chat."""
    try:
        return (_whole(body).usage or Spent()).lengths
    except (msgspec.DecodeError, UnicodeDecodeError):
        return Spent().lengths


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
