"""What the attempts of a request ask their engines, and what reads the answers, in the two forms that there are.

    Generation    completions and chats: prefill makes the prompt's KV; decode's stream is read, by what the client has
                  of it (``position``)
    Passthrough   a dialect that generates: prefill makes the prompt's KV, decode gets what the client sent and where the
                  KV is; any other path: one decode instance does all of it, the client's body, or its form while it comes

    Serving ──leg──▶ (request id, body)
            ──reader──▶ what reads the answer
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from msgspec import Raw

from xpyd_sidecar.contract.ids import Role
from xpyd_sidecar.router.api import bodies
from xpyd_sidecar.router.api.bodies import PassedBody
from xpyd_sidecar.router.api.failover_modes import SamplingTerms
from xpyd_sidecar.router.api.faults import HttpFault
from xpyd_sidecar.router.api.paths import PATHS, BodyKind, Route
from xpyd_sidecar.router.http.body_budget import Upload
from xpyd_sidecar.router.http.reply import HttpRequest
from xpyd_sidecar.router.http.wire import before_length, lines_of, post_bytes
from xpyd_sidecar.router.serving import instructions as mv
from xpyd_sidecar.router.serving.attempts import Asks, GoesOn
from xpyd_sidecar.router.serving.profiles import RequestProfile
from xpyd_sidecar.router.stream import continuation
from xpyd_sidecar.router.stream.answers import MAX_EARLY, AnswerReader, LargeAnswer, OpaqueAnswer
from xpyd_sidecar.router.stream.events import EventStream
from xpyd_sidecar.router.stream.position import Position
from xpyd_sidecar.router.stream.replay_recorder import FirstToken, stream_of
from xpyd_sidecar.router.stream.splice import Splicer
from xpyd_sidecar.router.stream.token_recorder import NotedStream

LEGS = 2
"""Engines that get a body: each takes it as fast as it can, and until then it is held for it."""
IDS = 2
"""Bytes of a prompt's ids for each byte of the prompt: up to 7 for a token, which is seldom less than 4 bytes of text."""
HEADERS = (b"traceparent", b"tracestate", b"x-session-id", b"x-vllm-priority")
"""Headers of clients that engines read; all others stay here."""


class Generation(Asks):
    """What one completion or chat asks, and how far its client's stream is (``attempts.GoesOn``)."""

    passed_on = HEADERS
    _asked: bodies.GenerationRequest | None = None
    _going: continuation.Going | None = None
    _large: LargeAnswer | None = None
    """What reads its answer, where that is to come whole."""

    def __init__(self, request: bodies.GenerationRequest, profile: RequestProfile,
                 terms: Callable[[], SamplingTerms]) -> None:
        """``terms``: on which streams go on now; by those of a request's beginning it is known what engines added to it."""
        super().__init__(request.api, request.model, request.fields)
        self._request = request
        self.api, self.stream, self.skips, self.prompt = request.api, request.stream, request.skips, request.prompt
        self.opaque = not request.stream
        self._terms = terms
        self._profile = profile
        begins = profile.begins
        self.position: Position | None = None if begins is None else begins.fresh_copy()
        """What the client has of a stream that can go on elsewhere."""
        self.speaks = profile.speaks

    @property
    def generates(self) -> bodies.GenerationRequest:
        """What it asks."""
        return self._request

    @property
    def resumable_stream(self) -> GoesOn | None:
        """What its exchange wants to know of a stream that may go on elsewhere; None where it cannot."""
        return None if self.position is None else self

    @property
    def goes_on(self) -> bool:
        """Whether the client's stream can go on elsewhere."""
        return (self.position is not None
                and continuation.may_go_on(self._request, self.position, self._profile.terms, self._terms()))

    def reserves(self, body: int) -> int:
        """See ``Asks``: the body to both engines, since whatever field is long goes to both; the prompt's ids or a whole
        answer.
        """
        later = 0 if self.position is None or self.position.replays else IDS * len(self.prompt)
        return LEGS * body + (later if self.stream else MAX_EARLY)

    @property
    def keeps(self) -> int:
        """See ``Asks``: the ids of the prompt, and what the client has."""
        position = self.position
        return 0 if position is None else len(position.prompt) + len(position.log)

    def tail(self) -> bytes | None:
        """What is missing of the client's stream, where no engine is needed for it."""
        return None if self.position is None else self.position.tail()

    @property
    def _now(self) -> bodies.GenerationRequest:
        """What legs ask now."""
        if self._asked is None:
            self._asked = continuation.first_request(self._request, self.position)
        return self._asked

    def leg(self, send: mv.SendAttempt, lines: bytes, *, speaks: bool) -> bytes:
        """See ``Asks``."""
        params, profile = send.params, self._profile
        cuts = self.cuts if self._going is None else ""  # shares are those of the prompt alone
        if params is not None and speaks:
            body = bodies.first_token_body(self._now, params, cuts)
        elif params is not None and profile.known and self._going is None:
            body = profile.body(self.prompt, params, cuts)
        else:
            body = bodies.body_of(self._now, send.role, params, cuts)
        return post_bytes(before_length(PATHS[self.api], send.target.http), lines, body)

    def reader(self, role: Role, *, framed: bool, speaks: bool) -> EventStream | None:
        """What reads the answer of the next leg; None where it is wanted whole."""
        if role is Role.PREFILL:
            return FirstToken(framed=framed) if speaks else None
        if not self._request.stream:
            self._large = LargeAnswer(framed=framed)
            return self._large
        if self._going is None or self.position is None:
            begins = self._profile.begins
            if begins is not None and self.position is not None and self.position.id:
                self.position = begins.fresh_copy()  # that leg gave nothing to the client
            return stream_of(self.position, framed=framed)
        return NotedStream(self.position, Splicer(self.position, self._going), framed=framed)

    def lengths(self) -> tuple[int, int] | None:
        """``(prompt tokens, generated tokens)`` of what was relayed; None where nothing was read of it."""
        position = self.position
        if position is not None:
            return position.prompt_tokens, position.tokens
        large = self._large
        return None if large is None or not large.taken else (large.answer.prompt_tokens, large.answer.tokens)

    def on_refused(self) -> None:
        """An engine answered 4xx: where a stream goes on it does not take token ids."""
        if self._going is not None and self.position is not None:
            self.position.forgets = True

    def resume(self) -> tuple[str, int]:
        """The stream goes on elsewhere: in which way, and how many tokens the client has."""
        position = self.position
        assert position is not None, "a stream goes on that cannot"
        self._going = continuation.go_on(self._request, position, self._terms().told)
        self._asked = self._going.request
        return ("continue" if self._going.keep else "replay"), position.tokens

    def on_first_token(self, token: FirstToken, streams: Iterable[EventStream | None]) -> None:
        """Prefill's token goes to the client: decode's stream goes on behind it."""
        position = self.position
        assert position is not None
        position.prompt = token.prompt
        for event in token.events:
            position.note(event)
        going = continuation.replay(self._request, position, counts=False)
        for stream in streams:
            if isinstance(stream, NotedStream):
                stream.splice(Splicer(position, going))


