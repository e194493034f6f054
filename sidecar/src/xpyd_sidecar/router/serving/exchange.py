"""The life of one request: its legs, its attempts, and what the client gets. Pure: events in, instructions out.

                   ┌── prefill fails, another is there: attempt + 1, decode keeps waiting ──┐
                   ▼                                                                        │
    start ──▶ both legs open ──────────────────────────────────────────────────────────────┤
                │   │  ▲                                                                    │
                │   │  └── decode fails before its first byte: both anew, attempt + 1       │
                │   ├── no prefill left: decode anew, alone (or 503)                        │
                │   └── prefill refuses the request (4xx): decode anew, alone, and judges   │
                ▼                                                                           ▼
      first event of the stream ─▶ relaying ─▶ [DONE] ─▶ over          deadline, engine's 4xx, nobody left
                                     │  ▲                               ─▶ refused ─▶ over
                        decode fails ▼  │ first new event
                                  both anew, behind what the client has (Resume); where that cannot be:
                                  broken off with an error event ─▶ over
      whole answer ─▶ passed on ─▶ over

Laws
  1. The client gets at most one answer: one of Pass, Refuse, Relay … Complete, Relay … Break.
  2. Nothing reaches the client before Relay or Pass. Until then every leg can be replaced by one that does the same;
     after Relay by one that goes on behind what the client has, if the stream has a ``course``; after Pass by none.
  3. At most one prefill leg and one decode leg are open. A leg ends once: by its own event or by Cancel.
  4. Over is the last instruction, given once, when no leg is open.
  5. Attempts grow with every pair and every prefill leg sent; legs and time are bounded by ``RequestLimits``, legs between
     two first events. What an engine says that lives is retried within the budget of all requests.
  6. An event of a leg that is not open changes nothing. One whose instance leaves is given up only for another one.
  7. Prefill's leg may begin the client's stream, with the one token that it has; decode's leg goes on behind it.
  8. A stream whose finish reason the client has is never asked for again if its tail can be made here.
  9. What this process lacks (a file, a port) is no instance's failure: nobody else is asked, and the request ends.
"""

from __future__ import annotations

import math

import msgspec

from xpyd_sidecar.contract import legs
from xpyd_sidecar.contract.ids import Attempt, InstanceName, Role, TransferId
from xpyd_sidecar.router.api.faults import HttpFault, refuses_request, unavailable, upstream
from xpyd_sidecar.router.fleet.target import EngineTarget, Pair
from xpyd_sidecar.router.serving import instructions as mv
from xpyd_sidecar.router.serving.exchange_inputs import Boundless, Course, Picks, RequestLimits, RetryAllowance
from xpyd_sidecar.router.stream.failures import GONE, FailureKind, FailureReason

MAX_REFUSALS = 8
"""Refused connections of one request that do not count as legs: those engines never saw it."""


class _Open(msgspec.Struct):
    leg: int
    target: EngineTarget
    begun: bool = False


