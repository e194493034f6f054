"""Errors as clients see them: OpenAI's form, made in one place. And how an attempt failed, and why, in the two forms that
are made where it is known:

    FailureReason("it closed the connection", "[Errno 104] Connection reset by peer")
                   └ said: clients, too        └ more: the log, and who has the admin token

What is ``said`` names instances at most: no addresses, and no words of the system or of an engine, which may hold some.
"""

from __future__ import annotations

from enum import Enum

import msgspec

MOST_NAMED = 16
"""Models that an answer names; GET /v1/models has all."""
POISON = "poison_request"
"""Code of the answer to a request that ends engines."""
OF_THE_ENGINE = frozenset({401, 403, 408, 425, 429})
"""4xx of a prefill engine that say something of the engine, not of the request: another prefill is asked."""


class FailureReason(msgspec.Struct, frozen=True):
    """One reason."""

    said: str
    more: str = ""

    @property
    def full(self) -> str:
        """Both."""
        return f"{self.said}: {self.more}" if self.more else self.said

    def with_name(self, who: str) -> FailureReason:
        """The same, behind the name of what failed."""
        return FailureReason(f"{who} failed: {self.said}", self.more)


class FailureKind(Enum):
    """How a leg failed."""

    REFUSED = "refused"
    """No connection; the engine never saw the leg."""
    LOST = "lost"
    """The connection broke, or ended before the answer was whole."""
    ABORTED = "aborted"
    """The engine said that it gave up: an error event, or finish reason ``abort``."""
    BROKEN = "broken"
    """The answer is not what HTTP or server-sent events allow."""
    LACKING = "lacking"
    """It was not tried: this process has no file, port or memory for a connection. Says nothing of the instance."""
    DIFFERS = "differs"
    """A stream that was to go on did not say again what the client has: it is another answer."""

    @property
    def gone(self) -> bool:
        """Whether the instance is not there any more, as far as a leg can tell."""
        return self in {FailureKind.REFUSED, FailureKind.LOST}



class HttpFault(Exception):
    """An answer that refuses a request.

    ``status``: HTTP status. ``kind``: OpenAI's ``type``. ``code``: a word that programs can test. ``param``: the request
    field at fault. ``retry_after_s``: when to come again (header Retry-After), None where coming again does not help.
    """

    def __init__(self, status: int, message: str, *, kind: str = "invalid_request_error", code: str | None = None,
                 param: str | None = None, retry_after_s: int | None = None, allow: str | None = None) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.kind = kind
        self.code = code
        self.param = param
        self.retry_after_s = retry_after_s
        self.allow = allow

    @property
    def outcome(self) -> str:
        """Of a request that it refuses before anything was sent, as records and metrics call it."""
        if self.code == POISON:
            return "poison"
        return "unavailable" if self.status == 503 else "refused"

    def body(self) -> bytes:
        """``{"error": {"message", "type", "param", "code"}}``."""
        return msgspec.json.encode(
            {"error": {"message": self.message, "type": self.kind, "param": self.param, "code": self.code or self.status}})

    def event(self) -> bytes:
        """The same as one server-sent event."""
        return b"data: " + self.body() + b"\n\n"

    def headers(self) -> list[tuple[bytes, bytes]]:
        """Headers that go with it."""
        return [(b"content-type", b"application/json"),
                *([] if self.retry_after_s is None else [(b"retry-after", b"%d" % self.retry_after_s)]),
                *([] if self.allow is None else [(b"allow", self.allow.encode())]),
                *([(b"www-authenticate", b"Bearer")] if self.status == 401 else [])]


def bad_request(message: str, param: str | None = None, code: str | None = None) -> HttpFault:
    """400: the request is wrong, and the client must change it."""
    return HttpFault(400, message, code=code, param=param)


def unknown_model(model: str, served: list[str]) -> HttpFault:
    """404, as OpenAI answers for a model that is not there."""
    more = f" and {len(served) - MOST_NAMED} more" if len(served) > MOST_NAMED else ""
    names = (", ".join(repr(name) for name in served[:MOST_NAMED]) or "none yet") + more
    return HttpFault(404, f"model {model!r} is not served here; served: {names}", kind="NotFoundError",
                     code="model_not_found", param="model")


def names_untold() -> HttpFault:
    """503: which names are served is not known, since no instance has told them yet."""
    return unavailable("no instance has told yet which models it serves")


def came_back() -> HttpFault:
    """508: it would go round for ever."""
    return HttpFault(508, "this request came from this very router: the address of an instance is the router's own",
                     kind="upstream_error", code="loop_detected")


def not_served(path: str, reason: str) -> HttpFault:
    """404: engines have such a path, and the router does not."""
    return HttpFault(404, f"{path} is not served by this router: {reason}", kind="NotFoundError", code="path_not_served")


def unavailable(reason: str, retry_after_s: int = 1) -> HttpFault:
    """503: nothing is wrong with the request."""
    return HttpFault(503, reason, kind="service_unavailable", code="unavailable", retry_after_s=retry_after_s)


def too_many(reason: str, retry_after_s: int) -> HttpFault:
    """429: this client has its share."""
    return HttpFault(429, reason, kind="rate_limit_error", code="rate_limit_exceeded", retry_after_s=retry_after_s)


def upstream(reason: str, status: int = 502) -> HttpFault:
    """502 or 504: an engine failed, and nobody else could take over."""
    return HttpFault(status, reason, kind="upstream_error", code="engine_timeout" if status == 504 else "engine_failed")


def poisonous(reason: str) -> HttpFault:
    """502: engines died of this request, so no other is asked."""
    return HttpFault(502, reason, kind="upstream_error", code=POISON)


def refuses_request(status: int) -> bool:
    """Whether an engine's answer says that the request is wrong; it may still be right for an engine of the other role."""
    return 400 <= status < 500 and status not in OF_THE_ENGINE
