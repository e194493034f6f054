r"""Event streams on their way from decode to a client, relayed as the engine framed them.

Belongs here: telling what may be relayed from what means that the engine failed. Does not belong here: sockets, retries.

A relayed stream stays as the engine framed it. Usually a read is whole chunks of one event each, which costs a few
searches a chunk and no copy; everything else takes the careful way:

    read      1a3\r\n data: {…}\n\n \r\n         chunks of one event each: relayed as they are
              chunk | chunk | half a chunk       whole chunks up to the last whole event; the rest is held
              … "finish_reason":"abort" …        what comes before it; then the stream has failed
              … data: {"error": … (5xx) …        likewise
              … data: [DONE]\n\n …               relayed, and the stream has ended

Markers cannot be forged by generated text: inside a JSON string quotes and line ends are escaped, so ``"abort"`` with
bare quotes and ``data:`` at a line's start are the engine's own. Only whole events are ever relayed, so that an error
event can be put behind them at any time.
"""

from __future__ import annotations

import re

import msgspec

from xpyd_sidecar.proxy.fast import CAREFUL, NOTED, PLAIN, Scanner
from xpyd_sidecar.proxy.wire import Chunks, Malformed, chunk_of
from xpyd_sidecar.routing.continuation import Going
from xpyd_sidecar.routing.moves import Kind
from xpyd_sidecar.routing.position import FOLD_BYTES, Event, Position, split_prompt
from xpyd_sidecar.routing.splice import Differs, Ignored, Splicer
from xpyd_sidecar.routing.ways import Way

MAX_EVENT = 32 << 20
"""Bytes of one event."""
_ABORT = b'"finish_reason":"abort"'
_ERROR = b'data: {"error"'
_DONE = b"data: [DONE]"
_DONE_CHUNK = b"e\r\ndata: [DONE]\n\n\r\n"
_LAST_CHUNK = b"0\r\n\r\n"
_END = _DONE_CHUNK + _LAST_CHUNK
_IDS = b'"token_ids":['
_TOKEN_IDS = re.compile(rb'"token_ids":\[[0-9,]*\]')
_NO_IDS = b'"token_ids":null'
_MAX_REST = 16
"""Bytes behind the ids of an event that is like all others: no usage, say."""
_TEXT_AT = {"completions": b'"text":', "chat": b'"delta":'}


