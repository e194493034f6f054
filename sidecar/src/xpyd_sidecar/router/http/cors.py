"""Pages of other origins that may ask the router (CORS), as FastAPI's CORSMiddleware does it for vLLM's --allowed-origins.

    OPTIONS, with Origin and Access-Control-Request-Method     preflight: 204, or 400 for an origin that is not allowed
    any other request with Origin                              its answer says that the page may read it
"""

from __future__ import annotations

import re
from collections.abc import Mapping

from xpyd_sidecar.router.api.faults import bad_request

ANY = "*"
METHODS = b"GET, HEAD, OPTIONS, POST"
"""Those that any path takes."""
KEPT_S = 600
"""How long a browser may keep the answer to a preflight."""
_NAMES = re.compile(rb"[A-Za-z0-9!#$%&'*+.^_`|~, -]*")
"""Names of headers, as Access-Control-Request-Headers lists them."""
Headers = Mapping[bytes, bytes]


class CorsRules:
    """The origins that are allowed."""

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
