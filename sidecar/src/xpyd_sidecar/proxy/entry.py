"""A generation request at the door: whose it is, how urgent, where it belongs; then served, or answered otherwise.

Belongs here: what is read from headers and fields before a request is served. Does not belong here: the order among
requests (``waiting``, ``routing.queue``), the course of one (``serving``).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

import msgspec

from xpyd_sidecar.contract.launch import RouterConfig
from xpyd_sidecar.proxy import auth
from xpyd_sidecar.proxy.reply import Handler, HttpRequest, Reply
from xpyd_sidecar.routing import bodies, fields, prompt
from xpyd_sidecar.routing.faults import Fault, bad_request
from xpyd_sidecar.routing.pick import Asked

if TYPE_CHECKING:
    from xpyd_sidecar.proxy.dispatch import Dispatch

PRIORITY = b"x-vllm-priority"
BYTES_PER_COST = 4096
"""A prompt of so many bytes counts for one request more in its key's share of the queue."""
LEFT = "the client went away while its request waited"
SHORT, CACHED = "short", "cached"
"""Why a request skips prefill, beside the names of fields (``Record.skips``)."""


class Door:
    """What every generation request has while it is not served yet (``waiting.Request``)."""

    def __init__(self, dispatch: Dispatch, request: HttpRequest, reply: Reply, *, asked: Mapping[str, msgspec.Raw],
                 raw: msgspec.Raw, skips: str) -> None:
        """``asked``: its fields. ``raw``: its prompt. ``skips``: the field for which it goes without prefill.

        Raises:
            Fault: 400, the priority is no whole number.
        """
        self._dispatch = dispatch
        self._request = request
        self._reply = reply
        self.key = key_of(request.headers, dispatch.config)
        self.priority = priority_of(request.headers, asked)
        self.cost = 1 + len(raw) / BYTES_PER_COST
        self._skips = skips or short(dispatch, raw)

    def room(self) -> bool:
        """Whether it could be served now."""
        return self._dispatch.room(alone=bool(self._skips))


class Entry(Door):
    """A completion or a chat."""

    def __init__(self, dispatch: Dispatch, api: fields.Api, request: HttpRequest, reply: Reply,
                 parsed: bodies.Request) -> None:
        """Raises Fault: 400, the priority is no whole number."""
        super().__init__(dispatch, request, reply, asked=parsed.fields, raw=parsed.prompt, skips=parsed.skips)
        self._api = api
        self._parsed = parsed

    def begin(self, queued_s: float) -> Handler:
        """Serve it."""
        dispatch = self._dispatch
        asked = asked_of(dispatch, self._request, self._parsed.prompt)
        self._skips = self._skips or cached(dispatch, asked)
        if self._skips != self._parsed.skips:
            self._parsed = msgspec.structs.replace(self._parsed, skips=self._skips)
        return dispatch.serve(self._request, self._reply, self._parsed, asked, queued_s)

    def refuse(self, fault: Fault) -> None:
        """It was not served."""
        self._reply.fault(fault)
        self._dispatch.refused(self._api, self._request, fault)

    def left(self) -> None:
        """Its client went away while it waited."""
        self._dispatch.unserved(self._api, self._request, "client_gone", 0, LEFT)


def asked_of(dispatch: Dispatch, request: HttpRequest, raw: msgspec.Raw) -> Asked:
    """Who may serve a request with this prompt, in its session if it names one."""
    session = request.headers.get(dispatch.affinity_header, b"") if dispatch.affinity_header else b""
    return dispatch.picker.asked(raw, prompt.key_of(session) if session else 0)


def short(dispatch: Dispatch, raw: msgspec.Raw) -> str:
    """``SHORT`` where the prompt is, and decode would take it without prefill; else nothing."""
    below = dispatch.config.skip_prefill_below
    skips = below and prompt.tokens(raw) < below and dispatch.picker.some_prefill_themselves()
    return SHORT if skips else ""


def cached(dispatch: Dispatch, asked: Asked) -> str:
    """``CACHED`` where decode holds enough of the prompt; else nothing."""
    return CACHED if dispatch.config.skip_prefill_cached and asked.cached() else ""


def key_of(headers: Mapping[bytes, bytes], config: RouterConfig) -> str:
    """Whose share of the queue a request belongs to: its client key's, or everybody's where none is asked for."""
    return auth.bearer(headers).decode("latin-1") if config.api_key_file is not None else ""


def priority_of(headers: Mapping[bytes, bytes], asked: Mapping[str, msgspec.Raw]) -> int:
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
