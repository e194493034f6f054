"""Streams that can go on from token ids: text and ids are noted on their way, and ids hidden from the client.

Events that are like the one before are recognized, so that noting costs a few searches.
"""

from __future__ import annotations

import re

import msgspec

from xpyd_sidecar.router.api.failover_modes import FailoverMode
from xpyd_sidecar.router.api.faults import FailureKind
from xpyd_sidecar.router.relay.fast import NOTED, Whole, take
from xpyd_sidecar.router.stream.events import DONE, END, EventStream
from xpyd_sidecar.router.stream.position import Position, StreamEvent, split_prompt
from xpyd_sidecar.router.stream.splice import Differs, IdsIgnored, Splicer

_IDS = b'"token_ids":['
TOKEN_IDS = re.compile(rb'"token_ids":\[[0-9,]*\]')
NO_IDS = b'"token_ids":null'
_ONE = frozenset({0})
_encode = msgspec.json.Encoder().encode
decode = msgspec.json.Decoder(StreamEvent).decode


class ReadStream(EventStream):
    """A stream whose events are read."""

    __slots__ = ()
    _plain = False

    def _read(self, event: bytes) -> StreamEvent | None:
        """What an event says; None where it cannot be read: the stream has failed then."""
        try:
            return decode(event[6:])
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            self._fail(FailureKind.BROKEN, "the engine sent an event that cannot be read", str(error))
            return None


class NotedStream(ReadStream):
    """A stream that can go on from token ids: they are noted, and hidden from the client.

    Engines write every event of a stream alike, so what stands around text and ids is learned from one of them:

        data: {… ,"choices":[{"index":0,"text": "Hello" ,"logprobs":null,"finish_reason":null,…,"token_ids":[ 15496 ]}]}
        └────────────── prefix ───────────────┘       └───────────────────── middle ────────────────────────┘     └last┘

    A chat's first event says the role alone, so what stands behind its text is guessed from the stream before, and learned
    where the guess is wrong. A chunk that has these around its text is not decoded (``quick``): text and ids go to the log,
    and the client's chunk is put together from what was learned. A stream that goes on behind another one is spliced to it
    until it has caught up; then it is as any other, under the first one's name.
    """

    __slots__ = ("_position", "_splicer")
    _simple = NOTED

    def __init__(self, position: Position, splicer: Splicer | None = None, *, framed: bool) -> None:
        super().__init__(framed=framed)
        self._position = position
        self._splicer = splicer
        self._log = position.log
        self._prefix = b""
        """Nothing was learned yet."""

    def splice(self, splicer: Splicer) -> None:
        """The client has got something meanwhile. To be called before anything of this stream went to it."""
        self._splicer = splicer
        self._prefix = b""

    def feed(self, data: bytes) -> bytes:
        """What may be relayed of the bytes read."""
        position = self._position
        if (self._framed and self._clean and self._splicer is None and not position.asked_ids
                and (not position.id or data.endswith(END))):  # its first events, or all that is left of it
            found = take(data, position.api == "chat", position.id, position.created, self._log)
            if found is not None:
                self.on_taken(found, data)
                return found[0]
        return super().feed(data)

    def _feed_end(self, data: bytes) -> bytes:
        return super()._feed_end(data) if self._splicer is None else self._feed_carefully(data)

    def on_taken(self, found: Whole, data: bytes) -> None:
        """What ``take`` found in a read, and noted in the log."""
        _, name, created, model, prompt, role, finished, usage, ended, at, to, _ = found
        position = self._position
        if not position.id:
            position.id, position.created, position.model = name, created, model
        if prompt and not position.prompt:
            position.prompt = prompt
        if role:
            position.roles |= _ONE
        if finished:
            position.finished |= _ONE  # a stream that goes on from ids has one choice
        if usage:
            position.usage_sent = True
        if ended:
            self._clean = False
            self.ended = self.done = True
        elif to and position.prompt and not position.shows_logprobs:
            self._learn(split_prompt(data[at:to] + b"\n\n")[1], position)

    def _learn(self, event: bytes, mine: StreamEvent | Position) -> None:
        """``event``: whole, without the prompt's ids. ``mine``: whose id and time stand in it."""
        first = self._position
        if not self._framed or not self.learn(event, 0, len(event) - 2, first.api == "chat", self._log):
            return
        if self._splicer is not None and (mine.id, mine.created) != (first.id, first.created):  # behind another stream
            lead = self._prefix.replace(b'"id":%b' % _encode(mine.id), b'"id":%b' % _encode(first.id), 1)
            self._lead = lead.replace(b'"created":%d' % mine.created, b'"created":%d' % first.created, 1)

    def _seen(self, event: bytes) -> bytes:
        if self._splicer is not None:
            return self._spliced(event, self._splicer)
        if not event.startswith(b"data: {"):
            return event
        prompt, bare = split_prompt(event)
        noted = self._read(bare)
        if noted is None:
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

    def _spliced(self, event: bytes, splicer: Splicer) -> bytes:
        try:
            if event.startswith(b"data: {"):
                left = splicer.take(event)
                if splicer.caught_up:
                    bare = split_prompt(event)[1]
                    self._may_learn(bare, decode(bare[6:]))
                return left
            if event.startswith(DONE):
                splicer.end()
        except Differs as error:
            self._fail(FailureKind.DIFFERS, "the stream cannot go on as it began", str(error))
        except IdsIgnored as error:
            self._position.forgets = True
            self._fail(FailureKind.BROKEN, str(error))
        except (msgspec.MsgspecError, UnicodeDecodeError) as error:
            self._fail(FailureKind.BROKEN, "the engine sent an event that cannot be read", str(error))
        return b"" if self.failure else event

    def _may_learn(self, event: bytes, noted: StreamEvent) -> None:
        position = self._position
        last = self._prefix and any(one.finish_reason for one in noted.choices)  # which is unlike the others
        if position.prompt and not (last or position.shows_logprobs or position.asked_ids
                                    or position.way is not FailoverMode.CONTINUE):
            self._learn(event, noted)