class Exchange:
    """One request. ``handle`` is the only method that changes it."""

    __slots__ = ("_alone", "_answered", "_bad_decodes", "_bad_prefills", "_begun", "_budget", "_course", "_decode",
                 "_decode_tries", "_decodes_sent", "_detail", "_errors_retried", "_legs", "_limits", "_linger_at", "_over",
                 "_pair_at", "_picks", "_prefill", "_prefill_tries", "_prefills_sent", "_refusals",
                 "_request_at", "_spoken", "_whole_at", "_without", "attempt", "continued", "refused", "transfer")

    def __init__(self, transfer: TransferId, picks: Picks, limits: RequestLimits, *, alone: bool = False,
                 now: float, course: Course | None = None, budget: RetryAllowance | None = None) -> None:
        """``alone``: decode does all of it. ``course``: None where the answer cannot, or shall not, go on elsewhere."""
        self.transfer = transfer
        self._course = course
        self._budget = budget or Boundless()
        self._picks = picks
        self._limits = limits
        self._without = self._alone = alone
        self._request_at = now + limits.request_s
        self._pair_at = math.inf
        """Until then another prefill may be asked."""
        self._whole_at = math.inf
        """Until then prefill may take its time."""
        self._linger_at = math.inf
        self._prefill: _Open | None = None
        self._decode: _Open | None = None
        self._legs = self._prefills_sent = self._decodes_sent = 0
        self._prefill_tries = self._decode_tries = 0
        self._errors_retried = self._refusals = 0
        self._bad_prefills: set[InstanceName] = set()
        self._bad_decodes: set[InstanceName] = set()
        self._begun = False
        """The client has a response head, and part of a stream."""
        self._spoken = False
        """That part is prefill's token."""
        self._answered = self._detail = ""
        self._over = False
        self.attempt = 0
        self.refused = False
        """Prefill said that the request is wrong, and decode was left to judge it alone."""
        self.continued = 0
        """How often the stream went on elsewhere."""

    @property
    def deadline(self) -> float:
        """When ``DeadlinePassed`` is due."""
        if self._over:
            return math.inf
        return min(self._request_at, self._whole_at, self._linger_at) if not self._answered else self._linger_at

    @property
    def over(self) -> bool:
        """Whether ``RequestOver`` has been given."""
        return self._over

    @property
    def retries(self) -> int:
        """Legs sent beyond the first pair."""
        return max(0, self._prefills_sent - 1) + max(0, self._decodes_sent - 1)

    def start(self, now: float) -> list[mv.Instruction]:
        """The first legs, or a refusal."""
        return self._close(self._send_pair(now))

    def started(self, pair: Pair, now: float) -> list[mv.Instruction]:
        """The same with a pair that was picked already."""
        return self._close(self._send(pair, now))

    def handle(self, event: mv.Event, now: float) -> list[mv.Instruction]:
        """What follows from an event."""
        if self._over:
            return []
        if isinstance(event, mv.ClientGone):
            out = [] if self._answered else self._answer("client_gone", [])
            return self._close(out + self._cancel_all())
        if isinstance(event, mv.DeadlinePassed):
            return self._close(self._on_time(now))
        if isinstance(event, mv.RouterStops):
            out = [] if self._answered else self._cut_off("stopped", unavailable(event.reason))
            return self._close(out + self._cancel_all())
        if isinstance(event, mv.Condemned):
            out = [] if self._answered else self._cut_off(event.fault.outcome, event.fault)
            return self._close(out + self._cancel_all())
        if isinstance(event, mv.AttemptLeaves):
            return self._close(self._on_leaving(event, now))
        if self._decode is not None and event.leg == self._decode.leg:
            return self._close(self._on_decode(event, self._decode, now))
        if self._prefill is not None and event.leg == self._prefill.leg:
            return self._close(self._on_prefill(event, self._prefill, now))
        return []

    # ---- decode

    def _on_decode(self, event: mv.LegEvent, leg: _Open, now: float) -> list[mv.Instruction]:
        match event:
            case mv.Begun() if not leg.begun:
                return self._decode_begun(leg)
            case mv.AttemptEnded(failure=failure) if self._begun:
                self._decode = None
                return self._answer("failed" if failure else "ok", [mv.Complete()], now, failure)
            case mv.Answered(status=status, aborted=False) if status < 500 and not self._begun:
                self._decode = None
                if status < 400:
                    return self._answer("ok", [mv.Pass(leg.leg)], now)
                return self._answer("client_error", [mv.Pass(leg.leg)]) + self._cancel_all()
            case mv.Answered(status=status, aborted=False) if not self._begun:
                return self._decode_erred(leg, status, now)
            case mv.Answered(status=status, aborted=False):
                reason = FailureReason(f"it answered {status} instead of going on")
                return self._decode_failed(leg, FailureKind.BROKEN, reason, now)
            case mv.Answered():
                return self._decode_failed(leg, FailureKind.ABORTED, FailureReason("the engine aborted the request"), now)
            case mv.AttemptFailed(kind=kind, reason=reason):
                return self._decode_failed(leg, kind, reason, now)
            case _:
                return []

    def _decode_begun(self, leg: _Open) -> list[mv.Instruction]:
        leg.begun = True
        self._whole_at = math.inf
        if self._begun and not self._spoken:
            self.continued += 1
        self._begun, self._spoken = True, False
        # It got further than what failed before: those may be tried again.
        self._decode_tries = self._prefill_tries = 1
        self._bad_decodes.clear()
        self._bad_prefills.clear()
        self._alone = self._without
        return [mv.Relay(leg.leg)]

    def _decode_erred(self, leg: _Open, status: int, now: float) -> list[mv.Instruction]:
        # The engine lives and says no. Elsewhere once; otherwise its own words are the best answer.
        self._decode = None
        self._bad_decodes.add(leg.target.instance)
        if self._errors_retried < self._limits.error_retries and self._may_retry(FailureKind.ABORTED, now):
            self._errors_retried += 1
            again = self._send_pair_elsewhere(now)
            if again is not None:
                return again
        words = f"decode instance {leg.target.instance} answered {status}"
        return self._answer("failed", [mv.Pass(leg.leg)], detail=words) + self._cancel_all()

    def _decode_failed(self, leg: _Open, kind: FailureKind, reason: FailureReason, now: float) -> list[mv.Instruction]:
        self._decode = None
        self._bad_decodes.add(leg.target.instance)
        why = reason.of(f"decode instance {leg.target.instance}")
        if self._begun:
            self._spoken = False
            tail = self._course.tail() if self._course is not None else None
            if tail is not None:
                return self._answer("ok", [mv.Complete(tail)]) + self._cancel_all()
            if self._course is None or kind is FailureKind.DIFFERS or not self._course.goes_on:
                return self._cut_off("broken", upstream(why.said), why.full) + self._cancel_all()
        if kind is FailureKind.LACKING:
            return self._cut_off("broken" if self._begun else "unavailable", unavailable(reason.said)) + self._cancel_all()
        if kind is FailureKind.REFUSED and self._refusals < MAX_REFUSALS:
            self._refusals += 1
            self._decode_tries -= 1  # it never saw the leg
        last = leg.target.instance if self._begun or self._refusals else None
        again = self._send_pair_elsewhere(now, last) if self._may_retry(kind, now) else None
        if again is not None:
            return again
        fault = unavailable(why.said) if kind is FailureKind.REFUSED else upstream(why.said)
        return self._cut_off("broken" if self._begun else "failed", fault, why.full) + self._cancel_all()

    def _may_retry(self, kind: FailureKind, now: float) -> bool:
        # The budget is for engines that live and fail. One death costs each of its requests one retry, however many there
        # are, and so does the first break of a stream: the front end of a dead engine may live on and say so.
        if self._decode_tries >= (self._limits.stream_legs if self._begun else self._limits.decode_legs):
            return False
        return kind in GONE or (self._begun and self._decode_tries == 1) or self._budget.may_retry(now)

    def _send_pair_elsewhere(self, now: float, last: InstanceName | None = None) -> list[mv.Instruction] | None:
        # Prefill's KV went to the decode instance that failed: its leg is of no use any more.
        pair = self._picks.pair(alone=self._alone, not_prefill=self._bad_prefills, not_decode=self._bad_decodes)
        if pair is None and last is not None:
            # All have failed, some with a broken connection alone: rather any of those than nobody, but not the last one.
            pair = self._picks.pair(alone=self._alone, not_prefill=self._bad_prefills, not_decode={last})
        if pair is None:
            return None
        cancelled = self._cancel_all()
        if self._begun:
            cancelled.append(mv.Resume())
        return cancelled + self._send(pair, now)

    def _on_leaving(self, event: mv.AttemptLeaves, now: float) -> list[mv.Instruction]:
        """Go elsewhere while the leg still runs, if that loses nothing; otherwise it may end by itself in time.

        Prefill legs are short and stay. A stream with its finish reason needs nobody else.
        """
        leg = self._decode
        most = self._limits.stream_legs if self._begun else self._limits.decode_legs
        if leg is None or event.leg != leg.leg or self._answered or self._decode_tries >= most:
            return []
        if self._begun and (self._course is None or not self._course.goes_on or self._course.tail() is not None):
            return []
        pair = self._picks.pair(alone=self._alone, not_prefill=self._bad_prefills,
                                not_decode={*self._bad_decodes, leg.target.instance})
        if pair is None or (pair.prefill is None and not self._alone and self._limits.on_no_prefill == "reject"):
            return []
        self._spoken = False
        cancelled = self._cancel_all()
        if self._begun:
            cancelled.append(mv.Resume())
        return cancelled + self._send(pair, now)

    # ---- prefill

    def _on_prefill(self, event: mv.LegEvent, leg: _Open, now: float) -> list[mv.Instruction]:
        match event:
            case mv.Begun() if not self._begun and not self._answered and self._course is not None:
                # Its token is decode's first one, which decode's stream is compared with.
                self._begun = self._spoken = True
                return [mv.Relay(leg.leg)]
            case mv.AttemptEnded() | mv.Answered(status=200, aborted=False):
                self._prefill = None
                self._whole_at = math.inf
                return []
            case mv.Answered(status=status) if refuses_request(status) and not self._begun and not self._answered:
                return self._prefill_refused(leg, status, now)
            case mv.Answered(status=status):
                reason = FailureReason(f"prefill instance {leg.target.instance} answered {status}")
                return self._prefill_failed(leg, reason, now)
            case mv.AttemptFailed(kind=kind, reason=reason):
                if kind is FailureKind.LACKING and not (self._begun or self._answered):
                    self._prefill = None
                    return self._cut_off("unavailable", unavailable(reason.said)) + self._cancel_all()
                why = reason.of(f"prefill instance {leg.target.instance}")
                return self._prefill_failed(leg, why, now, gone=kind in GONE)
            case _:
                return []

    def _prefill_refused(self, leg: _Open, status: int, now: float) -> list[mv.Instruction]:
        # Who answers the request judges it: a tool parser, say, may be decode's alone. Another prefill refuses it, too.
        self._prefill = None
        if self._decode is None or self._decode.target.p2p or self._limits.on_no_prefill == "reject":
            return self._answer("client_error", [mv.Pass(leg.leg)]) + self._cancel_all()
        self.refused = True
        return self._decode_alone(FailureReason(f"prefill instance {leg.target.instance} answered {status}"), now)

    def _prefill_failed(self, leg: _Open, why: FailureReason, now: float, *, gone: bool = False) -> list[mv.Instruction]:
        self._prefill = None
        self._bad_prefills.add(leg.target.instance)
        if self._answered or self._decode is None or self._decode.begun:
            return []  # decode has what it needs, or its own failure tells
        left = self._pair_at - now
        if self._prefill_tries < self._limits.prefill_legs and left > 0 and (gone or self._budget.may_retry(now)):
            target = self._picks.prefill_for(self._decode.target, self._bad_prefills)
            if target is not None:
                self.attempt += 1
                return [self._send_prefill(target, self._decode.target, left, min(self._whole_at, self._request_at) - now)]
        return self._decode_alone(why, now)

    def _decode_alone(self, why: FailureReason, now: float) -> list[mv.Instruction]:
        assert self._decode is not None
        decode = self._decode.target
        cancelled = self._cancel_all()
        self._whole_at = math.inf
        if self._limits.on_no_prefill == "reject" or decode.p2p:
            return cancelled + self._cut_off("broken" if self._begun else "failed", unavailable(why.said), why.full)
        self._alone = True
        if self._begun:
            cancelled.append(mv.Resume())
        return cancelled + self._send(Pair(decode, None), now)

    # ---- both

    def _send_pair(self, now: float) -> list[mv.Instruction]:
        pair = self._picks.pair(alone=self._alone)
        if pair is None:
            reason = self._picks.why_not(Role.DECODE)
            return self._answer("unavailable", [mv.RefuseClient(unavailable(reason))], detail=reason)
        return self._send(pair, now)

    def _send(self, pair: Pair, now: float) -> list[mv.Instruction]:
        if pair.prefill is None:
            if not self._alone and self._limits.on_no_prefill == "reject":
                reason = self._picks.why_not(Role.PREFILL)
                return self._cut_off("broken" if self._begun else "unavailable", unavailable(reason))
            return [self._send_decode(pair.decode, None)]
        self.attempt += 1
        self._pair_at = now + self._limits.pair_s
        # An engine of the older protocol waits for its prefill without a deadline of its own.
        self._whole_at = self._pair_at if pair.decode.p2p else now + self._limits.prefill_s
        limit = min(self._whole_at, self._request_at) - now
        return [self._send_prefill(pair.prefill, pair.decode, self._limits.pair_s, limit),
                self._send_decode(pair.decode, self._params(Role.DECODE, self._limits.pair_s, limit, None))]

    def _send_prefill(self, target: EngineTarget, decode: EngineTarget, left: float, limit: float) -> mv.SendAttempt:
        self._legs += 1
        self._prefills_sent += 1
        self._prefill_tries += 1
        self._prefill = _Open(self._legs, target)
        peer = legs.Peer(decode.instance, decode.incarnation, decode.control)
        return mv.SendAttempt(self._legs, Role.PREFILL, target, self._params(Role.PREFILL, left, limit, peer))

    def _send_decode(self, target: EngineTarget, params: legs.Leg | None) -> mv.SendAttempt:
        self._legs += 1
        self._decodes_sent += 1
        self._decode_tries += 1
        self._decode = _Open(self._legs, target)
        return mv.SendAttempt(self._legs, Role.DECODE, target, params)

    def _params(self, role: Role, left: float, limit: float, peer: legs.Peer | None) -> legs.Leg:
        return legs.Leg(legs.VERSION, role, self.transfer, Attempt(self.attempt), round(left, 3), peer, round(limit, 3))

    def _on_time(self, now: float) -> list[mv.Instruction]:
        if self._answered:
            return self._cancel_all() if now >= self._linger_at else []
        if now >= self._request_at:
            words = f"the request took longer than {self._limits.request_s:g} s"
            return self._cut_off("timeout", upstream(words, 504)) + self._cancel_all()
        if now >= self._whole_at:
            self._whole_at = math.inf
            if self._prefill is not None and self._decode is not None:
                name = self._prefill.target.instance
                bound = self._limits.pair_s if self._decode.target.p2p else self._limits.prefill_s
                why = FailureReason(f"prefill instance {name} did not finish within {bound:g} s")
                return self._decode_alone(why, now)
        return []

    def _answer(self, outcome: str, last: list[mv.Instruction], now: float | None = None,
                detail: str = "") -> list[mv.Instruction]:
        """Law 1: every way to an answer goes through here, once. With ``now``, an open prefill leg may linger."""
        assert not self._answered, f"second answer {outcome} after {self._answered}"
        self._answered, self._detail = outcome, detail
        if now is not None and self._prefill is not None:
            self._linger_at = now + self._limits.linger_s
        return last

    def _cut_off(self, outcome: str, fault: HttpFault, detail: str = "") -> list[mv.Instruction]:
        told = mv.Break(fault) if self._begun else mv.RefuseClient(fault)
        return self._answer(outcome, [told], detail=detail or fault.message)

    def _cancel_all(self) -> list[mv.Instruction]:
        out: list[mv.Instruction] = [mv.CancelAttempt(leg.leg) for leg in (self._prefill, self._decode) if leg is not None]
        self._prefill = self._decode = None
        return out

    def _close(self, out: list[mv.Instruction]) -> list[mv.Instruction]:
        if self._answered and self._prefill is None and self._decode is None:
            self._over = True
            self._course = None  # it may hold this exchange: so both go at once, without the collector
            del self._picks  # likewise
            out.append(mv.RequestOver(self._answered, self._detail))
        return out