class EventStream(Scanner):
    """A chunked event stream on its way to a client.

    ``feed`` returns what may be sent on: chunks as they came (``framed``), or their payload for clients that know no
    chunks. ``ended``: [DONE] came. ``failure``: the engine gave up, and why (``kind``); nothing is returned from then on.
    ``done``: the HTTP body is over. The last chunk is never returned: whoever ends the answer writes it. A read that
    ``quick`` took is never fed.
    """

    __slots__ = ("_chunks", "_held", "_open", "done", "ended", "failure", "kind")
    _simple = PLAIN

    def __init__(self, *, framed: bool) -> None:
        self._framed = framed
        self._way = self._simple
        self._chunks = Chunks()
        self._held: list[bytes] = []
        self._open = b""
        self._clean = True
        """Nothing is held, neither part of a chunk nor of an event."""
        self.done = False
        self.ended = False
        self.failure = ""
        self.kind = Kind.ABORTED

    def feed(self, data: bytes) -> bytes:
        """What may be relayed of the bytes read."""
        if not self._clean or data.find(_ABORT) >= 0:  # find: ``in`` first tries its operand as a number
            return self._feed_end(data)
        at, size = 0, len(data)
        payloads: list[bytes] = []
        while at < size:
            start = data.find(b"\r\n", at + 1, at + 9) + 2
            end = start + _size_of(data[at:start - 2]) if start > 2 else -1
            if (end < 0 or data.find(b"\n", start) != end - 2 or data[end - 2:end + 2] != b"\n\n\r\n"
                    or not data.startswith(b'data: {"', start) or data.startswith(_ERROR, start)):
                rest = self._feed_end(data[at:])
                return (data[:at] if self._framed else b"".join(payloads)) + rest
            if not self._framed:
                payloads.append(data[start:end])
            at = end + 2
        return data if self._framed else b"".join(payloads)

    def _feed_end(self, data: bytes) -> bytes:
        """The same, where the end of the stream may be what was read: engines write [DONE] and the last chunk at once."""
        if self._clean and data in (_DONE_CHUNK, _END):
            self.ended, self._clean = True, False
            self.done = self._chunks.done = len(data) == len(_END)
            return _DONE_CHUNK if self._framed else _DONE + b"\n\n"
        if self.ended and data == _LAST_CHUNK and not (self._chunks.pending or self._open or self.done):
            self.done = self._chunks.done = True
            return b""
        return self._feed_carefully(data)

    def _feed_carefully(self, data: bytes) -> bytes:
        out: list[bytes] = []
        try:
            self._feed_chunks(data, out)
        except Malformed as error:  # what came before it is good, and has been noted
            self._fail(Kind.BROKEN, f"the engine sent {error}")
        self.done = self._chunks.done
        self._clean = not (self._chunks.pending or self._open or self.done or self.ended or self.failure)
        return b"".join(out)

    def _feed_chunks(self, data: bytes, out: list[bytes]) -> None:
        for chunk, payload in self._chunks.feed(data):
            if self.failure or self.ended:
                continue  # the engine's own end after its error, or bytes behind [DONE]
            self._held.append(chunk if self._framed else payload)
            self._open = self._open + payload if self._open else payload
            if len(self._open) > MAX_EVENT:
                raise Malformed(f"an event of more than {MAX_EVENT} bytes")
            if self._open.endswith((b"\n\n", b"\r\n\r\n")):
                out.append(self._release())

    def _release(self) -> bytes:
        events, held = self._open, self._held
        self._open, self._held = b"", []
        if self._plain and _ABORT not in events and _ERROR not in events and _DONE not in events:
            return b"".join(held)
        good: list[bytes] = []
        for event in events.replace(b"\r\n", b"\n").split(b"\n\n"):
            if not event:
                continue
            if event.startswith(_DONE):
                self.ended = True
            elif event.startswith(_ERROR):
                self.failure = _engine_failure(event[6:])
            elif event.startswith(b"data:") and _ABORT in event:
                self.failure = "the engine aborted the request"
            if not self.failure:
                good.append(event + b"\n\n" if self._plain else self._seen(event + b"\n\n"))
            if self.failure:
                self.ended = False
                break
            if self.ended:
                break
        payload = b"".join(good)
        return chunk_of(payload) if payload and self._framed else payload

    def _fail(self, kind: Kind, reason: str) -> None:
        self.failure, self.kind = reason, kind

    _plain = True
    """Events go on as they are; otherwise through ``_seen``."""

    def _seen(self, event: bytes) -> bytes:
        """What goes to the client of an event, which is no failure; may set ``failure``."""
        return event