PASSED_HEADERS = (b"accept", b"traceparent", b"tracestate", b"x-session-id", b"x-vllm-priority", b"anthropic-version",
                  b"anthropic-beta")
"""Headers of clients that engines read, beside the content type; keys and cookies stay here."""


class Passthrough(Asks):
    """What a request asks whose answer passes through, whatever it is."""

    passed_on = PASSED_HEADERS
    opaque = True

    def __init__(self, route: Route, request: HttpRequest, asked: PassedBody) -> None:
        """One without a JSON body is like no other."""
        alike = asked.fields if route.body is BodyKind.JSON else {"": Raw(request.request_id.encode())}
        super().__init__(route.path, asked.model or None, alike)
        self.path, self.once = route.path, request.upload is not None
        self._request = request
        self._body = asked.body
        self._answer: AnswerReader | None = None
        """What is read of the latest answer, where it generates."""
        self._split = None if route.api is None else bodies.in_dialect(route.api, asked)
        if self._split is not None:
            self.stream, self.api = self._split.stream, self._split.api
            self.skips, self.prompt = self._split.skips, self._split.prompt

    @property
    def decode_only(self) -> bool:
        """Whether it goes without prefill."""
        return self._split is None or bool(self.skips)

    def reserves(self, body: int) -> int:
        """See ``Asks``: the body to each engine, and what waits for the first output."""
        return body if self.decode_only else LEGS * body + MAX_EARLY

    @property
    def unread(self) -> bool:
        """See ``Asks``."""
        upload = self._request.upload
        return upload is not None and not upload.done

    @property
    def still_comes(self) -> bool:
        """See ``Asks``."""
        upload = self._request.upload
        return upload is not None and not upload.done and not upload.blocked

    # ---- what engines are asked

    def leg(self, send: mv.SendAttempt, lines: bytes, *, speaks: bool) -> bytes:  # noqa: ARG002 (Asks' names)
        """See ``Asks``; of a form the head alone."""
        params, split = send.params, self._split
        body = self._body if params is None or split is None else bodies.body_of(split, send.role, params, self.cuts)
        request, address, upload = self._request, send.target.http, self._request.upload
        if upload is None and request.method == "POST":
            before = before_length.__wrapped__(request.target, address)  # clients choose the query: it is not remembered
            return post_bytes(before, lines, body)
        if upload is not None:
            length = (b"transfer-encoding", b"chunked") if upload.length is None else (
                b"content-length", b"%d" % upload.length)
            lines = lines_of([(b"content-type", request.headers.get(b"content-type", b"")), length]) + lines
        method = b"POST" if upload is not None else b"GET"  # for HEAD as well: its answer's length is what it would be
        return b"%b %b HTTP/1.1\r\nhost: %b\r\n%b\r\n" % (method, request.target, address.encode(), lines)

    def body(self, refuse: Callable[[HttpFault], None]) -> Upload | None:
        """Who sends the body of the next leg while it comes. ``refuse`` is told of what is wrong with it."""
        upload = self._request.upload
        if upload is not None:
            upload.refuse = refuse
        return upload

    def reader(self, role: Role, *, framed: bool, speaks: bool) -> EventStream | None:  # noqa: ARG002 (Asks' names)
        """What reads the answer of the next leg; None where it is wanted whole."""
        if role is Role.PREFILL:
            return None
        self._answer = None if self._split is None else AnswerReader(stream=self._split.stream)
        return OpaqueAnswer(framed=framed, wanted=self._request.method != "HEAD", answer=self._answer)

    # ---- what they answer

    def failure(self) -> str:
        """What an engine says in an answer, which is whole, of its failure; empty where it says none."""
        failed = self._answer is not None and self._answer.failed
        return "the engine says in its answer that it failed" if failed else ""

    def lengths(self) -> tuple[int, int] | None:
        """``(prompt tokens, generated tokens)`` of what was relayed; None where nothing was read of it."""
        return None if self._answer is None else (self._answer.prompt_tokens, self._answer.tokens)
