"""Audits: whether KV that goes from one instance to another gives the answer that it should (``kv.audit``).

    a request with prefill ends ──share──▶ waits ──calm──▶ decode alone ─▶ prefill's leg, decode's leg ─▶ compared
                                             └─ not in time, no room, busy: counted, and nothing else

Belongs here: which requests are audited, when, and the three requests of an audit. Does not belong here: their bodies and
what is compared (``api.audited``), counting (``observing``).

Laws
1. No client waits for an audit. It begins after its client's answer has ended, asks engines as anybody would, and nothing
   that becomes of it is told of an instance: neither a failure nor load.
2. One at a time, ``MAX_WAITING`` wait, each for ``WAIT_S`` at most. Decode alone takes ``RUN_S`` at most, and so does what
   follows. The first log probabilities that an engine gives take ``WARM_S`` at most: it compiles a function for them. What
   is given up until then counts as ``warming``, which says nothing against anybody.
3. Audits are the first to go: none begins, and the one that runs ends, where requests wait in this router, where it drains
   or where engines die of requests; none begins where the pair's engines have work waiting.
4. Every request that was chosen is counted once: what was found, or why nothing was.
"""

from __future__ import annotations

import logging
import math
import random
import secrets
from collections import deque
from collections.abc import Callable
from typing import Final

from xpyd_sidecar.contract import legs
from xpyd_sidecar.contract.ids import Attempt, Incarnation, InstanceName, Role, TransferId
from xpyd_sidecar.router.api import audited, bodies
from xpyd_sidecar.router.api.faults import FailureKind, FailureReason
from xpyd_sidecar.router.api.paths import PATHS
from xpyd_sidecar.router.fleet.member import EngineTarget, Pair
from xpyd_sidecar.router.fleet.roster import Roster
from xpyd_sidecar.router.http.wire import request_bytes
from xpyd_sidecar.router.serving.waiting import InFlightRequest
from xpyd_sidecar.router.upstream.call import Sink, UpstreamCall
from xpyd_sidecar.router.upstream.pool import CancelNotices, EnginePool

logger = logging.getLogger(__name__)

MAX_WAITING: Final = 8
WAIT_S: Final = 60.0
RUN_S: Final = 60.0
WARM_S: Final = 600.0
MAX_WARM: Final = 4096
"""Engines that are known to have compiled it. When there are more, all are forgotten: that costs patience alone."""
MOST_KV: Final = 0.9
"""Share of decode's cache in use, from which on it has no room for audits."""
_PREFILL, _HANDED, _ALONE = range(3)
"""The three requests, by the tags of their calls."""
_Rank = tuple[InstanceName, int | None]
"""What compiles by itself: an engine, or a data-parallel rank of one."""


class Audits:
    """Those of one router process."""

    def __init__(self, pool: EnginePool, notices: CancelNotices, roster: Roster, share: float, *, calm: Callable[[], bool],
                 tell: Callable[[InstanceName, InstanceName, str, float], None]) -> None:
        """``share`` of the requests with KV from prefill that are audited, 0 to 1. ``calm``: whether this router has room
        for audits now. ``tell`` hears of each request that was chosen: prefill, decode, what was found or why nothing was,
        the difference or NaN.
        """
        self.pool, self.notices = pool, notices
        self._loop, self._roster, self._calm, self._hears = pool.loop, roster, calm, tell
        self._share = share
        self._chance = random.random
        self._waiting: deque[_Audit] = deque()
        self._running: _Audit | None = None
        self._warm: dict[_Rank, Incarnation] = {}

    def __len__(self) -> int:
        """Audits that wait or run."""
        return len(self._waiting) + (self._running is not None)

    def on_over(self, one: InFlightRequest) -> None:
        """A request has ended: perhaps it is audited."""
        if self._chance() >= self._share:
            return
        handed = one.handed_over()
        if handed is None:
            return
        request, pair = handed
        if reason := audited.unfit(request):
            self._tell(pair, reason)
        elif len(self._waiting) >= MAX_WAITING:
            self._tell(pair, "full")
        else:
            self._waiting.append(_Audit(self, request, pair, self._loop.time() + WAIT_S))
            if self._running is None:  # behind the bytes of the answer, which may not have left yet
                self._loop.call_soon(self._next)

    def tick(self) -> None:
        """Called every second."""
        now = self._loop.time()
        while self._waiting and self._waiting[0].until <= now:
            self._tell(self._waiting.popleft().pair, "late")
        running = self._running
        if running is None:
            self._next()
        elif running.until <= now:
            running.end("late")
        elif not self._calm():
            running.end("busy")

    def abort(self) -> None:
        """The router stops."""
        while self._waiting:
            self._tell(self._waiting.popleft().pair, "busy")
        if self._running is not None:
            self._running.end("busy")

    def warm(self, one: EngineTarget) -> bool:
        """Whether an engine has given log probabilities in this life, as far as is known here."""
        return self._warm.get((one.instance, one.dp_rank)) == one.incarnation

    def mark_warm(self, one: EngineTarget) -> None:
        """Note that an engine has given log probabilities in this life."""
        if len(self._warm) >= MAX_WARM:
            self._warm.clear()
        self._warm[one.instance, one.dp_rank] = one.incarnation

    def on_ended(self, pair: Pair, result: str, difference: float) -> None:
        """The audit that ran is over. ``difference``: NaN where nothing was found."""
        self._running = None
        self._tell(pair, result, difference)
        if self._waiting:
            self._loop.call_soon(self._next)

    def _next(self) -> None:
        if self._running is not None or not self._calm():
            return
        for _ in range(len(self._waiting)):
            one = self._waiting.popleft()
            if self._idle(one.pair):
                self._running = one
                one.begin()
                return
            self._waiting.append(one)

    def _idle(self, pair: Pair) -> bool:
        """Whether the engines of a pair are there, the same as then, with nothing waiting."""
        roster, prefill = self._roster, pair.prefill
        assert prefill is not None
        first, second = (roster.find(one.instance, one.incarnation) for one in (prefill, pair.decode))
        if first is None or second is None or not (first.pickable and second.pickable):
            return False  # they may come back before it is too late
        return not first.load.waiting and second.load.waiting <= 1 and second.load.kv_usage < MOST_KV

    def _tell(self, pair: Pair, result: str, difference: float = math.nan) -> None:
        assert pair.prefill is not None
        self._hears(pair.prefill.instance, pair.decode.instance, result, difference)


