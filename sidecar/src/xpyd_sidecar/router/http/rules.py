"""How long a client may take, and what of a request is refused by its size, time and framing."""

from __future__ import annotations

from xpyd_sidecar.router.api.faults import HttpFault, bad_request, unavailable

IDLE_S = 75.0
"""How long a connection may lie idle between requests."""
IDLE_LEAVING_S = 1.0
"""The same for a connection without any request yet when the server has stopped listening: one may be on its way."""
UNREAD_S = 60.0
"""How long a client may leave bytes unread before it counts as gone."""
LINGER_S = 3.0
"""How long a closed connection may take to send its last bytes and to see the client's end."""
SLOWEST_BODY = 100_000
"""Bytes a second that a large body must come with, beyond the time that every request has. So few that clients far away
can send; where there is no room for all, a body must come ten times as fast (``body_budget.PRESSED``)."""


def too_large_head(limit: int) -> HttpFault:
    """431."""
    return HttpFault(431, f"the request's headers are larger than {limit} bytes", code="headers_too_large")


def too_large_body(limit: int) -> HttpFault:
    """413."""
    return HttpFault(413, f"the request's body is larger than {limit} bytes", code="body_too_large")


def too_slow(allowed_s: float) -> HttpFault:
    """408."""
    return HttpFault(408, f"the request did not come within {allowed_s:g} s", code="request_timeout")


def no_room() -> HttpFault:
    """503."""
    return unavailable("this router holds as many bytes of requests as it may: there is no room for this body now")


def too_slow_for_the_room() -> HttpFault:
    """408."""
    words = "this router holds as many bytes of requests as it may, and this body came more slowly than others"
    return HttpFault(408, words, code="request_timeout", retry_after_s=1)


def framing_fault(version: str, hosts: int, coding: bytes | None) -> HttpFault | None:
    """What the parser lets pass and RFC 9112 does not: its sections 3.2 and 6.1."""
    if hosts > 1 or (version == "1.1" and not hosts):
        return bad_request(f"malformed HTTP: {hosts or 'no'} Host headers", code="malformed_http")
    if coding is None:
        return None
    if version == "1.0":
        return bad_request("malformed HTTP: Transfer-Encoding in HTTP/1.0", code="malformed_http")
    if coding.strip().lower() != b"chunked":
        return HttpFault(501, f"Transfer-Encoding: {coding[:40].decode('latin-1')} is not understood",
                         code="transfer_encoding")
    return None
