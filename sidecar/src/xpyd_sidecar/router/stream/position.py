r"""Where a client is in its stream: what it has, so that another engine can go on right behind it.

Noting is on the path of every token, so it copies bytes and parses nothing:

    way        what is kept of an event                                       bytes a token
    CONTINUE   its text (JSON), a tab, its token ids, each after a tab; \n    about 12 (chat: 25)
    REPLAY     its choices, until FOLD_BYTES are there; then the text alone   at most FOLD_BYTES, and the text

and the prompt's ids once, as JSON (up to 7 bytes a token). JSON has neither a raw tab nor a raw line end in a string, so
lines and fields cannot be confused. ``have`` reads it all, only when something broke.

A token is **clean** where its event carries it alone and has text: no character is half done behind it. Only there may
another engine start (vLLM ``v1/engine/detokenizer.py``: a prompt that ends inside a character is emitted as text).
"""

from __future__ import annotations

from array import array
from typing import Annotated, Any

import msgspec

from xpyd_sidecar.router.api.failover_modes import FailoverMode
from xpyd_sidecar.router.api.fields import Api
from xpyd_sidecar.router.stream.answers import TokenUsage

FOLD_BYTES = 16 << 10
MAX_PARTS = 256
"""Pieces of text kept apart before they are joined."""
TokenId = Annotated[int, msgspec.Meta(ge=0, le=(1 << 63) - 1)]
"""Kept in 64 bits; an event with another number is none that can be read."""
Channel = tuple[int, str]
"""Choice, and what of it: ``text``, ``content``, ``reasoning``, ``tool 0 name``, ``tool 0 arguments`` …"""


TEXTS = ("reasoning", "reasoning_content", "content", "refusal")
"""What a delta may say, beside tool calls."""


class _Function(msgspec.Struct):
    name: str | None = None
    arguments: str | None = None


class _Tool(msgspec.Struct):
    index: int = 0
    function: _Function | None = None


class Delta(msgspec.Struct):
    """What a chat event adds."""

    role: str | None = None
    content: str | None = None
    reasoning: str | None = None
    reasoning_content: str | None = None
    refusal: str | None = None
    tool_calls: list[_Tool] | None = None


class _Logprobs(msgspec.Struct):
    tokens: list[str] | None = None
    text_offset: list[int] | None = None
    content: list[Any] | None = None


class Choice(msgspec.Struct):
    """What an event says of one choice."""

    index: int = 0
    text: str | None = None
    delta: Delta | None = None
    logprobs: _Logprobs | None = None
    finish_reason: str | None = None
    token_ids: list[TokenId] | None = None


class StreamEvent(msgspec.Struct):
    """One event of a stream, as far as it matters for going on."""

    id: str = ""
    created: int = 0
    model: str = ""
    choices: list[Choice] = []
    usage: TokenUsage | None = None


class Have(msgspec.Struct):
    """What a client has."""

    texts: dict[Channel, str]
    logprobs: dict[int, int]
    """Entries, by choice."""
    ids: dict[int, array[int]]
    """Token ids, by choice; empty where they were not asked for."""
    steps: list[tuple[int, int, str, str, bool]]
    """Of each noted event: ids and characters behind it, channel and text, and whether its token is clean."""

    def chars(self) -> int:
        """Characters of all channels."""
        return sum(len(text) for text in self.texts.values())


_PROMPT = b'"prompt_token_ids":['
_decode_event = msgspec.json.Decoder(StreamEvent).decode
_decode_text = msgspec.json.Decoder(str).decode
_decode_delta = msgspec.json.Decoder(Delta).decode


def texts_of(choice: Choice) -> list[tuple[str, str]]:
    """``(channel, text)`` of what a choice adds."""
    if choice.text is not None:
        return [("text", choice.text)]
    return [] if choice.delta is None else delta_texts(choice.delta)


def delta_texts(delta: Delta) -> list[tuple[str, str]]:
    """The same of a delta."""
    found = [(name, text) for name in TEXTS if (text := getattr(delta, name))]
    for tool in delta.tool_calls or ():
        if tool.function is not None:
            found += [(f"tool {tool.index} {name}", text) for name in ("name", "arguments")
                      if (text := getattr(tool.function, name))]
    return found


