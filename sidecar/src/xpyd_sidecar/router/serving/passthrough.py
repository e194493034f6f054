"""What the attempts of a request ask whose answer passes through, whatever it is.

    a dialect that generates    prefill makes the prompt's KV, decode gets what the client sent and where the KV is
    any other path              one decode instance does all of it: the client's body, or its form while it comes
"""

from __future__ import annotations

from collections.abc import Callable

from msgspec import Raw

from xpyd_sidecar.contract.ids import Role
from xpyd_sidecar.router.api import paths
from xpyd_sidecar.router.api.bodies import PassedBody
from xpyd_sidecar.router.api.faults import HttpFault
from xpyd_sidecar.router.api.hidden import refuse_in_form
from xpyd_sidecar.router.api.paths import BodyKind, Route
from xpyd_sidecar.router.fleet.member import EngineTarget
from xpyd_sidecar.router.http.reply import HttpRequest
from xpyd_sidecar.router.http.upload import Upload
from xpyd_sidecar.router.http.wire import before_length, chunk_of, lines_of
from xpyd_sidecar.router.serving import instructions as mv
from xpyd_sidecar.router.serving.asks import Asked, Asks, Headers
from xpyd_sidecar.router.stream.answers import AnswerReader, OpaqueAnswer
from xpyd_sidecar.router.stream.events import EventStream
from xpyd_sidecar.router.upstream.call import UpstreamCall

HEADERS = (b"accept", b"traceparent", b"tracestate", b"x-session-id", b"x-vllm-priority", b"anthropic-version",
           b"anthropic-beta")
"""Headers of clients that engines read, beside the content type; keys and cookies stay here."""
_NAME = 32
"""Bytes of a form's piece that are looked at again with the next one: a name may lie across both."""


class Passthrough(Asks):
    """Of one request."""

    passed_on = HEADERS
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
        self._split = paths.in_dialect(route.path, asked.fields)
        if self._split is not None:
            self.stream, self.api = self._split.stream, self._split.dialect.name
            self.skips, self.prompt = self._split.alone, self._split.prompt

    @property
    def alone(self) -> bool:
        """Whether it goes without prefill."""
        return self._split is None or bool(self.skips)

    @property
    def unread(self) -> bool:
        """See ``Asks``."""
        upload = self._request.upload
        return upload is not None and not upload.done

    # ---- what engines are asked

    def leg(self, send: mv.SendAttempt, request_id: bytes, *, speaks: bool) -> Asked:  # noqa: ARG002 (Asks' names)
        """See ``Asks``."""
        params, split = send.params, self._split
        if params is None or split is None:
            return request_id, self._body
        return request_id, split.prefill_body(params) if send.role is Role.PREFILL else split.decode_body(params)

    def message(self, target: EngineTarget, headers: Headers, body: bytes) -> bytes:
        """The whole HTTP request of a leg; of a form the head alone."""
        request, address, upload = self._request, target.http, self._request.upload
        if upload is None and request.method == "POST":
            before = before_length.__wrapped__(request.target, address)  # clients choose the query: it is not remembered
            return b"%b%d\r\n%b\r\n%b" % (before, len(body), lines_of(headers), body)
        if upload is not None:
            length = (b"transfer-encoding", b"chunked") if upload.length is None else (
                b"content-length", b"%d" % upload.length)
            headers = [(b"content-type", request.headers.get(b"content-type", b"")), length, *headers]
        method = b"POST" if upload is not None else b"GET"  # for HEAD as well: its answer's length is what it would be
        return b"%b %b HTTP/1.1\r\nhost: %b\r\n%b\r\n" % (method, request.target, address.encode(), lines_of(headers))

    def body(self, refuse: Callable[[HttpFault], None]) -> FormBody | None:
        """Who sends the body of the next leg while it comes. ``refuse`` is told of what is wrong with it."""
        upload = self._request.upload
        return None if upload is None else FormBody(upload, refuse)

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


class FormBody:
    """A form's body on its way from its client to an engine (``pool.Sender``, ``upload.BodyTaker``)."""

    def __init__(self, upload: Upload, refuse: Callable[[HttpFault], None]) -> None:
        self._upload = upload
        self._refuse = refuse
        self._call: UpstreamCall | None = None
        self._seen = b""
        self.sent = False

    def on_open(self, call: UpstreamCall) -> None:
        """The engine takes it: hand on what has come, and what comes."""
        self._call = call
        self._upload.take(self)

    def on_full(self, full: bool) -> None:
        """The engine takes it slower than it comes: let the client wait."""
        self._upload.wait(full)

    def on_piece(self, data: bytes) -> None:
        """More of it came. A field that a client must not send is refused."""
        if self._call is None:
            return
        seen = self._seen + data
        self._seen = seen[-_NAME:]
        try:
            refuse_in_form(seen)
        except HttpFault as fault:
            self.on_broken(fault)
            return
        self._call.write(chunk_of(data) if self._upload.length is None else data)

    def on_body(self) -> None:
        """That was all."""
        if self._call is not None:
            if self._upload.length is None:
                self._call.write(b"0\r\n\r\n")
            self.sent = True

    def on_broken(self, fault: HttpFault) -> None:
        """It is wrong, or will not be whole."""
        self._call = None
        self._refuse(fault)
