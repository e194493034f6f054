"""Every path of the router: what is served where.

    POST /v1/completions  /v1/chat/completions    generation, disaggregated
    what else vLLM serves                         passed to a decode instance, or refused (``api.paths``)
    GET  /v1/models  /v1/models/{id}              served models
    GET  /health  /ping                           the process lives
    GET  /ready                                   the roster is known and somebody decodes (see not_ready)
    GET  /metrics                                 Prometheus
    GET  /fleet                                   contract.fleet.Fleet; needs the admin token
    GET  /trace                                   contract.timeline.Traces; needs the admin token
    GET  /dashboard  /dashboard/<file>            a page for a person, its style and scripts
    GET  /dashboard/data                          what it draws, asked every second; the admin token or a client key

The page is static and holds nothing of the service, so everybody may load it. It works without any other host, and its
Content-Security-Policy allows none: scripts and styles come from its own files alone. ``xpyd-since`` in a request for data
names the last second that the page has; only later ones are sent.
"""

from __future__ import annotations

import hmac
import math
import time
from collections.abc import Callable, Iterator
from functools import partial
from importlib.resources import files

import msgspec

from xpyd_sidecar.contract import timeline
from xpyd_sidecar.contract.fleet import Fleet
from xpyd_sidecar.contract.ids import Role
from xpyd_sidecar.router.api import paths
from xpyd_sidecar.router.api.faults import HttpFault, not_served, unknown_model
from xpyd_sidecar.router.api.paths import BodyKind, RouteKind
from xpyd_sidecar.router.endpoints.traces import Tracer
from xpyd_sidecar.router.http.auth import Admin, ClientKeys, Keys, bearer, unknown
from xpyd_sidecar.router.http.heads import CorsRules, Hosts, Media, is_preflight
from xpyd_sidecar.router.http.reply import NO_CONTENT, HttpRequest, Reply, RequestHandler
from xpyd_sidecar.router.observing.history import COLUMNS, Row
from xpyd_sidecar.router.observing.metrics import CONTENT_TYPE
from xpyd_sidecar.router.serving.admission import admit
from xpyd_sidecar.router.serving.context import RequestContext

RENDERED_S = 0.25
"""How long a page of metrics is served again: with many instances it takes milliseconds to make, and needs no key."""
_JSON = [(b"content-type", b"application/json")]
_TEXT = [(b"content-type", b"text/plain; charset=utf-8")]
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


def _files_of_the_dashboard() -> Iterator[tuple[str, Answers]]:
    """By their paths."""
    for file in files(__package__).joinpath("static").iterdir():
        path = "/dashboard" if file.name == _PAGE else f"/dashboard/{file.name}"
        headers = [(b"content-type", _KINDS[file.name.rpartition(".")[2]]), (b"cache-control", b"no-cache"), *_GUARD]
        yield path, partial(_static, headers, file.read_bytes())


def _static(headers: list[tuple[bytes, bytes]], body: bytes, _: HttpRequest, reply: Reply) -> None:
    reply.whole(200, headers, body)