def split_prompt(event: bytes) -> tuple[bytes, bytes]:
    """``(prompt ids as JSON without brackets, event with null in their place)``; no ids where it has none.

    Not decoded: a prompt may be long. A bare quote before a name is the engine's own, since strings escape theirs.
    """
    start = event.find(_PROMPT)
    if start < 0:
        return b"", event
    end = event.find(b"]", start)
    ids = event[start + len(_PROMPT):end].replace(b" ", b"")
    return ids, event[:start + len(_PROMPT) - 1] + b"null" + event[end + 1:]


class Position(msgspec.Struct, eq=False):
    """What one client has of its stream. ``log`` and ``pending`` are the hot path of ``stream.events``."""

    api: Api
    way: FailoverMode
    asked_ids: bool = False
    """The client wants token ids itself, so they stay."""
    wants_usage: bool = False
    choices: int = 1
    """How many finish reasons make the stream whole; 0: not known."""
    shows_logprobs: bool = False
    lasts: bool = True
    """Another engine can go on with it; if not, it is noted so that its tokens are counted."""
    sampled: bool = False
    """Its tokens are drawn at random: it goes on from all ids that came, and cannot be run again."""
    continued: int = 0
    """How often it went on elsewhere, as far as the client has seen it."""
    id: str = ""
    model: str = ""
    created: int = 0
    prompt: bytes = b""
    """Token ids as JSON without brackets; empty before they came."""
    log: bytearray = bytearray()
    pending: list[bytes] = []
    """Of events on their way to the client: from ``"choices":`` on."""
    pending_bytes: int = 0
    roles: frozenset[int] = frozenset()
    tools: frozenset[tuple[int, int]] = frozenset()
    finished: frozenset[int] = frozenset()
    """Choices whose finish reason the client has."""
    usage_sent: bool = False
    told: tuple[int, int] = (-1, -1)
    """Tokens of the prompt and of the answer, as the usage has them that went to the client. CONTINUE counts its ids."""
    next_offset: int | None = None
    """``text_offset`` of the next token, where log probabilities are shown."""
    forgets: bool = False
    """Ids are of no more use, e.g. since an engine ignored those that it was given."""
    _have: dict[Channel, list[str]] = {}
    _ids: dict[int, array[int]] = {}
    _logprobs: dict[int, int] = {}

    @property
    def replays(self) -> bool:
        """From now on only a replay is possible."""
        return self.forgets or self.way is FailoverMode.REPLAY

    @property
    def goes_on(self) -> bool:
        """Whether another engine can go on (instructions.ResumableStream)."""
        try:
            self.have()
        except (msgspec.DecodeError, ValueError, OverflowError):  # as in ``fold``
            self.way = FailoverMode.ERROR
        if self.sampled and (self.forgets or (self.log and not self.prompt)):
            return False
        return self.lasts and self.way is not FailoverMode.ERROR

    @property
    def tokens(self) -> int:
        """Generated tokens, by their ids or as the engine's usage has them; -1 where they are not known."""
        if self.way is not FailoverMode.CONTINUE:
            return self.told[1]
        return self.log.count(b"\t") if self.prompt else -1

    @property
    def prompt_tokens(self) -> int:
        """Tokens of the prompt; -1 where they are not known."""
        if self.way is not FailoverMode.CONTINUE:
            return self.told[0]
        return self.prompt.count(b",") + 1 if self.prompt else -1

    def fresh_copy(self) -> Position:
        """A position at the beginning of the same stream, for another client."""
        return Position(self.api, self.way, self.asked_ids, self.wants_usage, self.choices, self.shows_logprobs, self.lasts,
                        self.sampled)

    # ---- noting

    def note(self, event: StreamEvent) -> None:
        """An event on its way to the client, without what the client already had."""
        if not self.id:
            self.id, self.created, self.model = event.id, event.created, event.model
        if event.usage is not None and not event.choices:
            self.usage_sent = True
            self.told = event.usage.lengths
        for choice in event.choices:
            if choice.delta is not None:
                if choice.delta.role:
                    self.roles |= {choice.index}
                if choice.delta.tool_calls:
                    self.tools |= {(choice.index, tool.index) for tool in choice.delta.tool_calls}
            if choice.finish_reason is not None:
                self.finished |= {choice.index}
            if choice.logprobs is not None:
                self._note_logprobs(choice.index, choice.logprobs)
            if self.way is FailoverMode.CONTINUE:
                self._log(choice)
            elif self.lasts:
                for name, text in texts_of(choice):
                    parts = self._have.setdefault((choice.index, name), [])
                    parts.append(text)
                    if len(parts) > MAX_PARTS:
                        parts[:] = ["".join(parts)]
                if choice.token_ids:  # the client wants them itself
                    self._ids.setdefault(choice.index, array("q")).extend(choice.token_ids)

    def _log(self, choice: Choice) -> None:
        texts = texts_of(choice)
        if not texts and not choice.token_ids:
            return
        shown = msgspec.json.encode((choice.text or "") if self.api == "completions" else dict(texts))
        self.log += b"%b%b\n" % (shown, b"".join(b"\t%d" % one for one in choice.token_ids or ()))

    def _note_logprobs(self, index: int, shown: _Logprobs) -> None:
        entries = shown.content if shown.content is not None else shown.tokens
        self._logprobs[index] = self._logprobs.get(index, 0) + len(entries or ())
        if shown.text_offset and shown.tokens:
            self.next_offset = shown.text_offset[-1] + len(shown.tokens[-1])

    def fold(self) -> None:
        """REPLAY: read what is pending, so that its text alone is kept."""
        pending, self.pending, self.pending_bytes = self.pending, [], 0
        try:
            for rest in pending:
                self.note(_decode_event(b"{" + rest))
        except (msgspec.DecodeError, UnicodeDecodeError):
            self.way = FailoverMode.ERROR  # the engine wrote what nobody can read, so nothing can be compared with it

    # ---- reading

    def have(self) -> Have:
        """Everything the client has."""
        self.fold()
        if self.way is not FailoverMode.CONTINUE:
            texts_whole = {channel: "".join(parts) for channel, parts in self._have.items()}
            return Have(texts_whole, dict(self._logprobs), dict(self._ids), [])
        found: dict[Channel, list[str]] = {}
        ids = array("q")
        steps: list[tuple[int, int, str, str, bool]] = []
        chars = 0
        for line in bytes(self.log).split(b"\n")[:-1]:
            shown, *numbers = line.split(b"\t")
            ids.extend(map(int, numbers))
            texts = [("text", _decode_text(shown))] if self.api == "completions" else delta_texts(_decode_delta(shown))
            for name, text in texts or [("", "")]:
                if text:
                    found.setdefault((0, name), []).append(text)
                chars += len(text)
                steps.append((len(ids), chars, name, text, bool(text) and len(numbers) == 1 and len(texts) == 1))
        texts_whole = {channel: "".join(parts) for channel, parts in found.items()}
        return Have(texts_whole, dict(self._logprobs), {0: ids}, steps)

    # ---- the end

    def tail(self) -> bytes | None:
        """What is missing of a stream whose finish reason the client has; None where an engine must say it."""
        self.fold()
        if not self.choices or len(self.finished) < self.choices:
            return None
        done = b"data: [DONE]\n\n"
        if not self.wants_usage or self.usage_sent:
            return done
        if self.tokens < 0:
            return None
        usage = {"prompt_tokens": self.prompt_tokens, "total_tokens": self.prompt_tokens + self.tokens,
                 "completion_tokens": self.tokens}
        kind = "text_completion" if self.api == "completions" else "chat.completion.chunk"
        event = {"id": self.id, "object": kind, "created": self.created, "model": self.model, "choices": [], "usage": usage}
        return b"data: " + msgspec.json.encode(event) + b"\n\n" + done
