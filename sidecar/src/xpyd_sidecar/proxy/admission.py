"""The door for every request that engines answer: what is asked, whose it is, how urgent; then served, or refused.

    open ──parsed, checked──▶ Entry ──▶ the queue (``waiting``) ──▶ served        completions, chats, dialects
                     └──────────────────────────────────────────▶ served        other paths

Belongs here: what is read from path, headers and fields before a request is served. Does not belong here: the order among
requests (``waiting``, ``routing.queue``), the course of one (``serving``), and the fast path's own door (``entering``).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

import msgspec
from msgspec import Raw

from xpyd_sidecar.contract.launch import RouterConfig
from xpyd_sidecar.proxy import auth
from xpyd_sidecar.proxy.asks import Asks
from xpyd_sidecar.proxy.generation import Generation
from xpyd_sidecar.proxy.passthrough import Passthrough
from xpyd_sidecar.proxy.reply import Handler, HttpRequest, Reply
from xpyd_sidecar.routing import prompt
from xpyd_sidecar.routing.faults import Fault, bad_request, unavailable, unknown_model
from xpyd_sidecar.routing.hidden import refuse_form_type, refuse_in_form
from xpyd_sidecar.routing.passed import Asked, checked
from xpyd_sidecar.routing.paths import Body, Route

if TYPE_CHECKING:
    from xpyd_sidecar.proxy.dispatch import Dispatch

PRIORITY = b"x-vllm-priority"
BYTES_PER_COST = 4096
"""A prompt of so many bytes counts for one request more in its key's share of the queue."""
LEFT = "the client went away while its request waited"
SHORT, CACHED = "short", "cached"
"""Why a request skips prefill, beside the names of fields (``Record.skips``)."""


def admit(dispatch: Dispatch, route: Route, request: HttpRequest, reply: Reply) -> Handler:
    """Serve a request, at once or when there is room.

    Raises:
        Fault: it is refused, before anything was sent.
    """
    asks: Asks = _passed(route, request) if route.api is None else Generation(
        dispatch.shapes.parse(route.api, request.body), dispatch.config, dispatch.terms)
    if not dispatch.serves(asks.model):
        assert asks.model is not None
        raise unknown_model(asks.model, dispatch.models())
    if dispatch.poison.alert:
        dispatch.poison.refuse(asks.request_hash())
    if asks.api:
        return dispatch.line.enter(Entry(dispatch, route, request, reply, asks))
    if len(dispatch.servings) >= dispatch.config.max_in_flight:
        raise unavailable(f"{dispatch.config.max_in_flight} requests are being served, which is the limit")
    return dispatch.serve(request, reply, asks, dispatch.picker.asked(b""), 0.0)


def _passed(route: Route, request: HttpRequest) -> Passthrough:
    asked = Asked(None, {}, request.body)
    if route.body is Body.FORM:
        refuse_form_type(request.headers.get(b"content-type", b""))
        refuse_in_form(request.body)
        if request.upload is not None and request.upload.fault is not None:
            raise request.upload.fault
    elif route.body is Body.JSON:
        asked = checked(route.path, request.body)
        if asked.body is not request.body:
            request = msgspec.structs.replace(request, body=asked.body)
    return Passthrough(route, request, asked.fields, asked.model)


class Entry:
    """A request that generates, while it is not served yet (``waiting.Request``)."""

    def __init__(self, dispatch: Dispatch, route: Route, request: HttpRequest, reply: Reply, asks: Asks) -> None:
        """Raises Fault: 400, the priority is no whole number."""
        self._dispatch = dispatch
        self._route = route
        self._request = request
        self._reply = reply
        self._asks = asks
        self.key = key_of(request.headers, dispatch.config)
        self.priority = priority_of(request.headers, asks.fields)
        self.cost = 1 + len(asks.prompt) / BYTES_PER_COST
        asks.skips = asks.skips or self._short()

    def room(self) -> bool:
        """Whether it could be served now."""
        return self._dispatch.room(alone=self._asks.alone)

    def begin(self, queued_s: float) -> Handler:
        """Serve it."""
        dispatch, request, asks = self._dispatch, self._request, self._asks
        session = request.headers.get(dispatch.affinity_header, b"") if dispatch.affinity_header else b""
        picks = dispatch.picker.asked(asks.prompt, prompt.key_of(session) if session else 0)
        if not asks.skips and dispatch.config.skip_prefill_cached and picks.cached():
            asks.skips = CACHED
        return dispatch.serve(request, self._reply, asks, picks, queued_s)

    def refuse(self, fault: Fault) -> None:
        """It was not served."""
        self._reply.fault(fault)
        self._dispatch.refused(self._route, self._request, fault)

    def left(self) -> None:
        """Its client went away while it waited."""
        self._dispatch.unserved(self._route, self._request, "client_gone", 0, LEFT)

    def _short(self) -> str:
        dispatch, below = self._dispatch, self._dispatch.config.skip_prefill_below
        skips = below and prompt.tokens(self._asks.prompt) < below and dispatch.picker.some_prefill_themselves()
        return SHORT if skips else ""


def key_of(headers: Mapping[bytes, bytes], config: RouterConfig) -> str:
    """Whose share of the queue a request belongs to: its client key's, or everybody's where none is asked for."""
    return auth.bearer(headers).decode("latin-1") if config.api_key_file is not None else ""


def priority_of(headers: Mapping[bytes, bytes], asked: Mapping[str, Raw]) -> int:
    """The header X-Vllm-Priority, else the field ``priority``, else 0; lower is sooner.

    Raises:
        Fault: 400, it is no whole number.
    """
    header, raw = headers.get(PRIORITY), asked.get("priority")
    if header is not None:
        try:
            return int(header)
        except ValueError:
            raise bad_request(f"the header X-Vllm-Priority must be a whole number, not {header!r}") from None
    if raw is None:
        return 0
    try:
        return msgspec.json.decode(raw, type=int | None) or 0
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise bad_request(f"'priority': {error}", param="priority") from None