class _Audit(Sink):
    """One that waits or runs, for so long."""

    def __init__(self, audits: Audits, request: bodies.GenerationRequest, pair: Pair, until: float) -> None:
        self._audits = audits
        self.pair, self.until = pair, until
        self._api = request.api
        self._fields, self._shown = bodies.one_token(request), audited.SHOWN[request.api]
        self._transfer = TransferId(secrets.token_hex(16))
        self._calls: dict[int, UpstreamCall] = {}
        self._alone: audited.TokenProbabilities | None = None
        self._handed: audited.TokenProbabilities | None = None
        self._warming = False

    def begin(self) -> None:
        """Have decode compute the prompt. First, so that nothing is held for an engine that compiles."""
        self._warming = not self._audits.warm(self.pair.decode)
        self.until = self._audits.pool.loop.time() + (WARM_S if self._warming else RUN_S)
        self._ask(_ALONE, self.pair.decode, f"{self._transfer}-alone", None)

    def _hand_over(self) -> None:
        """Have prefill compute the prompt and decode load it, as for a client."""
        self.until = self._audits.pool.loop.time() + RUN_S
        prefill, decode = self.pair.prefill, self.pair.decode
        assert prefill is not None
        peer = legs.Peer(decode.instance, decode.incarnation, decode.control)
        self._ask(_PREFILL, prefill, self._transfer, self._leg(Role.PREFILL, peer))
        self._ask(_HANDED, decode, self._transfer, self._leg(Role.DECODE, None))

    def _leg(self, role: Role, peer: legs.Peer | None) -> legs.Leg:
        return legs.Leg(legs.VERSION, role, self._transfer, Attempt(1), RUN_S, peer, RUN_S)

    def _ask(self, number: int, target: EngineTarget, salt: str, leg: legs.Leg | None) -> None:
        headers = [(b"x-request-id", b"audit-%b-%d" % (self._transfer.encode(), number)), *target.rank_headers()]
        shown = {} if number == _PREFILL else self._shown
        body = audited.body_of(self._fields | shown, f"xpyd-audit-{salt}", leg)
        pool = self._audits.pool
        call = self._calls[number] = UpstreamCall(pool, target.http, self, tag=number)
        request = request_bytes(b"POST", PATHS[self._api], target.http, headers, body)
        pool.send(call, lambda: request)

    def end(self, result: str, difference: float = math.nan) -> None:
        """It is over, however."""
        if self._warming and result in ("late", "busy"):
            result = "warming"
        calls, self._calls = self._calls, {}
        for number, call in calls.items():
            call.cancel()
            if number == _HANDED:  # the engine may not know it yet: its connector would wait
                self._audits.notices.send(self.pair.decode, self._leg(Role.DECODE, None))
        self._audits.on_ended(self.pair, result, difference)

    # ---- call.Sink

    def on_whole(self, call: UpstreamCall, body: bytes) -> None:
        """An answer."""
        del self._calls[call.tag]
        assert call.head is not None
        odds = audited.odds_of(body) if call.head.status == 200 else None
        if call.head.status != 200 or (odds is None and call.tag != _PREFILL):
            logger.info("an audit found nothing", extra={
                "transfer": self._transfer, "status": call.head.status, "address": call.address})
            self.end("failed")
        elif call.tag == _ALONE:
            self._alone, self._warming = odds, False
            self._audits.mark_warm(self.pair.decode)
            self._hand_over()
        else:
            self._handed = odds if call.tag == _HANDED else self._handed
            if not self._calls:
                self._compare()

    def on_failed(self, call: UpstreamCall, kind: FailureKind, reason: FailureReason) -> None:
        """No answer. Whether that engine lives is found out by others."""
        del self._calls[call.tag]
        logger.info("an audit failed: %s", reason.full, extra={"transfer": self._transfer, "kind": kind.value})
        self.end("failed")

    def _compare(self) -> None:
        handed, alone, prefill = self._handed, self._alone, self.pair.prefill
        assert handed is not None
        assert alone is not None
        assert prefill is not None
        difference = audited.difference(handed, alone)
        differs = difference > audited.NEAR_TIE
        logger.log(logging.WARNING if differs else logging.DEBUG, "an audit: log probabilities differ by %.2g", difference,
                   extra={"transfer": self._transfer, "prefill": prefill.instance, "decode": self.pair.decode.instance})
        self.end("differs" if differs else "equal", difference)