class NotedStream(EventStream):
    """A stream that can go on from token ids: they are noted, and hidden from the client.

    Engines write every event of a stream alike, so what stands around text and ids is learned from one of them:

        data: {… ,"choices":[{"index":0,"text": "Hello" ,"logprobs":null,"finish_reason":null,…,"token_ids":[ 15496 ]}]}
        └────────────── prefix ───────────────┘       └───────────────────── middle ────────────────────────┘     └last┘

    A chat's first event says the role alone, so what stands behind its text is guessed from the stream before, and learned
    where the guess is wrong. A chunk that has these around its text costs five searches; text and ids go to the log, and
    the client's chunk is put together from what was learned. Every other event is decoded. A stream that goes on behind
    another one is spliced to it until it has caught up; then it is as any other, under the first one's name.
    """

    __slots__ = ("_grows", "_position", "_splicer", "_sure")
    _plain = False
    _simple = NOTED

    def __init__(self, position: Position, splicer: Splicer | None = None, *, framed: bool) -> None:
        super().__init__(framed=framed)
        self._position = position
        self._splicer = splicer
        self._log = position.log
        self._prefix = self._middle = self._last = b""
        self._sure = False
        """They are of this stream, not guessed."""
        self._lead = self._shown = b""
        """What the client gets before and behind the text."""
        self._grows = 0
        """Bytes of a client's chunk, without its text."""

    def splice(self, splicer: Splicer) -> None:
        """The client has got something meanwhile. To be called before anything of this stream went to it."""
        self._splicer = splicer
        self._prefix, self._sure = b"", False

    def feed(self, data: bytes) -> bytes:
        """What may be relayed of the bytes read."""
        prefix, middle, last = self._prefix, self._middle, self._last
        if not prefix or not self._clean:
            return self._feed_alone(data)
        at, size = 0, len(data)
        before = b""
        while True:
            start = data.find(b"\r\n", at, at + 9) + 2
            text = start + len(prefix)
            stop = data.find(middle, text) if start > 2 and data.startswith(prefix, start) else -1
            ids = stop + len(middle)
            close = data.find(b"]", ids)
            shown = data[text:stop]
            if stop < 0 or close <= ids or not data.startswith(last, close) or shown.find(b"\n") >= 0:
                return before + self._feed_alone(data[at:])
            self._log += b"%b\t%b\n" % (shown, data[ids:close].replace(b",", b"\t"))
            if shown == b"{}":  # made for the ids alone
                out = before
            elif self._framed:
                out = b"%b%x\r\n%b%b%b\r\n" % (before, self._grows + len(shown), self._lead, shown, self._shown)
            else:
                out = b"%b%b%b%b" % (before, self._lead, shown, self._shown)
            at = close + len(last)
            if at >= size:
                return out
            before = out

    def _feed_alone(self, data: bytes) -> bytes:
        """The same of a read that is not learned: mostly a single event, or the end."""
        if self.ended or data in (_DONE_CHUNK, _END):
            return self._feed_end(data) if self._splicer is None else self._feed_carefully(data)
        if data.endswith(_END) and self._clean:
            return self.feed(data[:-len(_END)]) + self._feed_alone(_END)
        start = data.find(b"\r\n", 1, 9) + 2
        end = len(data) - 2
        if (not self._clean or start <= 2 or data.find(b"\n", start) != end - 2 or not data.endswith(b"\n\n\r\n")
                or start + _size_of(data[:start - 2]) != end or not data.startswith(b'data: {"', start)
                or data.startswith(_ERROR, start) or data.find(_ABORT, start) >= 0):
            return self._feed_carefully(data)
        payload = self._seen(data[start:end])
        self._clean = not self.failure
        return chunk_of(payload) if payload and self._framed else payload

    def _learn(self, event: bytes, mine: Event) -> None:
        api = self._position.api
        key = _TEXT_AT[api]
        text = event.find(key) + len(key)
        stop = event.find(b',"logprobs":null,"finish_reason":null,', text)
        ids = event.find(_IDS, stop) + len(_IDS)
        close = event.find(b"]", ids)
        middle, rest = event[stop:ids], event[close + 1:]
        if text < len(key) or stop < 0 or ids < len(_IDS) or middle.count(b"[") > 1 or len(rest) > _MAX_REST:
            if text < len(key) or self._prefix or api not in _guesses:
                return
            middle, rest = _guesses[api]
        else:
            self._sure = True
            _guesses[api] = middle, rest
        self._prefix, self._middle, self._last = event[:text], middle, b"]" + rest + b"\r\n"
        self._lead, first = self._prefix, self._position
        if (mine.id, mine.created) != (first.id, first.created):  # it goes on behind another stream
            lead = self._prefix.replace(b'"id":%b' % _encode(mine.id), b'"id":%b' % _encode(first.id), 1)
            self._lead = lead.replace(b'"created":%d' % mine.created, b'"created":%d' % first.created, 1)
        self._shown = middle[:-1] + b"null" + rest
        self._grows = len(self._lead) + len(self._shown)

    def _seen(self, event: bytes) -> bytes:
        if self._splicer is not None:
            return self._spliced(event, self._splicer)
        if not event.startswith(b"data: {"):
            return event
        prompt, bare = split_prompt(event)
        try:
            noted = _decode(bare[6:])
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            self._fail(Kind.BROKEN, f"the engine sent an event that cannot be read: {error}")
            return b""
        position = self._position
        position.prompt = position.prompt or prompt
        position.note(noted)
        if position.asked_ids:
            return event
        event = bare
        if event.find(b'"delta":{}') >= 0 and all(choice.finish_reason is None and choice.logprobs is None
                                                  for choice in noted.choices):
            return b""  # made for the ids alone
        self._may_learn(event, noted)
        return _TOKEN_IDS.sub(_NO_IDS, event) if event.find(_IDS) >= 0 else event

    def _spliced(self, event: bytes, splicer: Splicer) -> bytes:
        try:
            if event.startswith(b"data: {"):
                left = splicer.take(event)
                if splicer.caught_up and not self._sure:
                    bare = split_prompt(event)[1]
                    self._may_learn(bare, _decode(bare[6:]))
                return left
            if event.startswith(_DONE):
                splicer.end()
        except Differs as error:
            self._fail(Kind.DIFFERS, f"the stream cannot go on as it began: {error}")
        except Ignored as error:
            self._position.replays = True
            self._fail(Kind.BROKEN, str(error))
        except (msgspec.MsgspecError, UnicodeDecodeError) as error:
            self._fail(Kind.BROKEN, f"the engine sent an event that cannot be read: {error}")
        return b"" if self.failure else event

    def _may_learn(self, event: bytes, noted: Event) -> None:
        position = self._position
        odd = position.shows_logprobs or position.asked_ids or position.way is not Way.CONTINUE
        if position.prompt and not odd and not self._sure:
            self._learn(event, noted)


