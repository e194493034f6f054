"""The prefill leg of a passed request: one token, whose KV is pushed to the decode instance that answers.

    start ──▶ leg at one instance ──answered──▶ done
                │ it failed: another instance, attempt + 1, while decode waits (``pair_timeout_s`` for all of them)
                └──▶ nobody is left, or it was refused: ``Home.unprefilled``

Belongs here: sending it, and trying another. Does not belong here: the decode leg (``passed``), what is asked
(``routing.dialects``).
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from functools import partial
from typing import TYPE_CHECKING, Protocol

from xpyd_sidecar.contract import legs
from xpyd_sidecar.contract.ids import Attempt, InstanceName, Role, TransferId
from xpyd_sidecar.proxy import ids
from xpyd_sidecar.proxy.account import Account
from xpyd_sidecar.proxy.patience import Alarm
from xpyd_sidecar.proxy.poison import Suspect
from xpyd_sidecar.proxy.tunnel import Tunnel
from xpyd_sidecar.proxy.wire import Head
from xpyd_sidecar.routing.dialects import Request
from xpyd_sidecar.routing.exchange import Picks, refuses_request
from xpyd_sidecar.routing.moves import Kind
from xpyd_sidecar.routing.pick import Target
from xpyd_sidecar.routing.reason import Reason
from xpyd_sidecar.routing.record import LegRecord
from xpyd_sidecar.routing.roster import Member

if TYPE_CHECKING:
    from xpyd_sidecar.proxy.dispatch import Dispatch

logger = logging.getLogger(__name__)

MAX_TRIES = 3
"""Instances that one request's prefill leg is sent to."""


class Home(Suspect, Protocol):
    """Who waits for the KV."""

    @property
    def picks(self) -> Picks:
        """Who may serve it now."""

    def withhold(self, act: Callable[[], None]) -> None:
        """It is held: do this when it goes on."""

    def unprefilled(self, reason: str, *, refused: bool) -> None:
        """It will not come. ``refused``: since prefill says that the request is wrong."""