class Paths:
    """The application behind the server."""

    def __init__(self, context: RequestContext, client_keys: ClientKeys, admin: Admin) -> None:
        self._context = context
        self._client_keys = client_keys
        self._admin = admin
        config = context.config
        self._hosts, self._media = Hosts(config.host, config.hosts), Media()
        self._cors = CorsRules(config.cors_origins) if config.cors_origins else None
        self._created = int(time.time())
        self._knew: tuple[Keys, bytes] = (Keys(), b"")
        """Keys, and a header that brought one of them."""
        self._metrics_page, self._metrics_until = b"", -math.inf
        self.tracer: Tracer
        """Set by whoever puts the router together and has its key."""
        self._get: dict[str, Callable[[HttpRequest, Reply], RequestHandler | None]] = {
            "/health": self._health, "/ping": self._health, "/ready": self._ready, "/metrics": self._metrics,
            "/fleet": self._fleet, timeline.PATH: self._trace, "/v1/models": self._models,
        }
        if config.dashboard:
            self._get |= {"/dashboard/data": self._data, **dict(_files_of_the_dashboard())}

    def still(self, headers: dict[bytes, bytes]) -> bool:
        """Whether a head still is in order that was, and whose body was wanted: its key is looked at each time."""
        keys, header, (of, latest) = self._client_keys.keys, headers.get(b"authorization", b""), self._knew
        if of is keys and hmac.compare_digest(header, latest):
            return True  # as the client before
        if keys and bearer(headers) not in keys:
            return False
        self._knew = keys, header
        return True

    def judge(self, method: str, path: str, headers: dict[bytes, bytes]) -> bool:
        """Judge a request by its head: whether its body is wanted. Raises HttpFault."""
        host = headers.get(b"host")
        if host not in self._hosts.known:
            self._hosts.check(host)
        if self._cors is not None and is_preflight(method, headers):
            return False
        route = paths.find(path)
        if route is None:
            if path not in self._get and not path.startswith("/v1/models/"):
                raise HttpFault(404, f"there is nothing at {path}", kind="NotFoundError", code="unknown_path")
            self._allow(path, method, "GET")
            return False
        if route.way is RouteKind.REFUSED:
            raise not_served(path, route.reason)
        if method not in route.methods:
            self._allow(path, method, *route.methods)
        if route.way is RouteKind.OWN:
            return False  # those that ask for a key need no body
        self._check_client(headers)
        if route.way is RouteKind.PASSED and route.body is BodyKind.NONE:
            return False
        if headers.get(b"content-type") not in self._media.known or b"content-encoding" in headers:
            self._media.check(headers, json=route.body is not BodyKind.FORM)
        return True

    def handle(self, request: HttpRequest, reply: Reply) -> RequestHandler | None:
        """Answer a request. Raises HttpFault."""
        route = paths.find(request.path)
        if route is not None and not route.served:
            route = None
        if self._cors is not None and b"origin" in request.headers:
            reply.added = self._cors.lines(request.headers[b"origin"])
        try:
            if request.refusal is not None:
                raise request.refusal
            if not request.judged:
                self.judge(request.method, request.path, request.headers)
            if self._cors is not None and is_preflight(request.method, request.headers):
                reply.whole(NO_CONTENT, self._cors.preflight(request.headers), b"")
                return None
            if route is not None:
                return admit(self._context, route, request, reply)
        except HttpFault as fault:
            if request.upload is not None and not request.upload.done:
                reply.close = True  # the rest of its body will not be read
            if route is not None:
                self._context.observer.unserved(route, request.request_id, fault.outcome, fault.status, fault.message)
            raise
        return self._get.get(request.path, self._model)(request, reply)

    def _check_client(self, headers: dict[bytes, bytes]) -> None:
        if not self.still(headers):
            raise unknown(headers)

    @staticmethod
    def _allow(path: str, method: str, *methods: str) -> None:
        if method not in methods and not (method == "HEAD" and "GET" in methods):
            words = f"{path} takes {' or '.join(methods)}, not {method}"
            raise HttpFault(405, words, code="method_not_allowed", allow=", ".join(methods))

    def _health(self, _: HttpRequest, reply: Reply) -> None:
        reply.whole(200, _TEXT, b"ok\n")

    def not_ready(self) -> str:
        """Why this router should get no traffic; empty when it should.

        Beside an engine this and the engine's own health make the pod's readiness, also where no clients are sent here, so
        only a restart counts: agents that knew this router must have had the time to come back. Clients come once the
        operator saw ``settled``. Whether anybody decodes is left out: a 503 says more than a connection refused.
        """
        context = self._context
        if context.draining:
            return "the router is stopping"
        now, roster = context.loop.time(), context.roster
        beside = context.config.beside_engine
        if not (roster.listened(now) if beside else roster.settled(now)):
            return "the roster is not settled: agents may not have found this router yet"
        if not beside and not roster.pickable(Role.DECODE):
            return roster.why_not(Role.DECODE)
        return ""

    def _ready(self, _: HttpRequest, reply: Reply) -> None:
        if reason := self.not_ready():
            reply.whole(503, [*_TEXT, (b"retry-after", b"1")], reason.encode() + b"\n")
        else:
            reply.whole(200, _TEXT, b"ready\n")

    def _metrics(self, _: HttpRequest, reply: Reply) -> None:
        context = self._context
        if context.loop.time() >= self._metrics_until:
            self._metrics_page = context.observer.metrics.text()
            self._metrics_until = context.loop.time() + RENDERED_S
        reply.whole(200, [(b"content-type", CONTENT_TYPE)], self._metrics_page)

    def _fleet(self, request: HttpRequest, reply: Reply) -> None:
        self._admin.require(request, reply)
        reply.whole(200, _JSON, msgspec.json.encode(fleet_of(self._context)))

    def _trace(self, request: HttpRequest, reply: Reply) -> RequestHandler:
        self._admin.require(request, reply)
        return self.tracer.open(request, reply)

    def _data(self, request: HttpRequest, reply: Reply) -> None:
        """What the dashboard draws. Its page shows what is refused, so that says what is needed."""
        keys = self._client_keys.keys
        try:
            self._admin.require(request, reply, also=keys)
        except HttpFault as fault:
            need = f"This router asks for its admin token{' or a client key' if keys else ''}."
            words = need if fault.status == 401 else f"This router says: {fault.message}."
            raise HttpFault(fault.status, words, kind=fault.kind, code=fault.code) from None
        since = request.headers.get(SINCE, b"0")
        if not since.isdigit() or len(since) > 12:
            raise HttpFault(400, f"{SINCE.decode()} is not a number of seconds", code="bad_since")
        rows = self._context.observer.history.since(int(since))
        data = Data(round(time.time(), 3), COLUMNS, rows, fleet_of(self._context))
        reply.whole(200, [*_JSON, (b"cache-control", b"no-store"), *_GUARD], msgspec.json.encode(data))

    def _models(self, request: HttpRequest, reply: Reply) -> None:
        self._check_client(request.headers)
        data = [self._card(model) for model in self._context.models()]
        reply.whole(200, _JSON, msgspec.json.encode({"object": "list", "data": data}))

    def _model(self, request: HttpRequest, reply: Reply) -> None:
        self._check_client(request.headers)
        model, served = request.path.removeprefix("/v1/models/"), self._context.models()
        if model not in served:
            raise unknown_model(model, served)
        reply.whole(200, _JSON, msgspec.json.encode(self._card(model)))

    def _card(self, model: str) -> dict[str, object]:
        members = self._context.roster.members()
        lengths = {m.max_model_len for m in members if m.max_model_len and (m.model == model or model in m.also)}
        parents = {m.model for m in members if model in m.also}
        return {"id": model, "object": "model", "created": self._created, "owned_by": "xpyd", "root": model,
                "parent": min(parents) if parents else None, "max_model_len": min(lengths) if lengths else None}
