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
  1. The client gets at most one answer: one of Pass, Fail, Relay … Complete, Relay … Fail.
  2. Nothing reaches the client before Relay or Pass. Until then every leg can be replaced by one that does the same;
     after Relay by one that goes on behind what the client has, if the stream may go on elsewhere; after Pass by none.
  3. At most one prefill leg and one decode leg are open. A leg ends once: by its own event or by Cancel.
  4. Over is the last instruction, given once, when no leg is open.
  5. Attempts grow with every pair and every prefill leg sent; legs and time are bounded by ``RequestLimits``, legs between
     two first events. What an engine says that lives is retried within the budget of all requests.
  6. An event of a leg that is not open changes nothing. One that stalls, or that is to move, is given up for another only.
  7. Prefill's leg may begin the client's stream, with the one token that it has; decode's leg goes on behind it.
  8. A stream whose finish reason the client has is never asked for again if its tail can be made here.
  9. What this process lacks (a file, a port) is no instance's failure: nobody else is asked, and the request ends.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Set
from typing import cast

from xpyd_sidecar.contract import legs
from xpyd_sidecar.contract.ids import Attempt, InstanceName, Role, TransferId
from xpyd_sidecar.router.api.faults import FailureKind, FailureReason, HttpFault, refuses_request, unavailable, upstream
from xpyd_sidecar.router.balance.limits import RetryBudget
from xpyd_sidecar.router.balance.picker import Selection
from xpyd_sidecar.router.fleet.member import EngineTarget, Pair
from xpyd_sidecar.router.serving import instructions as mv
from xpyd_sidecar.router.serving.role_attempts import MAX_REFUSALS, NOBODY, RoleAttempts, answer_words


