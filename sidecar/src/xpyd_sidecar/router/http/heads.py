"""What of a request is known and refused by its head: sizes and times, framing, the host it is for, what its body is
written in, and which origins may read its answer.
"""

from __future__ import annotations

import ipaddress
import os
import re
from collections.abc import Mapping

from xpyd_sidecar.router.api.faults import HttpFault, bad_request, unavailable

ANY = "*"
METHODS = b"GET, HEAD, OPTIONS, POST"
"""Those that any path takes."""
KEPT_S = 600
"""How long a browser may keep the answer to a preflight."""
_NAMES = re.compile(rb"[A-Za-z0-9!#$%&'*+.^_`|~, -]*")
"""Names of headers, as Access-Control-Request-Headers lists them."""
Headers = Mapping[bytes, bytes]
MAX_KNOWN = 64
"""Values of a header that are remembered as right, so that nearly all requests cost one look."""
JSON = b"application/json"
_HOST = re.compile(rb"[A-Za-z0-9._~!$&'()*+,;=%:\[\]-]*")
"""What a host and a port may be written with (RFC 3986, section 3.2.2)."""
_PORT = re.compile(rb"(:[0-9]*)?")
IDLE_S = 75.0
"""How long a connection may lie idle between requests."""
IDLE_LEAVING_S = 1.0
"""The same for a connection without any request yet when the server has stopped listening: one may be on its way."""
HEAD_S = 10.0
"""How long a head may take to come."""
MAX_HEADERS = 128
UNKNOWN_HEAD = 16 << 10
"""Bytes of a head at most until a client key was seen on its connection, where there are keys."""
UNREAD_S = 60.0
"""How long a client may leave bytes unread before it counts as gone."""
LINGER_S = 3.0
"""How long a closed connection may take to send its last bytes and to see the client's end."""
SLOWEST_BODY = 100_000
"""Bytes a second that a large body must come with, beyond the time that every request has. So few that clients far away
can send; where there is no room for all, a body must come ten times as fast (``body_budget.PRESSED``)."""
_BYTES = 16
_AT_ONCE = 64
_drawn: list[str] = []


def fresh() -> str:
    """A name for a request or a transfer: 32 hex digits that nobody can guess and nobody has seen.

    The system is asked for many at a time. A process of its own draws its own: nothing is shared with a child.
    """
    if not _drawn:
        _drawn.extend(os.urandom(_BYTES * _AT_ONCE).hex(" ", _BYTES).split())
    return _drawn.pop()


os.register_at_fork(after_in_child=_drawn.clear)


def too_large_head(limit: int) -> HttpFault:
    """431."""
    return HttpFault(431, f"the request's headers are larger than {limit} bytes", code="headers_too_large")


def too_many_headers() -> HttpFault:
    """431."""
    return HttpFault(431, f"the request has more than {MAX_HEADERS} headers", code="headers_too_large")


def gave_way() -> HttpFault:
    """408."""
    words = "this router has as many connections as it may, and this one had brought no whole request"
    return HttpFault(408, words, code="request_timeout", retry_after_s=1)


def nothing_at(path: str) -> HttpFault:
    """404."""
    return HttpFault(404, f"there is nothing at {path}", kind="NotFoundError", code="unknown_path")


def allow_methods(path: str, method: str, *methods: str) -> None:
    """Raises HttpFault, 405, where a path takes other methods."""
    if method not in methods and not (method == "HEAD" and "GET" in methods):
        words = f"{path} takes {' or '.join(methods)}, not {method}"
        raise HttpFault(405, words, code="method_not_allowed", allow=", ".join(methods))


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