class Prefilling:
    """Of one request and one decode instance."""

    def __init__(self, home: Home, dispatch: Dispatch, request: Request, head: Callable[[Target, int, LegRecord], bytes], *,
                 account: Account, prefill: Target, decode: Target) -> None:
        """``head``: of the HTTP request to a target, with a body of so many bytes."""
        self._home = home
        self._dispatch = dispatch
        self._request = request
        self._head = head
        self._account = account
        self.transfer = TransferId(ids.fresh())
        self._first = prefill
        self._decode = decode
        self._peer = legs.Peer(decode.instance, decode.incarnation, decode.control)
        self._pair_s = dispatch.limits.pair_s
        self._due = dispatch.loop.time() + self._pair_s
        self._timer = Alarm(dispatch.loop, self._due, self._late)
        self._target: Target | None = None
        self._member: Member | None = None
        self._record: LegRecord | None = None
        self._tunnel: Tunnel | None = None
        self._body = b""
        self._status = 0
        self.tried: list[InstanceName] = []
        self.waits = True
        """It may still be that decode must do without."""

    def decode_body(self) -> bytes:
        """What decode is asked, now."""
        return self._request.decode_body(legs.Leg(legs.VERSION, Role.DECODE, self.transfer, Attempt(1), self._pair_s))

    def start(self) -> None:
        """Send it."""
        self._send(self._first)

    def _send(self, target: Target) -> None:
        self.tried.append(target.instance)
        left = max(0.001, self._due - self._dispatch.loop.time())
        leg = legs.Leg(legs.VERSION, Role.PREFILL, self.transfer, Attempt(len(self.tried)), left, self._peer)
        self._body, self._status = self._request.prefill_body(leg), 0
        self._target, self._member = target, self._dispatch.leg_opened(target)
        record = self._record = self._account.leg(Role.PREFILL, target.instance, len(self.tried), self.transfer)
        head = self._head(target, len(self._body), record)
        self._tunnel = Tunnel(self._dispatch.loop, target.http, head, self, framed=False, bodiless=False)

    # ---- the engine

    def on_open(self) -> None:
        """Send the body."""
        assert self._tunnel is not None
        self._tunnel.write(self._body)
        self._body = b""

    def on_full(self, full: bool) -> None:
        """The body is whole and here: the transport keeps it."""

    def on_head(self, head: Head) -> None:
        """Its status is all that counts."""
        self._status = head.status

    def on_part(self, data: bytes, body: bytes) -> None:
        """The token is nobody's."""

    def on_end(self) -> None:
        """It has answered."""
        target = self._target
        assert target is not None
        self._close_leg(f"{self._status // 100}xx")
        if self._status < 400:
            self.cancel()
            return
        reason = f"{target.instance} answered {self._status}"
        if refuses_request(self._status):
            self._give_up(reason, refused=True)  # another would refuse it as well
            return
        waits = False
        if self._status >= 500:
            waits = self._dispatch.poison.broke(self._home, target)
            self._dispatch.doubt(target)
        self._failed(reason, waits=waits)

    def on_failed(self, kind: Kind, reason: Reason, *, lost: bool = False) -> None:
        """The engine refused the connection, or broke it. ``lost``: the roster says so."""
        target = self._target
        assert target is not None
        self._close_leg(kind.value)
        waits = False
        if kind is Kind.REFUSED:
            self._dispatch.suspect(target, reason.full)
        elif kind is not Kind.LACKING:
            waits = self._dispatch.poison.broke(self._home, target, lost=lost)
            self._dispatch.doubt(target)
        if kind is Kind.LACKING:
            self._give_up(reason.full)  # another would not be reached either
        else:
            self._failed(reason.full, waits=waits)

    def _failed(self, reason: str, *, waits: bool) -> None:
        if waits:
            self._home.withhold(partial(self._next, reason))
        else:
            self._next(reason)

    # ---- the router

    def on_lost(self, instance: str, incarnation: str, reason: Reason) -> None:
        """The roster says that this incarnation will never answer."""
        target = self._target
        if self._tunnel is None or target is None:
            return
        if (target.instance, target.incarnation) == (instance, incarnation):
            self._tunnel.cancel()
            self.on_failed(Kind.LOST, reason, lost=True)

    def sweep(self, now: float, awake: float, stall_s: float) -> None:
        """Called every second: doubt an engine that is silent."""
        if self._tunnel is not None and self._target is not None and now - max(self._tunnel.last_at, awake) > stall_s:
            self._dispatch.doubt(self._target)

    def instances(self) -> Iterable[InstanceName]:
        """The one on which its leg is open."""
        return [] if self._tunnel is None or self._target is None else [self._target.instance]

    def cancel(self) -> None:
        """It is over, or nobody needs it any more."""
        self.waits = False
        self._timer.cancel()
        if self._tunnel is not None:
            self._tunnel.cancel()
        self._close_leg("cancelled")

    # ---- its course

    def _next(self, reason: str) -> None:
        if not self.waits:
            return
        logger.warning("prefill leg of a passed request failed: %s", reason,
                       extra={"transfer": self.transfer, "peer": self.tried[-1]})
        target = None
        if len(self.tried) < MAX_TRIES:
            target = self._home.picks.prefill_for(self._decode, self.tried)
        if target is None:
            self._give_up(reason)
        else:
            self._send(target)

    def _late(self) -> None:
        # Decode's own deadline is the same: it computes the prompt itself from now on.
        self.cancel()

    def _give_up(self, reason: str, *, refused: bool = False) -> None:
        self.cancel()
        self._home.unprefilled(reason, refused=refused)

    def _close_leg(self, result: str) -> None:
        self._tunnel = None
        if self._record is not None:
            self._account.shut(self._record, result)
            self._record = None
        if self._member is not None:
            self._dispatch.leg_closed(self._member)
            self._member = None
