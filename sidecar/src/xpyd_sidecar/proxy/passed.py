"""A request whose answer one decode instance gives, and which passes through with it, whatever they are.

    client ── body ──▶ Upload ──▶ Passed ──▶ Tunnel ──▶ engine           a side that is slow stops the other's reading
    client ◀── Reply ◀────────── Passed ◀── Tunnel ◀── answer
                                    └─────▶ Prefilling ──▶ prefill engine      where the prompt can be computed elsewhere

Belongs here: picking an instance, trying another while nothing of the request is lost, and joining the two directions.
Does not belong here: which requests these are (``passing``), bytes of the engine's connection (``tunnel``).

Another instance is tried where a connection is refused, since nothing was sent then; and where one breaks before the first
byte of an answer, if the whole body is here. An answer that has begun and breaks is cut off, which every client sees.
A decode leg whose KV will not come is sent again without any, unless its answer has begun. An engine says 200 to a stream
before it has a token, and some say that they are at work: what comes of a dialect's stream before its first output waits
for it (``MAX_EARLY`` bytes at most), so that until then nothing is lost with an engine.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from functools import partial
from typing import TYPE_CHECKING, Protocol

from msgspec import Raw

from xpyd_sidecar.contract.ids import InstanceName, Role
from xpyd_sidecar.proxy.account import Account
from xpyd_sidecar.proxy.patience import Alarm
from xpyd_sidecar.proxy.poison import Apart
from xpyd_sidecar.proxy.prefilling import Prefilling
from xpyd_sidecar.proxy.reply import HttpRequest, Reply
from xpyd_sidecar.proxy.tunnel import Tunnel
from xpyd_sidecar.proxy.upload import Upload
from xpyd_sidecar.proxy.wire import Head, chunk_of
from xpyd_sidecar.routing import bodies, dialects, faults
from xpyd_sidecar.routing.exchange import Picks
from xpyd_sidecar.routing.faults import Fault
from xpyd_sidecar.routing.hidden import refuse_in_form
from xpyd_sidecar.routing.moves import Kind
from xpyd_sidecar.routing.paths import Body, Route
from xpyd_sidecar.routing.pick import Asked, Pair, Target
from xpyd_sidecar.routing.reason import Reason
from xpyd_sidecar.routing.record import REFUSED, LegRecord
from xpyd_sidecar.routing.request_hash import RequestHash, hash_of
from xpyd_sidecar.routing.roster import Member

if TYPE_CHECKING:
    from xpyd_sidecar.proxy.dispatch import Dispatch

logger = logging.getLogger(__name__)

_STALL_S = 10.0
"""Silence of an engine after which it is probed."""
MAX_TRIES = 3
"""Instances that one request is sent to."""
MAX_EARLY = 64 << 10
"""Bytes of an answer that wait for its first output."""
HEADERS = (b"content-type", b"accept", b"traceparent", b"tracestate", b"x-session-id", b"x-vllm-priority",
           b"anthropic-version", b"anthropic-beta")
"""Headers of clients that engines read; keys and cookies stay here."""


class Home(Protocol):
    """Who keeps account of passed requests."""

    def closed(self, passed: Passed, outcome: str) -> None:
        """A passed request is over."""


class Passed:
    """One passed request."""

    def __init__(self, home: Home, dispatch: Dispatch, route: Route, request: HttpRequest, reply: Reply, *,
                 split: dialects.Request | None = None, asked: Asked | None = None, skips: str = "",
                 queued_s: float = 0.0) -> None:
        """``split``: of a request in a dialect that generates, ``asked`` who may serve it. ``skips``: why it goes without
        prefill, if it does.
        """
        self._home = home
        self._dispatch = dispatch
        self.route = route
        self._request = request
        self._reply = reply
        self._split = split
        self._asked = asked or dispatch.picker.asked(Raw(b""))
        self._alone = split is None or bool(skips)
        self.account = Account(dispatch, route, request, split, skips=skips, queued_s=queued_s)
        self._leg: LegRecord | None = None
        self._early: list[bytes] = []
        self._prefilling: Prefilling | None = None
        self._held: Head | None = None
        self._body = request.body
        self._upload: Upload | None = request.upload
        self._taken = False
        self._tail = b""
        self._tunnel: Tunnel | None = None
        self._target: Target | None = None
        self._member: Member | None = None
        self._tried: list[InstanceName] = []
        self._gone = False
        self._over = False
        self._paused = False
        self._timer: Alarm | None = None
        self._hash: RequestHash | None = None
        self._withheld: list[Callable[[], None]] = []
        """To be done when it goes on, while it is held because it may be what ends engines."""

    def start(self) -> None:
        """Pick and send. Where nobody can serve it, it is refused."""
        limit, loop = self._dispatch.config.request_timeout_s, self._dispatch.loop
        fault = faults.upstream(f"no whole answer within {limit:g} s", 504)
        self._timer = Alarm(loop, loop.time() + limit, partial(self._refuse, fault, "timeout"))
        try:
            if self._upload is not None and self._upload.fault is not None:
                raise self._upload.fault
            poison = self._dispatch.poison
            if poison.alert and poison.comes(self):
                self._withheld.append(partial(self._send_or, "unavailable"))
            else:
                self._send()
        except Fault as refused:
            self._refuse(refused, refused.outcome)

    def _send_or(self, outcome: str) -> None:
        try:
            self._send()
        except Fault as fault:
            self._refuse(fault, outcome)

    def _send(self) -> None:
        dispatch, request = self._dispatch, self._request
        pair = self._pick()
        if pair is None:
            words = f"{', '.join(self._tried)} failed" if self._tried else dispatch.picker.why_not(Role.DECODE)
            raise faults.unavailable(words)
        target, prefilling = pair.decode, self._prefilling
        self._target = target
        self._tried.append(target.instance)
        self._member = dispatch.leg_opened(target)
        if prefilling is None:
            self._body, self._leg = request.body, self.account.leg(Role.DECODE, target.instance, 0)
        else:
            self._body = prefilling.decode_body()
            self._leg = self.account.leg(Role.DECODE, target.instance, 1, prefilling.transfer)
        self._tunnel = Tunnel(dispatch.loop, target.http, self._head(target, len(self._body), self._leg), self,
                              framed=self._reply.framed, bodiless=request.method == "HEAD")
        if prefilling is not None:
            prefilling.start()

    def _pick(self) -> Pair | None:
        """A decode instance; ``_prefilling`` is there where one of prefill goes with it."""
        asked, split = self.picks, self._split
        if split is not None and not self._alone:
            pair = asked.pair(alone=False, not_decode=self._tried)
            if pair is not None and not pair.decode.p2p:  # those pair by request ids, which are the client's here
                if pair.prefill is not None:
                    self._prefilling = Prefilling(self, self._dispatch, split, self._head, account=self.account,
                                                  prefill=pair.prefill, decode=pair.decode)
                return pair
        return asked.pair(alone=True, not_decode=self._tried)

    def _head(self, target: Target, size: int, leg: LegRecord) -> bytes:
        request, upload = self._request, self._upload
        headers = [(b"x-request-id", request.request_id.encode())]
        headers += self.account.traced([(name, request.headers[name]) for name in HEADERS if name in request.headers], leg)
        if target.dp_rank is not None:
            headers.append((b"x-data-parallel-rank", b"%d" % target.dp_rank))
        if upload is not None and upload.length is None:
            headers.append((b"transfer-encoding", b"chunked"))
        elif request.method == "POST":
            headers.append((b"content-length", b"%d" % (size if upload is None else upload.length or 0)))
        lines = b"".join(b"%b: %b\r\n" % header for header in headers)
        return b"%b %b HTTP/1.1\r\nhost: %b\r\nconnection: close\r\n%b\r\n" % (
            request.method.encode(), request.target, target.http.encode(), lines)

    # ---- the client

    def on_client_gone(self) -> None:
        """Abort the engine's work."""
        self._gone = True
        self._finish("aborted")

    def on_pause(self) -> None:
        """The client is slower than its answer."""
        self._paused = True
        if self._tunnel is not None:
            self._tunnel.pause()

    def on_resume(self) -> None:
        """Go on."""
        self._paused = False
        if self._tunnel is not None:
            self._tunnel.resume()

    def on_piece(self, data: bytes) -> None:
        """More of the request's body."""
        if self._over or self._tunnel is None or self._upload is None:
            return
        seen = self._tail + data
        self._tail = seen[-32:]
        try:
            refuse_in_form(seen)
        except Fault as fault:
            self._refuse(fault, "refused")
            return
        self._tunnel.write(chunk_of(data) if self._upload.length is None else data)

    def on_body(self) -> None:
        """The request's body is whole."""
        if not self._over and self._tunnel is not None and self._upload is not None and self._upload.length is None:
            self._tunnel.write(b"0\r\n\r\n")

    def on_broken(self, fault: Fault) -> None:
        """The request's body ends in an error."""
        self._refuse(fault, "refused")

    # ---- the engine

    def on_open(self) -> None:
        """Send the body."""
        assert self._tunnel is not None
        if self._upload is not None:
            self._taken = True
            self._upload.take(self)
        elif self._body:
            self._tunnel.write(self._body)
            self._body = b""

    def on_full(self, full: bool) -> None:
        """The engine takes the body slower than it comes."""
        if self._upload is not None:
            self._upload.wait(full)

    def on_head(self, head: Head) -> None:
        """The answer begins."""
        if self.account.generates and head.status < 400:
            self._held = head
        else:
            self._begin(head)

    def _begin(self, head: Head) -> None:
        self._last_if_unread()
        self._reply.begin(head.status, head.end_to_end(), b"", length=0 if head.length is None and head.status in {204, 304}
                          else head.length)
        if self._paused and self._tunnel is not None:
            self._tunnel.pause()

    def _begin_held(self) -> None:
        if self._held is not None:
            head, self._held = self._held, None
            self._begin(head)
            early, self._early = self._early, []
            for data in early:
                self._reply.write(data)

    def on_part(self, data: bytes, body: bytes) -> None:
        """Part of the answer."""
        assert self._leg is not None
        self.account.part(self._leg, body)
        if self._held is not None and not self.account.begun and sum(map(len, self._early)) < MAX_EARLY:
            self._early.append(data)
            return
        self._begin_held()
        self._reply.write(data)

    def on_end(self) -> None:
        """The answer is whole."""
        good = self.account.end()
        self._begin_held()
        self._reply.end()
        status = self._reply.status
        self._close_leg(f"{status // 100}xx" if good else Kind.ABORTED.value)
        if (status >= 500 or not good) and self._target is not None:
            self._dispatch.poison.broke(self, self._target)
            self._dispatch.doubt(self._target)
        outcome = "complete" if status < 400 and good else "engine_error"
        self._finish(outcome, "" if good else "the engine says in its answer that it failed")

    def unprefilled(self, reason: str, *, refused: bool) -> None:
        """KV that decode waits for will not come: it is asked to do all of it, if it has not answered."""
        self._drop_prefilling()
        if self._over or self._reply.started or self._tunnel is None:
            return
        if refused:
            self.account.record.skips = REFUSED
        logger.warning("passed request goes without prefill: %s", reason, extra={"request": self._reply.request_id})
        self._tunnel.cancel()
        self._close_leg("cancelled")
        self._alone, self._held, self._early = True, None, []
        self._tried.pop()  # it has not failed
        self._send_or("failed")

    def on_failed(self, kind: Kind, reason: Reason, *, lost: bool = False) -> None:
        """The engine refused the connection, or broke it. ``lost``: the roster says so."""
        target = self._target
        assert target is not None
        logger.warning("passed request failed: %s", reason.full, extra={
            "request": self._reply.request_id, "kind": kind.value, "peer": target.instance, "address": target.http})
        self._drop_prefilling()
        self._close_leg(kind.value)
        self._held, self._early = None, []
        waits = False
        if kind is Kind.REFUSED:
            self._dispatch.suspect(target, reason.full)
        elif kind is not Kind.LACKING:
            waits = self._dispatch.poison.broke(self, target, lost=lost)
            self._dispatch.doubt(target)
        why = reason.of(target.instance)
        fault, detail = faults.upstream(why.said), why.full
        if self._reply.started:
            self._reply.cut()
            self._finish("broken")
        elif kind is Kind.LACKING:
            self._refuse(faults.unavailable(reason.said), "unavailable")
        elif self._taken or len(self._tried) >= MAX_TRIES:
            self._refuse(fault, "failed", detail)
        elif waits:
            self._withheld.append(partial(self._elsewhere, fault, detail))
        else:
            self._elsewhere(fault, detail)

    def _elsewhere(self, fault: Fault, detail: str) -> None:
        try:
            self._send()
        except Fault:
            self._refuse(fault, "failed", detail)

    # ---- requests that end engines (poison.Suspect)

    @property
    def alone(self) -> bool:
        """Whether it goes without prefill."""
        return self._alone

    @property
    def picks(self) -> Picks:
        """Who may serve it now."""
        poison = self._dispatch.poison
        return Apart(self._asked, poison, self) if poison.alert else self._asked

    def request_hash(self) -> RequestHash:
        """Made when it is needed. One without a JSON body is like no other."""
        if self._hash is None:
            request = self._request
            if self.route.body is not Body.JSON:
                fields = {"": Raw(request.request_id.encode())}
            else:
                fields = bodies.split(request.body) if self._split is None else self._split.fields
            self._hash = hash_of(self.route.path, fields)
        return self._hash

    def instances(self) -> Iterable[InstanceName]:
        """Those on which it has a leg open."""
        found = [] if self._tunnel is None or self._target is None else [self._target.instance]
        return found if self._prefilling is None else [*found, *self._prefilling.instances()]

    def withhold(self, act: Callable[[], None]) -> None:
        """It is held: do this when it goes on."""
        self._withheld.append(act)

    def go_on(self) -> None:
        """It was held: what was to be done is done now."""
        withheld, self._withheld = self._withheld, []
        for act in withheld:
            if not self._over:
                act()

    def condemn(self, fault: Fault) -> None:
        """End with this answer."""
        self._refuse(fault, fault.outcome)

    # ---- the router

    def on_lost(self, instance: str, incarnation: str, reason: Reason) -> None:
        """The roster says that this incarnation will never answer."""
        if self._prefilling is not None:
            self._prefilling.on_lost(instance, incarnation, reason)
        target = self._target
        if self._tunnel is None or target is None:
            return
        if (target.instance, target.incarnation) == (instance, incarnation):
            self._tunnel.cancel()
            self.on_failed(Kind.LOST, reason, lost=True)

    def sweep(self, now: float, awake: float) -> None:
        """Called every second: doubt an engine that is silent."""
        if self._prefilling is not None:
            self._prefilling.sweep(now, awake, _STALL_S)
        if self._tunnel is None or self._target is None or self._paused:
            return
        waits = self._upload is not None and not self._upload.done
        if not waits and now - max(self._tunnel.last_at, awake) > _STALL_S:
            self._dispatch.doubt(self._target)

    def abort(self, reason: str) -> None:
        """The router stops before this request could end."""
        self._refuse(faults.unavailable(reason), "aborted")

    # ---- the end

    def _refuse(self, fault: Fault, outcome: str, detail: str = "") -> None:
        if self._over:
            return
        if not self._gone:
            if self._reply.started:
                self._reply.cut()
            else:
                self._last_if_unread()
                self._reply.fault(fault)
        self._finish(outcome, detail or fault.message)

    def _last_if_unread(self) -> None:
        # Where the next request would begin is not known while part of this one's body has not come.
        if self._upload is not None and not self._upload.done:
            self._reply.last()

    def _drop_prefilling(self) -> None:
        if self._prefilling is not None:
            self._prefilling.cancel()
            self._prefilling = None

    def _close_leg(self, result: str) -> None:
        self._tunnel = None
        if self._leg is not None:
            self.account.shut(self._leg, result)
            self._leg = None
        if self._member is not None:
            self._dispatch.leg_closed(self._member)
            self._member = None

    def _finish(self, outcome: str, detail: str = "") -> None:
        if self._over:
            return
        self._over = True
        if self._timer is not None:
            self._timer.cancel()
        if self._tunnel is not None:
            self._tunnel.cancel()
        self._drop_prefilling()
        self._close_leg("cancelled")
        if self._dispatch.poison.watching:
            whole = outcome == "complete" or (outcome == "engine_error" and self._reply.status < 500)
            self._dispatch.poison.closed(self, whole=whole)
        self._home.closed(self, outcome)
        self.account.over(outcome, self._reply, detail, gone=self._gone)
