"""The dashboard: a page for a person, and the JSON that it asks for every second.

    GET /dashboard                the page
    GET /dashboard/<file>         its style and scripts
    GET /dashboard/data           what it draws; needs the admin token or a client key

The page is static and holds nothing of the service, so everybody may load it. It works without any other host, and its
Content-Security-Policy allows none: scripts and styles come from these files alone.

``xpyd-since`` in a request for data names the last second that the page has; only later ones are sent.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from importlib.resources import files
from time import time

import msgspec

from xpyd_sidecar.contract.fleet import Fleet
from xpyd_sidecar.router.api.faults import HttpFault
from xpyd_sidecar.router.http.auth import Admin, ClientKeys
from xpyd_sidecar.router.http.reply import HttpRequest, Reply
from xpyd_sidecar.router.observing.history import COLUMNS, Row
from xpyd_sidecar.router.serving.context import RequestContext

SINCE = b"xpyd-since"
_KINDS = {"html": b"text/html; charset=utf-8", "css": b"text/css; charset=utf-8", "js": b"text/javascript; charset=utf-8"}
_PAGE = "page.html"
_POLICY = (b"default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; "
           b"img-src data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'")
_GUARD = [(b"content-security-policy", _POLICY), (b"x-content-type-options", b"nosniff"),
          (b"referrer-policy", b"no-referrer"), (b"cross-origin-resource-policy", b"same-origin")]
Answers = Callable[[HttpRequest, Reply], None]


class Data(msgspec.Struct, frozen=True):
    """What the page draws."""

    now: float
    """Seconds since 1970."""
    columns: tuple[str, ...]
    seconds: list[Row]
    """Those that are new to the page, oldest first."""
    fleet: Fleet


def fleet_of(context: RequestContext) -> Fleet:
    """What the router knows of its fleet now."""
    return context.observer.fleet(context.service, context.name, context.loop.time(), context.started,
                                  draining=context.draining)


class Dashboard:
    """The paths of the dashboard."""

    def __init__(self, context: RequestContext, admin: Admin, client_keys: ClientKeys) -> None:
        self._context = context
        self._admin = admin
        self._client_keys = client_keys
        kinds = "its admin token or a client key" if client_keys.keys else "its admin token"
        self._need = f"This router asks for {kinds}."
        self.paths: dict[str, Answers] = {"/dashboard/data": self._data}
        for file in files(__package__).joinpath("static").iterdir():
            path = "/dashboard" if file.name == _PAGE else f"/dashboard/{file.name}"
            kind = _KINDS[file.name.rpartition(".")[2]]
            headers = [(b"content-type", kind), (b"cache-control", b"no-cache"), *_GUARD]
            self.paths[path] = partial(_static, headers, file.read_bytes())

    def _data(self, request: HttpRequest, reply: Reply) -> None:
        try:
            self._admin.require(request, reply, also=self._client_keys.keys)
        except HttpFault as fault:
            words = self._need if fault.status == 401 else f"This router says: {fault.message}."
            raise HttpFault(fault.status, words, kind=fault.kind, code=fault.code) from None
        since = request.headers.get(SINCE, b"0")
        if not since.isdigit() or len(since) > 12:
            raise HttpFault(400, f"{SINCE.decode()} is not a number of seconds", code="bad_since")
        rows = self._context.observer.history.since(int(since))
        data = Data(round(time(), 3), COLUMNS, rows, fleet_of(self._context))
        reply.whole(200, [(b"content-type", b"application/json"), (b"cache-control", b"no-store"), *_GUARD],
                    msgspec.json.encode(data))


def _static(headers: list[tuple[bytes, bytes]], body: bytes, _: HttpRequest, reply: Reply) -> None:
    reply.whole(200, headers, body)
