"""The admin port: what the kubelet, Prometheus, the operator and people ask of a router, on connections that clients cannot
take.

    GET  /health  /ping                           the process lives
    GET  /ready                                   the roster is known and somebody decodes (see Probes.not_ready)
    GET  /metrics                                 Prometheus
    GET  /fleet                                   contract.fleet.Fleet; needs the admin token
    GET  /sample                                  contract.sample.PackedSample; needs the admin token
    GET  /trace                                   contract.timeline.Traces; needs the admin token
    POST /wake                                    contract.waking.WakeAnswer to a WakeCall; needs a signed call
    GET  /dashboard  /dashboard/<file>            a page for a person, its style and scripts
    GET  /dashboard/data                          what it draws, asked every second; needs the admin token

The page is static and holds nothing of the service, so everybody may load it. It works without any other host, and its
Content-Security-Policy allows none: scripts and styles come from its own files alone. ``xpyd-since`` in a request for data
names the last second that the page has; only later ones are sent.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from functools import partial
from importlib.resources import files

import msgspec

from xpyd_sidecar.contract import sample, timeline, waking
from xpyd_sidecar.contract.fleet import Fleet
from xpyd_sidecar.router.api.faults import HttpFault
from xpyd_sidecar.router.endpoints.probes import Probes
from xpyd_sidecar.router.endpoints.traces import Tracer
from xpyd_sidecar.router.endpoints.waking import WakeEndpoint
from xpyd_sidecar.router.http.auth import Admin
from xpyd_sidecar.router.http.heads import Hosts, allow_methods, nothing_at
from xpyd_sidecar.router.http.reply import HttpRequest, Reply, RequestHandler
from xpyd_sidecar.router.observing.history import COLUMNS, Row
from xpyd_sidecar.router.serving.context import RequestContext

_JSON = [(b"content-type", b"application/json")]
SINCE = b"xpyd-since"
_KINDS = {"html": b"text/html; charset=utf-8", "css": b"text/css; charset=utf-8", "js": b"text/javascript; charset=utf-8"}
_PAGE = "page.html"
_POLICY = (b"default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; "
           b"img-src data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'")
_GUARD = [(b"content-security-policy", _POLICY), (b"x-content-type-options", b"nosniff"),
          (b"referrer-policy", b"no-referrer"), (b"cross-origin-resource-policy", b"same-origin")]
Answers = Callable[[HttpRequest, Reply], RequestHandler | None]


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
                                  draining=context.draining, idle_s=context.idle_s())


def _files_of_the_dashboard() -> Iterator[tuple[str, Answers]]:
    """By their paths."""
    for file in files(__package__).joinpath("static").iterdir():
        path = "/dashboard" if file.name == _PAGE else f"/dashboard/{file.name}"
        headers = [(b"content-type", _KINDS[file.name.rpartition(".")[2]]), (b"cache-control", b"no-cache"), *_GUARD]
        yield path, partial(_static, headers, file.read_bytes())


def _static(headers: list[tuple[bytes, bytes]], body: bytes, _: HttpRequest, reply: Reply) -> None:
    reply.send_whole(200, headers, body)


class AdminPaths:
    """The application behind the admin port. It wants the bodies of wakes alone, and all its connections are equal."""

    def __init__(self, context: RequestContext, probes: Probes, admin: Admin, tracer: Tracer, wakes: WakeEndpoint) -> None:
        self._context = context
        self._admin = admin
        self._tracer = tracer
        self._wakes = wakes
        self._hosts = Hosts(context.config.host, context.config.hosts)
        self._get: dict[str, Answers] = {
            "/health": probes.health, "/ping": probes.health, "/ready": probes.ready, "/metrics": probes.metrics,
            "/fleet": self._fleet, sample.PATH: self._sample, timeline.PATH: self._trace,
        }
        self._get |= {"/dashboard/data": self._data, **dict(_files_of_the_dashboard())}

    def connection_key(self, headers: dict[bytes, bytes]) -> str | None:  # noqa: ARG002 (of an interface)
        """Empty: there are no keys here, so a connection is nobody's in particular."""
        return ""

    def judge(self, method: str, path: str, headers: dict[bytes, bytes]) -> bool:
        """Judge a request by its head: whether its body is wanted. Raises HttpFault."""
        self._hosts.check(headers.get(b"host"))
        if path == waking.PATH:
            allow_methods(path, method, "POST")
            return True
        if path not in self._get:
            raise nothing_at(path)
        allow_methods(path, method, "GET")
        return False

    def handle(self, request: HttpRequest, reply: Reply) -> RequestHandler | None:
        """Answer a request. Raises HttpFault."""
        if request.refusal is not None:
            raise request.refusal
        if not request.judged:
            self.judge(request.method, request.path, request.headers)
        if request.path == waking.PATH:
            self._admin.require_call(request)
            return self._wakes.open(request, reply)
        return self._get[request.path](request, reply)

    def _fleet(self, request: HttpRequest, reply: Reply) -> None:
        self._admin.require(request, reply)
        reply.send_whole(200, _JSON, msgspec.json.encode(fleet_of(self._context)))

    def _sample(self, request: HttpRequest, reply: Reply) -> None:
        self._admin.require(request, reply)
        observer = self._context.observer
        observer.settle()
        reply.send_whole(200, _JSON, msgspec.json.encode(observer.sample.pack(self._context.service, time.time())))

    def _trace(self, request: HttpRequest, reply: Reply) -> RequestHandler:
        self._admin.require(request, reply)
        return self._tracer.open(request, reply)

    def _data(self, request: HttpRequest, reply: Reply) -> None:
        """What the dashboard draws. Its page shows what is refused, so that says what is needed."""
        try:
            self._admin.require(request, reply)
        except HttpFault as fault:
            need = "This router asks for its admin token."
            words = need if fault.status == 401 else f"This router says: {fault.message}."
            raise HttpFault(fault.status, words, kind=fault.kind, code=fault.code) from None
        since = request.headers.get(SINCE, b"0")
        if not since.isdigit() or len(since) > 12:
            raise HttpFault(400, f"{SINCE.decode()} is not a number of seconds", code="bad_since")
        rows = self._context.observer.history.rows_since(int(since))
        data = Data(round(time.time(), 3), COLUMNS, rows, fleet_of(self._context))
        reply.send_whole(200, [*_JSON, (b"cache-control", b"no-store"), *_GUARD], msgspec.json.encode(data))