class Exchange:
    """One request. ``handle`` is the only method that changes it."""

    __slots__ = ("_alone", "_answered", "_avoid", "_begun", "_budget", "_decode", "_detail", "_erred", "_limits",
                 "_linger_at", "_pair_at", "_picks", "_prefill", "_refusals", "_request_at", "_spoken", "_stream",
                 "_transfer", "_whole_at", "_without", "attempt", "continued", "deadline", "over", "refused")

    def __init__(self, transfer: TransferId, picks: Selection, limits: mv.RequestLimits, *, now: float, budget: RetryBudget,
                 alone: bool = False, stream: mv.ResumableStream | None = None,
                 avoid: Callable[[], frozenset[InstanceName]] = frozenset) -> None:
        """``alone``: decode does all of it. ``stream``: None where the answer cannot, or shall not, go on elsewhere.
        ``avoid``: instances that it must keep away from now.
        """
        self._transfer = transfer
        self._stream = stream
        self._budget = budget
        self._picks = picks
        self._avoid = avoid
        self._limits = limits
        self._without = self._alone = alone
        self._request_at = self.deadline = now + limits.request_s
        """When the request must be over; and when ``DeadlinePassed`` is due."""
        self._pair_at = math.inf
        """Until then another prefill may be asked."""
        self._whole_at = math.inf
        """Until then prefill may take its time."""
        self._linger_at = math.inf
        self._prefill = RoleAttempts()
        self._decode = RoleAttempts()
        self._refusals = 0
        self._erred = False
        """Another decode engine was asked because one answered 5xx."""
        self._begun = False
        """The client has a response head, and part of a stream."""
        self._spoken = False
        """That part is prefill's token."""
        self._answered = self._detail = ""
        self.over = False
        self.attempt = 0
        self.refused = False
        """Prefill said that the request is wrong, and decode was left to judge it alone."""
        self.continued = 0
        """How often the stream went on elsewhere."""

    @property
    def retries(self) -> int:
        """Legs sent beyond the first pair."""
        return max(0, self._prefill.sent - 1) + max(0, self._decode.sent - 1)

    def start(self, now: float) -> list[mv.Instruction]:
        """The first legs, or a refusal."""
        pair = self._pick(NOBODY)
        if pair is None:
            return self._close(self._fail("unavailable", unavailable(self._picks.why_not(Role.DECODE))))
        return self._close(self._send(pair, now))

    def handle(self, event: mv.Event, now: float) -> list[mv.Instruction]:
        """What follows from an event."""
        if self.over:
            return []
        prefill, decode = self._prefill.open, self._decode.open
        if type(event) not in mv.LEG_EVENTS:  # a look at a table: ``isinstance`` asks the classes of structs one by one
            return self._close(self._on_other(event, decode, now))
        event = cast("mv.LegEvent", event)
        if decode is not None and event.leg == decode.leg:
            return self._close(self._on_decode(event, decode, now))
        if prefill is not None and event.leg == prefill.leg:
            return self._close(self._on_prefill(event, prefill, now))
        return []

    def _on_other(self, event: mv.Event, decode: mv.SendAttempt | None, now: float) -> list[mv.Instruction]:
        match event:
            case mv.DeadlinePassed():
                return self._on_time(now)
            case mv.GivenUp() if self._answered:
                return self._cancel_all()
            case mv.GivenUp(outcome=outcome, fault=fault):
                if fault is None:
                    return self._answer(outcome)
                return self._answer(outcome, mv.Fail(fault), detail=fault.message)
            case mv.AttemptLeaves(leg=leg) if decode is not None and leg == decode.leg:
                return self._on_leaving(decode, now)
            case mv.AttemptStalls(leg=leg, free=free) if decode is not None and leg == decode.leg:
                return self._on_leaving(decode, now, stalls=True, free=free)
            case mv.AttemptStalls(leg=leg, free=free) if (prefill := self._prefill.open) and decode and leg == prefill.leg:
                return self._prefill_stalls(prefill, decode, now, free=free)
        return []

    # ---- decode

    def _on_decode(self, event: mv.LegEvent, leg: mv.SendAttempt, now: float) -> list[mv.Instruction]:
        match event:
            case mv.AttemptBegun():
                return [] if self._decode.begun else self._decode_begun(leg)
            case mv.AttemptEnded(failure=failure, outcome=outcome):
                self._decode.open = None
                return self._answer(outcome, mv.Complete(), lingers=now, detail=failure)
            case mv.AttemptFailed(kind=kind, reason=reason):
                return self._decode_failed(leg, kind, reason, now)
            case mv.AttemptAnswered(aborted=True):
                return self._decode_failed(leg, FailureKind.ABORTED, FailureReason("the engine aborted the request"), now)
            case mv.AttemptAnswered(status=status) if self._begun:
                reason = FailureReason(f"it answered {status} instead of going on")
                return self._decode_failed(leg, FailureKind.BROKEN, reason, now)
            case mv.AttemptAnswered(status=status) if status >= 500:
                return self._decode_erred(leg, status, now)
            case mv.AttemptAnswered(status=status):
                self._decode.open = None
                passed = mv.Pass(leg.leg)
                return self._answer("client_error", passed) if status >= 400 else self._answer("ok", passed, lingers=now)

    def _decode_begun(self, leg: mv.SendAttempt) -> list[mv.Instruction]:
        self._decode.begun = True
        self._whole_at = math.inf
        if self._begun and not self._spoken:
            self.continued += 1
        self._begun, self._spoken = True, False
        for attempts in (self._prefill, self._decode):  # it got further than what failed before: those may be tried again
            attempts.tries, attempts.bad = 1, NOBODY
        self._alone = self._without
        return [mv.Relay(leg.leg)]

    def _decode_erred(self, leg: mv.SendAttempt, status: int, now: float) -> list[mv.Instruction]:
        # The engine lives and says no. Elsewhere once; otherwise its own words are the best answer.
        self._decode.open = None
        self._decode.bad |= {leg.target.instance}
        again = None if self._erred else self._send_pair_elsewhere(FailureKind.ABORTED, now)
        if again is not None:
            self._erred = True
            return again
        return self._answer("failed", mv.Pass(leg.leg), detail=f"decode {answer_words(leg, status)}")

    def _decode_failed(self, leg: mv.SendAttempt, kind: FailureKind, reason: FailureReason,
                       now: float) -> list[mv.Instruction]:
        self._decode.open = None
        self._decode.bad |= {leg.target.instance}
        why = reason.with_name(f"decode instance {leg.target.instance}")
        if self._begun:
            self._spoken = False
            tail = self._stream.tail() if self._stream is not None else None
            if tail is not None:
                return self._answer("ok", mv.Complete(tail))
            if self._stream is None or kind is FailureKind.DIFFERS or not self._stream.goes_on:
                return self._fail("broken", upstream(why.said), why.full)
        if kind is FailureKind.LACKING:
            return self._fail("unavailable", unavailable(reason.said))
        if kind is FailureKind.REFUSED and self._refusals < MAX_REFUSALS:
            self._refusals += 1
            self._decode.tries -= 1  # it never saw the leg
        last = leg.target.instance if self._begun or self._refusals else None
        again = self._send_pair_elsewhere(kind, now, last)
        if again is not None:
            return again
        fault = unavailable(why.said) if kind is FailureKind.REFUSED else upstream(why.said)
        return self._fail("failed", fault, why.full)

    @property
    def _exhausted(self) -> bool:
        """Whether decode was asked as often as it may be."""
        return self._decode.tries >= (self._limits.stream_legs if self._begun else self._limits.decode_legs)

    def _send_pair_elsewhere(self, kind: FailureKind, now: float,
                             last: InstanceName | None = None) -> list[mv.Instruction] | None:
        """Both legs anew; None: nobody is left, or no more may be asked. The budget pays for what is sent, nothing else."""
        if self._exhausted:
            return None
        pair = self._pick(self._decode.bad)
        if pair is None and last is not None:
            # All have failed, some with a broken connection alone: rather any of those than nobody, but not the last one.
            pair = self._pick(frozenset({last}))
        # The budget is for engines that live and fail. One death costs each of its requests one retry, however many there
        # are, and so does the first break of a stream: the front end of a dead engine may live on and say so.
        free = kind.gone or (self._begun and self._decode.tries == 1)
        return self._anew(pair, now) if pair is not None and (free or self._budget.may_retry(now)) else None

    def _on_leaving(self, leg: mv.SendAttempt, now: float, *, stalls: bool = False,
                    free: bool = False) -> list[mv.Instruction]:
        # Go elsewhere while the leg still runs, if that loses nothing; otherwise it may end by itself in time. Prefill legs
        # are short and stay. A stream with its finish reason needs nobody else.
        if self._answered or self._exhausted:
            return []
        if self._begun and (self._stream is None or not self._stream.goes_on or self._stream.tail() is not None):
            return []
        pair = self._pick(self._decode.bad | {leg.target.instance})
        if pair is None or (pair.prefill is None and not self._alone and self._limits.on_no_prefill == "reject"):
            return []
        if stalls:
            if not free and not self._budget.may_retry(now):
                return []
            self._decode.bad |= {leg.target.instance}
        self._spoken = False
        return self._anew(pair, now)

    # ---- prefill

    def _on_prefill(self, event: mv.LegEvent, leg: mv.SendAttempt, now: float) -> list[mv.Instruction]:
        match event:
            case mv.AttemptAnswered(status=200, aborted=False) | mv.AttemptEnded():
                self._prefill.open = None
                self._whole_at = math.inf
            case mv.AttemptBegun() if not self._begun and not self._answered and self._stream is not None:
                # Its token is decode's first one, which decode's stream is compared with.
                self._begun = self._spoken = True
                return [mv.Relay(leg.leg)]
            case mv.AttemptAnswered(status=status) if refuses_request(status) and not self._begun and not self._answered:
                return self._prefill_refused(leg, status, now)
            case mv.AttemptAnswered(status=status):
                return self._prefill_failed(leg, FailureReason(f"prefill {answer_words(leg, status)}"), now)
            case mv.AttemptFailed(kind=FailureKind.LACKING, reason=reason) if not self._begun and not self._answered:
                self._prefill.open = None
                return self._fail("unavailable", unavailable(reason.said))
            case mv.AttemptFailed(kind=kind, reason=reason):
                why = reason.with_name(f"prefill instance {leg.target.instance}")
                return self._prefill_failed(leg, why, now, gone=kind.gone)
        return []

    def _prefill_refused(self, leg: mv.SendAttempt, status: int, now: float) -> list[mv.Instruction]:
        # Who answers the request judges it: a tool parser, say, may be decode's alone. Another prefill refuses it, too.
        self._prefill.open = None
        decode = self._decode.open
        if decode is None or self._limits.on_no_prefill == "reject":
            return self._answer("client_error", mv.Pass(leg.leg))
        self.refused = True
        return self._decode_alone(decode.target, FailureReason(f"prefill {answer_words(leg, status)}"), now)

    def _prefill_failed(self, leg: mv.SendAttempt, why: FailureReason, now: float, *,
                        gone: bool = False) -> list[mv.Instruction]:
        self._prefill.open = None
        self._prefill.bad |= {leg.target.instance}
        decode = self._decode.open
        if self._answered or decode is None or self._decode.begun:
            return []  # decode has what it needs, or its own failure tells
        target = self._other_prefill(decode.target, NOBODY, now)
        if target is not None and (gone or self._budget.may_retry(now)):
            return [self._send_prefill(target, decode.target, *self._times(now))]
        return self._decode_alone(decode.target, why, now)

    def _prefill_stalls(self, leg: mv.SendAttempt, decode: mv.SendAttempt, now: float, *,
                        free: bool) -> list[mv.Instruction]:
        # Another prefill may be as busy: decode computes the prompt only where this one is known to hang.
        if self._answered or self._decode.begun or self._spoken:
            return []
        target = self._other_prefill(decode.target, {leg.target.instance}, now)
        alone = free and self._limits.on_no_prefill == "decode"
        if (target is None and not alone) or not (free or self._budget.may_retry(now)):
            return []
        why = FailureReason(f"prefill instance {leg.target.instance} is silent")
        return [mv.CancelAttempt(leg.leg, self.attempt), *self._prefill_failed(leg, why, now, gone=True)]

    def _other_prefill(self, decode: EngineTarget, but: Set[InstanceName], now: float) -> EngineTarget | None:
        if self._prefill.tries >= self._limits.prefill_legs or now >= self._pair_at:
            return None
        return self._picks.prefill_for(decode, self._avoid() | self._prefill.bad | but)

    def _decode_alone(self, decode: EngineTarget, why: FailureReason, now: float) -> list[mv.Instruction]:
        self._whole_at = math.inf
        if self._limits.on_no_prefill == "reject":
            return self._fail("failed", unavailable(why.said), why.full)
        self._alone = True
        return self._anew(Pair(decode, None), now)

    # ---- both

    def _pick(self, not_decode: frozenset[InstanceName]) -> Pair | None:
        avoid, not_prefill = self._avoid(), self._prefill.bad
        if avoid:
            not_prefill, not_decode = avoid | not_prefill, avoid | not_decode
        return self._picks.pair(alone=self._alone, not_prefill=not_prefill, not_decode=not_decode)

    def _anew(self, pair: Pair, now: float) -> list[mv.Instruction]:
        """Both legs again, behind what the client has. Prefill's KV went to the decode leg that is no more."""
        resumed: list[mv.Instruction] = [mv.Resume()] if self._begun else []
        return self._cancel_all() + resumed + self._send(pair, now)

    def _send(self, pair: Pair, now: float) -> list[mv.Instruction]:
        if pair.prefill is None:
            if not self._alone and self._limits.on_no_prefill == "reject":
                reason = self._picks.why_not(Role.PREFILL)
                return self._fail("unavailable", unavailable(reason))
            return [self._send_leg(Role.DECODE, pair.decode, None)]
        self._pair_at = now + self._limits.pair_s
        self._whole_at = self._pair_at + self._limits.load_s
        left, limit = self._times(now)
        first = self._send_prefill(pair.prefill, pair.decode, left, limit)
        decodes = legs.Leg(legs.VERSION, Role.DECODE, self._transfer, Attempt(self.attempt), left, None, limit)
        return [first, self._send_leg(Role.DECODE, pair.decode, decodes)]

    def _send_prefill(self, target: EngineTarget, decode: EngineTarget, left: float, limit: float) -> mv.SendAttempt:
        self.attempt += 1
        peer = legs.Peer(decode.instance, decode.incarnation, decode.control)
        leg = legs.Leg(legs.VERSION, Role.PREFILL, self._transfer, Attempt(self.attempt), left, peer, limit)
        return self._send_leg(Role.PREFILL, target, leg)

    def _send_leg(self, role: Role, target: EngineTarget, params: legs.Leg | None) -> mv.SendAttempt:
        attempts = self._prefill if role is Role.PREFILL else self._decode
        attempts.sent += 1
        attempts.tries += 1
        attempts.begun = False
        attempts.open = mv.SendAttempt(self._prefill.sent + self._decode.sent, role, target, params)
        return attempts.open

    def _times(self, now: float) -> tuple[float, float]:
        """What is left for a pair to find each other, and for prefill to be whole."""
        return round(self._pair_at - now, 3), round(min(self._whole_at, self._request_at) - now, 3)

    def _on_time(self, now: float) -> list[mv.Instruction]:
        if self._answered:
            return self._cancel_all() if now >= self._linger_at else []
        if now >= self._request_at:
            return self._fail("timeout", upstream(f"the request took longer than {self._limits.request_s:g} s", 504))
        if now >= self._whole_at:
            self._whole_at = math.inf
            prefill, decode = self._prefill.open, self._decode.open
            if prefill is not None and decode is not None:
                bound = f"{self._limits.prefill_s:g} s"
                why = FailureReason(f"prefill instance {prefill.target.instance} did not finish within {bound}")
                return self._decode_alone(decode.target, why, now)
        return []

    def _answer(self, outcome: str, *last: mv.Instruction, lingers: float | None = None,
                detail: str = "") -> list[mv.Instruction]:
        """Law 1: every way to an answer goes through here, once. All legs are taken back, unless prefill's may linger from
        now on (``lingers``) and end by itself.
        """
        assert not self._answered, f"second answer {outcome} after {self._answered}"
        self._answered, self._detail = outcome, detail
        if lingers is None:
            return [*last, *self._cancel_all()]
        if self._prefill.open is not None:
            self._linger_at = lingers + self._limits.linger_s
        return [*last]

    def _fail(self, outcome: str, fault: HttpFault, detail: str = "") -> list[mv.Instruction]:
        if self._begun and outcome in {"failed", "unavailable"}:
            outcome = "broken"
        return self._answer(outcome, mv.Fail(fault), detail=detail or fault.message)

    def _cancel_all(self) -> list[mv.Instruction]:
        open_ = [attempts.open.leg for attempts in (self._prefill, self._decode) if attempts.open is not None]
        self._prefill.open = self._decode.open = None
        return [mv.CancelAttempt(leg, self.attempt) for leg in open_]

    def _close(self, out: list[mv.Instruction]) -> list[mv.Instruction]:
        if not self._answered:
            self.deadline = min(self._request_at, self._whole_at)
            return out
        self.deadline = self._linger_at
        if self._prefill.open is None and self._decode.open is None:
            self.over, self.deadline = True, math.inf
            self._stream = None  # it may hold this exchange: so both go at once, without the collector
            del self._avoid  # likewise
            out.append(mv.RequestOver(self._answered, self._detail))
        return out
