"""Streams that can go on from token ids: text and ids are noted on their way, and ids hidden from the client.

Belongs here: recognizing events that are like the one before, so that noting costs a few searches. Does not belong here:
what is noted, and how it is read (``stream.position``).
"""

from __future__ import annotations

import re

import msgspec

from xpyd_sidecar.router.api.failover_modes import Way
from xpyd_sidecar.router.http.wire import chunk_of
from xpyd_sidecar.router.relay import whole
from xpyd_sidecar.router.relay.fast import COMPILED, NOTED
from xpyd_sidecar.router.stream.events import ABORT, DONE, END, ERROR, EventStream, size_of
from xpyd_sidecar.router.stream.failures import Kind
from xpyd_sidecar.router.stream.position import Event, Position, split_prompt
from xpyd_sidecar.router.stream.splice import Differs, Ignored, Splicer

_IDS = b'"token_ids":['
_IN_IDS = b"0123456789,"
TOKEN_IDS = re.compile(rb'"token_ids":\[[0-9,]*\]')
NO_IDS = b'"token_ids":null'
_FINISHES = b',"logprobs":null,"finish_reason":"'
BY_HAND = not COMPILED
"""Events as they were learned are looked for here, since no shortcut does."""
_MAX_REST = 16
"""Bytes behind the ids of an event that is like all others: no usage, say."""
_TEXT_AT = {"completions": b'"text":', "chat": b'"delta":'}
_guesses: dict[str, tuple[bytes, bytes]] = {}
"""By API: what stood between text and ids, and behind them, in the latest stream that was learned from."""
_encode = msgspec.json.Encoder().encode
decode = msgspec.json.Decoder(Event).decode


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
        if self._framed and self._clean and self._splicer is None and (not self._position.id or data.endswith(END)):
            taken = self._take(data)
            if taken is not None:
                return taken
        out: list[bytes] = []
        at, size = 0, len(data)
        while at < size and self._clean:
            alike = None
            if self._prefix:
                alike = self.quick(data, at) or (self._alike(data, at) if BY_HAND or not self._framed else None)
            if alike is not None:
                out.append(alike[0])
                at = alike[1]
                continue
            start = data.find(b"\r\n", at + 1, at + 9) + 2
            end = start + size_of(data[at:start - 2]) if start > 2 else -1
            if (end < 0 or data.find(b"\n", start) != end - 2 or data[end - 2:end + 2] != b"\n\n\r\n"
                    or not data.startswith(b'data: {"', start) or data.startswith(ERROR, start)
                    or data.find(ABORT, start, end) >= 0):
                break  # mostly the stream's end
            payload = self._seen(data[start:end])
            self._clean = not self.failure
            if payload:
                out.append(chunk_of(payload) if self._framed else payload)
            at = end + 2
        if at < size:
            out.append(self._feed_end(data[at:]) if self._splicer is None else self._feed_carefully(data[at:]))
        return b"".join(out)

    def _take(self, data: bytes) -> bytes | None:
        """The stream's first events, or all that is left of it, if they are simple; None: nothing was done."""
        position = self._position
        if position.asked_ids:
            return None
        found = whole.take(data, position.api == "chat", position.id, position.created, self._log)
        if found is None:
            return None
        self.taken(found, data)
        return found[0]

    def taken(self, found: whole.Whole, data: bytes) -> None:
        """What ``whole.take`` found in a read, and noted in the log."""
        _, name, created, model, prompt, role, finished, usage, ended, at, to, _ = found
        position = self._position
        if not position.id:
            position.id, position.created, position.model = name, created, model
        position.prompt = position.prompt or prompt
        if role:
            position.roles.add(0)
        if finished:
            position.finished.add(0)  # a stream that goes on from ids has one choice
        position.usage_sent = position.usage_sent or bool(usage)
        if ended:
            self._clean = False
            self.ended = self.done = self._chunks.done = True
        elif to and position.prompt and not position.shows_logprobs:
            self._learn(split_prompt(data[at:to] + b"\n\n")[1], position)

    def _alike(self, data: bytes, at: int) -> tuple[bytes, int] | None:
        """One event as it was learned, from ``at`` on: as ``quick``."""
        prefix, middle, last = self._prefix, self._middle, self._last
        start = data.find(b"\r\n", at, at + 9) + 2
        text = start + len(prefix)
        stop = data.find(middle, text) if start > 2 and data.startswith(prefix, start) else -1
        ids = stop + len(middle)
        close = data.find(b"]", ids)
        shown = data[text:stop]
        end = close + len(last)
        if (stop < 0 or close <= ids or not data.startswith(last, close) or shown.find(b"\n") >= 0
                or data[ids:close].strip(_IN_IDS) or size_of(data[at:start - 2]) != end - 2 - start):
            return None
        self._log += b"%b\t%b\n" % (shown, data[ids:close].replace(b",", b"\t"))
        if shown == b"{}":  # made for the ids alone
            return b"", end
        if self._framed:
            return b"%x\r\n%b%b%b\r\n" % (self._grows + len(shown), self._lead, shown, self._shown), end
        return b"%b%b%b" % (self._lead, shown, self._shown), end

    def _learn(self, event: bytes, mine: Event | Position) -> None:
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
        closing = self._closing(event) if self._prefix else None
        if closing is not None:
            return closing
        prompt, bare = split_prompt(event)
        try:
            noted = decode(bare[6:])
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            self._fail(Kind.BROKEN, "the engine sent an event that cannot be read", str(error))
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
        return TOKEN_IDS.sub(NO_IDS, event) if event.find(_IDS) >= 0 else event

    def _closing(self, event: bytes) -> bytes | None:
        """The event with the finish reason, if it is else as it was learned: noted without decoding it. None: it is not."""
        text = len(self._prefix)
        stop = event.find(_FINISHES, text) if event.startswith(self._prefix) else -1
        ids = event.find(_IDS, stop) + len(_IDS) if stop >= 0 else 0
        close = event.find(b"]", ids)
        if (ids < len(_IDS) or close <= ids or event[ids:close].strip(_IN_IDS) or event.find(b"[", stop, ids - 1) >= 0
                or event[close:] + b"\r\n" != self._last):
            return None
        shown = event[text:stop]
        self._log += b"%b\t%b\n" % (shown, event[ids:close].replace(b",", b"\t"))
        self._position.finished.add(0)  # a stream that goes on from ids has one choice
        return b"%b%b%bnull%b" % (self._lead, shown, event[stop:ids - 1], event[close + 1:])

    def _spliced(self, event: bytes, splicer: Splicer) -> bytes:
        try:
            if event.startswith(b"data: {"):
                left = splicer.take(event)
                if splicer.caught_up and not self._sure:
                    bare = split_prompt(event)[1]
                    self._may_learn(bare, decode(bare[6:]))
                return left
            if event.startswith(DONE):
                splicer.end()
        except Differs as error:
            self._fail(Kind.DIFFERS, "the stream cannot go on as it began", str(error))
        except Ignored as error:
            self._position.forgets = True
            self._fail(Kind.BROKEN, str(error))
        except (msgspec.MsgspecError, UnicodeDecodeError) as error:
            self._fail(Kind.BROKEN, "the engine sent an event that cannot be read", str(error))
        return b"" if self.failure else event

    def _may_learn(self, event: bytes, noted: Event) -> None:
        position = self._position
        if self._sure or not position.prompt or (self._prefix and any(one.finish_reason for one in noted.choices)):
            return  # the last one is unlike the others
        if not (position.shows_logprobs or position.asked_ids or position.way is not Way.CONTINUE):
            self._learn(event, noted)
