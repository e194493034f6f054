"""What of a request is refused by its size, its time and its framing, beside what the parser refuses."""

from __future__ import annotations

from xpyd_sidecar.router.api.faults import HttpFault, bad_request


def too_large_head(limit: int) -> HttpFault:
    """431."""
    return HttpFault(431, f"the request's headers are larger than {limit} bytes", code="headers_too_large")


def too_large_body(limit: int) -> HttpFault:
    """413."""
    return HttpFault(413, f"the request's body is larger than {limit} bytes", code="body_too_large")


def too_slow(allowed_s: float) -> HttpFault:
    """408."""
    return HttpFault(408, f"the request did not come within {allowed_s:g} s", code="request_timeout")


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