class Hosts:
    """Which hosts a router answers for.

    One that listens on this machine alone answers for this machine's own names, and for those in its settings. Else a page
    of any web site could have its name point here, and would be of the same origin as the router for a browser.
    """

    def __init__(self, listen: str, names: tuple[str, ...]) -> None:
        """``listen``: the address of the router; ``names``: those that are allowed beside this machine's own."""
        self._only: frozenset[bytes] | None = None
        if is_loopback(listen.encode()):
            self._only = frozenset(name.lower().encode() for name in names)
        self.known: set[bytes] = set()
        """Headers that were looked at and are right: nothing is to be asked of them."""

    def check(self, given: bytes | None) -> None:
        """Judge a Host header. Raises HttpFault."""
        if given is None:
            return
        if not _HOST.fullmatch(given):
            raise bad_request("malformed HTTP: Host is not the name of a host", code="malformed_http")
        if self._only is not None and not is_loopback(name := name_of(given)) and name not in self._only:
            words = f"this router answers for this machine alone, not for {name.decode()!r}; router.hosts can name more"
            raise HttpFault(421, words, code="misdirected_request")
        if len(self.known) >= MAX_KNOWN:
            self.known.clear()
        self.known.add(given)


def name_of(host: bytes) -> bytes:
    """A host without its port, in lower case; as it is where that is no port."""
    host = host.lower()
    end = host.find(b"]") + 1 if host[:1] == b"[" else host.find(b":")
    return host[:end] if end > 0 and _PORT.fullmatch(host, end) else host


def is_loopback(name: bytes) -> bool:
    """Whether a host's name or address (``[::1]`` or ``::1``) is this machine's own, reached from itself alone."""
    if name in {b"localhost", b"localhost."}:
        return True
    try:
        return ipaddress.ip_address(name.decode().removeprefix("[").removesuffix("]")).is_loopback
    except ValueError:
        return False


class Media:
    """What bodies are written in."""

    def __init__(self) -> None:
        self.known = {JSON}
        """Media types that were looked at and are JSON's: without a coding nothing is to be asked of them."""

    def check(self, headers: Headers, *, json: bool) -> None:
        """Judge the head of a request with a body. ``json``: it must be JSON. Raises HttpFault."""
        coding = headers.get(b"content-encoding")
        if coding is not None and coding.strip().lower() not in {b"", b"identity"}:
            words = f"Content-Encoding: {coding[:40].decode('latin-1')} is not understood; send the body as it is"
            raise HttpFault(415, words, code="unsupported_encoding")
        if not json:
            return
        kind = headers.get(b"content-type", b"")
        # As vLLM's validate_json_request (entrypoints/serve/utils/api_utils.py). The type must be said: without one, a page
        # of any web site could send prompts, since a browser asks nobody before it sends text.
        if kind.lower().split(b";", 1)[0] != JSON:
            raise HttpFault(415, "Unsupported Media Type: Only 'application/json' is allowed",
                            code="unsupported_media_type")
        if len(self.known) < MAX_KNOWN:
            self.known.add(kind)


class CorsRules:
    """Pages of other origins that may ask the router (CORS), as FastAPI's CORSMiddleware does it for --allowed-origins.

    ``OPTIONS`` with Origin and Access-Control-Request-Method is a preflight: 204, or 400 for an origin that is not allowed.
    The answer to any other request with Origin says whether the page may read it.
    """

    def __init__(self, origins: tuple[str, ...]) -> None:
        self._any = ANY in origins
        self._origins = frozenset(origin.encode() for origin in origins)

    def lines(self, origin: bytes) -> bytes:
        """Lines for the head of an answer to a request of this origin."""
        if self._any:
            return b"access-control-allow-origin: *\r\n"
        if origin in self._origins:
            return b"access-control-allow-origin: %b\r\nvary: Origin\r\n" % origin
        return b"vary: Origin\r\n"

    def preflight(self, headers: Headers) -> list[tuple[bytes, bytes]]:
        """Headers of the answer to a preflight, beside ``lines``. Raises HttpFault: the origin is not allowed."""
        if not self._any and headers.get(b"origin", b"") not in self._origins:
            raise bad_request("Disallowed CORS origin", code="cors_origin")
        found = [(b"access-control-allow-methods", METHODS), (b"access-control-max-age", b"%d" % KEPT_S)]
        wanted = headers.get(b"access-control-request-headers", b"")
        if wanted and _NAMES.fullmatch(wanted):
            found.append((b"access-control-allow-headers", wanted))
        return found


def is_preflight(method: str, headers: Headers) -> bool:
    """Whether a browser asks before it sends the request itself."""
    return method == "OPTIONS" and b"origin" in headers and b"access-control-request-method" in headers
