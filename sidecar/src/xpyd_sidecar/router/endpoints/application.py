"""The client port: what is served where.

    POST /v1/completions  /v1/chat/completions    generation, disaggregated
    what else vLLM serves                         passed to a decode instance, or refused (``api.paths``)
    GET  /v1/models  /v1/models/{id}              served models
    GET  /health  /ping  /ready                   as on the admin port, for whoever balances load
    GET  /metrics                                 the same, for who has a client key, where there are keys; for nobody
                                                  where these are tenants

What else a router tells of itself is on the admin port (``endpoints.admin``).
"""

from __future__ import annotations

import hmac
import time
from collections.abc import Callable

import msgspec

from xpyd_sidecar.router.api import paths
from xpyd_sidecar.router.api.faults import HttpFault, names_untold, not_served, unknown_model
from xpyd_sidecar.router.api.paths import BodyKind, RouteKind
from xpyd_sidecar.router.endpoints.probes import Probes
from xpyd_sidecar.router.http.auth import ClientKeys, Keys, TenantKeys, shown_key, unknown
from xpyd_sidecar.router.http.heads import CorsRules, Hosts, Media, allow_methods, is_preflight, nothing_at
from xpyd_sidecar.router.http.reply import NO_CONTENT, HttpRequest, Reply, RequestHandler
from xpyd_sidecar.router.serving.admission import admit
from xpyd_sidecar.router.serving.context import RequestContext

_JSON = [(b"content-type", b"application/json")]


class Paths:
    """The application behind the client port."""

    def __init__(self, context: RequestContext, client_keys: ClientKeys, probes: Probes) -> None:
        self._context = context
        self._client_keys = client_keys
        self._probes = probes
        config = context.config
        self._hosts, self._media = Hosts(config.host, config.hosts), Media()
        self._cors = CorsRules(config.cors_origins) if config.cors_origins else None
        self._created = int(time.time())
        self._knew: tuple[Keys | TenantKeys, bytes] = (Keys(), b"")
        """Keys, and a header that brought one of them."""
        self._get: dict[str, Callable[[HttpRequest, Reply], RequestHandler | None]] = {
            "/health": probes.health, "/ping": probes.health, "/ready": probes.ready, "/metrics": self._metrics,
            "/v1/models": self._models,
        }

    def is_still_authorized(self, headers: dict[bytes, bytes]) -> bool:
        """Whether a head that was in order still is: its key is looked up each time, since keys may have changed."""
        keys, header, (of, latest) = self._client_keys.keys, shown_key(headers), self._knew
        if of is keys and hmac.compare_digest(header, latest):
            return True  # as the client before
        if keys and not keys.shown_by(headers):
            return False
        self._knew = keys, header
        return True

    def connection_key(self, headers: dict[bytes, bytes]) -> str | None:
        """The key that this head shows, where there are several; empty: a connection is everybody's; None: it shows no key
        that is known, and needs one.
        """
        keys = self._client_keys.keys
        if keys and not self.is_still_authorized(headers):
            return None
        return self._client_keys.name(headers) if len(keys) > 1 else ""

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
                raise nothing_at(path)
            allow_methods(path, method, "GET")
            return False
        if route.way is RouteKind.REFUSED:
            raise not_served(path, route.reason)
        if method not in route.methods:
            allow_methods(path, method, *route.methods)
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
                reply.send_whole(NO_CONTENT, self._cors.preflight(request.headers), b"")
                return None
            if route is not None:
                return admit(self._context, route, request, reply)
        except HttpFault as fault:
            if request.upload is not None and not request.upload.done:
                reply.close = True  # the rest of its body will not be read
            if route is not None:
                tenant = self._client_keys.tenant(request.headers)
                self._context.observer.on_unserved(route, request.request_id, fault.outcome, fault.status, fault.message,
                                                   tenant="" if tenant is None else tenant.name)
            raise
        return self._get.get(request.path, self._model)(request, reply)

    def _check_client(self, headers: dict[bytes, bytes]) -> None:
        if not self.is_still_authorized(headers):
            raise unknown(headers)

    def _metrics(self, request: HttpRequest, reply: Reply) -> None:
        self._check_client(request.headers)
        if self._client_keys.tenants:
            raise HttpFault(403, "metrics name all tenants: they are on the admin port", kind="permission_error",
                            code="admin_port")
        self._probes.metrics(request, reply)

    def _models(self, request: HttpRequest, reply: Reply) -> None:
        self._check_client(request.headers)
        data = [self._card(model) for model in self._shown(request)]
        reply.send_whole(200, _JSON, msgspec.json.encode({"object": "list", "data": data}))

    def _model(self, request: HttpRequest, reply: Reply) -> None:
        self._check_client(request.headers)
        model, served = request.path.removeprefix("/v1/models/"), self._shown(request)
        if model not in served:
            raise unknown_model(model, served) if self._context.names_told else names_untold()
        reply.send_whole(200, _JSON, msgspec.json.encode(self._card(model)))

    def _shown(self, request: HttpRequest) -> list[str]:
        """The served models that a client may use."""
        tenant, served = self._client_keys.tenant(request.headers), self._context.models()
        return served if tenant is None else [model for model in served if tenant.may_use(model)]

    def _card(self, model: str) -> dict[str, object]:
        members = self._context.roster.members()
        lengths = {m.max_model_len for m in members if m.max_model_len and (m.model == model or model in m.also)}
        parents = {m.model for m in members if model in m.also}
        return {"id": model, "object": "model", "created": self._created, "owned_by": "xpyd", "root": model,
                "parent": min(parents) if parents else None, "max_model_len": min(lengths) if lengths else None}