class KeptStream(EventStream):
    """A stream that can only be run again: its events are kept, and relayed as they are."""

    __slots__ = ("_position",)
    _plain = False
    _simple = CAREFUL

    def __init__(self, position: Position, *, framed: bool) -> None:
        super().__init__(framed=framed)
        self._position = position
        self._clean = False  # the first event says the stream's id

    def feed(self, data: bytes) -> bytes:
        """What may be relayed of the bytes read."""
        if not self._clean or data.find(_ABORT) >= 0:
            return self._feed_carefully(data)
        at, size = 0, len(data)
        position = self._position
        payloads: list[bytes] = []
        while at < size:
            start = data.find(b"\r\n", at + 1, at + 9) + 2
            end = start + _size_of(data[at:start - 2]) if start > 2 else -1
            choices = data.find(b'"choices":', start, end) if end > 0 else -1
            if (choices < 0 or data.find(b"\n", start) != end - 2 or data[end - 2:end + 2] != b"\n\n\r\n"
                    or not data.startswith(b'data: {"id":', start)):
                rest = self._feed_carefully(data[at:])
                return (data[:at] if self._framed else b"".join(payloads)) + rest
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
                self._position.note(_decode(event[6:]))
            except (msgspec.DecodeError, UnicodeDecodeError) as error:
                self._fail(Kind.BROKEN, f"the engine sent an event that cannot be read: {error}")
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
            noted = _decode(event[6:])
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            self._fail(Kind.BROKEN, f"prefill sent an event that cannot be read: {error}")
            return b""
        choice = noted.choices[0] if len(noted.choices) == 1 else None
        if choice is None or (self.events and self.events[-1].choices[0].token_ids):
            return b""
        self.events.append(noted)
        shown = _TOKEN_IDS.sub(_NO_IDS, event)
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
    kind = NotedStream if position.way is Way.CONTINUE else KeptStream
    return kind(position, framed=framed)


def spliced(position: Position, going: Going, *, framed: bool) -> NotedStream:
    """A stream that goes on behind what the client has."""
    return NotedStream(position, Splicer(position, going), framed=framed)


_guesses: dict[str, tuple[bytes, bytes]] = {}
"""By API: what stood between text and ids, and behind them, in the latest stream that was learned from."""
_encode = msgspec.json.Encoder().encode
_decode = msgspec.json.Decoder(Event).decode


def _size_of(digits: bytes) -> int:
    """A chunk's size; far negative where these are no hexadecimal digits, so that the careful way finds out."""
    try:
        return int(digits, 16)
    except ValueError:
        return -(1 << 40)


def _engine_failure(raw: bytes) -> str:
    """What an engine's error event says; empty where the client is at fault, so that it goes on as any other event."""
    try:
        error = msgspec.json.decode(raw, type=dict[str, dict[str, object]])["error"]
    except (msgspec.DecodeError, UnicodeDecodeError, KeyError):
        return "the engine sent an error event that is not JSON"
    code = error.get("code")
    if isinstance(code, int) and 400 <= code < 500:
        return ""
    return f"the engine reported: {str(error.get('message', ''))[:500]}"
